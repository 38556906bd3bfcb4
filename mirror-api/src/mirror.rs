//! [`Mirror`] and [`ClusterMirror`]: what people ask for.

#![expect(
    unreachable_pub,
    reason = "`KubeSchema` derives the schema from a copy of the type inside a function"
)]

use k8s_openapi::apimachinery::pkg::{apis::meta::v1::LabelSelector, util::intstr::IntOrString};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::MirrorStatus;

/// Maximum length of the name of a Mirror or ClusterMirror, in bytes. The mirror's name, which is the kind
/// and this name, fits into the kernel's maps.
pub const MAX_NAME: usize = 48;

/// The names that a Mirror or ClusterMirror can have, as a rule for the API server.
const NAMES: &str = "self.metadata.name.size() <= 48 && !self.metadata.name.contains('.')";
const NAMES_MESSAGE: &str = "the name must have at most 48 characters and no dot";

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
    validation = Rule::new("!has(self.spec.stream) || !has(self.spec.targetRef)")
        .message("spec.stream and spec.targetRef are mutually exclusive: remove one of them"),
    printcolumn(name = "Target", type_ = "string", json_path = ".spec.targetRef.name"),
    printcolumn(name = "Pods", type_ = "integer", json_path = ".status.pods.selected"),
    printcolumn(name = "Covered", type_ = "integer", json_path = ".status.pods.covered"),
    printcolumn(name = "Copied", type_ = "integer", json_path = ".status.packets.copied"),
    printcolumn(name = "Lost", type_ = "integer", json_path = ".status.packets.lost"),
    printcolumn(name = "Ends", type_ = "string", json_path = ".status.ends"),
    printcolumn(name = "Direction", type_ = "string", json_path = ".spec.direction", priority = 1),
    printcolumn(name = "Filter", type_ = "string", json_path = ".spec.filter", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct MirrorSpec {
    /// Labels of the pods whose packets are copied. An empty selector, {}, selects all pods of the namespace;
    /// in a ClusterMirror, all pods of the selected namespaces.
    pub pod_selector: LabelSelector,
    /// NICs of the pods, by their names inside the pod, for example eth0. Defaults to all NICs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 32), inner(length(min = 1, max = 15)))]
    pub nics: Option<Vec<String>>,
    /// Direction of the packets as seen from the pod: Ingress for packets to the pod, Egress for packets from
    /// the pod, or Both. Defaults to Both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direction: Option<Direction>,
    /// Filter in tcpdump's syntax, for example tcp port 443. Only packets that match it are copied. Defaults
    /// to all packets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub filter: Option<String>,
    /// Share of the flows to copy: a fraction, for example 1/100, or a percentage, for example 10%. Defaults
    /// to all flows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9.]+(/[0-9.]+|%)$"))]
    pub sample: Option<String>,
    /// Limits the copies per second of each NIC: in packets, for example 10kpps, in bits, for example 50Mbit,
    /// or both, for example 10kpps,50Mbit. An unused rate accumulates for a short time, which burst sets, for
    /// example 10kpps,burst=100ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(
        pattern = r"^([0-9]+[kMG]?(pps|bit|bit/s)|burst=([0-9]+(ms|s))+)(,([0-9]+[kMG]?(pps|bit|bit/s)|burst=([0-9]+(ms|s))+))*$"
    ))]
    pub rate: Option<String>,
    /// Maximum number of bytes to copy of each packet, from its beginning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 76, max = 15616))]
    pub snaplen: Option<i32>,
    /// Limits that end the mirror. They apply to each NIC separately, and count from the start of the mirror
    /// on that NIC. The first limit that is reached ends the mirror of that NIC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<Limits>,
    /// Target that receives the copies. Defaults to the target of the agent's flag --mirror-target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_ref: Option<TargetRef>,
    /// Streams the copies to a program that presents a key, instead of to a target. Packets are copied only
    /// while such a program is connected. kubectl mirror tail creates such Mirrors. Not allowed in a
    /// ClusterMirror.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream: Option<Stream>,
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
    validation = Rule::new("!has(self.spec.stream)").message("spec.stream is allowed only in a Mirror"),
    printcolumn(name = "Enforced", type_ = "boolean", json_path = ".spec.enforced"),
    printcolumn(name = "Target", type_ = "string", json_path = ".spec.targetRef.name"),
    printcolumn(name = "Pods", type_ = "integer", json_path = ".status.pods.selected"),
    printcolumn(name = "Covered", type_ = "integer", json_path = ".status.pods.covered"),
    printcolumn(name = "Copied", type_ = "integer", json_path = ".status.packets.copied"),
    printcolumn(name = "Lost", type_ = "integer", json_path = ".status.packets.lost"),
    printcolumn(name = "Ends", type_ = "string", json_path = ".status.ends"),
    printcolumn(name = "Direction", type_ = "string", json_path = ".spec.direction", priority = 1),
    printcolumn(name = "Filter", type_ = "string", json_path = ".spec.filter", priority = 1),
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
pub struct TargetRef {
    /// Name of a MirrorTarget, or of a target that the administrator of the nodes configured by the agent's
    /// flag --target or the chart's value targets.
    #[schemars(length(min = 1, max = 63), regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub name: String,
}

/// Stream identifies the program that receives the copies of a Mirror, and limits it to certain pods.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Stream {
    /// SHA-256 of the key, in 64 hexadecimal digits. The agents send the copies to the program that presents
    /// the key.
    #[schemars(regex(pattern = r"^[0-9a-f]{64}$"))]
    pub key_sha256: String,
    /// Names of the pods to stream, among those that podSelector selects. Defaults to all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64), inner(length(min = 1, max = 253)))]
    pub pods: Option<Vec<String>>,
}

/// Limits that end a mirror.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Limits {
    /// Duration after which the mirror ends, in ms, s, m, h and d, for example 15m or 1h30m; at most 365d.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^([0-9]+(ms|s|m|h|d))+$"))]
    pub duration: Option<String>,
    /// Number of copies after which the mirror ends, with an optional suffix k, M or G.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = r"^[0-9]+[kMG]?$"))]
    pub packets: Option<IntOrString>,
    /// Number of copied bytes after which the mirror ends, with an optional suffix k, M, G or T (powers of
    /// 1000), or Ki, Mi, Gi or Ti (powers of 1024).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = r"^[0-9]+(k|M|G|T|Ki|Mi|Gi|Ti)?B?$"))]
    pub bytes: Option<IntOrString>,
}
