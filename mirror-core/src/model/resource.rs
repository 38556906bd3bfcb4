//! A `Mirror`, `ClusterMirror` or `MirrorTarget` of the Kubernetes API, as far as a node needs it.
//!
//! Data, and the question what it selects. `pods/kube` reads it from the API, `select` decides what becomes of it.
//! Its texts are as its author wrote them, with the parsers of annotations still to read them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use super::{Directions, MirrorId, Name, Origin, Pod, TargetName};
use crate::{destination::Destination, settings::Rate};

/// A `Mirror` or `ClusterMirror`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resource {
    /// Its kind, namespace and name.
    pub id: ResourceId,
    /// `metadata.uid`: distinguishes it from one of the same name before it.
    pub uid: String,
    /// `metadata.generation`: counts its changes.
    pub generation: i64,
    /// When it was made, in seconds since 1970. Of two resources that do not both fit, the older one comes first.
    pub created: i64,
    /// No annotation and no other resource narrows it.
    pub is_enforced: bool,
    /// The namespaces that a ClusterMirror selects. A Mirror selects its own.
    pub namespaces: Selector,
    /// The pods that it selects there.
    pub pods: Selector,
    /// What it asks for; or why that cannot be read, in words.
    pub request: Result<Request, String>,
}

impl Resource {
    /// Whether it selects a pod.
    pub fn selects(&self, pod: &Pod) -> bool {
        let is_there = match &self.id.namespace {
            Some(namespace) => pod.id.namespace == *namespace,
            None => self.namespaces.matches(&pod.namespace_labels),
        };
        let is_named = |stream: &Stream| stream.pods.as_ref().is_none_or(|pods| pods.contains(&pod.id.name));
        is_there && self.pods.matches(&pod.labels) && self.stream().is_none_or(is_named)
    }

    /// Its stream, if its copies go to the program that has a key.
    pub fn stream(&self) -> Option<&Stream> {
        self.request.as_ref().ok()?.stream.as_ref()
    }

    /// The origin of its sessions.
    pub const fn origin(&self) -> Origin {
        match (&self.id.namespace, self.is_enforced) {
            (Some(_), _) => Origin::Mirror,
            (None, false) => Origin::ClusterMirror,
            (None, true) => Origin::Enforced,
        }
    }
}

/// What a resource asks for, in the texts of its author.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Request {
    /// The NICs, by their names; `None`: all.
    pub nics: Option<Vec<String>>,
    /// Which packets of these.
    pub directions: Directions,
    /// The settings that it has, by their [keys](crate::settings::KEYS).
    pub settings: Vec<(&'static str, String)>,
    /// The name of its target; `None`: the node's.
    pub target: Option<String>,
    /// Its copies go to the program that has a key, and to no target.
    pub stream: Option<Stream>,
}

/// Which program gets the packets, and of which pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stream {
    /// The SHA-256 of the key that the program has.
    pub key_sha256: [u8; 32],
    /// The names of the pods, of those that are selected; `None`: all.
    pub pods: Option<BTreeSet<String>>,
}

/// The name of a resource in the cluster.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResourceId {
    /// The namespace of a Mirror; `None`: a ClusterMirror, which has none.
    pub namespace: Option<String>,
    /// Its name.
    pub name: Name,
}

impl ResourceId {
    /// Its kind.
    pub const fn kind(&self) -> &'static str {
        if self.namespace.is_some() { "Mirror" } else { "ClusterMirror" }
    }

    /// The name of its mirror on each pod. It is unique there, because only Mirrors of a pod's own namespace select the
    /// pod.
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

/// A `MirrorTarget`: a target that the cluster's administrators name for all nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetResource {
    /// Its name.
    pub name: TargetName,
    /// Its UID: distinguishes it from one of the same name before it.
    pub uid: String,
    /// The generation of its `spec`.
    pub generation: i64,
    /// When it was made, in seconds since 1970. Of two that cannot stand beside each other, the older one comes first.
    pub created: i64,
    /// Where the copies go; or why that cannot be read, in words.
    pub destination: Result<Destination, String>,
    /// The namespaces whose Mirrors and annotations may name it.
    pub namespaces: Selector,
    /// The limit for all copies of a node that go there.
    pub max_rate: Option<Rate>,
}

/// Selects objects by their labels, as Kubernetes does. The default selects all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selector {
    /// The labels that an object must have, with these values.
    pub labels: BTreeMap<String, String>,
    /// What must hold besides.
    pub requirements: Vec<Requirement>,
}

/// A condition for the labels of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requirement {
    /// The key of the label.
    pub key: String,
    /// What must hold for it.
    pub operator: Operator,
    /// The values that the operator is about.
    pub values: BTreeSet<String>,
}

/// A condition for one label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

impl Operator {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::In, Self::NotIn, Self::Exists, Self::DoesNotExist];

    /// The word of Kubernetes.
    pub const fn name(self) -> &'static str {
        match self {
            Self::In => "In",
            Self::NotIn => "NotIn",
            Self::Exists => "Exists",
            Self::DoesNotExist => "DoesNotExist",
        }
    }
}

impl Selector {
    /// Whether it selects an object with these labels.
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
