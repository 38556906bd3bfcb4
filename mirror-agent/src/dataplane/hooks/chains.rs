//! [`Chains`]: which programs stand in the TCX and netkit chains of the node's hooks.
//!
//! The kernel announces no change of a chain. So the agent reads the ids of the programs again and again: each second, or
//! less often where that takes more than a hundredth of the time. A round judges a changed chain. Called by
//! [`Hooks`](super::Hooks) only.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::Instant;

use super::{rest, tcx};
use crate::model::{IfIndex, Program};

/// The chains, as they were seen last.
#[derive(Default)]
pub(super) struct Chains {
    /// The ids of the programs at each hook.
    seen: BTreeMap<(IfIndex, Program), Vec<u32>>,
    /// When they were read, and how long that took.
    last: Option<(Instant, Duration)>,
}

impl Chains {
    /// Reads the chains of these hooks, and no others from now on.
    pub(super) fn follow(&mut self, hooks: &BTreeSet<(IfIndex, Program)>) {
        let began = Instant::now();
        self.seen = hooks.iter().map(|hook| (*hook, ids(*hook))).collect();
        self.last = Some((began, began.elapsed()));
    }

    /// When the chains are to be read again; `None`: there are none.
    pub(super) fn due(&self) -> Option<Instant> {
        let (at, took) = self.last.filter(|_| !self.seen.is_empty())?;
        Some(at + rest(took))
    }

    /// Reads the chains again. Returns whether one has changed.
    pub(super) fn look(&mut self) -> bool {
        let before = self.seen.clone();
        self.follow(&before.keys().copied().collect());
        self.seen != before
    }

    /// Notes that the agent itself has changed a chain.
    pub(super) fn touched(&mut self, hook: (IfIndex, Program)) {
        if let Some(seen) = self.seen.get_mut(&hook) {
            *seen = ids(hook);
        }
    }
}

/// A chain that cannot be read counts as empty here. A round finds the error.
fn ids((ifindex, which): (IfIndex, Program)) -> Vec<u32> {
    tcx::ids(ifindex, which).unwrap_or_default()
}
