//! Encapsulates a copy for a tunnel, by setting the tunnel metadata. Called by `deliver`, never for a pod's own packet.

use core::ffi::c_void;

use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_TUNINFO_IPV6, BPF_F_ZERO_CSUM_TX},
    helpers::{bpf_fib_lookup, bpf_skb_change_type, bpf_skb_set_tunnel_key, bpf_skb_set_tunnel_opt},
};
use mirror_common::{
    abi::{
        Delivery, IDENTITY_CLASS, IDENTITY_TYPE, Identity, TUNNEL_CHECKSUM, TUNNEL_ERSPAN, TUNNEL_IDENTITY,
        TUNNEL_IPV6, TUNNEL_UDP, Tunnel,
    },
    tunnel::arguments::{Erspan, Key, Lookup},
    verdict::Direction,
};

/// The types of a packet for this host and for another one (include/uapi/linux/if_packet.h).
const PACKET_HOST: u32 = 0;
const PACKET_OTHERHOST: u32 = 3;

/// Returns the maximum length of a copy that may be passed to the kernel. `len`: the length of this one.
#[inline(always)]
pub(crate) fn room(skb: *mut __sk_buff, tunnel: &Tunnel, len: u32) -> u32 {
    // SAFETY: the context is valid for the whole program.
    let ifindex = unsafe { (*skb).ifindex };
    let Some(mut lookup) = Lookup::of(tunnel, len, ifindex) else { return tunnel.room };
    let bytes = size_of::<Lookup>() as i32;
    // SAFETY: the context is valid, and the kernel reads and writes as many bytes as the call says.
    let code = unsafe { bpf_fib_lookup(skb.cast(), (&raw mut lookup).cast(), bytes, 0) };
    lookup.room(tunnel, code)
}

/// Sets the tunnel metadata of a copy. Returns whether the kernel could do that.
#[inline(always)]
pub(crate) fn address(skb: *mut __sk_buff, tunnel: &Tunnel, announced: &Delivery) -> bool {
    // The session still belongs to another target.
    if announced.key == 0 {
        return false;
    }
    let has = |flag| tunnel.flags & flag != 0;
    let mut key = Key::of(tunnel, announced.key);
    let family = if has(TUNNEL_IPV6) { BPF_F_TUNINFO_IPV6 } else { 0 };
    let checksum = if has(TUNNEL_CHECKSUM) { 0 } else { BPF_F_ZERO_CSUM_TX };
    let (bytes, flags) = (size_of::<Key>() as u32, u64::from(family | checksum));
    // For a packet that is too long, the kernel may send an ICMP error to the sender of the inner packet. GRE does so
    // if the packet is for this host; VXLAN and GENEVE if it is not, with a device on a bridge or Open vSwitch.
    let packet_type = if has(TUNNEL_UDP) { PACKET_HOST } else { PACKET_OTHERHOST };
    // Routes may depend on the mark, and that of the pod's packet must not affect the tunnel's packet.
    // SAFETY: the context is valid for the whole program, tc programs may write its mark, and the kernel reads as many
    // bytes as the call says.
    let is_addressed = unsafe {
        (*skb).mark = 0;
        bpf_skb_change_type(skb, packet_type) == 0
            && bpf_skb_set_tunnel_key(skb, (&raw mut key).cast(), bytes, flags) == 0
    };
    if !is_addressed {
        false
    } else if has(TUNNEL_ERSPAN) {
        let mut erspan = Erspan::TYPE_II;
        set_option(skb, (&raw mut erspan).cast(), size_of::<Erspan>())
    } else if has(TUNNEL_IDENTITY) {
        let is_sent = announced.direction == Direction::Egress as u32;
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

/// Adds an option of this many bytes to a copy with tunnel metadata.
#[inline(always)]
fn set_option(skb: *mut __sk_buff, option: *mut c_void, bytes: usize) -> bool {
    // SAFETY: the context is valid for the whole program, and the option has this length.
    unsafe { bpf_skb_set_tunnel_opt(skb, option, bytes as u32) == 0 }
}
