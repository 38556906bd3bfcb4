//! The output of the packets: a file that appears only when it is complete, or standard output.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind, Write},
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use tempfile::{NamedTempFile, TempPath};

use super::kept::Place;

/// The kind of output.
#[derive(Debug)]
pub(super) enum Output {
    /// Standard output.
    Stdout,
    /// A pipe or a device, which cannot be replaced.
    Special(PathBuf),
    /// A temporary file in the same directory. Only its owner may read it, because packets are confidential.
    File(File),
}

/// The path of a temporary file, and its final path. Without [`put`](Self::put) the file is removed.
#[derive(Debug)]
pub(super) struct Whole(Option<(TempPath, PathBuf)>);

/// Examines the output path, so that a wrong path is reported before anything is done. Also returns the place for
/// temporary files.
pub(super) fn at(path: &Path) -> anyhow::Result<(Output, Whole, Place)> {
    if path == Path::new("-") {
        return Ok((Output::Stdout, Whole(None), Place::by_default()));
    }
    let made = match fs::metadata(path) {
        Ok(there) if there.is_dir() => Err(io::Error::from(ErrorKind::IsADirectory)),
        Ok(there) if !there.is_file() => {
            return Ok((Output::Special(path.to_owned()), Whole(None), Place::by_default()));
        }
        _ => {
            // If the path is a symbolic link, the file that it points to is replaced.
            let place = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
            let directory = place.parent().filter(|directory| !directory.as_os_str().is_empty());
            let directory = directory.unwrap_or(Path::new("."));
            let made = NamedTempFile::with_prefix_in(".mirror-save-", directory);
            let meanwhile = Place::beside(directory);
            made.map(|made| (made.into_parts(), meanwhile, place))
        }
    };
    let ((file, beside), meanwhile, place) =
        made.with_context(|| format!("cannot create {}", path.display()))?;
    Ok((Output::File(file), Whole(Some((beside, place))), meanwhile))
}

impl Output {
    /// Whether the output is created atomically.
    pub(super) fn is_whole_or_nothing(&self) -> bool {
        matches!(self, Self::File(_))
    }

    /// Returns the writer. Opening a FIFO blocks until it has a reader.
    pub(super) fn open(self) -> anyhow::Result<Box<dyn Write>> {
        Ok(match self {
            Self::Stdout => Box::new(io::stdout()),
            Self::Special(path) => {
                let opened = OpenOptions::new().write(true).open(&path);
                Box::new(opened.with_context(|| format!("cannot open {}", path.display()))?)
            }
            Self::File(file) => Box::new(file),
        })
    }
}

impl Whole {
    /// Renames the file to its final path.
    pub(super) fn put(self) -> anyhow::Result<()> {
        let Self(Some((beside, place))) = self else { return Ok(()) };
        beside.persist(&place).with_context(|| format!("cannot create {}", place.display()))
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn written(place: &Path) -> Whole {
        let (output, whole, _) = at(place).unwrap();
        output.open().unwrap().write_all(b"packets").unwrap();
        whole
    }

    #[test]
    fn a_file_is_there_when_it_is_whole() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("last.pcapng");
        fs::write(&place, "before").unwrap();
        let whole = written(&place);
        assert_eq!(fs::read(&place).unwrap(), b"before");
        drop(whole);
        assert_eq!(names(directory.path()), ["last.pcapng"]);

        let whole = written(&place);
        whole.put().unwrap();
        assert_eq!(fs::read(&place).unwrap(), b"packets");
        assert_eq!(names(directory.path()), ["last.pcapng"]);
        assert_eq!(at(&place).unwrap().2, Place::beside(directory.path()));
        assert!(at(directory.path()).is_err() && at(&place.join("below")).is_err());
        assert_eq!(names(directory.path()), ["last.pcapng"]);
    }

    #[cfg(unix)]
    #[test]
    fn links_and_devices_stay() {
        use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _, symlink};
        let directory = tempfile::tempdir().unwrap();
        let [place, link] = ["last.pcapng", "link"].map(|name| directory.path().join(name));
        fs::write(&place, "before").unwrap();
        symlink("last.pcapng", &link).unwrap();
        let whole = written(&link);
        whole.put().unwrap();
        assert_eq!(fs::read(&place).unwrap(), b"packets");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::metadata(&place).unwrap().permissions().mode() & 0o777, 0o600);
        written(Path::new("/dev/null")).put().unwrap();
        assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
    }
}
