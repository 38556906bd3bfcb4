//! The tunnels of the targets: their packets are recognised here, and copies are addressed here.
//!
//! The decision asks at the tap whether a packet brings copies of another node. `deliver` addresses a copy. A packet of a
//! pod is never given an address.

use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_TUNINFO_IPV6, BPF_F_ZERO_CSUM_TX},
    btf_maps::Array,
    helpers::bpf_skb_set_tunnel_key,
    macros::btf_map,
};
use mirror_common::{
    abi::{TUNNEL_IPV6, Tunnel},
    tunnel::{self, Tunnels},
};

use crate::header;

/// The tunnels of this node's targets. All agents of a cluster have the same.
#[btf_map(pin_by_name)]
static TUNNELS: Array<Tunnels, 1> = Array::new();

/// Whether there are tunnels at all.
#[inline(always)]
pub(crate) fn may_be() -> bool {
    TUNNELS.get(0).is_some_and(|tunnels| tunnels.count != 0)
}

/// 1 if the packet is one of a tunnel of ours, else 0.
///
/// This is a global function, so the verifier goes through it once, and not again for each session of a tap.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn brings_copies(skb: *mut __sk_buff) -> u32 {
    let Some(tunnels) = TUNNELS.get(0) else { return 0 };
    let Some(header) = header::read(skb) else { return 0 };
    u32::from(tunnel::is_of(header, tunnels))
}

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

/// Hops of a packet: as many as the kernel gives its own packets.
const TTL: u8 = 64;

/// Addresses a copy. Returns whether the kernel could do that.
#[inline(always)]
pub(crate) fn address(skb: *mut __sk_buff, tunnel: &Tunnel) -> bool {
    let is_v6 = tunnel.flags & TUNNEL_IPV6 != 0;
    let [first, rest @ ..] = tunnel.remote;
    // The helper takes an IPv4 address in the byte order of the machine.
    let first = if is_v6 { first } else { u32::from_be(first) };
    let remote = [first, rest[0], rest[1], rest[2]];
    let mut key = Key { id: tunnel.id, remote, tos: 0, ttl: TTL, ext: 0, label: 0 };
    // IPv6 needs the checksum of UDP, IPv4 does not: the frame inside has its own.
    let flags = if is_v6 { BPF_F_TUNINFO_IPV6 } else { BPF_F_ZERO_CSUM_TX };
    // SAFETY: the context is valid for the whole program, and the kernel reads as many bytes as the call says.
    let code = unsafe {
        bpf_skb_set_tunnel_key(skb, (&raw mut key).cast(), size_of::<Key>() as u32, u64::from(flags))
    };
    code == 0
}
