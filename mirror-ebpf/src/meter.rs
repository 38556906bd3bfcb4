//! Limits and budgets in the kernel: the meters, each used by one CPU at a time.
//!
//! The rules are `mirror_common::limit`; here are the maps and the locks. Called by the tap programs.

use aya_ebpf::{
    bindings::bpf_spin_lock,
    btf_maps::Array,
    helpers::{bpf_ktime_get_ns, bpf_spin_lock as lock, bpf_spin_unlock as unlock},
    macros::btf_map,
};
use mirror_common::{
    abi::{NODE_METER, SESSION_METERED, Session, TARGET_METERED, Target},
    limit::{Limits, Meter},
    verdict::Verdict,
};

const METERS_LEN: usize = NODE_METER as usize + 1;

/// What each session, and the node, may use up. Written by the agent.
#[btf_map(pin_by_name)]
static LIMITS: Array<Limits, METERS_LEN> = Array::new();

/// What each session, and the node, has used up.
#[btf_map(pin_by_name)]
static METERS: Array<LockedMeter, METERS_LEN> = Array::new();

/// A meter and its lock, which the kernel finds by its type.
#[repr(C)]
struct LockedMeter {
    lock: bpf_spin_lock,
    _padding: u32,
    meter: Meter,
}

/// Takes a packet of `len` bytes from the session's limits and then from the node's.
#[inline(always)]
pub(crate) fn take(session: &Session, target: &Target, len: u32) -> Result<(), Verdict> {
    if session.flags & SESSION_METERED != 0 {
        take_from(session.id, len)?;
    }
    if target.flags & TARGET_METERED != 0
        && let Err(verdict) = take_from(NODE_METER, len)
    {
        give_back_to(session.flags & SESSION_METERED != 0, session.id, len);
        return Err(verdict);
    }
    Ok(())
}

/// Gives back what [`take`] took for a packet that was not copied after all.
#[inline(always)]
pub(crate) fn give_back(session: &Session, target: &Target, len: u32) {
    give_back_to(session.flags & SESSION_METERED != 0, session.id, len);
    give_back_to(target.flags & TARGET_METERED != 0, NODE_METER, len);
}

#[inline(always)]
fn take_from(index: u32, len: u32) -> Result<(), Verdict> {
    let (Some(limits), Some(meter)) = (LIMITS.get(index), METERS.get_ptr_mut(index)) else {
        return Err(Verdict::Failed);
    };
    // The clock cannot be read under the lock: no helper can be called there.
    // SAFETY: the helper has no preconditions.
    let now_ns = unsafe { bpf_ktime_get_ns() };
    // SAFETY: the element is valid for the whole program, and every access to its meter is under its lock.
    unsafe {
        lock(&raw mut (*meter).lock);
        let taken = (*meter).meter.take(limits, now_ns, len);
        unlock(&raw mut (*meter).lock);
        taken
    }
}

#[inline(always)]
fn give_back_to(is_metered: bool, index: u32, len: u32) {
    if !is_metered {
        return;
    }
    let (Some(limits), Some(meter)) = (LIMITS.get(index), METERS.get_ptr_mut(index)) else { return };
    // SAFETY: as in `take_from`.
    unsafe {
        lock(&raw mut (*meter).lock);
        (*meter).meter.give_back(limits, len);
        unlock(&raw mut (*meter).lock);
    }
}
