//! Limits and budgets in the kernel: meters under a lock, so that one CPU at a time uses each.
//!
//! `mirror_common::limit` has the rules; this file has the maps and the locks. Called by the tap programs.

use aya_ebpf::{
    bindings::bpf_spin_lock,
    btf_maps::Array,
    helpers::{bpf_ktime_get_ns, bpf_spin_lock as lock, bpf_spin_unlock as unlock},
    macros::btf_map,
};
use mirror_common::{
    abi::{
        MAX_SESSIONS, MAX_TAPS, NAMESPACE_LIMIT, NODE_LIMIT, NODE_LIMITS_LEN, POD_LIMIT, SESSION_METERED,
        SESSION_POD_METERED, SETTINGS_PLACES, SHARE_LIMIT, Session, TARGET_METERED, TARGET_PLACES, Tap,
    },
    decide::Reach,
    limit::{
        Limits, Meter, PodMeter,
        charge::{self, Bill, Meters, Paid},
    },
    verdict::Verdict,
};

/// The limits of each session, by the index of its settings. The agent writes them.
#[btf_map(pin_by_name)]
static LIMITS: Array<Limits, { SETTINGS_PLACES as usize }> = Array::new();

/// The use of each session.
#[btf_map(pin_by_name)]
static METERS: Array<LockedMeter, { MAX_SESSIONS as usize }> = Array::new();

/// The ceilings of the targets. The agent writes them.
#[btf_map(pin_by_name)]
static TARGET_LIMITS: Array<Limits, { TARGET_PLACES as usize }> = Array::new();

/// The use of each target.
#[btf_map(pin_by_name)]
static TARGET_METERS: Array<LockedMeter, { TARGET_PLACES as usize }> = Array::new();

/// The limits of the node, of each pod, of each pod's share of the node's rate, and of each namespace. The agent writes
/// them.
#[btf_map(pin_by_name)]
static NODE_LIMITS: Array<Limits, NODE_LIMITS_LEN> = Array::new();

/// The use of the node.
#[btf_map(pin_by_name)]
static NODE_METER: Array<LockedMeter, 1> = Array::new();

/// The use of each pod.
#[btf_map(pin_by_name)]
static POD_METERS: Array<LockedPodMeter, { MAX_TAPS as usize }> = Array::new();

/// The use of the pods of each namespace.
#[btf_map(pin_by_name)]
static NAMESPACE_METERS: Array<LockedMeter, { MAX_TAPS as usize }> = Array::new();

/// A meter and its lock. The kernel identifies the lock by its type.
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

/// Changes the meter at an index of a map under its lock. Returns `None` from the caller if there is no such meter.
macro_rules! locked {
    ($map:ident[$place:expr], $limits:expr, $change:ident) => {{
        let (limits, meter) = ($limits, $map.get_ptr_mut($place)?);
        // SAFETY: the element is valid for the whole program, and every access to its meter is under its lock.
        unsafe {
            lock(&raw mut (*meter).lock);
            let changed = $change(limits, &mut (*meter).meter);
            unlock(&raw mut (*meter).lock);
            Some(changed)
        }
    }};
}

impl Meters for Maps {
    #[inline(always)]
    fn session<R>(&mut self, places: u32, change: impl FnOnce(&Limits, &mut Meter) -> R) -> Option<R> {
        locked!(METERS[places & 0xffff], LIMITS.get(places >> 16)?, change)
    }

    #[inline(always)]
    fn target<R>(&mut self, place: u32, change: impl FnOnce(&Limits, &mut Meter) -> R) -> Option<R> {
        locked!(TARGET_METERS[place], TARGET_LIMITS.get(place)?, change)
    }

    #[inline(always)]
    fn pod<R>(&mut self, index: u32, change: impl FnOnce([&Limits; 2], &mut PodMeter) -> R) -> Option<R> {
        locked!(POD_METERS[index], [NODE_LIMITS.get(POD_LIMIT)?, NODE_LIMITS.get(SHARE_LIMIT)?], change)
    }

