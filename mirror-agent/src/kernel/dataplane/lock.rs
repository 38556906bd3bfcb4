//! The lock that admits one agent per network namespace, and the sockets by which other processes reach that agent.
//!
//! ```text
//! /run/podmirror/         accessible to root only: other users cannot lock, bind or connect to anything in it
//!   <namespace>.lock      locked (flock) by the agent; <namespace>: inode of the network namespace
//!   <namespace>.sock      the agent listens here; only the holder of the lock creates and replaces it
//!   <namespace>.control   the same, for programs that request a capture
//!   <namespace>.<target>.recorder   the recorder of a target listens here, while the agent lets it read the target
//! <bpffs>/podmirror/      locked too: another network namespace may see the same directory
//! ```
//!
//! A network namespace has one agent, because filters and marks on devices do not distinguish between agents. Agents of
//! earlier versions hold the second lock too, so an old and a new agent never run at the same time. This module deals
//! with paths, files and sockets only; `notes` defines the contents of the socket. The commands call it through
//! [`Pins`].

use std::{
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io::{self, ErrorKind},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::{
            fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _},
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    sys::socket::{
        AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt::PeerCredentials,
    },
};
use tracing::warn;

use super::pins::Pins;
use crate::{kernel::links::netns_of_this_thread, model::TargetName};

/// The directory of locks and sockets. On a Kubernetes node, this directory of the node is mounted into the agent's
/// container.
const DIRECTORY: &str = "/run/podmirror";
/// The extension of the sockets of recorders.
const RECORDER: &str = "recorder";
/// The number of attempts of an operation whose files another process changes at the same time.
const ATTEMPTS: u32 = 64;
/// The mode bits that let users other than the owner write.
const OTHERS_WRITE: u32 = 0o022;

/// The lock of the process that changes the pins' directory or the devices of this network namespace. It is released
/// when dropped or when the process ends.
#[derive(Debug)]
pub struct PinsLock {
    agent: UnixListener,
    control: UnixListener,
    places: Places,
    _netns: Flock<File>,
    _pins: Option<Flock<File>>,
}

impl PinsLock {
    /// The socket by which other processes find the agent.
    pub fn socket(&self) -> io::Result<UnixListener> {
        self.agent.try_clone()
    }

    /// The control socket.
    pub fn control(&self) -> io::Result<UnixListener> {
        self.control.try_clone()
    }
}

impl Drop for PinsLock {
    fn drop(&mut self) {
        // The lock is still held, so these are this agent's own files. A file that stays is harmless: the next agent
        // replaces it.
        let _ = fs::remove_file(&self.places.control);
        let _ = fs::remove_file(&self.places.socket);
        let _ = fs::remove_file(&self.places.lock);
    }
}

/// The socket of a recorder. Dropping it removes its file, unless another recorder has put its own there. If a recorder
/// is killed, the file stays. That is harmless, because no process listens there.
#[derive(Debug)]
pub struct RecorderSocket {
    /// While it is open, no other file can have its inode.
    listener: UnixListener,
    place: PathBuf,
    ino: u64,
}

impl RecorderSocket {
    fn at(place: PathBuf) -> anyhow::Result<Self> {
        let made = listen(&place).and_then(|listener| Ok((listener, fs::symlink_metadata(&place)?.ino())));
        let (listener, ino) = made.with_context(|| format!("cannot listen on {}", place.display()))?;
        Ok(Self { listener, place, ino })
    }

    /// Returns a handle to the socket.
    pub fn listener(&self) -> io::Result<UnixListener> {
        self.listener.try_clone()
    }
}

impl Drop for RecorderSocket {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.place).is_ok_and(|there| there.ino() == self.ino) {
            let _ = fs::remove_file(&self.place);
        }
    }
}

impl Pins {
    /// Creates the directories and takes the lock. An agent does so before anything else.
    pub fn claim(&self) -> anyhow::Result<PinsLock> {
        self.create()?;
        self.lock()
    }

