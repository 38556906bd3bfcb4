//! The status of a node, as `mirror-agent status` shows it: the types of `-o json`, the table, and the text about a
//! pod; and the reports about its pods, as the API of packets shows them.
//!
//! The types are a public interface: fields are added, but never renamed. The agent fills them from the pinned maps and
//! from its notes.

mod explain;
mod report;
mod table;

use std::collections::BTreeMap;

use mirror_common::verdict::{Misfit, Verdict};
use serde::{Deserialize, Serialize};

pub use self::{
    report::{MirrorReport, NicReport, PodMetadata, PodReport, Rates, Traffic},
    table::{columns, printable},
};
use crate::{
    model::PodId,
    settings::{Budget, SETTINGS, Setting},
};

/// The verdicts of packets that should have been copied but were not.
pub const LOSSES: [Verdict; 5] =
    [Verdict::TargetDown, Verdict::Congested, Verdict::Failed, Verdict::Uncut, Verdict::Lost];

/// The status of a node.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NodeStatus {
    /// Version of the agent that answered.
    pub version: String,
    /// Whether an agent holds the lock of the pins.
    pub agent_running: bool,
    /// The targets.
    pub targets: Vec<TargetStatus>,
    /// The taps.
    pub taps: Vec<TapStatus>,
    /// The notes of the running agent. `None`: no agent runs.
    pub notes: Option<Notes>,
}

/// A target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TargetStatus {
    /// Its name.
    pub name: String,
    /// The destination that the administrator configured: a device, as in `ids0`; a pod, as in `pod:security/suricata`;
    /// a tunnel, as in `vxlan:10.9.0.5:4789/vni=77`; or `stream`. Empty for the stream of a capture.
    pub destination: String,
    /// The device that the copies are sent to: the mirror interface, the node side of a pod's veth, or a tunnel device.
    /// Empty for a stream, and while there is no device.
    pub device: String,
    /// ifindex of the device. `None`: the device does not exist, or the target is a stream.
    pub ifindex: Option<u32>,
    /// Whether the target accepts copies.
    pub up: bool,
    /// Whether copies go to a program that reads a ring buffer, not to a device.
    pub stream: bool,
    /// Frames that the device accepted but did not send since it was created, including those of other software.
    /// `None`: there is no device.
    pub dropped: Option<u64>,
    /// Whether copies are made only while a packet socket reads the device (`--when-read`).
    pub when_read: bool,
}

/// A tap.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TapStatus {
    /// ifindex of the tapped device.
    pub ifindex: u32,
    /// Its name.
    pub device: String,
    /// Whether the device is inside the pod: the NIC itself. Index and name are then those of the pod's namespace.
    pub inside: bool,
    /// The pod. `None`: an interface that the user named.
    pub pod: Option<PodId>,
    /// The NIC inside the pod.
    pub nic: String,
    /// The network of the NIC, from the pod's annotation `k8s.v1.cni.cncf.io/network-status`. `None`: the annotation
    /// does not contain it.
    pub network: Option<String>,
    /// How podmirror's programs are attached to the hooks.
    pub attached: AttachedStatus,
    /// The NIC inside the pod, if ingress is seen there. `None`: the tapped device sees both directions.
    pub pod_side: Option<PodSideStatus>,
    /// Its sessions.
    pub sessions: Vec<SessionStatus>,
}

/// A mirror at one tap.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SessionStatus {
    /// The mirror.
    pub mirror: String,
    /// The target of the copies.
    pub target: String,
    /// Number of the session on this node, as in the records of a stream and in the GENEVE option of a tunnel.
    pub serial: u32,
    /// The tunnel key of the copies. `None`: the target is no tunnel.
    pub tunnel_key: Option<u32>,
    /// The origin of the request.
    pub origin: String,
    /// The directions that are copied.
    pub direction: String,
    /// The other settings that are set, by key, with their values as in annotations.
    pub settings: BTreeMap<String, String>,
    /// The used-up budget that has ended the session.
    pub ended: Option<String>,
    /// The remaining budgets.
    pub left: LeftStatus,
    /// The counters that are not zero.
    pub counters: Vec<CounterStatus>,
    /// The copies that differ from the request, if there are any.
    pub misfits: Vec<MisfitStatus>,
}

/// The remaining budgets of a session. `None`: no such budget.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct LeftStatus {
    /// Seconds.
    pub duration: Option<f64>,
    /// Packets.
    pub packets: Option<u64>,
    /// Bytes.
    pub bytes: Option<u64>,
}

impl From<Budget> for LeftStatus {
    fn from(left: Budget) -> Self {
        let Budget { duration, packets, bytes } = left;
        Self { duration: duration.map(|time| time.as_secs_f64()), packets, bytes }
    }
}

/// The NIC inside a pod, if a tap on the node side of its veth sees ingress there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PodSideStatus {
    /// ifindex of the NIC, in the pod's namespace.
    pub ifindex: u32,
    /// How podmirror's program is attached to the NIC's ingress hook: `tcx` or `none`.
    pub attached: String,
}

/// How podmirror's program is attached to each tc hook: `tcx`, `netkit`, `clsact`, `none`, or `unknown` if the hook
/// cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AttachedStatus {
    /// The ingress hook of the device.
    pub ingress: String,
    /// The egress hook of the device.
    pub egress: String,
}

