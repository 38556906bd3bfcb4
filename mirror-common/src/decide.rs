//! The decision about one packet at one tap: all steps in order, up to the counter of each session.
//!
//! Pure: [`mirror`] is called by the tap programs for every packet, and by tests on the host. It reaches the kernel
//! through [`Kernel`]. The steps of a session, with the names of their functions:
//!
//! 1. `check_direction`: does the session copy packets of this kind and direction?
//! 2. `check_selection`: does the session select the packet, by its filter and by its header? (`facts`)
//! 3. `check_duplicate`: has the packet been copied in the same form already? (`marks`)
//! 4. `check_target`: is there a target, can it take a copy in the session's form, and does anybody read it?
//! 5. charge: do the rates and budgets allow a copy? Late, so that only copies are charged. (`limit`)
//! 6. copy: clone to the target's device, or write a record to its ring, and evaluate the result.
//!
//! Exactly one verdict is counted for each session; none, if the packet is left to the pod side of the tap.

use crate::{
    abi::{
        FILTER_DIFFERS, FILTER_MATCHES, MAX_SESSIONS_PER_TAP, SESSION_FILTERED, SESSION_METERED,
        SESSION_POD_METERED, SESSION_SEGMENTS, Session, TAP_CAPTURES_ONLY, TAP_SEEN_INSIDE, TARGET_CUTS,
        TARGET_GUARDED, TARGET_METERED, TARGET_QUEUELESS, TARGET_STREAM, TARGET_TUNNEL, TARGET_UP,
        TARGET_WHEN_READ, Tap,
    },
    facts::{self, Facts},
    limit::charge::Paid,
    marks,
    verdict::{Direction, Hook, Verdict},
};

/// The facts about a packet for the decision.
#[derive(Debug, Clone, Copy)]
pub struct Packet {
    /// The hook at which the packet is seen.
    pub hook: Hook,
    /// The device that it is on.
    pub ifindex: u32,
    /// `skb->tc_index` when the program began.
    pub tc_index: u16,
}

/// The facts about a target for the decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reach {
    /// Index, in the tap's namespace, of the device that receives the copies:
    /// [`Target::ifindex`](crate::abi::Target::ifindex) or, inside a pod, [`Tap::exit`]. 0: there is none.
    pub ifindex: u32,
    /// As [`Target::flags`](crate::abi::Target::flags).
    pub flags: u32,
}

/// The outcome of a clone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cloned {
    /// The return code of `bpf_clone_redirect`.
    pub code: i64,
    /// The second stage could not cut the clone, and dropped it.
    pub is_uncut: bool,
    /// Bytes of the packet that the clone lacks at the target.
    pub removed: u32,
}

/// A question about a packet in a session. The answer is yes or no.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Question {
    /// Step 2 with [`SESSION_SEGMENTS`]: is the packet a super-frame?
    SuperFrame,
    /// Step 4 with [`TARGET_GUARDED`]: is the packet the collector's own, or one of a podmirror tunnel, which contains
    /// a copy from another node? A packet that leaves a pod contains none.
    Refused,
    /// Step 4 with [`TARGET_WHEN_READ`]: does nobody read the target now?
    Unread,
}

