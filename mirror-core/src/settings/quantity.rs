//! Parses and formats whole numbers with a unit. Pure; `values` selects the units of each setting.

/// Names of units and their factors. Of names with the same factor, the first is used for output.
pub(super) type Units = &'static [(&'static str, u64)];

/// Larger than any number in practice, and small enough that the current count can be added to it.
const END: u64 = u64::MAX >> 16;

/// Units of packets, and of packets or bits per second.
pub(super) const DECIMAL: Units = &[("", 1), ("k", 1_000), ("M", 1_000_000), ("G", 1_000_000_000)];

/// Units of the numbers in resources: whole quantities of Kubernetes.
pub(super) const QUANTITY: Units = &[
    ("", 1),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
];

/// Units of bytes: Kubernetes' quantities, and the same with a B.
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

/// Parses a whole number with a unit. 0 is rejected, because 0 in the maps means no limit.
pub(super) fn parse(text: &str, units: Units) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let (_, factor) = units.iter().find(|(name, _)| *name == unit)?;
    number.parse::<u64>().ok()?.checked_mul(*factor).filter(|value| (1..END).contains(value))
}

/// Formats a number with the unit that gives the fewest digits.
pub(super) fn show(value: u64, units: Units) -> String {
    let whole = units.iter().filter(|(_, factor)| value.is_multiple_of(*factor));
    // Of equal factors `max_by_key` takes the last one, but the first name is used for output.
    let (name, factor) = whole.rev().max_by_key(|(_, factor)| *factor).copied().unwrap_or(("", 1));
    format!("{}{name}", value / factor)
}
