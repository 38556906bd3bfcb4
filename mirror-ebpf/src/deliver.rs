//! The second stage: cuts the copy, at the egress hook of the mirror interface.
//!
//! A tap cannot cut the pod's own packet, because that would damage it. So the tap program announces the length on this
//! CPU, clones the packet, and takes the announcement back. Everything between happens on the same CPU, because the
//! egress hook runs in the sender's context, ahead of any queue. For a packet of another sender no length is announced,
//! so `deliver` does not change it.

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, TC_ACT_SHOT, TC_ACT_UNSPEC},
    btf_maps::PerCpuArray,
    helpers::bpf_skb_change_tail,
    macros::{btf_map, classifier},
    programs::TcContext,
};
use mirror_common::abi::Delivery;

/// The length that the tap announces to `deliver`, and whether `deliver` could cut the copy; for the copy that is being
/// made on this CPU.
#[btf_map(pin_by_name)]
static DELIVERY: PerCpuArray<Delivery, 1> = PerCpuArray::new();

/// Announces `snaplen` to the second stage while `clone` makes a copy. Returns the code of `clone`, and whether the
/// second stage could not cut the copy.
#[inline(always)]
pub(crate) fn cutting(snaplen: u32, clone: impl FnOnce() -> i64) -> (i64, bool) {
    // The map always has element 0. Without it `deliver` could not learn the length, so no copy is made.
    let Some(delivery) = DELIVERY.get_ptr_mut(0) else { return (0, true) };
    // SAFETY: the element belongs to this CPU, and is valid for the whole program.
    unsafe { *delivery = Delivery { snaplen, uncut: 0 } };
    let code = clone();
    // SAFETY: as above. The second stage writes it meanwhile, which the compiler knows: the clone is a call.
    let is_uncut = unsafe { (*delivery).uncut != 0 };
    // SAFETY: as above.
    unsafe { (*delivery).snaplen = 0 };
    (code, is_uncut)
}

/// Cuts a copy to the announced length. Drops the copy if the kernel cannot cut it. All other packets pass.
#[classifier]
fn deliver(ctx: TcContext) -> i32 {
    let Some(delivery) = DELIVERY.get_ptr_mut(0) else { return TC_ACT_UNSPEC };
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    // SAFETY: the element belongs to this CPU, and the context is valid for the whole program.
    let (snaplen, len, tagged) = unsafe { ((*delivery).snaplen, (*skb).len, (*skb).vlan_present != 0) };
    // A VLAN tag in metadata is a part of what is kept.
    let kept = snaplen.saturating_sub(if tagged { 4 } else { 0 });
    if snaplen == 0 || len <= kept {
        return TC_ACT_UNSPEC;
    }
    // Refused for a copy of a tunnel's packet, for less than the headers, for more than four pages, and without memory.
    // SAFETY: no packet pointer is held.
    if unsafe { bpf_skb_change_tail(skb, kept, 0) } == 0 {
        return TC_ACT_UNSPEC;
    }
    // SAFETY: as above.
    unsafe { (*delivery).uncut = 1 };
    // Only a copy of our tap is dropped here, because only a tap announces a length.
    TC_ACT_SHOT
}