/// The inputs and the effects of the decision. The tap programs implement it with the kernel, the tests with a model.
pub trait Kernel {
    /// Step 2 for a session with a filter: runs the filter's program and returns its answer, or any other number if the
    /// program does not exist.
    fn filter(&mut self, session: &Session) -> u32;
    /// Answers a question about the packet in this session.
    fn answer(&mut self, question: Question, packet: Packet, tap: &Tap, session: &Session) -> bool;
    /// Step 2 for a session that [needs facts](facts::are_needed) about the packet's header.
    fn facts(&mut self, session: &Session) -> Facts;
    /// The target at this index of `TARGETS`, as seen from the tap.
    fn target(&mut self, tap: &Tap, index: u32) -> Option<Reach>;
    /// Step 5 for a session that has limits, or whose target has a ceiling: [`charge`](crate::limit::charge::charge).
    /// Returns what it has charged, also if one level then refuses the copy.
    fn charge(&mut self, tap: &Tap, session: &Session, target: Reach) -> (Paid, Result<(), Verdict>);
    /// Refunds what [`Self::charge`] took: [`give_back`](crate::limit::charge::give_back).
    fn give_back(&mut self, tap: &Tap, session: &Session, paid: Paid);
    /// Clones the packet, with `tc_index` in the clone, to the device of the session's target. At that device the clone
    /// is cut to the session's snap length, and encapsulated if the device is a tunnel's.
    fn clone_to(&mut self, session: &Session, direction: Direction, target: Reach, tc_index: u16) -> Cloned;
    /// Writes a record of the packet into the ring of the session's target. Returns the bytes of the packet that the
    /// record lacks.
    fn record(&mut self, session: &Session, direction: Direction) -> Result<u32, Verdict>;
    /// Writes `skb->tc_index` of the packet itself.
    fn set_tc_index(&mut self, tc_index: u16);
    /// Whether a marked packet is still the one that another hook copied: [`identity::stands_for`] of the last
    /// [`Self::note_copy`] of this identity.
    ///
    /// [`identity::stands_for`]: crate::identity::stands_for
    fn is_still_copied(&mut self, packet: Packet) -> bool;
    /// Notes the identity of a packet that was copied at this hook.
    fn note_copy(&mut self, packet: Packet);
    /// Counts the packet for a session. `removed`: the bytes of the packet that its copy lacks; 0 without a copy.
    fn count(&mut self, session: &Session, direction: Direction, verdict: Verdict, removed: u32);
    /// 0, in a form that the kernel's verifier does not treat as a constant. Added to a number with few values, it
    /// keeps the verifier from exploring all sessions once for each value.
    fn zero(&mut self) -> u32 {
        0
    }
}

/// Runs the packet through every session of the tap, and writes the marks of the copied forms to it.
#[inline(always)]
pub fn mirror<K: Kernel>(kernel: &mut K, packet: Packet, tap: &Tap) {
    let zero = kernel.zero();
    let direction = Direction::of_bit(tap.kind().direction(packet.hook) as u32 ^ zero);
    if tap.flags & TAP_SEEN_INSIDE != 0 && matches!(packet.hook, Hook::Egress) {
        return;
    }
    let before = packet.tc_index;
    let packet = marks::standing(kernel, packet, tap.kind().leaves_pod(packet.hook));
    // Numbers that outlive the loop over the sessions are unknown to the verifier, see `Kernel::zero`.
    let standing = marks::forms(packet.tc_index) | zero;
    // One bit for each session, by its index.
    let mut copies = Copies { forms: standing as u64, sessions: zero as u64 };
    for place in 0..MAX_SESSIONS_PER_TAP {
        if place as u64 >= tap.session_count as u64 {
            break;
        }
        let session = &tap.sessions[place];
        let (verdict, removed) = match run(kernel, packet, direction, tap, session, copies) {
            Ok(removed) => {
                copies.forms |= session.mark as u64;
                copies.sessions |= 1 << place;
                (Verdict::Copied, removed)
            }
            Err(verdict) => (verdict, 0),
        };
        kernel.count(session, direction, verdict, removed);
    }
    let forms = copies.forms as u32;
    // A packet with a valid mark keeps the identity that the first hook noted.
    if standing == 0 && forms != 0 {
        kernel.note_copy(packet);
    }
    let after = marks::with_forms(packet.tc_index, forms);
    if after != before && tap.flags & TAP_CAPTURES_ONLY == 0 {
        kernel.set_tc_index(after);
    }
}

