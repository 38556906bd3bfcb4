//! Reads the facts of `check`: from the API server, and from the agents if the user has the right to ask them.
//!
//! This module evaluates nothing. A failure to read is also a fact.

use std::{future::Future, time::Duration};

use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, Deployment},
        authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec},
        core::v1::{Node, Pod},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    jiff::Timestamp,
};
use kube::{
    Api, ResourceExt as _,
    api::{ListParams, PostParams},
};
use mirror_api::{MirrorNode, MirrorTarget, crds};
use tokio::time::timeout;

use super::judge::{Asked, Facts, Read, Right, Unread, asked};
use crate::{
    agents::AGENTS,
    cluster::{Cluster, is_refusal},
    nodes,
};

/// Timeout for an answer of the API server.
const PATIENCE: Duration = Duration::from_secs(10);
/// The label of the controller's Deployment.
const CONTROLLER: &str = "app.kubernetes.io/component=controller";

/// Reads all facts; the agents are asked last.
///
/// # Errors
///
/// The API server does not say its version.
pub(super) async fn facts(cluster: &Cluster) -> Read<Facts> {
    let Cluster { client, namespace, agents } = cluster;
    let server = within(client.apiserver_version()).await?.git_version;
    let all = ListParams::default();
    let [of_agents, of_controller] = [AGENTS, CONTROLLER].map(|labels| ListParams::default().labels(labels));
    let mut rights = Vec::new();
    for asked in asked(namespace, agents) {
        let missing = lacking(cluster, &asked).await;
        rights.push(Right { asked, missing });
    }
    let is_exec = |asked: &Asked| asked.subresource == Some("exec");
    let may_ask = rights.iter().any(|right| is_exec(&right.asked) && right.missing == Ok(Vec::new()));
    let pods = list(cluster.of_agents::<Pod>(), &of_agents).await;
    Ok(Facts {
        plugin: env!("CARGO_PKG_VERSION"),
        agents: agents.clone(),
        now: Timestamp::now(),
        server,
        nodes: list(cluster.all::<Node>(), &all).await,
        daemon_sets: list(cluster.all::<DaemonSet>(), &all).await,
        crds: installed_crds(cluster).await,
        rights,
        installed: list(cluster.of_agents::<DaemonSet>(), &of_agents).await,
        controllers: list(cluster.of_agents::<Deployment>(), &of_controller).await,
        reports: list(cluster.all::<MirrorNode>(), &all).await,
        targets: list(cluster.all::<MirrorTarget>(), &all).await,
        answers: match may_ask && pods.as_ref().is_ok_and(|pods| !pods.is_empty()) {
            // The error would be a missing right, or that there is no agent: other facts cover both.
            true => nodes::ask(cluster, None).await.ok(),
            false => None,
        },
        pods,
    })
}

async fn within<T>(answer: impl Future<Output = kube::Result<T>>) -> Read<T> {
    match timeout(PATIENCE, answer).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => {
            Err(Unread { is_refused: is_refusal(&error), why: mirror_client::in_words(&error) })
        }
        Err(_) => {
            Err(Unread { is_refused: false, why: format!("no answer within {} s", PATIENCE.as_secs()) })
        }
    }
}

/// The objects of a kind. An unknown kind has no objects.
async fn list<K>(api: Api<K>, params: &ListParams) -> Read<Vec<K>>
where
    K: kube::Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let listed = async {
        match api.list(params).await {
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(Vec::new()),
            listed => listed.map(|list| list.items),
        }
    };
    within(listed).await
}

async fn installed_crds(cluster: &Cluster) -> Read<Vec<CustomResourceDefinition>> {
    let api = cluster.all::<CustomResourceDefinition>();
    let mut found = Vec::new();
    for crd in crds() {
        found.extend(within(api.get_opt(&crd.name_any())).await?);
    }
    Ok(found)
}

/// The verbs that the user lacks.
async fn lacking(cluster: &Cluster, asked: &Asked) -> Read<Vec<&'static str>> {
    let api = cluster.all::<SelfSubjectAccessReview>();
    let mut missing = Vec::new();
    for verb in asked.verbs {
        let attributes = ResourceAttributes {
            group: Some(asked.group.to_owned()),
            resource: Some(asked.resource.to_owned()),
            subresource: asked.subresource.map(str::to_owned),
            namespace: asked.namespace.clone(),
            verb: Some((*verb).to_owned()),
            ..ResourceAttributes::default()
        };
        let spec =
            SelfSubjectAccessReviewSpec { resource_attributes: Some(attributes), ..Default::default() };
        let review = SelfSubjectAccessReview { spec, ..Default::default() };
        let review = within(api.create(&PostParams::default(), &review)).await?;
        if !review.status.is_some_and(|status| status.allowed) {
            missing.push(*verb);
        }
    }
    Ok(missing)
}
