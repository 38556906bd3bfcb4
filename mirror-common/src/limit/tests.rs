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
    #[test]
    fn credits_saturate(credit in any::<i64>(), ticks in 0..=i64::MAX) {
        prop_assert_eq!(add(credit, ticks), credit.saturating_add(ticks));
        prop_assert_eq!(subtract(credit, ticks), credit.saturating_sub(ticks));
    }

    /// Over any period, at most the rate, one burst and one packet pass.
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
        // The price of a packet is rounded up to whole ticks, so the effective rate is at most the configured one.
        let most = ((stretch + burst_ns) * TICKS_PER_NS).div_ceil(limits.ticks_per_packet) + 1;
        prop_assert!((taken.len() - first) as u64 <= most, "{} of {most}", taken.len() - first);
    }

    /// A sender that is always ready gets the configured rate.
    #[test]
    fn a_limit_is_used_up(rate in 100..50_000u64, overload in 2..10u64) {
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

    /// With any contents of the maps, including contents that no agent writes.
    #[test]
    fn no_time_and_no_price_overflows(
        limits: [u64; 6], credits: [i64; 2], used: [u64; 3], prices: [u64; 2], times: [u64; 3], len: u32,
    ) {
        let [ticks_per_packet, ticks_per_byte, burst_ticks, packets, bytes, ends_ns] = limits;
        let limits = Limits { ticks_per_packet, ticks_per_byte, burst_ticks, packets, bytes, ends_ns };
        let ([packet_credit, byte_credit], [counted_ns, packets, bytes]) = (credits, used);
        let [ticks_per_packet, ticks_per_byte] = prices;
        let mut meter =
            Meter { packet_credit, byte_credit, counted_ns, packets, bytes, ticks_per_packet, ticks_per_byte };
        for now in times {
            if meter.take(&limits, now, len).is_ok() {
                meter.give_back(&limits, len);
            }
            meter.draw(&limits, len);
        }
    }
}

/// Rates, bursts and lengths at the bounds of what can be configured, and between them.
fn any_rate() -> impl Strategy<Value = u64> {
    prop_oneof![Just(1), Just(1 << 48), (0..=48u32).prop_map(|bits| 1 << bits), 1..=1_u64 << 48]
}

fn any_burst() -> impl Strategy<Value = Duration> {
    let between = (1..=MAX_BURST.as_nanos() as u64).prop_map(Duration::from_nanos);
    prop_oneof![Just(Duration::from_nanos(1)), Just(Duration::from_millis(1)), Just(MAX_BURST), between]
}

fn any_len() -> impl Strategy<Value = u32> {
    prop_oneof![Just(60), Just(1514), Just(65_549), Just(512 << 10), 14..=512_u32 << 10]
}

/// 0: not configured.
fn maybe(rate: impl Strategy<Value = u64>) -> impl Strategy<Value = u64> {
    prop_oneof![1 => Just(0), 3 => rate]
}

