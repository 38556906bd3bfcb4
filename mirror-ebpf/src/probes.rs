//! Programs that tests and benchmarks compare with the tap programs: one only clones, one only counts, one answers in
//! place, one hands packets to a pod behind its tap, one sends them by another device, one ends the chain for every packet,
//! and some forge marks, take them away or drop packets.
//!
//! They are no part of the product: the agent never loads this object.
#![no_std]
#![no_main]

use aya_ebpf::{
    EbpfContext as _, Global,
    bindings::{__sk_buff, TC_ACT_OK, TC_ACT_SHOT, TC_ACT_UNSPEC, xdp_action::XDP_DROP},
    helpers::{
        bpf_clone_redirect, bpf_get_prandom_u32, bpf_redirect, bpf_redirect_peer, bpf_skb_change_type,
    },
    macros::{classifier, map, xdp},
    maps::PerCpuArray,
    programs::{TcContext, XdpContext},
};

/// The device to which [`bare_clone`] clones and [`elsewhere`] sends, and to whose peer [`behind`] hands packets.
#[unsafe(no_mangle)]
static TARGET: Global<u32> = Global::new(0);

/// Packets that [`neighbour`] has seen, in element 0.
#[map]
static SEEN: PerCpuArray<u64> = PerCpuArray::with_max_entries(1, 0);

/// Clones every packet and does nothing else. This is the lowest possible cost of a mirror by `bpf_clone_redirect`.
#[classifier]
fn bare_clone(ctx: TcContext) -> i32 {
    // SAFETY: the context is a valid `__sk_buff`, and no packet pointer is held.
    unsafe { bpf_clone_redirect(ctx.as_ptr().cast(), TARGET.load(), 0) };
    TC_ACT_UNSPEC
}

/// A program at the same hook that only counts, and lets the next program run.
#[classifier]
fn neighbour(_ctx: TcContext) -> i32 {
    if let Some(seen) = SEEN.get_ptr_mut(0) {
        // SAFETY: the element belongs to this CPU.
        unsafe { *seen += 1 };
    }
    TC_ACT_UNSPEC
}

/// Sends every packet back to the device that it came from, with the sender's MAC address as the destination, as a CNI
/// does that answers at the hook.
#[classifier]
fn answer(ctx: TcContext) -> i32 {
    const MAC: usize = 6;
    let Ok(sender) = ctx.load::<[u8; MAC]>(MAC) else { return TC_ACT_UNSPEC };
    if ctx.store(0, &sender, 0).is_err() {
        return TC_ACT_UNSPEC;
    }
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    // SAFETY: the context is valid for the whole program, and the helper has no preconditions.
    unsafe { bpf_redirect((*skb).ifindex, 0) as i32 }
}

/// Hands every packet to the NIC at the other end of a veth, so that it does not pass the node's end, as eBPF host
/// routing does.
#[classifier]
fn behind(ctx: TcContext) -> i32 {
    to_peer(&ctx)
}

/// The same, under the name of Cilium's program at the node's end of a pod's veth.
#[classifier]
fn cil_from_container(ctx: TcContext) -> i32 {
    to_peer(&ctx)
}

/// Has the name of Cilium's other program at the node's end, and lets every packet pass.
#[classifier]
fn cil_to_container(_ctx: TcContext) -> i32 {
    TC_ACT_UNSPEC
}

/// Sends every packet by another device, as a CNI does with what a pod sends.
#[classifier]
fn elsewhere(_ctx: TcContext) -> i32 {
    // SAFETY: the helper has no preconditions.
    unsafe { bpf_redirect(TARGET.load(), 0) as i32 }
}

/// The packet has the NIC's MAC address, so the device that received it took it for another host's, and the pod of an older
/// kernel (5.10) would drop it for that.
#[inline(always)]
fn to_peer(ctx: &TcContext) -> i32 {
    const PACKET_HOST: u32 = 0;
    // SAFETY: the context is valid for the whole program, and the helpers have no other preconditions.
    unsafe {
        bpf_skb_change_type(ctx.as_ptr().cast(), PACKET_HOST);
        bpf_redirect_peer(TARGET.load(), 0) as i32
    }
}

/// A program that ends the chain for every packet: the programs behind it see no packet.
#[classifier]
fn last_word(_ctx: TcContext) -> i32 {
    TC_ACT_OK
}

/// Puts random numbers where a packet carries marks of other programs, and lets it pass.
#[classifier]
fn forger(ctx: TcContext) -> i32 {
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    // SAFETY: the context is valid for the whole program, tc programs may write these fields, and the helper has no
    // preconditions.
    unsafe {
        (*skb).tc_index = bpf_get_prandom_u32() & 0xffff;
        (*skb).mark = bpf_get_prandom_u32();
        (*skb).priority = bpf_get_prandom_u32();
    }
    TC_ACT_UNSPEC
}

const EXPERIMENTAL: [u8; 2] = 0x88b5_u16.to_be_bytes();
/// Behind the header and six bytes.
const CHOICE: usize = 20;

/// Puts a mark of the sender's choice on a packet of an experimental ethertype: two bytes of the packet say it. Lets every
/// packet pass.
#[classifier]
fn marker(ctx: TcContext) -> i32 {
    if let (Ok(EXPERIMENTAL), Ok(choice)) = (ctx.load::<[u8; 2]>(12), ctx.load::<[u8; 2]>(CHOICE)) {
        let skb: *mut __sk_buff = ctx.as_ptr().cast();
        // SAFETY: the context is valid for the whole program, and tc programs may write this field.
        unsafe { (*skb).tc_index = u16::from_be_bytes(choice).into() };
    }
    TC_ACT_UNSPEC
}

/// Counts in a packet of the experimental ethertype how often it has passed, and takes its mark the first time. Lets every
/// packet pass.
#[classifier]
fn unmarker(ctx: TcContext) -> i32 {
    if let (Ok(EXPERIMENTAL), Ok(passed)) = (ctx.load::<[u8; 2]>(12), ctx.load::<[u8; 2]>(CHOICE)) {
        let passed = u16::from_be_bytes(passed);
        if passed == 0 {
            let skb: *mut __sk_buff = ctx.as_ptr().cast();
            // SAFETY: the context is valid for the whole program, and tc programs may write this field.
            unsafe { (*skb).tc_index = 0 };
        }
        let _ = ctx.store(CHOICE, &passed.wrapping_add(1).to_be_bytes(), 0);
    }
    TC_ACT_UNSPEC
}

/// Drops every packet.
#[classifier]
fn swallow(_ctx: TcContext) -> i32 {
    TC_ACT_SHOT
}

/// The same, ahead of all hooks of tc.
#[xdp]
fn swallow_early(_ctx: XdpContext) -> u32 {
    XDP_DROP
}

#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    // Never reached: the verifier refuses a program that could loop here.
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
