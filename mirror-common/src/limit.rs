//! Rate limits and budgets: how many copies a session may make, and whether it still may.
//!
//! Pure: the caller brings the clock, and keeps two CPUs from using one [`Meter`] at once. Nothing here looks at the
//! packet; what comes here has passed filter and sampling.

use core::time::Duration;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::verdict::Verdict;

/// Times in a meter are counted in 2^-10 ns, so that a byte at 100 Gbit/s (0.08 ns) still has a price.
pub const TICKS_PER_NS: u64 = 1 << 10;

/// The longest burst that a rate can have. A minute: a longer one is a budget, and no product in a meter overflows.
pub const MAX_BURST: Duration = Duration::from_secs(60);

/// What a session may use up: rates, and budgets as what its meter may show. Zeros mean no limit. Written by the agent
/// alone, as [`Meter`] is by the kernel, so that neither undoes what the other does meanwhile.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Limits {
    /// Price of a packet, in ticks: 1 s of them divided by the rate.
    pub ticks_per_packet: u64,
    /// Price of a byte, in ticks.
    pub ticks_per_byte: u64,
    /// How long an unused rate can be saved up for a burst, in ticks; for both rates.
    pub burst_ticks: u64,
    /// The session ends at so many packets of its meter.
    pub packets: u64,
    /// The session ends at so many bytes of its meter; exact to one packet.
    pub bytes: u64,
    /// When the session ends, in ns of `CLOCK_MONOTONIC`.
    pub ends_ns: u64,
}

/// What a session has used. One of zeros is new.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Meter {
    /// Credit for packets, in ticks. Below zero: a debt, because the last packet was dearer than the credit.
    pub packet_credit: i64,
    /// Credit for bytes, in ticks.
    pub byte_credit: i64,
    /// When the credits were counted last, in ns of `CLOCK_MONOTONIC`.
    pub counted_ns: u64,
    /// Packets that were copied.
    pub packets: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What the copies of one pod have used up: of its ceiling (`POD_LIMIT`) and of its share of the node's rate
/// (`SHARE_LIMIT`). One of zeros is new.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct PodMeter {
    /// Of the pod's ceiling.
    pub ceiling: Meter,
    /// Of the pod's share.
    pub share: Meter,
}

/// Whether a budget of [`Limits`] is used up.
#[inline(always)]
pub const fn is_used_up(used: u64, budget: u64) -> bool {
    budget != 0 && used >= budget
}

impl Meter {
    /// Takes one packet of `len` bytes at `now_ns`, or says why not: `Ended` or `Limited`. What is refused costs
    /// nothing. Time that runs backwards grants nothing.
    #[inline(always)]
    pub const fn take(&mut self, limits: &Limits, now_ns: u64, len: u32) -> Result<(), Verdict> {
        if is_used_up(self.packets, limits.packets)
            || is_used_up(self.bytes, limits.bytes)
            || is_used_up(now_ns, limits.ends_ns)
        {
            return Err(Verdict::Ended);
        }
        if limits.burst_ticks != 0 {
            self.count(limits, now_ns);
            // A packet is let through on any credit and may leave a debt: a rate below one super-frame a burst
            // would otherwise let none through, and the debt keeps the average exact.
            let packets_due = limits.ticks_per_packet != 0 && self.packet_credit <= 0;
            let bytes_due = limits.ticks_per_byte != 0 && self.byte_credit <= 0;
            if packets_due || bytes_due {
                return Err(Verdict::Limited);
            }
            self.packet_credit -= limits.ticks_per_packet as i64;
            self.byte_credit -= (limits.ticks_per_byte * len as u64) as i64;
        }
        self.packets = self.packets.wrapping_add(1);
        self.bytes = self.bytes.wrapping_add(len as u64);
        Ok(())
    }

    /// Gives back what [`Self::take`] took for a packet of `len` bytes that was not copied after all.
    #[inline(always)]
    pub const fn give_back(&mut self, limits: &Limits, len: u32) {
        if limits.burst_ticks != 0 {
            self.packet_credit += limits.ticks_per_packet as i64;
            self.byte_credit += (limits.ticks_per_byte * len as u64) as i64;
        }
        self.packets = self.packets.wrapping_sub(1);
        self.bytes = self.bytes.wrapping_sub(len as u64);
    }

    /// Adds the credit of the time since it was counted last, up to a burst.
    #[inline(always)]
    const fn count(&mut self, limits: &Limits, now_ns: u64) {
        let elapsed_ns = now_ns.saturating_sub(self.counted_ns);
        if elapsed_ns == 0 {
            return;
        }
        self.counted_ns = now_ns;
        // The whole pause counts, also one longer than a burst: it pays a debt first. 2^52 ns are 52 days, which pay every
        // debt that there can be, and their ticks, 2^62, overflow nothing.
        const LONGEST_NS: u64 = 1 << 52;
        let counted_ns = if elapsed_ns < LONGEST_NS { elapsed_ns } else { LONGEST_NS };
        let (ticks, burst) = ((counted_ns * TICKS_PER_NS) as i64, limits.burst_ticks);
        self.packet_credit = least(self.packet_credit.saturating_add(ticks), burst as i64);
        self.byte_credit = least(self.byte_credit.saturating_add(ticks), burst as i64);
    }
}

