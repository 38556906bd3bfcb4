//! The wire types: what stands in the pinned BPF maps.
//!
//! No padding, no `bool`, no `enum`, no `Option`: every bit pattern is valid, and `zerocopy` proves it at compile
//! time. A change of anything here raises [`ABI_VERSION`], which is part of the path of the pins, so that an agent
//! never reads maps of another layout. A test compares these types with the BTF of the eBPF object.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::verdict::{Direction, Verdict};

/// Version of everything in this module.
pub const ABI_VERSION: u32 = 4;

/// Sessions that one tap can have.
pub const MAX_SESSIONS_PER_TAP: usize = 4;
/// Taps that one node can have.
pub const MAX_TAPS: u32 = 1024;
/// Sessions that one node can have, over all taps.
pub const MAX_SESSIONS: u32 = 1024;
/// Targets that one node can have. Bounded by the bits of [`TARGET_BITS`].
pub const MAX_TARGETS: u32 = 4;

/// The upper four bits of `skb->tc_index` of a packet that has been copied; one bit a target stands in
/// [`TARGET_BITS`].
///
/// The lower byte is left as it is: Cilium keeps flags in its bits 0 to 4 ("comes from the proxy", "skip the host
/// firewall"; bpf/lib/common.h). The kernel itself writes small numbers to the field (the minor of a tc class id, after
/// a filter that ends with `TC_ACT_OK`); the mark keeps those from being taken for ours.
pub const COPIED_MARK: u16 = 0xb000;
/// The bits of `skb->tc_index` that hold the mark.
pub const COPIED_MASK: u16 = 0xf000;
/// The bits of `skb->tc_index` that name targets: the lowest of them stands for target 0.
pub const TARGET_BITS: u16 = 0x0f00;

/// Bit of [`Tap::flags`]: the tapped device is the host end of the pod's veth, so the tc hooks are the other way
/// round. See [`Direction::at`].
pub const TAP_AT_PEER: u32 = 1;

/// Bit of [`Target::flags`]: the device is up and has a carrier.
pub const TARGET_UP: u32 = 1;
/// Bit of [`Target::flags`]: the device has no queue (dummy, veth, bridge), so it cannot be congested. When such a
/// device goes down, the kernel's `noop_qdisc` answers `NET_XMIT_CN` in its place until the agent clears
/// [`TARGET_UP`].
pub const TARGET_QUEUELESS: u32 = 2;

/// Index of the node's own limits and meter, behind those of the sessions.
pub const NODE_METER: u32 = MAX_SESSIONS;

/// Bit of [`Session::flags`]: `LIMITS` and `METERS` at the session's id hold for it.
pub const SESSION_METERED: u32 = 1;

/// Bit of [`Target::flags`]: `LIMITS` and `METERS` at [`NODE_METER`] hold for all copies to it.
pub const TARGET_METERED: u32 = 4;

/// Bytes of a filter's text that fit into [`TapOwner::filter`].
pub const MAX_FILTER_TEXT: usize = 1024;

/// One mirror applied to one tap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Session {
    /// Index of the session's counters, below [`MAX_SESSIONS`].
    pub id: u32,
    /// Index of the session's target, below [`MAX_TARGETS`].
    pub target: u32,
    /// The directions that are wanted: a bit each, see [`Direction::bit`].
    pub directions: u32,
    /// [`SESSION_METERED`].
    pub flags: u32,
    /// The session's filter: its index in `FILTERS` and one; 0: everything is wanted.
    pub filter: u32,
    /// Share of flows in units of 2^-32; 0: all of them. See [`in_sample`](crate::sample::in_sample).
    pub sample: u32,
    /// Seed of the sample.
    pub seed: u32,
    /// Bytes that are kept of a copy; 0: all of them.
    pub snaplen: u32,
}

/// Value of the map `TAPS`, whose key is the ifindex (`u32`) of the tapped device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Tap {
    /// [`TAP_AT_PEER`].
    pub flags: u32,
    /// How many of `sessions` are in use, from the first on.
    pub session_count: u32,
    /// The sessions.
    pub sessions: [Session; MAX_SESSIONS_PER_TAP],
}

/// Value of the map `TAP_OWNERS`, whose key is the ifindex (`u32`) of the tapped device. Written and read by the
/// agent only: it tells who a tap is for and what was asked for, also when no agent runs. Texts are UTF-8, filled up
/// with zeros. What was not asked for is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct TapOwner {
    /// Device number of the NIC's network namespace file; 0 without a pod.
    pub netns_dev: u64,
    /// Inode of the NIC's network namespace file; 0 without a pod.
    pub netns_ino: u64,
    /// `metadata.uid` of the pod; empty without a pod.
    pub pod_uid: [u8; 64],
    /// `metadata.namespace` of the pod; empty without a pod.
    pub pod_namespace: [u8; 64],
    /// `metadata.name` of the pod; empty without a pod.
    pub pod_name: [u8; 256],
    /// Name of the NIC inside the pod, or of the tapped interface without a pod.
    pub nic: [u8; 16],
    /// Name of the tapped device on the node.
    pub device: [u8; 16],
    /// Rate in packets a second.
    pub rate_packets: u64,
    /// Rate in bits a second.
    pub rate_bits: u64,
    /// How long an unused rate is saved up, in ms.
    pub burst_ms: u64,
    /// Budget of time in ms.
    pub budget_ms: u64,
    /// Budget of packets.
    pub budget_packets: u64,
    /// Budget of bytes.
    pub budget_bytes: u64,
    /// The filter as it was written.
    pub filter: [u8; MAX_FILTER_TEXT],
}

/// Value of the array map `TARGETS`, indexed by [`Session::target`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Target {
    /// ifindex of the mirror interface; 0: there is none now.
    pub ifindex: u32,
    /// [`TARGET_UP`], [`TARGET_QUEUELESS`], [`TARGET_METERED`].
    pub flags: u32,
    /// Name of the mirror interface: for people, not for the programs.
    pub name: [u8; 16],
}

/// Packets and their bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Counter {
    /// Packets; a super-frame (GSO) is one.
    pub packets: u64,
    /// Bytes as the device sees them: link-layer header included, VLAN tag in skb metadata and FCS not.
    pub bytes: u64,
}

/// Value of the per-CPU array map `COUNTERS`, indexed by [`Session::id`]: one [`Counter`] for each direction and
/// verdict since the session began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SessionCounters {
    /// `[Direction][Verdict]`.
    pub counters: [[Counter; Verdict::SLOTS]; Direction::COUNT],
}
