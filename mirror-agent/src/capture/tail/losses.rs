//! Counts the packets that a session matched and that did not reach the ring of `tail` or `capture`: those lost for
//! lack of room in the ring, and those refused by a rate or a budget. Pure.
//!
//! The kernel counts these from the start of the session. That can be more than this command has missed: an earlier
//! reader of the target had a ring, too, and a session that has changed its target has lost packets elsewhere. So only
//! the growth between two readings counts, while a session copies to the target. Losses between a change of the target
//! and the readings around it are left out. [`sessions`](super::sessions) calls it.

use std::collections::{BTreeMap, BTreeSet};

/// Packets of a session that did not reach the ring.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Missed {
    /// The ring had no room for them.
    pub(super) lost: u64,
    /// A rate or a budget refused them.
    pub(super) limited: u64,
}

impl Missed {
    /// Adds the growth since an earlier reading.
    fn grow(&mut self, before: Self, now: Self) {
        self.lost += now.lost.saturating_sub(before.lost);
        self.limited += now.limited.saturating_sub(before.limited);
    }
}

/// The losses so far, by the serial of the session.
#[derive(Debug, Default)]
pub(super) struct Losses {
    missed: BTreeMap<u32, Missed>,
    /// The counters at the last reading, of the sessions that copied to the target then.
    here: BTreeMap<u32, Missed>,
    /// The other sessions at the last reading.
    elsewhere: BTreeSet<u32>,
}

impl Losses {
    /// Starts without losses. The arguments are those of [`look`](Self::look).
    pub(super) fn begin(here: BTreeMap<u32, Missed>, elsewhere: BTreeSet<u32>) -> Self {
        Self { missed: BTreeMap::new(), here, elsewhere }
    }

    /// Updates the losses from the counters of the sessions that copy to the target now, and from the set of other
    /// sessions.
    pub(super) fn look(&mut self, here: BTreeMap<u32, Missed>, elsewhere: BTreeSet<u32>) {
        for (serial, counter) in &here {
            let before = match self.here.get(serial) {
                Some(before) => *before,
                None if self.elsewhere.contains(serial) => *counter,
                // The session has begun since the last reading.
                None => Missed::default(),
            };
            self.missed.entry(*serial).or_default().grow(before, *counter);
        }
        (self.here, self.elsewhere) = (here, elsewhere);
    }

    /// Drops sessions that no longer exist.
    pub(super) fn forget(&mut self, is_gone: impl Fn(u32) -> bool) {
        self.missed.retain(|serial, _| !is_gone(*serial));
    }

    /// The packets of a session that did not reach the ring.
    pub(super) fn of(&self, serial: u32) -> Missed {
        self.missed.get(&serial).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Twice as many packets were refused as were lost.
    fn missed(lost: u64) -> Missed {
        Missed { lost, limited: 2 * lost }
    }

    fn look(losses: &mut Losses, here: &[(u32, u64)], elsewhere: &[u32]) {
        let here = here.iter().map(|(serial, lost)| (*serial, missed(*lost)));
        losses.look(here.collect(), elsewhere.iter().copied().collect());
    }

    #[test]
    fn the_losses_of_earlier_readers_and_other_targets_do_not_count() {
        let mut losses = Losses::begin([(1, missed(100))].into(), [2].into());
        look(&mut losses, &[(1, 107), (2, 50), (3, 9)], &[]);
        assert_eq!([1, 2, 3, 4].map(|serial| losses.of(serial)), [7, 0, 9, 0].map(missed));
        look(&mut losses, &[(2, 53)], &[1, 3]);
        // Session 1 has lost 200 packets at another target, and returns.
        look(&mut losses, &[(1, 307), (2, 53)], &[3]);
        look(&mut losses, &[(1, 308), (2, 53)], &[3]);
        assert_eq!([1, 2, 3].map(|serial| losses.of(serial)), [8, 3, 9].map(missed));
    }

    proptest! {
        /// A session alternates between targets and loses packets all the time. Its counters are read after each
        /// change, and sometimes also before it.
        #[test]
        fn no_loss_of_another_ring_counts(
            starts_here: bool,
            looks_before: bool,
            steps in prop::collection::vec(prop::option::of(0..100_u64), 0..50),
        ) {
            let (mut is_here, mut counter, mut lost_here) = (starts_here, 40, 0);
            let seen = |is_here, counter| match is_here {
                true => (BTreeMap::from([(1, missed(counter))]), BTreeSet::new()),
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
            let Missed { lost, limited } = losses.of(1);
            prop_assert!(lost <= lost_here && limited == 2 * lost);
            prop_assert!(!looks_before || lost == lost_here);
        }
    }
}
