//! Workloads: parses the argument, and finds the pods that the cluster selects for it.
//!
//! A workload is resolved to its selector and not to its pods, so later pods are included. Used by all commands with a
//! workload.

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

/// The kinds, each with its names.
const KINDS: [(Kind, &[&str]); 7] = [
    (Kind::Pod, &["pod", "pods", "po"]),
    (Kind::Deployment, &["deploy", "deployment", "deployments"]),
    (Kind::StatefulSet, &["sts", "statefulset", "statefulsets"]),
    (Kind::DaemonSet, &["ds", "daemonset", "daemonsets"]),
    (Kind::ReplicaSet, &["rs", "replicaset", "replicasets"]),
    (Kind::Job, &["job", "jobs"]),
    (Kind::Service, &["svc", "service", "services"]),
];

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

/// A workload, as written by the user.
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
            Some(_) => Err(format!("invalid name {name:?} of a Kubernetes object")),
            None => Err(format!(
                "unsupported kind {word:?}: use pod, deploy, sts, ds, rs, job or svc, for example deploy/web"
            )),
        }
    }
}

/// The selected pods of a namespace.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Selection {
    /// Pods with these labels.
    pub(crate) labels: LabelSelector,
    /// Of these pods, the one with this name.
    pub(crate) pod: Option<String>,
}

impl Which {
    /// Resolves the workload. It must exist.
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
                    bail!("{self} uses the network of its node (hostNetwork) and has no NIC");
                }
                return Ok(Selection { labels: LabelSelector::default(), pod: Some(self.name.clone()) });
            }
            Kind::Deployment => self.get::<Deployment>(cluster).await?.selector(),
            Kind::StatefulSet => self.get::<StatefulSet>(cluster).await?.selector(),
            Kind::DaemonSet => self.get::<DaemonSet>(cluster).await?.selector(),
            Kind::ReplicaSet => self.get::<ReplicaSet>(cluster).await?.selector(),
            Kind::Job => self.get::<Job>(cluster).await?.selector(),
            Kind::Service => self.get::<Service>(cluster).await?.selector(),
        };
        self.selecting(labels)
    }

    /// Returns a selection with this selector of the workload.
    fn selecting(&self, labels: Option<LabelSelector>) -> anyhow::Result<Selection> {
        // An empty selector would select all pods of the namespace.
        let says = |labels: &LabelSelector| {
            labels.match_labels.as_ref().is_some_and(|labels| !labels.is_empty())
                || labels.match_expressions.as_ref().is_some_and(|rules| !rules.is_empty())
        };
        match labels.filter(says) {
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

/// An object that selects pods by their labels.
trait Selects {
    /// Its selector, if it has one.
    fn selector(self) -> Option<LabelSelector>;
}

impl Selects for Deployment {
    fn selector(self) -> Option<LabelSelector> {
        Some(self.spec?.selector)
    }
}

impl Selects for StatefulSet {
    fn selector(self) -> Option<LabelSelector> {
        Some(self.spec?.selector)
    }
}

impl Selects for DaemonSet {
    fn selector(self) -> Option<LabelSelector> {
        Some(self.spec?.selector)
    }
}

impl Selects for ReplicaSet {
    fn selector(self) -> Option<LabelSelector> {
        Some(self.spec?.selector)
    }
}

impl Selects for Job {
    fn selector(self) -> Option<LabelSelector> {
        self.spec?.selector
    }
}

impl Selects for Service {
    fn selector(self) -> Option<LabelSelector> {
        Some(LabelSelector { match_labels: Some(self.spec?.selector?), ..LabelSelector::default() })
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use kube::core::Selector;
    use serde_json::{Value, from_value, json};

    use super::*;

    /// The labels by which a workload selects pods, in kubectl's format. `object` is as returned by the API server.
    fn selected<K: Selects + DeserializeOwned>(workload: &str, object: Value) -> Result<String, String> {
        let selector = from_value::<K>(object).unwrap().selector();
        let workload: Workload = workload.parse().unwrap();
        let Selection { labels, pod } = workload.selecting(selector).map_err(|error| error.to_string())?;
        assert_eq!(pod, None);
        Ok(Selector::try_from(labels).unwrap().to_string())
    }

    #[test]
    fn a_workload_stands_for_its_selector() {
        let object = |kind: &str, api: &str, spec: Value| {
            let labels = json!({ "of-the-object": "itself" });
            let metadata = json!({ "name": "web", "namespace": "shop", "uid": "7", "labels": labels });
            json!({ "apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec })
        };
        let template = json!({
            "metadata": { "labels": { "app": "web", "of-the-template": "too" } },
            "spec": { "containers": [{ "name": "main", "image": "web" }] },
        });
        let by_app = json!({ "selector": { "matchLabels": { "app": "web" } }, "template": template });
        let apps = |kind: &str| object(kind, "apps/v1", by_app.clone());
        assert_eq!(selected::<DaemonSet>("ds/web", apps("DaemonSet")).unwrap(), "app=web");
        assert_eq!(selected::<Deployment>("deploy/web", apps("Deployment")).unwrap(), "app=web");
        assert_eq!(selected::<ReplicaSet>("rs/web", apps("ReplicaSet")).unwrap(), "app=web");
        let mut set = by_app.clone();
        set["serviceName"] = "web".into();
        set["selector"]["matchExpressions"] = json!([{ "key": "tier", "operator": "Exists" }]);
        let set = selected::<StatefulSet>("sts/web", object("StatefulSet", "apps/v1", set));
        assert_eq!(set.unwrap(), "app=web,tier");
        // The API server generates the selector of a Job.
        let uid = json!({ "matchLabels": { "batch.kubernetes.io/controller-uid": "7" } });
        let job = object("Job", "batch/v1", json!({ "selector": uid, "template": template }));
        assert_eq!(selected::<Job>("job/web", job).unwrap(), "batch.kubernetes.io/controller-uid=7");
        let service = |spec: Value| selected::<Service>("svc/web", object("Service", "v1", spec));
        let ports = json!([{ "port": 80, "targetPort": 8080 }]);
        assert_eq!(service(json!({ "selector": { "app": "web" }, "ports": ports })).unwrap(), "app=web");
        // A Service whose endpoints are managed by others, and one that is an alias for another host.
        for spec in
            [json!({ "ports": ports }), json!({ "type": "ExternalName", "externalName": "example.org" })]
        {
            let why = service(spec).unwrap_err();
            assert!(why.contains("svc/web selects no pods"), "{why}");
        }
        assert!(selected::<Service>("svc/web", object("Service", "v1", json!({ "selector": {} }))).is_err());
    }

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
