//! Tests of the settings: examples, and properties at the bounds of accepted values.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use mirror_common::{
    limit::{Meter, TICKS_PER_NS},
    verdict::Verdict,
};
use proptest::{option, prelude::*, sample::select};

use super::*;

fn set(key: &'static str, value: &str) -> Result<Settings, SettingError> {
    let mut settings = Settings::default();
    settings.set(key, value).map(|()| settings)
}

#[test]
fn what_is_documented_is_understood() {
    assert_eq!(parse_sample("1/100"), Ok(Some(Share(42_949_673))));
    assert_eq!(parse_sample("10%"), Ok(Some(Share(429_496_730))));
    assert_eq!(parse_sample("100%"), Ok(None));
    let rate = |packets, bits, ms| Ok(Rate { packets, bits, burst: Duration::from_millis(ms) });
    assert_eq!(parse_rate("10kpps"), rate(Some(10_000), None, 50));
    assert_eq!(parse_rate("50Mbit"), rate(None, Some(50_000_000), 50));
    assert_eq!(parse_rate("10kpps,50Mbit,burst=1s"), rate(Some(10_000), Some(50_000_000), 1_000));
    assert_eq!(parse_snaplen("96"), Ok(96));
    assert_eq!(parse_duration("15m"), Ok(Duration::from_secs(900)));
    assert_eq!(parse_duration("1h30m"), Ok(Duration::from_secs(5_400)));
    assert_eq!(parse_packets("100k"), Ok(100_000));
    assert_eq!(parse_bytes("1GiB"), Ok(1 << 30));
}

#[test]
fn bytes_are_read_in_the_units_of_kubernetes_too() {
    for (text, bytes) in [
        ("1Gi", 1 << 30),
        ("10Mi", 10 << 20),
        ("64Ki", 64 << 10),
        ("2Ti", 2 << 40),
        ("3k", 3_000),
        ("3M", 3_000_000),
        ("3G", 3_000_000_000),
        ("3T", 3_000_000_000_000),
        ("3TB", 3_000_000_000_000),
        ("3TiB", 3 << 40),
        ("3B", 3),
    ] {
        assert_eq!(parse_bytes(text), Ok(bytes), "{text}");
    }
    // Packets have decimal units only.
    assert!(parse_packets("1Ki").is_err());
    for wrong in ["1K", "1gi", "1.5Gi", "1 Gi", "-1Ki", "999999Ti"] {
        let why = parse_bytes(wrong).unwrap_err();
        assert!(why.contains("k, M, G or T") && why.contains("Ki, Mi, Gi or Ti"), "{wrong}: {why}");
    }
}

#[test]
fn what_is_wrong_is_told_with_what_would_be_right() {
    let table = [
        ("filter", "tpc", "expected a keyword"),
        ("sample", "10", "use a fraction"),
        ("sample", "0%", "more than nothing"),
        ("sample", "3/2", "at most everything"),
        ("sample", "x/2", "\"x\" is not a number"),
        ("rate", "10", "\"10\" is not a rate"),
        ("rate", "0pps", "\"0pps\" is not a rate"),
        ("rate", "1pps,2pps", "repeats a value"),
        ("rate", "1pps,burst=1s,burst=1s", "repeats a value"),
        ("rate", "burst=1s", "use packets and bits"),
        ("rate", "1001Mpps", "at most 1Gpps"),
        ("rate", "1001Gbit/s", "at most 1000Gbit/s"),
        ("rate", "1pps,burst=10001ms", "a burst is from 1ms to 10s"),
        ("rate", "1pps,burst=0ms", "a burst is from 1ms to 10s"),
        ("rate", "1pps,burst=105d", "a burst is from 1ms to 10s"),
        ("rate", "1pps,burst=soon", "a burst is from 1ms to 10s"),
        ("snaplen", "75", "from 76 to 15616"),
        ("snaplen", "16001", "to a longer length the kernel cuts no packet"),
        ("snaplen", "20000", "from 76 to 15616"),
        ("duration", "15", "use a time"),
        ("duration", "0s", "use a time"),
        ("duration", "366d", "at most 365d"),
        ("packets", "-1", "use a number of packets"),
        ("packets", "99999999999999999999", "use a number of packets"),
        ("bytes", "1XB", "use a number of bytes"),
    ];
    for (key, value, expected) in table {
        let error = set(key, value).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert!(error.to_string().contains(value), "{error}");
    }
}

