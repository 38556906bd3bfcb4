//! [`MirrorTarget`]: a target for copies, which administrators of the cluster define for all nodes.

#![expect(
    unreachable_pub,
    reason = "`KubeSchema` derives the schema from a copy of the type inside a function"
)]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    MirrorTargetStatus, RateLimit,
    mirror::{NAMES, NAMES_MESSAGE},
};

/// MirrorTargetSpec describes the destination of the copies: exactly one of device, pod, vxlan, geneve, gre
/// and erspan. It also limits the namespaces that may use it, and the rate.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[kube(
    group = "podmirror.io",
    version = "v1alpha1",
    kind = "MirrorTarget",
    status = "MirrorTargetStatus",
    derive = "PartialEq",
    shortname = "mtarget",
    category = "podmirror",
    doc = "MirrorTarget is a target for copies on each node. Mirrors, ClusterMirrors and annotations refer to it by its \
           name. A target of the agent's flag --define-target takes precedence over a MirrorTarget of the same name.",
    validation = Rule::new(NAMES).message(NAMES_MESSAGE),
    validation = Rule::new("self.metadata.name != 'default'")
        .message("the name default is reserved for the mirror interface of the agents: use another name"),
    validation = Rule::new(
        "[has(self.spec.device), has(self.spec.pod), has(self.spec.vxlan), has(self.spec.geneve), has(self.spec.gre), \
         has(self.spec.erspan)].filter(x, x).size() == 1"
    )
    .message("use exactly one of device, pod, vxlan, geneve, gre and erspan"),
    validation = Rule::new("!has(self.spec.oversize) || !(has(self.spec.device) || has(self.spec.pod))")
        .message("spec.oversize is allowed only for a tunnel"),
    printcolumn(name = "Type", type_ = "string", json_path = ".status.type"),
    printcolumn(name = "Destination", type_ = "string", json_path = ".status.destination"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.readyNodes"),
    printcolumn(name = "Reported", type_ = "date", json_path = ".status.lastReportTime"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct MirrorTargetSpec {
    /// Mirror interface of each node. The agent creates it if it does not exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<TargetDevice>,
    /// Collector: a pod on the same node as the mirrored pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<TargetPod>,
    /// VXLAN tunnel to another machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vxlan: Option<TargetVxlan>,
    /// GENEVE tunnel to another machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub geneve: Option<TargetGeneve>,
    /// Ethernet-in-GRE tunnel to another machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gre: Option<TargetGre>,
    /// ERSPAN tunnel to another machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub erspan: Option<TargetErspan>,
    /// Handling of copies that do not fit into one packet of a tunnel. Defaults to Segment where the kernel
    /// supports it, otherwise to Truncate: for ERSPAN over IPv6, and for GRE and ERSPAN with a device of
    /// other software.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oversize: Option<TargetOversize>,
    /// Namespaces whose Mirrors and annotations may use this target. Defaults to none. ClusterMirrors may use
    /// every target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed_namespaces: Option<AllowedNamespaces>,
    /// Limits the copies per second to this target from each node, over all its pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_limit: Option<RateLimit>,
}

/// AllowedNamespaces selects namespaces.
#[derive(Serialize, Deserialize, KubeSchema, Debug, Clone, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.selector) == (self.from == 'Selector')")
    .message("use selector with from: Selector, and only with it"))]
pub struct AllowedNamespaces {
    /// All for all namespaces, or Selector for those that selector selects.
    pub from: FromNamespaces,
    /// Labels of the namespaces, with from: Selector.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<LabelSelector>,
}

/// FromNamespaces is the way in which namespaces are selected.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, PartialEq, Eq)]
pub enum FromNamespaces {
    /// All namespaces.
    All,
    /// The namespaces with certain labels.
    Selector,
}

/// TargetDevice names a mirror interface of each node.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct TargetDevice {
    /// Name of the interface, for example ids0.
    pub name: String,
}

/// TargetPod selects a pod on the node, by its name or by labels.
#[derive(Serialize, Deserialize, KubeSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.name) != has(self.podSelector)")
    .message("use exactly one of name and podSelector"))]
pub struct TargetPod {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Labels of the pod. Pods of a DaemonSet have generated names, but the same labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_selector: Option<PodSelector>,
    /// NIC that receives the copies, by its name inside the pod. Defaults to the first NIC that leads to the
    /// node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nic: Option<String>,
}

