//! What a user can ask of a mirror besides who is mirrored: filter, sample, rate, snap length, budgets.
//!
//! Pure: texts in, values or one clear error out. The same texts come from annotations of a pod and from flags.
//! `select` calls it for pods, `cli` for flags; what the kernel makes of the values is in `mirror_common`.

use std::{fmt, sync::Arc, time::Duration};

use mirror_common::{
    abi::MAX_FILTER_TEXT,
    filter::FilterProgram,
    limit::{Limits, TICKS_PER_NS},
};

use crate::filter;

/// Shortest snap length in bytes: what the kernel lets a copy be cut to with any transport header in it.
const MIN_SNAPLEN: u32 = 64;
/// Longest snap length in bytes: a super-frame.
const MAX_SNAPLEN: u32 = 65535;
/// How long an unused rate is saved up for a burst, unless told otherwise.
const DEFAULT_BURST: Duration = Duration::from_millis(50);
const SECOND_NS: u64 = 1_000_000_000;

/// What one mirror does with the packets of the directions that it takes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Settings {
    /// Which packets; `None`: all.
    pub filter: Option<Filter>,
    /// Which flows; `None`: all.
    pub sample: Option<Share>,
    /// Seed of the sample, the same on all nodes.
    pub seed: u32,
    /// How many copies a second; `None`: any number.
    pub rate: Option<Rate>,
    /// Bytes that are kept of a copy; `None`: all.
    pub snaplen: Option<u32>,
    /// When the mirror ends.
    pub budget: Budget,
}

/// A filter in pcap-filter(7)'s language, compiled.
#[derive(Clone)]
pub struct Filter {
    /// As it was written.
    pub text: String,
    /// What the kernel runs.
    pub program: Arc<FilterProgram>,
}

/// What was written decides: the same text is the same program.
impl PartialEq for Filter {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for Filter {}

impl fmt::Debug for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.text.fmt(f)
    }
}

/// A share of flows in units of 2^-32; never 0, and less than all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share(pub u32);

/// A limit on copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Packets a second.
    pub packets: Option<u64>,
    /// Bits a second, of whole frames.
    pub bits: Option<u64>,
    /// How long an unused rate is saved up.
    pub burst: Duration,
}

/// After what a mirror ends; the first that is used up ends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Budget {
    /// Time since it began.
    pub duration: Option<Duration>,
    /// Packets copied.
    pub packets: Option<u64>,
    /// Bytes copied.
    pub bytes: Option<u64>,
}

/// A value that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[error("{key} {value:?}: {reason}")]
pub struct SettingError {
    /// The annotation or flag.
    pub key: &'static str,
    /// Its value.
    pub value: String,
    /// What is wrong, and what would be right.
    pub reason: String,
}

impl Settings {
    /// Sets what `key`, one of [`KEYS`], names.
    pub fn set(&mut self, key: &'static str, value: &str) -> Result<(), SettingError> {
        self.set_with(key, value, parse_filter)
    }

    /// As [`Self::set`], with another way to a filter than to compile it.
    pub fn set_with(
        &mut self,
        key: &'static str,
        value: &str,
        filter: impl FnOnce(&str) -> Result<Filter, String>,
    ) -> Result<(), SettingError> {
        let set = match key {
            "filter" => filter(value).map(|filter| self.filter = Some(filter)),
            "sample" => parse_sample(value).map(|share| self.sample = share),
            "rate" => parse_rate(value).map(|rate| self.rate = Some(rate)),
            "snaplen" => parse_snaplen(value).map(|bytes| self.snaplen = Some(bytes)),
            "duration" => parse_duration(value).map(|time| self.budget.duration = Some(time)),
            "packets" => parse_packets(value).map(|packets| self.budget.packets = Some(packets)),
            "bytes" => parse_bytes(value).map(|bytes| self.budget.bytes = Some(bytes)),
            _ => Err("there is no such setting".into()),
        };
        set.map_err(|reason| SettingError { key, value: value.to_owned(), reason })
    }

    /// Whether two settings ask for the same: the texts of the filters count, and not the programs.
    pub fn asks_the_same(&self, other: &Self) -> bool {
        let text = |settings: &Self| settings.filter.as_ref().map(|filter| filter.text.clone());
        let without = |settings: &Self| Self { filter: None, ..settings.clone() };
        text(self) == text(other) && without(self) == without(other)
    }

