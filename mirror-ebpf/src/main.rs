//! The tap programs: glue between the kernel and the decision in `mirror-common`.
//!
//! The agent attaches `tap_ingress` and `tap_egress` to the tc hooks of every tapped device. The programs look up the
//! device's tap, and `mirror_common::decide` decides about the packet for each of the tap's sessions. This file
//! implements `Kernel` with maps and helpers. The programs always return `TC_ACT_UNSPEC`, so the next program gets the
//! packet.
#![no_std]
#![no_main]
// For the assembly in `stream` and `unknown`.
#![feature(asm_experimental_arch)]

use core::{arch::asm, mem::MaybeUninit, ptr::NonNull};

use aya_ebpf::{
    EbpfContext as _, Global,
    bindings::{__sk_buff, BPF_F_NO_PREALLOC, TC_ACT_UNSPEC},
    btf_maps::{Array, HashMap, PerCpuArray, ProgramArray},
    helpers::bpf_clone_redirect,
    macros::{btf_map, classifier},
    programs::TcContext,
};
use mirror_common::{
    abi::{
        Counter, DeviceKey, FILTER_PLACES, MAX_SESSIONS, MAX_TAPS, SETTINGS_PLACES, Session, SessionCounters,
        SessionInfo, TARGET_PLACES, TARGET_TUNNEL, Tap, TapOwner, Target,
    },
    decide::{self, Cloned, Kernel, Packet, Question, Reach},
    facts::Facts,
    limit::charge::Paid,
    verdict::{Direction, Hook, Verdict},
};

mod copies;
mod deliver;
mod guard;
mod header;
mod hub;
mod meter;
mod stream;
mod tunnel;
mod unread;

/// Flag of a map: the kernel does not preallocate the elements. It reuses a freed element of a preallocated map at
/// once, so a program that still reads the element could see another tap.
const NO_PREALLOC: usize = BPF_F_NO_PREALLOC as usize;

/// The taps by device.
#[btf_map(pin_by_name)]
static TAPS: HashMap<DeviceKey, Tap, { MAX_TAPS as usize }, NO_PREALLOC> = HashMap::new();

/// The pod and NIC of each tap, by device. Not used by the programs, but pinned with the other maps.
#[btf_map(pin_by_name)]
static TAP_OWNERS: HashMap<DeviceKey, TapOwner, { MAX_TAPS as usize }, NO_PREALLOC> = HashMap::new();

/// The descriptions of sessions, by the index of their settings. Not used by the programs, but by the agent.
#[btf_map(pin_by_name)]
static SESSION_INFO: HashMap<u32, SessionInfo, { SETTINGS_PLACES as usize }, NO_PREALLOC> = HashMap::new();

/// The targets, by [`Session::target`](mirror_common::abi::Session::target).
#[btf_map(pin_by_name)]
static TARGETS: Array<Target, { TARGET_PLACES as usize }> = Array::new();

/// The filters of the sessions, each one a program that the agent compiles (`mirror_core::filter`). Sessions with the
/// same filter share one element.
#[btf_map(pin_by_name)]
static FILTERS: ProgramArray<{ FILTER_PLACES as usize }> = ProgramArray::new();

/// The hash of the instructions of each program in `FILTERS`, by the same index. For the next agent: its compiler may
/// compile the same text to another program. The programs do not use this map.
#[btf_map(pin_by_name)]
static FILTER_HASHES: Array<u64, { FILTER_PLACES as usize }> = Array::new();

/// The counters of each session. The agent sets the size of the map from the number of CPUs.
#[btf_map(pin_by_name)]
pub(crate) static COUNTERS: PerCpuArray<SessionCounters, { MAX_SESSIONS as usize }> = PerCpuArray::new();

/// Not 0 in a program that runs inside a pod.
#[unsafe(no_mangle)]
pub(crate) static INSIDE: Global<u32> = Global::new(0);

