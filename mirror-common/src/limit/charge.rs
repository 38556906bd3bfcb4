//! The meters that a copy is charged to: one of each [`Level`] that has limits. If a later level refuses, or the copy
//! fails, the charges are refunded.
//!
//! A target and a namespace have ceilings, which are limits like a session's: all sessions of the target, and all pods of
//! the namespace, share one meter.
//!
//! A pod has a ceiling, which is a limit like a session's, and a share of the node's rate. The traffic of others never
//! makes a pod lose a packet within its share: such a packet may bring the node's meter into debt. Beyond its share the
//! pod gets only the rest of the node's credit. The shares add up to no more than the node's rate (see
//! [`Limits::share`]). So, over any period, the copies of all pods are at most:
//!
//! * the node's rate times the period,
//! * one burst of the node, and one of each share, which add up to one more burst of the node,
//! * one packet for the node, and one for each pod.
//!
//! Pure; [`decide`](crate::decide) calls it, and [`Meters`] hides the kernel's maps and locks.

use super::{Level, Limits, Meter};
use crate::verdict::Verdict;

/// The limits and the meters, by their indexes in the maps. `None`: there is no such element.
pub trait Meters {
    /// The limits at an index.
    fn limits(&self, index: u32) -> Option<&Limits>;
    /// Passes the meter at an index to `change`, together with the limits and the meter of a pod's `share`, if
    /// given. No other CPU uses the meters meanwhile.
    fn meter<R>(
        &self,
        index: u32,
        share: Option<(&Limits, u32)>,
        change: impl FnOnce(&mut Meter, Option<(&Limits, &mut Meter)>) -> R,
    ) -> Option<R>;
}

/// A copy to charge, by the places of its owners within their levels.
#[derive(Debug, Clone, Copy)]
pub struct Bill {
    /// The places of the session's limits and of its meter; `None`: it has no limits.
    pub session: Option<(u32, u32)>,
    /// The target, if it has a ceiling.
    pub target: Option<u32>,
    /// The pod, if pods, namespaces or the node have limits.
    pub pod: Option<u32>,
    /// The namespace of the pod; `None`: there is no pod.
    pub namespace: Option<u32>,
    /// Bytes of the packet.
    pub len: u32,
}

impl Bill {
    /// The indexes of a level's limits and meter.
    #[inline(always)]
    fn at(&self, level: Level) -> Option<(u32, u32)> {
        let (limits, meter) = match (level, self.pod) {
            (Level::Session, _) => self.session?,
            (Level::Target, _) => (self.target?, self.target?),
            (Level::Pod | Level::Share, Some(pod)) => (0, pod),
            (Level::Namespace, Some(_)) => (0, self.namespace?),
            (Level::Node, Some(_)) => (0, 0),
            (_, None) => return None,
        };
        Some((level.limits(limits), level.meter(meter)))
    }
}

/// The levels that a copy was charged to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Paid {
    /// A bit for each level.
    bits: u32,
}

impl Paid {
    /// No level.
    pub const NOTHING: Self = Self { bits: 0 };
    /// Every bit.
    pub const ALL: u32 = (1 << Level::ALL.len()) - 1;

    /// Returns the bits, within [`Self::ALL`].
    #[inline(always)]
    pub const fn to_bits(self) -> u32 {
        self.bits
    }

    /// The inverse of [`Self::to_bits`].
    #[inline(always)]
    pub const fn from_bits(bits: u32) -> Self {
        Self { bits }
    }

    #[inline(always)]
    const fn has(self, level: Level) -> bool {
        self.bits & 1 << level as u32 != 0
    }
}

/// Runs a block for each level except a pod's share, whose meter changes together with the meter of the pod's
/// ceiling.
///
/// Not a loop: Linux 6.18 verifies that in more than a million instructions. Not a function: the closures in it would
/// become functions, and Linux 5.10 does not allow a program to call a function while it holds a lock.
macro_rules! for_each_level {
    ($level:ident => $block:block) => {
        for_each_level!($level => $block Session Target Pod Namespace Node)
    };
    ($level:ident => $block:block $($each:ident)*) => {
        $({
            let $level = Level::$each;
            $block
        })*
    };
}

/// Charges one level after the other, until one refuses the copy, and records each in `paid`. A level without limits is
/// not charged. After a refusal, the caller refunds the others ([`give_back`]).
#[inline(always)]
pub fn charge<M: Meters>(meters: &M, bill: Bill, now_ns: u64, paid: &mut Paid) -> Result<(), Verdict> {
    let len = bill.len;
    for_each_level!(level => {
        if let Some((limits, meter)) = bill.at(level) {
            let limits = meters.limits(limits).ok_or(Verdict::Failed)?;
            let share = if matches!(level, Level::Pod) { share(meters, bill) } else { None };
            if limits.are_set() || share.is_some() {
                let is_within = matches!(level, Level::Node) && paid.has(Level::Share);
                let take = |meter: &mut Meter, share: Option<(&Limits, &mut Meter)>| {
                    match meter.take(limits, now_ns, len) {
                        // Within its pod's share, a copy may bring the node into debt.
                        Err(_) if is_within => meter.draw(limits, len),
                        taken => taken?,
                    }
                    let Some((limits, share)) = share else { return Ok(false) };
                    Ok(share.take(limits, now_ns, len).is_ok())
                };
                let is_within = meters.meter(meter, share, take).unwrap_or(Err(Verdict::Failed))?;
                paid.bits |= 1 << level as u32 | (is_within as u32) << Level::Share as u32;
            }
        }
    });
    Ok(())
}

/// Refunds what [`charge`] charged for a copy that was not made after all.
#[inline(always)]
pub fn give_back<M: Meters>(meters: &M, bill: Bill, paid: Paid) {
    let len = bill.len;
    for_each_level!(level => {
        if paid.has(level)
            && let Some((limits, meter)) = bill.at(level)
            && let Some(limits) = meters.limits(limits)
        {
            let has_share = matches!(level, Level::Pod) && paid.has(Level::Share);
            let share = if has_share { share(meters, bill) } else { None };
            meters.meter(meter, share, |meter, share| {
                meter.give_back(limits, len);
                if let Some((limits, share)) = share {
                    share.give_back(limits, len);
                }
            });
        }
    });
}

/// The limits of the pod's share, and the index of its meter. `None`: the node has no rate to share.
#[inline(always)]
fn share<M: Meters>(meters: &M, bill: Bill) -> Option<(&Limits, u32)> {
    let (limits, meter) = bill.at(Level::Share)?;
    let limits = meters.limits(limits)?;
    limits.are_set().then_some((limits, meter))
}

#[cfg(test)]
mod tests;
