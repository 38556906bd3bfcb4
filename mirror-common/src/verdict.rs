//! Where a tap sees a packet: hook, kind of device, direction; and the verdict of a session for a packet.

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
    /// The number of directions: the first dimension of a session's counters.
    pub const COUNT: usize = 2;
    /// Every direction, at its index in a session's counters.
    pub const ALL: [Self; Self::COUNT] = [Self::Ingress, Self::Egress];

    /// The bit of this direction in [`Session::directions`](crate::abi::Session::directions).
    #[inline(always)]
    pub const fn bit(self) -> u32 {
        1 << self as u32
    }

    /// The direction with this number; for a greater number, its lowest bit.
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
    /// The interface itself, without a pod: directions are those of its hooks.
    Interface = 0,
    /// The node side of the pod's veth pair: the packets that it receives have left the pod.
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

    /// Returns the direction of a packet at a hook of the device. On the node side of a veth the hooks are the other
    /// way round. This is the only place with this rule.
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

    /// Whether a packet at a hook of the device comes directly from a pod, so that no other hook of this node has seen
    /// it.
    #[inline(always)]
    pub const fn leaves_pod(self, hook: Hook) -> bool {
        matches!((self, hook), (Self::HostVeth, Hook::Ingress) | (Self::PodNic, Hook::Egress))
    }
}

/// The outcome of a packet in a session. Each session counts each packet that its tap sees under exactly one verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Verdict {
    /// A copy was handed to the target.
    Copied = 0,
    /// The session does not copy this direction.
    OtherDirection = 1,
    /// The packet has been copied in the same form (the same target and snap length) already: by another tap of this
    /// node, or by an earlier session of the same tap.
    Duplicate = 2,
    /// The packet is a copy, or on the mirror interface itself, or the collector's own: a copy of it would loop.
    Loop = 3,
    /// The mirror interface is missing or down, or the path to it: the veth of a collector, the relay device of a pod.
    TargetDown = 4,
    /// The mirror interface did not accept the copy: its queue is full, or the packet is too long for its MTU.
    Congested = 5,
    /// The kernel could not make the copy (no memory, for example).
    Failed = 6,
    /// The session does not select the packet, for example because its filter does not match.
    Filtered = 7,
    /// The packet's flow is not in the sample.
    SampledOut = 8,
    /// The rate of the session, the pod or the node is exceeded.
    Limited = 9,
    /// The session's budget of time, packets or bytes is used up.
    Ended = 10,
    /// The copy could not be cut to the session's snap length, so it was not delivered.
    Uncut = 11,
    /// The ring of a stream had no room for the record: its reader is too slow, or the session has used its share.
    Lost = 12,
    /// Nobody reads the mirror interface, so no copy was made ([`TARGET_WHEN_READ`](crate::abi::TARGET_WHEN_READ)).
    Unread = 13,
}

impl Verdict {
    /// The number of counters of a direction: a power of two, so that a mask can prove an index to be in bounds.
    pub const SLOTS: usize = 16;
    /// Every verdict, at its index in a session's counters.
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

/// How a copy differs from what its session requests. Counted in addition to [`Verdict::Copied`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum Misfit {
    /// The copy is too short: it did not fit into a packet of the tunnel, or into a record of a stream.
    Cut = 14,
    /// The copy is longer than the snap length: the kernel cuts no packet within its headers.
    Long = 15,
}

impl Misfit {
    /// All of them. The number is the index in a session's counters, after those of the verdicts.
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
