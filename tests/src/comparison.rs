//! Compares the packets of a pod with the packets on the mirror interface.

use crate::{Capture, Frames, Lab, MIRROR, Netns, SOON, eventually};

/// Two captures that must be equal. They compare IPv4 alone, because a host can send ARP and IPv6 at any time, also
/// between the start of the first and of the second capture.
#[derive(Debug)]
pub struct Comparison {
    inside: Capture,
    mirror: Capture,
}

impl Comparison {
    /// Starts captures at the pod's `eth0` and at the node's mirror interface.
    #[track_caller]
    pub fn of(pod: &Netns, lab: &Lab) -> Self {
        Self { inside: Capture::start(pod, "eth0"), mirror: Capture::start(lab.node(), MIRROR) }
    }

    /// Waits until the mirror interface has shown exactly the packets that the pod has sent and received, each once and
    /// unchanged. Returns these packets.
    #[track_caller]
    pub fn is_equal(&self) -> Frames {
        eventually(SOON, || {
            let inside = self.inside.frames().ipv4();
            self.mirror.frames().ipv4().same_as(&inside)?;
            Ok(inside)
        })
    }
}
