//! [`MirrorStatus`] and [`MirrorTargetStatus`]: what came of a Mirror, a ClusterMirror or a MirrorTarget on all nodes
//! together.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Cut, NotCovered, Packets, Pods};

/// What came of it on all nodes together. The controller sums it up from the MirrorNodes.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct MirrorStatus {
    /// The generation that all nodes with a report on it have read. If no node reports on it, the generation that the
    /// controller has read.
    pub observed_generation: i64,
    /// Accepted, Covered and Ended: each is True, False or Unknown, with a reason in one word and in a sentence.
    #[schemars(
        length(max = 8),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
    /// How many nodes report pods that it selects.
    pub nodes: i64,
    /// Its pods.
    pub pods: Pods,
    /// What its mirrors that stand now have counted.
    pub packets: Packets,
    /// The limits that end it, in short, or Ended. Without it, no limit ends it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub ends: Option<String>,
    /// Pods that it selects and does not cover, with the reasons; the first 20, in the order of their names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    pub worst: Vec<Worst>,
    /// How many reasons more there are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub more_not_covered: Option<i64>,
}

/// A pod that is selected and not covered, and its node.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct Worst {
    #[serde(flatten)]
    #[expect(
        missing_docs,
        reason = "a doc comment here would replace the description of the fields around it"
    )]
    pub of: NotCovered,
    /// The node of the pod.
    #[schemars(length(max = 253))]
    pub node: String,
}

/// What came of it on all nodes together. The controller sums it up from the MirrorNodes.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct MirrorTargetStatus {
    /// The generation that all nodes with a report on it have read. If no node reports on it, the generation that the
    /// controller has read.
    pub observed_generation: i64,
    /// Accepted and Ready: each is True, False or Unknown, with a reason in one word and in a sentence.
    #[schemars(
        length(max = 8),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
    /// The nodes that report on it.
    pub nodes: TargetNodes,
    /// The nodes on which nothing can be copied to it, with the reasons; the first 20, in the order of their names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    pub not_ready: Vec<NotReady>,
    /// How many more there are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub more_not_ready: Option<i64>,
    /// Copies that had to be cut for it, on all nodes together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut: Option<Cut>,
}

/// The nodes that report on a MirrorTarget.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct TargetNodes {
    /// How many of them take copies for it.
    pub ready: i64,
    /// How many there are.
    pub of: i64,
}

/// A node on which nothing can be copied to a MirrorTarget.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct NotReady {
    /// The node.
    #[schemars(length(max = 253))]
    pub node: String,
    /// TargetRefused: the node does not have this target. TargetDown: the node has it, and it takes nothing now.
    #[schemars(length(max = 253))]
    pub reason: String,
    /// The reason in a sentence.
    #[schemars(length(max = 512))]
    pub message: String,
}
