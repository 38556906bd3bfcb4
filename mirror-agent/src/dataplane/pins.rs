//! The directory in the BPF file system where maps and links are pinned.
//!
//! ```text
//! DIR/podmirror/                 root's alone, and locked by the one agent that changes anything below it (`lock`)
//!   v4/                          version 4 of the wire types: its maps, by name, and its links
//!     TAPS, COUNTERS, ...        every map of the eBPF object that is declared `pin_by_name`
//!     links/<ifindex>-<program>  TCX links; of a device in a pod, links/<ifindex>@<inode of its namespace>-<program>
//!     filters/<ifindex>@<inode>-<program>   a trace of a filter in a pod, which has no pin: a symbolic link to the file
//!                                of its namespace
//!   v3/                          left by an agent of another version, older or newer
//! ```
//!
//! An agent opens the maps of its own version only, because the maps of another version have another layout. Links have
//! no layout: `hooks` takes over the links of every version, and the dataplane removes a version's directory when
//! nothing runs with its maps any more.
//!
//! Paths, names and the lock. This module attaches nothing and reads no map: `maps` reads the maps, `hooks` deals with
//! the links. Called by both, and by the commands.

use std::{
    cmp::Reverse,
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

/// Where a BPF file system is mounted by convention.
const DEFAULT_BPFFS: &str = "/sys/fs/bpf";

/// The pins below one `--bpffs` directory.
#[derive(Debug, Clone)]
pub struct Pins {
    root: PathBuf,
}

/// The pin of a TCX link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkPin {
    /// Version of the agent that made the link, or took it over last.
    pub version: u32,
    /// The device that the link was made for. The device may be gone, and another device may have the index now.
    pub device: Device,
    /// The program that runs there, by its name. A program of another version has that version's meaning.
    pub program: Program,
    /// Where it is pinned.
    pub path: PathBuf,
}

impl LinkPin {
    /// Whether this version of the agent made it or took it over.
    pub fn is_of_this_version(&self) -> bool {
        self.version == ABI_VERSION
    }
}

