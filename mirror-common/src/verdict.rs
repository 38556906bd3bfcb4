//! The directions of a packet and the one named reason with which it leaves a session.

/// A tc hook of a device, as the kernel names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Hook {
    /// The device received the packet.
    Ingress,
    /// The device is about to send the packet.
    Egress,
}

impl Hook {
    /// Both hooks of a tap.
    pub const ALL: [Self; 2] = [Self::Ingress, Self::Egress];
}

/// Direction of a packet, seen from the pod (or, without a pod, from the tapped interface itself).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Direction {
    /// The packet reaches the pod.
    Ingress = 0,
    /// The packet leaves the pod.
    Egress = 1,
}

impl Direction {
    /// How many there are: the first dimension of a session's counters.
    pub const COUNT: usize = 2;
    /// Every direction, at the index that it has in a session's counters.
    pub const ALL: [Self; Self::COUNT] = [Self::Ingress, Self::Egress];

    /// The direction of a packet at `hook`. At the host end of a veth the hooks are the other way round: what the
    /// host end receives has left the pod. This is the only place that knows.
    #[inline(always)]
    pub const fn at(hook: Hook, at_peer: bool) -> Self {
        match (hook, at_peer) {
            (Hook::Ingress, true) | (Hook::Egress, false) => Self::Egress,
            (Hook::Egress, true) | (Hook::Ingress, false) => Self::Ingress,
        }
    }

    /// The bit of this direction in [`Session::directions`](crate::abi::Session::directions).
    #[inline(always)]
    pub const fn bit(self) -> u32 {
        1 << self as u32
    }

    /// The word for status, metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        }
    }
}

/// The one reason with which a packet leaves a session. Each packet that a tap sees is counted once a session,
/// under exactly one of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Verdict {
    /// A copy was handed to the target.
    Copied = 0,
    /// The session does not want this direction.
    OtherDirection = 1,
    /// Another tap of this node has copied the packet to the same target already.
    Duplicate = 2,
    /// The packet is on the mirror interface itself: a copy of it would come back here.
    Loop = 3,
    /// The mirror interface is gone or down.
    TargetDown = 4,
    /// The mirror interface did not take it: its queue is full, or the packet is too long for its MTU.
    Congested = 5,
    /// The kernel could not make the copy (no memory, for example).
    Failed = 6,
    /// The session's filter does not match the packet.
    Filtered = 7,
    /// The packet's flow is not in the sample.
    SampledOut = 8,
    /// The session's rate, or the node's, is used up for now.
    Limited = 9,
    /// The session's budget of time, packets or bytes is used up.
    Ended = 10,
}

impl Verdict {
    /// How many counters a direction has: a power of two, so that an index can be proven in bounds by a mask.
    pub const SLOTS: usize = 16;
    /// Every verdict, at the index that it has in a session's counters.
    pub const ALL: [Self; 11] = [
        Self::Copied,
        Self::OtherDirection,
        Self::Duplicate,
        Self::Loop,
        Self::TargetDown,
        Self::Congested,
        Self::Failed,
        Self::Filtered,
        Self::SampledOut,
        Self::Limited,
        Self::Ended,
    ];

    /// The word for status, metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Copied => "copied",
            Self::OtherDirection => "other_direction",
            Self::Duplicate => "duplicate",
            Self::Loop => "loop",
            Self::TargetDown => "target_down",
            Self::Congested => "congested",
            Self::Failed => "failed",
            Self::Filtered => "filtered",
            Self::SampledOut => "sampled_out",
            Self::Limited => "limited",
            Self::Ended => "ended",
        }
    }
}
