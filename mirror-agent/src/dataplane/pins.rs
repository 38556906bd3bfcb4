//! The directory in the BPF file system where maps and links are pinned.
//!
//! ```text
//! DIR/podmirror/            root's alone, and locked by the one agent that changes anything below it (`lock`)
//!   v1/                     the version of the wire types: an agent never opens maps of another layout
//!     TAPS TAP_OWNERS TARGETS FILTERS LIMITS METERS COUNTERS SNAPLEN
//!     links/<ifindex>-<program>  TCX links
//! ```
//!
//! Paths and files only; what the maps hold is in `maps`, what the links do in `hooks`.

use std::{
    fs::{self, DirBuilder},
    io::{self, ErrorKind},
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use mirror_common::abi::ABI_VERSION;
use nix::{
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
        self.is_roots() && self.maps().join("TAPS").exists()
    }

    /// Makes the directories. Mounts a BPF file system at the default place if there is none.
    pub(super) fn create(&self) -> anyhow::Result<()> {
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
            mount(Some("bpf"), bpffs, Some("bpf"), MsFlags::empty(), Some("mode=0700")).with_context(|| {
                format!(
                    "{0} is not a BPF file system, and mounting one failed; mount it: mount -t bpf bpf {0}",
                    bpffs.display()
                )
            })?;
            info!(dir = DEFAULT_BPFFS, "mounted a BPF file system");
        }
        self.make_root()?;
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(self.links())
            .with_context(|| format!("cannot make {} (are you root?)", self.links().display()))
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
