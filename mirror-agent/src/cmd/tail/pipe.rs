//! Waits for the reader of the pipe that packets go to: at first until a FIFO has one, then until it takes more.
//!
//! It writes nothing: `recording` does. [`tail`](super) calls it.

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

use crate::recording::Destination;

/// How often a FIFO without a reader is tried.
const AGAIN: Duration = Duration::from_millis(50);

/// Returns when the FIFO of this name has a reader, and at once for any other destination. To open a FIFO without a
/// reader would block, and so would Ctrl-C. The result keeps the reader from seeing an end before the FIFO is opened for
/// good.
pub(super) async fn has_reader(destination: &Destination) -> Option<File> {
    let Destination::File(path) = destination else { return None };
    if !fs::metadata(path).is_ok_and(|found| found.file_type().is_fifo()) {
        return None;
    }
    let open = || OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open(path);
    let is_unread = |opened: &io::Result<File>| {
        opened.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::ENXIO))
    };
    let mut opened = open();
    if is_unread(&opened) {
        info!(fifo = %path.display(), "no program reads this FIFO yet; the capture begins when one does");
    }
    while is_unread(&opened) {
        sleep(AGAIN).await;
        opened = open();
    }
    // The recording tells what else is wrong.
    opened.ok()
}

/// The pipe that packets go to, if they go to one.
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

    /// Returns when its reader has taken something since the pipe was full, or is gone.
    pub(super) async fn taken(&self) -> io::Result<()> {
        match &self.0 {
            // What the reader takes after this is told again. So the caller can write until the pipe is full.
            Some(pipe) => pipe.writable().await.map(|mut guard| guard.clear_ready()),
            None => pending().await,
        }
    }
}
