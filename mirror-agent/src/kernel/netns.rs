//! Network namespaces as files: finds, identifies and enters them.
//!
//! Only short-lived threads enter a namespace, and the agent keeps none open, because an open namespace file or socket
//! keeps a deleted pod's namespace alive. `links` reads pods and creates their relay devices through this module, and
//! `dataplane` attaches programs inside pods through it.

use std::{
    collections::{HashMap, HashSet},
    fs::{self, File, Metadata, OpenOptions},
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    process,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use nix::sched::{CloneFlags, setns};
use tokio::{runtime::Handle, sync::oneshot};

use crate::model::NetnsId;

/// The namespace of the calling thread. `/proc/self` would be that of the process's main thread.
const CURRENT: &str = "/proc/thread-self/ns/net";

/// The identity of the network namespace whose file is at `path`. Only [`Netns::open`] checks that the file is a
/// namespace.
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

    /// The identity of the namespace.
    pub(crate) fn id(&self) -> NetnsId {
        self.id
    }

    /// Runs `open`, which opens sockets, in the namespace and in the caller's Tokio runtime.
    ///
    /// A socket stays in the namespace in which it was opened. So only a short-lived thread enters the namespace.
    pub(crate) async fn inside<T: Send + 'static>(
        &self,
        open: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let (file, runtime) = (self.file.try_clone()?, Handle::try_current().map_err(io::Error::other)?);
        let (sender, receiver) = oneshot::channel();
        thread::Builder::new().name("netns".into()).spawn(move || {
            let _runtime = runtime.enter();
            let opened = setns(file, CloneFlags::CLONE_NEWNET).map_err(io::Error::from).and_then(|()| open());
            // If the caller was cancelled, there is no receiver, and the socket is closed here.
            let _ = sender.send(opened);
        })?;
        receiver.await.map_err(io::Error::other)?
    }

    /// Runs `work` in the namespace on a separate thread, and waits for it.
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

/// The paths where pods' namespaces can be opened at the moment. `links` records them, `dataplane` enters the
/// namespaces.
#[derive(Debug, Clone, Default)]
pub struct Namespaces(Arc<Mutex<HashMap<u64, PathBuf>>>);

impl Namespaces {
    /// Records the path of a namespace file.
    pub(crate) fn note(&self, id: NetnsId, path: &Path) {
        self.paths().insert(id.ino, path.to_owned());
    }

    /// Forgets all namespaces except these inodes.
    pub(crate) fn keep(&self, wanted: &HashSet<u64>) {
        self.paths().retain(|ino, _| wanted.contains(ino));
    }

    /// Opens a namespace.
    ///
    /// # Errors
    ///
    /// The namespace is unknown, or another namespace is at its path now.
    pub(crate) fn open(&self, id: NetnsId) -> io::Result<Netns> {
        let path = self.path(id).ok_or_else(gone)?;
        at(id, &path)
    }

    /// The last known path of a namespace.
    pub(crate) fn path(&self, id: NetnsId) -> Option<PathBuf> {
        self.paths().get(&id.ino).cloned()
    }

    /// Opens a namespace and records its path. Searches the known path, then `hint`, then the whole node.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::NotFound`]: as far as the agent can see, the namespace no longer exists. Other errors: it
    /// exists and cannot be opened, or it may be at a path that the agent cannot read.
    pub(crate) fn find(&self, id: NetnsId, hint: Option<&Path>) -> io::Result<Netns> {
        let own = PathBuf::from(format!("/proc/{}/ns/net", process::id()));
        // An unreadable path may be the namespace. A process or a file that no longer exists is not.
        let mut refused = None;
        // Single processes can be unreadable, for example if the agent runs in a container. Without the permission, all
        // other processes are.
        let (mut denied, mut sees_others) = (None, false);
        let known = self.path(id).into_iter().chain(hint.map(Path::to_owned)).map(Ok);
        for path in known.chain(everywhere()) {
            let opened = path.and_then(|path| {
                let is_it = netns_id(&path).map(|found| found.ino == id.ino);
                sees_others |= is_it.is_ok() && path != own;
                match is_it.and_then(|is_it| is_it.then(|| at(id, &path)).transpose()) {
                    Err(error) if has_gone(&path, &error) => Ok(None),
                    opened => Ok(opened?.map(|netns| (path, netns))),
                }
            });
            match opened {
                Ok(Some((path, netns))) => {
                    self.note(id, &path);
                    return Ok(netns);
                }
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => denied = Some(error),
                Err(error) => refused = Some(error),
            }
        }
        Err(refused.or_else(|| denied.filter(|_| !sees_others)).unwrap_or_else(gone))
    }

