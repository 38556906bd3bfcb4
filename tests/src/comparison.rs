//! What a pod says and hears, and what the mirror interface shows meanwhile.

use crate::{Capture, Frames, Lab, MIRROR, Netns, SOON, eventually};

/// Two captures that must be equal. Of IPv4 alone: ARP and IPv6 say something whenever they want to, also between the
/// beginnings of two captures.
#[derive(Debug)]
pub struct Comparison {
    inside: Capture,
    mirror: Capture,
}

impl Comparison {
    /// Begins to capture at the pod's `eth0` and at the node's mirror interface.
    #[track_caller]
    pub fn of(pod: &Netns, lab: &Lab) -> Self {
        Self { inside: Capture::start(pod, "eth0"), mirror: Capture::start(lab.node(), MIRROR) }
    }

    /// Waits until the mirror interface has shown what the pod has sent and received, each packet once and as it was,
    /// and nothing else; returns those packets.
    #[track_caller]
    pub fn is_equal(&self) -> Frames {
        eventually(SOON, || {
            let inside = self.inside.frames().ipv4();
            self.mirror.frames().ipv4().same_as(&inside)?;
            Ok(inside)
        })
    }
}
