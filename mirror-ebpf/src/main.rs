//! The tap programs: glue between the kernel and the decision in `mirror-common`.
//!
//! The agent attaches `tap_ingress` and `tap_egress` to the tc hooks of every tapped device. The programs look up the
//! device's tap, and `mirror_common::decide` decides about the packet for each of the tap's sessions. This file
//! implements `Kernel` with maps and helpers. The programs always return `TC_ACT_UNSPEC`, so the next program gets the
//! packet.
#![no_std]
#![no_main]
// The atomic addition of `stream`.
#![feature(asm_experimental_arch)]

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
        Counter, DeviceKey, MAX_SESSIONS, MAX_TAPS, SESSION_FILTERED, Session, SessionCounters, SessionInfo,
        TAP_CAPTURES_ONLY, TARGET_PLACES, Tap, TapOwner, Target,
    },
    decide::{self, Cloned, Kernel, Packet, Reach},
    filter::{FILTER_PLACES, FilterProgram},
    limit::charge::Paid,
    marks,
    verdict::{Direction, Hook, Verdict},
};

mod deliver;
mod header;
mod meter;
mod stream;

/// Flag of a map: the kernel does not preallocate the elements. It reuses a freed element of a preallocated map at
/// once, so a program that still reads the element could see another tap.
const NO_PREALLOC: usize = BPF_F_NO_PREALLOC as usize;

/// From a device to its tap.
#[btf_map(pin_by_name)]
static TAPS: HashMap<DeviceKey, Tap, { MAX_TAPS as usize }, NO_PREALLOC> = HashMap::new();

/// From a device to the pod and NIC of its tap. The programs do not use this map; here it is pinned with the others.
#[btf_map(pin_by_name)]
static TAP_OWNERS: HashMap<DeviceKey, TapOwner, { MAX_TAPS as usize }, NO_PREALLOC> = HashMap::new();

/// From a session to its names and settings, for the reports of the agent. The programs do not use this map either.
#[btf_map(pin_by_name)]
static SESSION_INFO: HashMap<u32, SessionInfo, { MAX_SESSIONS as usize }, NO_PREALLOC> = HashMap::new();

/// The targets, by their index in a session.
#[btf_map(pin_by_name)]
static TARGETS: Array<Target, { TARGET_PLACES as usize }> = Array::new();

/// The filters of the sessions. Sessions with the same filter share one element.
#[btf_map(pin_by_name)]
static FILTERS: Array<FilterProgram, { FILTER_PLACES as usize }> = Array::new();

/// The counters of each session. The agent sets the size of the map from the number of CPUs.
#[btf_map(pin_by_name)]
static COUNTERS: PerCpuArray<SessionCounters, { MAX_SESSIONS as usize }> = PerCpuArray::new();

/// The ifindex of the tap that last copied a packet on this CPU. The map is not pinned, because its value matters only
/// while one packet crosses the node.
#[btf_map]
static ORIGIN: PerCpuArray<u32, 1> = PerCpuArray::new();

/// The network namespace in the keys of `TAPS`; 0 is that of the agent.
const NETNS: u32 = 0;

/// Not 0 in a program that runs behind another tap program of ours at the same hook, while the agent changes the way to
/// attach. Such a program ignores every packet that carries a mark, also a packet that leaves a pod.
#[unsafe(no_mangle)]
static STANDS_BEHIND: Global<u32> = Global::new(0);

/// Runs at the hook where the device has received a packet.
#[classifier]
fn tap_ingress(ctx: TcContext) -> i32 {
    mirror(&ctx, Hook::Ingress);
    TC_ACT_UNSPEC
}

/// Runs at the hook where the device is about to send a packet.
#[classifier]
fn tap_egress(ctx: TcContext) -> i32 {
    mirror(&ctx, Hook::Egress);
    TC_ACT_UNSPEC
}

/// Runs every session of the device's tap. It returns nothing, so the code of a helper cannot become a verdict.
#[inline(always)]
fn mirror(ctx: &TcContext, hook: Hook) {
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    // SAFETY: the verifier guarantees that the context is valid for the whole program.
    let ifindex = unsafe { (*skb).ifindex };
    let Some(tap) = tap(ifindex) else { return };
    // SAFETY: as above.
    let (ingress_ifindex, tc_index, len) =
        unsafe { ((*skb).ingress_ifindex, (*skb).tc_index as u16, (*skb).len) };
    if marks::forms(tc_index) != 0 && STANDS_BEHIND.load() != 0 {
        return;
    }
    let packet = Packet { hook, ifindex, ingress_ifindex, tc_index };
    decide::mirror(&mut Skb { skb, tc_index, len }, packet, tap);
}

/// The tap of a device.
#[inline(always)]
fn tap(ifindex: u32) -> Option<&'static Tap> {
    // SAFETY: the agent replaces whole entries and never writes into one, see `NO_PREALLOC`.
    unsafe { TAPS.get(&DeviceKey { netns: NETNS, ifindex }) }
}