/// The existing copies of a packet.
///
/// In 64 bits, like all values compared for every packet: this BPF target has 64-bit comparisons only, and before a
/// 32-bit one the compiler would clear the upper half of both numbers. (32-bit instructions exist, but Linux 5.10 takes
/// too long to verify programs that use them.)
#[derive(Debug, Clone, Copy)]
struct Copies {
    /// The bits of their forms, for forms with a bit: [`Session::mark`].
    forms: u64,
    /// The sessions of this tap that have made a copy, as in [`Session::alike`].
    sessions: u64,
}

/// Runs the packet through one session. Returns the bytes of the packet that its copy lacks.
#[inline(always)]
fn run<K: Kernel>(
    kernel: &mut K,
    packet: Packet,
    direction: Direction,
    tap: &Tap,
    session: &Session,
    copies: Copies,
) -> Result<u32, Verdict> {
    check_direction(packet, direction, session)?;
    check_selection(kernel, packet, tap, session)?;
    check_duplicate(session, copies)?;
    let target = kernel.target(tap, session.target).ok_or(Verdict::Failed)?;
    check_target(packet, session, target)?;
    if target.flags & TARGET_GUARDED != 0 && kernel.answer(Question::Refused, packet, tap, session) {
        return Err(Verdict::Loop);
    }
    if target.flags & TARGET_WHEN_READ != 0 && kernel.answer(Question::Unread, packet, tap, session) {
        return Err(Verdict::Unread);
    }
    let has_limits =
        session.flags & (SESSION_METERED | SESSION_POD_METERED) != 0 || target.flags & TARGET_METERED != 0;
    let (paid, charged) =
        if has_limits { kernel.charge(tap, session, target) } else { (Paid::NOTHING, Ok(())) };
    let copied = match charged {
        Err(verdict) => Err(verdict),
        Ok(()) if target.flags & TARGET_STREAM != 0 => kernel.record(session, direction),
        Ok(()) => {
            let cloned = kernel.clone_to(session, direction, target, marks::of_copy(packet.tc_index));
            outcome(cloned, target.flags).map(|()| cloned.removed)
        }
    };
    if copied.is_err() && paid != Paid::NOTHING {
        kernel.give_back(tap, session, paid);
    }
    copied
}

/// Whether a set of bits contains any of these.
#[inline(always)]
const fn meet(bits: u64, these: u32) -> bool {
    bits & these as u64 != 0
}

/// Step 1: whether the session copies packets of this kind and direction at all.
#[inline(always)]
const fn check_direction(packet: Packet, direction: Direction, session: &Session) -> Result<(), Verdict> {
    if !meet(session.directions as u64, direction.bit()) {
        return Err(Verdict::OtherDirection);
    }
    if marks::is_copy(packet.tc_index) {
        return Err(Verdict::Loop);
    }
    Ok(())
}

/// Step 2: whether the session selects the packet, by its filter and by its header.
#[inline(always)]
fn check_selection<K: Kernel>(
    kernel: &mut K,
    packet: Packet,
    tap: &Tap,
    session: &Session,
) -> Result<(), Verdict> {
    if session.flags & SESSION_FILTERED != 0 {
        match kernel.filter(session) {
            FILTER_MATCHES => {}
            FILTER_DIFFERS if is_left_to_reader(kernel, packet, tap, session) => {}
            FILTER_DIFFERS => return Err(Verdict::Filtered),
            // A filter that cannot run lets nothing pass.
            _ => return Err(Verdict::Failed),
        }
    }
    if facts::are_needed(session) { kernel.facts(session).check(session) } else { Ok(()) }
}

/// Whether the filter is left to the reader: the packet is a super-frame for a stream, whose reader filters each
/// segment.
#[inline(always)]
fn is_left_to_reader<K: Kernel>(kernel: &mut K, packet: Packet, tap: &Tap, session: &Session) -> bool {
    session.flags & SESSION_SEGMENTS != 0
        && kernel.answer(Question::SuperFrame, packet, tap, session)
        && kernel.target(tap, session.target).is_some_and(|target| target.flags & TARGET_STREAM != 0)
}