#[test]
fn the_bounds_themselves_are_taken() {
    assert_eq!(parse_snaplen("76"), Ok(MIN_SNAPLEN));
    assert_eq!(parse_snaplen("15616"), Ok(MAX_SNAPLEN));
    assert_eq!(parse_rate("1pps,burst=1ms").map(|rate| rate.burst), Ok(MIN_BURST));
    assert_eq!(parse_rate("1pps,burst=10s").map(|rate| rate.burst), Ok(MAX_BURST));
    assert_eq!(parse_rate("1Gpps").map(|rate| rate.packets), Ok(Some(MAX_PACKETS_PER_SECOND)));
    assert_eq!(parse_rate("1000Gbit").map(|rate| rate.bits), Ok(Some(MAX_BITS_PER_SECOND)));
    assert_eq!(parse_duration("365d"), Ok(Duration::from_secs(365 * 86_400)));
}

#[test]
fn prices_are_a_second_divided_by_the_rate() {
    let limits = parse_rate("1kpps,8Mbit").unwrap().limits();
    assert_eq!(limits.ticks_per_packet, 1_000_000 * TICKS_PER_NS);
    assert_eq!(limits.ticks_per_byte, 1_000 * TICKS_PER_NS);
    assert_eq!(limits.burst_ticks, 50_000_000 * TICKS_PER_NS);
    let node = NodeLimits { max_pod_rate: parse_rate("1kpps").ok(), ..NodeLimits::default() };
    let ceilings = node.ceilings(3);
    assert_eq!(
        (ceilings.node, ceilings.share, ceilings.pod.ticks_per_packet),
        (Limits::default(), Limits::default(), limits.ticks_per_packet)
    );
}

#[test]
fn each_setting_is_its_own_and_nothing_else() {
    let mut all = Settings::default();
    for setting in &SETTINGS {
        assert_eq!(Setting::named(setting.key).map(|found| found.key), Some(setting.key));
        assert_eq!(setting.env, format!("PODMIRROR_{}", setting.key.to_uppercase().replace('-', "_")));
        let one = set(setting.key, setting.example).unwrap();
        let shown: Vec<_> =
            SETTINGS.iter().filter(|other| other.show(&one).is_some()).map(|other| other.key).collect();
        assert_eq!(shown, [setting.key], "what is set is what is shown");
        assert_eq!(set(setting.key, &one.texts()[setting.key]).unwrap(), one);
        all.set(setting.key, setting.example).unwrap();
    }
    assert_eq!(all.words()[..2], ["filter \"tcp port 443 and not net 10.0.0.0/8\"", "sample 1%"]);
    assert_eq!((all.words().len(), all.texts().len()), (SETTINGS.len(), SETTINGS.len()));
    assert_eq!(Setting::named("snaplen").unwrap().sentence("96"), "Bytes to copy of each packet: 96");
    assert_eq!(Settings::default().words(), Vec::<String>::new());
    let error = Settings::default().set("colour", "red").unwrap_err();
    assert_eq!(error.to_string(), "colour \"red\": there is no such setting");
}

#[test]
fn the_texts_for_people_name_the_bounds() {
    let help = |key| Setting::named(key).unwrap().help;
    assert!(help("snaplen").contains(&format!("from {MIN_SNAPLEN} to {MAX_SNAPLEN}")));
    assert!(help("rate").contains("from 1ms to 10s"));
    assert!(help("duration").contains("at most 365d"));
}