/// Inode of that pod's network namespace. The agent writes it later: it loads the program before the pod exists.
#[unsafe(no_mangle)]
static mut NETNS: u32 = 0;
/// The network namespace that the program runs in, as in the keys of `TAPS`: 0 is that of the agent.
#[inline(always)]
fn netns() -> u32 {
    // SAFETY: the agent has written the number before the program runs.
    if INSIDE.load() == 0 { 0 } else { unsafe { core::ptr::read_volatile(&raw const NETNS) } }
}

/// 0 on a kernel that refuses a tail call in a program with functions. There the tap programs run without filters.
#[unsafe(no_mangle)]
static CALLS_FILTERS: Global<u32> = Global::new(1);

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

/// Runs the packet through the sessions of its tap. Returns nothing, so no helper's code can become a verdict.
#[inline(always)]
fn mirror(ctx: &TcContext, hook: Hook) {
    let skb: *mut __sk_buff = ctx.as_ptr().cast();
    // SAFETY: the verifier guarantees that the context is valid for the whole program.
    let ifindex = unsafe { (*skb).ifindex };
    let Some(tap) = tap(ifindex) else { return };
    // SAFETY: as above.
    let (tc_index, len) = unsafe { ((*skb).tc_index as u16, (*skb).len) };
    let packet = Packet { hook, ifindex, tc_index };
    decide::mirror(&mut Skb { skb, tc_index, len }, packet, tap);
}

#[inline(always)]
fn tap(ifindex: u32) -> Option<&'static Tap> {
    // SAFETY: the agent replaces whole entries and never writes into one, see `NO_PREALLOC`.
    unsafe { TAPS.get(&DeviceKey { netns: netns(), ifindex }) }
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
    fn filter(&mut self, session: &Session) -> u32 {
        filter(self.skb, session.filter)
    }

    #[inline(always)]
    fn answer(&mut self, question: Question, packet: Packet, tap: &Tap, session: &Session) -> bool {
        match question {
            Question::SuperFrame => {
                // SAFETY: the context is valid for the whole program.
                unsafe { (*self.skb).gso_size != 0 }
            }
            Question::Refused => {
                let leaves_pod = tap.kind().leaves_pod(packet.hook);
                guard::refuses(self.skb, session.target, u32::from(leaves_pod), tap.bridge) != 0
            }
            Question::Unread => unread::is_unread(session.target),
        }
    }

    #[inline(always)]
    fn facts(&mut self, session: &Session) -> Facts {
        Facts::from_bits(facts(self.skb, session.sample, session.seed))
    }

    #[inline(always)]
    fn target(&mut self, tap: &Tap, index: u32) -> Option<Reach> {
        let Target { ifindex, flags, .. } = TARGETS.get(index)?;
        // Inside a pod, the target's ifindex would refer to another device.
        let ifindex = if INSIDE.load() == 0 || *ifindex == 0 { *ifindex } else { tap.exit };
        Some(Reach { ifindex, flags: *flags })
    }

    #[inline(always)]
    fn charge(&mut self, tap: &Tap, session: &Session, target: Reach) -> (Paid, Result<(), Verdict>) {
        meter::take(tap, session, target, self.len)
    }

    #[inline(always)]
    fn give_back(&mut self, tap: &Tap, session: &Session, paid: Paid) {
        meter::give_back(tap, session, self.len, paid);
    }

    #[inline(always)]
    fn clone_to(&mut self, session: &Session, direction: Direction, target: Reach, tc_index: u16) -> Cloned {
        let ifindex = target.ifindex;
        let before = self.tc_index;
        self.set_tc_index(tc_index);
        let skb = self.skb;
        // SAFETY: the context is a valid `__sk_buff`, and no packet pointer is held.
        let clone = || unsafe { bpf_clone_redirect(skb, ifindex, 0) as i64 };
        let by_exit = INSIDE.load() != 0;
        let is_plain = session.snaplen == 0 && target.flags & TARGET_TUNNEL == 0 && !by_exit;
        let cloned = if is_plain {
            Cloned { code: clone(), is_uncut: false, removed: 0 }
        } else {
            deliver::announcing(session, direction, by_exit, clone)
        };
        self.set_tc_index(before);
        cloned
    }

    #[inline(always)]
    fn record(&mut self, session: &Session, direction: Direction) -> Result<u32, Verdict> {
        stream::record(self.skb, session, direction)
    }

    #[inline(always)]
    fn set_tc_index(&mut self, tc_index: u16) {
        // SAFETY: the context is valid for the whole program, and tc programs may write this field.
        unsafe { (*self.skb).tc_index = u32::from(tc_index) };
    }

    #[inline(always)]
    fn is_still_copied(&mut self, packet: Packet) -> bool {
        copies::is_still_copied(self.skb, packet.hook)
    }

    #[inline(always)]
    fn note_copy(&mut self, packet: Packet) {
        copies::note(self.skb, packet.hook);
    }

    #[inline(always)]
    fn count(&mut self, session: &Session, direction: Direction, verdict: Verdict, removed: u32) {
        let Some(counters) = COUNTERS.get_ptr_mut(session.id) else { return };
        // The verifier must see the mask: it does not know the compiler's range analysis.
        let verdict = unknown(verdict as u32) as usize & (Verdict::SLOTS - 1);
        // SAFETY: the element belongs to this CPU. A program that interrupts this one on the same CPU between load and
        // store (a softirq during a process's own transmission) is excluded: tc runs with softirqs disabled.
        let Counter { packets, bytes } = unsafe { &mut (*counters).counters[direction as usize][verdict] };
        *packets += 1;
        *bytes += u64::from(self.len.wrapping_sub(removed));
    }

    #[inline(always)]
    fn zero(&mut self) -> u32 {
        // A packet is shorter than 2 GiB. The verifier does not know that, and the compiler must not use it.
        core::hint::black_box(self.len >> 31)
    }
}

