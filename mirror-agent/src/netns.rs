//! Network namespaces as files: their identity, and what is done inside them.
//!
//! No thread of the agent ever stays in a namespace, and none is kept open, because an open namespace file or socket keeps
//! a deleted pod's namespace alive. `links` reads pods and makes their exits through it, and `dataplane` attaches inside
//! pods.

use std::{
    collections::{HashMap, HashSet},
    fs::{self, File, Metadata, OpenOptions},
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use nix::sched::{CloneFlags, setns};
use tokio::{runtime::Handle, sync::oneshot};

use crate::model::NetnsId;

/// The namespace of the calling thread. `/proc/self` would be that of the process's first thread.
const CURRENT: &str = "/proc/thread-self/ns/net";

/// Identity of the network namespace whose file is at `path`. Only [`Netns::open`] can check that the file is one.
pub(crate) fn netns_id(path: &Path) -> io::Result<NetnsId> {
    path.metadata().map(|metadata| id(&metadata))
}

fn id(metadata: &Metadata) -> NetnsId {
    NetnsId { dev: metadata.dev(), ino: metadata.ino() }
}

/// An open network namespace file.
pub(crate) struct Netns {
    file: File,
    id: NetnsId,
}

impl Netns {
    /// Opens the namespace file at `path`.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
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
    pub(crate) fn current() -> io::Result<Self> {
        Self::open(Path::new(CURRENT))
    }

    /// Its identity.
    pub(crate) fn id(&self) -> NetnsId {
        self.id
    }

    /// Runs `open`, which opens sockets, in the namespace, with the caller's runtime entered.
    ///
    /// A socket stays in the namespace in which it was opened. So only a short-lived thread ever enters a namespace.
    pub(crate) async fn inside<T: Send + 'static>(
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

    /// Runs `work` in the namespace, on a thread of its own. The calling thread waits.
    pub(crate) fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        let enter = || setns(&self.file, CloneFlags::CLONE_NEWNET).map_err(io::Error::from).map(|()| work());
        thread::scope(|scope| {
            let thread = thread::Builder::new().name("netns".into()).spawn_scoped(scope, enter)?;
            thread
                .join()
                .unwrap_or_else(|_| Err(io::Error::other("the thread in the namespace has panicked")))
        })
    }
}

/// Where the namespaces of pods can be opened now. `links` notes what it has found, `dataplane` enters.
#[derive(Debug, Clone, Default)]
pub struct Namespaces(Arc<Mutex<HashMap<u64, PathBuf>>>);

impl Namespaces {
    /// Notes the path of a namespace file.
    pub(crate) fn note(&self, id: NetnsId, path: &Path) {
        self.paths().insert(id.ino, path.to_owned());
    }

    /// Forgets all namespaces but these.
    pub(crate) fn keep(&self, wanted: &HashSet<u64>) {
        self.paths().retain(|ino, _| wanted.contains(ino));
    }

    /// Opens a namespace.
    ///
    /// # Errors
    ///
    /// It is not known, or another namespace is at its path now.
    pub(crate) fn open(&self, id: NetnsId) -> io::Result<Netns> {
        let path = self.path(id).ok_or_else(gone)?;
        at(id, &path)
    }

    /// Where a namespace was last.
    pub(crate) fn path(&self, id: NetnsId) -> Option<PathBuf> {
        self.paths().get(&id.ino).cloned()
    }

    /// Opens a namespace where it is known to be, at this path, or wherever on the node it is found, and notes where that
    /// is.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::NotFound`]: it has gone, as far as can be seen. Otherwise it is there, and cannot be opened.
    pub(crate) fn find(&self, id: NetnsId, hint: Option<&Path>) -> io::Result<Netns> {
        let mut refused = None;
        let known = self.path(id).into_iter().chain(hint.map(Path::to_owned));
        for path in known.chain(everywhere()) {
            if !netns_id(&path).is_ok_and(|found| found.ino == id.ino) {
                continue;
            }
            match at(id, &path) {
                Ok(netns) => {
                    self.note(id, &path);
                    return Ok(netns);
                }
                Err(error) => refused = Some(error),
            }
        }
        Err(refused.unwrap_or_else(gone))
    }

    fn paths(&self) -> MutexGuard<'_, HashMap<u64, PathBuf>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn gone() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "the network namespace has gone")
}

/// Opens this namespace, if it is the one at the path.
fn at(id: NetnsId, path: &Path) -> io::Result<Netns> {
    let netns = Netns::open(path)?;
    if netns.id.ino == id.ino { Ok(netns) } else { Err(gone()) }
}

/// Every path where a namespace may be: where runtimes keep them, and those of the node's processes.
fn everywhere() -> impl Iterator<Item = PathBuf> {
    // A list that cannot be read leads nowhere.
    let below = |directory: &str| {
        let entries = fs::read_dir(directory).into_iter().flatten().flatten();
        entries.map(|entry| entry.path())
    };
    // The second one is that of the node, for an agent in a container.
    let kept = ["/run/netns", "/proc/1/root/run/netns"].into_iter().flat_map(below);
    kept.chain(below("/proc").map(|process| process.join("ns/net")))
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
