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
    abi::{SESSION_METERED, SESSION_POD_METERED, Session, TARGET_METERED, Tap},
    decide::Reach,
    limit::{
        LIMITS_LEN, Limits, METERS_LEN, Meter,
        charge::{self, Bill, Meters, Paid},
    },
    verdict::Verdict,
};

/// The limits of every level. The agent writes them.
#[btf_map(pin_by_name)]
static LIMITS: Array<Limits, LIMITS_LEN> = Array::new();

/// The use by every session, target, pod and namespace, and by the node.
#[btf_map(pin_by_name)]
static METERS: Array<LockedMeter, METERS_LEN> = Array::new();

/// A meter and its lock. The kernel identifies the lock by its type.
#[repr(C)]
struct LockedMeter {
    lock: bpf_spin_lock,
    _padding: u32,
    meter: Meter,
}

/// The limits and meters in the maps.
struct Maps;

impl Meters for Maps {
    #[inline(always)]
    fn limits(&self, index: u32) -> Option<&Limits> {
        LIMITS.get(index)
    }

    #[inline(always)]
    fn meter<R>(
        &self,
        index: u32,
        share: Option<(&Limits, u32)>,
        change: impl FnOnce(&mut Meter, Option<(&Limits, &mut Meter)>) -> R,
    ) -> Option<R> {
        let meter = METERS.get_ptr_mut(index)?;
        let share = match share {
            Some((limits, index)) => Some((limits, METERS.get_ptr_mut(index)?)),
            None => None,
        };
        // SAFETY: the elements are valid for the whole program, and every access to a meter is under its lock; to that
        // of a share, under the lock of its pod's ceiling.
        unsafe {
            lock(&raw mut (*meter).lock);
            let share = share.map(|(limits, share)| (limits, &mut (*share).meter));
            let changed = change(&mut (*meter).meter, share);
            unlock(&raw mut (*meter).lock);
            Some(changed)
        }
    }
}

/// Charges a packet of `len` bytes to the session, the target, the pod, its namespace and the node, if they have limits.
#[inline(always)]
pub(crate) fn take(tap: &Tap, session: &Session, target: Reach, len: u32) -> (Paid, Result<(), Verdict>) {
    let place = if target.flags & TARGET_METERED != 0 { session.target + 1 } else { 0 };
    let answer = charge_packet(places(session), session.flags, owners(tap), place, len);
    let charged = match answer & !Paid::ALL {
        0 => Ok(()),
        LIMITED => Err(Verdict::Limited),
        ENDED => Err(Verdict::Ended),
        _ => Err(Verdict::Failed),
    };
    (Paid::from_bits(answer & Paid::ALL), charged)
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

/// Packs the places of a session's meter and limits into one argument.
#[inline(always)]
const fn places(session: &Session) -> u32 {
    session.id | session.settings << 16
}

/// Packs the places of the pod's and the namespace's meters into one argument: a function has at most five.
#[inline(always)]
const fn owners(tap: &Tap) -> u32 {
    tap.pod_meter | tap.namespace_meter << 16
}

#[inline(always)]
const fn bill(session: u32, flags: u32, owners: u32, target: u32, len: u32) -> Bill {
    Bill {
        session: if flags & SESSION_METERED != 0 { Some((session >> 16, session & 0xffff)) } else { None },
        target: target.checked_sub(1),
        pod: if flags & SESSION_POD_METERED != 0 { Some(owners & 0xffff) } else { None },
        namespace: (owners >> 16).checked_sub(1),
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
    let mut paid = Paid::NOTHING;
    let charged = charge::charge(&Maps, bill(session, flags, owners, target, len), now_ns, &mut paid);
    paid.to_bits()
        | match charged {
            Ok(()) => 0,
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
    charge::give_back(&Maps, every, Paid::from_bits(paid));
    0
}
