//! Addresses a copy for a tunnel. `deliver` calls it. A packet of a pod is never given an address.

use core::ffi::c_void;

use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_TUNINFO_IPV6, BPF_F_ZERO_CSUM_TX},
    helpers::{bpf_skb_change_type, bpf_skb_set_tunnel_key, bpf_skb_set_tunnel_opt},
};
use mirror_common::{
    abi::{
        Delivery, IDENTITY_CLASS, IDENTITY_TYPE, Identity, TUNNEL_CHECKSUM, TUNNEL_IDENTITY, TUNNEL_IPV6,
        TUNNEL_UDP, Tunnel,
    },
    verdict::Direction,
};

/// `struct bpf_tunnel_key` as Linux 5.10 has it. Later kernels have more fields, and take this length too.
#[repr(C)]
struct Key {
    id: u32,
    remote: [u32; 4],
    tos: u8,
    ttl: u8,
    ext: u16,
    label: u32,
}

/// `struct erspan_metadata` (include/uapi/linux/erspan.h).
#[repr(C)]
struct Erspan {
    version: u32,
    /// Type II: the index. Type III: the timestamp, the security group tag, and bits.
    rest: [u8; 8],
}

/// The types of a packet for this host and for another one (include/uapi/linux/if_packet.h).
const PACKET_HOST: u32 = 0;
const PACKET_OTHERHOST: u32 = 3;
/// Hops of a packet: as many as the kernel gives its own packets.
const TTL: u8 = 64;
/// The direction bit of ERSPAN type III in the last byte of its bits: 1, the pod has received the packet.
const ERSPAN_EGRESS: u8 = 0x08;

/// Addresses a copy. Returns whether the kernel could do that.
#[inline(always)]
pub(crate) fn address(skb: *mut __sk_buff, tunnel: &Tunnel, announced: &Delivery) -> bool {
    // The session is still that of another target.
    if announced.key == 0 {
        return false;
    }
    let has = |flag| tunnel.flags & flag != 0;
    let [first, rest @ ..] = tunnel.remote;
    // The helper takes an IPv4 address in the byte order of the machine.
    let first = if has(TUNNEL_IPV6) { first } else { u32::from_be(first) };
    let remote = [first, rest[0], rest[1], rest[2]];
    let mut key = Key { id: announced.key, remote, tos: 0, ttl: TTL, ext: 0, label: 0 };
    let family = if has(TUNNEL_IPV6) { BPF_F_TUNINFO_IPV6 } else { 0 };
    let checksum = if has(TUNNEL_CHECKSUM) { 0 } else { BPF_F_ZERO_CSUM_TX };
    let (bytes, flags) = (size_of::<Key>() as u32, u64::from(family | checksum));
    // For a packet that is too long, the kernel may send an ICMP error to the sender of the packet inside. GRE does so if
    // the packet is for this host, VXLAN and GENEVE if it is not, and their device is a port of a bridge or of Open vSwitch.
    let packet_type = if has(TUNNEL_UDP) { PACKET_HOST } else { PACKET_OTHERHOST };
    // Routes may depend on the mark, and that of the pod's packet is not for the tunnel's packet.
    // SAFETY: the context is valid for the whole program, tc programs may write its mark, and the kernel reads as many
    // bytes as the call says.
    let is_addressed = unsafe {
        (*skb).mark = 0;
        bpf_skb_change_type(skb, packet_type) == 0
            && bpf_skb_set_tunnel_key(skb, (&raw mut key).cast(), bytes, flags) == 0
    };
    let is_sent = announced.direction == Direction::Egress as u32;
    if !is_addressed {
        false
    } else if tunnel.erspan != 0 {
        let direction = if is_sent || tunnel.erspan != 2 { 0 } else { ERSPAN_EGRESS };
        let mut erspan = Erspan { version: tunnel.erspan, rest: [0, 0, 0, 0, 0, 0, 0, direction] };
        set_option(skb, (&raw mut erspan).cast(), size_of::<Erspan>())
    } else if has(TUNNEL_IDENTITY) {
        let mut identity = Identity {
            class: IDENTITY_CLASS.to_be_bytes(),
            kind: IDENTITY_TYPE,
            length: 2,
            session: announced.session.to_be_bytes(),
            direction: if is_sent { 2 } else { 1 },
            reserved: [0; 3],
        };
        set_option(skb, (&raw mut identity).cast(), size_of::<Identity>())
    } else {
        true
    }
}

/// Gives a copy that has an address an option of this many bytes.
#[inline(always)]
fn set_option(skb: *mut __sk_buff, option: *mut c_void, bytes: usize) -> bool {
    // SAFETY: the context is valid for the whole program, and the option has this length.
    unsafe { bpf_skb_set_tunnel_opt(skb, option, bytes as u32) == 0 }
}
