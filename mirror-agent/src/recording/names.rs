//! The names of the files of a rotation. Pure. [`rotation`](super::rotation) calls it.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

const SECONDS_OF_A_DAY: u64 = 86_400;

/// The parts of the names.
#[derive(Debug)]
pub(super) struct Names {
    /// The path without its extension.
    stem: OsString,
    /// The extension with its dot, if there is one.
    extension: OsString,
}

impl Names {
    /// The names for the path of a file. `None`: the path does not end in a name.
    pub(super) fn of(path: &Path) -> Option<Self> {
        path.file_name()?;
        let mut extension = OsString::new();
        if let Some(name) = path.extension() {
            extension.push(".");
            extension.push(name);
        }
        Some(Self { stem: path.with_extension("").into(), extension })
    }

    /// The file with this number and start time: `web_00001_20261122T051500.pcapng` for `web.pcapng`.
    pub(super) fn path(&self, number: u64, begins_ns: u64) -> PathBuf {
        let mut path = self.stem.clone();
        path.push(format!("_{number:05}_{}", utc(begins_ns)));
        path.push(&self.extension);
        path.into()
    }
}

/// Formats ns since the epoch in the basic format of ISO 8601: `20261122T051500`.
fn utc(time_ns: u64) -> String {
    let seconds = time_ns / 1_000_000_000;
    let (mut days, second) = (seconds / SECONDS_OF_A_DAY, seconds % SECONDS_OF_A_DAY);
    // A `u64` of nanoseconds ends in the year 2554.
    let mut year = 1970;
    while days >= days_of_year(year) {
        days -= days_of_year(year);
        year += 1;
    }
    let mut month = 1;
    while days >= days_of_month(year, month) {
        days -= days_of_month(year, month);
        month += 1;
    }
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year}{month:02}{:02}T{hour:02}{minute:02}{second:02}", days + 1)
}

fn days_of_year(year: u64) -> u64 {
    if is_leap_year(year) { 366 } else { 365 }
}

fn days_of_month(year: u64, month: u64) -> u64 {
    match month {
        2 if is_leap_year(year) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

fn is_leap_year(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn a_name_has_number_and_time() {
        let path = |name: &str| Names::of(Path::new(name)).unwrap().path(1, 1_795_324_500_000_000_000);
        assert_eq!(path("/tmp/web.pcapng"), Path::new("/tmp/web_00001_20261122T051500.pcapng"));
        assert_eq!(path("a.b/web"), Path::new("a.b/web_00001_20261122T051500"));
        assert_eq!(path("web.v2.pcapng"), Path::new("web.v2_00001_20261122T051500.pcapng"));
        let many = Names::of(Path::new("web")).unwrap().path(123_456, 0);
        assert_eq!(many, Path::new("web_123456_19700101T000000"));
    }

    #[test]
    fn a_path_without_a_name_has_no_names() {
        assert!(["", "/", "..", "x/.."].iter().all(|path| Names::of(Path::new(path)).is_none()));
    }

    /// The expected values are those of `date -u -d @SECONDS +%Y%m%dT%H%M%S`.
    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, expected) in [
            (0, "19700101T000000"),
            (951_782_399, "20000228T235959"),
            (951_782_400, "20000229T000000"),
            (951_868_800, "20000301T000000"),
            (1_709_164_800, "20240229T000000"),
            (1_735_689_599, "20241231T235959"),
            (4_107_542_400, "21000301T000000"),
            (18_446_744_073, "25540721T233433"),
        ] {
            assert_eq!(utc(seconds * 1_000_000_000), expected);
        }
    }
}
