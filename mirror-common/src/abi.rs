//! The wire types: the contents of the pinned BPF maps.
//!
//! No padding, no `bool`, no `enum`, no `Option`: every bit pattern is valid, and `zerocopy` proves it at compile time.
//! [`ABI_VERSION`] is part of the path of the pins, so that an agent never reads maps of another layout. Any change in
//! this module after a release raises it. `abi.txt` next to the crate describes every pinned map and every type in it;
//! a test compares that file with the eBPF object.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::verdict::{Direction, TapKind, Verdict};

/// Version of everything that is pinned: the maps, and the types in this module, `limit` and `stream`.
pub const ABI_VERSION: u32 = 1;

/// Maximum number of sessions of a tap.
pub const MAX_SESSIONS_PER_TAP: usize = 8;
/// Maximum number of taps of a node.
pub const MAX_TAPS: u32 = 4096;
/// Maximum number of sessions of a node, over all taps: the upper bound of the tables indexed by [`Session::id`].
/// `COUNTERS` may be smaller, because the agent sets its size when it creates the map.
pub const MAX_SESSIONS: u32 = 4096;
/// Entries for the settings of sessions: two for each session, so that new settings are written completely before the
/// tap's entry refers to them.
pub const SETTINGS_PLACES: u32 = 2 * MAX_SESSIONS;
/// Maximum number of targets of a node.
pub const MAX_TARGETS: u32 = 16;
/// Entries in `TARGETS`: all targets can be renamed before the entries of the old names are free.
pub const TARGET_PLACES: u32 = 2 * MAX_TARGETS + MAX_CAPTURES;
/// Maximum number of distinct filters of a node.
pub const MAX_FILTERS: u32 = 1024;
/// Entries in `FILTERS`: all filters can be replaced before the entries of the old ones are free.
pub const FILTER_PLACES: u32 = 2 * MAX_FILTERS;
/// Maximum number of concurrent captures: programs that read a stream. Each has its own target.
pub const MAX_CAPTURES: u32 = 8;

/// The upper four bits of `skb->tc_index` of a packet that has been copied. [`FORM_BITS`] contain the forms.
///
/// The lower byte keeps its value: Cilium keeps flags in its bits 0 to 4 ("comes from the proxy", "skip the host
/// firewall"; bpf/lib/common.h). The kernel itself writes small numbers to the field (the minor of a tc class id, after
/// a filter that ends with `TC_ACT_OK`). The mark distinguishes podmirror's values from these numbers.
pub const COPIED_MARK: u16 = 0xb000;
/// The same bits in a copy. A copy that reaches a tap is never copied.
pub const COPY_MARK: u16 = 0xd000;
/// The bits of `skb->tc_index` that hold [`COPIED_MARK`] or [`COPY_MARK`].
pub const COPIED_MASK: u16 = 0xf000;
/// The bits of `skb->tc_index` that name the forms in which a packet has been copied, see [`Session::mark`].
pub const FORM_BITS: u16 = 0x0f00;
/// Number of forms with a bit in [`FORM_BITS`]. A form is a (target, snap length) pair: copies of the same form are
/// equal for the reader. A form has the same bit at every tap of the node; further forms have no bit.
pub const MAX_FORMS: usize = 4;

/// Bit of [`Tap::flags`]: all sessions of the tap are captures. The packet's marks stay unchanged, as on a device
/// without a tap.
pub const TAP_CAPTURES_ONLY: u32 = 1;

/// Bit of [`Tap::flags`] on the node side of a veth: ingress is seen at the NIC inside the pod ([`Tap::other_end`]).
/// Here nothing is done with these packets.
pub const TAP_SEEN_INSIDE: u32 = 2;

/// Return value of a filter's program for a packet that matches. The programs are in `FILTERS`, where the tap programs
/// of any agent of this version may call them. The number is not a tc verdict: tc would treat it as `TC_ACT_UNSPEC`.
pub const FILTER_MATCHES: u32 = 0x100;
/// Return value for any other packet, including one that ends before a byte that the filter has to read.
pub const FILTER_DIFFERS: u32 = 0x101;

