//! The directory in the BPF file system where maps and links are pinned, and its lock.
//!
//! ```text
//! DIR/podmirror/            locked (flock) by the one agent that changes anything below it; and one agent a
//!                           network namespace (an abstract socket)
//!   v1/                     the version of the wire types: an agent never opens maps of another layout
//!     TAPS TAP_OWNERS TARGETS FILTERS LIMITS METERS COUNTERS SNAPLEN
//!     links/<ifindex>-<program>  TCX links
//! ```
//!
//! Paths and files only; what the maps hold is in `maps`, what the links do in `hooks`.

use std::{
    fs::{self, DirBuilder, File},
    io::{self, ErrorKind},
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            fs::DirBuilderExt as _,
            net::{SocketAddr, UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use mirror_common::abi::ABI_VERSION;
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    mount::{MsFlags, mount},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};
use tracing::info;

use crate::model::{IfIndex, Program};

/// Where a BPF file system is mounted by convention.
const DEFAULT_BPFFS: &str = "/sys/fs/bpf";

/// The pins below one `--bpffs` directory.
#[derive(Debug, Clone)]
pub struct Pins {
    root: PathBuf,
}

/// Name of the abstract socket that the one agent of a network namespace listens on (unix(7)): filters and marks know
/// agents apart by their namespace only.
const AGENT_SOCKET: &str = "podmirror-agent";

/// Held by whoever changes anything below the pins' directory, or on the devices of this network namespace; released
/// when dropped or when the process ends.
#[derive(Debug)]
pub struct PinsLock {
    agent: UnixListener,
    _file: Option<Flock<File>>,
}

impl PinsLock {
    /// The socket on which others find that there is an agent.
    pub fn socket(&self) -> io::Result<UnixListener> {
        self.agent.try_clone()
    }
}

impl Pins {
    /// The pins below `bpffs`. Looks at nothing yet.
    pub fn new(bpffs: &Path) -> Self {
        Self { root: bpffs.join("podmirror") }
    }

    /// Directory of everything of ours, of all versions.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Directory of the maps of this version.
    pub fn maps(&self) -> PathBuf {
        self.root.join(format!("v{ABI_VERSION}"))
    }

    /// Directory of the links of this version.
    pub fn links(&self) -> PathBuf {
        self.maps().join("links")
    }

    /// Pin of the link of one program.
    pub fn link(&self, ifindex: IfIndex, program: Program) -> PathBuf {
        self.links().join(format!("{ifindex}-{}", program.name()))
    }

    /// The links that are pinned.
    pub fn pinned_links(&self) -> io::Result<Vec<(IfIndex, Program)>> {
        let entries = match fs::read_dir(self.links()) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let names = entries.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()?;
        Ok(names.iter().filter_map(|name| parse_link(name.to_str()?)).collect())
    }

    /// Whether maps of this version are pinned.
    pub fn exist(&self) -> bool {
        self.maps().join("TAPS").exists()
    }

    /// Makes the directories and takes the lock, as an agent must before it does anything else.
    pub fn claim(&self) -> anyhow::Result<PinsLock> {
        self.create()?;
        self.lock()
    }

    /// Makes the directories. Mounts a BPF file system at the default place if there is none.
    fn create(&self) -> anyhow::Result<()> {
        let bpffs = self.root.parent().unwrap_or(Path::new(DEFAULT_BPFFS));
        let created = fs::create_dir_all(bpffs);
        if !is_bpffs(bpffs) {
            if bpffs != Path::new(DEFAULT_BPFFS) {
                created.with_context(|| format!("cannot make {}", bpffs.display()))?;
                bail!(
                    "{0} is not in a BPF file system; mount one (mount -t bpf bpf {0}) or choose another --bpffs",
                    bpffs.display()
                );
            }
            mount(Some("bpf"), bpffs, Some("bpf"), MsFlags::empty(), None::<&str>).with_context(|| {
                format!(
                    "{0} is not a BPF file system, and mounting one failed; mount it: mount -t bpf bpf {0}",
                    bpffs.display()
                )
            })?;
            info!(dir = DEFAULT_BPFFS, "mounted a BPF file system");
        }
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(self.links())
            .with_context(|| format!("cannot make {} (are you root?)", self.links().display()))
    }

    /// Takes the lock; an error if another process has it. The directory need not exist.
    pub fn lock(&self) -> anyhow::Result<PinsLock> {
        let address = SocketAddr::from_abstract_name(AGENT_SOCKET)?;
        let agent = match UnixListener::bind_addr(&address) {
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                bail!("another mirror-agent is at work on this node; stop it first")
            }
            agent => agent.context("cannot tell other agents of this one")?,
        };
        // The same directory may be seen from another network namespace, whose devices have other indexes.
        let file = match File::open(&self.root) {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            file => Some(file.with_context(|| format!("cannot open {}", self.root.display()))?),
        };
        let file = match file.map(|file| Flock::lock(file, FlockArg::LockExclusiveNonblock)).transpose() {
            Ok(file) => file,
            Err((_, Errno::EWOULDBLOCK)) => bail!(
                "another mirror-agent is at work in {}; stop it first, or choose another --bpffs",
                self.root.display()
            ),
            Err((_, errno)) => {
                return Err(errno).with_context(|| format!("cannot lock {}", self.root.display()));
            }
        };
        Ok(PinsLock { agent, _file: file })
    }

    /// A connection to whoever in this network namespace has the lock; `None`: nobody.
    pub fn connect() -> Option<UnixStream> {
        let address = SocketAddr::from_abstract_name(AGENT_SOCKET).ok()?;
        UnixStream::connect_addr(&address).ok()
    }

    /// Removes the directories of all versions and whatever is pinned there.
    pub fn remove(&self) -> anyhow::Result<()> {
        match fs::remove_dir_all(&self.root) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed.with_context(|| format!("cannot remove {}", self.root.display())),
        }
    }
}

fn is_bpffs(path: &Path) -> bool {
    statfs(path).is_ok_and(|stat| stat.filesystem_type() == BPF_FS_MAGIC)
}

fn parse_link(name: &str) -> Option<(IfIndex, Program)> {
    let (ifindex, program) = name.split_once('-')?;
    let program = Program::ALL.into_iter().find(|candidate| candidate.name() == program)?;
    Some((IfIndex(ifindex.parse().ok()?), program))
}
