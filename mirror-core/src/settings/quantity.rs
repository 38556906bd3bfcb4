//! Whole numbers with a unit, read and shown. Pure; `values` says which units a setting takes.

/// Names of units and their factors. The first name of a size is the one that is shown.
pub(super) type Units = &'static [(&'static str, u64)];

/// Above any number in practice, and low enough that the count so far can be added to it.
const END: u64 = u64::MAX >> 16;

/// Packets, and packets or bits a second.
pub(super) const DECIMAL: Units = &[("", 1), ("k", 1_000), ("M", 1_000_000), ("G", 1_000_000_000)];

/// Bytes: Kubernetes' quantities, and the same with a B.
pub(super) const BYTES: Units = &[
    ("", 1),
    ("B", 1),
    ("kB", 1_000),
    ("k", 1_000),
    ("MB", 1_000_000),
    ("M", 1_000_000),
    ("GB", 1_000_000_000),
    ("G", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("T", 1_000_000_000_000),
    ("KiB", 1 << 10),
    ("Ki", 1 << 10),
    ("MiB", 1 << 20),
    ("Mi", 1 << 20),
    ("GiB", 1 << 30),
    ("Gi", 1 << 30),
    ("TiB", 1 << 40),
    ("Ti", 1 << 40),
];

/// A whole number and a unit. Not 0, because 0 in the maps means that there is no limit.
pub(super) fn parse(text: &str, units: Units) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let (_, factor) = units.iter().find(|(name, _)| *name == unit)?;
    number.parse::<u64>().ok()?.checked_mul(*factor).filter(|value| (1..END).contains(value))
}

/// The number in the unit in which it has the fewest digits.
pub(super) fn show(value: u64, units: Units) -> String {
    let whole = units.iter().filter(|(_, factor)| value.is_multiple_of(*factor));
    // Of equal factors `max_by_key` takes the last, and the first is the name to be shown.
    let (name, factor) = whole.rev().max_by_key(|(_, factor)| *factor).copied().unwrap_or(("", 1));
    format!("{}{name}", value / factor)
}