/// Bit of [`Session::flags`]: the session has a filter, in `FILTERS` at [`Session::filter`].
pub const SESSION_FILTERED: u32 = 1;
/// Bit of [`Session::flags`]: the session has limits ([`Level::Session`](crate::limit::Level::Session)), with the meter
/// at [`Session::id`] and the limits at [`Session::settings`].
pub const SESSION_METERED: u32 = 2;
/// Bit of [`Session::flags`]: the limits of pods, namespaces and the node apply, with the meters at [`Tap::pod_meter`]
/// and [`Tap::namespace_meter`]. Never set for a capture, because those limits are for mirrors.
pub const SESSION_POD_METERED: u32 = 4;

/// Bit of [`Session::flags`]: the filter may give another answer for a super-frame than for its segments. So if the
/// target is a stream, super-frames pass, and the reader filters their segments.
pub const SESSION_SEGMENTS: u32 = 8;

/// Bit of [`Target::flags`]: the device is up and has a carrier.
pub const TARGET_UP: u32 = 1;
/// Bit of [`Target::flags`]: the device has no queue (dummy, veth, bridge), or a queue that never returns `NET_XMIT_CN`
/// (pfifo). When such a device goes down, the kernel's `noop_qdisc` replaces the queue and returns `NET_XMIT_CN` until
/// the agent clears [`TARGET_UP`]. The device returns it in no other case. See [`outcome`](crate::decide::outcome).
pub const TARGET_QUEUELESS: u32 = 2;
/// Bit of [`Target::flags`]: the program `deliver` of this ABI version runs at the device's egress hook, so that snap
/// lengths are applied there.
pub const TARGET_CUTS: u32 = 4;
/// Bit of [`Target::flags`]: copies are records in the ring in `STREAMS` at the target's index, and use no device. See
/// [`stream`](crate::stream).
pub const TARGET_STREAM: u32 = 8;

/// Bit of [`Target::flags`]: packets from and to the collector, and packets of tunnels, are not copied there.
pub const TARGET_GUARDED: u32 = 16;

/// Bit of [`Target::flags`]: the device is a tunnel's. `deliver` encapsulates the copies as [`Target::tunnel`] says. So
/// nothing is copied to this target without [`TARGET_CUTS`].
pub const TARGET_TUNNEL: u32 = 32;

/// Bit of [`Target::flags`]: the target has a ceiling for all its copies
/// ([`Level::Target`](crate::limit::Level::Target)), at its index.
pub const TARGET_METERED: u32 = 64;

/// Bit of [`Target::flags`]: nothing is copied to this target before the time in `UNREAD` at its index, in ns of the
/// kernel's monotonic clock. While nobody reads the mirror interface, the agent keeps this time a few ms in the future.
pub const TARGET_WHEN_READ: u32 = 128;

/// Flag of [`Tunnel::flags`]: the remote address is IPv6.
pub const TUNNEL_IPV6: u32 = 1;
/// Flag of [`Tunnel::flags`]: the packets have a UDP checksum.
pub const TUNNEL_CHECKSUM: u32 = 2;
/// Flag of [`Tunnel::flags`]: the packets have the GENEVE option [`Identity`].
pub const TUNNEL_IDENTITY: u32 = 4;
/// Flag of [`Tunnel::flags`]: the tunnel uses UDP (VXLAN or GENEVE).
pub const TUNNEL_UDP: u32 = 8;
/// [`Tunnel::flags`]: ERSPAN type II.
pub const TUNNEL_ERSPAN: u32 = 16;
/// [`Tunnel::oversize`]: a copy that does not fit is cut.
pub const OVERSIZE_TRUNCATE: u32 = 0;
/// [`Tunnel::oversize`]: the kernel segments super-frames. Other copies are cut.
pub const OVERSIZE_SEGMENT: u32 = 1;
/// [`Tunnel::oversize`]: the kernel segments super-frames, and fragments other copies.
pub const OVERSIZE_FRAGMENT: u32 = 2;
/// [`Tunnel::oversize`]: a copy that does not fit is dropped.
pub const OVERSIZE_DROP: u32 = 3;

