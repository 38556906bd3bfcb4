//! The directory in the BPF file system where maps and links are pinned.
//!
//! ```text
//! DIR/podmirror/                 writable by root only; locked by the one agent that changes anything in it (`lock`)
//!   v1/                          version 1 of the wire types: its maps, by name, and its links
//!     TAPS, COUNTERS, ...        every map of the eBPF object that is declared `pin_by_name`
//!     links/<ifindex>-<program>  TCX links; for a device in a pod, links/<ifindex>@<inode of its namespace>-<program>
//!     filters/<ifindex>@<inode>-<program>   the attachment marker of a filter in a pod, which has no pin: a symbolic
//!                                link to the file of its namespace
//!   v2/                          left by an agent of another version, older or newer
//! ```
//!
//! An agent opens the maps of its own version only, because the maps of another version have another layout. Before it
//! starts, it detaches the programs of the other versions and removes their directories (`hooks`).
//!
//! This module deals with paths and names only: `maps` reads the maps, `hooks` creates and removes the links.

use std::{
    collections::BTreeSet,
    fs::{self, DirBuilder},
    io::{self, ErrorKind},
    os::unix::fs::{DirBuilderExt as _, symlink},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use mirror_common::abi::ABI_VERSION;
use nix::{
    mount::{MsFlags, mount},
    sys::statfs::{BPF_FS_MAGIC, statfs},
};
use tracing::info;

use crate::model::{Device, IfIndex, NetnsId, Program};

/// The conventional mount point of the BPF file system.
const DEFAULT_BPFFS: &str = "/sys/fs/bpf";

/// The pins of one version below one `--bpffs` directory.
#[derive(Debug, Clone)]
pub struct Pins {
    root: PathBuf,
    version: u32,
}

impl Pins {
    /// The pins of this version below `bpffs`. Does no I/O.
    pub fn new(bpffs: &Path) -> Self {
        Self { root: bpffs.join("podmirror"), version: ABI_VERSION }
    }

    /// The directory of all versions.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The directory of the maps.
    pub fn maps(&self) -> PathBuf {
        self.root.join(format!("v{}", self.version))
    }

    /// The directory of the links.
    fn links(&self) -> PathBuf {
        self.maps().join("links")
    }

    /// The directory of the attachment markers.
    fn traces_directory(&self) -> PathBuf {
        self.maps().join("filters")
    }

    fn trace_path(&self, device: Device, program: Program) -> PathBuf {
        self.traces_directory().join(link_name(device, program))
    }

    /// The path for the link of a program at a device.
    pub fn link(&self, device: Device, program: Program) -> PathBuf {
        self.links().join(link_name(device, program))
    }

    /// Returns the hooks with a pinned link. The device may no longer exist, and another device may have its index now.
    ///
    /// # Errors
    ///
    /// The directory cannot be read.
    pub fn pinned_links(&self) -> io::Result<BTreeSet<(Device, Program)>> {
        self.hooks_in(&self.links())
    }

    /// Returns the pin of the link of a program at a device, if it exists.
    pub fn pinned_link(&self, device: Device, program: Program) -> Option<PathBuf> {
        Some(self.link(device, program)).filter(|path| self.is_roots() && path.exists())
    }

    /// Returns the hooks inside pods with an attachment marker.
    ///
    /// # Errors
    ///
    /// The directory cannot be read.
    pub fn traces(&self) -> io::Result<BTreeSet<(Device, Program)>> {
        self.hooks_in(&self.traces_directory())
    }

    /// Reads an attachment marker: the path of the pod's network namespace when the filter was attached. `None` if
    /// there is no marker.
    pub fn trace(&self, device: Device, program: Program) -> Option<PathBuf> {
        fs::read_link(self.trace_path(device, program)).ok().filter(|_| self.is_roots())
    }

    /// Creates the attachment marker of a filter that is about to be attached inside a pod, whose namespace file is at
    /// `netns`. The marker stays until the filter is detached.
    ///
    /// # Errors
    ///
    /// It cannot be created.
    pub fn leave_trace(&self, device: Device, program: Program, netns: &Path) -> io::Result<()> {
        let new = self.traces_directory().join("new");
        erase(&new)?;
        symlink(netns, &new)?;
        fs::rename(&new, self.trace_path(device, program))
    }

    /// Removes the attachment marker of a filter.
    ///
    /// # Errors
    ///
    /// It cannot be removed.
    pub fn erase_trace(&self, device: Device, program: Program) -> io::Result<()> {
        erase(&self.trace_path(device, program))
    }

    /// Returns the hooks whose names the files in a directory have.
    fn hooks_in(&self, directory: &Path) -> io::Result<BTreeSet<(Device, Program)>> {
        // A directory that another user has created does not prove that an agent ran.
        if !self.is_roots() {
            return Ok(BTreeSet::new());
        }
        Ok(names(directory)?.iter().filter_map(|name| parse_link(name)).collect())
    }

    /// Returns the pins of the other versions, oldest first.
    ///
    /// # Errors
    ///
    /// The directory of all versions cannot be read.
    pub fn other_versions(&self) -> io::Result<Vec<Self>> {
        if !self.is_roots() {
            return Ok(Vec::new());
        }
        let versions: BTreeSet<_> =
            names(&self.root)?.iter().filter_map(|name| parse_version(name)).collect();
        let others = versions.into_iter().filter(|version| *version != self.version);
        Ok(others.map(|version| Self { version, ..self.clone() }).collect())
    }

    /// Removes the directory of this version only, and with it the maps that nothing else uses.
    ///
    /// # Errors
    ///
    /// It cannot be removed.
    pub fn remove_version(&self) -> anyhow::Result<()> {
        remove_all(&self.maps())
    }

    /// Whether maps of this version are pinned.
    pub fn exist(&self) -> bool {
        self.is_roots() && self.maps().join("TAPS").exists()
    }

    /// Creates the directories. Mounts a BPF file system at the default path if there is none.
    pub(super) fn create(&self) -> anyhow::Result<()> {
        let bpffs = self.root.parent().unwrap_or(Path::new(DEFAULT_BPFFS));
        let created = fs::create_dir_all(bpffs);
        if !is_bpffs(bpffs) {
            if bpffs != Path::new(DEFAULT_BPFFS) {
                created.with_context(|| format!("cannot make {}", bpffs.display()))?;
                bail!(
                    "{0} is not in a BPF file system; mount one (mount -t bpf bpf {0}; for a pod of the chart, on its \
                     node: mount -t bpf bpf /sys/fs/bpf) or choose another --bpffs",
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
        for directory in [self.links(), self.traces_directory()] {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&directory)
                .with_context(|| format!("cannot make {} (are you root?)", directory.display()))?;
        }
        Ok(())
    }

    /// Removes the directories of all versions and all pins in them.
    ///
    /// # Errors
    ///
    /// A directory cannot be removed.
    pub fn remove(&self) -> anyhow::Result<()> {
        remove_all(&self.root)
    }
}

/// Removes a file, if it exists.
fn erase(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        erased => erased,
    }
}

fn remove_all(directory: &Path) -> anyhow::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed.with_context(|| format!("cannot remove {}", directory.display())),
    }
}

