//! The second stage: cuts the copy, at the egress hook of the mirror interface.
//!
//! Cutting the pod's own packet would damage it; the copy is ours. The tap program announces the length on this CPU,
//! clones, and takes the announcement back; everything between happens on the same CPU, because the egress hook
//! runs in the sender's context, ahead of any queue. What others send through the device finds no announcement.

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, TC_ACT_SHOT, TC_ACT_UNSPEC},
    btf_maps::PerCpuArray,
    helpers::bpf_skb_change_tail,
    macros::{btf_map, classifier},
    programs::TcContext,
};
use mirror_common::abi::Delivery;

/// What the tap and the second stage tell each other about the copy that is being made on this CPU.
#[btf_map(pin_by_name)]
static DELIVERY: PerCpuArray<Delivery, 1> = PerCpuArray::new();

/// Has the second stage cut the copy that `clone` makes, and says whether the copy could not be cut.
#[inline(always)]
pub(crate) fn cutting(snaplen: u32, clone: impl FnOnce() -> i64) -> (i64, bool) {
    // Never happens; and a copy that nobody can be told to cut is not made.
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

/// Cuts a copy to the length that was announced, or drops it. Anything else passes.
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
    // The copy of a tap, which has announced it: never the packet of anybody else.
    TC_ACT_SHOT
}
