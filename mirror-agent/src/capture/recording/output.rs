//! The output file, or standard output, to which blocks are written.
//!
//! It buffers blocks and writes many at once. If the reader of a pipe does not accept everything, the rest stays
//! buffered. It knows only the length of a block. [`store`](super::store) and [`rotation`](super::rotation) call it.

use std::{
    fs::{File, OpenOptions, Permissions},
    io::{self, ErrorKind},
    os::{
        fd::{AsFd as _, BorrowedFd},
        unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::anyhow;

use super::{
    PACKET, Progress, Sink,
    memory::{blocks, number},
    pipe,
};

/// Packets are confidential: only the owner may read the files.
const MODE: u32 = 0o600;
/// Size of the buffer in bytes; a full buffer is written before the end of the batch. A batch has no bound that is
/// known here: a record can become some thousand segments.
const MOST_PENDING: usize = 64 << 10;
/// How long the reader of a pipe may accept nothing at the end of a recording.
const PATIENCE: Duration = Duration::from_secs(5);
/// An output file, which is open or closed. It is empty at first.
#[derive(Debug)]
pub(super) struct Output {
    file: File,
    /// `None`: standard output, or a pipe that was open.
    pub(super) path: Option<PathBuf>,
    /// The name in messages.
    name: String,
    /// Blocks that are not written yet.
    pending: Vec<u8>,
    /// Bytes written to the file. `None`: it may have had contents before, or it is a pipe.
    written: Option<u64>,
    /// For a pipe: how long its reader may accept nothing. 0: forever, and the blocks stay buffered here meanwhile.
    pipe: Option<Duration>,
    is_open: bool,
    /// A write has failed in part.
    pub(super) has_failed: bool,
    /// Packets that were appended and are not in the file, because a write failed.
    pub(super) unwritten: u64,
}

impl Output {
    /// Replaces the file with this path, or opens standard output.
    pub(super) fn open(to: Sink) -> anyhow::Result<Self> {
        let (name, file) = match to {
            Sink::Path(path) => {
                let replaced = Self::replace(&path);
                return replaced.map_err(|error| anyhow!("cannot create {}: {error}", path.display()));
            }
            // Rust's own buffer is bypassed: it splits the bytes at newlines.
            Sink::Stdout => ("standard output", io::stdout().as_fd().try_clone_to_owned().map(File::from)),
            Sink::Pipe(file) => ("the pipe of a reader", Ok(file)),
        };
        let output = file.and_then(|file| Self::new(file, None, None));
        let output = output.map_err(|error| anyhow!("cannot write to {name}: {error}"))?;
        Ok(Self { name: name.to_owned(), ..output })
    }

    /// Opens a file and truncates it. Pipes and devices stay what they are.
    fn replace(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().write(true).create(true).truncate(true).mode(MODE).open(path)?;
        let metadata = file.metadata()?;
        let is_file = metadata.is_file();
        // An existing file has kept its mode.
        if is_file && metadata.permissions().mode() & !MODE & 0o777 != 0 {
            file.set_permissions(Permissions::from_mode(MODE))?;
        }
        Self::new(file, Some(path), is_file.then_some(0))
    }

    /// Creates a file that must not exist.
    pub(super) fn create(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().write(true).create_new(true).mode(MODE).open(path)?;
        Self::new(file, Some(path), Some(0))
    }

    fn new(file: File, path: Option<&Path>, written: Option<u64>) -> io::Result<Self> {
        let pipe = pipe::is_pipe(&file)?.then_some(Duration::ZERO);
        Ok(Self {
            file,
            path: path.map(Path::to_owned),
            name: path.map(|path| path.display().to_string()).unwrap_or_default(),
            pending: Vec::new(),
            written,
            pipe,
            is_open: true,
            has_failed: false,
            unwritten: 0,
        })
    }

    /// The pipe or socket of the output, to wait until it is writable.
    pub(super) fn pipe(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.map(|_| self.file.as_fd())
    }

    /// Whether blocks wait for the reader of a pipe.
    pub(super) fn is_pending(&self) -> bool {
        self.is_open && self.pipe.is_some() && !self.pending.is_empty()
    }

    /// Whether the buffer for the reader of a pipe is full, so that the caller should append nothing more.
    pub(super) fn is_stalled(&self) -> bool {
        self.is_pending() && self.pending.len() >= MOST_PENDING
    }

    /// From now on, writes to a pipe wait for its reader. It is an error if the reader accepts nothing for
    /// [`PATIENCE`].
    pub(super) fn wait_for_reader(&mut self) {
        self.pipe = self.pipe.map(|_| PATIENCE);
    }

    /// Appends blocks. They are written when the buffer is full. [`Progress::Complete`]: they were not accepted,
    /// because the file is closed or its reader closed the pipe.
    pub(super) fn append(&mut self, blocks: &[u8]) -> anyhow::Result<Progress> {
        if !self.is_open {
            return Ok(Progress::Complete);
        }
        self.pending.extend_from_slice(blocks);
        if self.pending.len() < MOST_PENDING {
            return Ok(Progress::GoesOn);
        }
        let flushed = self.flush();
        if !matches!(flushed, Ok(Progress::GoesOn)) {
            // These were not accepted.
            self.unwritten = self.unwritten.saturating_sub(packets_in(blocks));
        }
        flushed
    }

    /// Writes the buffer, or as much of it as the reader of a pipe accepts. Detects that this reader closed the pipe.
    pub(super) fn flush(&mut self) -> anyhow::Result<Progress> {
        let mut pending = std::mem::take(&mut self.pending);
        let outcome = self.write_some(&pending);
        let count = outcome.as_ref().map_or(pending.len(), |count| *count);
        pending.drain(..count);
        self.pending = pending;
        outcome.map(|_| self.progress())
    }

    /// Writes these blocks at once. The buffer must be empty, and a pipe must [wait](Self::wait_for_reader).
    pub(super) fn write(&mut self, blocks: &[u8]) -> anyhow::Result<Progress> {
        self.write_some(blocks).map(|_| self.progress())
    }

    fn progress(&self) -> Progress {
        if self.is_open { Progress::GoesOn } else { Progress::Complete }
    }

    /// Writes these bytes. Returns how many are done: fewer than all only if the reader of a pipe accepts no more now.
    fn write_some(&mut self, bytes: &[u8]) -> anyhow::Result<usize> {
        if !self.is_open {
            return Ok(bytes.len());
        }
        let (count, error) = match pipe::write(&mut self.file, bytes, self.pipe) {
            Ok(()) => {
                self.written = self.written.map(|written| written + bytes.len() as u64);
                return Ok(bytes.len());
            }
            Err((count, error))
                if error.kind() == ErrorKind::WouldBlock && self.pipe == Some(Duration::ZERO) =>
            {
                return Ok(count);
            }
            Err(failed) => failed,
        };
        (self.is_open, self.has_failed) = (false, true);
        let whole: usize = blocks(bytes.get(..count).unwrap_or(bytes)).map(<[u8]>::len).sum();
        self.unwritten += packets_in(bytes.get(whole..).unwrap_or_default());
        let error = match error.kind() {
            // The reader closed the pipe early, as in `| head`.
            ErrorKind::BrokenPipe => return Ok(bytes.len()),
            ErrorKind::WouldBlock => {
                io::Error::other(format!("its reader has taken nothing for {} s", PATIENCE.as_secs()))
            }
            _ => error,
        };
        self.cut(whole);
        Err(anyhow!("cannot write to {}: {error}", self.name))
    }

    /// Writes the buffer. Nothing can be appended after this.
    pub(super) fn close(&mut self) -> anyhow::Result<()> {
        let flushed = self.flush();
        self.is_open = false;
        flushed.map(|_| ())
    }

    /// Removes an incomplete block at the end of the file, so that programs can read it without an error.
    fn cut(&self, whole: usize) {
        if let Some(written) = self.written {
            // If this fails too, the file can still be read up to there.
            let _ = self.file.set_len(written + whole as u64);
        }
    }
}

/// The number of packets among these blocks.
fn packets_in(bytes: &[u8]) -> u64 {
    blocks(bytes).filter(|block| number(block, 0) == Some(PACKET)).count() as u64
}
