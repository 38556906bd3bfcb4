//! [`Report`]: the result of a round of the loop; and its readers, one in each module.
//!
//! The loop publishes a report at the end of each round, and after each reading of the NICs' counters. A reader
//! uses the newest one, or compares it with the one before, and can read counters through
//! `kernel::dataplane::readout`. No reader passes anything back to the loop or changes a mirror.

pub mod admin;
pub mod events;
pub mod health;
pub mod metrics;
pub mod mirror_node;
pub mod notes;
pub(crate) mod status;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use mirror_common::verdict::Direction;
use mirror_core::coverage::{Reason, State};
use serde::{Deserialize, Serialize};
use tokio::{sync::watch, time::Instant};

use crate::{
    model::{Device, Ended, MirrorId, PodId, RingId, TargetName, TargetResource},
    select::{BadAnnotation, Coverage, Skipped, Why},
};

/// The longest time between two rounds, in case an event was lost.
pub(crate) const TICK: Duration = Duration::from_secs(60);

/// The newest report.
pub type Reports = watch::Receiver<Arc<Report>>;

/// The result of a round. The default is the report before the first round.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// When the round ended; before the first round, when the loop was created, if there is one.
    pub at: Option<Instant>,
    /// There was a complete list of pods.
    pub is_listed: bool,
    /// This round, or an earlier one, had a complete list of pods and no failure.
    pub is_reconciled: bool,
    /// The rings of the programs that read packets and whose sessions are fully installed by a round.
    pub rings: BTreeSet<RingId>,
    /// The number of wanted taps.
    pub wanted: usize,
    /// The wanted taps that are installed, as far as this round has seen. Without a list of pods: the taps that an
    /// earlier agent left.
    pub attached: usize,
    /// The selected pods and interfaces without a tap. A round that could not read the devices keeps this set
    /// unchanged.
    pub skipped: BTreeSet<Skipped>,
    /// The pods and tunnels that cannot receive copies, with the reason.
    pub unreached: BTreeMap<TargetName, String>,
    /// The targets that this round could not write, with the reason. They are in `failures`, too.
    pub unwritten: BTreeMap<TargetName, String>,
    /// The targets that accept no copies now, with the reason: those above, and those whose device is down or missing.
    /// Empty before the first round.
    pub down: BTreeMap<TargetName, String>,
    /// The listed pods, each with the reason if no mirror is requested for it; `None` without a complete list.
    pub pods: Option<BTreeMap<PodId, Option<Why>>>,
    /// The tapped NICs of pods, and whether their taps see all of their packets. Newer than the round: updated with the
    /// counters.
    pub coverage: BTreeMap<Device, NicCoverage>,
    /// The Mirrors and ClusterMirrors that select pods of this node, with their state.
    pub resources: Vec<Coverage>,
    /// The readers of the API that select pods of this node, with their state, by their rings.
    pub readers: BTreeMap<RingId, Coverage>,
    /// The wanted mirrors.
    pub mirrors: Mirrors,
    /// The mirrors of an earlier agent that existed when this agent started.
    pub found: Arc<Mirrors>,
    /// The MirrorTargets that this node has or refuses, refused ones with the reason instead of the destination. Empty
    /// before the first list.
    pub targets: Vec<TargetResource>,
    /// The invalid annotations.
    pub bad: BTreeSet<BadAnnotation>,
    /// The operations that failed in this round; they are retried.
    pub failures: BTreeSet<String>,
}

/// The mirrors of pods, without the captures of `tail` and `capture`.
pub type Mirrors = BTreeMap<PodId, BTreeMap<MirrorId, Mirrored>>;

/// A mirror of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mirrored {
    /// The target of its copies.
    pub target: TargetName,
    /// Requested by an annotation, a Mirror or a ClusterMirror, not only by the node's policy.
    pub is_asked: bool,
    /// Its progress.
    pub stage: Stage,
}

/// The progress of a mirror. A pod's is the minimum of its NICs'.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// It is wanted and not installed.
    Pending,
    /// It is installed.
    Installed,
    /// A limit has ended it.
    Ended(Ended),
}

/// A NIC of a pod, and whether its tap sees all of its packets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicCoverage {
    /// The pod.
    pub pod: PodId,
    /// The NIC inside the pod.
    pub nic: String,
    /// The name of the tapped device.
    pub device: String,
    /// Why ingress is seen at the NIC, by a tap on the node side of its veth; `None`: it is not.
    pub inside: Option<Reason>,
    /// The coverage of each direction.
    pub directions: [Judged; Direction::COUNT],
}

/// The coverage of a direction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judged {
    /// The state.
    pub state: State,
    /// When the state began.
    pub since: Instant,
    /// Packets that the tap has seen since the comparison began.
    pub seen: u64,
    /// Packets that the NIC has carried since then.
    pub carried: u64,
}

/// How full the memory of a recorder is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fill {
    /// The bytes of its packets.
    pub used: u64,
    /// The maximum of these bytes.
    pub size: u64,
    /// The time of the oldest packet that it can still have, in nanoseconds since the epoch.
    pub oldest_ns: u64,
}
