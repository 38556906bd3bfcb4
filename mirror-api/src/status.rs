//! [`MirrorStatus`] and [`MirrorTargetStatus`]: the status of a Mirror, ClusterMirror or MirrorTarget on all nodes.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Packets, Pods, Uncovered};

/// MirrorStatus is the status on all nodes, aggregated from the MirrorNodes.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct MirrorStatus {
    /// Latest generation that all reporting nodes have observed. If no node reports, the generation that the
    /// controller has observed.
    pub observed_generation: i64,
    /// Conditions Ready, Accepted, Covered and Ended. Ready sums up the others. Each is True, False or Unknown, with a reason and a message.
    #[schemars(
        length(max = 8),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
    /// Number of nodes that report on it. Nodes with a stale report do not count.
    pub reporting_nodes: i64,
    /// Time of the last report that counts, by the node's clock. Updated at least every 10 minutes, unless the cluster has
    /// millions of Mirrors times nodes. If it is older than 15 minutes, no controller or no agent has written since, and
    /// this status is out of date.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_report_time: Option<Time>,
    /// Number of selected and covered pods. The pods of a node with a stale report count as selected, but not
    /// as covered.
    pub pods: Pods,
    /// Packets that its current mirrors have counted.
    pub packets: Packets,
    /// Time at which the limit of its duration ends it on its last NIC. Absent if it has no such limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expiration_time: Option<Time>,
    /// Selected pods that are not covered, with the reasons; the first 20, sorted by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    pub uncovered: Vec<Uncovered>,
    /// Number of further reasons that are not listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub more_uncovered: Option<i64>,
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
    /// Kind of the destination: Device, Pod, VXLAN, GENEVE, GRE or ERSPAN.
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub type_: Option<String>,
    /// Destination in short, for example 10.9.0.5:14789/vni=77.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512))]
    pub destination: Option<String>,
    /// Number of nodes that report on it, and how many of them are ready.
    pub nodes: TargetNodes,
    /// Time of the last report that counts, by the node's clock. Updated at least every 10 minutes, unless the cluster has
    /// millions of Mirrors times nodes. If it is older than 15 minutes, no controller or no agent has written since, and
    /// this status is out of date.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_report_time: Option<Time>,
    /// The same numbers as a text, for example 2/3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub ready_nodes: Option<String>,
    /// Nodes that cannot copy to it, with the reasons; the first 20, sorted by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    pub not_ready: Vec<NotReady>,
    /// Number of further nodes that are not listed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub more_not_ready: Option<i64>,
}

/// TargetNodes counts the nodes that report on a MirrorTarget, including those with a stale report.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct TargetNodes {
    /// Number of nodes that can copy to it.
    pub ready: i64,
    /// Number of nodes that report on it, including those with a stale report.
    pub desired: i64,
}

/// NotReady is a node that cannot copy to a MirrorTarget.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct NotReady {
    /// Name of the node.
    #[schemars(length(max = 253))]
    pub node: String,
    /// Reason in one word: TargetRefused if the node refuses the target, TargetDown if the node has the
    /// target but cannot copy to it now, ReportStale if the report of the node is stale.
    #[schemars(length(max = 253))]
    pub reason: String,
    /// Message that explains the reason.
    #[schemars(length(max = 512))]
    pub message: String,
}
