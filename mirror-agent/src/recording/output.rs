//! One file, or standard output, that blocks are written to.
//!
//! It collects blocks and writes many at once. A pipe gets what its reader takes, and the rest stays here. It knows
//! nothing of a block but its length. [`store`](super::store) and [`rotation`](super::rotation) call it.

use std::{
    fs::{File, OpenOptions, Permissions},
    io::{self, ErrorKind, Write as _},
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use super::{Destination, Progress, RecordingError, pipe};

/// Packets are secrets: the files are for their owner alone.
const MODE: u32 = 0o600;
/// How many bytes are collected before they are written, if the batch does not end before. A batch has no bound that is
/// known here: a record can become some thousand segments.
const MOST_PENDING: usize = 64 << 10;
/// How long the reader of a pipe may take nothing at the end of a recording.
const PATIENCE: Duration = Duration::from_secs(5);
/// What messages call standard output.
const STDOUT: &str = "standard output";
/// Where a block has its length, in 4 bytes.
const LENGTH: usize = 4;
/// The type of the block of a packet.
const PACKET: u32 = 6;

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
    /// A pipe: how long its reader may take nothing. 0: for ever, and meanwhile the blocks are collected here.
    pipe: Option<Duration>,
    is_open: bool,
    /// It has refused a part of what was written.
    has_failed: bool,
    /// Packets that were taken and are not in the file, because it takes no more.
    unwritten: u64,
}

impl Output {
    /// Standard output, or a file in the place of what was there.
    pub(super) fn open(destination: Destination) -> Result<Self, RecordingError> {
        match destination {
            Destination::Stdout => {
                // Rust's own buffer is left out: it breaks the bytes up at their newlines.
                let file = io::stdout().as_fd().try_clone_to_owned();
                let output = file.and_then(|file| Self::new(file.into(), None, None));
                output.map_err(|error| RecordingError::Write { place: STDOUT.to_owned(), error })
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
        Self::new(file, Some(path), is_file.then_some(0))
    }

    /// A file where there is nothing yet.
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().write(true).create_new(true).mode(MODE).open(path)?;
        Self::new(file, Some(path), Some(0))
    }

    fn new(file: File, path: Option<&Path>, written: Option<u64>) -> io::Result<Self> {
        let pipe = pipe::is_pipe(&file)?.then_some(Duration::ZERO);
        Ok(Self {
            file,
            path: path.map(Path::to_owned),
            pending: Vec::new(),
            written,
            pipe,
            is_open: true,
            has_failed: false,
            unwritten: 0,
        })
    }

    /// Its path. `None`: standard output.
    pub(super) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Whether it has refused a part of what was written.
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed
    }

    /// Packets that were taken and are not in the file, because it takes no more.
    pub(super) fn unwritten(&self) -> u64 {
        self.unwritten
    }

    /// The pipe or socket that it is, to wait until its reader takes more.
    pub(super) fn pipe(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.map(|_| self.file.as_fd())
    }

    /// Whether blocks wait for the reader of a pipe.
    pub(super) fn is_pending(&self) -> bool {
        self.is_open && self.pipe.is_some() && !self.pending.is_empty()
    }

    /// Whether so many blocks wait for the reader of a pipe that there should not be more.
    pub(super) fn is_stalled(&self) -> bool {
        self.is_pending() && self.pending.len() >= MOST_PENDING
    }

    /// From now on, what is written to a pipe waits for its reader. It is an error if the reader takes nothing for
    /// [`PATIENCE`].
    pub(super) fn wait_for_reader(&mut self) {
        self.pipe = self.pipe.map(|_| PATIENCE);
    }

    /// Adds blocks. They are written when there are enough of them. [`Progress::Complete`]: they were not taken,
    /// because the file is closed or its reader is gone.
    pub(super) fn append(&mut self, blocks: &[u8]) -> Result<Progress, RecordingError> {
        if !self.is_open {
            return Ok(Progress::Complete);
        }
        self.pending.extend_from_slice(blocks);
        if self.pending.len() < MOST_PENDING {
            return Ok(Progress::GoesOn);
        }
        let flushed = self.flush();
        if !matches!(flushed, Ok(Progress::GoesOn)) {
            // These were not taken.
            self.unwritten = self.unwritten.saturating_sub(packets_in(blocks));
        }
        flushed
    }

    /// Writes what was added, or as much of it as the reader of a pipe takes. Finds out if that reader is gone.
    pub(super) fn flush(&mut self) -> Result<Progress, RecordingError> {
        let mut pending = std::mem::take(&mut self.pending);
        let outcome = self.write_some(&pending);
        let count = outcome.as_ref().map_or(pending.len(), |count| *count);
        pending.drain(..count);
        self.pending = pending;
        outcome.map(|_| self.progress())
    }

    /// Writes these blocks at once. Nothing may be pending, and a pipe must [wait](Self::wait_for_reader).
    pub(super) fn write(&mut self, blocks: &[u8]) -> Result<Progress, RecordingError> {
        self.write_some(blocks).map(|_| self.progress())
    }

    fn progress(&self) -> Progress {
        if self.is_open { Progress::GoesOn } else { Progress::Complete }
    }

    /// Writes these bytes. Returns how many need not be written any more: fewer than all only if the reader of a pipe
    /// takes no more now.
    fn write_some(&mut self, blocks: &[u8]) -> Result<usize, RecordingError> {
        if !self.is_open {
            return Ok(blocks.len());
        }
        let written = match self.pipe {
            Some(patience) => pipe::write(&mut self.file, blocks, patience),
            None => write_all(&mut self.file, blocks),
        };
        let (count, error) = match written {
            Ok(()) => {
                self.written = self.written.map(|written| written + blocks.len() as u64);
                return Ok(blocks.len());
            }
            Err((count, error))
                if error.kind() == ErrorKind::WouldBlock && self.pipe == Some(Duration::ZERO) =>
            {
                return Ok(count);
            }
            Err(failed) => failed,
        };
        (self.is_open, self.has_failed) = (false, true);
        let whole = whole_blocks(blocks, count);
        self.unwritten += packets_in(blocks.get(whole..).unwrap_or_default());
        let error = match error.kind() {
            // The reader has seen enough, as in `| head`.
            ErrorKind::BrokenPipe => return Ok(blocks.len()),
            ErrorKind::WouldBlock => {
                io::Error::other(format!("its reader has taken nothing for {} s", PATIENCE.as_secs()))
            }
            _ => error,
        };
        self.cut(whole);
        let place = self.path().map_or(STDOUT.to_owned(), |path| path.display().to_string());
        Err(RecordingError::Write { place, error })
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

/// How many of these blocks are packets.
fn packets_in(mut blocks: &[u8]) -> u64 {
    let mut packets = 0;
    while let Some(([kind, length], _)) = blocks.as_chunks::<4>().0.split_first_chunk::<2>() {
        packets += u64::from(u32::from_le_bytes(*kind) == PACKET);
        let length = (u32::from_le_bytes(*length) as usize).max(8);
        blocks = blocks.get(length..).unwrap_or_default();
    }
    packets
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