/// Maximum length of a filter's text in [`SessionInfo::filter`].
pub const MAX_FILTER_TEXT: usize = 1024;
/// Maximum length of the name of a target.
pub const MAX_NAME: usize = 64;
/// Maximum length of the name of a mirror: that of a ClusterMirror has 63 bytes and the prefix `clustermirror/`.
pub const MAX_MIRROR: usize = 80;
/// Maximum length of a network's name: 63 bytes of a namespace, a slash, and 253 of an object's name.
pub const MAX_NETWORK: usize = 320;
/// Maximum length of the text of a destination: of a pod its namespace, its name or labels, and a NIC.
pub const MAX_DESTINATION: usize = 472;

/// Key of the maps `TAPS` and `TAP_OWNERS`: a tapped device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceKey {
    /// Inode of the device's network namespace, as in `NETNS` of the programs there; 0: the agent's own.
    pub netns: u32,
    /// ifindex of the device in that namespace.
    pub ifindex: u32,
}

/// One mirror applied to one tap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Session {
    /// Index of the session in `COUNTERS` and `METERS`; below [`MAX_SESSIONS`].
    pub id: u32,
    /// Index of its limits in `LIMITS`, and key of its description in `SESSION_INFO`; below [`SETTINGS_PLACES`]. The
    /// contents do not change as long as the entry of a tap refers to them.
    pub settings: u32,
    /// Index of the session's target in `TARGETS`, below [`TARGET_PLACES`].
    pub target: u32,
    /// The directions that the session copies, one bit each; see [`Direction::bit`].
    pub directions: u32,
    /// [`SESSION_FILTERED`], [`SESSION_METERED`], [`SESSION_POD_METERED`], [`SESSION_SEGMENTS`].
    pub flags: u32,
    /// Index of the session's filter in `FILTERS`; valid with [`SESSION_FILTERED`].
    pub filter: u32,
    /// Share of flows in units of 2^-32; 0: all of them. See [`in_sample`](crate::sample::in_sample).
    pub sample: u32,
    /// Seed of the sample.
    pub seed: u32,
    /// Number that no other session of this agent has had, for the records of a stream: `id` is reused.
    pub serial: u32,
    /// Snap length of a copy in bytes; 0: unlimited. At most [`MAX_SNAPLEN`](crate::packet::MAX_SNAPLEN).
    pub snaplen: u32,
    /// The bit of the session's form in [`FORM_BITS`]. 0: the form has none, so that a copy made at another tap never
    /// counts as this session's.
    pub mark: u32,
    /// The earlier sessions of this tap with the same form: bit `n` is `Tap::sessions[n]`.
    pub alike: u32,
    /// The tunnel key of its copies: VNI, GRE key, or ERSPAN session. 0: the target is not a tunnel.
    pub key: u32,
}

/// Value of the map `TAPS`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Tap {
    /// The relation of the tapped device to the pod: [`TapKind::wire`].
    pub kind: u32,
    /// [`TAP_CAPTURES_ONLY`], [`TAP_SEEN_INSIDE`].
    pub flags: u32,
    /// Place of the meters of the pod and of its share, below [`MAX_TAPS`]; the taps of one pod share it. Valid with
    /// [`SESSION_POD_METERED`].
    pub pod_meter: u32,
    /// Place of the meter of the pod's namespace, below [`MAX_TAPS`], plus 1; the taps of one namespace share it. 0: the
    /// tap is for an interface without a pod. Valid with [`SESSION_POD_METERED`].
    pub namespace_meter: u32,
    /// Number of used entries at the beginning of `sessions`.
    pub session_count: u32,
    /// For a tap inside a pod: ifindex of the pod's relay device, through which copies for devices of the node leave
    /// the pod's namespace. 0: there is none.
    pub exit: u32,
    /// For a tap on the node side of a veth: ifindex of the bridge that the device is a port of. 0: there is none.
    pub bridge: u32,
    /// A tap can see one direction on the node side of a veth, and the other one at the NIC inside the pod. Then it has
    /// an entry for each of these devices, with the same sessions, and this is the ifindex of the other device. 0: the
    /// tap has one entry. The programs do not read it.
    pub other_end: u32,
    /// The sessions.
    pub sessions: [Session; MAX_SESSIONS_PER_TAP],
}

impl Tap {
    /// The relation of the tapped device to the pod.
    #[inline(always)]
    pub const fn kind(&self) -> TapKind {
        TapKind::from_wire(self.kind)
    }
}

