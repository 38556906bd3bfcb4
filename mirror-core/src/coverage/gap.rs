//! [`Gap`]: detects a bypass of a small part of the packets, at a NIC that counts packets as the hook does.
//!
//! If each packet of the NIC is one packet at the hook, the number of packets that the NIC carried and the tap did
//! not see is exact. But the two counters are at different places. A queue after the hook holds packets that were
//! seen and not yet carried; a queue before it holds packets that were carried and not yet seen. Queues drain, so
//! the gap falls again. Packets that a queue drops after the hook lower the gap, because they were seen and are
//! never carried. Only a bypass raises it at check after check. [`Judge`](super::Judge) calls this module.

use std::collections::VecDeque;

use super::Reading;

/// Minimum number of packets that the NIC carries between two checks of the gap.
pub(super) const STEP: u64 = 64;
/// The gap must rise between two checks by at least 1/`PART` of the carried packets.
pub(super) const PART: u64 = 64;
/// The number of consecutive checks at which the gap must have risen.
pub(super) const LOOKS: usize = 5;
/// The number of checks that are kept. They cover more time than a packet spends in any queue. Older checks are
/// forgotten, because each dropped packet would hide one packet that bypasses the hook.
const REMEMBERED: usize = 32;

/// The packets that a NIC carried and its tap did not see.
#[derive(Debug, Clone, Default)]
pub(super) struct Gap {
    /// The reading from which the gap is counted.
    first: Option<Reading>,
    /// The NIC's packet counter at the last check.
    looked: u64,
    /// The gap at the last checks.
    gaps: VecDeque<i128>,
    /// The number of consecutive checks, up to the last, at which the gap had risen.
    rises: usize,
}

impl Gap {
    /// Takes a reading. Returns whether it proves that packets bypass the hook.
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
        // Upper bound of the packets seen: includes all that passed during the two readings.
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

    /// Whether the last checks prove that packets bypass the hook.
    pub(super) const fn is_growing(&self) -> bool {
        self.rises >= LOOKS
    }
}
