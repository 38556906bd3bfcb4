//! Workloads: parses the words that name pods, and finds the pods that the cluster selects for them.
//!
//! A workload is resolved to its selector and not to its pods, so later pods are included.

use std::fmt;

use anyhow::{Context as _, bail};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::{
    Api,
    api::DynamicObject,
    core::{ApiResource, GroupVersionKind},
};
use serde_json::{Value, from_value};

use crate::{
    cli::Which,
    cluster::{Cluster, lacks_right},
};

/// Pods, and what selects them. The version of all is v1.
pub(crate) const TYPES: [Type; 8] = [
    Type { names: &["pod", "po", "pods"], group: "", kind: "Pod" },
    Type { names: &["deploy", "deployment", "deployments"], group: "apps", kind: "Deployment" },
    Type { names: &["sts", "statefulset", "statefulsets"], group: "apps", kind: "StatefulSet" },
    Type { names: &["ds", "daemonset", "daemonsets"], group: "apps", kind: "DaemonSet" },
    Type { names: &["rs", "replicaset", "replicasets"], group: "apps", kind: "ReplicaSet" },
    Type {
        names: &["rc", "replicationcontroller", "replicationcontrollers"],
        group: "",
        kind: "ReplicationController",
    },
    Type { names: &["job", "jobs"], group: "batch", kind: "Job" },
    Type { names: &["svc", "service", "services"], group: "", kind: "Service" },
];

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Type {
    /// Its names, the plural last.
    names: &'static [&'static str],
    group: &'static str,
    kind: &'static str,
}

impl Type {
    /// The type of this name, with or without its group.
    pub(crate) fn named(word: &str) -> Option<&'static Self> {
        let word = word.to_lowercase();
        let (name, group) = word.split_once('.').unwrap_or((&word, ""));
        TYPES.iter().find(|of| of.names.contains(&name) && ["", of.group].contains(&group))
    }

    pub(crate) fn resource(&self) -> ApiResource {
        let kind = GroupVersionKind::gvk(self.group, "v1", self.kind);
        ApiResource::from_gvk_with_plural(&kind, self.names.last().unwrap_or(&""))
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.names.first().unwrap_or(&""))
    }
}

/// A workload, as written by the user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Workload {
    type_: &'static Type,
    pub(crate) name: String,
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.type_, self.name)
    }
}

/// Parses `TYPE/NAME …` or `TYPE NAME …`. A name alone is that of a pod.
///
/// # Errors
///
/// A message for the user.
pub(crate) fn parse(words: &[String]) -> Result<Vec<Workload>, String> {
    match words {
        [type_, names @ ..] if !names.is_empty() && !type_.contains('/') => {
            names.iter().map(|name| Workload::new(type_, name)).collect()
        }
        _ => {
            let pairs = words.iter().map(|word| word.split_once('/').unwrap_or(("pod", word)));
            pairs.map(|(type_, name)| Workload::new(type_, name)).collect()
        }
    }
}

/// The selected pods of a namespace.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Selection {
    /// Pods with these labels.
    pub(crate) labels: LabelSelector,
    /// Of these pods, those with these names.
    pub(crate) pods: Option<Vec<String>>,
}

impl Which {
    /// Resolves the objects, which must exist; pods only if `pods_exist`.
    pub(crate) async fn resolve(&self, cluster: &Cluster, pods_exist: bool) -> anyhow::Result<Selection> {
        let labels = self.selector.clone().unwrap_or_default();
        let mut selection = Selection { labels, pods: None };
        for workload in self.workloads()? {
            if pods_exist || !workload.is_pod() {
                selection.labels = workload.resolve(cluster).await?;
            }
            if workload.is_pod() {
                selection.pods.get_or_insert_default().push(workload.name);
            }
        }
        Ok(selection)
    }
}

impl Workload {
    fn new(type_: &str, name: &str) -> Result<Self, String> {
        let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(c);
        match Type::named(type_) {
            Some(type_) if !name.is_empty() && name.chars().all(is_name) => {
                Ok(Self { type_, name: name.to_owned() })
            }
            Some(_) => Err(format!("invalid name {name:?} of a Kubernetes object")),
            None => {
                let types = TYPES.each_ref().map(Type::to_string).join(", ");
                Err(format!("unsupported type {type_:?}: use one of {types}, for example deploy/web"))
            }
        }
    }

    pub(crate) fn is_pod(&self) -> bool {
        self.type_.kind == "Pod"
    }

