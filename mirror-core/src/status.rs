//! What a node mirrors, as `mirror-agent status` shows it: the types of `-o json`, the table, and the words about a pod.
//!
//! The types are an interface: a field is added, and never renamed. The agent fills them from the pinned maps and from
//! its notes. A program on another machine reads the JSON into the same types and prints the same table.

mod explain;
mod table;

use mirror_common::verdict::{Misfit, Verdict};
use serde::{Deserialize, Serialize};

pub use self::table::{columns, printable};
use crate::settings::{Budget, Settings, Share};

/// The verdicts of packets that should have been copied and were not.
pub const LOSSES: [Verdict; 5] =
    [Verdict::TargetDown, Verdict::Congested, Verdict::Failed, Verdict::Uncut, Verdict::Lost];

/// The reason of an annotation that is ignored, in one word.
const BAD_ANNOTATION: &str = "BadAnnotation";

/// What a node mirrors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Version of the agent that answered.
    pub version: String,
    /// An agent holds the lock of the pins.
    pub agent_running: bool,
    /// The targets.
    pub targets: Vec<TargetStatus>,
    /// The taps.
    pub taps: Vec<TapStatus>,
    /// The notes of the running agent; `None` where no agent runs.
    pub notes: Option<Notes>,
}

/// A target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetStatus {
    /// Its name.
    pub name: String,
    /// What the administrator named: a device, as in `ids0`, a pod, as in `pod:security/suricata`, a
    /// tunnel, as in `vxlan:10.9.0.5:4789/vni=77`, or `stream`; empty for the stream of a capture.
    #[serde(default)]
    pub destination: String,
    /// The device that takes the copies: the mirror interface, the node's end of a pod's veth, or a tunnel's. Empty for a stream, which
    /// a program reads, and while there is none.
    pub device: String,
    /// `None`: there is no such interface now, or the target is a stream.
    pub ifindex: Option<u32>,
    /// It takes copies.
    pub up: bool,
    /// Copies go to a program that reads them, and to no device.
    #[serde(default)]
    pub stream: bool,
    /// Frames that the device has taken and not sent since it was made, those of other software included. `None`:
    /// there is no device.
    #[serde(default)]
    pub dropped: Option<u64>,
    /// Copies are made only while a packet socket reads the device (`--when-read`).
    #[serde(default)]
    pub when_read: bool,
}

/// A tap.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TapStatus {
    /// ifindex of the tapped device.
    pub ifindex: u32,
    /// Its name.
    pub device: String,
    /// The device is inside the pod: the NIC itself. Its index and name are those of the pod's namespace.
    #[serde(default)]
    pub inside: bool,
    /// `None`: an interface that the user named.
    pub pod: Option<PodStatus>,
    /// The NIC inside the pod.
    pub nic: String,
    /// The network that the NIC is in, as the pod's annotation `k8s.v1.cni.cncf.io/network-status` says; `None`: it does
    /// not say.
    #[serde(default)]
    pub network: Option<String>,
    /// How our programs run at its hooks.
    pub attached: AttachedStatus,
    /// The NIC inside the pod, if what reaches the pod is seen there; `None`: the tapped device sees both directions.
    #[serde(default)]
    pub pod_side: Option<PodSideStatus>,
    /// Its sessions.
    pub sessions: Vec<SessionStatus>,
}

/// A mirror at one tap.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionStatus {
    /// The mirror.
    pub mirror: String,
    /// Where its copies go.
    pub target: String,
    /// Its number on this node, in the records of a stream and in the GENEVE option of a tunnel.
    pub serial: u32,
    /// The tunnel key of its copies; `None`: the target is no tunnel.
    pub tunnel_key: Option<u32>,
    /// Where the mirror was asked for.
    pub origin: String,
    /// The directions that it copies.
    pub direction: String,
    /// What was asked for besides.
    pub settings: SettingsStatus,
    /// The settings in words, in the order in which they are decided. For the table alone.
    #[serde(skip)]
    pub words: Vec<String>,
    /// The budget that is used up, so that nothing is copied any more.
    pub ended: Option<String>,
    /// What is left of the budgets.
    #[serde(default)]
    pub left: LeftStatus,
    /// The counters that are not zero.
    pub counters: Vec<CounterStatus>,
    /// The copies that are not as asked for, where there are any.
    #[serde(default)]
    pub misfits: Vec<MisfitStatus>,
}

/// The settings besides the direction; `None`: not set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SettingsStatus {
    /// The filter's text.
    pub filter: Option<String>,
    /// Share of the flows, up to 1.
    pub sample: Option<f64>,
    /// Packets a second.
    pub rate_packets: Option<u64>,
    /// Bits a second.
    pub rate_bits: Option<u64>,
    /// Bytes of a copy.
    pub snaplen: Option<u32>,
    /// Seconds.
    pub duration: Option<f64>,
    /// Packets until the mirror ends.
    pub packets: Option<u64>,
    /// Bytes until the mirror ends.
    pub bytes: Option<u64>,
}

/// What is left of the budgets of a session; `None`: there is no such budget.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
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

impl From<Settings> for SettingsStatus {
    fn from(settings: Settings) -> Self {
        let Settings { filter, sample, seed: _, rate, snaplen, budget } = settings;
        Self {
            filter: filter.map(|filter| filter.text),
            sample: sample.map(|Share(share)| f64::from(share) / (f64::from(u32::MAX) + 1.0)),
            rate_packets: rate.and_then(|rate| rate.packets),
            rate_bits: rate.and_then(|rate| rate.bits),
            snaplen,
            duration: budget.duration.map(|time| time.as_secs_f64()),
            packets: budget.packets,
            bytes: budget.bytes,
        }
    }
}

/// A pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodStatus {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

