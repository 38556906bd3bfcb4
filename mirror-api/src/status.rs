//! [`MirrorStatus`] and [`MirrorTargetStatus`]: the status of a Mirror, ClusterMirror or MirrorTarget on all nodes.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Cut, NotCovered, Packets, Pods};

/// MirrorStatus is the status on all nodes, aggregated from the MirrorNodes.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct MirrorStatus {
    /// Latest generation that all reporting nodes have observed. If no node reports, the generation that the
    /// controller has observed.
    pub observed_generation: i64,
    /// Conditions Accepted, Covered and Ended. Each is True, False or Unknown, with a reason and a message.
    #[schemars(
        length(max = 8),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
    /// Number of nodes that report selected pods.
    pub nodes: i64,
    /// Number of selected and covered pods.
    pub pods: Pods,
    /// Packets that its current mirrors have counted.
    pub packets: Packets,
    /// Summary of the limits that end it, or Ended. Absent if it has no limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub ends: Option<String>,
    /// Selected pods that are not covered, with the reasons; the first 20, sorted by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    pub worst: Vec<Worst>,
    /// Number of further reasons that are not listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub more_not_covered: Option<i64>,
}

/// Worst is a selected pod that is not covered, and its node.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct Worst {
    #[serde(flatten)]
    #[expect(
        missing_docs,
        reason = "a doc comment here would replace the description of the fields around it"
    )]
    pub of: NotCovered,
    /// Node of the pod.
    #[schemars(length(max = 253))]
    pub node: String,
}

/// MirrorTargetStatus is the status on all nodes, aggregated from the MirrorNodes.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct MirrorTargetStatus {
    /// Latest generation that all reporting nodes have observed. If no node reports, the generation that the
    /// controller has observed.
    pub observed_generation: i64,
    /// Conditions Accepted and Ready. Each is True, False or Unknown, with a reason and a message.
    #[schemars(
        length(max = 8),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
    /// Number of nodes that report on it, and how many of them are ready.
    pub nodes: TargetNodes,
    /// Nodes that cannot copy to it, with the reasons; the first 20, sorted by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    pub not_ready: Vec<NotReady>,
    /// Number of further nodes that are not listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub more_not_ready: Option<i64>,
    /// Copies that were truncated for it, on all nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut: Option<Cut>,
}

/// TargetNodes counts the nodes that report on a MirrorTarget.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct TargetNodes {
    /// Number of nodes that can copy to it.
    pub ready: i64,
    /// Number of nodes that report on it.
    pub of: i64,
}

/// NotReady is a node that cannot copy to a MirrorTarget.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct NotReady {
    /// Name of the node.
    #[schemars(length(max = 253))]
    pub node: String,
    /// Reason in one word: TargetRefused if the node refuses the target, TargetDown if the node has the
    /// target but cannot copy to it now.
    #[schemars(length(max = 253))]
    pub reason: String,
    /// Message that explains the reason.
    #[schemars(length(max = 512))]
    pub message: String,
}
