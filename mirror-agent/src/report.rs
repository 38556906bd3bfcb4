//! [`Report`]: what a round of the loop tells to others.
//!
//! Data only. The loop publishes one at the end of each round; whoever wants to tell people (metrics, readiness,
//! events) reads the newest, or compares it with the one before. Nobody answers.

use std::{collections::BTreeSet, sync::Arc};

use tokio::{sync::watch, time::Instant};

use crate::select::{BadAnnotation, Skipped};

/// The newest report.
pub type Reports = watch::Receiver<Arc<Report>>;

/// What there is to tell at the end of a round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// When the round ended; before the first one, when the loop was made.
    pub at: Instant,
    /// There was a complete list of pods.
    pub is_listed: bool,
    /// This round, or one before it, had a complete list of pods and no failure.
    pub is_reconciled: bool,
    /// Taps that are wanted.
    pub wanted: usize,
    /// Those of them that stand, as far as this round has seen; without a list of pods, those that an earlier agent
    /// has left.
    pub attached: usize,
    /// What is selected but not tapped. A round that could not read the devices leaves it as it was.
    pub skipped: BTreeSet<Skipped>,
    /// The annotations that make no sense.
    pub bad: BTreeSet<BadAnnotation>,
    /// What failed in this round, and will be tried again.
    pub failures: BTreeSet<String>,
}

/// The report of a loop that has not looked at anything yet.
impl Default for Report {
    fn default() -> Self {
        Self {
            at: Instant::now(),
            is_listed: false,
            is_reconciled: false,
            wanted: 0,
            attached: 0,
            skipped: BTreeSet::new(),
            bad: BTreeSet::new(),
            failures: BTreeSet::new(),
        }
    }
}