    fn paths(&self) -> MutexGuard<'_, HashMap<u64, PathBuf>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn gone() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "the network namespace no longer exists")
}

/// Opens the namespace at this path, if it is the one with this id.
fn at(id: NetnsId, path: &Path) -> io::Result<Netns> {
    let netns = Netns::open(path)?;
    if netns.id.ino == id.ino { Ok(netns) } else { Err(gone()) }
}

/// Whether this error proves that no namespace is at this path. While a process exits, the kernel answers "permission
/// denied" for it (`proc_ns_get_link()`), so this function also checks whether the directory of the process exists.
fn has_gone(path: &Path, error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidInput, NotADirectory, NotFound};
    let process = path.ancestors().nth(2);
    matches!(error.kind(), NotFound | NotADirectory | InvalidInput)
        || error.raw_os_error() == Some(libc::ESRCH)
        || process.is_some_and(|process| !process.exists())
}

/// Every path where a namespace may be: the directories of container runtimes and the processes of the node. Yields an
/// error for a directory that cannot be read.
fn everywhere() -> impl Iterator<Item = io::Result<PathBuf>> {
    let below = |directory: &str| {
        let (entries, error) = match fs::read_dir(directory) {
            Ok(entries) => (Some(entries), None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => (None, None),
            Err(error) => (None, Some(Err(error))),
        };
        let paths = entries.into_iter().flatten().map(|entry| entry.map(|entry| entry.path()));
        paths.chain(error)
    };
    // The second path is the node's, for an agent in a container.
    let kept = ["/run/netns", "/proc/1/root/run/netns"].into_iter().flat_map(below);
    let is_process = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().iter().all(u8::is_ascii_digit))
    };
    let processes = below("/proc").filter(move |path| path.as_ref().map_or(true, is_process));
    kept.chain(processes.map(|path| path.map(|path| path.join("ns/net"))))
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests panic")]

    use super::*;

    /// A namespace at an unreadable path may still exist, so its attachment marker stays.
    #[test]
    fn a_namespace_has_gone_only_where_nothing_can_be() {
        let is_gone = |path: &str, code: i32| has_gone(Path::new(path), &io::Error::from_raw_os_error(code));
        // No process has the id 4194305: the kernel's highest is 4194304.
        for (path, code, gone) in [
            ("/proc/self/ns/net", libc::EACCES, false),
            ("/proc/self/ns/net", libc::EMFILE, false),
            ("/proc/self/ns/net", libc::ENOMEM, false),
            ("/proc/self/ns/net", libc::ENOENT, true),
            ("/proc/self/ns/net", libc::ESRCH, true),
            ("/proc/4194305/ns/net", libc::EACCES, true),
            ("/run/netns/web", libc::EACCES, false),
        ] {
            assert_eq!(is_gone(path, code), gone, "{path} {code}");
        }
    }

    #[test]
    fn a_namespace_is_found_by_its_number_and_one_that_is_nowhere_has_gone() {
        let (namespaces, own) = (Namespaces::default(), Netns::current().unwrap().id());
        assert_eq!(namespaces.find(own, None).unwrap().id(), own);
        assert!(namespaces.path(own).is_some());
        let nowhere = NetnsId { ino: 1, ..own };
        let error = namespaces.find(nowhere, Some(Path::new(CURRENT))).map(|found| found.id()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
