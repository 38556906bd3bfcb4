//! Programs for tests and benchmarks: one only clones, one only counts, one answers in place, one redirects packets to
//! a pod past its tap, one sends them by another device, one ends the chain for every packet, and some forge marks,
//! remove them or drop packets.
//!
//! They are not part of the product: the agent never loads this object.
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

/// The device to which [`bare_clone`] clones and [`elsewhere`] sends, and to whose peer [`behind`] redirects packets.
#[unsafe(no_mangle)]
static TARGET: Global<u32> = Global::new(0);

/// Packets that [`neighbour`] has seen, in element 0.
#[map]
static SEEN: PerCpuArray<u64> = PerCpuArray::with_max_entries(1, 0);

/// Clones every packet and does nothing else: the lower bound of the cost of a mirror by `bpf_clone_redirect`.
#[classifier]
fn bare_clone(ctx: TcContext) -> i32 {
    // SAFETY: the context is a valid `__sk_buff`, and no packet pointer is held.
    unsafe { bpf_clone_redirect(ctx.as_ptr().cast(), TARGET.load(), 0) };
    TC_ACT_UNSPEC
}

/// A program at the same hook that only counts, and passes the packet to the next program.
#[classifier]
fn neighbour(_ctx: TcContext) -> i32 {
    if let Some(seen) = SEEN.get_ptr_mut(0) {
        // SAFETY: the element belongs to this CPU.
        unsafe { *seen += 1 };
    }
    TC_ACT_UNSPEC
}

/// Sends every packet back to the device that it came from, with the sender's MAC address as the destination, like a
/// CNI that answers at the hook.
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

/// Redirects every packet to the NIC at the other end of a veth, so that it bypasses the node side, like eBPF host
/// routing.
#[classifier]
fn behind(ctx: TcContext) -> i32 {
    to_peer(&ctx)
}

/// The same, under the name of Cilium's program on the node side of a pod's veth.
#[classifier]
fn cil_from_container(ctx: TcContext) -> i32 {
    to_peer(&ctx)
}

/// Lets every packet pass, under the name of Cilium's other program on the node side.
#[classifier]
fn cil_to_container(_ctx: TcContext) -> i32 {
    TC_ACT_UNSPEC
}

/// Sends every packet by another device, as a CNI does with the packets of a pod.
#[classifier]
fn elsewhere(_ctx: TcContext) -> i32 {
    // SAFETY: the helper has no preconditions.
    unsafe { bpf_redirect(TARGET.load(), 0) as i32 }
}

/// The packet has the NIC's MAC address, so the receiving device classified it as another host's, and an older kernel
/// (5.10) in the pod would drop it for that.
#[inline(always)]
fn to_peer(ctx: &TcContext) -> i32 {
    const PACKET_HOST: u32 = 0;
    // SAFETY: the context is valid for the whole program, and the helpers have no other preconditions.
    unsafe {
        bpf_skb_change_type(ctx.as_ptr().cast(), PACKET_HOST);
        bpf_redirect_peer(TARGET.load(), 0) as i32
    }
}

/// Ends the chain for every packet: later programs see no packet.
#[classifier]
fn last_word(_ctx: TcContext) -> i32 {
    TC_ACT_OK
}

/// Writes random numbers to the fields with marks of other programs, and lets the packet pass.
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
/// After the Ethernet header and six bytes.
const CHOICE: usize = 20;

/// Writes a mark of the sender's choice to a packet of an experimental ethertype: two bytes of the packet contain it.
/// Lets every packet pass.
#[classifier]
fn marker(ctx: TcContext) -> i32 {
    if let (Ok(EXPERIMENTAL), Ok(choice)) = (ctx.load::<[u8; 2]>(12), ctx.load::<[u8; 2]>(CHOICE)) {
        let skb: *mut __sk_buff = ctx.as_ptr().cast();
        // SAFETY: the context is valid for the whole program, and tc programs may write this field.
        unsafe { (*skb).tc_index = u16::from_be_bytes(choice).into() };
    }
    TC_ACT_UNSPEC
}

/// Counts in a packet of the experimental ethertype how often it has passed, and removes its mark the first time. Lets
/// every packet pass.
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

/// The same, before all tc hooks.
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
