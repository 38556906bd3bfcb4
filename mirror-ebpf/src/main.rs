//! The tap programs: glue between the kernel and the decision in `mirror-common`.
//!
//! The agent attaches `tap_ingress` and `tap_egress` to the tc hooks of every tapped device. They look the device
//! up, ask `mirror_common::decide` for each session, clone, and count. They decide nothing themselves, and whatever happens
//! they return `TC_ACT_UNSPEC`: the pod's packet goes on to the next program as if we were not there.
#![no_std]
#![no_main]

use aya_ebpf::{
    EbpfContext as _, Global,
    bindings::{__sk_buff, BPF_F_NO_PREALLOC, TC_ACT_UNSPEC},
    btf_maps::{Array, HashMap, PerCpuArray},
    helpers::bpf_clone_redirect,
    macros::{btf_map, classifier},
    programs::TcContext,
};
use mirror_common::{
    abi::{
        Counter, MAX_SESSIONS, MAX_SESSIONS_PER_TAP, MAX_TAPS, MAX_TARGETS, Session, SessionCounters,
        TAP_AT_PEER, Tap, TapOwner, Target,
    },
    decide::{Packet, chosen, is_marked, mark, outcome, reachable, wanted},
    filter::{FilterProgram, MAX_FILTERS},
    verdict::{Direction, Hook, Verdict},
};

mod deliver;
mod header;
mod meter;

/// Device to tap. Not preallocated: a freed element of a preallocated map is used again at once, and a program
/// that still reads it could see another tap.
#[btf_map(pin_by_name)]
static TAPS: HashMap<u32, Tap, { MAX_TAPS as usize }, { BPF_F_NO_PREALLOC as usize }> = HashMap::new();

/// Device to the pod and NIC that its tap is for. The programs do not use it; it is here to be pinned with the rest.
#[btf_map(pin_by_name)]
static TAP_OWNERS: HashMap<u32, TapOwner, { MAX_TAPS as usize }, { BPF_F_NO_PREALLOC as usize }> =
    HashMap::new();

/// Where copies go.
#[btf_map(pin_by_name)]
static TARGETS: Array<Target, { MAX_TARGETS as usize }> = Array::new();

/// The filters of the sessions; those with the same filter share one.
#[btf_map(pin_by_name)]
static FILTERS: Array<FilterProgram, { MAX_FILTERS as usize }> = Array::new();

/// What became of the packets of each session.
#[btf_map(pin_by_name)]
static COUNTERS: PerCpuArray<SessionCounters, { MAX_SESSIONS as usize }> = PerCpuArray::new();

/// Not 0 in a program that stands behind another one of ours at the same hook, while the agent changes the way to
/// attach. Such a program copies nothing that the one ahead of it has copied, not even what leaves a pod.
#[unsafe(no_mangle)]
static STANDS_BEHIND: Global<u32> = Global::new(0);

/// At the hook where the device has received a packet.
#[classifier]
fn tap_ingress(ctx: TcContext) -> i32 {
    mirror(&ctx, Hook::Ingress);
    TC_ACT_UNSPEC
}

/// At the hook where the device is about to send a packet.
#[classifier]
fn tap_egress(ctx: TcContext) -> i32 {
    mirror(&ctx, Hook::Egress);
    TC_ACT_UNSPEC
}

/// Runs every session of the device's tap. Returns nothing, so that no code of a helper can become a verdict.
#[inline(always)]
fn mirror(ctx: &TcContext, hook: Hook) {
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    // SAFETY: the verifier guarantees that the context is valid for the whole program.
    let ifindex = unsafe { (*skb).ifindex };
    // SAFETY: the agent replaces whole entries and never writes into one, see the map's definition.
    let Some(tap) = (unsafe { TAPS.get(&ifindex) }) else { return };
    for index in 0..MAX_SESSIONS_PER_TAP {
        if index as u32 >= tap.session_count {
            return;
        }
        run(skb, hook, ifindex, tap, &tap.sessions[index]);
    }
}

