//! Network namespaces as files: their identity, and sockets inside them.
//!
//! This is not a way into a namespace for other purposes: no thread of the agent ever stays in a namespace, and none is
//! kept open, because an open namespace file or socket keeps a deleted pod's namespace alive. `inside` reads pods
//! through it.

use std::{
    fs::{File, Metadata, OpenOptions},
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::Path,
    thread,
};

use nix::sched::{CloneFlags, setns};
use tokio::{runtime::Handle, sync::oneshot};

use crate::model::NetnsId;

/// The namespace of the calling thread. `/proc/self` would be that of the process's first thread.
const CURRENT: &str = "/proc/thread-self/ns/net";

/// Identity of the network namespace whose file is at `path`. Only [`Netns::open`] can check that the file is one.
pub(super) fn netns_id(path: &Path) -> io::Result<NetnsId> {
    path.metadata().map(|metadata| id(&metadata))
}

fn id(metadata: &Metadata) -> NetnsId {
    NetnsId { dev: metadata.dev(), ino: metadata.ino() }
}

/// An open network namespace file.
pub(super) struct Netns {
    file: File,
    id: NetnsId,
}

impl Netns {
    /// Opens the namespace file at `path`.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        // A FIFO in the place of a namespace file must not block the agent.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        // SAFETY: NS_GET_NSTYPE takes no argument and `file` is an open descriptor.
        let kind = unsafe { libc::ioctl(file.as_raw_fd(), libc::NS_GET_NSTYPE) };
        if kind != libc::CLONE_NEWNET {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a network namespace"));
        }
        let id = id(&file.metadata()?);
        Ok(Self { file, id })
    }

    /// Opens the namespace of the calling thread.
    pub(super) fn current() -> io::Result<Self> {
        Self::open(Path::new(CURRENT))
    }

    /// Its identity.
    pub(super) fn id(&self) -> NetnsId {
        self.id
    }

    /// Runs `open`, which opens sockets, in the namespace, with the caller's runtime entered.
    ///
    /// A socket stays in the namespace in which it was opened. So only a short-lived thread ever enters a namespace.
    pub(super) async fn inside<T: Send + 'static>(
        &self,
        open: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let (file, runtime) = (self.file.try_clone()?, Handle::try_current().map_err(io::Error::other)?);
        let (sender, receiver) = oneshot::channel();
        thread::Builder::new().name("netns".into()).spawn(move || {
            let _runtime = runtime.enter();
            let opened = setns(file, CloneFlags::CLONE_NEWNET).map_err(io::Error::from).and_then(|()| open());
            // If the caller was cancelled, no receiver is left; the socket is closed then.
            let _ = sender.send(opened);
        })?;
        receiver.await.map_err(io::Error::other)?
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