    /// Takes the lock; fails if another process holds it. The directory of the pins need not exist.
    pub fn lock(&self) -> anyhow::Result<PinsLock> {
        let places = Places::make(Path::new(DIRECTORY))?;
        let Some(netns) = lock_file(&places.lock)? else {
            bail!("another mirror-agent is running on this node; stop it first");
        };
        self.evict_strangers()?;
        let directory = match File::open(self.root()) {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            directory => Some(directory.with_context(|| format!("cannot open {}", self.root().display()))?),
        };
        let pins = match directory.map(|file| Flock::lock(file, FlockArg::LockExclusiveNonblock)).transpose()
        {
            Ok(pins) => pins,
            Err((_, Errno::EWOULDBLOCK)) => bail!(
                "another mirror-agent is running in {}; stop it first, or choose another --bpffs",
                self.root().display()
            ),
            Err((_, errno)) => {
                return Err(errno).with_context(|| format!("cannot lock {}", self.root().display()));
            }
        };
        let open = |path: &Path| listen(path).with_context(|| format!("cannot listen on {}", path.display()));
        let (agent, control) = (open(&places.socket)?, open(&places.control)?);
        Ok(PinsLock { agent, control, places, _netns: netns, _pins: pins })
    }

    /// Connects to the process that holds the lock in this network namespace; `None` if there is no such process that
    /// root has started.
    pub fn connect() -> Option<UnixStream> {
        let directory = Path::new(DIRECTORY);
        check_root_owns(directory).ok()?;
        call(&Places::of(directory).ok()?.socket).ok()
    }

    /// Connects to the agent's control socket; `None` if no agent runs in this network namespace.
    ///
    /// # Errors
    ///
    /// An agent may run, but cannot be reached: this process does not run as root, or the agent is of an earlier
    /// version.
    pub fn connect_control() -> anyhow::Result<Option<UnixStream>> {
        reach(|places| places.control, "the agent")
    }

    /// Creates the socket by which other processes find the recorder of a target. Replaces the socket of an earlier
    /// recorder. The agent must have admitted the caller: it gives a target to one reader at a time.
    pub fn recorder(target: &TargetName) -> anyhow::Result<RecorderSocket> {
        RecorderSocket::at(Places::make(Path::new(DIRECTORY))?.recorder(target))
    }

    /// Connects to the recorder of a target, or to any recorder; `None` if there is none in this network namespace.
    ///
    /// # Errors
    ///
    /// The same as for [`connect_control`](Self::connect_control).
    pub fn connect_recorder(target: Option<&TargetName>) -> anyhow::Result<Option<UnixStream>> {
        let directory = Path::new(DIRECTORY);
        if fs::symlink_metadata(directory).is_err_and(|error| error.kind() == ErrorKind::NotFound) {
            return Ok(None);
        }
        let recorders = match target {
            Some(target) => vec![Places::of(directory)?.recorder(target)],
            None => Places::of(directory)?.recorders()?,
        };
        for recorder in recorders {
            if let Some(stream) = reach(|_| recorder, "the recorder")? {
                return Ok(Some(stream));
            }
        }
        Ok(None)
    }

    /// Creates the directory of the pins, writable by root only.
    pub(super) fn make_root(&self) -> anyhow::Result<()> {
        for _ in 0..ATTEMPTS {
            self.evict_strangers()?;
            match DirBuilder::new().mode(0o700).create(self.root()) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                    // If another user has just created the directory, the next attempt removes it.
                    if self.is_roots() {
                        return Ok(());
                    }
                }
                made => {
                    return made
                        .with_context(|| format!("cannot make {} (are you root?)", self.root().display()));
                }
            }
        }
        bail!("another process keeps creating {}", self.root().display())
    }

    /// Whether the directory of the pins exists and is writable by root only.
    pub(super) fn is_roots(&self) -> bool {
        fs::symlink_metadata(self.root()).is_ok_and(|root| is_roots_directory(&root))
    }

    /// Removes an entry at the path of the pins' directory, unless it is a directory that only root can write to. If
    /// all users can write to the BPF file system, another user may have created that entry, to block or to impersonate
    /// the agent.
    fn evict_strangers(&self) -> anyhow::Result<()> {
        let root = self.root();
        let evicted = match fs::symlink_metadata(root) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Ok(metadata) if is_roots_directory(&metadata) => return Ok(()),
            Ok(metadata) => {
                warn!(
                    path = %root.display(),
                    uid = metadata.uid(),
                    "removing a file or directory at the path of the agent's pins, because others than root can change \
                     it"
                );
                if metadata.is_dir() { fs::remove_dir_all(root) } else { fs::remove_file(root) }
            }
            Err(error) => Err(error),
        };
        match evicted {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            evicted => {
                evicted.with_context(|| format!("{} can be changed by others than root", root.display()))
            }
        }
    }
}

/// The paths of the lock and the sockets of one network namespace.
#[derive(Debug)]
struct Places {
    lock: PathBuf,
    socket: PathBuf,
    control: PathBuf,
}

