//! A pipe, FIFO or socket as the output: writes what its reader accepts, and never waits longer than the caller allows.
//!
//! The pipe stays in blocking mode: standard output, and with it its mode, is shared with other programs such as the
//! shell. Instead, each write is short enough that a writable pipe accepts it at once. [`output`](super::output) calls
//! this module, and keeps what was not accepted.

use std::{
    fs::File,
    io::{self, ErrorKind, Write as _},
    os::{fd::AsFd as _, unix::fs::FileTypeExt as _},
    time::Duration,
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

/// Maximum length of a write: `PIPE_BUF`. A pipe is writable when this many bytes fit; sockets become writable later.
const MOST_AT_ONCE: usize = 4096;

/// Whether the file is one whose reader can block its writer.
pub(super) fn is_pipe(file: &File) -> io::Result<bool> {
    let kind = file.metadata()?.file_type();
    Ok(kind.is_fifo() || kind.is_socket())
}

/// Writes bytes to a file, or to a pipe, which has a `patience`: each time its reader accepts nothing, waits up to that
/// long for it. An error comes with the number of bytes written before it: [`ErrorKind::WouldBlock`] after `patience`,
/// [`ErrorKind::BrokenPipe`] if the reader closed the pipe, which is detected even if there are no bytes to write.
pub(super) fn write(
    file: &mut File,
    bytes: &[u8],
    patience: Option<Duration>,
) -> Result<(), (usize, io::Error)> {
    let most = if patience.is_some() { MOST_AT_ONCE } else { usize::MAX };
    let mut count = 0;
    loop {
        let rest = bytes.get(count..).unwrap_or_default();
        if let Some(patience) = patience {
            let patience = if rest.is_empty() { Duration::ZERO } else { patience };
            if !wait(file, patience).map_err(|error| (count, error))? && !rest.is_empty() {
                return Err((count, ErrorKind::WouldBlock.into()));
            }
        }
        if rest.is_empty() {
            return Ok(());
        }
        match file.write(rest.get(..most).unwrap_or(rest)) {
            Ok(0) => return Err((count, ErrorKind::WriteZero.into())),
            Ok(more) => count += more,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err((count, error)),
        }
    }
}

/// Waits until the pipe is writable; returns whether it is. An error if its reader closed it.
fn wait(pipe: &File, patience: Duration) -> io::Result<bool> {
    let mut fds = [PollFd::new(pipe.as_fd(), PollFlags::POLLOUT)];
    let timeout = PollTimeout::try_from(patience).unwrap_or(PollTimeout::MAX);
    while let Err(error) = poll(&mut fds, timeout) {
        if error != Errno::EINTR {
            return Err(error.into());
        }
    }
    let [found] = fds.map(|fd| fd.revents().unwrap_or(PollFlags::empty()));
    // A pipe without a reader reports POLLERR, a socket without one POLLHUP.
    if found.intersects(PollFlags::POLLERR | PollFlags::POLLHUP) {
        return Err(ErrorKind::BrokenPipe.into());
    }
    Ok(found.contains(PollFlags::POLLOUT))
}
