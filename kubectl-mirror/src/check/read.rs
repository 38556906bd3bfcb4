//! Reads the facts of `check` from the API server.
//!
//! This module evaluates nothing. A failure to read is also a fact.

use std::{fmt::Debug, time::Duration};

use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, Deployment},
        authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec},
        core::v1::{Node, Pod},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    jiff::Timestamp,
    kube_aggregator::pkg::apis::apiregistration::v1::APIService,
};
use kube::{
    Api, ResourceExt as _,
    api::{ListParams, PostParams},
};
use mirror_api::{
    MirrorNode, MirrorTarget, crds,
    packets::{GROUP, VERSION},
};
use serde::de::DeserializeOwned;

use super::judge::{Facts, Read, Right, rights};
use crate::cluster::{self, Cluster};

/// Timeout for an answer of the API server.
const PATIENCE: Duration = Duration::from_secs(10);
/// The labels of the agents' pods, and of the controller's Deployment.
const AGENTS: &str = "app.kubernetes.io/component=agent";
const CONTROLLER: &str = "app.kubernetes.io/component=controller";

/// Reads all facts.
///
/// # Errors
///
/// The API server does not say its version.
pub(super) async fn facts(cluster: &Cluster) -> Read<Facts> {
    let Cluster { client, namespace, agents } = cluster;
    let server = within(client.apiserver_version()).await?.git_version;
    let all = ListParams::default();
    let [of_agents, of_controller] = [AGENTS, CONTROLLER].map(|labels| ListParams::default().labels(labels));
    let mut rights = rights(namespace);
    for right in &mut rights {
        right.is_granted = is_granted(cluster, right).await;
    }
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
        pods: list(cluster.of_agents::<Pod>(), &of_agents).await,
        packets: within(cluster.all::<APIService>().get_opt(&format!("{VERSION}.{GROUP}"))).await,
    })
}

async fn within<T>(answer: impl Future<Output = kube::Result<T>>) -> Read<T> {
    cluster::within(PATIENCE, answer).await
}

/// The objects of a kind. An unknown kind has no objects.
async fn list<K: Clone + Debug + DeserializeOwned>(api: Api<K>, params: &ListParams) -> Read<Vec<K>> {
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

/// Whether the user has this right.
async fn is_granted(cluster: &Cluster, right: &Right) -> Read<bool> {
    let [group, resource, verb] = [right.group, right.resource, right.verb].map(|text| Some(text.to_owned()));
    let namespace = right.namespace.clone();
    let asked = ResourceAttributes { group, resource, verb, namespace, ..Default::default() };
    let spec = SelfSubjectAccessReviewSpec { resource_attributes: Some(asked), ..Default::default() };
    let review = SelfSubjectAccessReview { spec, ..Default::default() };
    let api = cluster.all::<SelfSubjectAccessReview>();
    let review = within(api.create(&PostParams::default(), &review)).await?;
    Ok(review.status.is_some_and(|status| status.allowed))
}