/// The NIC inside a pod, where the tap at the node's end of its veth sees what reaches the pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodSideStatus {
    /// ifindex of the NIC, in the pod's namespace.
    pub ifindex: u32,
    /// How our program runs where the NIC receives: `tcx` or `none`.
    pub attached: String,
}

/// How our program runs at each tc hook: `tcx`, `netkit`, `clsact`, `none`, or `unknown` if the hook cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachedStatus {
    /// Where the device receives.
    pub ingress: String,
    /// Where the device sends.
    pub egress: String,
}

impl AttachedStatus {
    /// No program of ours runs at the hook.
    pub const NONE: &str = "none";
    /// The hook cannot be read.
    pub const UNKNOWN: &str = "unknown";
}

impl Default for AttachedStatus {
    fn default() -> Self {
        Self { ingress: Self::NONE.to_owned(), egress: Self::NONE.to_owned() }
    }
}

/// Packets of a session with one verdict in one direction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CounterStatus {
    /// The direction, seen from the pod.
    pub direction: String,
    /// The verdict.
    pub verdict: String,
    /// How many.
    pub packets: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Copies of a session in one direction that are not as it asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MisfitStatus {
    /// The direction, seen from the pod.
    pub direction: String,
    /// `cut`: the copies lack bytes. `long`: they have more than the snap length.
    pub kind: String,
    /// How many.
    pub packets: u64,
    /// The bytes by which they differ.
    pub bytes: u64,
}

impl SessionStatus {
    /// The copies that differ in this way, and the bytes by which they do.
    pub fn misfit(&self, kind: Misfit) -> (u64, u64) {
        let of_kind = self.misfits.iter().filter(|misfit| misfit.kind == kind.name());
        of_kind.fold((0, 0), |(packets, bytes), of| {
            (u64::saturating_add(packets, of.packets), u64::saturating_add(bytes, of.bytes))
        })
    }
}

impl CounterStatus {
    /// The packets were copied.
    pub fn is_copied(&self) -> bool {
        self.verdict == Verdict::Copied.name()
    }

    /// The packets should have been copied, and were not.
    pub fn is_lost(&self) -> bool {
        LOSSES.iter().any(|loss| self.verdict == loss.name())
    }
}

/// The notes on the last round of the loop.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notes {
    /// The pods and interfaces that are chosen but not mirrored.
    pub not_mirrored: Vec<NotMirrored>,
    /// Annotations that are ignored.
    pub bad_annotations: Vec<BadAnnotation>,
    /// The operations that failed and will be tried again.
    pub failures: Vec<String>,
    /// The pods and tunnels to which nothing can be copied.
    #[serde(default)]
    pub unreached_targets: Vec<Unreached>,
    /// The pods of this node; `None`: the agent has no list of them yet.
    #[serde(default)]
    pub pods: Option<Vec<KnownPod>>,
    /// For each tapped NIC of a pod: whether the tap sees what the NIC carries.
    #[serde(default)]
    pub coverage: Vec<NicCoverage>,
}

/// Whether the tap of a NIC sees what the NIC carries.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NicCoverage {
    /// Namespace and name of the pod.
    pub pod: String,
    /// The NIC inside the pod.
    pub nic: String,
    /// The tapped device.
    pub device: String,
    /// Why what reaches the pod is seen inside it, by a tap at the node's end of a veth; `None`: it is not.
    #[serde(default)]
    pub why_inside: Option<String>,
    /// Of what reaches the pod.
    pub ingress: DirectionCoverage,
    /// Of what leaves the pod.
    pub egress: DirectionCoverage,
}

/// Whether one direction of a NIC is covered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectionCoverage {
    /// The state in one word: `Covered`, `Bypassed`, `Hidden`, `NoHook` or `Unknown`.
    pub state: String,
    /// What it means, or the reason.
    pub message: String,
    /// How long it has this state, in seconds.
    pub seconds: u64,
    /// Packets that the tap has seen since the agent began to compare.
    pub seen: u64,
    /// Packets that the NIC has carried meanwhile.
    pub carried: u64,
}

/// A pod that the agent knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownPod {
    /// Namespace and name.
    pub pod: String,
    /// Why no mirror of it is asked for; `None`: one is asked for.
    pub not_asked: Option<NotAsked>,
}

/// Why no mirror of a pod is asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotAsked {
    /// The reason in one word.
    pub reason: String,
    /// The reason.
    pub message: String,
    /// What can be done to have the pod mirrored.
    pub remedy: String,
}

/// A pod or a tunnel to which nothing can be copied.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unreached {
    /// The target.
    pub target: String,
    /// The reason.
    pub message: String,
}

/// A pod, a NIC or an interface that is chosen but not mirrored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotMirrored {
    /// Namespace and name; `None`: an interface that the user named.
    pub pod: Option<String>,
    /// The NIC, where the reason concerns a NIC; or the interface.
    pub nic: Option<String>,
    /// The mirror, where the reason concerns a mirror with a name.
    pub mirror: Option<String>,
    /// The reason in one word.
    pub reason: String,
    /// The reason.
    pub message: String,
    /// What can be done about it.
    #[serde(default)]
    pub remedy: String,
}

/// An annotation that is invalid, and ignored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BadAnnotation {
    /// Namespace and name of the pod that it is for.
    pub pod: String,
    /// The problem.
    pub message: String,
}

impl NodeStatus {
    /// The table for people.
    pub fn table(&self) -> String {
        table::table(self)
    }

    /// One pod, by `NAMESPACE/NAME`, in plain words for people.
    ///
    /// # Errors
    ///
    /// Nothing is known of the pod: a message that says where to look.
    pub fn explain(&self, pod: &str) -> Result<String, String> {
        explain::explain(self, pod)
    }
}
