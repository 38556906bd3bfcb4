//! Parses and formats the value of each setting. Pure. `descriptor` lists these functions; `cli` uses those of the rate
//! for the limits of the node.
//!
//! The error of a parser includes a valid form. A formatter's output parses to the same value.

use std::time::Duration;

use mirror_common::abi::MAX_FILTER_TEXT;
pub use mirror_common::{limit::MAX_BURST, packet::MAX_SNAPLEN};

use super::{
    CaptureFilter, Rate, Share,
    quantity::{self, BYTES, DECIMAL, QUANTITY},
};
use crate::filter::{
    self,
    ebpf::{self, Insn},
};

/// Minimum snap length in bytes. The kernel refuses to cut into an unfinished checksum: that of TCP over IPv6 without
/// extension headers ends at byte 72, and a VLAN tag takes 4 more.
pub const MIN_SNAPLEN: u32 = 76;

/// Maximum packets per second of a rate. One packet then costs 1024 ticks of
/// [`TICKS_PER_NS`](mirror_common::limit::TICKS_PER_NS), so rounding changes a rate by at most a thousandth. No current
/// device carries more.
pub const MAX_PACKETS_PER_SECOND: u64 = 1_000_000_000;

/// Maximum bits per second of a rate: 1 Tbit/s. One byte then costs 8.2 ticks. Prices are rounded up to whole ticks, so
/// at 1 Tbit/s the effective rate is 9 % below the setting, and at 100 Gbit/s 0.1 %.
pub const MAX_BITS_PER_SECOND: u64 = 1_000_000_000_000;

/// Minimum burst. The credit of a meter is full after this time. If it were shorter than the pauses of a busy CPU, a
/// rate could never be fully used.
pub const MIN_BURST: Duration = Duration::from_millis(1);

/// Default burst: the time for which unused rate accumulates.
pub const DEFAULT_BURST: Duration = Duration::from_millis(50);

/// Maximum time budget in ms: 365 days.
const MAX_DURATION_MS: u64 = 365 * 86_400_000;

/// Units of time in ms, the longest first.
const TIMES: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

/// Compiles a filter; see [`filter`].
pub fn parse_filter(text: &str) -> Result<CaptureFilter, String> {
    if text.len() > MAX_FILTER_TEXT {
        return Err(format!("a filter has at most {MAX_FILTER_TEXT} bytes"));
    }
    Ok(CaptureFilter { text: text.to_owned(), hash: ebpf::hash(&instructions(text)?) })
}

/// Translates a filter for the kernel.
pub(super) fn instructions(text: &str) -> Result<Vec<Insn>, String> {
    let program = filter::compile(text).map_err(|error| error.to_string())?;
    // `compile` rejects filters that cannot be translated.
    ebpf::translate(&program).ok_or_else(|| "the filter is too large".to_owned())
}

/// Parses `1/100` or `10%`. `None`: all flows.
pub fn parse_sample(text: &str) -> Result<Option<Share>, String> {
    const USE: &str = "use a fraction as in 1/100, or a percentage as in 10%";
    let number =
        |text: &str| text.trim().parse::<f64>().map_err(|_| format!("{text:?} is not a number; {USE}"));
    let share = match (text.split_once('/'), text.trim().strip_suffix('%')) {
        (Some((part, whole)), _) => number(part)? / number(whole)?,
        (None, Some(percent)) => number(percent)? / 100.0,
        (None, None) => return Err(USE.into()),
    };
    if !(share > 0.0 && share <= 1.0) {
        return Err(format!("a share is more than nothing and at most everything; {USE}"));
    }
    let units = (share * (u64::from(u32::MAX) + 1) as f64).round() as u64;
    // 2^32 units are all flows, but do not fit into a `u32`: `None`.
    Ok(u32::try_from(units.max(1)).ok().map(Share))
}

impl Share {
    /// The share of one flow in `n`. `None`: all flows.
    pub fn one_in(n: u32) -> Option<Self> {
        let units = ((u64::from(u32::MAX) + 1) as f64 / f64::from(n.max(1))).round();
        u32::try_from(units as u64).ok().map(Self)
    }

    /// The number `n`, if the share is one flow in `n`.
    pub fn as_one_in(self) -> Option<u32> {
        let n = ((u64::from(u32::MAX) + 1) as f64 / f64::from(self.0)).round() as u32;
        (Self::one_in(n) == Some(self)).then_some(n)
    }
}

/// Formats a percentage with few digits, or else a fraction 1/n, or else a percentage with all digits.
pub(super) fn show_sample(share: Share) -> String {
    let is_same = |text: &String| parse_sample(text) == Ok(Some(share));
    let part = f64::from(share.0) / (f64::from(u32::MAX) + 1.0);
    let percent = |digits: usize| format!("{:.digits$}%", part * 100.0);
    let fraction = format!("1/{:.0}", 1.0 / part);
    (0..=4)
        .map(percent)
        .chain([fraction])
        .chain((5..=12).map(percent))
        .find(is_same)
        .unwrap_or_else(|| percent(12))
}

