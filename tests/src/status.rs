//! The output of `mirror-agent status -o json`, with accessors for stories.
//!
//! These are not the agent's types: the output is an interface, and if it changes, a story must fail.

use std::{collections::BTreeMap, ops::Deref};

use serde::Deserialize;

/// `mirror-agent status -o json`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Status {
    /// Version of the agent that answered.
    pub version: String,
    /// Whether an agent runs on this node.
    pub agent_running: bool,
    /// The targets.
    pub targets: Vec<Target>,
    /// The taps.
    pub taps: Vec<TapStatus>,
    /// The part that only a running agent has, without the coverage ([`Lab::coverage`](crate::Lab::coverage)). `None`
    /// if no agent runs.
    pub notes: Option<serde_json::Value>,
}

impl Status {
    /// The target `default`, which is the mirror interface. Returns a target without a device before an agent has
    /// written it.
    pub fn mirror(&self) -> Target {
        self.target("default")
    }

    /// The target of this name. Returns a target without a device before an agent has written it.
    pub fn target(&self, name: &str) -> Target {
        self.targets.iter().find(|target| target.name == name).cloned().unwrap_or_default()
    }

    /// The tap on a device.
    #[track_caller]
    pub fn tap(&self, device: &str) -> &TapStatus {
        let found = self.taps.iter().find(|tap| tap.device == device);
        found.unwrap_or_else(|| panic!("no tap on {device}: {self:#?}"))
    }
}

/// A target in the status.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// Name.
    pub name: String,
    /// The destination that the administrator has configured.
    pub destination: String,
    /// The device that receives the copies.
    pub device: String,
    /// ifindex; `None` if the device does not exist.
    pub ifindex: Option<u32>,
    /// The device is up with a carrier, or a program reads the stream.
    pub up: bool,
    /// The target is a stream.
    pub stream: bool,
    /// Frames that the device has dropped; `None` without a device.
    pub dropped: Option<u64>,
    /// Copies are made only while a reader exists.
    pub when_read: bool,
}

/// A tap in the status.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TapStatus {
    /// ifindex of the tapped device.
    pub ifindex: u32,
    /// Its name.
    pub device: String,
    /// Whether the device is inside the pod.
    pub inside: bool,
    /// The tapped pod.
    pub pod: Option<PodRef>,
    /// The tapped NIC.
    pub nic: String,
    /// The network of the NIC.
    pub network: Option<String>,
    /// By hook: how the program is attached.
    pub attached: BTreeMap<String, String>,
    /// The NIC inside the pod, if ingress is tapped there.
    pub pod_side: Option<PodSide>,
    /// Its sessions.
    pub sessions: Vec<SessionStatus>,
}

impl TapStatus {
    /// Whether programs run at the hooks of both directions.
    pub fn is_attached(&self) -> bool {
        let runs_at = |hook: &str| self.attached.get(hook).is_some_and(|attached| runs(attached));
        let is_inside = |side: &PodSide| runs(&side.attached);
        runs_at("ingress") && self.pod_side.as_ref().map_or_else(|| runs_at("egress"), is_inside)
    }

    /// The session of a mirror.
    #[track_caller]
    pub fn session(&self, mirror: &str) -> &SessionStatus {
        let found = self.sessions.iter().find(|session| session.mirror == mirror);
        found.unwrap_or_else(|| panic!("no mirror {mirror}: {self:#?}"))
    }
}

/// Whether this value of a hook means that one of podmirror's programs runs there.
fn runs(attached: &str) -> bool {
    !matches!(attached, "none" | "unknown")
}

/// Gives access to the mirror without a name, which most stories use.
impl Deref for TapStatus {
    type Target = SessionStatus;

    #[track_caller]
    fn deref(&self) -> &SessionStatus {
        self.session("default")
    }
}

/// The pod side of a tap.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodSide {
    /// ifindex of the NIC inside the pod.
    pub ifindex: u32,
    /// How the program is attached there.
    pub attached: String,
}

/// A session in the status: one mirror at one tap.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionStatus {
    /// The mirror.
    pub mirror: String,
    /// The target of its copies.
    pub target: String,
    /// Its serial number on the node.
    pub serial: u32,
    /// The tunnel key of its copies.
    pub tunnel_key: Option<u32>,
    /// Where the mirror was requested.
    pub origin: String,
    /// The requested directions.
    pub direction: String,
    /// The settings, as JSON.
    pub settings: serde_json::Value,
    /// The exhausted budget.
    pub ended: Option<String>,
    /// Remaining budgets, as JSON.
    pub left: serde_json::Value,
    /// The counters that are not zero.
    pub counters: Vec<Counts>,
    /// Copies that differ from what was requested.
    pub misfits: Vec<Misfit>,
}

/// Copies of a session that differ from what was requested.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Misfit {
    /// The direction.
    pub direction: String,
    /// `cut` or `long`.
    pub kind: String,
    /// Number of copies.
    pub packets: u64,
    /// The bytes by which they differ.
    pub bytes: u64,
}

impl SessionStatus {
    /// Cut copies of both directions, and the bytes that they lack.
    pub fn cut(&self) -> (u64, u64) {
        let cut = self.misfits.iter().filter(|misfit| misfit.kind == "cut");
        cut.fold((0, 0), |sum, misfit| (sum.0 + misfit.packets, sum.1 + misfit.bytes))
    }

    /// Packets with this verdict in this direction.
    pub fn packets(&self, direction: &str, verdict: &str) -> u64 {
        self.counts(direction, verdict).map_or(0, |counts| counts.packets)
    }

    /// Bytes of the packets with this verdict in this direction.
    pub fn bytes(&self, direction: &str, verdict: &str) -> u64 {
        self.counts(direction, verdict).map_or(0, |counts| counts.bytes)
    }

    /// Packets of both directions with this verdict.
    pub fn total(&self, verdict: &str) -> u64 {
        self.packets("ingress", verdict) + self.packets("egress", verdict)
    }

    /// Packets of all directions and verdicts.
    pub fn seen(&self) -> u64 {
        self.counters.iter().map(|counts| counts.packets).sum()
    }

    /// The packets as a map by "direction verdict", to compare all counters at once.
    pub fn verdicts(&self) -> BTreeMap<String, u64> {
        let key = |counts: &Counts| (format!("{} {}", counts.direction, counts.result), counts.packets);
        self.counters.iter().map(key).collect()
    }

    fn counts(&self, direction: &str, verdict: &str) -> Option<&Counts> {
        self.counters.iter().find(|counts| counts.direction == direction && counts.result == verdict)
    }
}

/// A pod in the status.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodRef {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
}

/// A counter in the status.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counts {
    /// The direction, seen from the pod.
    pub direction: String,
    /// The result: the verdict's word.
    pub result: String,
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}
