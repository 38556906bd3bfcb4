//! Coverage: whether podmirror's programs see the packets that a NIC carries, for each direction.
//!
//! A packet that does not pass the hook of a tap is in none of podmirror's counters, but the NIC counts it. So the
//! agent reads both from time to time, and a [`Judge`] compares the differences:
//!
//! ```text
//!  the NIC, inside the pod ── node side of its veth ──── podmirror's program at the hook
//!      Reading::nic                Reading::end                 Reading::seen
//!           └── around: exact ──────────┘
//!           └── share: half, nearly all; gap: exact ────────────────┘
//! ```
//!
//! * **Around the node side.** Both ends of a veth count the same packets, but `bpf_redirect_peer` increments only the
//!   NIC's counter. So one packet that only the NIC counted is a proof.
//! * **Share.** A super-frame is one packet at one place and many at another (GRO, segmentation), and between two
//!   places packets are dropped or queued. So the share of the packets that were seen is not exact. But these
//!   effects never bring the share of packets and the share of bytes both below a half.
//! * **Gap.** A packet in the counters of a macvlan or an ipvlan is one packet at the hook. So a gap between the two
//!   numbers that grows again and again is a bypass, even a small one. `gap` explains why queues and drops do not cause
//!   such a gap.
//! * **Nearly all** was seen if it is 7/8 of the bytes *and* of the packets. If super-frames can make the numbers of
//!   packets differ ([`Kind`]), the tolerance for packets is the number of segments in the bytes that were seen.
//!
//! Packets pass while the counters are read. So the counters of the session and of the node side are read twice,
//! before and after the NIC's. Of each pair the judge uses the value that favours coverage, so a flood raises no
//! alarm.
//!
//! Packets that the tap misses on the node side of a veth can be seen at the NIC: [`Route`] decides on which side the
//! tap is.
//!
//! Pure: the loop passes the readings and the state of the hook, and reports the result. There is no clock: a time is
//! the duration since an arbitrary fixed moment.

mod gap;
mod judge;
mod route;
#[cfg(test)]
mod tests;

use std::{fmt, time::Duration};

/// Each counter includes different headers, so bytes are compared with a tolerance.
pub use mirror_common::abi::Counter as Count;

pub use self::{
    judge::{CLEAR, FEW, Judge, QUIET, Totals},
    route::{LONGEST, Reason, Route, cni_of},
};
use crate::model::Hidden;

/// The packets of a NIC in one direction, since the NIC was created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Carried {
    /// The NIC's own counters (`IFLA_STATS64`), read inside the pod.
    pub nic: Count,
    /// The packet counter of the node side of the veth, read just before and just after `nic`. `None`: the tap is at
    /// the NIC itself, or in the egress chain of a netkit device.
    pub end: Option<[u64; 2]>,
}

impl Carried {
    /// The minimum number of packets that bypassed the node side between two readings. `None`: a counter decreased.
    fn around(then: &Self, now: &Self) -> Option<u64> {
        let (Some([old_before, old_after]), Some([before, after])) = (then.end, now.end) else {
            return Some(0);
        };
        now.nic.packets.checked_sub(then.nic.packets)?;
        before.checked_sub(old_after)?;
        // The minimum number of packets that had bypassed the node side now, and the maximum then.
        let least = i128::from(now.nic.packets) - i128::from(after);
        let most = i128::from(then.nic.packets) - i128::from(old_before);
        Some(u64::try_from(least - most).unwrap_or(0))
    }
}

/// The packets that one session of the tap saw in one direction, over all verdicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// The session's number. Counts of different sessions cannot be compared, because each starts at zero.
    pub serial: u32,
    /// The count before the NIC's counters were read.
    pub before: Count,
    /// The count after the NIC's counters were read.
    pub after: Count,
}

/// The counters of one direction of a NIC, at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    /// Time of the reading.
    pub at: Duration,
    /// The counters of the NIC.
    pub carried: Carried,
    /// The counters of a session. `None`: no session existed both before and after the NIC was read.
    pub seen: Option<Seen>,
}

