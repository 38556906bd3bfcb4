//! Addresses a copy for a tunnel. `deliver` calls it. A packet of a pod is never given an address.

use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_TUNINFO_IPV6, BPF_F_ZERO_CSUM_TX},
    helpers::bpf_skb_set_tunnel_key,
};
use mirror_common::abi::{TUNNEL_IPV6, Tunnel};

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
