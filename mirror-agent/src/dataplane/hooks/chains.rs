//! [`Chains`]: which programs stand in the TCX and netkit chains of the node's hooks.
//!
//! The kernel announces no change of a chain. So the agent reads the ids of the programs again and again: each second,
//! or less often where that takes more than a hundredth of the time. A round judges a changed chain.

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

    /// Notes that the agent has attached, or tried to attach, a program at a hook. No round need follow that sees it.
    pub(super) fn touched(&mut self, hook: (IfIndex, Program)) {
        self.seen.insert(hook, ids(hook));
    }

    /// Notes that nothing of ours is to be at a hook any more.
    pub(super) fn left(&mut self, hook: (IfIndex, Program)) {
        self.seen.remove(&hook);
    }
}

/// A chain that cannot be read counts as empty here. A round finds the error.
fn ids((ifindex, which): (IfIndex, Program)) -> Vec<u32> {
    tcx::ids(ifindex, which).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The chain of a hook that is new is read again, although no round comes after the one that has attached there.
    #[test]
    fn a_hook_is_followed_from_its_attachment_to_its_end() {
        // The loopback device, of which nobody changes the chain.
        let hook = (IfIndex(1), Program::TapIngress);
        let mut chains = Chains::default();
        assert!(chains.due().is_none());
        chains.follow(&BTreeSet::new());
        assert!(chains.due().is_none(), "nothing of ours is there");
        chains.touched(hook);
        assert!(chains.due().is_some());
        assert!(!chains.look());
        chains.seen.insert(hook, vec![u32::MAX]);
        assert!(chains.look(), "another program has gone");
        assert!(!chains.look(), "a change is told once");
        chains.left(hook);
        assert!(chains.due().is_none());
    }
}