/// How the packet counters of a NIC relate to the packets at the hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// One packet in the NIC's counters is one packet at the hook (macvlan, ipvlan). These devices accept super-frames
    /// whatever offloads are set.
    Plain,
    /// One super-frame at the hook can be many packets in the NIC's counters: segments on the wire (a physical NIC), or
    /// packets that the kernel segments between the hook and the NIC (a veth without offloads, and any other kind).
    Segments,
    /// As [`Self::Plain`], but packets from outside the node do not pass the hook: an ipvlan in mode l3s.
    L3s,
}

/// The state of the hook that sees a direction.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum AtHook {
    /// Podmirror's program runs there, and no other program or filter is ahead of it.
    #[default]
    First,
    /// Other programs or filters are ahead of it, or the hook does not exist.
    Behind(Hidden),
    /// No podmirror program runs there.
    Absent,
}

/// The coverage of one direction of a NIC.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// Podmirror's program sees what the NIC carries.
    Covered,
    /// The NIC carries packets that do not pass the hook.
    Bypassed(Way),
    /// Another program or filter is ahead of podmirror's at the hook, and can end the processing of packets.
    Hidden(Hidden),
    /// No podmirror program runs at the hook.
    NoHook,
    /// The coverage cannot be determined.
    Unknown(Doubt),
}

/// How packets bypass the hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// Unknown: the counters do not show it.
    Unseen,
    /// After the hooks of the NIC, which is an ipvlan in mode l3s.
    L3s,
    /// Past the node side of the veth, by `bpf_redirect_peer`.
    Peer,
}

/// Why the coverage cannot be determined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Doubt {
    /// The NIC carries too few packets.
    Idle,
    /// Much of the traffic was seen, but not nearly all.
    Differs,
    /// On this kernel, the NIC's counters do not include packets that bypass the node side of the veth.
    Kernel,
    /// All packets were seen, but the NIC is an ipvlan in mode l3s, and can receive packets that do not pass its hooks.
    L3s,
    /// The counters cannot be read.
    Unread,
}

impl State {
    /// All values of [`Self::name`].
    pub const NAMES: [&str; 5] = ["Covered", "Bypassed", "Hidden", "NoHook", "Unknown"];

    /// The name in status and metrics.
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
            Self::Covered => write!(f, "podmirror's program sees what the NIC carries"),
            Self::Bypassed(way) => way.fmt(f),
            Self::Hidden(hidden) => hidden.fmt(f),
            Self::NoHook => write!(f, "no podmirror program runs at the hook"),
            Self::Unknown(doubt) => doubt.fmt(f),
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Peer => {
                "other software delivers packets to the NIC past the node side of its veth, where the tap is \
                 (bpf_redirect_peer, as in Cilium's eBPF host routing and Calico's eBPF dataplane)"
            }
            Self::L3s => {
                "the NIC is an ipvlan in mode l3s: packets from outside the node reach the pod's IP layer after \
                 the hooks of the NIC"
            }
            Self::Unseen => {
                "the NIC carries packets that the tap does not see, and the agent finds no program or filter that hides \
                 them; the reason can be an XDP program of the device, or another program inside the pod"
            }
        })
    }
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Idle => "the NIC has carried too few packets recently to judge",
            Self::Differs => "the tap sees much of what the NIC carries, but not nearly all of it",
            Self::Kernel => {
                "this kernel does not count packets that other software delivers to the NIC past the node side of its veth \
                 (bpf_redirect_peer), so they can be missing without notice; Linux 6.7 and newer count them"
            }
            Self::L3s => {
                "the tap sees what the NIC carries now, but the NIC is an ipvlan in mode l3s: packets from outside the node \
                 reach the pod's IP layer after the hooks of the NIC"
            }
            Self::Unread => "the counters of the NIC cannot be read",
        })
    }
}
