//! The second stage: cuts the copy, at the egress hook of the mirror interface.
//!
//! Cutting the pod's own packet would damage it; the copy is ours. The tap program announces the length on this CPU,
//! clones, and takes the announcement back; everything between happens on the same CPU, because the egress hook
//! runs in the sender's context, ahead of any queue. What others send through the device finds no announcement.

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, TC_ACT_UNSPEC},
    btf_maps::PerCpuArray,
    helpers::bpf_skb_change_tail,
    macros::{btf_map, classifier},
    programs::TcContext,
};

/// Bytes to keep of the copy that is being made on this CPU; 0: all of them, or there is none.
#[btf_map(pin_by_name)]
static SNAPLEN: PerCpuArray<u32, 1> = PerCpuArray::new();

/// Tells the second stage how much of the next copy it keeps.
#[inline(always)]
pub(crate) fn announce(snaplen: u32) {
    if let Some(announced) = SNAPLEN.get_ptr_mut(0) {
        // SAFETY: the element belongs to this CPU.
        unsafe { *announced = snaplen };
    }
}

/// Cuts a copy to the length that was announced.
#[classifier]
fn deliver(ctx: TcContext) -> i32 {
    if let Some(announced) = SNAPLEN.get_ptr_mut(0) {
        let skb: *mut __sk_buff = ctx.as_ptr().cast();
        // SAFETY: the element belongs to this CPU, and the context is valid for the whole program.
        let (snaplen, len, tagged) = unsafe { (*announced, (*skb).len, (*skb).vlan_present != 0) };
        // A VLAN tag in metadata is a part of what is kept.
        let kept = snaplen.saturating_sub(if tagged { 4 } else { 0 });
        if kept != 0 && kept < len {
            // Refused below the end of the transport header: the copy then stays as it is.
            // SAFETY: no packet pointer is held.
            unsafe { bpf_skb_change_tail(skb, kept, 0) };
        }
    }
    TC_ACT_UNSPEC
}
