//! [`MirrorTarget`]: a target for copies, which administrators of the cluster define for all nodes.

#![expect(
    unreachable_pub,
    reason = "`KubeSchema` derives the schema from a copy of the type inside a function"
)]

use k8s_openapi::apimachinery::pkg::{apis::meta::v1::LabelSelector, util::intstr::IntOrString};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::MirrorTargetStatus;

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
           name. A target of the agent's flag --target takes precedence over a MirrorTarget of the same name.",
    validation = Rule::new("self.metadata.name.size() <= 63 && !self.metadata.name.contains('.')")
        .message("the name must have at most 63 characters and no dot"),
    validation = Rule::new("self.metadata.name != 'default'")
        .message("the name default is reserved for the mirror interface of the agents: use another name"),
    validation = Rule::new(
        "[has(self.spec.device), has(self.spec.pod), has(self.spec.vxlan), has(self.spec.geneve), has(self.spec.gre), \
         has(self.spec.erspan)].filter(x, x).size() == 1"
    )
    .message("use exactly one of device, pod, vxlan, geneve, gre and erspan"),
    validation = Rule::new("!has(self.spec.oversize) || !(has(self.spec.device) || has(self.spec.pod))")
        .message("spec.oversize is allowed only for a tunnel"),
    printcolumn(name = "Device", type_ = "string", json_path = ".spec.device.name"),
    printcolumn(name = "Pod Namespace", type_ = "string", json_path = ".spec.pod.namespace"),
    printcolumn(name = "VXLAN", type_ = "string", json_path = ".spec.vxlan.remote"),
    printcolumn(name = "GENEVE", type_ = "string", json_path = ".spec.geneve.remote"),
    printcolumn(name = "GRE", type_ = "string", json_path = ".spec.gre.remote"),
    printcolumn(name = "ERSPAN", type_ = "string", json_path = ".spec.erspan.remote"),
    printcolumn(name = "Ready", type_ = "integer", json_path = ".status.nodes.ready"),
    printcolumn(name = "Nodes", type_ = "integer", json_path = ".status.nodes.of"),
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
    /// Labels of the namespaces whose Mirrors and annotations may use this target. Defaults to all
    /// namespaces. ClusterMirrors may use every target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed_namespaces: Option<LabelSelector>,
    /// Limits the copies per second to this target from each node, over all its pods: in packets, for example
    /// 200kpps, in bits, for example 1Gbit, or both, for example 200kpps,1Gbit. An unused rate accumulates
    /// for a short time, which burst sets, for example 200kpps,burst=100ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(
        pattern = r"^([0-9]+[kMG]?(pps|bit|bit/s)|burst=([0-9]+(ms|s))+)(,([0-9]+[kMG]?(pps|bit|bit/s)|burst=([0-9]+(ms|s))+))*$"
    ))]
    pub max_rate: Option<String>,
}

/// TargetDevice names a mirror interface of each node.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct TargetDevice {
    /// Name of the interface, for example ids0.
    #[schemars(length(min = 1, max = 15), regex(pattern = r"^[^/:\s]+$"))]
    pub name: String,
}

/// TargetPod selects a pod on the node, by its name or by a label.
#[derive(Serialize, Deserialize, KubeSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.name) != has(self.label)").message("use exactly one of name and label"))]
pub struct TargetPod {
    /// Namespace of the pod.
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,
    /// Name of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub name: Option<String>,
    /// Label of the pod, for example app=suricata. Pods of a DaemonSet have generated names, but the same
    /// labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 3, max = 381), regex(pattern = r"^[^=]+=[^=]+$"))]
    pub label: Option<String>,
    /// NIC that receives the copies, by its name inside the pod. Defaults to the first NIC that leads to the
    /// node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 15))]
    pub nic: Option<String>,
}

/// TargetVxlan describes a VXLAN tunnel.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct TargetVxlan {
    /// IP address of the remote end.
    pub remote: String,
    /// UDP port of the remote end. The standard port, 4789, may be in use by the node's CNI.
    #[schemars(range(min = 1, max = 65535))]
    pub port: i32,
    /// VNI, or a range of VNIs, for example 100-199, from which each NIC gets its own.
    #[schemars(extend("pattern" = r"^[0-9]+(-[0-9]+)?$"))]
    pub vni: IntOrString,
    /// Device of other software, in external mode, that sends the packets. Defaults to a device that the
    /// agent creates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 15))]
    pub device: Option<String>,
}

/// TargetGeneve describes a GENEVE tunnel.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct TargetGeneve {
    /// IP address of the remote end.
    pub remote: String,
    /// UDP port of the remote end. The standard port, 6081, may be in use by the node's CNI.
    #[schemars(range(min = 1, max = 65535))]
    pub port: i32,
    /// VNI, or a range of VNIs, for example 100-199, from which each NIC gets its own.
    #[schemars(extend("pattern" = r"^[0-9]+(-[0-9]+)?$"))]
    pub vni: IntOrString,
    /// Whether each packet carries an option that identifies its NIC and direction. Defaults to false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<bool>,
    /// Device of other software, in external mode, that sends the packets. Defaults to a device that the
    /// agent creates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 15))]
    pub device: Option<String>,
}

/// TargetGre describes an Ethernet-in-GRE tunnel.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct TargetGre {
    /// IP address of the remote end.
    pub remote: String,
    /// Key, or a range of keys, for example 100-199, from which each NIC gets its own.
    #[schemars(extend("pattern" = r"^[0-9]+(-[0-9]+)?$"))]
    pub key: IntOrString,
    /// Device of other software, in external mode, that sends the packets. Defaults to a device that the
    /// agent creates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 15))]
    pub device: Option<String>,
}

/// TargetErspan describes an ERSPAN type II tunnel.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct TargetErspan {
    /// IP address of the remote end.
    pub remote: String,
    /// Session ID from 1 to 1023, or a range of them, for example 100-199, from which each NIC gets its own.
    #[schemars(extend("pattern" = r"^[0-9]+(-[0-9]+)?$"))]
    pub session: IntOrString,
    /// Device of other software, in external mode, that sends the packets. Defaults to a device that the
    /// agent creates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 15))]
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
