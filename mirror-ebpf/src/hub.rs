//! The relay hub: forwards the copies that leave pods by their relay devices (`exit`) to the targets.
//!
//! `bpf_clone_redirect` looks up a device in the network namespace of the packet. So a tap inside a pod clones to the
//! pod's relay device, a private macvlan over the hub, which is a device of the node. This program runs at the hub's
//! egress hook, in the context of the tap: it makes the clone for the target, and records the outcome for the tap. No
//! packet leaves the hub itself: what no tap has announced on this CPU was sent by a program in a pod.

use aya_ebpf::{
    EbpfContext as _,
    bindings::{__sk_buff, TC_ACT_SHOT},
    helpers::bpf_clone_redirect,
    macros::classifier,
    programs::TcContext,
};
use mirror_common::{
    abi::{HUB_EXPECTED, HUB_PASSED},
    marks,
};

use crate::{TARGETS, deliver::DELIVERY};

/// Clones an announced copy to its target. Drops every packet.
#[classifier]
fn hub(ctx: TcContext) -> i32 {
    let Some(delivery) = DELIVERY.get_ptr_mut(0) else { return TC_ACT_SHOT };
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    // SAFETY: the element belongs to this CPU.
    let announced = unsafe { *delivery };
    // SAFETY: the context is valid for the whole program.
    let is_copy = marks::is_copy(unsafe { (*skb).tc_index } as u16);
    // One packet for each announcement: a program in the pod could queue packets until a copy is announced.
    if announced.target == 0 || announced.hub != HUB_EXPECTED || !is_copy {
        return TC_ACT_SHOT;
    }
    let Some(target) = TARGETS.get(announced.target - 1) else { return TC_ACT_SHOT };
    // SAFETY: the element belongs to this CPU, the context is valid, and no packet pointer is held.
    unsafe {
        (*delivery).hub = HUB_PASSED;
        (*delivery).code = bpf_clone_redirect(skb, target.ifindex, 0) as i32;
    }
    TC_ACT_SHOT
}
