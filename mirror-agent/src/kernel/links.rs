//! The network devices of the node and of its pods.
//!
//! The interface to rtnetlink and `/proc`. This module reads devices, reports when they change, and creates or deletes
//! the devices of targets. It uses no tc hooks (`dataplane` does), except to drop what the agent's own devices receive,
//! and makes no decisions.

pub mod netlink;
pub mod packet_sockets;

mod addresses;
mod cache;
mod cgroup;
mod counters;
mod create;
mod decode;
mod drops;
mod exit;
mod inside;
mod list;
mod offloads;
mod procfs;
mod queue;
mod route;
mod sink;
mod socket;
#[cfg(test)]
mod tests;
mod text;

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    io,
    path::PathBuf,
};

use mirror_common::verdict::Direction;
use mirror_core::{coverage::Carried, destination::Destination};

pub use self::{
    drops::drops,
    list::{device, messages},
};
use crate::model::{IfIndex, LinkChange, LinkSnapshot, NetnsId, TargetName};

/// The network namespace of the calling thread.
pub fn netns_of_this_thread() -> io::Result<NetnsId> {
    crate::kernel::netns::Netns::current().map(|netns| netns.id())
}

/// A pod whose devices are to be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodNetns {
    /// `metadata.uid`.
    pub uid: String,
    /// The path of its network namespace; `None` to find it by the pod's processes.
    pub path: Option<PathBuf>,
    /// The names of the NICs that annotations name. In a namespace with too many devices, only these are read.
    pub nics: BTreeSet<String>,
}

/// A NIC of a pod whose counters are to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NicPlace {
    /// The id of the pod's namespace in the node's namespace.
    pub nsid: i32,
    /// Its index in the pod's namespace.
    pub ifindex: IfIndex,
    /// The node side of its veth, if the tap is there.
    pub end: Option<IfIndex>,
}

/// Whether an error is transient, so that the next attempt may succeed. Such an error must not remove a tap.
fn is_momentary(error: &io::Error) -> bool {
    use libc::{EAGAIN, EINTR, EMFILE, ENFILE, ENOBUFS, ENOMEM};
    matches!(error.raw_os_error(), Some(EMFILE | ENFILE | ENOMEM | ENOBUFS | EINTR | EAGAIN))
}

/// The interface to the network devices that the reconcile loop uses.
pub trait LinkTable {
    /// Sets the targets. Later snapshots include the offloads of their mirror interfaces, and the routes to the remote
    /// ends of their tunnels.
    fn follow(&mut self, targets: &BTreeMap<TargetName, Destination>);

    /// Reads the devices of the node and of the network namespaces of `pods`, and the routes to the tunnels' remote
    /// ends.
    ///
    /// A namespace that cannot be read is an error of that pod only. But if the reason is transient, the whole snapshot
    /// fails. A pod without a path and without a process is not in the snapshot.
    fn snapshot(&mut self, pods: &[PodNetns]) -> impl Future<Output = anyhow::Result<LinkSnapshot>>;

    /// Returns the UIDs of those pods that have processes.
    fn running(&mut self, uids: BTreeSet<String>) -> anyhow::Result<BTreeSet<String>>;

    /// Returns the counters of each of these NICs, by direction. `None` if the NIC cannot be read, or no longer exists.
    fn counters(
        &mut self,
        nics: &[NicPlace],
    ) -> impl Future<Output = anyhow::Result<Vec<Option<[Carried; Direction::COUNT]>>>>;

    /// Whether the counters of a pod's NIC include packets that other software passes to it around the node side of its
    /// veth (`bpf_redirect_peer`).
    fn shows_redirects(&mut self) -> bool;

    /// Carries out one change of a device.
    fn apply(&mut self, change: &LinkChange) -> impl Future<Output = anyhow::Result<()>>;

    /// Waits until a device, a tc filter or a namespace id of the node has changed since the last call. Can return
    /// without a change, but misses none. Cancel safe.
    fn changed(&mut self) -> impl Future<Output = ()>;
}
