//! Which packets must not be copied to a target, because they would come back or arrive twice.
//!
//! * The packets of a tunnel of ours bring copies of another node. A copy of such a packet could be copied there again,
//!   and so on.
//! * A collector, which is a pod, gets its own packets anyway. On a bridge, other taps see these packets too. Its network
//!   stack would take a copy with its own address for a packet that has arrived twice.
//!
//! The decision asks for targets with [`TARGET_GUARDED`](mirror_common::abi::TARGET_GUARDED) alone, so that other nodes
//! pay nothing.

use aya_ebpf::{bindings::__sk_buff, btf_maps::Array, helpers::bpf_skb_load_bytes, macros::btf_map};
use mirror_common::{
    abi::Target,
    tunnel::{self, Tunnels},
};

use crate::{TARGETS, header};

/// The tunnels of this node's targets. All agents of a cluster have the same.
#[btf_map(pin_by_name)]
static TUNNELS: Array<Tunnels, 1> = Array::new();

/// Bytes of the two MAC addresses of a frame.
const MACS: usize = 12;

/// 1 if the packet must not be copied to this target, else 0.
///
/// This is a global function, so the verifier goes through it once, and not again for each session of a tap.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn refuses(skb: *mut __sk_buff, target: u32) -> u32 {
    let Some(target) = TARGETS.get(target) else { return 0 };
    u32::from(is_of_collector(skb, target) || is_of_tunnel(skb))
}

/// Whether one of the packet's MAC addresses is that of the target's collector.
#[inline(always)]
fn is_of_collector(skb: *mut __sk_buff, target: &Target) -> bool {
    let collector = target.collector;
    let mut macs = [0_u8; MACS];
    // SAFETY: the context is valid for the whole program, and the buffer has this length.
    let code = unsafe { bpf_skb_load_bytes(skb.cast(), 0, macs.as_mut_ptr().cast(), MACS as u32) };
    // A frame without addresses is nobody's own, and a target without a collector has the address 0.
    if code != 0 || collector == [0; 6] {
        return false;
    }
    let is_at = |offset: usize| (0..collector.len()).all(|at| macs[offset + at] == collector[at]);
    is_at(0) || is_at(6)
}

#[inline(always)]
fn is_of_tunnel(skb: *mut __sk_buff) -> bool {
    let Some(tunnels) = TUNNELS.get(0) else { return false };
    if tunnels.count == 0 {
        return false;
    }
    let Some(header) = header::read(skb) else { return false };
    tunnel::is_of(header, tunnels)
}
