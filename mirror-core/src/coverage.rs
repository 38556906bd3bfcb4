//! Coverage: whether our programs meet the packets that a NIC carries, for each direction.
//!
//! A packet that does not pass the hook of a tap is in none of our counters. But the NIC counts it. So the agent reads
//! both from time to time, and a [`Judge`] compares what was added:
//!
//! ```text
//!  the NIC, inside the pod ── the node's end of its veth ── our program at the hook
//!      Reading::nic                Reading::end                 Reading::seen
//!           └── around: exact ──────────┘
//!           └── share: half, nearly all; gap: exact ────────────────┘
//! ```
//!
//! * **Around the node's end.** Both ends of a veth count the same packets, and `bpf_redirect_peer` adds to the NIC's
//!   counter alone. So one packet that only the NIC has is a proof.
//! * **Share.** A super-frame is one packet at one place and many at another (GRO, segmentation), and between two places
//!   packets are dropped or wait in a queue. So the share of the packets that were seen says little, but the packets and
//!   the bytes do not both fall below a half for these reasons.
//! * **Gap.** What a macvlan or an ipvlan counts as a packet is one packet at the hook. So a gap between the two numbers that
//!   grows again and again is a bypass, also a small one: `gap` says why queues and drops make no such gap.
//! * **Nearly all** was seen if it is 7/8 of the bytes *and* of the packets. Where super-frames can make the packets
//!   differ ([`Kind`]), as many may be missing as the bytes that were seen can be segments.
//!
//! A reading takes time, and packets pass meanwhile. So the other counters are read both before and after that of the
//! NIC. Of each pair the judge takes the number that lets more packets be seen: a flood raises no alarm.
//!
//! What the tap misses at the node's end of a veth, it sees at the NIC: [`Route`] decides on which side it is.
//!
//! Pure: the loop brings the readings and the state of the hook, and reports the result. It knows no clock: a moment is
//! the time since any fixed one.

mod gap;
mod judge;
mod route;
#[cfg(test)]
mod tests;

use std::{fmt, time::Duration};

pub use self::{
    judge::{CLEAR, FEW, Judge, QUIET, Totals},
    route::{Cni, LONGEST, Reason, Route},
};
use crate::model::Hidden;

/// Packets and their bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// How many packets.
    pub packets: u64,
    /// Their bytes. The places of a reading count different headers, so these are compared roughly.
    pub bytes: u64,
}

/// What a NIC has carried in one direction, since it was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Carried {
    /// By the NIC's own counters (`IFLA_STATS64`), inside the pod.
    pub nic: Count,
    /// The packets by the counters of the node's end of the veth, read just before and just after `nic`. `None`: the tap
    /// is at the NIC itself, or it is in the chain of what a netkit device sends.
    pub end: Option<[u64; 2]>,
}

impl Carried {
    /// The packets that passed around the node's end between two readings, at least. `None`: a counter is less than
    /// before.
    fn around(then: &Self, now: &Self) -> Option<u64> {
        let (Some([old_before, old_after]), Some([before, after])) = (then.end, now.end) else {
            return Some(0);
        };
        now.nic.packets.checked_sub(then.nic.packets)?;
        before.checked_sub(old_after)?;
        // At least so many had passed around the node's end now, and at most so many then.
        let least = i128::from(now.nic.packets) - i128::from(after);
        let most = i128::from(then.nic.packets) - i128::from(old_before);
        Some(u64::try_from(least - most).unwrap_or(0))
    }
}

/// What one session of the tap has seen of one direction: the sum over all verdicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// The number of the session. Counts of two sessions cannot be compared: each begins with its session.
    pub serial: u32,
    /// Its count before the NIC's counters were read.
    pub before: Count,
    /// Its count after that.
    pub after: Count,
}

/// The counters of one direction of a NIC, at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    /// When it was read.
    pub at: Duration,
    /// What the NIC has carried.
    pub carried: Carried,
    /// What a session of the tap has seen; `None`: there is no session that was there before and after.
    pub seen: Option<Seen>,
}