#[test]
fn values_are_shown_in_few_words() {
    for (key, written, shown) in [
        ("sample", "0.5/100", "0.5%"),
        ("sample", "33/99", "1/3"),
        ("sample", "12.5%", "12.5%"),
        ("sample", "1/1000000", "0.0001%"),
        ("rate", "10000pps,50000kbit/s", "10kpps,50Mbit"),
        ("rate", "burst=50ms,1500pps", "1500pps"),
        ("duration", "5400s", "1h30m"),
        ("duration", "25h1ms", "1d1h1ms"),
        ("packets", "1500", "1500"),
        ("packets", "2000000k", "2G"),
        ("bytes", "1048576", "1MiB"),
        ("bytes", "64000", "64kB"),
        ("bytes", "1500B", "1500"),
    ] {
        let settings = set(key, written).unwrap();
        assert_eq!(Setting::named(key).unwrap().show(&settings).as_deref(), Some(shown), "{written}");
    }
}

/// The same text with another program, as from a corrected compiler.
#[test]
fn a_filter_is_its_program_too() {
    let one = parse_filter("tcp").unwrap();
    let mended = CaptureFilter { hash: parse_filter("udp").unwrap().hash, ..one.clone() };
    assert_ne!(one, mended);
    assert_ne!(one, CaptureFilter { text: "tcp ".into(), ..one.clone() });
    assert_eq!(one, parse_filter("tcp").unwrap());
}

/// A number near either end of a range, or within it.
#[test]
fn a_seed_counts_where_there_is_a_sample() {
    let seeded = |sample: Option<Share>, seed| Settings { sample, seed, ..Settings::default() };
    assert!(seeded(None, 1).asks_the_same(&seeded(None, 2)));
    let share = Some(Share(1 << 31));
    assert!(!seeded(share, 1).asks_the_same(&seeded(share, 2)));
    assert!(!seeded(share, 1).asks_the_same(&seeded(None, 1)));
}

fn within(least: u64, most: u64) -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(least),
        Just(most),
        least..=most,
        (0..40u32).prop_map(move |bits| (most >> bits).max(least))
    ]
}

fn rates() -> impl Strategy<Value = Rate> {
    let packets = option::of(within(1, MAX_PACKETS_PER_SECOND));
    let bits = option::of(within(1, MAX_BITS_PER_SECOND));
    let burst = within(1, 10_000).prop_map(Duration::from_millis);
    (packets, bits, burst)
        .prop_filter("one of the two", |(packets, bits, _)| packets.is_some() || bits.is_some())
        .prop_map(|(packets, bits, burst)| Rate { packets, bits, burst })
}

const MAX_QUANTITY: u64 = (u64::MAX >> 16) - 1;

fn settings() -> impl Strategy<Value = Settings> {
    let filter = option::of(select(&["tcp", "udp port 53 or icmp", "not (net 10.0.0.0/8)"][..]));
    let sample = option::of(prop_oneof![any::<u32>(), 1..1000u32, (1..5000u32).prop_map(|n| u32::MAX / n)]);
    let duration = option::of(within(1, 365 * 86_400_000).prop_map(Duration::from_millis));
    let budget = (duration, option::of(within(1, MAX_QUANTITY)), option::of(within(1, MAX_QUANTITY)));
    let snaplen = option::of(MIN_SNAPLEN..=MAX_SNAPLEN);
    (filter, sample, option::of(rates()), snaplen, budget).prop_map(
        |(filter, sample, rate, snaplen, (duration, packets, bytes))| Settings {
            filter: filter.map(|text| parse_filter(text).unwrap()),
            sample: sample.map(|share| Share(share.max(1))),
            rate,
            snaplen,
            budget: Budget { duration, packets, bytes },
            ..Settings::default()
        },
    )
}

const SECOND: u64 = 1_000_000_000;
/// Longest frame that the kernel makes of TCP segments (BIG TCP), in bytes.
const LONGEST_FRAME: u32 = 524_280;