/// Takes the packet through one session and counts its verdict.
#[inline(always)]
fn run(skb: *mut __sk_buff, hook: Hook, ifindex: u32, tap: &Tap, session: &Session) {
    // SAFETY: as in `mirror`; `tc_index` can be read and written by tc programs.
    let (len, tc_index) = unsafe { ((*skb).len, (*skb).tc_index as u16) };
    // The verifier knows the value, and leaves the test out of a program that stands alone.
    if STANDS_BEHIND.load() != 0 && is_marked(tc_index, session.target) {
        return;
    }
    let packet = Packet { hook, ifindex, tc_index };
    let verdict = match copy(skb, packet, tap, session, len) {
        Ok(()) => Verdict::Copied,
        Err(verdict) => verdict,
    };
    count(session.id, Direction::at(hook, tap.flags & TAP_AT_PEER != 0), verdict, len);
}

/// Copies the packet, unless something speaks against it.
#[inline(always)]
fn copy(skb: *mut __sk_buff, packet: Packet, tap: &Tap, session: &Session, len: u32) -> Result<(), Verdict> {
    wanted(packet, tap, session)?;
    if session.filter != 0 || session.sample != 0 {
        let verdict = pick(skb, session.filter, session.sample, session.seed);
        if verdict != CHOSEN {
            return Err(refusal(verdict));
        }
    }
    let target = TARGETS.get(session.target).ok_or(Verdict::Failed)?;
    let to = reachable(packet, target)?;
    meter::take(session, target, len)?;

    deliver::announce(session.snaplen);
    // The copy carries the mark too: should it ever come back to a tap, it is not copied again.
    // SAFETY: as in `run`.
    unsafe { (*skb).tc_index = u32::from(mark(packet.tc_index, session.target)) };
    // SAFETY: the context is a valid `__sk_buff`, and no packet pointer is held.
    let code = unsafe { bpf_clone_redirect(skb, to, 0) };
    deliver::announce(0);
    match outcome(code as i64, target) {
        Verdict::Copied => Ok(()),
        verdict => {
            // SAFETY: as in `run`.
            unsafe { (*skb).tc_index = u32::from(packet.tc_index) };
            meter::give_back(session, target, len);
            Err(verdict)
        }
    }
}

/// Whether filter and sample choose the packet: [`CHOSEN`], or the number of a verdict.
///
/// A global function, so that the verifier goes through its loop once, and not again for every way that leads to it:
/// a context and numbers are all that such a function can be given (before Linux 5.12).
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn pick(skb: *mut __sk_buff, filter: u32, share: u32, seed: u32) -> u32 {
    let Some(header) = header::read(skb) else { return Verdict::Failed as u32 };
    let filter = if filter == 0 {
        None
    } else {
        match FILTERS.get(filter - 1) {
            None => return Verdict::Failed as u32,
            filter => filter,
        }
    };
    match chosen(filter, share, seed, header) {
        Ok(()) => CHOSEN,
        Err(verdict) => verdict as u32,
    }
}

/// What [`pick`] returns for a packet that is chosen: no verdict.
const CHOSEN: u32 = Verdict::SLOTS as u32;

#[inline(always)]
const fn refusal(verdict: u32) -> Verdict {
    if verdict == Verdict::Filtered as u32 {
        Verdict::Filtered
    } else if verdict == Verdict::SampledOut as u32 {
        Verdict::SampledOut
    } else {
        Verdict::Failed
    }
}

/// Counts one packet of `len` bytes on this CPU.
#[inline(always)]
fn count(session: u32, direction: Direction, verdict: Verdict, len: u32) {
    let Some(counters) = COUNTERS.get_ptr_mut(session) else { return };
    // The mask must be seen by the verifier, which does not know what the compiler has concluded already.
    let verdict = core::hint::black_box(verdict as u32) as usize & (Verdict::SLOTS - 1);
    // SAFETY: the element belongs to this CPU. A program that interrupts this one on the same CPU between load and
    // store (a softirq over a process's own transmission) is excluded: tc runs with softirqs disabled.
    let Counter { packets, bytes } = unsafe { &mut (*counters).counters[direction as usize][verdict] };
    *packets += 1;
    *bytes += u64::from(len);
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
