//! [`MirrorNode`]: what one node makes of the Mirrors, ClusterMirrors and MirrorTargets.

#![expect(clippy::duplicated_attributes, reason = "the columns of `kubectl get` have the same types")]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A MirrorNode has a status alone.
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
    doc = "A MirrorNode says what one node makes of the Mirrors and ClusterMirrors that select its pods, and of the \
           MirrorTargets. It has the name of the node, and the agent of that node writes it.",
    printcolumn(name = "Mirrors", type_ = "integer", json_path = ".status.mirrorCount"),
    printcolumn(name = "Refused", type_ = "integer", json_path = ".status.refusedCount"),
    printcolumn(name = "Pods", type_ = "integer", json_path = ".status.pods.selected"),
    printcolumn(name = "Covered", type_ = "integer", json_path = ".status.pods.covered"),
    printcolumn(name = "Reported", type_ = "date", json_path = ".status.reported"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct MirrorNodeFields {}

/// What the node makes of the Mirrors and ClusterMirrors that select pods of the node, and of the MirrorTargets.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct MirrorNodeStatus {
    /// When the agent wrote this, by the clock of the node. As long as there is a Mirror here or a MirrorTarget, the agent
    /// writes it again every 5 minutes at least. A report does not count if it is older than 15 minutes, if its time is more
    /// than 5 minutes ahead, or if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reported: Option<Time>,
    /// How many Mirrors and ClusterMirrors select pods of the node.
    pub mirror_count: i64,
    /// How many of these are refused.
    pub refused_count: i64,
    /// The pods of the node that at least one of them selects. Covered are those that each of these mirrors covers.
    pub pods: Pods,
    /// The Mirrors and ClusterMirrors, in the order of their kinds, namespaces and names; at most 200. ClusterMirrors come
    /// first, and the namespaces share the rest alike.
    #[schemars(length(max = 200))]
    pub mirrors: Vec<MirrorSummary>,
    /// How many more there are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub more_mirrors: Option<i64>,
    /// The MirrorTargets, in the order of their names; the first 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub targets: Vec<TargetSummary>,
    /// How many more there are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub more_targets: Option<i64>,
}

/// A MirrorTarget, as this node sees it. It is ready if it is neither refused nor down.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct TargetSummary {
    /// Its name.
    #[schemars(length(max = 253))]
    pub name: String,
    /// Its UID.
    #[schemars(length(max = 253))]
    pub uid: String,
    /// The generation of it that the agent has read.
    pub observed_generation: i64,
    /// Why it is no target of this node, in a sentence. Without it, it is accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512))]
    pub refused: Option<String>,
    /// Why nothing can be copied to it now, in a sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512))]
    pub down: Option<String>,
    /// Copies that had to be cut for it, as the mirrors that stand now have counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut: Option<Cut>,
}

/// Copies that have less of a packet than was asked for, because a target has no room for more.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Cut {
    /// How many copies.
    pub packets: i64,
    /// The bytes that they lack.
    pub bytes: i64,
}

/// A Mirror or ClusterMirror, as this node sees it.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct MirrorSummary {
    /// Mirror or ClusterMirror.
    #[schemars(length(max = 253))]
    pub kind: String,
    /// The namespace of a Mirror.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub namespace: Option<String>,
    /// Its name.
    #[schemars(length(max = 253))]
    pub name: String,
    /// Its UID.
    #[schemars(length(max = 253))]
    pub uid: String,
    /// The generation of it that the agent has read.
    pub observed_generation: i64,
    /// Why it is refused, and so does nothing. Without it, it is accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<Refusal>,
    /// Its pods on this node.
    pub pods: Pods,
    /// What its mirrors that stand now have counted on this node.
    pub packets: Packets,
    /// NICs of this node on which it stands, also where one of its limits has ended it.
    #[serde(default)]
    pub nics: i64,
    /// NICs of this node on which one of its limits has ended it.
    pub ended: i64,
    /// Pods of this node that it selects and does not cover, with the reasons; some of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    pub not_covered: Vec<NotCovered>,
    /// How many reasons more there are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub more_not_covered: Option<i64>,
}

/// Why a Mirror or ClusterMirror is refused.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Refusal {
    /// A word for it, as in InvalidFilter.
    #[schemars(length(max = 253))]
    pub reason: String,
    /// A sentence that says what is wrong, and where.
    #[schemars(length(max = 512))]
    pub message: String,
}

/// Pods of this node.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Pods {
    /// How many are selected.
    pub selected: i64,
    /// How many of these are mirrored as it was asked for: on all NICs, in all directions.
    pub covered: i64,
}

/// Packets, counted since the mirrors that stand now began.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Packets {
    /// Packets that were copied.
    pub copied: i64,
    /// Packets that should have been copied and were not, because the target did not take them or the kernel could not
    /// make the copy.
    pub lost: i64,
}

/// A pod that is selected and not covered.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct NotCovered {
    /// The namespace of the pod.
    #[schemars(length(max = 253))]
    pub namespace: String,
    /// The pod.
    #[schemars(length(max = 253))]
    pub pod: String,
    /// The NIC, where the reason concerns one NIC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub nic: Option<String>,
    /// A word for the reason.
    #[schemars(length(max = 253))]
    pub reason: String,
    /// The reason in a sentence.
    #[schemars(length(max = 512))]
    pub message: String,
}