    /// The labels of its pods; none for a pod. A pod must exist, as far as this user has the right to know it.
    pub(crate) async fn resolve(&self, cluster: &Cluster) -> anyhow::Result<LabelSelector> {
        let Cluster { client, namespace, .. } = cluster;
        let api = Api::<DynamicObject>::namespaced_with(client.clone(), namespace, &self.type_.resource());
        match api.get(&self.name).await.map_err(anyhow::Error::from) {
            Err(error) if self.is_pod() && lacks_right(&error) => Ok(LabelSelector::default()),
            object => self.selector(&object?.data),
        }
    }

    /// The same, of the object as returned by the API server.
    fn selector(&self, object: &Value) -> anyhow::Result<LabelSelector> {
        if self.is_pod() {
            return Ok(LabelSelector::default());
        }
        let selector = object["spec"]["selector"].clone();
        let selector = match self.type_.group {
            // The core API has maps of labels.
            "" => from_value(selector)
                .map(|labels| LabelSelector { match_labels: labels, ..LabelSelector::default() }),
            _ => from_value::<Option<_>>(selector).map(Option::unwrap_or_default),
        };
        let selector = selector.with_context(|| format!("the selector of {self}"))?;
        // An empty selector would select all pods of the namespace.
        let has_labels = selector.match_labels.as_ref().is_some_and(|labels| !labels.is_empty());
        match has_labels || selector.match_expressions.as_ref().is_some_and(|rules| !rules.is_empty()) {
            true => Ok(selector),
            false => bail!("{self} selects no pods by labels; name the pods, or their labels with -l"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use kube::core::Selector;
    use serde_json::json;

    use super::*;

    fn parsed(words: &str) -> Result<Vec<String>, String> {
        let words: Vec<_> = words.split(' ').map(str::to_owned).collect();
        parse(&words).map(|workloads| workloads.iter().map(Workload::to_string).collect())
    }

    /// The labels by which a workload with this `spec` selects pods, in kubectl's format.
    fn selected(workload: &str, spec: Value) -> Result<String, String> {
        let workload = parse(&[workload.to_owned()]).unwrap().remove(0);
        let selector = workload.selector(&json!({ "spec": spec })).map_err(|error| error.to_string())?;
        Ok(Selector::try_from(selector).unwrap().to_string())
    }

    #[test]
    fn a_workload_stands_for_its_selector() {
        let by_app = || json!({ "selector": { "matchLabels": { "app": "web" } }, "replicas": 1 });
        for workload in ["deploy/web", "ds/web", "rs/web"] {
            assert_eq!(selected(workload, by_app()).unwrap(), "app=web");
        }
        let mut set = by_app();
        set["selector"]["matchExpressions"] = json!([{ "key": "tier", "operator": "Exists" }]);
        assert_eq!(selected("sts/web", set).unwrap(), "app=web,tier");
        // The API server generates the selector of a Job.
        let uid = json!({ "selector": { "matchLabels": { "batch.kubernetes.io/controller-uid": "7" } } });
        assert_eq!(selected("job/web", uid).unwrap(), "batch.kubernetes.io/controller-uid=7");
        for workload in ["svc/web", "rc/web"] {
            assert_eq!(selected(workload, json!({ "selector": { "app": "web" } })).unwrap(), "app=web");
        }
        // A Service whose endpoints are managed by others, and one that is an alias for another host.
        for spec in [json!({ "ports": [] }), json!({ "type": "ExternalName" }), json!({ "selector": {} })] {
            let why = selected("svc/web", spec).unwrap_err();
            assert!(why.contains("svc/web selects no pods"), "{why}");
        }
        assert_eq!(selected("web", json!({})).unwrap(), "");
    }

    #[test]
    fn a_workload_has_a_type_and_a_name() {
        for (words, shown) in [
            ("web", &["pod/web"][..]),
            ("po/web-0", &["pod/web-0"]),
            ("deployment/web", &["deploy/web"]),
            ("Deployment web", &["deploy/web"]),
            ("deployment.apps/web", &["deploy/web"]),
            ("svc/web.x", &["svc/web.x"]),
            ("job/web", &["job/web"]),
            ("pods web db", &["pod/web", "pod/db"]),
            ("pod/web pod/db", &["pod/web", "pod/db"]),
        ] {
            assert_eq!(parsed(words).unwrap(), shown);
        }
        for words in
            ["", "pod/", "web/eth0", "deploy/We", "deploy/a/b", "cronjob/web", "web db", "deploy deploy/web"]
        {
            parsed(words).unwrap_err();
        }
    }
}
