//! [`Mirror`] and [`ClusterMirror`]: what people ask for.

#![expect(
    unreachable_pub,
    reason = "`KubeSchema` derives the schema from a copy of the type inside a function"
)]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{MirrorStatus, SettingsSpec};

/// Maximum length of the name of a Mirror or ClusterMirror, in bytes.
pub const MAX_NAME: usize = mirror_core::model::Name::MAX_BYTES;

/// The names that a Mirror, ClusterMirror or MirrorTarget can have, as a rule for the API server.
pub(crate) const NAMES: &str = "self.metadata.name.size() <= 63 && !self.metadata.name.contains('.')";
pub(crate) const NAMES_MESSAGE: &str = "the name must have at most 63 characters and no dot";

/// MirrorSpec selects pods and packets, and names the target of the copies.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[kube(
    group = "podmirror.io",
    version = "v1alpha1",
    kind = "Mirror",
    namespaced,
    status = "MirrorStatus",
    derive = "PartialEq",
    shortname = "mir",
    category = "podmirror",
    doc = "Mirror copies packets of the pods of its namespace to a target. Each node copies the packets of its own \
           pods. The pods do not change.",
    validation = Rule::new(NAMES).message(NAMES_MESSAGE),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].status"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].reason"),
    printcolumn(name = "Target", type_ = "string", json_path = ".spec.targetRef.name"),
    printcolumn(name = "Pods", type_ = "integer", json_path = ".status.pods.selected"),
    printcolumn(name = "Covered", type_ = "integer", json_path = ".status.pods.covered"),
    printcolumn(name = "Copied", type_ = "integer", json_path = ".status.packets.copied"),
    printcolumn(name = "Lost", type_ = "integer", json_path = ".status.packets.lost"),
    printcolumn(name = "Reported", type_ = "date", json_path = ".status.lastReportTime"),
    printcolumn(name = "Direction", type_ = "string", json_path = ".spec.direction", priority = 1),
    printcolumn(name = "Filter", type_ = "string", json_path = ".spec.filter", priority = 1),
    printcolumn(name = "Expires", type_ = "string", json_path = ".status.expirationTime", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct MirrorSpec {
    /// Labels of the pods whose packets are copied. An empty selector, {}, selects all pods of the namespace;
    /// in a ClusterMirror, all pods of the selected namespaces.
    pub pod_selector: LabelSelector,
    /// NICs of the pods, by their names inside the pod, for example eth0. Defaults to all NICs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 32), extend("x-kubernetes-list-type" = "set"))]
    pub nics: Option<Vec<String>>,
    /// Direction of the packets as seen from the pod: Ingress for packets to the pod, Egress for packets from
    /// the pod, or Both. Defaults to Both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direction: Option<Direction>,
    #[serde(flatten)]
    #[expect(
        missing_docs,
        reason = "a doc comment here would replace the description of the fields around it"
    )]
    pub settings: SettingsSpec,
    /// Target that receives the copies. Defaults to the mirror interface of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_ref: Option<TargetRef>,
}

/// ClusterMirrorSpec selects namespaces, pods and packets, and names the target of the copies.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[kube(
    group = "podmirror.io",
    version = "v1alpha1",
    kind = "ClusterMirror",
    status = "MirrorStatus",
    derive = "PartialEq",
    shortname = "cmir",
    category = "podmirror",
    doc = "ClusterMirror copies packets of pods of several namespaces to a target. Each node copies the packets of its \
           own pods. The pods do not change.",
    validation = Rule::new(NAMES).message(NAMES_MESSAGE),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].status"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].reason"),
    printcolumn(name = "Enforced", type_ = "boolean", json_path = ".spec.enforced"),
    printcolumn(name = "Target", type_ = "string", json_path = ".spec.targetRef.name"),
    printcolumn(name = "Pods", type_ = "integer", json_path = ".status.pods.selected"),
    printcolumn(name = "Covered", type_ = "integer", json_path = ".status.pods.covered"),
    printcolumn(name = "Copied", type_ = "integer", json_path = ".status.packets.copied"),
    printcolumn(name = "Lost", type_ = "integer", json_path = ".status.packets.lost"),
    printcolumn(name = "Reported", type_ = "date", json_path = ".status.lastReportTime"),
    printcolumn(name = "Direction", type_ = "string", json_path = ".spec.direction", priority = 1),
    printcolumn(name = "Filter", type_ = "string", json_path = ".spec.filter", priority = 1),
    printcolumn(name = "Expires", type_ = "string", json_path = ".status.expirationTime", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct ClusterMirrorSpec {
    /// Labels of the namespaces whose pods are selected. An empty selector, {}, selects all namespaces.
    /// Kubernetes sets the label kubernetes.io/metadata.name of each namespace to its name.
    pub namespace_selector: LabelSelector,
    /// Whether this mirror takes precedence: no annotation and no Mirror can then exclude a pod from it or
    /// replace it. Authors of pods choose the labels of their pods, so an enforced mirror that must not be
    /// evaded selects pods by their namespaces only. Defaults to false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enforced: Option<bool>,
    #[serde(flatten)]
    #[expect(
        missing_docs,
        reason = "a doc comment here would replace the description of the fields around it"
    )]
    pub mirror: MirrorSpec,
}

/// Direction of the packets as seen from the pod: Ingress for packets to the pod, Egress for packets from the
/// pod, or Both. Defaults to Both.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Packets to and from the pod.
    Both,
    /// Packets to the pod.
    Ingress,
    /// Packets from the pod.
    Egress,
}

/// TargetRef names the target that receives the copies of a mirror.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-map-type" = "atomic"))]
pub struct TargetRef {
    /// Name of a MirrorTarget, or of a target that the administrator of the nodes defined with the agent's
    /// flag --define-target or the chart's value targets.
    pub name: String,
}
