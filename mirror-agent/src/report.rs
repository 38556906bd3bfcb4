//! [`Report`]: the result of a round of the loop, for the rest of the agent.
//!
//! Data only. The loop publishes a report at the end of each round, and after each reading of the NICs' counters. The
//! readers (metrics, readiness, events, conditions) take the newest one, or compare it with the one before. No reader sends
//! an answer to the loop.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use mirror_common::verdict::Direction;
use mirror_core::{
    coverage::{Reason, State},
    targets::Standing,
};
use tokio::{sync::watch, time::Instant};

use crate::{
    model::{Device, Ended, MirrorId, PodId, ResourceId, RingId, TargetName},
    select::{BadAnnotation, Coverage, Skipped, Unasked},
};

/// The newest report.
pub type Reports = watch::Receiver<Arc<Report>>;

/// The result of a round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// When the round ended; before the first one, when the loop was made.
    pub at: Instant,
    /// There was a complete list of pods.
    pub is_listed: bool,
    /// This round, or one before it, had a complete list of pods and no failure.
    pub is_reconciled: bool,
    /// The programs that read packets and that a round knew which has done all its work, by their rings.
    pub rings: BTreeSet<RingId>,
    /// Taps that are wanted.
    pub wanted: usize,
    /// The wanted taps that are installed, as far as this round has seen. Without a list of pods: the taps that an
    /// earlier agent has left.
    pub attached: usize,
    /// The pods and interfaces that are selected but not tapped. A round that could not read the devices leaves this
    /// set unchanged.
    pub skipped: BTreeSet<Skipped>,
    /// The pods and tunnels to which nothing can be copied, and why.
    pub unreached: BTreeMap<TargetName, String>,
    /// The targets that this round could not write, and why. These are among the failures, too.
    pub unwritten: BTreeMap<TargetName, String>,
    /// The targets that take no copies now, and why: these, and those whose device is down or not there. Empty before the
    /// first round.
    pub down: BTreeMap<TargetName, String>,
    /// The pods of the list, and why no mirror of a pod is asked for; `None`: there was no complete list.
    pub pods: Option<BTreeMap<PodId, Option<Unasked>>>,
    /// The tapped NICs of pods, and whether their taps see what they carry. Newer than the round: it follows the counters.
    pub coverage: BTreeMap<Device, NicCoverage>,
    /// The Mirrors and ClusterMirrors that select pods of this node, and what came of each.
    pub resources: Vec<Coverage>,
    /// The mirrors that are wanted.
    pub mirrors: Mirrors,
    /// Those that an earlier agent had left when this one looked first.
    pub found: Arc<Mirrors>,
    /// The MirrorTargets, and what each is on this node; none before there is a list.
    pub targets: Vec<Standing>,
    /// The Mirrors that have a stream, and who may read it.
    pub streams: BTreeMap<ResourceId, Keyed>,
    /// The annotations that make no sense.
    pub bad: BTreeSet<BadAnnotation>,
    /// The operations that failed in this round, and will be tried again.
    pub failures: BTreeSet<String>,
}

/// The mirrors of pods, without those that a program reads itself.
pub type Mirrors = BTreeMap<PodId, BTreeMap<MirrorId, Mirrored>>;

/// A mirror of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mirrored {
    /// Where its copies go.
    pub target: TargetName,
    /// An annotation, a Mirror or a ClusterMirror asks for it, and not the node's policy alone.
    pub is_asked: bool,
    /// How far it has come.
    pub stage: Stage,
}

/// How far a mirror has come. That of a pod is the least of those of its NICs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// It is wanted, and does not stand.
    Coming,
    /// It stands.
    Stands,
    /// A limit has ended it.
    Ended(Ended),
}

/// A Mirror with a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keyed {
    /// The UID of the Mirror: distinguishes it from one of the same name before it.
    pub uid: String,
    /// The SHA-256 of the key that a reader must have.
    pub key_sha256: [u8; 32],
}

/// A NIC of a pod, and whether its tap sees what it carries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicCoverage {
    /// The pod.
    pub pod: PodId,
    /// The NIC inside the pod.
    pub nic: String,
    /// The name of the tapped device.
    pub device: String,
    /// Why what reaches the pod is seen at the NIC, by a tap at the node's end of its veth; `None`: it is not.
    pub inside: Option<Reason>,
    /// By direction.
    pub directions: [Judged; Direction::COUNT],
}

/// Whether a direction is covered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judged {
    /// The state.
    pub state: State,
    /// Since when.
    pub since: Instant,
    /// Packets that the tap has seen since the loop began to compare.
    pub seen: u64,
    /// Packets that the NIC has carried meanwhile.
    pub carried: u64,
}

/// The report of a loop that has not looked at anything yet.
impl Default for Report {
    fn default() -> Self {
        Self {
            at: Instant::now(),
            is_listed: false,
            is_reconciled: false,
            rings: BTreeSet::new(),
            wanted: 0,
            attached: 0,
            skipped: BTreeSet::new(),
            unreached: BTreeMap::new(),
            unwritten: BTreeMap::new(),
            down: BTreeMap::new(),
            pods: None,
            coverage: BTreeMap::new(),
            resources: Vec::new(),
            mirrors: Mirrors::new(),
            found: Arc::default(),
            targets: Vec::new(),
            streams: BTreeMap::new(),
            bad: BTreeSet::new(),
            failures: BTreeSet::new(),
        }
    }
}