impl AttachedStatus {
    /// No podmirror program is attached to the hook.
    pub const NONE: &str = "none";
    /// The hook cannot be read.
    pub const UNKNOWN: &str = "unknown";
}

impl Default for AttachedStatus {
    fn default() -> Self {
        Self { ingress: Self::NONE.to_owned(), egress: Self::NONE.to_owned() }
    }
}

/// The number of a session's packets with one result in one direction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CounterStatus {
    /// The direction, seen from the pod.
    pub direction: String,
    /// The result: the name of a verdict.
    pub result: String,
    /// Number of packets.
    pub packets: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// Copies of a session in one direction that differ from the request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MisfitStatus {
    /// The direction, seen from the pod.
    pub direction: String,
    /// `cut`: the copies lack bytes. `long`: they are longer than the snap length.
    pub kind: String,
    /// Number of copies.
    pub packets: u64,
    /// Number of bytes by which they differ.
    pub bytes: u64,
}

impl SessionStatus {
    /// The settings with their values, in the order of [`SETTINGS`].
    fn settings(&self) -> impl Iterator<Item = (&'static Setting, &str)> {
        SETTINGS.iter().filter_map(move |setting| Some((setting, self.settings.get(setting.key)?.as_str())))
    }

    /// Returns the number of copies that differ in this way, and by how many bytes.
    pub fn misfit(&self, kind: Misfit) -> (u64, u64) {
        let of_kind = self.misfits.iter().filter(|misfit| misfit.kind == kind.name());
        of_kind.fold((0, 0), |(packets, bytes), of| {
            (u64::saturating_add(packets, of.packets), u64::saturating_add(bytes, of.bytes))
        })
    }
}

impl CounterStatus {
    /// Whether the packets were copied.
    pub fn is_copied(&self) -> bool {
        self.result == Verdict::Copied.name()
    }

    /// Whether the packets should have been copied but were not.
    pub fn is_lost(&self) -> bool {
        LOSSES.iter().any(|loss| self.result == loss.name())
    }
}

/// The notes on the last round of the reconcile loop.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notes {
    /// The pods and interfaces that are selected but not mirrored.
    pub not_mirrored: Vec<Finding>,
    /// Annotations that are ignored.
    pub bad_annotations: Vec<Finding>,
    /// The operations that failed and will be tried again.
    pub failures: Vec<String>,
    /// The pods and tunnels that copies cannot be sent to.
    #[serde(default)]
    pub unreached_targets: Vec<Finding>,
    /// The pods of the node. `None`: the agent has no list of pods yet.
    #[serde(default)]
    pub pods: Option<Vec<KnownPod>>,
    /// The coverage of each tapped NIC of a pod.
    #[serde(default)]
    pub coverage: Vec<NicCoverage>,
}

/// The coverage of a NIC: whether its tap sees what the NIC carries.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NicCoverage {
    /// Namespace and name of the pod.
    pub pod: String,
    /// The NIC inside the pod.
    pub nic: String,
    /// The tapped device.
    pub device: String,
    /// Why a tap on the node side of a veth sees ingress inside the pod. `None`: it sees it on the node side.
    #[serde(default)]
    pub why_inside: Option<String>,
    /// Coverage of ingress.
    pub ingress: DirectionCoverage,
    /// Coverage of egress.
    pub egress: DirectionCoverage,
}

/// The coverage of one direction of a NIC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectionCoverage {
    /// The state: `Covered`, `Bypassed`, `Hidden`, `NoHook` or `Unknown`.
    pub state: String,
    /// An explanation of the state.
    pub message: String,
    /// Time in this state, in seconds.
    pub seconds: u64,
    /// Packets that the tap saw since the agent began to compare.
    pub seen: u64,
    /// Packets that the NIC carried in the same time.
    pub carried: u64,
}

/// A pod that the agent's list contains.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownPod {
    /// Namespace and name.
    pub pod: String,
    /// Why no mirror is requested for the pod. `None`: one is requested.
    pub not_asked: Option<Finding>,
}

/// Why something is not mirrored, or not as requested. For the API of packets, an agent also reports with an empty reason
/// that packets are read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Finding {
    /// Namespace and name. `None`: an interface that the user named, or a target.
    pub pod: Option<String>,
    /// The NIC, if the reason concerns a NIC; or the interface.
    pub nic: Option<String>,
    /// The mirror, if the reason concerns a mirror with a name.
    pub mirror: Option<String>,
    /// The target, if the reason concerns a target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// The reason, in one word.
    pub reason: String,
    /// An explanation of the reason.
    pub message: String,
    /// How to resolve the problem, or how to have the pod mirrored.
    pub remedy: String,
}

impl NodeStatus {
    /// Returns the table for people.
    pub fn table(&self) -> String {
        table::table(self)
    }

    /// Returns a plain-text explanation for one pod, given as `NAMESPACE/NAME`.
    ///
    /// # Errors
    ///
    /// The pod is unknown: a message that says where to look.
    pub fn explain(&self, pod: &str) -> Result<String, String> {
        explain::explain(self, pod)
    }
}
