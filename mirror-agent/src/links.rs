//! The network devices of the node and of its pods.
//!
//! The edge to rtnetlink and `/proc`. This module reads devices, reports when they change, and makes or deletes the
//! devices of targets. It touches no tc hook (`dataplane` does) and decides nothing.

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

pub use self::drops::drops;
use crate::model::{IfIndex, LinkChange, LinkSnapshot, NetnsId, TargetName};

/// The network namespace of the calling thread.
pub fn netns_of_this_thread() -> io::Result<NetnsId> {
    crate::netns::Netns::current().map(|netns| netns.id())
}

/// A pod whose devices are asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodNetns {
    /// `metadata.uid`.
    pub uid: String,
    /// Path of its network namespace; `None`: it is found by the pod's processes.
    pub path: Option<PathBuf>,
    /// The names of the NICs that annotations name. The others are not looked at in a namespace with too many devices.
    pub nics: BTreeSet<String>,
}

/// A NIC of a pod whose counters are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NicPlace {
    /// The id that the node's namespace has for the pod's.
    pub nsid: i32,
    /// Its index in the pod's namespace.
    pub ifindex: IfIndex,
    /// The node's end of its veth, if the tap is there.
    pub end: Option<IfIndex>,
}

/// Whether an error is momentary, so that the next attempt may succeed. No tap may be lost for such an error.
fn is_momentary(error: &io::Error) -> bool {
    use libc::{EAGAIN, EINTR, EMFILE, ENFILE, ENOBUFS, ENOMEM};
    matches!(error.raw_os_error(), Some(EMFILE | ENFILE | ENOMEM | ENOBUFS | EINTR | EAGAIN))
}

/// The devices, as the reconcile loop needs them.
pub trait LinkTable {
    /// From now on, snapshots have the offloads of the mirror interfaces of these targets, and the routes to the other
    /// ends of their tunnels.
    fn follow(&mut self, targets: &BTreeMap<TargetName, Destination>);

    /// Reads the devices of the node, and of the network namespaces of `pods`, and the routes to the tunnels' ends.
    ///
    /// A namespace that cannot be read is an error of that pod alone. If the reason is momentary, there is no snapshot
    /// instead. A pod without a path and without a process is not in the snapshot.
    fn snapshot(&mut self, pods: &[PodNetns]) -> impl Future<Output = anyhow::Result<LinkSnapshot>>;

    /// Those of these pods that have processes, by UID.
    fn running(&mut self, uids: BTreeSet<String>) -> anyhow::Result<BTreeSet<String>>;

    /// What each of these NICs has carried, by direction. `None`: the NIC cannot be read, or is not there any more.
    fn counters(
        &mut self,
        nics: &[NicPlace],
    ) -> impl Future<Output = anyhow::Result<Vec<Option<[Carried; Direction::COUNT]>>>>;

    /// Whether the counters of a pod's NIC have the packets that other software hands to it behind the node's end of its
    /// veth (`bpf_redirect_peer`).
    fn shows_redirects(&mut self) -> bool;

    /// Carries out one change of a device.
    fn apply(&mut self, change: &LinkChange) -> impl Future<Output = anyhow::Result<()>>;

    /// Returns when a device, a tc filter or a namespace id of the node has changed since the last call. May return too
    /// often, never too seldom. Cancel safe.
    fn changed(&mut self) -> impl Future<Output = ()>;
}
