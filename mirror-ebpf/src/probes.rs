//! Programs that tests and benchmarks hold against ours: a bare clone, a neighbour that only counts, one that answers
//! in place, and one that ends the way of every packet.
//!
//! No part of the product: the agent never loads this object.
#![no_std]
#![no_main]

use aya_ebpf::{
    EbpfContext as _, Global,
    bindings::{__sk_buff, TC_ACT_OK, TC_ACT_UNSPEC},
    helpers::{bpf_clone_redirect, bpf_redirect},
    macros::{classifier, map},
    maps::PerCpuArray,
    programs::TcContext,
};

/// The device to which [`bare_clone`] clones.
#[unsafe(no_mangle)]
static TARGET: Global<u32> = Global::new(0);

/// Packets that [`neighbour`] has seen, in element 0.
#[map]
static SEEN: PerCpuArray<u64> = PerCpuArray::with_max_entries(1, 0);

/// Clones every packet and does nothing else: the least that a mirror by `bpf_clone_redirect` can cost.
#[classifier]
fn bare_clone(ctx: TcContext) -> i32 {
    // SAFETY: the context is a valid `__sk_buff`, and no packet pointer is held.
    unsafe { bpf_clone_redirect(ctx.as_ptr().cast(), TARGET.load(), 0) };
    TC_ACT_UNSPEC
}

/// Another program on the same hook: counts and lets the next one run.
#[classifier]
fn neighbour(_ctx: TcContext) -> i32 {
    if let Some(seen) = SEEN.get_ptr_mut(0) {
        // SAFETY: the element belongs to this CPU.
        unsafe { *seen += 1 };
    }
    TC_ACT_UNSPEC
}

/// Sends every packet back to the device that it came from, with the sender's address as the receiver's: as a CNI does
/// that answers in place.
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

/// Another program that ends the way of every packet at its hook: what is behind it sees nothing.
#[classifier]
fn last_word(_ctx: TcContext) -> i32 {
    TC_ACT_OK
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
