//! Temporary files without names, for the packets of the nodes.
//!
//! The packets can be large, so they are not kept in memory. `/tmp` is a tmpfs on many machines, so the files are in
//! the directory of the output file, which needs the space anyway. Called by `save`.

use std::{
    env, fmt,
    fs::File,
    path::{Path, PathBuf},
};

use crate::exec::Stopped;

/// A directory for temporary files that survive a restart, so it is on a disk.
const ON_DISK: &str = "/var/tmp";

/// The reason why there are no packets of a node.
#[derive(Debug)]
pub(super) enum Failure {
    /// A failure of this machine, such as a full disk. It would repeat for each other node.
    Here(anyhow::Error),
    /// A failure of the node, or of the connection to it.
    There(anyhow::Error),
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::There(error)
    }
}

/// The directory of the temporary files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    directory: PathBuf,
    /// The user has not chosen it by the path of the output.
    is_by_default: bool,
}

impl Place {
    /// The directory of the output file.
    pub(super) fn beside(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), is_by_default: false }
    }

    /// The default directory, for a pipe or a device.
    pub(super) fn by_default() -> Self {
        let named = env::var_os("TMPDIR").filter(|_| cfg!(unix));
        Self { directory: default_directory(named.map(PathBuf::from)), is_by_default: true }
    }

    /// Creates a temporary file.
    pub(super) fn file(&self) -> Result<File, Failure> {
        tempfile::tempfile_in(&self.directory).map_err(|error| self.failed(error))
    }

    /// The failure of a temporary file.
    pub(super) fn failed(&self, error: impl Into<anyhow::Error>) -> Failure {
        Failure::Here(error.into().context(self.to_string()))
    }

    /// Classifies a failure to store the packets of a node: a write error of the file is not a failure of the node.
    pub(super) fn unkept(&self, error: anyhow::Error) -> Failure {
        match error.downcast_ref() {
            Some(Stopped::Untaken) => self.failed(error),
            _ => Failure::There(error),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "cannot keep the packets of the nodes in a temporary file in {}",
            self.directory.display()
        )?;
        if self.is_by_default && cfg!(unix) {
            write!(f, ", and TMPDIR names another directory")
        } else {
            Ok(())
        }
    }
}

fn default_directory(named: Option<PathBuf>) -> PathBuf {
    let on_disk = Path::new(ON_DISK);
    match named.filter(|named| !named.as_os_str().is_empty()) {
        Some(named) => named,
        None if cfg!(unix) && on_disk.is_dir() => on_disk.to_owned(),
        None => env::temp_dir(),
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::{fs, io::Write as _};

    use anyhow::{Context as _, anyhow};

    use super::*;

    fn told(failure: &Failure) -> Result<String, String> {
        match failure {
            Failure::Here(error) => Err(format!("{error:#}")),
            Failure::There(error) => Ok(format!("{error:#}")),
        }
    }

    #[test]
    fn the_file_is_beside_the_one_that_is_written_and_has_no_name() {
        let directory = tempfile::tempdir().unwrap();
        let place = Place::beside(directory.path());
        place.file().unwrap().write_all(b"packets").unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        let gone = Place::beside(&directory.path().join("gone"));
        let why = told(&gone.file().unwrap_err()).unwrap_err();
        assert!(why.starts_with(&gone.to_string()) && why.contains("gone"), "{why}");
    }

    #[cfg(unix)]
    #[test]
    fn tmpdir_is_taken_and_a_disk_without_it() {
        assert_eq!(default_directory(Some("/named".into())), Path::new("/named"));
        for unnamed in [None, Some(PathBuf::new())] {
            assert_eq!(default_directory(unnamed), Path::new(ON_DISK));
        }
        let place = Place { directory: "/d".into(), is_by_default: true };
        assert!(place.to_string().ends_with(" in /d, and TMPDIR names another directory"), "{place}");
    }

    #[test]
    fn what_this_machine_cannot_take_is_no_failure_of_the_node() {
        let place = Place::beside(Path::new("/d"));
        let full = || std::io::Error::from(std::io::ErrorKind::StorageFull);
        let untaken = Err::<(), _>(full()).context(Stopped::Untaken).unwrap_err();
        let why = told(&place.unkept(untaken)).unwrap_err();
        assert!(why.starts_with("cannot keep the packets of the nodes in a temporary file in /d: "), "{why}");
        assert!(why.ends_with(&full().to_string()), "{why}");
        for error in [anyhow!("gone"), anyhow!("no packets").context(Stopped::Silent)] {
            told(&place.unkept(error)).unwrap();
        }
    }
}