/// Value of the map `TAP_OWNERS`: the pod and the NIC of a tap. Only the agent writes and reads it. Texts are UTF-8,
/// padded with zeros.
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
    /// Name of the tapped device: on the node, or inside the pod for [`TapKind::PodNic`].
    pub device: [u8; 16],
    /// The network of the NIC according to an annotation of the pod; empty if unknown.
    pub network: [u8; MAX_NETWORK],
}

/// Value of the map `SESSION_INFO`, with the key [`Session::settings`] (`u32`): settings that the programs do not use,
/// or use in other units. Only the agent writes and reads it, so that the settings are known while no agent runs. Texts
/// are UTF-8, padded with zeros. A setting that is absent is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SessionInfo {
    /// Name of the mirror.
    pub mirror: [u8; MAX_MIRROR],
    /// The origin of the mirror, as numbered by the agent's model.
    pub origin: u32,
    /// A number for the text that the author of the mirror wrote, as defined by the agent's model; 0: there is none.
    pub asked: u32,
    /// Rate in packets a second.
    pub rate_packets: u64,
    /// Rate in bits a second.
    pub rate_bits: u64,
    /// The burst in ms: how long an unused rate accumulates.
    pub burst_ms: u64,
    /// Budget of time in ms.
    pub budget_ms: u64,
    /// Budget of packets.
    pub budget_packets: u64,
    /// Budget of bytes.
    pub budget_bytes: u64,
    /// The filter's text.
    pub filter: [u8; MAX_FILTER_TEXT],
}

/// Value of the array map `TARGETS`, indexed by [`Session::target`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Target {
    /// ifindex of the device that receives the copies; 0: there is none now, or the target is a stream.
    pub ifindex: u32,
    /// [`TARGET_UP`], [`TARGET_QUEUELESS`], [`TARGET_CUTS`], [`TARGET_STREAM`], [`TARGET_GUARDED`], [`TARGET_TUNNEL`],
    /// [`TARGET_METERED`], [`TARGET_WHEN_READ`].
    pub flags: u32,
    /// The kernel's id of the ring of a stream; 0: there is none now. The programs do not read it.
    pub ring: u32,
    /// Name of the target. The programs do not read it.
    pub name: [u8; MAX_NAME],
    /// Name of the device. The programs do not read it.
    pub device: [u8; 16],
    /// MAC address of the collector, the pod behind the device; 0: there is none.
    pub collector: [u8; 6],
    /// Zero.
    pub reserved: [u8; 2],
    /// With a collector, ifindex of the bridge that the device is a port of; 0: there is none. A packet from a pod
    /// on this bridge ([`Tap::bridge`]) to the collector's MAC address reaches the collector, so it is not copied.
    /// A packet from a pod elsewhere does not, so it is copied: a pod could use this address to hide packets from
    /// the mirrors.
    pub bridge: u32,
    /// With [`TARGET_WHEN_READ`], ifindex of the other end of a veth pair, where copies arrive; 0: there is none. The
    /// programs do not read it.
    pub other_end: u32,
    /// The tunnel of the copies; valid with [`TARGET_TUNNEL`].
    pub tunnel: Tunnel,
    /// The destination as the administrator wrote it. The programs do not read it.
    pub destination: [u8; MAX_DESTINATION],
}

impl Default for Target {
    fn default() -> Self {
        Self {
            ifindex: 0,
            flags: 0,
            ring: 0,
            name: [0; MAX_NAME],
            device: [0; 16],
            collector: [0; 6],
            reserved: [0; 2],
            bridge: 0,
            other_end: 0,
            tunnel: Tunnel::default(),
            destination: [0; MAX_DESTINATION],
        }
    }
}

/// The parameters of a tunnel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Tunnel {
    /// The remote address in network byte order; an IPv4 address is in the first word.
    pub remote: [u32; 4],
    /// Maximum bytes of a frame in one packet.
    pub room: u32,
    /// Bytes of the headers before the frame.
    pub headers: u32,
    /// One of the constants [`OVERSIZE_TRUNCATE`] to [`OVERSIZE_DROP`].
    pub oversize: u32,
    /// [`TUNNEL_IPV6`], [`TUNNEL_CHECKSUM`], [`TUNNEL_IDENTITY`], [`TUNNEL_UDP`], [`TUNNEL_ERSPAN`].
    pub flags: u32,
}