/// What the kind of a NIC says of its counters and of the hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Each packet that it counts is one packet at the hook (macvlan, ipvlan): they take super-frames, whatever is set.
    Plain,
    /// A super-frame at the hook can be many packets in its counters: segments on a wire (a physical NIC), or what the kernel
    /// makes of them between the hook and the NIC (a veth without offloads, and any other kind).
    Segments,
    /// As [`Self::Plain`], but what comes from outside the node does not pass the hook: an ipvlan in mode l3s.
    L3s,
}

/// The state of the hook that sees a direction.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum AtHook {
    /// Our program runs there, with no other program or filter ahead of it.
    #[default]
    First,
    /// Other programs or filters are ahead of it, or there is no such hook.
    Behind(Hidden),
    /// No program of ours runs there.
    Absent,
}

/// Whether a direction of a NIC is covered.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// Our program meets what the NIC carries.
    Covered,
    /// The NIC carries packets that do not pass the hook.
    Bypassed(Way),
    /// Another program or filter is ahead of ours at the hook, and can end the way of a packet.
    Hidden(Hidden),
    /// No program of ours runs at the hook.
    NoHook,
    /// It cannot be told.
    Unknown(Doubt),
}

/// How packets get around the hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// Not as far as the counters tell.
    Unseen,
    /// Behind the hooks of the NIC, which is an ipvlan in mode l3s.
    L3s,
    /// Around the node's end of the veth, by `bpf_redirect_peer`.
    Peer,
}

/// Why it cannot be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Doubt {
    /// The NIC carries too few packets.
    Idle,
    /// Much of the traffic was seen, but not nearly all.
    Differs,
    /// The kernel does not count in the NIC what passes around the node's end of the veth.
    Kernel,
    /// All was seen, but the NIC is an ipvlan in mode l3s, and can get packets behind its hooks.
    L3s,
    /// The counters cannot be read.
    Unread,
}

impl State {
    /// Every [`Self::name`].
    pub const NAMES: [&str; 5] = ["Covered", "Bypassed", "Hidden", "NoHook", "Unknown"];

    /// The word for status and metrics.
    pub const fn name(&self) -> &'static str {
        let index = match self {
            Self::Covered => 0,
            Self::Bypassed(_) => 1,
            Self::Hidden(_) => 2,
            Self::NoHook => 3,
            Self::Unknown(_) => 4,
        };
        Self::NAMES[index]
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Covered => write!(f, "our program sees what the NIC carries"),
            Self::Bypassed(way) => way.fmt(f),
            Self::Hidden(hidden) => hidden.fmt(f),
            Self::NoHook => write!(f, "no program of ours runs at the hook"),
            Self::Unknown(doubt) => doubt.fmt(f),
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Peer => {
                "other software hands packets to the NIC behind the node's end of its veth, where the mirror is \
                 (bpf_redirect_peer, as in Cilium's eBPF host routing and Calico's eBPF dataplane)"
            }
            Self::L3s => {
                "the NIC is an ipvlan in mode l3s: what comes from outside the node gets to the pod's IP layer behind \
                 the hooks of the NIC"
            }
            Self::Unseen => {
                "the NIC carries packets that the mirror does not meet, and no program or filter that the agent can \
                 see hides them; an XDP program of the device can be the reason, or another program inside the pod"
            }
        })
    }
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Idle => "the NIC has carried too few packets lately to tell",
            Self::Differs => "the mirror sees much of what the NIC carries, but not nearly all of it",
            Self::Kernel => {
                "this kernel does not count packets that other software hands to the NIC behind the node's end of its \
                 veth (bpf_redirect_peer), so they could be missing in silence; Linux 6.7 and newer count them"
            }
            Self::L3s => {
                "the mirror sees what the NIC carries now, but the NIC is an ipvlan in mode l3s: what comes from outside \
                 the node gets to the pod's IP layer behind the hooks of the NIC"
            }
            Self::Unread => "the counters of the NIC cannot be read",
        })
    }
}
