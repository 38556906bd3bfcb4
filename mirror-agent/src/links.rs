//! The network devices of the node and of its pods.
//!
//! The edge to rtnetlink and `/proc`. This module reads devices, reports when they change, and makes or deletes the
//! devices of targets. It touches no tc hook (`dataplane` does) and decides nothing.

pub mod netlink;

mod cache;
mod cgroup;
mod create;
mod decode;
mod inside;
mod netns;
mod offloads;
mod procfs;
mod queue;
mod route;
mod sink;
mod socket;
#[cfg(test)]
mod tests;

use std::{future::Future, io, path::PathBuf};

use crate::model::{LinkChange, LinkSnapshot, NetnsId};

/// The network namespace of the calling thread.
pub fn netns_of_this_thread() -> io::Result<NetnsId> {
    netns::Netns::current().map(|netns| netns.id())
}

/// A pod whose devices are asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodNetns {
    /// `metadata.uid`.
    pub uid: String,
    /// Path of its network namespace; `None`: it is found by the pod's processes.
    pub path: Option<PathBuf>,
}

/// Whether an error is momentary, so that the next attempt may succeed. No tap may be lost for such an error.
fn is_momentary(error: &io::Error) -> bool {
    use libc::{EAGAIN, EINTR, EMFILE, ENFILE, ENOBUFS, ENOMEM};
    matches!(error.raw_os_error(), Some(EMFILE | ENFILE | ENOMEM | ENOBUFS | EINTR | EAGAIN))
}

/// The devices, as the reconcile loop needs them.
pub trait LinkTable {
    /// Reads the devices of the node, and of the network namespaces of `pods`, and the routes to the tunnels' ends.
    ///
    /// A namespace that cannot be read is an error of that pod alone. If the reason is momentary, there is no snapshot
    /// instead. A pod without a path and without a process is not in the snapshot.
    fn snapshot(&mut self, pods: &[PodNetns]) -> impl Future<Output = anyhow::Result<LinkSnapshot>>;

    /// Carries out one change of the mirror interface.
    fn apply(&mut self, change: &LinkChange) -> impl Future<Output = anyhow::Result<()>>;

    /// Returns when a device, a tc filter or a namespace id of the node has changed since the last call. May return too
    /// often, never too seldom. Cancel safe.
    fn changed(&mut self) -> impl Future<Output = ()>;
}
