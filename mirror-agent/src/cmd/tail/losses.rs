//! How many packets the ring of `tail` or `capture` has lost, by session. Pure.
//!
//! The kernel counts what a session has lost since the session began. That can be more than the ring of this command
//! has lost: an earlier reader of the target had a ring, too, and a session that has changed its target has lost packets
//! elsewhere. So only the growth counts, from one look to the next, while a session copies to the target. What was lost
//! between a change of the target and the looks beside it is left out. [`sessions`](super::sessions) calls it.

use std::collections::{BTreeMap, BTreeSet};

/// The losses so far. Each session is named by its number.
#[derive(Debug, Default)]
pub(super) struct Losses {
    lost: BTreeMap<u32, u64>,
    /// The counters at the last look, of the sessions that copied to the target then.
    here: BTreeMap<u32, u64>,
    /// The other sessions at the last look.
    elsewhere: BTreeSet<u32>,
}

impl Losses {
    /// Nothing is lost yet. The arguments are those of [`look`](Self::look).
    pub(super) fn begin(here: BTreeMap<u32, u64>, elsewhere: BTreeSet<u32>) -> Self {
        Self { lost: BTreeMap::new(), here, elsewhere }
    }

    /// Looks at the counters of the sessions that copy to the target now, and at which other sessions there are.
    pub(super) fn look(&mut self, here: BTreeMap<u32, u64>, elsewhere: BTreeSet<u32>) {
        for (serial, counter) in &here {
            let before = match self.here.get(serial) {
                Some(before) => *before,
                None if self.elsewhere.contains(serial) => *counter,
                // It has begun since the last look.
                None => 0,
            };
            *self.lost.entry(*serial).or_default() += counter.saturating_sub(before);
        }
        (self.here, self.elsewhere) = (here, elsewhere);
    }

    /// Forgets sessions that have gone.
    pub(super) fn forget(&mut self, is_gone: impl Fn(u32) -> bool) {
        self.lost.retain(|serial, _| !is_gone(*serial));
    }

    /// The packets of a session that were lost.
    pub(super) fn of(&self, serial: u32) -> u64 {
        self.lost.get(&serial).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn look(losses: &mut Losses, here: &[(u32, u64)], elsewhere: &[u32]) {
        losses.look(here.iter().copied().collect(), elsewhere.iter().copied().collect());
    }

    #[test]
    fn the_losses_of_earlier_readers_and_other_targets_do_not_count() {
        let mut losses = Losses::begin([(1, 100)].into(), [2].into());
        look(&mut losses, &[(1, 107), (2, 50), (3, 9)], &[]);
        assert_eq!([1, 2, 3, 4].map(|serial| losses.of(serial)), [7, 0, 9, 0]);
        look(&mut losses, &[(2, 53)], &[1, 3]);
        // Session 1 has lost 200 packets elsewhere, and comes back.
        look(&mut losses, &[(1, 307), (2, 53)], &[3]);
        look(&mut losses, &[(1, 308), (2, 53)], &[3]);
        assert_eq!([1, 2, 3].map(|serial| losses.of(serial)), [8, 3, 9]);
    }

    proptest! {
        /// A session goes back and forth and loses packets all the time. It is looked at behind each change, and perhaps
        /// also before it.
        #[test]
        fn no_loss_of_another_ring_counts(
            starts_here: bool,
            looks_before: bool,
            steps in prop::collection::vec(prop::option::of(0..100_u64), 0..50),
        ) {
            let (mut is_here, mut counter, mut lost_here) = (starts_here, 40, 0);
            let seen = |is_here, counter| match is_here {
                true => (BTreeMap::from([(1, counter)]), BTreeSet::new()),
                false => (BTreeMap::new(), BTreeSet::from([1])),
            };
            let (here, elsewhere) = seen(is_here, counter);
            let mut losses = Losses::begin(here, elsewhere);
            let mut look = |is_here, counter| {
                let (here, elsewhere) = seen(is_here, counter);
                losses.look(here, elsewhere);
            };
            for step in steps {
                match step {
                    Some(lost) => {
                        counter += lost;
                        lost_here += if is_here { lost } else { 0 };
                    }
                    None => {
                        if looks_before {
                            look(is_here, counter);
                        }
                        is_here = !is_here;
                        look(is_here, counter);
                    }
                }
            }
            look(is_here, counter);
            prop_assert!(losses.of(1) <= lost_here);
            prop_assert!(!looks_before || losses.of(1) == lost_here);
        }
    }
}
