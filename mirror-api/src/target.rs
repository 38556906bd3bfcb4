//! [`MirrorTarget`]: where copies may go, as the cluster's administrators name it for all nodes.

#![expect(
    unreachable_pub,
    reason = "`KubeSchema` derives the schema from a copy of the type inside a function"
)]

use k8s_openapi::apimachinery::pkg::{apis::meta::v1::LabelSelector, util::intstr::IntOrString};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::MirrorTargetStatus;

/// Where copies go: exactly one of device, pod, vxlan, geneve, gre and erspan. And who may send copies there.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Debug, Clone, Default, PartialEq)]
#[kube(
    group = "podmirror.io",
    version = "v1alpha1",
    kind = "MirrorTarget",
    status = "MirrorTargetStatus",
    derive = "PartialEq",
    shortname = "mtarget",
    category = "podmirror",
    doc = "A MirrorTarget is a target of each node: Mirrors, ClusterMirrors and annotations send copies there by its \
           name. A target that an agent has by its flag --target comes before a MirrorTarget of the same name.",
    validation = Rule::new("self.metadata.name.size() <= 63 && !self.metadata.name.contains('.')")
        .message("the name has at most 63 characters, and no dot"),
    validation = Rule::new("self.metadata.name != 'default'")
        .message("the target default is the mirror interface of the agents: use another name"),
    validation = Rule::new(
        "[has(self.spec.device), has(self.spec.pod), has(self.spec.vxlan), has(self.spec.geneve), has(self.spec.gre), \
         has(self.spec.erspan)].filter(x, x).size() == 1"
    )
    .message("use exactly one of device, pod, vxlan, geneve, gre and erspan"),
    validation = Rule::new("!has(self.spec.oversize) || !(has(self.spec.device) || has(self.spec.pod))")
        .message("only a tunnel has spec.oversize"),
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
    /// A mirror interface of each node. The agent makes it if it is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<TargetDevice>,
    /// A pod on the node of the mirrored pod, the collector.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<TargetPod>,
    /// A VXLAN tunnel to another machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vxlan: Option<TargetVxlan>,
    /// A GENEVE tunnel to another machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub geneve: Option<TargetGeneve>,
    /// A tunnel of Ethernet in GRE to another machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gre: Option<TargetGre>,
    /// An ERSPAN tunnel to another machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub erspan: Option<TargetErspan>,
    /// What becomes of a copy that does not fit into one packet of a tunnel. Without it, Segment where
    /// the kernel can do that, and otherwise Truncate: ERSPAN over IPv6, and GRE and ERSPAN with a device of others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oversize: Option<TargetOversize>,
    /// The namespaces whose Mirrors and annotations may name this target, by the labels of the namespaces. Without it,
    /// all namespaces. ClusterMirrors may name every target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed_namespaces: Option<LabelSelector>,
    /// At most so many copies a second go there from each node, of all its pods together: in packets, as in 200kpps, in bits,
    /// as in 1Gbit, or both, as in 200kpps,1Gbit. Behind it can stand for how long an unused rate is saved up, as in
    /// 200kpps,burst=100ms.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(
        pattern = r"^([0-9]+[kMG]?(pps|bit|bit/s)|burst=([0-9]+(ms|s))+)(,([0-9]+[kMG]?(pps|bit|bit/s)|burst=([0-9]+(ms|s))+))*$"
    ))]
    pub max_rate: Option<String>,
}

/// A mirror interface of each node.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct TargetDevice {
    /// The name of the interface, as in ids0.
    #[schemars(length(min = 1, max = 15), regex(pattern = r"^[^/:\s]+$"))]
    pub name: String,
}

/// A pod on the node, by its name or by a label.
#[derive(Serialize, Deserialize, KubeSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.name) != has(self.label)").message("use exactly one of name and label"))]
pub struct TargetPod {
    /// The namespace of the pod.
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,
    /// The name of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub name: Option<String>,
    /// A label of the pod, as in app=suricata. The pods of a DaemonSet have random names, but the same labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 3, max = 381), regex(pattern = r"^[^=]+=[^=]+$"))]
    pub label: Option<String>,
    /// The NIC that gets the copies, by its name inside the pod. Without it, the first NIC that leads to the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 15))]
    pub nic: Option<String>,
}

/// A VXLAN tunnel.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct TargetVxlan {
    /// The IP address of the other end.
    pub remote: String,
    /// The UDP port of the other end. The node's CNI may have the usual one, 4789.
    #[schemars(range(min = 1, max = 65535))]
    pub port: i32,
    /// The VNI, or a range of them, as in 100-199, from which each NIC gets its own.
    #[schemars(extend("pattern" = r"^[0-9]+(-[0-9]+)?$"))]
    pub vni: IntOrString,
    /// A device of other software in external mode that sends the packets. Without it, a device of the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 15))]
    pub device: Option<String>,
}

/// A GENEVE tunnel.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct TargetGeneve {
    /// The IP address of the other end.
    pub remote: String,
    /// The UDP port of the other end. The node's CNI may have the usual one, 6081.
    #[schemars(range(min = 1, max = 65535))]
    pub port: i32,
    /// The VNI, or a range of them, as in 100-199, from which each NIC gets its own.
    #[schemars(extend("pattern" = r"^[0-9]+(-[0-9]+)?$"))]
    pub vni: IntOrString,
    /// If true, each packet says in an option which NIC and direction it is of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<bool>,
    /// A device of other software in external mode that sends the packets. Without it, a device of the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 15))]
    pub device: Option<String>,
}

/// A tunnel of Ethernet in GRE.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct TargetGre {
    /// The IP address of the other end.
    pub remote: String,
    /// The key, or a range of them, as in 100-199, from which each NIC gets its own.
    #[schemars(extend("pattern" = r"^[0-9]+(-[0-9]+)?$"))]
    pub key: IntOrString,
    /// A device of other software in external mode that sends the packets. Without it, a device of the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 15))]
    pub device: Option<String>,
}

/// An ERSPAN tunnel, type II.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct TargetErspan {
    /// The IP address of the other end.
    pub remote: String,
    /// The session, from 1 to 1023, or a range of them, as in 100-199, from which each NIC gets its own.
    #[schemars(extend("pattern" = r"^[0-9]+(-[0-9]+)?$"))]
    pub session: IntOrString,
    /// A device of other software in external mode that sends the packets. Without it, a device of the agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 15))]
    pub device: Option<String>,
}

/// What becomes of a copy that does not fit into one packet of a tunnel.
#[derive(Serialize, Deserialize, JsonSchema, Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetOversize {
    /// It is cut, a super-frame as one frame.
    Truncate,
    /// A super-frame is segmented, any other copy is cut.
    Segment,
    /// The kernel segments super-frames, and makes IP fragments of packets that are too long.
    Fragment,
    /// It is not sent, and counts as congested.
    Drop,
}
