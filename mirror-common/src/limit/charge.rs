//! The meters that a copy is charged to: its session's, its target's, its pod's, its namespace's, and the node's, in
//! this order. If a later meter refuses, the charge to the earlier ones is refunded.
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

use super::{Limits, Meter, PodMeter};
use crate::verdict::Verdict;

/// The meters and their limits. Each method passes one meter to `change`; no other CPU uses that meter meanwhile.
/// `None`: there is no such meter.
pub trait Meters {
    /// The meter of a session, by the number in [`Bill::session`].
    fn session<R>(&mut self, places: u32, change: impl FnOnce(&Limits, &mut Meter) -> R) -> Option<R>;
    /// The meter of a target.
    fn target<R>(&mut self, place: u32, change: impl FnOnce(&Limits, &mut Meter) -> R) -> Option<R>;
    /// The meters of a pod, with the limits of its ceiling and its share.
    fn pod<R>(&mut self, index: u32, change: impl FnOnce([&Limits; 2], &mut PodMeter) -> R) -> Option<R>;
    /// Whether namespaces have a rate.
    fn has_namespace_rate(&mut self) -> bool;
    /// The meter of a namespace.
    fn namespace<R>(&mut self, index: u32, change: impl FnOnce(&Limits, &mut Meter) -> R) -> Option<R>;
    /// Whether the node has a rate. Called first, because all CPUs share the node's meter.
    fn has_node_rate(&mut self) -> bool;
    /// The meter of the node.
    fn node<R>(&mut self, change: impl FnOnce(&Limits, &mut Meter) -> R) -> Option<R>;
}

/// A copy to charge.
#[derive(Debug, Clone, Copy)]
pub struct Bill {
    /// The indexes of the session's meter and limits, as a number that [`Meters`] decodes; `None`: it has no limits.
    pub session: Option<u32>,
    /// The target, if it has a ceiling.
    pub target: Option<u32>,
    /// The namespace of the pod; `None`: there is no pod, or only the session and the target have limits.
    pub namespace: Option<u32>,
    /// The pod, if pods or the node have limits.
    pub pod: Option<u32>,
    /// Bytes of the packet.
    pub len: u32,
}

/// The meters that a copy was charged to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Paid {
    /// A bit for each meter.
    bits: u32,
}

impl Paid {
    /// No meter.
    pub const NOTHING: Self = Self { bits: 0 };
    const SESSION: u32 = 1;
    const TARGET: u32 = 2;
    const POD: u32 = 4;
    const SHARE: u32 = 8;
    const NAMESPACE: u32 = 16;
    const NODE: u32 = 32;
    /// Every bit.
    pub const ALL: u32 =
        Self::SESSION | Self::TARGET | Self::POD | Self::SHARE | Self::NAMESPACE | Self::NODE;

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
    const fn has(self, bit: u32) -> bool {
        self.bits & bit != 0
    }
}

/// Charges a copy, or returns the reason for a refusal; then nothing is charged.
#[inline(always)]
pub fn charge<M: Meters>(meters: &mut M, bill: Bill, now_ns: u64) -> Result<Paid, Verdict> {
    let mut paid = Paid::NOTHING;
    match charge_each(meters, bill, now_ns, &mut paid) {
        Ok(()) => Ok(paid),
        Err(verdict) => {
            give_back(meters, bill, paid);
            Err(verdict)
        }
    }
}

/// Refunds what [`charge`] charged for a copy that was not made after all.
#[inline(always)]
pub fn give_back<M: Meters>(meters: &mut M, bill: Bill, paid: Paid) {
    let Bill { session, target, namespace, pod, len } = bill;
    let put = |limits: &Limits, meter: &mut Meter| meter.give_back(limits, len);
    if paid.has(Paid::NODE) {
        meters.node(put);
    }
    if let (true, Some(index)) = (paid.has(Paid::NAMESPACE), namespace) {
        meters.namespace(index, put);
    }
    if let (true, Some(index)) = (paid.has(Paid::POD), pod) {
        meters.pod(index, |[ceiling, share], meter| {
            meter.ceiling.give_back(ceiling, len);
            if paid.has(Paid::SHARE) {
                meter.share.give_back(share, len);
            }
        });
    }
    if let (true, Some(place)) = (paid.has(Paid::TARGET), target) {
        meters.target(place, put);
    }
    if let (true, Some(id)) = (paid.has(Paid::SESSION), session) {
        meters.session(id, put);
    }
}

/// Charges one meter after the other, and records each in `paid`.
#[inline(always)]
fn charge_each<M: Meters>(meters: &mut M, bill: Bill, now_ns: u64, paid: &mut Paid) -> Result<(), Verdict> {
    let Bill { session, target, namespace, pod, len } = bill;
    // A closure for each meter: a shared one would be a function of its own, and Linux 5.10 does not allow a program to
    // call a function while it holds a lock.
    macro_rules! take {
        () => {
            |limits: &Limits, meter: &mut Meter| meter.take(limits, now_ns, len)
        };
    }
    if let Some(id) = session {
        meters.session(id, take!()).unwrap_or(Err(Verdict::Failed))?;
        paid.bits |= Paid::SESSION;
    }
    if let Some(place) = target {
        meters.target(place, take!()).unwrap_or(Err(Verdict::Failed))?;
        paid.bits |= Paid::TARGET;
    }
    let Some(index) = pod else { return Ok(()) };
    // The ceiling, and the share if it has credit left.
    let take_pod = |[ceiling, share]: [&Limits; 2], meter: &mut PodMeter| {
        meter.ceiling.take(ceiling, now_ns, len)?;
        Ok(share.has_rate() && meter.share.take(share, now_ns, len).is_ok())
    };
    let is_within = meters.pod(index, take_pod).unwrap_or(Err(Verdict::Failed))?;
    paid.bits |= if is_within { Paid::POD | Paid::SHARE } else { Paid::POD };
    if let Some(index) = namespace
        && meters.has_namespace_rate()
    {
        meters.namespace(index, take!()).unwrap_or(Err(Verdict::Failed))?;
        paid.bits |= Paid::NAMESPACE;
    }
    if meters.has_node_rate() {
        // Always for a packet within the pod's share, for others only if the node has credit.
        let take_node = |limits: &Limits, meter: &mut Meter| {
            if is_within {
                meter.overdraw(limits, now_ns, len);
                Ok(())
            } else {
                meter.take(limits, now_ns, len)
            }
        };
        meters.node(take_node).unwrap_or(Err(Verdict::Failed))?;
        paid.bits |= Paid::NODE;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
