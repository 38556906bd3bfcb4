//! Limits and budgets in the kernel: the meters, each used by one CPU at a time.
//!
//! `mirror_common::limit` has the rules; this file has the maps and the locks. The tap programs call it.

use aya_ebpf::{
    bindings::bpf_spin_lock,
    btf_maps::Array,
    helpers::{bpf_ktime_get_ns, bpf_spin_lock as lock, bpf_spin_unlock as unlock},
    macros::btf_map,
};
use mirror_common::{
    abi::{
        MAX_SESSIONS, MAX_TAPS, NODE_LIMIT, NODE_LIMITS_LEN, POD_LIMIT, SESSION_METERED, SESSION_POD_METERED,
        SHARE_LIMIT, Session, Tap,
    },
    limit::{
        Limits, Meter, PodMeter,
        charge::{self, Bill, Meters, Paid},
    },
    verdict::Verdict,
};

/// The limits of each session. The agent writes them.
#[btf_map(pin_by_name)]
static LIMITS: Array<Limits, { MAX_SESSIONS as usize }> = Array::new();

/// The use of each session.
#[btf_map(pin_by_name)]
static METERS: Array<LockedMeter, { MAX_SESSIONS as usize }> = Array::new();

/// The limits of the node, of each pod, and of each pod's share of the node's rate. The agent writes them.
#[btf_map(pin_by_name)]
static NODE_LIMITS: Array<Limits, NODE_LIMITS_LEN> = Array::new();

/// The use of the node.
#[btf_map(pin_by_name)]
static NODE_METER: Array<LockedMeter, 1> = Array::new();

/// The use of each pod.
#[btf_map(pin_by_name)]
static POD_METERS: Array<LockedPodMeter, { MAX_TAPS as usize }> = Array::new();

/// A meter and its lock. The kernel finds the lock by its type.
#[repr(C)]
struct LockedMeter {
    lock: bpf_spin_lock,
    _padding: u32,
    meter: Meter,
}

/// A pod's meters and their lock.
#[repr(C)]
struct LockedPodMeter {
    lock: bpf_spin_lock,
    _padding: u32,
    meter: PodMeter,
}

/// The meters in the maps.
struct Maps;

impl Meters for Maps {
    #[inline(always)]
    fn session<R>(&mut self, id: u32, change: impl FnOnce(&Limits, &mut Meter) -> R) -> Option<R> {
        let (limits, meter) = (LIMITS.get(id)?, METERS.get_ptr_mut(id)?);
        // SAFETY: the element is valid for the whole program, and every access to its meter is under its lock.
        unsafe {
            lock(&raw mut (*meter).lock);
            let changed = change(limits, &mut (*meter).meter);
            unlock(&raw mut (*meter).lock);
            Some(changed)
        }
    }

    #[inline(always)]
    fn pod<R>(&mut self, index: u32, change: impl FnOnce([&Limits; 2], &mut PodMeter) -> R) -> Option<R> {
        let limits = [NODE_LIMITS.get(POD_LIMIT)?, NODE_LIMITS.get(SHARE_LIMIT)?];
        let meter = POD_METERS.get_ptr_mut(index)?;
        // SAFETY: as above.
        unsafe {
            lock(&raw mut (*meter).lock);
            let changed = change(limits, &mut (*meter).meter);
            unlock(&raw mut (*meter).lock);
            Some(changed)
        }
    }

    #[inline(always)]
    fn has_node_rate(&mut self) -> bool {
        NODE_LIMITS.get(NODE_LIMIT).is_some_and(Limits::has_rate)
    }

    #[inline(always)]
    fn node<R>(&mut self, change: impl FnOnce(&Limits, &mut Meter) -> R) -> Option<R> {
        let (limits, meter) = (NODE_LIMITS.get(NODE_LIMIT)?, NODE_METER.get_ptr_mut(0)?);
        // SAFETY: as above.
        unsafe {
            lock(&raw mut (*meter).lock);
            let changed = change(limits, &mut (*meter).meter);
            unlock(&raw mut (*meter).lock);
            Some(changed)
        }
    }
}

/// Charges a packet of `len` bytes to the session, the pod and the node, if they have limits.
#[inline(always)]
pub(crate) fn take(tap: &Tap, session: &Session, len: u32) -> Result<Paid, Verdict> {
    let answer = charge_packet(session.id, session.flags, tap.pod_meter, len);
    match answer & !Paid::ALL {
        0 => Ok(Paid::from_bits(answer)),
        LIMITED => Err(Verdict::Limited),
        ENDED => Err(Verdict::Ended),
        _ => Err(Verdict::Failed),
    }
}

/// Gives back the charge of [`take`] for a packet that was not copied after all.
#[inline(always)]
pub(crate) fn give_back(tap: &Tap, session: &Session, len: u32, paid: Paid) {
    let flags = session.flags | paid.to_bits() << PAID_SHIFT;
    refund_packet(session.id, flags, tap.pod_meter, len);
}

/// The answers of [`charge_packet`] beside the bits of [`Paid`].
const LIMITED: u32 = 1 << 8;
const ENDED: u32 = 2 << 8;
const FAILED: u32 = 3 << 8;

/// Position of the bits of [`Paid`] in the argument of [`refund_packet`] that holds the session's flags too.
const PAID_SHIFT: u32 = 8;

#[inline(always)]
const fn bill(session: u32, flags: u32, pod: u32, len: u32) -> Bill {
    Bill {
        session: if flags & SESSION_METERED != 0 { Some(session) } else { None },
        pod: if flags & SESSION_POD_METERED != 0 { Some(pod) } else { None },
        len,
    }
}

/// Charges a packet. Returns the bits of [`Paid`], or one of the other answers.
///
/// This is a global function with numbers as arguments, as `sift` is, so the verifier goes through it once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn charge_packet(session: u32, flags: u32, pod: u32, len: u32) -> u32 {
    // The clock cannot be read under a lock: no helper can be called there.
    // SAFETY: the helper has no preconditions.
    let now_ns = unsafe { bpf_ktime_get_ns() };
    match charge::charge(&mut Maps, bill(session, flags, pod, len), now_ns) {
        Ok(paid) => paid.to_bits(),
        Err(Verdict::Limited) => LIMITED,
        Err(Verdict::Ended) => ENDED,
        Err(_) => FAILED,
    }
}

/// Takes a charge back. This is a global function too.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn refund_packet(session: u32, flags: u32, pod: u32, len: u32) -> u32 {
    let paid = Paid::from_bits(flags >> PAID_SHIFT & Paid::ALL);
    charge::give_back(&mut Maps, bill(session, flags, pod, len), paid);
    0
}
