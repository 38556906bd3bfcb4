//! The part of a Kubernetes object that the agent keeps. Pure; [`kube`](super) stores it.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Namespace;
use kube::{
    Resource,
    core::{ObjectMeta, PartialObjectMeta},
};
use mirror_common::abi::MAX_FILTER_TEXT;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::kept::Keep;
use crate::{
    annotations::{OVN_ATTACHMENT, OVN_MIRROR, PREFIX},
    model::Pod,
    sources::{parse, static_pods},
};

/// The maximum size in bytes of the kept annotations of an object: twice what the mirrors of a pod can need, with
/// filters. Also the maximum size of the labels of a pod.
const MOST_KEPT: usize = 32 << 10;

/// The maximum number of kept annotations of an object: more than 8 mirrors with all settings need.
const MOST_KEYS: usize = 128;

/// A pod of the API: the name under which it is stored, and the data that the agent needs, or the reason why these
/// cannot be read.
///
/// Any JSON can be decoded to this type, so that one invalid object does not block all others.
#[derive(Resource, Debug, Clone, PartialEq)]
#[resource(inherit = "k8s_openapi::api::core::v1::Pod")]
pub(super) struct PodObject {
    metadata: ObjectMeta,
    /// `Ok(None)`: the pod has ended, and has no processes any more.
    pod: Result<Option<Pod>, String>,
    /// The hash of the static pod that it claims to represent.
    hash: Option<String>,
}

impl PodObject {
    /// The pod, if it can be read and has not ended.
    pub(super) fn pod(&self) -> Option<&Pod> {
        self.pod.as_ref().ok()?.as_ref()
    }

    /// The hash that the pod's cgroups have instead of its UID, as the pod claims.
    pub(super) fn hash(&self) -> Option<&String> {
        self.hash.as_ref()
    }
}

impl Keep for PodObject {
    fn trim(&mut self) {
        self.metadata.resource_version = None;
    }

    fn problem(&self) -> Option<String> {
        let name = |name: &Option<String>| name.clone().unwrap_or_default();
        let ObjectMeta { namespace, name: pod, .. } = &self.metadata;
        self.pod.as_ref().err().map(|problem| format!("pod {}/{}: {problem}", name(namespace), name(pod)))
    }

    fn is_same(&self, other: &Self) -> bool {
        self == other
    }
}

impl<'de> Deserialize<'de> for PodObject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let object = Value::deserialize(deserializer)?;
        let text = |field: &str| object["metadata"][field].as_str().map(str::to_owned);
        let metadata = ObjectMeta {
            name: text("name"),
            namespace: text("namespace"),
            resource_version: text("resourceVersion"),
            uid: text("uid"),
            ..ObjectMeta::default()
        };
        let (pod, hash) = match pod(object) {
            Ok(Some((pod, hash))) => (Ok(Some(pod)), hash),
            Ok(None) => (Ok(None), None),
            Err(problem) => (Err(problem), None),
        };
        Ok(Self { metadata, pod, hash })
    }
}

/// Returns the pod, if it has not ended, and the hash that it claims as a static pod. Authors of pods can write such a
/// hash too, so [`StaticPods`](crate::sources::static_pods) checks it.
fn pod(object: Value) -> Result<Option<(Pod, Option<String>)>, String> {
    let Some(mut pod) = parse::pod_from_json(object)? else { return Ok(None) };
    let hash = static_pods::claimed_uid(&pod);
    // An author of a pod must not be able to have any other namespace of the node mirrored.
    pod.netns = None;
    if let Err(problem) = keep_ours(&mut pod.annotations) {
        pod.annotations.clear();
        pod.unread = Some(format!("its annotations have {problem}"));
    }
    let bytes: usize = pod.labels.iter().map(|(key, value)| key.len() + value.len()).sum();
    if bytes > MOST_KEPT {
        // Such a pod cannot be a collector, and counts as a pod without labels.
        pod.labels.clear();
    }
    Ok(Some((pod, hash)))
}

/// The error for annotations that exceed a limit.
pub(super) const TOO_LONG: &str = "more than 32 KiB or 128 keys of podmirror.io/";

/// Keeps the annotations that the agent may read. An author may write 256 KiB of them on each object. More than any
/// mirror can need is an error, because a truncated annotation could be a filter.
fn keep_ours(annotations: &mut BTreeMap<String, String>) -> Result<(), &'static str> {
    let is_ovn = |key: &str| key == OVN_MIRROR || key.ends_with(OVN_ATTACHMENT);
    annotations.retain(|key, _| is_ovn(key) || key.starts_with(PREFIX) && key != parse::NETNS_ANNOTATION);
    for value in annotations.values_mut() {
        // A truncated value is still too long, and is refused.
        value.truncate(value.floor_char_boundary(2 * MAX_FILTER_TEXT));
    }
    let bytes: usize = annotations.iter().map(|(key, value)| key.len() + value.len()).sum();
    if bytes > MOST_KEPT || annotations.len() > MOST_KEYS { Err(TOO_LONG) } else { Ok(()) }
}

impl Keep for PartialObjectMeta<Namespace> {
    /// Keeps its name, its labels, podmirror's annotations (none if they are too long), and whether it is being
    /// deleted.
    fn trim(&mut self) {
        let mut annotations = self.metadata.annotations.take().unwrap_or_default();
        let kept = keep_ours(&mut annotations);
        self.metadata = ObjectMeta {
            name: self.metadata.name.take(),
            labels: self.metadata.labels.take(),
            annotations: kept.is_ok().then_some(annotations),
            deletion_timestamp: self.metadata.deletion_timestamp.take(),
            ..ObjectMeta::default()
        };
    }

    fn problem(&self) -> Option<String> {
        let ObjectMeta { name, annotations, .. } = &self.metadata;
        let has_too_many = || {
            let name = name.as_deref().unwrap_or_default();
            format!("namespace {name}: its annotations have {TOO_LONG}")
        };
        annotations.is_none().then(has_too_many)
    }

    fn is_same(&self, other: &Self) -> bool {
        self.metadata == other.metadata
    }
}
