//! [`Archive`]: a tar.gz file, which exists only when it is complete, and only for its owner.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use flate2::{Compression, write::GzEncoder};
use k8s_openapi::jiff::Timestamp;
use tar::{EntryType, Header};
use tempfile::NamedTempFile;

/// An archive that is being written, to a temporary file in the same directory. The file is removed on drop.
pub(super) struct Archive {
    tar: tar::Builder<GzEncoder<NamedTempFile>>,
    /// The path of the complete archive.
    path: PathBuf,
    /// The directory in the archive.
    root: String,
    /// The time of the files, in seconds since the epoch.
    mtime: u64,
}

impl Archive {
    /// Begins the archive with this path, or one with a name of its own in the current directory.
    pub(super) fn create(path: Option<PathBuf>, now: Timestamp) -> anyhow::Result<Self> {
        let root = format!("podmirror-sysdump-{}", now.strftime("%Y%m%dT%H%M%SZ"));
        let path = path.unwrap_or_else(|| format!("{root}.tar.gz").into());
        ensure!(!path.exists(), "{} exists already", path.display());
        let parent = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
        // A temporary file is created for its owner alone.
        let file = tempfile::Builder::new().prefix(".podmirror-sysdump-").tempfile_in(parent);
        let file = file.with_context(|| format!("cannot create a file in {}", parent.display()))?;
        let tar = tar::Builder::new(GzEncoder::new(file, Compression::default()));
        Ok(Self { tar, path, root, mtime: now.as_second().try_into().unwrap_or_default() })
    }

    /// Adds a file.
    pub(super) fn add(&mut self, path: &str, bytes: &[u8]) -> anyhow::Result<()> {
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Regular);
        header.set_mode(0o600);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(self.mtime);
        header.set_size(bytes.len().try_into()?);
        let added = self.tar.append_data(&mut header, format!("{}/{path}", self.root), bytes);
        added.with_context(|| format!("cannot write {path} to the archive"))
    }

    /// Completes the archive. Returns its path.
    pub(super) fn finish(self) -> anyhow::Result<PathBuf> {
        let Self { tar, path, .. } = self;
        let file = tar.into_inner().and_then(GzEncoder::finish).context("cannot complete the archive")?;
        let kept = file.persist_noclobber(&path).map_err(|failed| failed.error);
        kept.with_context(|| format!("cannot create {}", path.display()))?;
        Ok(path)
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::{collections::BTreeMap, fs};

    use super::*;
    use crate::sysdump::tests::unpacked;

    #[test]
    fn an_archive_is_there_when_it_is_complete_and_replaces_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("bug.tar.gz");
        let names =
            || fs::read_dir(&directory).unwrap().map(|of| of.unwrap().file_name()).collect::<Vec<_>>();
        let now: Timestamp = "2026-01-02T03:04:05Z".parse().unwrap();
        let create = || Archive::create(Some(path.clone()), now);
        let mut unfinished = create().unwrap();
        unfinished.add("a.txt", b"a").unwrap();
        assert!(names().len() == 1 && !path.exists(), "{:?}", names());
        drop(unfinished);
        assert_eq!(names().len(), 0, "{:?}", names());

        let [mut archive, late] = [create(), create()].map(Result::unwrap);
        let long = format!("{}/b.txt", "long".repeat(60));
        archive.add("a.txt", b"a").unwrap();
        archive.add(&long, &[7; 5000]).unwrap();
        assert_eq!(archive.finish().unwrap(), path);
        let files = unpacked(&path);
        let in_root = |name: &str| format!("podmirror-sysdump-20260102T030405Z/{name}");
        let expected = [(in_root("a.txt"), b"a".to_vec()), (in_root(&long), vec![7; 5000])];
        assert_eq!(files, BTreeMap::from(expected));
        assert!(late.finish().is_err(), "another program has created the file meanwhile");
        assert!(create().is_err_and(|why| why.to_string().ends_with("bug.tar.gz exists already")));
        assert_eq!(unpacked(&path), files);
        assert_eq!(names(), ["bug.tar.gz"]);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt as _;
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        }
    }
}
