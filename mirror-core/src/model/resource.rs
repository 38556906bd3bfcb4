//! A `Mirror`, `ClusterMirror` or `MirrorTarget` of the Kubernetes API, with the fields that a node needs.
//!
//! Data, and the evaluation of selectors. `sources/kube` reads resources from the API, `select` applies them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::{Deserialize, Serialize};

use super::{Directions, MirrorId, Name, Origin, Pod, TargetName};
use crate::{
    destination::Destination,
    settings::{Rate, Settings},
};

/// A `Mirror` or `ClusterMirror`, or the request of a reader of the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resource {
    /// Kind, namespace and name.
    pub id: ResourceId,
    /// `metadata.uid`: distinguishes the resource from an earlier one of the same name.
    pub uid: String,
    /// `metadata.generation`: increases with each change of the spec.
    pub generation: i64,
    /// Creation time in seconds since 1970. If two resources do not both fit, the older one wins.
    pub created: i64,
    /// Neither annotations nor other resources can narrow it.
    pub is_enforced: bool,
    /// The namespaces that a ClusterMirror selects. A Mirror selects its own namespace.
    pub namespaces: Selector,
    /// The pods that are selected in these namespaces.
    pub pods: Selector,
    /// Of these, only the pod with this name. `None`: all of them.
    pub pod_name: Option<String>,
    /// The request, or an error message if it cannot be read.
    pub request: Result<Request, String>,
}

impl Resource {
    /// The request of a reader of the API: for pods of a namespace, or of all namespaces without one.
    pub fn of_reader(
        namespace: Option<String>,
        pod_name: Option<String>,
        pods: Selector,
        of: Request,
    ) -> Self {
        Self {
            id: ResourceId { namespace, name: Name::default() },
            uid: String::new(),
            generation: 0,
            created: 0,
            is_enforced: false,
            namespaces: Selector::default(),
            pods,
            pod_name,
            request: Ok(of),
        }
    }

    /// Whether the resource selects a pod.
    pub fn selects(&self, pod: &Pod) -> bool {
        let is_there = match &self.id.namespace {
            Some(namespace) => pod.id.namespace == *namespace,
            None => self.namespaces.matches(&pod.namespace_labels),
        };
        let is_named = self.pod_name.as_ref().is_none_or(|name| *name == pod.id.name);
        is_there && is_named && self.pods.matches(&pod.labels)
    }

    /// The pods of a namespace that are selected without their labels, so also deleted pods: as `NAMESPACE/NAME`, or
    /// `NAMESPACE/*`.
    pub fn named(&self) -> Option<String> {
        let namespace = self.id.namespace.as_ref().filter(|_| self.pods == Selector::default())?;
        Some(format!("{namespace}/{}", self.pod_name.as_deref().unwrap_or("*")))
    }

    /// The origin of the resource's sessions.
    pub const fn origin(&self) -> Origin {
        match (&self.id.namespace, self.is_enforced) {
            (Some(_), _) => Origin::Mirror,
            (None, false) => Origin::ClusterMirror,
            (None, true) => Origin::Enforced,
        }
    }
}

/// The request of a resource.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Request {
    /// The names of the NICs. `None`: all NICs.
    pub nics: Option<Vec<String>>,
    /// The directions to copy.
    pub directions: Directions,
    /// The settings, without the filter.
    pub settings: Settings,
    /// The filter as written. It is compiled only for a mirror that gets a slot.
    pub filter: Option<String>,
    /// The name of the target. `None`: the mirror interface.
    pub target: Option<String>,
}

/// The name of a resource in the cluster.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResourceId {
    /// The namespace of a Mirror. `None` for a ClusterMirror.
    pub namespace: Option<String>,
    /// `metadata.name`.
    pub name: Name,
}

impl ResourceId {
    /// The kind of the resource.
    pub const fn kind(&self) -> &'static str {
        if self.namespace.is_some() { "Mirror" } else { "ClusterMirror" }
    }

    /// The name of the resource's mirror on each pod. It is unique there, because only Mirrors in a pod's own namespace
    /// select the pod.
    pub fn mirror(&self) -> MirrorId {
        MirrorId(match self.namespace {
            Some(_) => Name::of_mirror(&self.name),
            None => Name::of_cluster_mirror(&self.name),
        })
    }
}

