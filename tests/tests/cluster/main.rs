//! Stories of a cluster: the agent as people install it, real pods, and a control plane that fails.
//!
//! `cargo xtask test --level cluster` runs them, one after the other. With the CNI plugin `ptp` it leaves out what does
//! not depend on how pods are wired; with `--kubeconfig`, on a cluster that exists, it leaves out the module `built`.
#![expect(clippy::unwrap_used, reason = "tests")]

use mirror_tests::{Cluster, Comparison, KubePod, Pinging};

mod built;
mod events;
mod installation;
mod lives;
mod many;
mod mirroring;

/// Pings from one pod to another all the while that `outage` takes. Each ping and each answer must be on the mirror
/// interface, once; how many they are.
#[track_caller]
fn nothing_is_lost_during(cluster: &Cluster, [from, to]: [&KubePod; 2], outage: impl FnOnce()) -> u64 {
    let comparison = Comparison::of(&from.netns, cluster.host());
    let pinging = Pinging::start(&from.netns, to.ip);
    outage();
    let sent = pinging.stop();
    let frames = comparison.is_equal();
    assert_eq!(frames.len(), 2 * sent, "{frames}");
    frames.len() as u64
}
