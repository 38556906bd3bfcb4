//! One file, or standard output, that blocks are written to.
//!
//! It collects blocks and writes many at once. It knows nothing of a block but its length.
//! [`store`](super::store) and [`rotation`](super::rotation) call it.

use std::{
    fs::{File, OpenOptions, Permissions},
    io::{self, ErrorKind, Write as _},
    os::{
        fd::AsFd as _,
        unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
};

use super::{Destination, Progress, RecordingError};

/// Packets are secrets: the files are for their owner alone.
const MODE: u32 = 0o600;
/// How many bytes are collected before they are written, if the batch does not end before. A batch has no bound that is
/// known here: a record can become 65535 segments.
const MOST_PENDING: usize = 64 << 10;
/// What messages call standard output.
const STDOUT: &str = "standard output";
/// Where a block has its length, in 4 bytes.
const LENGTH: usize = 4;

/// A file that is open, or was. At first it is empty.
#[derive(Debug)]
pub(super) struct Output {
    file: File,
    /// `None`: standard output.
    path: Option<PathBuf>,
    /// Blocks that are not written yet.
    pending: Vec<u8>,
    /// Bytes of the file that are written. `None`: it may have had bytes before, or it is a pipe.
    written: Option<u64>,
    is_open: bool,
}

impl Output {
    /// Standard output, or a file in the place of what was there.
    pub(super) fn open(destination: Destination) -> Result<Self, RecordingError> {
        match destination {
            Destination::Stdout => {
                // Rust's own buffer is left out: it breaks the bytes up at their newlines.
                let file = io::stdout().as_fd().try_clone_to_owned();
                let file = file.map_err(|error| RecordingError::Write { place: STDOUT.to_owned(), error })?;
                Ok(Self { file: file.into(), path: None, pending: Vec::new(), written: None, is_open: true })
            }
            Destination::File(path) => {
                Self::replace(&path).map_err(|error| RecordingError::Create { path, error })
            }
        }
    }

    /// A file in the place of what was there. Pipes and devices stay what they are.
    fn replace(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().write(true).create(true).truncate(true).mode(MODE).open(path)?;
        let metadata = file.metadata()?;
        let is_file = metadata.is_file();
        // A file that was there has kept its mode.
        if is_file && metadata.permissions().mode() & !MODE & 0o777 != 0 {
            file.set_permissions(Permissions::from_mode(MODE))?;
        }
        Ok(Self::new(file, path, is_file.then_some(0)))
    }

    /// A file where there is nothing yet.
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().write(true).create_new(true).mode(MODE).open(path)?;
        Ok(Self::new(file, path, Some(0)))
    }

    fn new(file: File, path: &Path, written: Option<u64>) -> Self {
        Self { file, path: Some(path.to_owned()), pending: Vec::new(), written, is_open: true }
    }

    /// Its path. `None`: standard output.
    pub(super) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Adds blocks. They are written when there are enough of them. [`Progress::Complete`]: they were not taken,
    /// because the file is closed or its reader is gone.
    pub(super) fn append(&mut self, blocks: &[u8]) -> Result<Progress, RecordingError> {
        if !self.is_open {
            return Ok(Progress::Complete);
        }
        self.pending.extend_from_slice(blocks);
        if self.pending.len() < MOST_PENDING { Ok(Progress::GoesOn) } else { self.flush() }
    }

    /// Writes what was added.
    pub(super) fn flush(&mut self) -> Result<Progress, RecordingError> {
        let mut pending = std::mem::take(&mut self.pending);
        let outcome = self.write(&pending);
        pending.clear();
        self.pending = pending;
        outcome
    }

    /// Writes these blocks at once. Nothing may be pending.
    pub(super) fn write(&mut self, blocks: &[u8]) -> Result<Progress, RecordingError> {
        if !self.is_open {
            return Ok(Progress::Complete);
        }
        match write_all(&mut self.file, blocks) {
            Ok(()) => {
                self.written = self.written.map(|written| written + blocks.len() as u64);
                Ok(Progress::GoesOn)
            }
            Err((count, error)) => {
                self.is_open = false;
                if error.kind() == ErrorKind::BrokenPipe {
                    // The reader has seen enough, as in `| head`.
                    return Ok(Progress::Complete);
                }
                self.cut(whole_blocks(blocks, count));
                let place = self.path().map_or(STDOUT.to_owned(), |path| path.display().to_string());
                Err(RecordingError::Write { place, error })
            }
        }
    }

    /// Writes what was added. The file takes nothing after this.
    pub(super) fn close(&mut self) -> Result<(), RecordingError> {
        let flushed = self.flush();
        self.is_open = false;
        flushed.map(|_| ())
    }

    /// Removes the part of a block at the end of the file, so that programs read it without an error.
    fn cut(&self, whole: usize) {
        if let Some(written) = self.written {
            // If this fails too, the file still can be read up to there.
            let _ = self.file.set_len(written + whole as u64);
        }
    }
}

/// Writes all bytes. An error comes with the number of bytes that were written before it.
fn write_all(file: &mut File, bytes: &[u8]) -> Result<(), (usize, io::Error)> {
    let mut count = 0;
    while let Some(rest) = bytes.get(count..).filter(|rest| !rest.is_empty()) {
        match file.write(rest) {
            Ok(0) => return Err((count, ErrorKind::WriteZero.into())),
            Ok(more) => count += more,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err((count, error)),
        }
    }
    Ok(())
}

/// The length of those blocks that are whole within the first `count` bytes.
fn whole_blocks(blocks: &[u8], count: usize) -> usize {
    let mut whole = 0;
    while let Some(length) = blocks.get(whole + LENGTH..).and_then(<[u8]>::first_chunk) {
        let length = u32::from_le_bytes(*length) as usize;
        if length == 0 || whole + length > count {
            break;
        }
        whole += length;
    }
    whole
}