    #[inline(always)]
    fn has_namespace_rate(&mut self) -> bool {
        NODE_LIMITS.get(NAMESPACE_LIMIT).is_some_and(Limits::has_rate)
    }

    #[inline(always)]
    fn namespace<R>(&mut self, index: u32, change: impl FnOnce(&Limits, &mut Meter) -> R) -> Option<R> {
        locked!(NAMESPACE_METERS[index], NODE_LIMITS.get(NAMESPACE_LIMIT)?, change)
    }

    #[inline(always)]
    fn has_node_rate(&mut self) -> bool {
        NODE_LIMITS.get(NODE_LIMIT).is_some_and(Limits::has_rate)
    }

    #[inline(always)]
    fn node<R>(&mut self, change: impl FnOnce(&Limits, &mut Meter) -> R) -> Option<R> {
        locked!(NODE_METER[0], NODE_LIMITS.get(NODE_LIMIT)?, change)
    }
}

/// Charges a packet of `len` bytes to the session, the target, the pod, its namespace and the node, if they have limits.
#[inline(always)]
pub(crate) fn take(tap: &Tap, session: &Session, target: Reach, len: u32) -> Result<Paid, Verdict> {
    let place = if target.flags & TARGET_METERED != 0 { session.target + 1 } else { 0 };
    let answer = charge_packet(places(session), session.flags, owners(tap), place, len);
    match answer & !Paid::ALL {
        0 => Ok(Paid::from_bits(answer)),
        LIMITED => Err(Verdict::Limited),
        ENDED => Err(Verdict::Ended),
        _ => Err(Verdict::Failed),
    }
}

/// Refunds the charge of [`take`] for a packet that was not copied after all.
#[inline(always)]
pub(crate) fn give_back(tap: &Tap, session: &Session, len: u32, paid: Paid) {
    refund_packet(places(session), paid.to_bits(), owners(tap), session.target + 1, len);
}

/// Return values of [`charge_packet`] besides the bits of [`Paid`].
const LIMITED: u32 = 1 << 8;
const ENDED: u32 = 2 << 8;
const FAILED: u32 = 3 << 8;

/// Packs the indexes of a session's meter and limits into one argument.
#[inline(always)]
const fn places(session: &Session) -> u32 {
    session.id | session.settings << 16
}

/// Packs the indexes of the pod's and the namespace's meters into one argument: a function has at most five.
#[inline(always)]
const fn owners(tap: &Tap) -> u32 {
    tap.pod_meter | tap.namespace_meter << 16
}

#[inline(always)]
const fn bill(session: u32, flags: u32, owners: u32, target: u32, len: u32) -> Bill {
    let is_pod_metered = flags & SESSION_POD_METERED != 0;
    Bill {
        session: if flags & SESSION_METERED != 0 { Some(session) } else { None },
        target: target.checked_sub(1),
        namespace: (owners >> 16).checked_sub(1),
        pod: if is_pod_metered { Some(owners & 0xffff) } else { None },
        len,
    }
}

/// Charges a packet. `target` is the index of the target, plus 1; 0: it has no ceiling. Returns the bits of [`Paid`],
/// or one of the other return values.
///
/// A global function with numbers as arguments, so the verifier checks it once.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn charge_packet(session: u32, flags: u32, owners: u32, target: u32, len: u32) -> u32 {
    // The clock is read before the locks: no helper can be called under a lock.
    // SAFETY: the helper has no preconditions.
    let now_ns = unsafe { bpf_ktime_get_ns() };
    match charge::charge(&mut Maps, bill(session, flags, owners, target, len), now_ns) {
        Ok(paid) => paid.to_bits(),
        Err(Verdict::Limited) => LIMITED,
        Err(Verdict::Ended) => ENDED,
        Err(_) => FAILED,
    }
}

/// Refunds a charge. A global function too.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn refund_packet(session: u32, paid: u32, owners: u32, target: u32, len: u32) -> u32 {
    let every = bill(session, SESSION_METERED | SESSION_POD_METERED, owners, target, len);
    charge::give_back(&mut Maps, every, Paid::from_bits(paid));
    0
}