impl Places {
    /// Returns the paths for this network namespace. Does not access them.
    fn of(directory: &Path) -> io::Result<Self> {
        let netns = netns_of_this_thread()?.ino;
        let place = |kind: &str| directory.join(format!("{netns}.{kind}"));
        Ok(Self { lock: place("lock"), socket: place("sock"), control: place("control") })
    }

    /// Returns the paths, and creates the directory if necessary.
    fn make(directory: &Path) -> anyhow::Result<Self> {
        match DirBuilder::new().recursive(true).mode(0o700).create(directory) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(error).with_context(|| {
                    format!(
                        "cannot make {0} (are you root?); in a container, mount the node's {0} there",
                        directory.display()
                    )
                });
            }
            _ => check_root_owns(directory)?,
        }
        // The kubelet creates the directory with read permission for all users.
        let closed = fs::set_permissions(directory, Permissions::from_mode(0o700));
        closed.with_context(|| format!("cannot restrict {} to root", directory.display()))?;
        Self::of(directory).context("cannot determine the network namespace")
    }

    /// The path of the socket of a target's recorder. No name of a target has a dot.
    fn recorder(&self, target: &TargetName) -> PathBuf {
        self.control.with_extension(format!("{target}.{RECORDER}"))
    }

    /// The paths of the sockets of all recorders, in the order of their targets.
    fn recorders(&self) -> anyhow::Result<Vec<PathBuf>> {
        let directory = self.control.parent().unwrap_or(Path::new(DIRECTORY));
        let entries = fs::read_dir(directory)
            .with_context(|| format!("cannot read {} (are you root?)", directory.display()))?;
        let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        paths.retain(|path| {
            path.extension().is_some_and(|kind| kind == RECORDER)
                && path.file_prefix() == self.control.file_stem()
        });
        paths.sort();
        Ok(paths)
    }
}

/// Connects to a socket of a process of root; `None` if no process listens there.
fn reach(place: impl FnOnce(Places) -> PathBuf, whom: &str) -> anyhow::Result<Option<UnixStream>> {
    let directory = Path::new(DIRECTORY);
    match fs::symlink_metadata(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        _ => check_root_owns(directory)?,
    }
    let socket = place(Places::of(directory)?);
    match call(&socket) {
        Ok(stream) => Ok(Some(stream)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => Ok(None),
        Err(error) => {
            Err(error).with_context(|| format!("cannot reach {whom} at {} (are you root?)", socket.display()))
        }
    }
}

/// Fails unless only root can write to a directory and its parent.
fn check_root_owns(directory: &Path) -> anyhow::Result<()> {
    let parent = directory.parent().unwrap_or(directory);
    for (path, metadata) in [(parent, fs::metadata(parent)), (directory, fs::symlink_metadata(directory))] {
        let metadata = metadata.with_context(|| format!("cannot read {}", path.display()))?;
        if !is_roots_directory(&metadata) {
            bail!(
                "{0} holds the agent's lock and must be a directory that only root can write to: chown root {0}; \
                 chmod go-w {0}",
                path.display()
            );
        }
    }
    Ok(())
}

fn is_roots_directory(metadata: &fs::Metadata) -> bool {
    metadata.is_dir() && metadata.uid() == 0 && metadata.mode() & OTHERS_WRITE == 0
}

/// Locks the file at `path`, which is created if necessary; `None` if another process has it locked.
fn lock_file(path: &Path) -> anyhow::Result<Option<Flock<File>>> {
    let context = || format!("cannot lock {}", path.display());
    for _ in 0..ATTEMPTS {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let file =
            match Flock::lock(options.open(path).with_context(context)?, FlockArg::LockExclusiveNonblock) {
                Ok(file) => file,
                Err((_, Errno::EWOULDBLOCK)) => return Ok(None),
                Err((_, errno)) => return Err(errno).with_context(context),
            };
        let locked = file.metadata().with_context(context)?;
        // The previous holder removes the file when it ends, and another process may have created and locked a new one
        // since.
        if fs::symlink_metadata(path).is_ok_and(|there| there.ino() == locked.ino()) {
            return Ok(Some(file));
        }
    }
    bail!("another process keeps replacing {}", path.display())
}

/// Listens at `path`. The caller holds the lock, so an existing socket was left by an agent that has ended.
fn listen(path: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Connects to a listener of root, without waiting for a busy one.
fn call(path: &Path) -> io::Result<UnixStream> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket: OwnedFd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    if getsockopt(&socket, PeerCredentials)?.uid() != 0 {
        return Err(io::Error::new(ErrorKind::PermissionDenied, "not root's"));
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

#[cfg(test)]
mod tests;
