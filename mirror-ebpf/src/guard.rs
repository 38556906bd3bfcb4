//! Detects packets that must not be copied to a target, because the copies would loop or arrive twice.
//!
//! * Packets of podmirror's own tunnels contain copies from another node. A copy of one could be copied there again,
//!   and so on. A packet that leaves a pod contains no copy, so no pod can hide packets by imitating a tunnel.
//! * A collector, which is a pod, gets its own packets anyway, and its network stack would treat a copy with its own
//!   address as a duplicate. On a bridge, other taps see these packets too. Packets from it are recognised by the
//!   device on which the node received them, because any pod can use any MAC address; packets to it by their MAC
//!   address, unless they leave a pod that is not on the collector's bridge.
//!
//! Called only for targets with [`TARGET_GUARDED`](mirror_common::abi::TARGET_GUARDED), so that other nodes have no
//! cost.

use aya_ebpf::{bindings::__sk_buff, btf_maps::Array, helpers::bpf_skb_load_bytes, macros::btf_map};
use mirror_common::{
    abi::Target,
    tunnel::{self, Tunnels},
};

use crate::{INSIDE, TARGETS, header};

/// The tunnels of this node's targets. All agents of a cluster have the same.
#[btf_map(pin_by_name)]
static TUNNELS: Array<Tunnels, 1> = Array::new();

/// Length of a MAC address; that of the receiver is at the beginning of a frame.
const MAC: usize = 6;

/// Returns 1 if the packet must not be copied to this target, else 0. `leaves_pod`: 1 at a hook where it leaves a pod.
/// `bridge`: [`Tap::bridge`](mirror_common::abi::Tap::bridge).
///
/// A global function, so the verifier checks it once, and not again for each session of a tap.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn refuses(skb: *mut __sk_buff, target: u32, leaves_pod: u32, bridge: u32) -> u32 {
    let Some(target) = TARGETS.get(target) else { return 0 };
    u32::from(is_of_collector(skb, target, leaves_pod, bridge) || (leaves_pod == 0 && is_of_tunnel(skb)))
}

/// Whether the target's collector is the sender or the receiver of the packet.
#[inline(always)]
fn is_of_collector(skb: *mut __sk_buff, target: &Target, leaves_pod: u32, bridge: u32) -> bool {
    if target.collector == [0; MAC] {
        return false;
    }
    // SAFETY: the context is valid for the whole program.
    let from = unsafe { (*skb).ingress_ifindex };
    // The node's own packets have no ingress device, and indexes inside a pod belong to another namespace.
    if from != 0 && from == target.ifindex && INSIDE.load() == 0 {
        return true;
    }
    // Away from the collector's bridge, such a packet does not reach it by this bridge: it may be one that a pod hides.
    if leaves_pod != 0 && (bridge == 0 || bridge != target.bridge || INSIDE.load() != 0) {
        return false;
    }
    let mut receiver = [0_u8; MAC];
    // SAFETY: as above, and the buffer has this length.
    let code = unsafe { bpf_skb_load_bytes(skb.cast(), 0, receiver.as_mut_ptr().cast(), MAC as u32) };
    // A frame that is too short has no receiver.
    code == 0 && receiver == target.collector
}

#[inline(always)]
fn is_of_tunnel(skb: *mut __sk_buff) -> bool {
    match TUNNELS.get(0) {
        Some(tunnels) if tunnels.count != 0 => {
            header::read(skb).is_some_and(|header| tunnel::is_of(header, tunnels))
        }
        _ => false,
    }
}