/// Parses `10kpps`, `50Mbit`, `10kpps,50Mbit` or `10kpps,burst=100ms`.
pub fn parse_rate(text: &str) -> Result<Rate, String> {
    const USE: &str =
        "use packets and bits a second as in 10kpps, 50Mbit or 10kpps,50Mbit, and optionally burst=100ms";
    let (mut packets, mut bits, mut burst) = (None, None, None);
    for part in text.split(',').map(str::trim) {
        let again = || format!("{part:?} repeats a value; {USE}");
        if let Some(time) = part.strip_prefix("burst=") {
            if burst.replace(parse_burst(time)?).is_some() {
                return Err(again());
            }
            continue;
        }
        let (slot, number, most) = if let Some(number) = part.strip_suffix("pps") {
            (&mut packets, number, MAX_PACKETS_PER_SECOND)
        } else if let Some(number) = part.strip_suffix("bit/s").or(part.strip_suffix("bit")) {
            (&mut bits, number, MAX_BITS_PER_SECOND)
        } else {
            return Err(format!("{part:?} is not a rate; {USE}"));
        };
        let rate =
            quantity::parse(number, DECIMAL).ok_or_else(|| format!("{part:?} is not a rate; {USE}"))?;
        if rate > most {
            let unit = part.strip_prefix(number).unwrap_or_default();
            return Err(format!("{part:?} is too much: at most {}{unit}", quantity::show(most, DECIMAL)));
        }
        if slot.replace(rate).is_some() {
            return Err(again());
        }
    }
    if packets.is_none() && bits.is_none() {
        return Err(USE.into());
    }
    Ok(Rate { packets, bits, burst: burst.unwrap_or(DEFAULT_BURST) })
}

/// Parses `100ms` or `2s`, within the bounds of a burst.
pub fn parse_burst(text: &str) -> Result<Duration, String> {
    let bounds = || {
        let [least, most] = [MIN_BURST, MAX_BURST].map(show_duration);
        format!("a burst is from {least} to {most}, as in burst=100ms; not {text:?}")
    };
    let burst = milliseconds(text).map(Duration::from_millis).ok_or_else(bounds)?;
    if (MIN_BURST..=MAX_BURST).contains(&burst) { Ok(burst) } else { Err(bounds()) }
}

pub(super) fn show_rate(rate: &Rate) -> String {
    let Rate { packets, bits, burst } = rate;
    let parts = [
        packets.map(|packets| quantity::show(packets, DECIMAL) + "pps"),
        bits.map(|bits| quantity::show(bits, DECIMAL) + "bit"),
        (*burst != DEFAULT_BURST).then(|| format!("burst={}", show_duration(*burst))),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(",")
}

/// Parses a number of bytes.
pub fn parse_snaplen(text: &str) -> Result<u32, String> {
    match text.trim().parse() {
        Ok(bytes) if (MIN_SNAPLEN..=MAX_SNAPLEN).contains(&bytes) => Ok(bytes),
        Ok(bytes) if bytes > MAX_SNAPLEN => Err(format!(
            "use a number of bytes from {MIN_SNAPLEN} to {MAX_SNAPLEN}: to a longer length the kernel cuts no packet"
        )),
        _ => Err(format!("use a number of bytes from {MIN_SNAPLEN} to {MAX_SNAPLEN}")),
    }
}

/// Parses `500ms`, `90s`, `15m`, `2h`, `1h30m` or `1d`.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let time = milliseconds(text).filter(|ms| (1..=MAX_DURATION_MS).contains(ms)).map(Duration::from_millis);
    time.ok_or_else(|| "use a time as in 500ms, 90s, 15m, 2h or 1h30m, at most 365d".into())
}

fn milliseconds(text: &str) -> Option<u64> {
    let mut rest = text.trim();
    let mut sum = 0_u64;
    while !rest.is_empty() {
        let (number, unit) = rest.split_at(rest.find(|c: char| !c.is_ascii_digit())?);
        let (unit, after) = unit.split_at(unit.find(|c: char| c.is_ascii_digit()).unwrap_or(unit.len()));
        let (_, factor) = TIMES.iter().find(|(name, _)| *name == unit)?;
        sum = sum.checked_add(number.parse::<u64>().ok()?.checked_mul(*factor)?)?;
        rest = after;
    }
    Some(sum)
}

pub(super) fn show_duration(time: Duration) -> String {
    show_time(time, &TIMES)
}

/// Formats a duration as Kubernetes does, without days (GEP-2257).
pub fn show_kubernetes_duration(time: Duration) -> String {
    show_time(time, &TIMES[1..])
}

fn show_time(time: Duration, units: &[(&str, u64)]) -> String {
    let mut rest = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let mut text = String::new();
    for (name, factor) in units {
        if rest >= *factor {
            text += &format!("{}{name}", rest / factor);
            rest %= factor;
        }
    }
    text
}

/// Parses `100`, `100k` or `1M`.
pub fn parse_packets(text: &str) -> Result<u64, String> {
    quantity::parse(text, DECIMAL).ok_or_else(|| "use a number of packets as in 500, 100k, 1M or 1G".into())
}

pub(super) fn show_packets(packets: u64) -> String {
    quantity::show(packets, DECIMAL)
}

/// Parses a quantity of Kubernetes, as in `10000`, `10k` or `64Ki`.
pub fn parse_quantity(text: &str) -> Result<u64, String> {
    quantity::parse(text, QUANTITY).ok_or_else(|| {
        "use a whole number, optionally with k, M, G or T (powers of 1000) or Ki, Mi, Gi or Ti (powers of 1024), as in \
         10k or 64Ki"
            .into()
    })
}

/// Parses `1000000`, `500kB`, `1GiB` or `10Mi`.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    quantity::parse(text, BYTES).ok_or_else(|| {
        "use a number of bytes as in 1000000, with k, M, G or T behind it (powers of 1000) or Ki, Mi, Gi or Ti (powers \
         of 1024), as in 500kB, 10M, 64Ki or 1GiB"
            .into()
    })
}

pub(super) fn show_bytes(bytes: u64) -> String {
    quantity::show(bytes, BYTES)
}
