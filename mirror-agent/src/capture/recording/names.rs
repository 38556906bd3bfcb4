//! The names of the files of a rotation. Pure. [`rotation`](super::rotation) calls it.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use jiff::Timestamp;

/// The file with this number and start time: `web_00001_20261122T051500.pcapng` for `web.pcapng`.
///
/// # Errors
///
/// The path does not end in a name.
pub(super) fn numbered(path: &Path, number: u64, begins_ns: u64) -> anyhow::Result<PathBuf> {
    let mut name = path
        .file_stem()
        .context("several files need the path of a file to make their names from, as in web.pcapng")?
        .to_owned();
    name.push(format!("_{number:05}_{}", utc(begins_ns)));
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    Ok(path.with_file_name(name))
}

/// Formats ns since the epoch in the basic format of ISO 8601: `20261122T051500`.
fn utc(time_ns: u64) -> String {
    // A `u64` of nanoseconds ends in the year 2554.
    let time = Timestamp::from_nanosecond(time_ns.into()).unwrap_or_default();
    time.strftime("%Y%m%dT%H%M%S").to_string()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn a_name_has_number_and_time() {
        let path = |name: &str| numbered(Path::new(name), 1, 1_795_324_500_000_000_000).unwrap();
        assert_eq!(path("/tmp/web.pcapng"), Path::new("/tmp/web_00001_20261122T051500.pcapng"));
        assert_eq!(path("a.b/web"), Path::new("a.b/web_00001_20261122T051500"));
        assert_eq!(path("web.v2.pcapng"), Path::new("web.v2_00001_20261122T051500.pcapng"));
        let many = numbered(Path::new("web"), 123_456, 0).unwrap();
        assert_eq!(many, Path::new("web_123456_19700101T000000"));
    }

    #[test]
    fn a_path_without_a_name_has_no_names() {
        assert!(["", "/", "..", "x/.."].iter().all(|path| numbered(Path::new(path), 1, 0).is_err()));
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        assert_eq!(utc(951_782_400_000_000_000), "20000229T000000");
        assert_eq!(utc(u64::MAX), "25540721T233433");
    }
}