/// Value of the per-CPU array map `DELIVERY`, of one element: the messages between a tap and the second stage,
/// `deliver`, about the copy being made on this CPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Delivery {
    /// Bytes to keep of the copy; 0: all of them.
    pub snaplen: u32,
    /// Why the second stage dropped the copy: [`DROPPED_UNCUT`] or [`DROPPED_DOWN`]; 0: it did not. The tap clears it.
    pub uncut: u32,
    /// The index of the copy's target in `TARGETS`, plus 1; 0: no copy is announced, and the other fields are invalid.
    pub target: u32,
    /// [`Session::key`] of the copy's session.
    pub key: u32,
    /// [`Session::serial`] of the copy's session.
    pub session: u32,
    /// The direction of the packet: [`Direction`] as a number.
    pub direction: u32,
    /// The progress of a copy that leaves a pod by its relay device: [`HUB_NONE`], [`HUB_EXPECTED`] or [`HUB_PASSED`].
    pub hub: u32,
    /// The return code of the relay hub's clone to the target; valid with [`HUB_PASSED`].
    pub code: i32,
    /// Length of the packet, if the second stage has delivered the copy; otherwise 0.
    pub len: u32,
    /// Length of the copy; valid with `len`.
    pub kept: u32,
}

/// [`Delivery::uncut`]: the copy could not be cut or encapsulated.
pub const DROPPED_UNCUT: u32 = 1;
/// [`Delivery::uncut`]: the target went down while the copy was in transit, so its tunnel parameters were invalid.
pub const DROPPED_DOWN: u32 = 2;

/// [`Delivery::hub`]: the copy does not use the relay hub.
pub const HUB_NONE: u32 = 0;
/// [`Delivery::hub`]: the copy is on its way to the relay hub.
pub const HUB_EXPECTED: u32 = 1;
/// [`Delivery::hub`]: the copy has reached the relay hub, which has cloned it to the target.
pub const HUB_PASSED: u32 = 2;

/// The GENEVE option of a copy (RFC 8926, section 3.5). Numbers are in network byte order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Identity {
    /// [`IDENTITY_CLASS`].
    pub class: [u8; 2],
    /// [`IDENTITY_TYPE`].
    pub kind: u8,
    /// Length of what follows, in units of 4 bytes: 2.
    pub length: u8,
    /// [`Session::serial`], as `status` shows it.
    pub session: [u8; 4],
    /// 1: the pod has received the packet; 2: the pod has sent it.
    pub direction: u8,
    /// Zero.
    pub reserved: [u8; 3],
}

/// [`Identity::class`], from the experimental range.
pub const IDENTITY_CLASS: u16 = 0xff70;
/// [`Identity::kind`]; a receiver that does not know it may ignore it.
pub const IDENTITY_TYPE: u8 = 1;

/// Packets and their bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Counter {
    /// Packets; a super-frame (GSO) is one.
    pub packets: u64,
    /// Bytes as the device sees them: link-layer header included, VLAN tag in skb metadata and FCS not.
    pub bytes: u64,
}

impl Counter {
    /// The sum.
    pub const fn plus(self, other: Self) -> Self {
        let packets = self.packets.saturating_add(other.packets);
        Self { packets, bytes: self.bytes.saturating_add(other.bytes) }
    }

    /// The difference; `None`: the other one is greater.
    pub fn minus(self, other: Self) -> Option<Self> {
        let packets = self.packets.checked_sub(other.packets)?;
        Some(Self { packets, bytes: self.bytes.checked_sub(other.bytes)? })
    }
}

/// Value of the per-CPU array map `COUNTERS`, indexed by [`Session::id`]: one [`Counter`] for each direction and
/// verdict since the session began, and one for each direction and [`Misfit`](crate::verdict::Misfit): the number of
/// such copies, and the bytes by which they differ.
///
/// [`Verdict::Copied`] counts the bytes of the copies, as they reach the target. Every number only grows, so a reader
/// never sees a sum that is smaller than before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SessionCounters {
    /// `[Direction][Verdict]`.
    pub counters: [[Counter; Verdict::SLOTS]; Direction::COUNT],
    /// Bytes of the copied packets that their copies lack.
    pub removed: [u64; Direction::COUNT],
}
