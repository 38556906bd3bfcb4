//! Which packets must not be copied to a target, because they would come back or arrive twice.
//!
//! * The packets of a tunnel of ours bring copies of another node. A copy of such a packet could be copied there again,
//!   and so on. A packet that leaves a pod brings nothing, so a pod cannot hide its packets by making them look so.
//! * A collector, which is a pod, gets its own packets anyway. On a bridge, other taps see these packets too. Its network
//!   stack would take a copy with its own address for a packet that has arrived twice. Packets from the collector are
//!   known by the device that the node has received them at, because any pod can use any MAC address. Packets to it are
//!   known by their MAC address, where the node or a bridge takes them to the collector by this address.
//!
//! The decision asks for targets with [`TARGET_GUARDED`](mirror_common::abi::TARGET_GUARDED) alone, so that other nodes
//! pay nothing.

use aya_ebpf::{bindings::__sk_buff, btf_maps::Array, helpers::bpf_skb_load_bytes, macros::btf_map};
use mirror_common::{
    abi::{TARGET_BRIDGED, Target},
    tunnel::{self, Tunnels},
};

use crate::{INSIDE, TARGETS, header};

/// The tunnels of this node's targets. All agents of a cluster have the same.
#[btf_map(pin_by_name)]
static TUNNELS: Array<Tunnels, 1> = Array::new();

/// Bytes of a MAC address; that of the receiver is at the beginning of a frame.
const MAC: usize = 6;

/// 1 if the packet must not be copied to this target, else 0. `leaves_pod`: 1 at a hook where packets leave a pod, else 0.
///
/// This is a global function, so the verifier goes through it once, and not again for each session of a tap.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn refuses(skb: *mut __sk_buff, target: u32, leaves_pod: u32) -> u32 {
    let Some(target) = TARGETS.get(target) else { return 0 };
    u32::from(is_of_collector(skb, target, leaves_pod) || (leaves_pod == 0 && is_of_tunnel(skb)))
}

/// Whether the packet comes from the target's collector, or goes to it.
#[inline(always)]
fn is_of_collector(skb: *mut __sk_buff, target: &Target, leaves_pod: u32) -> bool {
    if target.collector == [0; MAC] {
        return false;
    }
    // SAFETY: the context is valid for the whole program.
    let from = unsafe { (*skb).ingress_ifindex };
    // The node's own packets come from no device, and inside a pod the indexes are others.
    if from != 0 && from == target.ifindex && INSIDE.load() == 0 {
        return true;
    }
    // Without a bridge, such a packet goes elsewhere, or nowhere: only a pod that hides its packets sends it.
    if leaves_pod != 0 && (target.flags & TARGET_BRIDGED == 0 || INSIDE.load() != 0) {
        return false;
    }
    let mut receiver = [0_u8; MAC];
    // SAFETY: as above, and the buffer has this length.
    let code = unsafe { bpf_skb_load_bytes(skb.cast(), 0, receiver.as_mut_ptr().cast(), MAC as u32) };
    // A frame without addresses is for nobody.
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
