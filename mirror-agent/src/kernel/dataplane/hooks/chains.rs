//! [`Chains`]: polls the TCX and netkit chains of the node's hooks.
//!
//! The kernel sends no event when a chain changes. So the agent reads the ids of the programs once a second, or less
//! often if that would take more than 1 % of a CPU. A round evaluates a changed chain.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;

use super::{EVERY, tcx};
use crate::{
    kernel::cpu::Work,
    model::{IfIndex, Program},
};

/// The chains, as last read.
#[derive(Default)]
pub(super) struct Chains {
    /// The ids of the programs at each hook.
    seen: BTreeMap<(IfIndex, Program), Vec<u32>>,
    /// The time of the next poll; `None` before the first read.
    due: Option<Instant>,
}

impl Chains {
    /// Reads the chains of these hooks. Later polls read these hooks only.
    pub(super) fn follow(&mut self, hooks: &BTreeSet<(IfIndex, Program)>) {
        let work = Work::begin();
        self.seen = hooks.iter().map(|hook| (*hook, ids(*hook))).collect();
        self.due = Some(Instant::now() + work.rest(EVERY));
    }

    /// The time of the next poll; `None` if there is no chain to poll.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due.filter(|_| !self.seen.is_empty())
    }

    /// Polls the chains. Returns whether one has changed.
    pub(super) fn look(&mut self) -> bool {
        let before = self.seen.clone();
        self.follow(&before.keys().copied().collect());
        self.seen != before
    }

    /// Records that the agent has attached a program at a hook, or tried to. This change needs no further round.
    pub(super) fn touched(&mut self, hook: (IfIndex, Program)) {
        self.seen.insert(hook, ids(hook));
    }

    /// Records that podmirror has no program at a hook any more.
    pub(super) fn left(&mut self, hook: (IfIndex, Program)) {
        self.seen.remove(&hook);
    }
}

/// Returns the ids of the programs at a hook. A chain that cannot be read counts as empty here; a round finds the
/// error.
fn ids((ifindex, which): (IfIndex, Program)) -> Vec<u32> {
    tcx::ids(ifindex, which).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The chain of a new hook is polled, even if no round follows the one that has attached there.
    #[test]
    fn a_hook_is_followed_from_its_attachment_to_its_end() {
        // Nothing else changes the chain of the loopback device.
        let hook = (IfIndex(1), Program::TapIngress);
        let mut chains = Chains::default();
        assert!(chains.due().is_none());
        chains.follow(&BTreeSet::new());
        assert!(chains.due().is_none(), "nothing of podmirror is there");
        chains.touched(hook);
        assert!(chains.due().is_some());
        assert!(!chains.look());
        chains.seen.insert(hook, vec![u32::MAX]);
        assert!(chains.look(), "another program is gone");
        assert!(!chains.look(), "a change is reported once");
        chains.left(hook);
        assert!(chains.due().is_none());
    }
}
