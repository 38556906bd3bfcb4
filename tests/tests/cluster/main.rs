//! Stories on a cluster: the agent as users install it, real pods, and a control plane that fails.
//!
//! `cargo xtask test --level cluster` runs the stories one after the other. With the CNI plugin `ptp`, it skips stories
//! that do not depend on the wiring of pods or on kube-proxy's mode. On an existing cluster (`--kubeconfig`), it skips
//! the module `built`.
#![expect(clippy::unwrap_used, clippy::print_stderr, reason = "tests")]

use mirror_tests::{Cluster, Comparison, KubePod, Pinging};

mod built;
mod events;
mod installation;
mod lives;
mod many;
mod mirroring;
mod packets;
mod plugin;
mod recorder;
mod services;
mod targets;

/// Pings from one pod to another while `outage` runs. Each ping and each answer must be on the mirror interface once.
/// Returns the number of these packets.
#[track_caller]
fn nothing_is_lost_during(cluster: &Cluster, [from, to]: [&KubePod; 2], outage: impl FnOnce()) -> u64 {
    let comparison = Comparison::of(&from.netns, cluster.host());
    let pinging = Pinging::start(&from.netns, to.ip);
    outage();
    let sent = pinging.stop();
    let frames = comparison.is_equal();
    // An agent may still connect to a server's pod that is gone, at an address that the pod has now.
    let pings = frames.only(|frame| frame[23] == 1);
    assert_eq!(pings.len(), 2 * sent, "{frames}");
    frames.len() as u64
}
