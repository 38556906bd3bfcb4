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
pub(super) async fn facts(cluster: &Cluster) -> Facts {
    let Cluster { client, namespace, agents } = cluster;
    let server = within(client.apiserver_version()).await.map(|info| info.git_version);
    let all = ListParams::default();
    let mut facts = Facts {
        plugin: env!("CARGO_PKG_VERSION"),
        agents: agents.clone(),
        now: Timestamp::now(),
        nodes: none(),
        daemon_sets: none(),
        crds: none(),
        rights: Vec::new(),
        installed: none(),
        pods: none(),
        controllers: none(),
        reports: none(),
        targets: none(),
        answers: None,
        server,
    };
    if facts.server.is_err() {
        return facts;
    }
    facts.nodes = list(&Api::<Node>::all(client.clone()), &all).await;
    facts.daemon_sets = list(&Api::<DaemonSet>::all(client.clone()), &all).await;
    facts.crds = installed_crds(cluster).await;
    for asked in asked(namespace, agents) {
        let allowed = is_allowed(cluster, &asked).await;
        facts.rights.push(Right { asked, missing: allowed });
    }
    let of_agents = ListParams::default().labels(AGENTS);
    facts.installed = list(&Api::<DaemonSet>::namespaced(client.clone(), agents), &of_agents).await;
    facts.pods = list(&Api::<Pod>::namespaced(client.clone(), agents), &of_agents).await;
    let of_controller = ListParams::default().labels(CONTROLLER);
    facts.controllers = list(&Api::<Deployment>::namespaced(client.clone(), agents), &of_controller).await;
    facts.reports = list(&Api::<MirrorNode>::all(client.clone()), &all).await;
    facts.targets = list(&Api::<MirrorTarget>::all(client.clone()), &all).await;
    let may_ask =
        facts.rights.iter().any(|right| right.asked.is_for_answers && right.missing == Ok(Vec::new()));
    let are_there = facts.pods.as_ref().is_ok_and(|pods| !pods.is_empty());
    if may_ask && are_there {
        // The error would be a missing right, or that there is no agent: other facts cover both.
        facts.answers = nodes::ask(cluster, None).await.ok();
    }
    facts
}

fn none<T>() -> Read<Vec<T>> {
    Ok(Vec::new())
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
async fn list<K>(api: &Api<K>, params: &ListParams) -> Read<Vec<K>>
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
    let api = Api::<CustomResourceDefinition>::all(cluster.client.clone());
    let mut found = Vec::new();
    for crd in crds() {
        found.extend(within(api.get_opt(&crd.name_any())).await?);
    }
    Ok(found)
}

/// The verbs that the user lacks.
async fn is_allowed(cluster: &Cluster, asked: &Asked) -> Read<Vec<&'static str>> {
    let api = Api::<SelfSubjectAccessReview>::all(cluster.client.clone());
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
