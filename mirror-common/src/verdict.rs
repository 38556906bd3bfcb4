//! The place where a tap sees a packet: hook, kind of device, direction; and the one named reason with which a packet
//! leaves a session.

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

    /// The bit of this direction in [`Session::directions`](crate::abi::Session::directions).
    #[inline(always)]
    pub const fn bit(self) -> u32 {
        1 << self as u32
    }

    /// The direction with this number; of a greater number, its lowest bit.
    #[inline(always)]
    pub const fn of_bit(number: u32) -> Self {
        if number & 1 == 0 { Self::Ingress } else { Self::Egress }
    }

    /// The word for status, metrics and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ingress => "ingress",
            Self::Egress => "egress",
        }
    }
}

/// The relation of the tapped device to the pod whose packets the tap sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum TapKind {
    /// The interface itself; directions are as the interface has them.
    Interface = 0,
    /// The node's end of the pod's veth pair: the packets that it receives have left the pod.
    HostVeth = 1,
    /// The NIC itself, inside the pod's network namespace.
    PodNic = 2,
}

impl TapKind {
    /// The number in [`Tap::kind`](crate::abi::Tap::kind).
    pub const fn wire(self) -> u32 {
        self as u32
    }

    /// The kind of a number in [`Tap::kind`](crate::abi::Tap::kind); any other number is an interface.
    #[inline(always)]
    pub const fn from_wire(kind: u32) -> Self {
        if kind == Self::HostVeth as u32 {
            Self::HostVeth
        } else if kind == Self::PodNic as u32 {
            Self::PodNic
        } else {
            Self::Interface
        }
    }

    /// The direction of a packet at a hook of the device. At the host end of a veth the hooks are the other way
    /// round. No other place knows this.
    #[inline(always)]
    pub const fn direction(self, hook: Hook) -> Direction {
        match (hook, self) {
            (Hook::Ingress, Self::HostVeth) | (Hook::Egress, Self::Interface | Self::PodNic) => {
                Direction::Egress
            }
            (Hook::Egress, Self::HostVeth) | (Hook::Ingress, Self::Interface | Self::PodNic) => {
                Direction::Ingress
            }
        }
    }

    /// Whether a packet at a hook of the device comes straight out of a pod, so that nothing on this node has seen it
    /// before.
    #[inline(always)]
    pub const fn leaves_pod(self, hook: Hook) -> bool {
        matches!((self, hook), (Self::HostVeth, Hook::Ingress) | (Self::PodNic, Hook::Egress))
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
    /// The packet has been copied in the same form (the same target and snap length) already: by another tap of this
    /// node, or by a session ahead of this one at the same tap.
    Duplicate = 2,
    /// The packet is a copy, or on the mirror interface itself, or the collector's own: a copy of it would come back
    /// here.
    Loop = 3,
    /// The mirror interface is gone or down, or the way to it is: the veth of a collector, the exit of a pod.
    TargetDown = 4,
    /// The mirror interface did not take the copy: its queue is full, or the packet is too long for its MTU.
    Congested = 5,
    /// The kernel could not make the copy (no memory, for example).
    Failed = 6,
    /// The session's filter does not match the packet.
    Filtered = 7,
    /// The packet's flow is not in the sample.
    SampledOut = 8,
    /// The session's rate, the pod's or the node's is used up for now.
    Limited = 9,
    /// The session's budget of time, packets or bytes is used up.
    Ended = 10,
    /// The copy could not be cut to the session's snap length, so it was not delivered.
    Uncut = 11,
    /// The ring of a stream had no room for the record: its reader is too slow, or the session has taken its part.
    Lost = 12,
    /// Nobody reads the mirror interface, so no copy was made ([`TARGET_WHEN_READ`](crate::abi::TARGET_WHEN_READ)).
    Unread = 13,
}

impl Verdict {
    /// The number of counters of a direction: a power of two, so that a mask can prove an index to be in bounds.
    pub const SLOTS: usize = 16;
    /// Every verdict, at the index that it has in a session's counters.
    pub const ALL: [Self; 14] = [
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
        Self::Uncut,
        Self::Lost,
        Self::Unread,
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
            Self::Uncut => "uncut",
            Self::Lost => "lost",
            Self::Unread => "unread",
        }
    }
}

/// How a copy differs from what its session asks for. Counted besides the verdict [`Verdict::Copied`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Misfit {
    /// The copy has less of the packet: it did not fit into a packet of the tunnel, or into a record of a stream.
    Cut = 14,
    /// The copy is longer than the snap length: the kernel cuts no packet within its headers.
    Long = 15,
}

impl Misfit {
    /// Each of them. The number is its place among a session's counters, behind those of the verdicts.
    pub const ALL: [Self; 2] = [Self::Cut, Self::Long];

    /// The word for status and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cut => "cut",
            Self::Long => "long",
        }
    }
}

const _: () = assert!(Verdict::ALL.len() <= Misfit::Cut as usize && (Misfit::Long as usize) < Verdict::SLOTS);