/// The trace of a filter inside a pod: it was left before the filter was attached, and goes after it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// The device that the filter was attached to.
    pub device: Device,
    /// The program that runs there, by its name.
    pub program: Program,
    /// Where the network namespace of the device was then.
    pub netns: PathBuf,
    /// The trace itself.
    path: PathBuf,
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
        self.maps_of(ABI_VERSION)
    }

    /// Directory of the maps of any version.
    pub fn maps_of(&self, version: u32) -> PathBuf {
        self.root.join(format!("v{version}"))
    }

    /// Directory of the links of this version.
    fn links(&self) -> PathBuf {
        self.links_of(ABI_VERSION)
    }

    /// Directory of the links of any version.
    fn links_of(&self, version: u32) -> PathBuf {
        self.maps_of(version).join("links")
    }

    /// Directory of the traces of any version.
    fn traces_of(&self, version: u32) -> PathBuf {
        self.maps_of(version).join("filters")
    }

    /// Where this version pins the link of a program.
    pub fn link(&self, device: Device, program: Program) -> PathBuf {
        self.links().join(link_name(device, program))
    }

    /// The pinned links of all versions.
    ///
    /// # Errors
    ///
    /// A directory cannot be read.
    pub fn pinned_links(&self) -> io::Result<Vec<LinkPin>> {
        let mut pins = Vec::new();
        for version in self.versions()? {
            for name in names(&self.links_of(version))? {
                if let Some((device, program)) = parse_link(&name) {
                    let path = self.links_of(version).join(name);
                    pins.push(LinkPin { version, device, program, path });
                }
            }
        }
        Ok(pins)
    }

    /// The pinned links of one program at one device: the link of this version first, then those of others, newest
    /// first.
    ///
    /// # Errors
    ///
    /// The directory cannot be read.
    pub fn links_at(&self, device: Device, program: Program) -> io::Result<Vec<LinkPin>> {
        let pin = |version| {
            let path = self.links_of(version).join(link_name(device, program));
            LinkPin { version, device, program, path }
        };
        let mut pins: Vec<_> =
            self.versions()?.into_iter().map(pin).filter(|pin| pin.path.exists()).collect();
        pins.sort_by_key(|pin| (!pin.is_of_this_version(), Reverse(pin.version)));
        Ok(pins)
    }

    /// The traces of filters inside pods, of all versions.
    ///
    /// # Errors
    ///
    /// A directory cannot be read.
    pub fn traces(&self) -> io::Result<Vec<Trace>> {
        let mut traces = Vec::new();
        for directory in self.versions()?.into_iter().map(|version| self.traces_of(version)) {
            for name in names(&directory)? {
                if let Some((device, program)) = parse_link(&name) {
                    let path = directory.join(name);
                    let netns = fs::read_link(&path).unwrap_or_default();
                    traces.push(Trace { device, program, netns, path });
                }
            }
        }
        Ok(traces)
    }

    /// The traces of one filter.
    ///
    /// # Errors
    ///
    /// A directory cannot be read.
    pub fn traces_at(&self, device: Device, program: Program) -> io::Result<Vec<Trace>> {
        let is_there = |trace: &Trace| (trace.device, trace.program) == (device, program);
        Ok(self.traces()?.into_iter().filter(is_there).collect())
    }

    /// Leaves the trace of a filter that is to be attached inside a pod, whose namespace file is at `netns`. The traces that
    /// other versions have left of it go.
    ///
    /// # Errors
    ///
    /// It cannot be made.
    pub fn leave_trace(&self, device: Device, program: Program, netns: &Path) -> io::Result<()> {
        let path = self.traces_of(ABI_VERSION).join(link_name(device, program));
        let new = self.traces_of(ABI_VERSION).join("new");
        erase(&new)?;
        symlink(netns, &new)?;
        fs::rename(&new, &path)?;
        let others = self.traces_at(device, program)?.into_iter().filter(|trace| trace.path != path);
        others.into_iter().try_for_each(|trace| erase(&trace.path))
    }

    /// Removes the traces of a filter.
    ///
    /// # Errors
    ///
    /// One cannot be removed.
    pub fn erase_traces(&self, device: Device, program: Program) -> io::Result<()> {
        self.traces_at(device, program)?.iter().try_for_each(|trace| erase(&trace.path))
    }

    /// The versions of which there is a directory.
    fn versions(&self) -> io::Result<Vec<u32>> {
        // A directory that another user has made is not evidence of an agent.
        if !self.is_roots() {
            return Ok(Vec::new());
        }
        Ok(names(&self.root)?.iter().filter_map(|name| parse_version(name)).collect())
    }

    /// The other versions of which there is a directory.
    ///
    /// # Errors
    ///
    /// The directory of all versions cannot be read.
    pub fn other_versions(&self) -> io::Result<BTreeSet<u32>> {
        Ok(self.versions()?.into_iter().filter(|version| *version != ABI_VERSION).collect())
    }

    /// Removes the directory of a version, and with it the maps that nothing else uses.
    ///
    /// # Errors
    ///
    /// It cannot be removed.
    pub fn remove_version(&self, version: u32) -> anyhow::Result<()> {
        remove_all(&self.maps_of(version))
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
        for directory in [self.links(), self.traces_of(ABI_VERSION)] {
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

/// Removes a file, if it is there.
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

/// The names in a directory; none where there is no such directory.
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
    // Not `v04`, which is not where the maps of version 4 are.
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

    /// Pins below a directory that is no BPF file system: names are all that counts here.
    fn pins(versions: &[u32], links: &[&str]) -> (tempfile::TempDir, Pins) {
        let directory = tempfile::tempdir().unwrap();
        let pins = Pins::new(directory.path());
        for version in versions {
            fs::create_dir_all(pins.links_of(*version)).unwrap();
            links.iter().for_each(|name| fs::write(pins.links_of(*version).join(name), "").unwrap());
        }
        (directory, pins)
    }

    #[test]
    fn links_of_all_versions_are_found_and_those_of_this_one_come_first() {
        let versions = [ABI_VERSION - 1, ABI_VERSION, ABI_VERSION + 1];
        let (_directory, pins) = pins(&versions, &["7-tap_ingress", "7-deliver", "other", "x-tap_egress"]);
        fs::create_dir(pins.root().join("v01")).unwrap();
        let at = |program| -> Vec<u32> {
            pins.links_at(Device::on_node(IfIndex(7)), program)
                .unwrap()
                .iter()
                .map(|pin| pin.version)
                .collect()
        };
        assert_eq!(at(Program::TapIngress), [ABI_VERSION, ABI_VERSION + 1, ABI_VERSION - 1]);
        assert_eq!(at(Program::TapEgress), Vec::<u32>::new());
        let all = pins.pinned_links().unwrap();
        assert_eq!(all.len(), 6);
        assert!(
            all.iter()
                .all(|pin| pin.device == Device::on_node(IfIndex(7)) && pin.program != Program::TapEgress)
        );
        assert_eq!(pins.other_versions().unwrap(), [versions[0], versions[2]].into());
    }

    #[test]
    fn a_trace_says_where_the_namespace_is_and_is_there_once() {
        let (_directory, pins) = pins(&[ABI_VERSION, ABI_VERSION - 1], &[]);
        for version in [ABI_VERSION, ABI_VERSION - 1] {
            fs::create_dir(pins.traces_of(version)).unwrap();
        }
        let device = |ino| Device::in_pod(NetnsId { dev: 4, ino }, IfIndex(2));
        let old = pins.traces_of(ABI_VERSION - 1).join(link_name(device(7), Program::TapEgress));
        symlink("/old", old).unwrap();
        let all = || {
            let of = |trace: Trace| (trace.device, trace.program, trace.netns.to_str().unwrap().to_owned());
            let mut all: Vec<_> = pins.traces().unwrap().into_iter().map(of).collect();
            all.sort();
            all
        };
        assert_eq!(all(), [(device(7), Program::TapEgress, "/old".to_owned())]);
        for path in ["/proc/1/ns/net", "/run/netns/web"] {
            pins.leave_trace(device(7), Program::TapEgress, Path::new(path)).unwrap();
            assert_eq!(all(), [(device(7), Program::TapEgress, path.to_owned())]);
        }
        pins.leave_trace(device(8), Program::TapIngress, Path::new("/db")).unwrap();
        for _ in 0..2 {
            pins.erase_traces(device(7), Program::TapEgress).unwrap();
            assert_eq!(all(), [(device(8), Program::TapIngress, "/db".to_owned())]);
        }
        assert!(pins.pinned_links().unwrap().is_empty());
    }

    #[test]
    fn a_version_can_be_removed_alone() {
        let (_directory, pins) = pins(&[ABI_VERSION, ABI_VERSION + 1], &[]);
        assert_eq!(pins.other_versions().unwrap(), [ABI_VERSION + 1].into());
        pins.remove_version(ABI_VERSION + 1).unwrap();
        pins.remove_version(ABI_VERSION + 1).unwrap();
        assert_eq!(pins.other_versions().unwrap(), BTreeSet::new());
        assert!(pins.maps().is_dir());
    }

    #[test]
    fn without_a_directory_there_is_nothing() {
        let (_directory, pins) = pins(&[], &[]);
        assert!(pins.pinned_links().unwrap().is_empty());
        assert!(pins.links_at(Device::on_node(IfIndex(1)), Program::Deliver).unwrap().is_empty());
        assert_eq!(pins.other_versions().unwrap(), BTreeSet::new());
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
