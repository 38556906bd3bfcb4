//! [`Report`]: the result of a round of the loop, for the rest of the agent.
//!
//! Data only. The loop publishes a report at the end of each round. The readers (metrics, readiness, events) take the
//! newest one, or compare it with the one before. No reader sends an answer to the loop.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use tokio::{sync::watch, time::Instant};

use crate::{
    model::{PodId, RingId, TargetName},
    select::{BadAnnotation, Skipped, Unasked},
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
    /// The pods of the list, and why no mirror of a pod is asked for; `None`: there was no complete list.
    pub pods: Option<BTreeMap<PodId, Option<Unasked>>>,
    /// The annotations that make no sense.
    pub bad: BTreeSet<BadAnnotation>,
    /// The operations that failed in this round, and will be tried again.
    pub failures: BTreeSet<String>,
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
            pods: None,
            bad: BTreeSet::new(),
            failures: BTreeSet::new(),
        }
    }
}