/// Returns a number below 2^30 that the verifier does not know afterwards. Otherwise it goes through the rest of the
/// program once for each value.
///
/// On the stack, the verifier tracks a number only at the start of an aligned slot of 8 bytes (since Linux 5.16 also a
/// shorter one there). Elsewhere it tracks only zeros, so a bit is set.
#[inline(always)]
fn unknown(number: u32) -> u32 {
    const NOT_ZERO: u32 = 1 << 30;
    let mut stack = MaybeUninit::<u64>::uninit();
    let mut number = u64::from(number | NOT_ZERO);
    // SAFETY: writes the second half of `stack`, and reads it.
    unsafe {
        asm!(
            "*(u32 *)({stack} + 4) = {number}",
            "{number} = *(u32 *)({stack} + 4)",
            stack = in(reg) stack.as_mut_ptr(),
            number = inout(reg) number,
        );
    }
    number as u32 & !NOT_ZERO
}

/// Runs the program of a filter. Returns its return value, or 0 if the program does not exist.
///
/// A successful tail call does not return here: the program replaces this function and returns to its caller, so its
/// return value cannot become a tc verdict. That is why this is a global function, and not inlined. Before Linux 5.12,
/// the arguments of a global function can only be the context and numbers.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn filter(skb: *mut __sk_buff, place: u32) -> u32 {
    if CALLS_FILTERS.load() != 0 {
        // SAFETY: the context is never null, and nothing here has to be dropped.
        unsafe { FILTERS.tail_call(&TcContext::new(NonNull::new_unchecked(skb)), place) };
    }
    // Without the black box the compiler would conclude that every call returns 0.
    core::hint::black_box(0)
}

/// The facts about the packet's header. The other arguments are fields of the session.
///
/// A global function, so the verifier checks it once, and not again for every path that leads to it.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn facts(skb: *mut __sk_buff, sample: u32, seed: u32) -> u32 {
    let facts = match header::read(skb) {
        Some(header) => Facts::of(header, sample, seed),
        None => Facts::UNREAD,
    };
    facts.to_bits()
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
