//! The tap programs: glue between the kernel and the decision in `mirror-common`.
//!
//! The agent attaches `tap_ingress` and `tap_egress` to the tc hooks of every tapped device. They look the device up and
//! let `mirror_common::decide` take the packet through the tap's sessions; here is what the decision needs of the kernel:
//! maps and helpers. They decide nothing themselves, and whatever happens they return `TC_ACT_UNSPEC`: the pod's packet
//! goes on to the next program as if we were not there.
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
        Counter, DeviceKey, MAX_SESSIONS, MAX_TAPS, SESSION_FILTERED, Session, SessionCounters, SessionInfo,
        TARGET_PLACES, Tap, TapOwner, Target,
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

/// A number in a map's flags: not preallocated. A freed element of a preallocated map is used again at once, and a
/// program that still reads it could see another tap.
const NO_PREALLOC: usize = BPF_F_NO_PREALLOC as usize;

/// Device to tap.
#[btf_map(pin_by_name)]
static TAPS: HashMap<DeviceKey, Tap, { MAX_TAPS as usize }, NO_PREALLOC> = HashMap::new();

/// Device to the pod and NIC that its tap is for. The programs do not use it; it is here to be pinned with the rest.
#[btf_map(pin_by_name)]
static TAP_OWNERS: HashMap<DeviceKey, TapOwner, { MAX_TAPS as usize }, NO_PREALLOC> = HashMap::new();

/// Session to what was asked for. The programs do not use it either.
#[btf_map(pin_by_name)]
static SESSION_INFO: HashMap<u32, SessionInfo, { MAX_SESSIONS as usize }, NO_PREALLOC> = HashMap::new();

/// Where copies go.
#[btf_map(pin_by_name)]
static TARGETS: Array<Target, { TARGET_PLACES as usize }> = Array::new();

/// The filters of the sessions; those with the same filter share one.
#[btf_map(pin_by_name)]
static FILTERS: Array<FilterProgram, { FILTER_PLACES as usize }> = Array::new();

/// What became of the packets of each session. The agent makes it as large as the node needs.
#[btf_map(pin_by_name)]
static COUNTERS: PerCpuArray<SessionCounters, { MAX_SESSIONS as usize }> = PerCpuArray::new();

/// The tap that has copied a packet last on this CPU, by ifindex. Not pinned: it matters for less than a packet's way
/// through the node.
#[btf_map]
static ORIGIN: PerCpuArray<u32, 1> = PerCpuArray::new();

/// The network namespace in the keys of `TAPS`: that of the agent.
const NETNS: u32 = 0;

/// Not 0 in a program that stands behind another one of ours at the same hook, while the agent changes the way to
/// attach. Such a program leaves alone what the one ahead of it has copied, and so marked: also what leaves a pod.
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
    let Some(tap) = tap(ifindex) else { return };
    // SAFETY: as above.
    let (ingress_ifindex, tc_index, len) =
        unsafe { ((*skb).ingress_ifindex, (*skb).tc_index as u16, (*skb).len) };
    // The verifier knows the value, and leaves the test out of a program that stands alone.
    if STANDS_BEHIND.load() != 0 && marks::forms(tc_index) != 0 {
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

/// The packet, and through it the kernel.
struct Skb {
    skb: *mut __sk_buff,
    /// What its `tc_index` was when the program began.
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
    fn set_tc_index(&mut self, tc_index: u16) {
        // SAFETY: the context is valid for the whole program, and tc programs may write this field.
        unsafe { (*self.skb).tc_index = u32::from(tc_index) };
    }

    #[inline(always)]
    fn is_tap(&mut self, ifindex: u32) -> bool {
        tap(ifindex).is_some()
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

/// Whether the packet passes the filter and the sample of a session, which are given by the session's fields.
///
/// A global function, so that the verifier goes through its loop once, and not again for every way that leads to it:
/// a context and numbers are all that such a function can be given (before Linux 5.12).
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
