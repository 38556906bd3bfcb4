//! The node of one test: a network namespace, a directory for BPF objects, and files.

use std::{
    cell::Cell,
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process,
    sync::{
        Once,
        atomic::{AtomicU32, Ordering},
    },
};

use nix::mount::{MsFlags, mount};
use tempfile::TempDir;

use crate::{
    Netns, PodNs, container,
    netns::{self, DIRECTORY as NETNS_DIRECTORY},
    pod::Topology,
};

const BPFFS: &str = "/sys/fs/bpf";

/// A node: a network namespace, a directory of the BPF file system, and files. Each test has a node of its own, which
/// is removed on drop, or uses the node of a cluster ([`Lab::at`]).
///
/// Declare it before everything that runs on it, so that it is dropped last.
#[derive(Debug)]
pub struct Lab {
    node: Netns,
    bpffs: PathBuf,
    files: TempDir,
    pods: Cell<u8>,
    is_ours: bool,
}

impl Lab {
    /// Uses the node of a cluster: its network namespace and its BPF file system. Removes nothing of it on drop.
    #[track_caller]
    pub fn at(netns: &Path, bpffs: &Path) -> Self {
        let files = tempfile::tempdir().unwrap();
        Self { node: Netns::at(netns), bpffs: bpffs.to_owned(), files, pods: Cell::new(0), is_ours: false }
    }

    /// Creates a node. `story` is part of the names in `/run/netns`, so that a person can find the node.
    #[track_caller]
    pub fn new(story: &str) -> Self {
        static LABS: AtomicU32 = AtomicU32::new(0);
        static SWEPT: Once = Once::new();
        SWEPT.call_once(sweep);
        let name = format!("pm-{}-{}-{story}", process::id(), LABS.fetch_add(1, Ordering::Relaxed));
        let node = Netns::new(&name);
        node.keep_quiet();
        let bpffs = Path::new(BPFFS).join(&name);
        if fs::create_dir(&bpffs).is_err() {
            mount(Some("bpf"), BPFFS, Some("bpf"), MsFlags::empty(), None::<&str>)
                .expect("a BPF file system can be mounted on /sys/fs/bpf");
            fs::create_dir(&bpffs).unwrap();
        }
        Self { node, bpffs, files: tempfile::tempdir().unwrap(), pods: Cell::new(0), is_ours: true }
    }

    /// The node's network namespace.
    pub fn node(&self) -> &Netns {
        &self.node
    }

    /// The directory for `--bpffs`.
    pub fn bpffs(&self) -> &Path {
        &self.bpffs
    }

    /// A directory for the test's files.
    pub fn files(&self) -> &Path {
        self.files.path()
    }

    /// Creates a bridge without an address.
    #[track_caller]
    pub fn bridge(&self, name: &str) {
        self.node.ip(&format!("link add {name} type bridge mcast_snooping 0"));
        self.node.sysctl(&format!("ipv6/conf/{name}/disable_ipv6"), "1");
        self.node.ip(&format!("link set {name} up"));
    }

    /// Creates a pod on a bridge, with IPv4 and IPv6.
    #[track_caller]
    pub fn pod(&self, name: &str, bridge: &str) -> PodNs {
        PodNs::new(self, name, self.next_number(), &Topology::Bridge(bridge))
    }

    /// Creates a pod with a netkit device on a bridge of the node. See [`has_kind`](crate::has_kind).
    #[track_caller]
    pub fn netkit_pod(&self, name: &str, bridge: &str) -> PodNs {
        PodNs::new(self, name, self.next_number(), &Topology::Netkit(bridge))
    }

    /// Creates a pod with a netkit device without Ethernet addresses, to which the node has a route.
    #[track_caller]
    pub fn routed_netkit_pod(&self, name: &str) -> PodNs {
        PodNs::new(self, name, self.next_number(), &Topology::RoutedNetkit)
    }

    /// Creates a pod to which the node has a route, with proxy ARP as Calico uses it, and with IPv4 and IPv6.
    #[track_caller]
    pub fn routed_pod(&self, name: &str) -> PodNs {
        PodNs::new(self, name, self.next_number(), &Topology::Routed)
    }

    /// Creates a pod whose NIC is of this kind (for example `macvlan mode bridge`), over a device of the node.
    #[track_caller]
    pub fn pod_over(&self, name: &str, kind: &str, parent: &str) -> PodNs {
        PodNs::new(self, name, self.next_number(), &Topology::Over(kind, parent))
    }

    /// The same in an existing namespace.
    #[track_caller]
    pub fn pod_over_in(&self, name: &str, netns: Netns, kind: &str, parent: &str) -> PodNs {
        PodNs::of_netns(self, name, self.next_number(), netns, &Topology::Over(kind, parent))
    }