/// PodSelector selects a pod by its labels.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct PodSelector {
    /// Labels that the pod must have, for example app: suricata.
    #[schemars(extend("minProperties" = 1, "maxProperties" = 4))]
    pub match_labels: BTreeMap<String, String>,
}

/// KeyRange is a range of the keys of a tunnel.
#[derive(Serialize, Deserialize, KubeSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.min < self.max").message("min must be less than max"))]
pub struct KeyRange {
    /// First key.
    #[schemars(range(min = 1, max = 4_294_967_295_i64))]
    pub min: i64,
    /// Last key.
    #[schemars(range(min = 1, max = 4_294_967_295_i64))]
    pub max: i64,
}

/// TargetVxlan describes a VXLAN tunnel.
#[derive(Serialize, Deserialize, KubeSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.vni) != has(self.vniRange)").message("use exactly one of vni and vniRange"),
    validation = Rule::new("!has(self.vniRange) || self.vniRange.max <= 16777215").message("vniRange.max must be at most 16777215")
)]
pub struct TargetVxlan {
    /// IP address of the remote end.
    #[serde(rename = "remoteIP")]
    pub remote_ip: String,
    /// UDP port of the remote end. The standard port, 4789, may be in use by the node's CNI.
    #[schemars(range(min = 1, max = 65535))]
    pub destination_port: i32,
    /// VNI of all copies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16_777_215))]
    pub vni: Option<i64>,
    /// Range from which each NIC gets its own VNI.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vni_range: Option<KeyRange>,
    /// Device of other software, in external mode, that sends the packets. Defaults to a device that the
    /// agent creates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
}

/// TargetGeneve describes a GENEVE tunnel.
#[derive(Serialize, Deserialize, KubeSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.vni) != has(self.vniRange)").message("use exactly one of vni and vniRange"),
    validation = Rule::new("!has(self.vniRange) || self.vniRange.max <= 16777215").message("vniRange.max must be at most 16777215")
)]
pub struct TargetGeneve {
    /// IP address of the remote end.
    #[serde(rename = "remoteIP")]
    pub remote_ip: String,
    /// UDP port of the remote end. The standard port, 6081, may be in use by the node's CNI.
    #[schemars(range(min = 1, max = 65535))]
    pub destination_port: i32,
    /// VNI of all copies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16_777_215))]
    pub vni: Option<i64>,
    /// Range from which each NIC gets its own VNI.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vni_range: Option<KeyRange>,
    /// Whether each packet carries an option that identifies its NIC and direction. Defaults to false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<bool>,
    /// Device of other software, in external mode, that sends the packets. Defaults to a device that the
    /// agent creates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
}

/// TargetGre describes an Ethernet-in-GRE tunnel.
#[derive(Serialize, Deserialize, KubeSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.key) != has(self.keyRange)")
    .message("use exactly one of key and keyRange"))]
pub struct TargetGre {
    /// IP address of the remote end.
    #[serde(rename = "remoteIP")]
    pub remote_ip: String,
    /// Key of all copies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4_294_967_295_i64))]
    pub key: Option<i64>,
    /// Range from which each NIC gets its own key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_range: Option<KeyRange>,
    /// Device of other software, in external mode, that sends the packets. Defaults to a device that the
    /// agent creates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
}

/// TargetErspan describes an ERSPAN type II tunnel.
#[derive(Serialize, Deserialize, KubeSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.sessionID) != has(self.sessionIDRange)").message("use exactly one of sessionID and sessionIDRange"),
    validation = Rule::new("!has(self.sessionIDRange) || self.sessionIDRange.max <= 1023").message("sessionIDRange.max must be at most 1023")
)]
pub struct TargetErspan {
    /// IP address of the remote end.
    #[serde(rename = "remoteIP")]
    pub remote_ip: String,
    /// Session ID of all copies.
    #[serde(rename = "sessionID", default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1023))]
    pub session_id: Option<i64>,
    /// Range from which each NIC gets its own session ID.
    #[serde(rename = "sessionIDRange", default, skip_serializing_if = "Option::is_none")]
    pub session_id_range: Option<KeyRange>,
    /// Device of other software, in external mode, that sends the packets. Defaults to a device that the
    /// agent creates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
}

/// TargetOversize is the handling of copies that do not fit into one packet of a tunnel.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetOversize {
    /// The copy is truncated. A super-frame is sent as one truncated frame.
    Truncate,
    /// Super-frames are segmented; other copies are truncated.
    Segment,
    /// The kernel segments super-frames, and sends packets that are too long as IP fragments.
    Fragment,
    /// The copy is not sent, and is counted as congested.
    Drop,
}