proptest! {
    #[test]
    fn no_text_makes_it_panic(text in "\\PC{0,12}|[0-9kMGTpsbitB,/%=.hdm]{0,12}", at in 1..SETTINGS.len()) {
        let _ = Settings::default().set(SETTINGS[at].key, &text);
    }

    #[test]
    fn what_is_shown_reads_as_the_same(settings in settings()) {
        let mut read = Settings::default();
        for setting in &SETTINGS {
            if let Some(shown) = setting.show(&settings) {
                prop_assert!(shown.len() <= 60, "{shown}");
                read.set(setting.key, &shown).unwrap();
            }
        }
        prop_assert_eq!(read, settings);
    }

    /// With any accepted settings, the first packet of a new session is copied, and no sum overflows (a test build
    /// panics).
    #[test]
    fn what_is_accepted_copies_a_first_packet_and_goes_on(
        rate in rates(), packets in within(1, MAX_QUANTITY), bytes in within(1, MAX_QUANTITY),
        duration in within(1, 365 * 86_400_000), len in prop_oneof![Just(60), Just(LONGEST_FRAME), 60..=LONGEST_FRAME],
        now in within(SECOND, 10 * 365 * 86_400 * SECOND), pauses in prop::collection::vec(within(0, 30 * SECOND), 0..50),
    ) {
        let rate = parse_rate(&values::show_rate(&rate)).unwrap();
        let limits = Limits { packets, bytes, ends_ns: now + duration * 1_000_000, ..rate.limits() };
        prop_assert!(rate.packets.is_none() || limits.ticks_per_packet >= 1);
        prop_assert!(rate.bits.is_none() || limits.ticks_per_byte >= 1);
        prop_assert!(limits.burst_ticks >= 1);
        let mut meter = Meter::default();
        prop_assert_eq!(meter.take(&limits, now, len), Ok(()));
        let mut now = now;
        for pause in pauses {
            now += pause;
            if meter.take(&limits, now, len).is_ok() {
                meter.give_back(&limits, len);
            }
        }
        // Once its debt is paid, a rate lets the next packet through, also where no packet came meanwhile.
        let debt_ns = limits.ticks_per_packet.max(limits.ticks_per_byte * u64::from(len)) / TICKS_PER_NS + 1;
        let unending = Limits { packets: 0, bytes: 0, ends_ns: 0, ..limits };
        let mut meter = Meter::default();
        prop_assert_eq!(meter.take(&unending, now, len), Ok(()));
        prop_assert_eq!(meter.take(&unending, now + debt_ns, len), Ok(()));
    }

    /// Prices are rounded up to whole ticks: a rate is never more than the setting, and little less.
    #[test]
    fn a_rate_is_never_more_than_was_asked_for(rate in rates()) {
        let limits = rate.limits();
        let second = SECOND * TICKS_PER_NS;
        let is_near = |price: u64, asked: u64| {
            let given = second / price;
            given <= asked && given >= asked - asked / price - 1
        };
        if let Some(packets) = rate.packets {
            prop_assert!(is_near(limits.ticks_per_packet, packets), "{:?} for {packets}", limits);
        }
        if let Some(bits) = rate.bits {
            prop_assert!(is_near(limits.ticks_per_byte, bits.div_ceil(8)), "{:?} for {bits}", limits);
        }
    }

    #[test]
    fn no_burst_is_beyond_what_the_meter_counts(ms: u64) {
        let text = format!("1pps,burst={ms}ms");
        match parse_rate(&text) {
            Ok(rate) => {
                prop_assert!((1..=10_000).contains(&ms));
                prop_assert!(i64::try_from(rate.limits().burst_ticks).is_ok());
            }
            Err(_) => prop_assert!(!(1..=10_000).contains(&ms)),
        }
    }
}

/// A bug that was seen: a burst that overflowed copied nothing, ever. Such a rate, left in the maps by an older agent,
/// limits like a rate with the longest burst.
#[test]
fn a_burst_that_overflowed_copies_again() {
    let rate = Rate { packets: Some(1000), bits: None, burst: Duration::from_secs(105 * 86_400) };
    let mut meter = Meter::default();
    assert_eq!(meter.take(&rate.limits(), SECOND, 60), Ok(()));
    let none = Rate { burst: Duration::ZERO, ..rate };
    let mut meter = Meter::default();
    let outcomes = [(); 2].map(|()| meter.take(&none.limits(), SECOND, 60));
    assert_eq!(
        outcomes,
        [Ok(()), Err(Verdict::Limited)],
        "the least burst holds one packet of 1000 a second"
    );
}
