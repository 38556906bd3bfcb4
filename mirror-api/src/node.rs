//! [`MirrorNode`]: the report of one node about Mirrors, ClusterMirrors and MirrorTargets.

#![expect(clippy::duplicated_attributes, reason = "the columns of `kubectl get` have the same types")]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// MirrorNodeFields is empty: a MirrorNode has only a status.
#[derive(CustomResource, JsonSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[kube(
    group = "podmirror.io",
    version = "v1alpha1",
    kind = "MirrorNode",
    no_spec,
    status = "MirrorNodeStatus",
    derive = "PartialEq",
    shortname = "mnode",
    category = "podmirror",
    doc = "MirrorNode is the report of one node about the Mirrors and ClusterMirrors that select its pods, and about the \
           MirrorTargets. It has the name of the node, and the agent of that node writes it.",
    printcolumn(name = "Mirrors", type_ = "integer", json_path = ".status.mirrorCount"),
    printcolumn(name = "Refused", type_ = "integer", json_path = ".status.refusedCount"),
    printcolumn(name = "Pods", type_ = "integer", json_path = ".status.pods.selected"),
    printcolumn(name = "Covered", type_ = "integer", json_path = ".status.pods.covered"),
    printcolumn(name = "Reported", type_ = "date", json_path = ".status.lastReportTime"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct MirrorNodeFields {}

/// MirrorNodeStatus is the node's status of the Mirrors and ClusterMirrors that select its pods, and of the
/// MirrorTargets.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct MirrorNodeStatus {
    /// Time at which the agent wrote this report, by the node's clock. While there is a Mirror for the node
    /// or a MirrorTarget, the agent writes it at least every 5 minutes. A report is stale if it is older
    /// than 15 minutes, more than 5 minutes in the future, or without a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_report_time: Option<Time>,
    /// Number of Mirrors and ClusterMirrors that select pods of the node.
    pub mirror_count: i64,
    /// Number of these that are refused.
    pub refused_count: i64,
    /// Pods of the node that at least one of them selects. A pod is covered if each of them that selects it
    /// covers it.
    pub pods: Pods,
    /// Mirrors and ClusterMirrors, sorted by kind, namespace and name; at most 200. ClusterMirrors come
    /// first, and the namespaces share the remaining entries equally.
    #[schemars(
        length(max = 200),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["uid"])
    )]
    pub mirrors: Vec<MirrorSummary>,
    /// Number of further Mirrors and ClusterMirrors that are not listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub more_mirrors: Option<i64>,
    /// MirrorTargets, sorted by name; the first 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 64),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["uid"])
    )]
    pub targets: Vec<TargetSummary>,
    /// Number of further MirrorTargets that are not listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub more_targets: Option<i64>,
}

/// TargetSummary is the status of a MirrorTarget on this node. The target is ready if it is neither refused
/// nor down.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct TargetSummary {
    /// Name of the MirrorTarget.
    #[schemars(length(max = 253))]
    pub name: String,
    /// UID of the MirrorTarget.
    #[schemars(length(max = 253))]
    pub uid: String,
    /// Generation that the agent has observed.
    pub observed_generation: i64,
    /// Why the node refuses the target. Absent if it is accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512))]
    pub refused: Option<String>,
    /// Why nothing can be copied to the target now. Absent if it is up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512))]
    pub down: Option<String>,
}

/// MirrorSummary is the status of a Mirror or ClusterMirror on this node.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct MirrorSummary {
    /// Kind: Mirror or ClusterMirror.
    #[schemars(length(max = 253))]
    pub kind: String,
    /// Namespace of the Mirror. Absent for a ClusterMirror.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub namespace: Option<String>,
    /// Name of the Mirror or ClusterMirror.
    #[schemars(length(max = 253))]
    pub name: String,
    /// UID of the Mirror or ClusterMirror.
    #[schemars(length(max = 253))]
    pub uid: String,
    /// Generation that the agent has observed.
    pub observed_generation: i64,
    /// Why the node refuses it. Absent if it is accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<Refusal>,
    /// Number of selected and covered pods on this node.
    pub pods: Pods,
    /// Packets that its current mirrors on this node have counted.
    pub packets: Packets,
    /// Number of NICs of this node that it mirrors, including those on which a limit has ended it.
    #[serde(default)]
    pub nics: i64,
    /// Number of NICs of this node on which a limit has ended it.
    pub ended: i64,
    /// Time at which the limit of its duration ends it on its last NIC of this node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expiration_time: Option<Time>,
    /// Selected pods of this node that are not covered, with the reasons; at most 20.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    pub uncovered: Vec<Uncovered>,
    /// Number of further reasons that are not listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub more_uncovered: Option<i64>,
}

/// Refusal explains why a Mirror or ClusterMirror is refused.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Refusal {
    /// Reason in one word, for example InvalidFilter.
    #[schemars(length(max = 253))]
    pub reason: String,
    /// Message that says what is wrong, and where.
    #[schemars(length(max = 512))]
    pub message: String,
}

impl Refusal {
    /// A refusal with a [`cut`] message.
    pub fn new(reason: &str, message: &str) -> Self {
        Self { reason: reason.to_owned(), message: cut(message) }
    }
}

/// Maximum length of a message in a status, in bytes.
pub(crate) const MOST_BYTES: usize = 512;

/// Returns the beginning of a message that fits into a status.
pub fn cut(message: &str) -> String {
    message[..message.floor_char_boundary(MOST_BYTES)].to_owned()
}

/// Pods counts pods.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Pods {
    /// Number of selected pods.
    pub selected: i64,
    /// Number of selected pods that are mirrored as requested: on all NICs, in all directions, to a target that
    /// accepts copies.
    pub covered: i64,
}

/// Packets counts packets since the current mirrors began.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Packets {
    /// Number of packets that were copied.
    pub copied: i64,
    /// Number of packets that were not copied although they should have been, because the target did not
    /// accept them or the kernel could not copy them.
    pub lost: i64,
}

/// Uncovered is a selected pod that is not covered.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct Uncovered {
    /// Namespace of the pod.
    #[schemars(length(max = 253))]
    pub namespace: String,
    /// Name of the pod.
    #[schemars(length(max = 253))]
    pub pod: String,
    /// NIC, if the reason concerns one NIC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub nic: Option<String>,
    /// Reason in one word.
    #[schemars(length(max = 253))]
    pub reason: String,
    /// Message that explains the reason.
    #[schemars(length(max = 512))]
    pub message: String,
    /// Node of the pod. Absent in a MirrorNode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub node: Option<String>,
}
