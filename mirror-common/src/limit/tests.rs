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