/// Step 3: whether there is no copy in the session's form yet.
#[inline(always)]
const fn check_duplicate(session: &Session, copies: Copies) -> Result<(), Verdict> {
    let has_copy = meet(copies.forms, session.mark) || meet(copies.sessions, session.alike);
    if has_copy { Err(Verdict::Duplicate) } else { Ok(()) }
}

/// Step 4: whether the target can take a copy of the packet in the session's form.
#[inline(always)]
const fn check_target(packet: Packet, session: &Session, target: Reach) -> Result<(), Verdict> {
    let is_stream = target.flags & TARGET_STREAM != 0;
    if target.flags & TARGET_UP == 0 || (target.ifindex == 0 && !is_stream) {
        return Err(Verdict::TargetDown);
    }
    // A record uses no device, and the program itself sets its length.
    if is_stream {
        return Ok(());
    }
    if target.ifindex == packet.ifindex {
        return Err(Verdict::Loop);
    }
    if target.flags & TARGET_CUTS == 0 {
        // Without `deliver`, the copies would not be encapsulated.
        if target.flags & TARGET_TUNNEL != 0 {
            return Err(Verdict::TargetDown);
        }
        if session.snaplen != 0 {
            return Err(Verdict::Uncut);
        }
    }
    Ok(())
}

/// Return codes of `bpf_clone_redirect` that concern the device (include/linux/netdevice.h, errno.h).
const NET_XMIT_SUCCESS: i64 = 0;
const NET_XMIT_CN: i64 = 2;
const EINVAL: i64 = 22;
const ENETDOWN: i64 = 100;

/// The outcome of a clone to a target with these flags.
///
/// The codes, from Linux 5.10 to 6.18 (`__bpf_tx_skb()` in net/core/filter.c, `__dev_queue_xmit()` in net/core/dev.c):
///
/// * Negative: the clone reached no queue and no driver. There is no such device (`EINVAL`). Or it is down, or the
///   kernel is in its own output path too often already (`ENETDOWN`). Or the copy could not be made: there is no
///   memory, or the kernel could not make a checksum or segments for a device without offloads (`ENOMEM`), or nothing
///   is left of the copy for a device without link-layer headers (`ERANGE`).
/// * Positive: `NET_XMIT_*`. These codes must never reach the verdict of the program: `NET_XMIT_CN` and `TC_ACT_SHOT`
///   are the same number.
/// * A device with a queue: 0 says that the queue has taken the copy, or passed it to the driver. What happens to
///   the copy after the queue, or to the segments that the kernel makes of it there, is not known. `NET_XMIT_DROP`:
///   the queue is full (pfifo). `NET_XMIT_CN`: the queue has dropped a packet of this flow (fq_codel, CAKE, RED);
///   or the device is down, and `noop_qdisc`, which drops all packets, has replaced the queue.
/// * A device without a queue ([`TARGET_QUEUELESS`]): the answer is the driver's. 0 says that the driver was called
///   and has taken the copy or dropped it in silence. `NET_XMIT_DROP` says that it did not take the copy (a veth
///   whose peer's MTU is less). Where the kernel segments the copy, because the device has no offloads, the answer
///   is for the last segment. Only `noop_qdisc` answers `NET_XMIT_CN`. The same is true of a device with a queue
///   that never gives this answer, such as pfifo: the agent may set the flag for such a device.
#[inline(always)]
pub const fn outcome(cloned: Cloned, target_flags: u32) -> Result<(), Verdict> {
    let Cloned { code, is_uncut, .. } = cloned;
    if code == NET_XMIT_SUCCESS && !is_uncut {
        return Ok(());
    }
    let is_down = code == NET_XMIT_CN && target_flags & TARGET_QUEUELESS != 0;
    if is_uncut {
        Err(Verdict::Uncut)
    } else if is_down || code == -EINVAL || code == -ENETDOWN {
        Err(Verdict::TargetDown)
    } else if code > 0 {
        Err(Verdict::Congested)
    } else {
        Err(Verdict::Failed)
    }
}

#[cfg(test)]
mod tests;
