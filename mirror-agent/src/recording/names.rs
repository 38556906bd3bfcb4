//! The names of the files of a rotation. Pure. [`rotation`](super::rotation) calls it.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use jiff::Timestamp;

/// The parts of the names.
#[derive(Debug)]
pub(super) struct Names {
    /// The path without its extension.
    stem: OsString,
    /// The extension with its dot, if there is one.
    extension: OsString,
}

impl Names {
    /// The names for the path of a file.
    ///
    /// # Errors
    ///
    /// The path does not end in a name.
    pub(super) fn of(path: &Path) -> anyhow::Result<Self> {
        path.file_name()
            .context("several files need the path of a file to make their names from, as in web.pcapng")?;
        let mut extension = OsString::new();
        if let Some(name) = path.extension() {
            extension.push(".");
            extension.push(name);
        }
        Ok(Self { stem: path.with_extension("").into(), extension })
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
        let path = |name: &str| Names::of(Path::new(name)).unwrap().path(1, 1_795_324_500_000_000_000);
        assert_eq!(path("/tmp/web.pcapng"), Path::new("/tmp/web_00001_20261122T051500.pcapng"));
        assert_eq!(path("a.b/web"), Path::new("a.b/web_00001_20261122T051500"));
        assert_eq!(path("web.v2.pcapng"), Path::new("web.v2_00001_20261122T051500.pcapng"));
        let many = Names::of(Path::new("web")).unwrap().path(123_456, 0);
        assert_eq!(many, Path::new("web_123456_19700101T000000"));
    }

    #[test]
    fn a_path_without_a_name_has_no_names() {
        assert!(["", "/", "..", "x/.."].iter().all(|path| Names::of(Path::new(path)).is_err()));
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        assert_eq!(utc(951_782_400_000_000_000), "20000229T000000");
        assert_eq!(utc(u64::MAX), "25540721T233433");
    }
}