#[inline(always)]
const fn least(a: i64, b: i64) -> i64 {
    if a < b { a } else { b }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use proptest::{collection::vec, prelude::*};

    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    fn packets_per_second(rate: u64, burst_ns: u64) -> Limits {
        let ticks_per_packet = SECOND_NS * TICKS_PER_NS / rate;
        Limits { ticks_per_packet, burst_ticks: burst_ns * TICKS_PER_NS, ..Limits::default() }
    }

    proptest! {
        /// Over any stretch of time no more passes than the rate, one burst and one packet.
        #[test]
        fn a_limit_is_never_exceeded(
            rate in 1..1_000_000u64, burst_ns in 1_000..SECOND_NS, pauses in vec(0..2_000_000u64, 1..500), from: prop::sample::Index,
        ) {
            let limits = packets_per_second(rate, burst_ns);
            let mut meter = Meter::default();
            let mut now = 5 * SECOND_NS;
            let mut taken = Vec::new();
            for pause in pauses {
                now += pause;
                if meter.take(&limits, now, 64).is_ok() {
                    taken.push(now);
                }
            }
            prop_assume!(!taken.is_empty());
            let first = from.index(taken.len());
            let stretch = taken[taken.len() - 1] - taken[first];
            // The price of a packet is rounded down to whole ticks.
            let most = ((stretch + burst_ns) * TICKS_PER_NS).div_ceil(limits.ticks_per_packet) + 1;
            prop_assert!((taken.len() - first) as u64 <= most, "{} of {most}", taken.len() - first);
        }

        /// A sender that is always ready gets what it was promised.
        #[test]
        fn a_limit_is_used_up(rate in 100..1_000_000u64, overload in 2..50u64) {
            let limits = packets_per_second(rate, SECOND_NS / 20);
            let mut meter = Meter::default();
            let gap = SECOND_NS / (rate * overload).min(5_000_000);
            let end = SECOND_NS + SECOND_NS / 5;
            let taken = (SECOND_NS..end).step_by(gap.max(1) as usize)
                .filter(|now| meter.take(&limits, *now, 64).is_ok())
                .count() as u64;
            prop_assert!(taken >= rate / 5, "{taken} of {}", rate / 5);
        }

        /// A packet may cost more than a burst holds. Its debt is paid by the time that passes, however few packets come
        /// meanwhile.
        #[test]
        fn a_pause_pays_a_debt_that_is_more_than_a_burst(rate in 1..1_000u64, burst_ns in 1_000_000..SECOND_NS, len in 60..65_536u32) {
            let price_ns = SECOND_NS / rate;
            for limits in [packets_per_second(rate, burst_ns), Limits {
                ticks_per_byte: price_ns * TICKS_PER_NS / u64::from(len),
                burst_ticks: burst_ns * TICKS_PER_NS,
                ..Limits::default()
            }] {
                let mut meter = Meter::default();
                for packet in 1..10 {
                    prop_assert_eq!(meter.take(&limits, packet * (price_ns + 1), len), Ok(()));
                }
            }
        }

        #[test]
        fn budgets_end_at_their_packet_byte_and_nanosecond(
            packets in 1..50u64, bytes in 1..10_000u64, lens in vec(1..2_000u32, 0..100), ends_ns in 1..100u64,
        ) {
            let limits = Limits { packets, bytes, ends_ns, ..Limits::default() };
            let mut meter = Meter::default();
            let (mut count, mut sum) = (0, 0);
            for (now, len) in lens.into_iter().enumerate() {
                let open = count < packets && sum < bytes && (now as u64) < ends_ns;
                let outcome = meter.take(&limits, now as u64, len);
                prop_assert_eq!(outcome, if open { Ok(()) } else { Err(Verdict::Ended) });
                if open {
                    count += 1;
                    sum += u64::from(len);
                }
            }
        }

        #[test]
        fn what_is_given_back_can_be_taken_again(
            rate in 1..1_000u64, len in 1..65_536u32, packets in 1..5u64, bytes in 1..100_000u64,
        ) {
            let limits = Limits { packets, bytes, ..packets_per_second(rate, SECOND_NS) };
            let mut meter = Meter::default();
            prop_assert_eq!(meter.take(&limits, SECOND_NS, len), Ok(()));
            let after = meter;
            meter.give_back(&limits, len);
            prop_assert_eq!((meter.packets, meter.bytes), (0, 0), "also where it was more than what was left");
            prop_assert_eq!(meter.take(&limits, SECOND_NS, len), Ok(()));
            prop_assert_eq!(meter, after);
        }

        #[test]
        fn no_time_and_no_price_overflows(limits: [u64; 3], budgets: [u64; 3], times: [u64; 3], len: u32) {
            let [ticks_per_packet, ticks_per_byte, burst_ticks] = limits.map(|limit| limit >> 24);
            let ([packets, bytes, ends_ns], ticks_per_byte) = (budgets, ticks_per_byte >> 10);
            let limits = Limits { ticks_per_packet, ticks_per_byte, burst_ticks, packets, bytes, ends_ns };
            let mut meter = Meter::default();
            for now in times {
                let _ = meter.take(&limits, now, len & 0xffff);
            }
        }
    }
}