/// Returns the names in a directory; none if the directory does not exist.
fn names(directory: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

fn is_bpffs(path: &Path) -> bool {
    statfs(path).is_ok_and(|stat| stat.filesystem_type() == BPF_FS_MAGIC)
}

fn parse_version(name: &str) -> Option<u32> {
    let version = name.strip_prefix('v')?.parse().ok()?;
    // Rejects `v04`: the maps of version 4 are in `v4`.
    (name == format!("v{version}")).then_some(version)
}

fn link_name(device: Device, program: Program) -> String {
    let Device { netns, ifindex } = device;
    let program = program.name();
    if device.is_on_node() {
        format!("{ifindex}-{program}")
    } else {
        format!("{ifindex}@{}-{program}", netns.ino)
    }
}

fn parse_link(name: &str) -> Option<(Device, Program)> {
    let (device, program) = name.split_once('-')?;
    let program = Program::ALL.into_iter().find(|candidate| candidate.name() == program)?;
    let device = match device.split_once('@') {
        None => Device::on_node(IfIndex(device.parse().ok()?)),
        Some((ifindex, ino)) => {
            Device::in_pod(NetnsId { dev: 0, ino: ino.parse().ok()? }, IfIndex(ifindex.parse().ok()?))
        }
    };
    Some((device, program))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests panic")]

    use proptest::prelude::*;

    use super::*;

    /// Pins in a directory that is not in a BPF file system: only the names matter here.
    fn pins(versions: &[u32], links: &[&str]) -> (tempfile::TempDir, Pins) {
        let directory = tempfile::tempdir().unwrap();
        let pins = Pins::new(directory.path());
        for version in versions {
            let of_version = Pins { version: *version, ..pins.clone() };
            fs::create_dir_all(of_version.links()).unwrap();
            links.iter().for_each(|name| fs::write(of_version.links().join(name), "").unwrap());
        }
        (directory, pins)
    }

    #[test]
    fn each_version_has_its_own_links() {
        let (_directory, pins) =
            pins(&[ABI_VERSION, ABI_VERSION + 1], &["7-tap_ingress", "other", "x-deliver"]);
        fs::create_dir(pins.root().join("v01")).unwrap();
        let other = pins.other_versions().unwrap().remove(0);
        assert_eq!(other.maps(), pins.root().join(format!("v{}", ABI_VERSION + 1)));
        let (node, tap) = (Device::on_node(IfIndex(7)), Program::TapIngress);
        for pins in [&pins, &other] {
            assert_eq!(pins.pinned_links().unwrap(), [(node, tap)].into());
            assert_eq!(pins.pinned_link(node, tap), Some(pins.maps().join("links/7-tap_ingress")));
            assert_eq!(pins.pinned_link(node, Program::TapEgress), None);
        }
        for _ in 0..2 {
            other.remove_version().unwrap();
            assert!(pins.other_versions().unwrap().is_empty());
        }
        assert!(pins.maps().is_dir());
    }

    #[test]
    fn a_trace_says_where_the_namespace_is_and_is_there_once() {
        let (_directory, pins) = pins(&[ABI_VERSION], &[]);
        fs::create_dir(pins.traces_directory()).unwrap();
        let device = |ino| Device::in_pod(NetnsId { dev: 4, ino }, IfIndex(2));
        let hook = (device(7), Program::TapEgress);
        for path in ["/proc/1/ns/net", "/run/netns/web"] {
            pins.leave_trace(device(7), Program::TapEgress, Path::new(path)).unwrap();
            assert_eq!(pins.traces().unwrap(), [hook].into());
            assert_eq!(pins.trace(hook.0, hook.1), Some(path.into()));
        }
        pins.leave_trace(device(8), Program::TapIngress, Path::new("/db")).unwrap();
        for _ in 0..2 {
            pins.erase_trace(hook.0, hook.1).unwrap();
            assert_eq!(pins.trace(hook.0, hook.1), None);
            assert_eq!(pins.traces().unwrap().len(), 1);
        }
        assert!(pins.pinned_links().unwrap().is_empty());
    }

    #[test]
    fn without_a_directory_there_is_nothing() {
        let (_directory, pins) = pins(&[], &[]);
        assert!(pins.pinned_links().unwrap().is_empty());
        assert_eq!(pins.pinned_link(Device::on_node(IfIndex(1)), Program::Deliver), None);
        assert!(pins.other_versions().unwrap().is_empty());
    }

    proptest! {
        #[test]
        fn the_name_of_a_link_is_read_as_it_was_written(ifindex in 1..=u32::MAX, ino: u32, program in 0..4usize) {
            let netns = NetnsId { dev: 0, ino: u64::from(ino) };
            let (device, program) = (Device { netns, ifindex: IfIndex(ifindex) }, Program::ALL[program]);
            prop_assert_eq!(parse_link(&link_name(device, program)), Some((device, program)));
        }

        #[test]
        fn a_version_is_read_from_its_own_name_only(name in "v?[0-9]{0,3}") {
            let canonical = |version: &u32| format!("v{version}") == name;
            prop_assert!(parse_version(&name).as_ref().is_none_or(canonical));
        }
    }
}
