//! Stories of a cluster: the agent as people install it, real pods, and a control plane that fails.
//!
//! `cargo xtask test --level cluster` runs them, one after the other. With the CNI plugin `ptp` it leaves out what does
//! not depend on how pods are wired.
#![expect(clippy::unwrap_used, reason = "tests")]

use mirror_tests::{Capture, Frames, KubePod, Lab, SOON, eventually};

mod events;
mod installation;
mod lives;
mod many;
mod mirroring;
mod outages;

/// The mirror interface of the manifests.
const MIRROR: &str = "mirror0";
/// The node's address.
const NODE: &str = "10.245.0.1";

/// What a pod sends and receives, and what the mirror interface shows meanwhile.
struct Comparison {
    inside: Capture,
    mirror: Capture,
}

impl Comparison {
    fn of(pod: &KubePod, host: &Lab) -> Self {
        Self { inside: Capture::start(&pod.netns, "eth0"), mirror: Capture::start(host.node(), MIRROR) }
    }

    /// Waits until the mirror interface has shown what the pod has sent and received, each packet once and as it was,
    /// and nothing else; returns those packets.
    #[track_caller]
    fn is_equal(&self) -> Frames {
        eventually(SOON, || {
            let inside = ipv4(&self.inside.frames());
            ipv4(&self.mirror.frames()).same_as(&inside)?;
            Ok(inside)
        })
    }
}

/// Those that are IPv4. ARP and IPv6 say something whenever they want to, also between the beginnings of two captures.
fn ipv4(frames: &Frames) -> Frames {
    frames.only(|frame| frame[12..14] == [0x08, 0x00])
}
