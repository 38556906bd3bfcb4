//! Workloads: what was typed, and which pods the cluster selects for it.
//!
//! A workload is resolved to its selector and not to its pods, so pods that come later are meant, too. The commands call it.

use std::{fmt, str::FromStr};

use anyhow::{Context as _, bail};
use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, Deployment, ReplicaSet, StatefulSet},
        batch::v1::Job,
        core::v1::{Pod, Service},
    },
    apimachinery::pkg::apis::meta::v1::LabelSelector,
};
use kube::{Api, core::NamespaceResourceScope};
use serde::de::DeserializeOwned;

use crate::{cli::Which, cluster::Cluster};

/// The kinds, each with the words for it.
const KINDS: [(Kind, &[&str]); 7] = [
    (Kind::Pod, &["pod", "pods", "po"]),
    (Kind::Deployment, &["deploy", "deployment", "deployments"]),
    (Kind::StatefulSet, &["sts", "statefulset", "statefulsets"]),
    (Kind::DaemonSet, &["ds", "daemonset", "daemonsets"]),
    (Kind::ReplicaSet, &["rs", "replicaset", "replicasets"]),
    (Kind::Job, &["job", "jobs"]),
    (Kind::Service, &["svc", "service", "services"]),
];

/// A kind of workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Pod,
    Deployment,
    StatefulSet,
    DaemonSet,
    ReplicaSet,
    Job,
    Service,
}

/// A workload, as it was typed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Workload {
    pub(crate) kind: Kind,
    pub(crate) name: String,
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = KINDS.iter().find(|(kind, _)| *kind == self.kind).and_then(|(_, words)| words.first());
        write!(f, "{}/{}", word.unwrap_or(&"pod"), self.name)
    }
}

impl FromStr for Workload {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (word, name) = text.split_once('/').unwrap_or(("pod", text));
        let kind = KINDS.iter().find(|(_, words)| words.contains(&word.to_lowercase().as_str()));
        let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
        match kind {
            Some((kind, _)) if !name.is_empty() && name.chars().all(is_name) => {
                Ok(Self { kind: *kind, name: name.to_owned() })
            }
            Some(_) => Err(format!("{name:?} is no name of an object of Kubernetes")),
            None => Err(format!(
                "{word:?} is no kind that has pods of its own: use pod, deploy, sts, ds, rs, job or svc, as in deploy/web"
            )),
        }
    }
}

/// Which pods of a namespace are meant.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Selection {
    /// Those with these labels.
    pub(crate) labels: LabelSelector,
    /// Of those, the one with this name.
    pub(crate) pod: Option<String>,
}

impl Which {
    /// The pods that are meant. What does not exist is an error.
    pub(crate) async fn resolve(&self, cluster: &Cluster) -> anyhow::Result<Selection> {
        match (&self.workload, &self.selector) {
            (Some(workload), _) => workload.resolve(cluster).await,
            (None, Some(labels)) => Ok(Selection { labels: labels.0.clone(), pod: None }),
            (None, None) => bail!("name a workload, or labels with -l"),
        }
    }
}

impl Workload {
    pub(crate) async fn resolve(&self, cluster: &Cluster) -> anyhow::Result<Selection> {
        let labels = match self.kind {
            Kind::Pod => {
                let pod: Pod = self.get(cluster).await?;
                if pod.spec.and_then(|spec| spec.host_network).unwrap_or(false) {
                    bail!("{self} uses the network of its node (hostNetwork), and has no NIC of its own");
                }
                return Ok(Selection { labels: LabelSelector::default(), pod: Some(self.name.clone()) });
            }
            Kind::Deployment => self.get::<Deployment>(cluster).await?.spec.map(|spec| spec.selector),
            Kind::StatefulSet => self.get::<StatefulSet>(cluster).await?.spec.map(|spec| spec.selector),
            Kind::DaemonSet => self.get::<DaemonSet>(cluster).await?.spec.map(|spec| spec.selector),
            Kind::ReplicaSet => self.get::<ReplicaSet>(cluster).await?.spec.map(|spec| spec.selector),
            Kind::Job => self.get::<Job>(cluster).await?.spec.and_then(|spec| spec.selector),
            Kind::Service => {
                let selector = self.get::<Service>(cluster).await?.spec.and_then(|spec| spec.selector);
                selector
                    .map(|labels| LabelSelector { match_labels: Some(labels), ..LabelSelector::default() })
            }
        };
        // An empty selector would select all pods of the namespace.
        match labels.filter(|labels| *labels != LabelSelector::default()) {
            Some(labels) => Ok(Selection { labels, pod: None }),
            None => bail!("{self} selects no pods by labels; name the pods, or their labels with -l"),
        }
    }

    async fn get<K>(&self, cluster: &Cluster) -> anyhow::Result<K>
    where
        K: kube::Resource<Scope = NamespaceResourceScope, DynamicType = ()>
            + Clone
            + DeserializeOwned
            + fmt::Debug,
    {
        let api = Api::<K>::namespaced(cluster.client.clone(), &cluster.namespace);
        let found = api.get_opt(&self.name).await;
        let found =
            found.with_context(|| format!("cannot read {self} in namespace {}", cluster.namespace))?;
        found.with_context(|| format!("there is no {self} in namespace {}", cluster.namespace))
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn a_workload_has_a_kind_and_a_name() {
        for (text, shown) in [
            ("web", "pod/web"),
            ("po/web-0", "pod/web-0"),
            ("deployment/web", "deploy/web"),
            ("Deployment/web", "deploy/web"),
            ("svc/web.x", "svc/web.x"),
            ("job/web", "job/web"),
        ] {
            assert_eq!(text.parse::<Workload>().unwrap().to_string(), shown);
        }
        for text in ["", "pod/", "web/eth0", "deploy/We", "deploy/a/b", "cronjob/web"] {
            text.parse::<Workload>().unwrap_err();
        }
    }
}
