//! [`Gap`]: a bypass of a small part of the packets, at a NIC that counts packets as the hook does.
//!
//! Where each packet of the NIC is one packet at the hook, the packets that the NIC has carried and the tap has not seen
//! are a number and not an estimate. But the two counters are at two places: a queue behind the hook holds packets that are
//! seen and not yet carried, and one ahead of it holds packets that are carried and not yet seen. What a queue holds comes
//! out, and packets that it drops are seen and never carried. So for these reasons the gap does not rise above what it has
//! been, or falls back. A bypass makes it rise at each look. [`Judge`](super::Judge) calls it.

use std::collections::VecDeque;

use super::Reading;

/// The packets that a NIC carries between two looks at the gap, at least.
pub(super) const STEP: u64 = 64;
/// The part of the carried packets by which the gap must have risen between two looks: one in so many.
pub(super) const PART: u64 = 64;
/// The looks in a row at which the gap must have risen.
pub(super) const LOOKS: usize = 5;
/// The looks that are remembered: no queue holds packets up for so long. Older ones are forgotten, because packets that were
/// dropped would hide as many that get around the hook.
const REMEMBERED: usize = 32;

/// The packets that a NIC has carried and that its tap has not seen.
#[derive(Debug, Clone, Default)]
pub(super) struct Gap {
    /// The gap is counted from here.
    first: Option<Reading>,
    /// What the NIC had carried at the last look.
    looked: u64,
    /// The gap at the last looks.
    gaps: VecDeque<i128>,
    /// The last looks in a row at which it had risen.
    rises: usize,
}

impl Gap {
    /// Takes a reading. Returns whether it proves that packets get around the hook.
    pub(super) fn take(&mut self, reading: &Reading) -> bool {
        let comparable = self.first.and_then(|first| {
            let (then, now) = (first.seen?, reading.seen?);
            (then.serial == now.serial).then_some((first.carried.nic.packets, then, now))
        });
        let Some((began, then, now)) = comparable else {
            *self = Self { first: Some(*reading), looked: reading.carried.nic.packets, ..Self::default() };
            self.gaps.push_back(0);
            return false;
        };
        let carried = reading.carried.nic.packets;
        let since = carried.saturating_sub(self.looked);
        if since < STEP {
            return false;
        }
        self.looked = carried;
        // At most so many were seen: all that passed during the two readings.
        let seen = i128::from(now.after.packets) - i128::from(then.before.packets);
        let gap = i128::from(carried) - i128::from(began) - seen;
        let has_risen = self.gaps.iter().max().is_some_and(|most| gap - most >= i128::from(since / PART));
        self.rises = if has_risen { self.rises + 1 } else { 0 };
        if self.gaps.len() == REMEMBERED {
            self.gaps.pop_front();
        }
        self.gaps.push_back(gap);
        self.is_growing()
    }

    /// Whether the last looks prove that packets get around the hook.
    pub(super) const fn is_growing(&self) -> bool {
        self.rises >= LOOKS
    }
}