/// The packet, with the kernel's helpers for it.
struct Skb {
    skb: *mut __sk_buff,
    /// Its `tc_index` at the start of the program.
    tc_index: u16,
    /// Its length in bytes.
    len: u32,
}

impl Kernel for Skb {
    #[inline(always)]
    fn sift(&mut self, session: &Session) -> Result<(), Verdict> {
        let Session { flags, filter, sample, seed, .. } = *session;
        match sift(self.skb, flags, filter, sample, seed) {
            PASSES => Ok(()),
            FILTERED => Err(Verdict::Filtered),
            SAMPLED_OUT => Err(Verdict::SampledOut),
            _ => Err(Verdict::Failed),
        }
    }

    #[inline(always)]
    fn target(&mut self, index: u32) -> Option<Reach> {
        let Target { ifindex, flags, .. } = TARGETS.get(index)?;
        Some(Reach { ifindex: *ifindex, flags: *flags })
    }

    #[inline(always)]
    fn charge(&mut self, tap: &Tap, session: &Session) -> Result<Paid, Verdict> {
        meter::take(tap, session, self.len)
    }

    #[inline(always)]
    fn give_back(&mut self, tap: &Tap, session: &Session, paid: Paid) {
        meter::give_back(tap, session, self.len, paid);
    }

    #[inline(always)]
    fn clone_to(&mut self, ifindex: u32, tc_index: u16, snaplen: u32) -> Cloned {
        let before = self.tc_index;
        self.set_tc_index(tc_index);
        let skb = self.skb;
        // SAFETY: the context is a valid `__sk_buff`, and no packet pointer is held.
        let clone = || unsafe { bpf_clone_redirect(skb, ifindex, 0) as i64 };
        let (code, is_uncut) = if snaplen == 0 { (clone(), false) } else { deliver::cutting(snaplen, clone) };
        self.set_tc_index(before);
        Cloned { code, is_uncut }
    }

    #[inline(always)]
    fn record(&mut self, session: &Session, direction: Direction) -> Result<(), Verdict> {
        stream::record(self.skb, session, direction)
    }

    #[inline(always)]
    fn set_tc_index(&mut self, tc_index: u16) {
        // SAFETY: the context is valid for the whole program, and tc programs may write this field.
        unsafe { (*self.skb).tc_index = u32::from(tc_index) };
    }

    #[inline(always)]
    fn is_tap(&mut self, ifindex: u32) -> bool {
        tap(ifindex).is_some_and(|tap| tap.flags & TAP_CAPTURES_ONLY == 0)
    }

    #[inline(always)]
    fn origin(&mut self) -> u32 {
        ORIGIN.get(0).copied().unwrap_or(0)
    }

    #[inline(always)]
    fn set_origin(&mut self, ifindex: u32) {
        if let Some(origin) = ORIGIN.get_ptr_mut(0) {
            // SAFETY: the element belongs to this CPU.
            unsafe { *origin = ifindex };
        }
    }

    #[inline(always)]
    fn count(&mut self, session: &Session, direction: Direction, verdict: Verdict) {
        let Some(counters) = COUNTERS.get_ptr_mut(session.id) else { return };
        // The mask must be seen by the verifier, which does not know what the compiler has concluded already.
        let verdict = core::hint::black_box(verdict as u32) as usize & (Verdict::SLOTS - 1);
        // SAFETY: the element belongs to this CPU. A program that interrupts this one on the same CPU between load and
        // store (a softirq over a process's own transmission) is excluded: tc runs with softirqs disabled.
        let Counter { packets, bytes } = unsafe { &mut (*counters).counters[direction as usize][verdict] };
        *packets += 1;
        *bytes += u64::from(self.len);
    }

    #[inline(always)]
    fn no_session(&mut self) -> u32 {
        // A packet is shorter than 2 GiB, but the verifier does not know.
        core::hint::black_box(self.len) >> 31
    }
}

/// The answers of [`sift`].
const PASSES: u32 = 0;
const FILTERED: u32 = 1;
const SAMPLED_OUT: u32 = 2;
const FAILED: u32 = 3;

/// Whether the packet passes the filter and the sample of a session. The arguments are fields of the session.
///
/// This is a global function, so the verifier goes through its loop once, and not again for every path that leads to
/// it. Before Linux 5.12, a global function takes only the context and numbers.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn sift(skb: *mut __sk_buff, flags: u32, filter: u32, share: u32, seed: u32) -> u32 {
    let Some(header) = header::read(skb) else { return FAILED };
    let filter = if flags & SESSION_FILTERED == 0 {
        None
    } else {
        match FILTERS.get(filter) {
            None => return FAILED,
            filter => filter,
        }
    };
    match decide::sift(filter, share, seed, header) {
        Ok(()) => PASSES,
        Err(Verdict::Filtered) => FILTERED,
        Err(_) => SAMPLED_OUT,
    }
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
