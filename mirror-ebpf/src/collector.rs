//! Whether a packet is the collector's own: from it or to it, by the MAC addresses.
//!
//! The collector is a pod that is a target. On a bridge, other taps see its packets too. Copies of these would be in its
//! captures a second time, and its network stack would take those with its own address for packets that have arrived
//! twice. Called by the decision, for targets that are pods alone.

use aya_ebpf::{bindings::__sk_buff, helpers::bpf_skb_load_bytes};

use crate::TARGETS;

/// Bytes of the two MAC addresses of a frame.
const MACS: usize = 12;

/// 1 if one of the packet's MAC addresses is that of the collector of this target, else 0.
///
/// This is a global function, so the verifier goes through it once, and not again for each session of a tap.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn owns(skb: *mut __sk_buff, target: u32) -> u32 {
    let Some(target) = TARGETS.get(target) else { return 0 };
    let mut macs = [0_u8; MACS];
    // SAFETY: the context is valid for the whole program, and the buffer has this length.
    let code = unsafe { bpf_skb_load_bytes(skb.cast(), 0, macs.as_mut_ptr().cast(), MACS as u32) };
    // A frame without addresses is nobody's own.
    if code != 0 {
        return 0;
    }
    let is_at =
        |offset: usize| (0..target.collector.len()).all(|at| macs[offset + at] == target.collector[at]);
    u32::from(is_at(0) || is_at(6))
}
