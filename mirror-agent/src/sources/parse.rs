//! Parses Kubernetes objects in YAML or JSON to [`Pod`]s. Pure; `file` and `kube` call it.
//!
//! The parser reads the few fields that the agent needs and ignores all others, so that the output of `kubectl get pod
//! -o yaml` is valid input at any version. It ignores a pod that has ended: its cgroup or its namespace may belong to
//! others now.

mod networks;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde::Deserialize;
use serde_saphyr::{Location, Spanned, UserMessageFormatter};

use crate::{
    annotations::NETWORK_STATUS,
    model::{Pod, PodId},
};

/// The annotation that names a pod's network namespace.
pub const NETNS_ANNOTATION: &str = "podmirror.io/netns";

/// The maximum length of `metadata.uid` in bytes, as in [`TapOwner::pod_uid`](mirror_common::abi::TapOwner::pod_uid).
const UID_MAX: usize = 64;
/// The maximum length of `metadata.namespace` in bytes: a DNS label.
const NAMESPACE_MAX: usize = 63;
/// The maximum length of `metadata.name` in bytes: a DNS subdomain.
const NAME_MAX: usize = 253;

/// The reason why a text is not a list of pods.
#[derive(Debug, thiserror::Error)]
pub enum ParseError {
    /// The text has no object. A file that is being written starts like that.
    #[error("the file is empty; to mirror no pods, write a List with `items: []`")]
    Empty,
    /// The text is not YAML, or a field does not have the type that it has in Kubernetes.
    #[error("{}", one_line(.0))]
    Yaml(Box<serde_saphyr::Error>),
    /// An object is not a pod, or not one that can be mirrored.
    #[error("line {line}, column {column}: {problem}")]
    Object {
        /// Line of the object, from 1.
        line: u64,
        /// Column of the object, from 1.
        column: u64,
        /// The problem.
        problem: String,
    },
}

fn one_line(error: &serde_saphyr::Error) -> String {
    error.render_with_formatter(&UserMessageFormatter).split_whitespace().collect::<Vec<_>>().join(" ")
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Object {
    api_version: Option<String>,
    kind: Option<String>,
    metadata: Option<Metadata>,
    spec: Option<Spec>,
    status: Option<Status>,
    items: Option<Vec<Spanned<Object>>>,
}

#[derive(Deserialize)]
struct Metadata {
    uid: Option<String>,
    namespace: Option<String>,
    name: Option<String>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    host_network: Option<bool>,
}

#[derive(Deserialize)]
struct Status {
    phase: Option<String>,
}

/// Returns the pods in `text`. Each of its documents is a `Pod`, a `List` or a `PodList`.
///
/// A truncated text gives an error, or its first pods, and the last one may be incomplete. Truncated JSON is always an
/// error.
pub fn parse(text: &str) -> Result<Vec<Pod>, ParseError> {
    let options = serde_saphyr::options! {
        with_snippet: false,
        // A few thousand pods as the API server prints them.
        budget: serde_saphyr::budget! { max_events: 16_000_000, max_nodes: 4_000_000, max_documents: 16_384 },
        // Pods in practice have no aliases; only an attempt to overload the parser has.
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: 10_000 },
    };
    let documents: Vec<Spanned<Object>> = serde_saphyr::from_multiple_with_options(text, options)
        .map_err(|error| ParseError::Yaml(Box::new(error)))?;
    if documents.is_empty() {
        return Err(ParseError::Empty);
    }

    let mut pods = Pods::default();
    for Spanned { value, referenced, .. } in documents {
        match value.type_name().as_deref() {
            Some("List" | "PodList") => {
                let items = value.items.ok_or_else(|| at(&referenced, "the list has no items".into()))?;
                for Spanned { value, referenced, .. } in items {
                    match value.type_name().as_deref() {
                        // The items of a PodList have no kind.
                        Some("Pod") | None => pods.add(value, &referenced)?,
                        Some(other) => return Err(not_a_pod(&referenced, other)),
                    }
                }
            }
            Some("Pod") => pods.add(value, &referenced)?,
            Some(other) => return Err(not_a_pod(&referenced, other)),
            None => return Err(at(&referenced, "the object has no kind".into())),
        }
    }
    Ok(pods.list)
}

