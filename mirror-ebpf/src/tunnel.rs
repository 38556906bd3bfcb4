//! Addresses a copy for a tunnel. `deliver` calls it. A packet of a pod is never given an address.

use core::ffi::c_void;

use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_TUNINFO_IPV6, BPF_F_ZERO_CSUM_TX},
    helpers::{bpf_skb_change_type, bpf_skb_set_tunnel_key, bpf_skb_set_tunnel_opt},
};
use mirror_common::{
    abi::{
        Delivery, IDENTITY_CLASS, IDENTITY_TYPE, Identity, TUNNEL_CHECKSUM, TUNNEL_IDENTITY, TUNNEL_IPV6,
        Tunnel,
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
    /// Type II: the index, in network byte order. Type III: the timestamp.
    first: [u8; 4],
    /// Type III: the security group tag, and bits of the second half of its last word.
    second: [u8; 4],
}

/// The type of a packet for another host (include/uapi/linux/if_packet.h).
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
    // SAFETY: the context is valid for the whole program, and the kernel reads as many bytes as the call says.
    let is_addressed = unsafe { bpf_skb_set_tunnel_key(skb, (&raw mut key).cast(), bytes, flags) } == 0;
    if !is_addressed {
        return false;
    }
    // Routes may depend on the mark. That of the pod's packet is not for the tunnel's packet.
    // SAFETY: as above, and tc programs may write this field.
    unsafe { (*skb).mark = 0 };
    // For a packet that is too long, some of the kernel's tunnels send an ICMP error to the sender of the packet inside,
    // if that packet is for this host.
    // SAFETY: as above.
    if unsafe { bpf_skb_change_type(skb, PACKET_OTHERHOST) } != 0 {
        return false;
    }
    let is_sent = announced.direction == Direction::Egress as u32;
    if tunnel.erspan != 0 {
        let direction = if is_sent { 0 } else { ERSPAN_EGRESS };
        let is_third = tunnel.erspan == 2;
        let second = if is_third { [0, 0, 0, direction] } else { [0; 4] };
        let mut erspan = Erspan { version: tunnel.erspan, first: [0; 4], second };
        return set_option(skb, (&raw mut erspan).cast(), size_of::<Erspan>());
    }
    if has(TUNNEL_IDENTITY) {
        let mut identity = Identity {
            class: IDENTITY_CLASS.to_be_bytes(),
            kind: IDENTITY_TYPE,
            length: 2,
            session: announced.session.to_be_bytes(),
            direction: if is_sent { 2 } else { 1 },
            reserved: [0; 3],
        };
        return set_option(skb, (&raw mut identity).cast(), size_of::<Identity>());
    }
    true
}

/// Gives a copy that has an address an option of this many bytes.
#[inline(always)]
fn set_option(skb: *mut __sk_buff, option: *mut c_void, bytes: usize) -> bool {
    // SAFETY: the context is valid for the whole program, and the option has this length.
    unsafe { bpf_skb_set_tunnel_opt(skb, option, bytes as u32) == 0 }
}
