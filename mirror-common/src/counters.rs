//! The counters of a session: how the programs note the length of a copy, and what the agent reads.

use crate::{
    abi::{Counter, SessionCounters},
    verdict::{Direction, Misfit, Verdict},
};

impl SessionCounters {
    /// The packets with this verdict and their bytes, before any copy is cut.
    pub const fn packets(&self, direction: Direction, verdict: Verdict) -> Counter {
        let Counter { packets, bytes } = self.counters[direction as usize][verdict as usize];
        let removed = if matches!(verdict, Verdict::Copied) { self.removed[direction as usize] } else { 0 };
        Counter { packets, bytes: bytes.wrapping_add(removed) }
    }

    /// The bytes of the copies, after they were cut.
    pub const fn copied_bytes(&self, direction: Direction) -> u64 {
        self.counters[direction as usize][Verdict::Copied as usize].bytes
    }

    /// The copies with this difference, and the bytes by which they differ.
    pub const fn misfits(&self, direction: Direction, misfit: Misfit) -> Counter {
        self.counters[direction as usize][misfit as usize]
    }

    /// Notes the length of a copy that has `kept` of the `len` bytes of its packet; the session requests at most
    /// `wanted`. Returns the number of bytes that the copy lacks. [`Verdict::Copied`] must not count these bytes.
    #[inline(always)]
    pub const fn note_copy(&mut self, direction: u32, len: u32, wanted: u32, kept: u32) -> u32 {
        let direction = direction as usize & (Direction::COUNT - 1);
        let asked = if wanted < len { wanted } else { len };
        let differs = if kept < asked {
            Some((Misfit::Cut, asked - kept))
        } else if kept > asked {
            Some((Misfit::Long, kept - asked))
        } else {
            None
        };
        if let Some((misfit, by)) = differs {
            let counter = &mut self.counters[direction][misfit as usize];
            counter.packets += 1;
            counter.bytes += by as u64;
        }
        let removed = len.saturating_sub(kept);
        self.removed[direction] += removed as u64;
        removed
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::verdict::Direction::{Egress, Ingress};

    /// What the programs do for a copied packet.
    fn copied(counters: &mut SessionCounters, len: u32, wanted: u32, kept: u32) {
        let removed = counters.note_copy(Egress as u32, len, wanted, kept);
        let counter = &mut counters.counters[Egress as usize][Verdict::Copied as usize];
        counter.packets += 1;
        counter.bytes += u64::from(len - removed);
    }

    #[test]
    fn a_copy_counts_with_its_own_length_and_its_packet_with_the_whole() {
        let mut counters = SessionCounters::default();
        for (len, wanted, kept) in [
            (60, u32::MAX, 60),
            // By the snap length, by a tunnel's MTU as well, and not within the headers.
            (1000, 96, 96),
            (2000, 1900, 1400),
            (54, 13, 54),
            (500, 13, 54),
        ] {
            copied(&mut counters, len, wanted, kept);
        }
        let count = |packets, bytes| Counter { packets, bytes };
        assert_eq!(counters.packets(Egress, Verdict::Copied), count(5, 60 + 1000 + 2000 + 54 + 500));
        assert_eq!(counters.copied_bytes(Egress), 60 + 96 + 1400 + 54 + 54);
        assert_eq!(counters.misfits(Egress, Misfit::Cut), count(1, 500));
        assert_eq!(counters.misfits(Egress, Misfit::Long), count(2, 41 + 41));
        for verdict in Verdict::ALL {
            assert_eq!(counters.packets(Ingress, verdict), count(0, 0));
        }
        assert_eq!(counters.copied_bytes(Ingress), 0);
    }

    proptest! {
        /// Whatever moment a reader chooses, it sees no number that is less than before.
        #[test]
        fn every_number_only_grows(copies in prop::collection::vec((1..70_000u32, 0..70_000u32, 0..70_000u32), 1..20)) {
            let numbers = |counters: &SessionCounters| [
                counters.packets(Egress, Verdict::Copied).bytes,
                counters.copied_bytes(Egress),
                counters.misfits(Egress, Misfit::Cut).bytes,
                counters.misfits(Egress, Misfit::Long).bytes,
            ];
            let mut counters = SessionCounters::default();
            for (len, wanted, kept) in copies {
                let (kept, before) = (kept.min(len), counters);
                let removed = counters.note_copy(Egress as u32, len, wanted, kept);
                let between = counters;
                counters.counters[Egress as usize][Verdict::Copied as usize].bytes += u64::from(len - removed);
                for (one, next) in [(before, between), (between, counters)] {
                    prop_assert!(numbers(&one).iter().zip(numbers(&next)).all(|(one, next)| *one <= next));
                }
                prop_assert_eq!(numbers(&counters)[0] - numbers(&before)[0], u64::from(len));
                prop_assert_eq!(numbers(&counters)[1] - numbers(&before)[1], u64::from(kept));
            }
        }
    }
}
