//! Compares the packets of a pod with the packets on the mirror interface.

use crate::{Capture, Frames, Lab, MIRROR, Netns, SOON, eventually};

/// Captures inside the pod and at the mirror interface that must be equal. They compare only IPv4, because a host can
/// send ARP and IPv6 at any time, also between the starts of two captures.
#[derive(Debug)]
pub struct Comparison {
    inside: Vec<Capture>,
    mirror: Capture,
}

impl Comparison {
    /// Starts captures at the pod's `eth0` and at the node's mirror interface.
    #[track_caller]
    pub fn of(pod: &Netns, lab: &Lab) -> Self {
        Self::of_nics(pod, &["eth0"], lab)
    }

    /// Starts captures at these NICs of the pod and at the node's mirror interface.
    #[track_caller]
    pub fn of_nics(pod: &Netns, nics: &[&str], lab: &Lab) -> Self {
        let inside = nics.iter().map(|nic| Capture::start(pod, nic)).collect();
        Self { inside, mirror: Capture::start(lab.node(), MIRROR) }
    }

    /// Waits until the mirror interface has shown exactly the packets that the pod has sent and received, each once and
    /// unchanged. Returns these packets.
    #[track_caller]
    pub fn is_equal(&self) -> Frames {
        eventually(SOON, || {
            let inside = self.inside.iter().fold(Frames::default(), |all, nic| all.and(&nic.frames()));
            let inside = inside.ipv4();
            self.mirror.frames().ipv4().same_as(&inside)?;
            Ok(inside)
        })
    }
}