    /// Whether the kernel must keep a meter for the session.
    pub fn is_metered(&self) -> bool {
        self.rate.is_some() || self.budget != Budget::default()
    }
}

/// Names of the settings: with `podmirror.io/` before them annotations, with `--` flags.
pub const KEYS: [&str; 7] = ["filter", "sample", "rate", "snaplen", "duration", "packets", "bytes"];

impl Rate {
    /// One of `parts` equal parts, at least one unit a second, with the same burst; the whole for none.
    #[must_use]
    pub fn share_of(self, parts: usize) -> Self {
        let parts = u64::try_from(parts).unwrap_or(u64::MAX).max(1);
        let share = |rate: u64| (rate / parts).max(1);
        Self { packets: self.packets.map(share), bits: self.bits.map(share), burst: self.burst }
    }

    /// The prices that the kernel charges.
    pub fn limits(&self) -> Limits {
        let Self { packets, bits, burst } = self;
        let second = SECOND_NS * TICKS_PER_NS;
        let price = |rate: &Option<u64>, unit: u64| {
            rate.map_or(0, |rate| (second.saturating_mul(unit) / rate).max(1))
        };
        let burst_ns = u64::try_from(burst.as_nanos()).unwrap_or(u64::MAX);
        Limits {
            ticks_per_packet: price(packets, 1),
            ticks_per_byte: price(bits, 8),
            burst_ticks: burst_ns.saturating_mul(TICKS_PER_NS),
            ..Limits::default()
        }
    }
}

/// A filter; see [`filter`].
pub fn parse_filter(text: &str) -> Result<Filter, String> {
    if text.len() > MAX_FILTER_TEXT {
        return Err(format!("a filter has at most {MAX_FILTER_TEXT} bytes"));
    }
    let program = filter::compile(text).map_err(|error| error.to_string())?;
    Ok(Filter { text: text.to_owned(), program: Arc::new(program) })
}

/// `1/100`, `10%`; `None` for all.
pub fn parse_sample(text: &str) -> Result<Option<Share>, String> {
    const USE: &str = "use a fraction as in 1/100, or a percentage as in 10%";
    let number = |text: &str| text.trim().parse::<f64>().map_err(|_| format!("{text:?} is no number; {USE}"));
    let share = match (text.split_once('/'), text.strip_suffix('%')) {
        (Some((part, whole)), _) => number(part)? / number(whole)?,
        (None, Some(percent)) => number(percent)? / 100.0,
        (None, None) => return Err(USE.into()),
    };
    if !(share > 0.0 && share <= 1.0) {
        return Err(format!("a share is more than nothing and at most everything; {USE}"));
    }
    let units = (share * (u64::from(u32::MAX) + 1) as f64).round() as u64;
    // All of them, within what can be told apart.
    Ok(u32::try_from(units.max(1)).ok().map(Share))
}

/// `10kpps`, `50Mbit`, `10kpps,50Mbit`, `10kpps,burst=100ms`.
pub fn parse_rate(text: &str) -> Result<Rate, String> {
    const USE: &str =
        "use packets and bits a second as in 10kpps, 50Mbit or 10kpps,50Mbit, and optionally burst=100ms";
    let mut rate = Rate { packets: None, bits: None, burst: DEFAULT_BURST };
    for part in text.split(',').map(str::trim) {
        let slot = if let Some(burst) = part.strip_prefix("burst=") {
            rate.burst = parse_duration(burst)?;
            continue;
        } else if let Some(packets) = part.strip_suffix("pps") {
            (&mut rate.packets, packets)
        } else if let Some(bits) = part.strip_suffix("bit/s").or(part.strip_suffix("bit")) {
            (&mut rate.bits, bits)
        } else {
            return Err(format!("{part:?} is no rate; {USE}"));
        };
        if slot.0.is_some() {
            return Err(format!("{part:?} says again what was said; {USE}"));
        }
        *slot.0 = Some(quantity(slot.1, DECIMAL).ok_or_else(|| format!("{part:?} is no rate; {USE}"))?);
    }
    if rate.packets.is_none() && rate.bits.is_none() {
        return Err(USE.into());
    }
    Ok(rate)
}