impl fmt::Display for ResourceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(f, "{} {namespace}/{}", self.kind(), self.name),
            None => write!(f, "{} {}", self.kind(), self.name),
        }
    }
}

/// A `MirrorTarget`: a target for all nodes, defined by the cluster's administrators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetResource {
    /// `metadata.name`.
    pub name: TargetName,
    /// `metadata.uid`: distinguishes the target from an earlier one of the same name.
    pub uid: String,
    /// `metadata.generation`: increases with each change of the spec.
    pub generation: i64,
    /// Creation time in seconds since 1970. If two targets conflict, the older one wins.
    pub created: i64,
    /// The destination of the copies, or an error message if it cannot be read.
    pub destination: Result<Destination, String>,
    /// The namespaces whose Mirrors and annotations can use the target.
    pub namespaces: Selector,
    /// The limit for all copies of a node to this target.
    pub max_rate: Option<Rate>,
}

/// A label selector, in JSON as in the Kubernetes API. The default selects everything.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Selector {
    /// The labels that an object must have, with these values.
    #[serde(rename = "matchLabels", default)]
    pub labels: BTreeMap<String, String>,
    /// The conditions that an object must meet.
    #[serde(rename = "matchExpressions", default)]
    pub requirements: Vec<Requirement>,
}

/// A condition of a selector on one label.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Requirement {
    /// The key of the label.
    pub key: String,
    /// The operator.
    pub operator: Operator,
    /// The values that the operator compares with.
    #[serde(default)]
    pub values: BTreeSet<String>,
}

/// The operator of a condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operator {
    /// The object has the label, with one of the values.
    In,
    /// The object has the label with another value, or does not have it.
    NotIn,
    /// The object has the label.
    Exists,
    /// The object does not have the label.
    DoesNotExist,
}

impl Selector {
    /// A selector that selects nothing.
    pub fn nothing() -> Self {
        let none = Requirement { key: String::new(), operator: Operator::Exists, values: BTreeSet::new() };
        Self { labels: BTreeMap::new(), requirements: vec![none] }
    }

    /// Whether the selector matches these labels.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.labels.iter().all(|(key, value)| labels.get(key) == Some(value))
            && self.requirements.iter().all(|requirement| requirement.holds(labels))
    }
}

impl Requirement {
    fn holds(&self, labels: &BTreeMap<String, String>) -> bool {
        let value = labels.get(&self.key);
        match self.operator {
            Operator::In => value.is_some_and(|value| self.values.contains(value)),
            Operator::NotIn => value.is_none_or(|value| !self.values.contains(value)),
            Operator::Exists => value.is_some(),
            Operator::DoesNotExist => value.is_none(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect()
    }

    fn must(pairs: &[(&str, &str)]) -> Selector {
        Selector { labels: labels(pairs), requirements: Vec::new() }
    }

    #[test]
    fn a_selector_selects_as_kubernetes_does() {
        let of_object = labels(&[("app", "web"), ("tier", "")]);
        for (key, operator, values, holds) in [
            ("app", Operator::In, ["web", "db"], true),
            ("app", Operator::In, ["db", "x"], false),
            ("other", Operator::In, ["web", ""], false),
            ("app", Operator::NotIn, ["db", "x"], true),
            ("app", Operator::NotIn, ["web", "x"], false),
            ("other", Operator::NotIn, ["web", ""], true),
            ("tier", Operator::Exists, ["", ""], true),
            ("other", Operator::Exists, ["", ""], false),
            ("tier", Operator::DoesNotExist, ["", ""], false),
            ("other", Operator::DoesNotExist, ["", ""], true),
        ] {
            let values = values.map(str::to_owned).into();
            let requirements = vec![Requirement { key: key.into(), operator, values }];
            let selector = Selector { labels: BTreeMap::new(), requirements };
            assert_eq!(selector.matches(&of_object), holds, "{selector:?}");
        }
        assert!(Selector::default().matches(&of_object) && Selector::default().matches(&BTreeMap::new()));
        assert!(must(&[("app", "web")]).matches(&of_object));
        assert!(!must(&[("app", "web"), ("tier", "x")]).matches(&of_object));
    }
}