impl Object {
    /// Returns the kind, with the API version if it differs from that of pods.
    fn type_name(&self) -> Option<String> {
        let kind = self.kind.as_deref()?;
        Some(match self.api_version.as_deref() {
            Some("v1") | None => kind.to_owned(),
            Some(version) => format!("{version} {kind}"),
        })
    }
}

fn at(location: &Location, problem: String) -> ParseError {
    ParseError::Object { line: location.line(), column: location.column(), problem }
}

fn not_a_pod(location: &Location, kind: &str) -> ParseError {
    at(location, format!("{kind:?} is not a Pod or a List of pods"))
}

/// The pods so far. No two may share a name or a UID.
#[derive(Default)]
struct Pods {
    list: Vec<Pod>,
    names: BTreeSet<(String, String)>,
    uids: BTreeSet<String>,
}

impl Pods {
    fn add(&mut self, object: Object, location: &Location) -> Result<(), ParseError> {
        let Some(pod) = pod(object).map_err(|problem| at(location, problem))? else { return Ok(()) };
        let PodId { uid, namespace, name } = pod.id.clone();
        if !self.names.insert((namespace, name)) {
            return Err(at(location, format!("there is a second pod {}", pod.id)));
        }
        if !self.uids.insert(uid) {
            let problem = format!("pod {} has the UID of another pod: {}", pod.id, pod.id.uid);
            return Err(at(location, problem));
        }
        self.list.push(pod);
        Ok(())
    }
}

/// Parses one pod of the API; `None` if it has ended.
pub(super) fn pod_from_json(object: serde_json::Value) -> Result<Option<Pod>, String> {
    pod(serde_json::from_value(object).map_err(|error| error.to_string())?)
}

fn pod(object: Object) -> Result<Option<Pod>, String> {
    let has_ended = object.status.and_then(|status| status.phase);
    let has_ended = has_ended.is_some_and(|phase| ["Succeeded", "Failed"].contains(&phase.as_str()));
    let metadata = object.metadata.ok_or("the pod has no metadata")?;
    let name = metadata.name.ok_or("the pod has no metadata.name")?;
    let name = text("metadata.name", name, NAME_MAX)?;
    let namespace = metadata.namespace.unwrap_or_else(|| "default".into());
    let namespace = text("metadata.namespace", namespace, NAMESPACE_MAX)?;
    let uid = match metadata.uid {
        Some(uid) => text("metadata.uid", uid, UID_MAX)?,
        None => {
            let uid = format!("file:{namespace}/{name}");
            if uid.len() > UID_MAX {
                return Err(format!("pod {namespace}/{name} needs a metadata.uid, because its name is long"));
            }
            uid
        }
    };
    let mut annotations = metadata.annotations.unwrap_or_default();
    let pod = Pod {
        labels: metadata.labels.unwrap_or_default(),
        id: PodId { uid, namespace, name },
        host_network: object.spec.and_then(|spec| spec.host_network).unwrap_or(false),
        netns: annotations.get(NETNS_ANNOTATION).map(Into::into),
        // It can be long, and only a small part of it is needed.
        networks: annotations.remove(NETWORK_STATUS).map(|text| networks::read(&text)).unwrap_or_default(),
        annotations,
        inherited: Arc::default(),
        namespace_labels: Arc::default(),
        unread: None,
    };
    Ok((!has_ended).then_some(pod))
}

/// Checks a text for the BPF maps, where texts have a fixed size and end with a zero byte, and for log lines.
fn text(field: &str, value: String, max: usize) -> Result<String, String> {
    if value.is_empty() {
        Err(format!("{field} is empty"))
    } else if value.len() > max {
        Err(format!("{field} has {} bytes; {max} is the most", value.len()))
    } else if value.contains(char::is_control) {
        Err(format!("{field} {value:?} has a control character"))
    } else {
        Ok(value)
    }
}

#[cfg(test)]
mod tests;