/// A number of bytes.
pub fn parse_snaplen(text: &str) -> Result<u32, String> {
    match text.trim().parse() {
        Ok(bytes) if (MIN_SNAPLEN..=MAX_SNAPLEN).contains(&bytes) => Ok(bytes),
        _ => Err(format!("use a number of bytes from {MIN_SNAPLEN} to {MAX_SNAPLEN}")),
    }
}

/// `500ms`, `90s`, `15m`, `2h`, `1h30m`, `1d`.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    const UNITS: [(&str, u64); 5] =
        [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];
    let parse = || {
        let mut rest = text.trim();
        let mut sum_ms = 0_u64;
        while !rest.is_empty() {
            let digits = rest.find(|c: char| !c.is_ascii_digit())?;
            let (number, unit) = rest.split_at(digits);
            let end = unit.find(|c: char| c.is_ascii_digit()).unwrap_or(unit.len());
            let (unit, after) = unit.split_at(end);
            let (_, ms) = UNITS.iter().find(|(name, _)| *name == unit)?;
            sum_ms = sum_ms.checked_add(number.parse::<u64>().ok()?.checked_mul(*ms)?)?;
            rest = after;
        }
        (1..=365 * 86_400_000).contains(&sum_ms).then(|| Duration::from_millis(sum_ms))
    };
    parse().ok_or_else(|| "use a time as in 500ms, 90s, 15m, 2h or 1h30m, at most 365d".into())
}

/// `100`, `100k`, `1M`.
pub fn parse_packets(text: &str) -> Result<u64, String> {
    quantity(text, DECIMAL).ok_or_else(|| "use a number of packets as in 500, 100k or 1M".into())
}

/// `1000000`, `500kB`, `1GiB`.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    quantity(text, BYTES).ok_or_else(|| "use a number of bytes as in 500kB, 10MB, 1MiB or 1GiB".into())
}

type Units = &'static [(&'static str, u64)];
const DECIMAL: Units = &[("", 1), ("k", 1_000), ("M", 1_000_000), ("G", 1_000_000_000)];
const BYTES: Units = &[
    ("", 1),
    ("B", 1),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
];

/// A whole number and a unit; not 0.
fn quantity(text: &str, units: Units) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let (_, factor) = units.iter().find(|(name, _)| *name == unit)?;
    // The kernel's word for no budget must not be one.
    number.parse::<u64>().ok()?.checked_mul(*factor).filter(|value| (1..u64::MAX >> 16).contains(value))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use proptest::prelude::*;

    use super::*;

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
    fn what_is_wrong_is_told_with_what_would_be_right() {
        let table = [
            ("sample", "10", "use a fraction"),
            ("sample", "0%", "more than nothing"),
            ("sample", "3/2", "at most everything"),
            ("sample", "x/2", "\"x\" is no number"),
            ("rate", "10", "\"10\" is no rate"),
            ("rate", "0pps", "\"0pps\" is no rate"),
            ("rate", "1pps,2pps", "says again"),
            ("rate", "burst=1s", "use packets and bits"),
            ("snaplen", "63", "from 64 to 65535"),
            ("duration", "15", "use a time"),
            ("duration", "0s", "use a time"),
            ("packets", "-1", "use a number of packets"),
            ("packets", "99999999999999999999", "use a number of packets"),
            ("bytes", "1XB", "use a number of bytes"),
        ];
        for (key, value, expected) in table {
            let error = Settings::default().set(key, value).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
            assert!(error.to_string().contains(value), "{error}");
        }
    }

    #[test]
    fn prices_are_a_second_divided_by_the_rate() {
        let limits = parse_rate("1kpps,8Mbit").unwrap().limits();
        assert_eq!(limits.ticks_per_packet, 1_000_000 * TICKS_PER_NS);
        assert_eq!(limits.ticks_per_byte, 1_000 * TICKS_PER_NS);
        assert_eq!(limits.burst_ticks, 50_000_000 * TICKS_PER_NS);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "\\PC{0,12}|[0-9kMGpsbit,/%=.hm]{0,12}", key in prop::sample::select(&KEYS[1..])) {
            let _ = Settings::default().set(key, &text);
        }
    }
}