proptest! {
    /// At every rate and burst, a new session copies its first packet, and the next one as soon as the debt is paid.
    #[test]
    fn every_rate_lets_something_through(
        packets in maybe(any_rate()), bits in maybe(any_rate()), burst in any_burst(), lens in vec(any_len(), 1..20),
        boot_ns in 1..1_u64 << 50,
    ) {
        let limits = Limits::of_rate(packets, bits, burst);
        let (mut meter, mut now) = (Meter::default(), boot_ns);
        for len in lens {
            prop_assert_eq!(meter.take(&limits, now, len), Ok(()), "{:?}", meter);
            // The price of the packet at the requested rate, and a tick for each of its bytes.
            let seconds_ns = 1_000_000_000_u128;
            let of_packet = (packets != 0).then(|| seconds_ns.div_ceil(packets.into()));
            let of_bytes = (bits != 0).then(|| (seconds_ns * 8 * u128::from(len)).div_ceil(bits.into()));
            let rounding = u64::from(len) / TICKS_PER_NS + 2;
            now += of_packet.max(of_bytes).unwrap_or(0) as u64 + rounding;
        }
    }

    /// At every rate and burst: over any period, at most the rate, one burst and one packet pass.
    #[test]
    fn no_rate_is_exceeded(
        packets in maybe(any_rate()), bits in maybe(any_rate()), burst in any_burst(),
        sent in vec((any_len(), prop_oneof![0..1_000_u64, 0..1_u64 << 40]), 1..200), from: prop::sample::Index,
    ) {
        let limits = Limits::of_rate(packets, bits, burst);
        let (mut meter, mut now) = (Meter::default(), 1 << 40);
        let mut taken = Vec::new();
        for (len, pause) in sent {
            now += pause;
            if meter.take(&limits, now, len).is_ok() {
                taken.push((now, u128::from(len)));
            }
        }
        let first = from.index(taken.len());
        let last = taken.len() - 1;
        // Without the last packet, which may leave a debt.
        let before = &taken[first..last];
        let stretch_ns = u128::from(taken[last].0 - taken[first].0) + burst.as_nanos();
        let second_ns = 1_000_000_000;
        if packets != 0 {
            prop_assert!((before.len() as u128) <= stretch_ns * u128::from(packets) / second_ns + 1);
        }
        if bits != 0 {
            let bytes: u128 = before.iter().map(|(_, len)| len).sum();
            prop_assert!(bytes <= stretch_ns * u128::from(bits) / 8 / second_ns + 1, "{bytes} bytes");
        }
    }

    /// A copy at one rate is paid for at the next one: a session in debt waits as long as if it had copied the same
    /// packet at the new rate, and not for weeks after a low rate.
    #[test]
    fn a_debt_has_the_price_of_the_new_rate(old in 1..1_u64 << 40, new in 1..1_u64 << 40, len in any_len(), of_bits: bool) {
        let burst = Duration::from_millis(50);
        let of = |rate| if of_bits { Limits::of_rate(0, rate, burst) } else { Limits::of_rate(rate, 0, burst) };
        let [old, new] = [old, new].map(of);
        let mut meter = Meter::default();
        prop_assert_eq!(meter.take(&old, 1 << 50, len), Ok(()));
        let (packet, bytes) = new.prices(len);
        let price_ns = (packet + bytes) as u64 / TICKS_PER_NS + 1;
        let one_ns = new.ticks_per_byte.max(new.ticks_per_packet) / TICKS_PER_NS + 1;
        let copies = |at_ns| {
            let mut meter = meter;
            meter.take(&new, (1 << 50) + at_ns, len).is_ok()
        };
        prop_assert!(copies(price_ns + one_ns), "it waits longer than {price_ns} ns");
        // A burst had accumulated.
        let early_ns = price_ns.saturating_sub(50_000_000 + one_ns);
        prop_assert!(early_ns == 0 || !copies(early_ns - 1));
    }

    /// A year, and 2^48 packets or bytes: the budgets end exactly there.
    #[test]
    fn the_largest_budgets_end_in_time(used in 0..=1_u64 << 48, begun_ns in 0..1_u64 << 60, len in any_len()) {
        const YEAR_NS: u64 = 365 * 24 * 3600 * SECOND_NS;
        let (packets, bytes) = (begun_ns >> 8, begun_ns >> 4);
        let limits = Limits {
            packets: packets + (1 << 48),
            bytes: bytes + (1 << 48),
            ends_ns: begun_ns + YEAR_NS,
            ..Limits::default()
        };
        let meter = |more| Meter { packets: packets + more, bytes: bytes + more, ..Meter::default() };
        let take = |more, now_ns| meter(more).take(&limits, now_ns, len);
        prop_assert_eq!(take(used, begun_ns).is_ok(), used < 1 << 48);
        prop_assert_eq!(take(0, limits.ends_ns - 1), Ok(()));
        prop_assert_eq!(take(0, limits.ends_ns), Err(Verdict::Ended));
    }
}

/// A regression test: with such a burst no packet was ever copied, because the credit was negative.
#[test]
fn a_burst_of_months_is_one_of_a_minute() {
    let limits = Limits::of_rate(1_000, 0, Duration::from_secs(105 * 24 * 3600));
    assert_eq!(limits, Limits::of_rate(1_000, 0, MAX_BURST));
    let written = Limits { burst_ticks: 105 * 24 * 3600 * TICKS_PER_SECOND, ..limits };
    assert_eq!(Meter::default().take(&written, SECOND_NS, 64), Ok(()));
}

#[test]
fn prices_are_what_was_asked_for() {
    let price = |packets, bits| {
        let limits = Limits::of_rate(packets, bits, Duration::from_millis(50));
        (limits.ticks_per_packet, limits.ticks_per_byte, limits.burst_ticks)
    };
    let burst = 50_000_000 * TICKS_PER_NS;
    assert_eq!(price(1_000, 0), (1_000_000 * TICKS_PER_NS, 0, burst));
    assert_eq!(price(0, 8_000_000_000), (0, TICKS_PER_NS, burst));
    assert_eq!(price(0, 100_000_000_000), (0, 82, burst), "rounded up from 81.92");
    assert_eq!(price(1 << 48, 1 << 48), (1, 1, burst), "the least");
    assert_eq!(price(0, 0), (0, 0, 0), "no rate");
}

#[test]
fn a_share_is_a_part_of_the_rate() {
    let node = Limits::of_rate(10_000, 0, Duration::from_millis(50));
    assert_eq!(node.share(10), Limits::of_rate(1_000, 0, Duration::from_millis(50)));
    assert_eq!(node.share(0), node);
    let little = Limits::of_rate(0, 1, Duration::from_millis(50));
    assert_eq!(little.share(4096), Limits::default(), "less than can be counted is not a share");
    assert_eq!(Limits::default().share(7), Limits::default());
}

/// The meter was cleared between the charge of a packet and its refund: it now belongs to another session.
#[test]
fn a_refund_to_a_cleared_meter_takes_nothing_from_the_next_session() {
    let limits = Limits { packets: 1, bytes: 64, ..Limits::default() };
    let mut meter = Meter::default();
    meter.give_back(&limits, 64);
    assert_eq!((meter.packets, meter.bytes), (0, 0));
    assert_eq!(meter.take(&limits, 1, 64), Ok(()));
    assert_eq!(meter.take(&limits, 1, 64), Err(Verdict::Ended));
}
