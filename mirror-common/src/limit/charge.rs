//! The meters that a copy is charged to: its session's, then its pod's, then the node's. If a later meter refuses, the
//! charge to the earlier ones is given back.
//!
//! A pod has a ceiling, which is a limit like a session's, and a share of the node's rate. The traffic of others never
//! makes a pod lose a packet within its share: such a packet may bring the node's meter into debt. Beyond its share the
//! pod gets only the rest of the node's credit. The shares add up to no more than the node's rate ([`Limits::share`]
//! makes sure of that). So, over any stretch of time, the copies of all pods are at most:
//!
//! * the node's rate times the stretch,
//! * one burst of the node, and one of each share, which together are one more burst of the node,
//! * one packet for the node, and one for each pod.
//!
//! Pure; [`decide`](crate::decide) calls it through the kernel's maps and locks, which stand behind [`Meters`].

use super::{Limits, Meter, PodMeter};
use crate::verdict::Verdict;

/// The meters and their limits. Each method gives `change` access to one meter at a time, and no other CPU uses that
/// meter meanwhile. `None`: there is no such meter.
pub trait Meters {
    /// The meter of a session.
    fn session<R>(&mut self, id: u32, change: impl FnOnce(&Limits, &mut Meter) -> R) -> Option<R>;
    /// The meters of a pod, with the limits of its ceiling and its share.
    fn pod<R>(&mut self, index: u32, change: impl FnOnce([&Limits; 2], &mut PodMeter) -> R) -> Option<R>;
    /// Whether the node has a rate. Asked first, because all CPUs share the node's one meter.
    fn has_node_rate(&mut self) -> bool;
    /// The meter of the node.
    fn node<R>(&mut self, change: impl FnOnce(&Limits, &mut Meter) -> R) -> Option<R>;
}

/// A copy that is to be charged.
#[derive(Debug, Clone, Copy)]
pub struct Bill {
    /// The session, if it has limits.
    pub session: Option<u32>,
    /// The pod, if pods or the node have limits.
    pub pod: Option<u32>,
    /// Bytes of the packet.
    pub len: u32,
}

/// Which meters a copy was charged to, beside that of its session.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Paid {
    /// A bit for each meter.
    bits: u32,
}

impl Paid {
    /// No meter but, possibly, the session's.
    pub const NOTHING: Self = Self { bits: 0 };
    const POD: u32 = 1;
    const SHARE: u32 = 2;
    const NODE: u32 = 4;
    /// Every bit.
    pub const ALL: u32 = Self::POD | Self::SHARE | Self::NODE;

    /// As a number, of the bits of [`Self::ALL`].
    #[inline(always)]
    pub const fn to_bits(self) -> u32 {
        self.bits
    }

    /// The reverse of [`Self::to_bits`].
    #[inline(always)]
    pub const fn from_bits(bits: u32) -> Self {
        Self { bits }
    }
}

/// Charges a copy, or says why it may not be made; then nothing is charged.
#[inline(always)]
pub fn charge<M: Meters>(meters: &mut M, bill: Bill, now_ns: u64) -> Result<Paid, Verdict> {
    let Bill { session, pod, len } = bill;
    if let Some(id) = session {
        let take = |limits: &Limits, meter: &mut Meter| {
            meter.forgive(limits);
            meter.take(limits, now_ns, len)
        };
        meters.session(id, take).unwrap_or(Err(Verdict::Failed))?;
    }
    let Some(index) = pod else { return Ok(Paid::NOTHING) };
    let paid = match charge_pod(meters, index, now_ns, len) {
        Ok(paid) => match charge_node(meters, paid, now_ns, len) {
            Ok(paid) => return Ok(paid),
            Err(verdict) => {
                give_back_pod(meters, index, paid, len);
                Err(verdict)
            }
        },
        refused => refused,
    };
    give_back_session(meters, session, len);
    paid
}

/// Takes back what [`charge`] charged for a copy that was not made after all.
#[inline(always)]
pub fn give_back<M: Meters>(meters: &mut M, bill: Bill, paid: Paid) {
    let Bill { session, pod, len } = bill;
    if paid.bits & Paid::NODE != 0 {
        meters.node(|limits, meter| meter.give_back(limits, len));
    }
    if let Some(index) = pod {
        give_back_pod(meters, index, paid, len);
    }
    give_back_session(meters, session, len);
}

/// Charges the ceiling, and the share if anything is left of it.
#[inline(always)]
fn charge_pod<M: Meters>(meters: &mut M, index: u32, now_ns: u64, len: u32) -> Result<Paid, Verdict> {
    let take = |[ceiling, share]: [&Limits; 2], meter: &mut PodMeter| {
        meter.ceiling.forgive(ceiling);
        meter.ceiling.take(ceiling, now_ns, len)?;
        meter.share.forgive(share);
        let is_within = share.has_rate() && meter.share.take(share, now_ns, len).is_ok();
        Ok(Paid { bits: if is_within { Paid::POD | Paid::SHARE } else { Paid::POD } })
    };
    meters.pod(index, take).unwrap_or(Err(Verdict::Failed))
}

/// Charges the node: always for a packet within the pod's share, for others if the node has credit.
#[inline(always)]
fn charge_node<M: Meters>(meters: &mut M, paid: Paid, now_ns: u64, len: u32) -> Result<Paid, Verdict> {
    if !meters.has_node_rate() {
        return Ok(paid);
    }
    let take = |limits: &Limits, meter: &mut Meter| {
        if paid.bits & Paid::SHARE != 0 {
            meter.overdraw(limits, now_ns, len);
            Ok(())
        } else {
            meter.take(limits, now_ns, len)
        }
    };
    meters.node(take).unwrap_or(Err(Verdict::Failed))?;
    Ok(Paid { bits: paid.bits | Paid::NODE })
}

#[inline(always)]
fn give_back_pod<M: Meters>(meters: &mut M, index: u32, paid: Paid, len: u32) {
    let put = |[ceiling, share]: [&Limits; 2], meter: &mut PodMeter| {
        if paid.bits & Paid::POD != 0 {
            meter.ceiling.give_back(ceiling, len);
        }
        if paid.bits & Paid::SHARE != 0 {
            meter.share.give_back(share, len);
        }
    };
    if paid != Paid::NOTHING {
        meters.pod(index, put);
    }
}

#[inline(always)]
fn give_back_session<M: Meters>(meters: &mut M, session: Option<u32>, len: u32) {
    if let Some(id) = session {
        meters.session(id, |limits, meter| meter.give_back(limits, len));
    }
}

#[cfg(test)]
mod tests;
