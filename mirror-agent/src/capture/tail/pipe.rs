//! Waits for the reader of the output pipe: first until a FIFO has a reader, then until the pipe is writable.
//!
//! It writes nothing: `recording` does. Called by [`tail`](super).

use std::{
    fs::{self, File, OpenOptions},
    future::pending,
    io,
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::fs::{FileTypeExt as _, OpenOptionsExt as _},
    },
    time::Duration,
};

use tokio::{
    io::{Interest, unix::AsyncFd},
    time::sleep,
};
use tracing::info;

use crate::capture::recording::Sink;

/// Interval of the attempts to open a FIFO without a reader.
const AGAIN: Duration = Duration::from_millis(50);

/// Returns when the FIFO of this name has a reader, and at once for any other output. Opening a FIFO without a
/// reader would block, and Ctrl-C would have no effect. The returned file keeps the reader from seeing EOF before the
/// recording opens the FIFO.
pub(crate) async fn has_reader(output: &Sink) -> Option<File> {
    let Sink::Path(path) = output else { return None };
    if !fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo()) {
        return None;
    }
    let open = || OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(path);
    let is_unread = |opened: &io::Result<File>| {
        opened.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::ENXIO))
    };
    let mut opened = open();
    if is_unread(&opened) {
        info!(fifo = %path.display(), "waiting for a program that reads this FIFO");
    }
    while is_unread(&opened) {
        sleep(AGAIN).await;
        opened = open();
    }
    // The recording reports any other error.
    opened.ok()
}

/// The output pipe, if the output is one.
pub(super) struct Pipe(Option<AsyncFd<OwnedFd>>);

impl Pipe {
    /// Must be called within the runtime.
    pub(super) fn new(pipe: Option<BorrowedFd<'_>>) -> io::Result<Self> {
        let pipe = pipe.map(|pipe| {
            // SAFETY: the `AsyncFd` owns the descriptor, and nothing else closes it.
            Ok::<_, io::Error>(unsafe {
                AsyncFd::register_with_interest(pipe.try_clone_to_owned()?, Interest::WRITABLE)
            }?)
        });
        pipe.transpose().map(Self)
    }

    /// Returns when the reader has read something since the pipe was full, or has closed the pipe.
    pub(super) async fn taken(&self) -> io::Result<()> {
        match &self.0 {
            // Readiness is reported again for later reads of the reader. So the caller can write until the pipe is
            // full.
            Some(pipe) => pipe.writable().await.map(|mut guard| guard.clear_ready()),
            None => pending().await,
        }
    }
}