    /// Creates a pod whose NIC leads to a bridge in another namespace and bypasses the node.
    #[track_caller]
    pub fn pod_elsewhere(&self, name: &str, other: &Netns, bridge: &str) -> PodNs {
        PodNs::new(self, name, self.next_number(), &Topology::Elsewhere(other, bridge))
    }

    pub(crate) fn next_number(&self) -> u8 {
        self.pods.set(self.pods.get() + 1);
        self.pods.get()
    }

    /// Names of the node's devices, sorted.
    pub fn devices(&self) -> Vec<String> {
        self.node.devices()
    }

    /// ifindex of a device of the node.
    #[track_caller]
    pub fn ifindex(&self, device: &str) -> u32 {
        self.node.enter(|| nix::net::if_::if_nametoindex(device)).unwrap()
    }

    /// All tc objects of the node, and every device with its settings, one per line, to compare the state before and
    /// after. Clsact qdiscs are excluded: the agent may leave them, because other programs could use them.
    pub fn network_state(&self) -> Vec<String> {
        let qdiscs = self.node.tc("qdisc show");
        let mut state: Vec<String> =
            qdiscs.lines().filter(|line| !line.contains("clsact")).map(str::to_owned).collect();
        for device in self.devices() {
            for hook in ["ingress", "egress"] {
                let filters = self.node.try_run(&format!("tc filter show dev {device} {hook}"));
                state.push(format!("{device} {hook}: {}", String::from_utf8_lossy(&filters.stdout)));
            }
        }
        for words in ["-o link show", "-o address show", "route show table all"] {
            state.extend(self.node.ip(words).lines().map(without_carrier));
        }
        state
    }

    /// Checks that the network is the same as in an earlier [`Lab::network_state`].
    #[track_caller]
    pub fn network_is_as(&self, before: &[String]) {
        let now = self.network_state();
        let less = |lines: &[String], other: &[String]| -> Vec<String> {
            lines.iter().filter(|line| !other.contains(line)).cloned().collect()
        };
        let (gone, new) = (less(before, &now), less(&now, before));
        assert!(gone.is_empty() && new.is_empty(), "gone: {gone:#?}\nnew: {new:#?}");
    }

    /// The pins below the directory for `--bpffs`. An agent may remove a directory while this function reads it.
    pub fn pins(&self) -> Vec<PathBuf> {
        fn walk(directory: &Path, pins: &mut Vec<PathBuf>) -> io::Result<()> {
            for entry in fs::read_dir(directory)? {
                let path = entry?.path();
                if !path.is_dir() {
                    pins.push(path);
                } else if let Err(error) = walk(&path, pins)
                    && error.kind() != io::ErrorKind::NotFound
                {
                    return Err(error);
                }
            }
            Ok(())
        }
        let mut pins = Vec::new();
        walk(&self.bpffs, &mut pins).unwrap();
        pins.sort();
        pins
    }
}

/// A line of `ip` without the fields that the kernel sets itself, up to a second later (linkwatch).
fn without_carrier(line: &str) -> String {
    let line = line.replace(",LOWER_UP", "").replace("NO-CARRIER,", "");
    ["UNKNOWN", "UP", "DOWN", "LOWERLAYERDOWN", "DORMANT"]
        .iter()
        .fold(line, |line, state| line.replace(&format!(" state {state} "), " "))
}

/// Removes the namespaces, BPF directories and cgroups of test processes that were killed.
fn sweep() {
    let cgroups = container::root();
    for directory in [Path::new(NETNS_DIRECTORY), Path::new(BPFFS), &cgroups] {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let (name, path) = (entry.file_name(), entry.path());
            let pid = name
                .to_str()
                .and_then(|name| name.strip_prefix("pm-")?.split('-').next()?.parse::<u32>().ok());
            if pid.is_none_or(|pid| Path::new("/proc").join(pid.to_string()).exists()) {
                continue;
            }
            // Another test process may be removing the same.
            let _ = match path.is_dir() {
                true if directory == cgroups => container::remove(&path),
                true => fs::remove_dir_all(path),
                false => netns::remove(&path),
            };
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if !self.is_ours {
            return;
        }
        if let Err(error) = fs::remove_dir_all(&self.bpffs) {
            eprintln!("cannot remove {}: {error}", self.bpffs.display());
        }
        // Removes the leftovers of a killed agent; a stopped agent leaves nothing.
        let netns = fs::metadata(self.node.path()).map(|netns| netns.ino());
        for kind in ["lock", "sock"] {
            let _ = netns.as_ref().map(|netns| fs::remove_file(format!("/run/podmirror/{netns}.{kind}")));
        }
    }
}
