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

/// Most bytes of the name of a Mirror or ClusterMirror. With its kind ahead, the name of the mirror has room in the
/// maps of the kernel.
pub const MAX_NAME: usize = 48;

/// The names that a Mirror or ClusterMirror can have, as a rule for the API server.
const NAMES: &str = "self.metadata.name.size() <= 48 && !self.metadata.name.contains('.')";
const NAMES_TOLD: &str = "the name has at most 48 characters, and no dot";

/// What a Mirror copies: which packets of which pods, how many of them, and where the copies go.
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
    doc = "A Mirror copies the packets of pods of its own namespace to a target. Each node copies the packets of its \
           own pods. The pods do not change.",
    validation = Rule::new(NAMES).message(NAMES_TOLD),
    validation = Rule::new("!has(self.spec.stream) || !has(self.spec.targetRef)")
        .message("a stream has no target: leave out spec.targetRef or spec.stream"),
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
    /// The pods whose packets are copied, by their labels. An empty selector, {}, selects all pods of the namespace; for
    /// a ClusterMirror, all pods of the selected namespaces.
    pub pod_selector: LabelSelector,
    /// The NICs of the pods, by their names inside the pod, as in eth0. Without it, all NICs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 32), inner(length(min = 1, max = 15)))]
    pub nics: Option<Vec<String>>,
    /// The direction, seen from the pod: Ingress is what reaches the pod, Egress is what leaves it. Without it, Both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direction: Option<Direction>,
    /// Only packets that match this filter are copied. The filter is written in tcpdump's language, as in tcp port 443.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub filter: Option<String>,
    /// Only this share of the flows is copied: a fraction, as in 1/100, or a percentage, as in 10%.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[0-9.]+(/[0-9.]+|%)$"))]
    pub sample: Option<String>,
    /// At most so many copies a second, of each NIC: in packets, as in 10kpps, in bits, as in 50Mbit, or both, as in
    /// 10kpps,50Mbit. Behind it can stand for how long an unused rate is saved up, as in 10kpps,burst=100ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(
        pattern = r"^([0-9]+[kMG]?(pps|bit|bit/s)|burst=([0-9]+(ms|s))+)(,([0-9]+[kMG]?(pps|bit|bit/s)|burst=([0-9]+(ms|s))+))*$"
    ))]
    pub rate: Option<String>,
    /// Only so many bytes of each packet are copied, from its beginning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 76, max = 15616))]
    pub snaplen: Option<i32>,
    /// When the mirror ends. Each NIC has limits of its own, which count from when the mirror begins there. The first
    /// limit that is reached ends the mirror of that NIC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<Limits>,
    /// The target that gets the copies. Without it, the target of the agent's flag --mirror-target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_ref: Option<TargetRef>,
    /// The copies go to a program that has a key, and not to a target. Nothing is copied while no such program reads.
    /// kubectl mirror tail makes such Mirrors. A ClusterMirror has no stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream: Option<Stream>,
}

/// What a ClusterMirror copies: the packets of which pods of which namespaces, and the rest as in a Mirror.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[kube(
    group = "podmirror.io",
    version = "v1alpha1",
    kind = "ClusterMirror",
    status = "MirrorStatus",
    derive = "PartialEq",
    shortname = "cmir",
    category = "podmirror",
    doc = "A ClusterMirror copies the packets of pods of several namespaces to a target. Each node copies the packets of \
           its own pods. The pods do not change.",
    validation = Rule::new(NAMES).message(NAMES_TOLD),
    validation = Rule::new("!has(self.spec.stream)").message("only a Mirror can have a stream"),
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
    /// The namespaces whose pods are selected, by the labels of the namespaces. An empty selector, {}, selects all
    /// namespaces. Every namespace has the label kubernetes.io/metadata.name, which is its name.
    pub namespace_selector: LabelSelector,
    /// If true, this mirror comes first, and no annotation and no Mirror of a pod or of its namespace can leave a pod out
    /// or take its place. The labels of pods are their authors' own, so an enforced mirror that must not be evaded
    /// selects pods by their namespaces alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enforced: Option<bool>,
    #[serde(flatten)]
    #[expect(
        missing_docs,
        reason = "a doc comment here would replace the description of the fields around it"
    )]
    pub mirror: MirrorSpec,
}

/// The direction, seen from the pod: Ingress is what reaches the pod, Egress is what leaves it. Without it, Both.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// What reaches the pod, and what leaves it.
    Both,
    /// What reaches the pod.
    Ingress,
    /// What leaves the pod.
    Egress,
}

/// The target that gets the copies of a mirror.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct TargetRef {
    /// The name of a MirrorTarget, or of a target that the administrator of the nodes has named by the agent's flag
    /// --target or the chart's value targets.
    #[schemars(length(min = 1, max = 63), regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub name: String,
}

/// Who gets the copies of a Mirror that go to a program.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Stream {
    /// The SHA-256 of the key, in 64 hexadecimal digits. The agents give the copies to the program that sends the key.
    #[schemars(regex(pattern = r"^[0-9a-f]{64}$"))]
    pub key_sha256: String,
    /// Only the pods with these names, of those that podSelector selects. Without it, all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64), inner(length(min = 1, max = 253)))]
    pub pods: Option<Vec<String>>,
}

/// The limits that end a mirror.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Limits {
    /// The mirror ends after this time, in ms, s, m, h and d, as in 15m or 1h30m; at most 365d.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^([0-9]+(ms|s|m|h|d))+$"))]
    pub duration: Option<String>,
    /// The mirror ends after so many copies: a number, with k, M, G or nothing behind it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = r"^[0-9]+[kMG]?$"))]
    pub packets: Option<IntOrString>,
    /// The mirror ends after copies of so many bytes: a number, with k, M, G, T (powers of 1000), Ki, Mi, Gi, Ti (powers
    /// of 1024) or nothing behind it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("pattern" = r"^[0-9]+(k|M|G|T|Ki|Mi|Gi|Ti)?B?$"))]
    pub bytes: Option<IntOrString>,
}
