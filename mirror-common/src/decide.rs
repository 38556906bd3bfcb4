//! The decision about one packet and one session, step by step, and what the kernel's answer to the copy means.
//!
//! Pure: called by the tap programs for every packet, by `mirror-agent explain`, and by tests on the host. The order
//! of the steps is the order in which they are written here, with [`Meter::take`](crate::limit::Meter::take) last:
//! a limit ahead of the filter would lose the few packets that matter among the many that do not.

use crate::{
    abi::{
        COPIED_MARK, COPIED_MASK, Session, TAP_AT_PEER, TARGET_BITS, TARGET_QUEUELESS, TARGET_UP, Tap, Target,
    },
    filter::{self, FilterProgram},
    packet::Header,
    sample::in_sample,
    verdict::{Direction, Hook, Verdict},
};

/// What the decision needs to know of a packet.
#[derive(Debug, Clone, Copy)]
pub struct Packet {
    /// The hook at which the packet is seen.
    pub hook: Hook,
    /// The device that it is on.
    pub ifindex: u32,
    /// `skb->tc_index` as it stands now.
    pub tc_index: u16,
}

/// The mark of a packet that has been copied to `target`, added to what `tc_index` said before.
#[inline(always)]
pub const fn mark(tc_index: u16, target: u32) -> u16 {
    let others = tc_index & !(COPIED_MASK | TARGET_BITS);
    let targets = if tc_index & COPIED_MASK == COPIED_MARK { tc_index & TARGET_BITS } else { 0 };
    COPIED_MARK | targets | target_bit(target) | others
}

/// Whether `tc_index` says that the packet has been copied to `target`.
#[inline(always)]
pub const fn is_marked(tc_index: u16, target: u32) -> bool {
    tc_index & COPIED_MASK == COPIED_MARK && tc_index & target_bit(target) != 0
}

#[inline(always)]
const fn target_bit(target: u32) -> u16 {
    0x0100 << (target & 3)
}

/// The first step: whether a session wants `packet` at all, by its direction and its mark.
#[inline(always)]
pub const fn wanted(packet: Packet, tap: &Tap, session: &Session) -> Result<(), Verdict> {
    let at_peer = tap.flags & TAP_AT_PEER != 0;
    let direction = Direction::at(packet.hook, at_peer);
    if session.directions & direction.bit() == 0 {
        return Err(Verdict::OtherDirection);
    }
    // What leaves a pod has met no tap of this node in this form, whatever its tc_index says: a pod that routes
    // sends a changed packet, and a pod that marks its own packets must not be able to hide them.
    let leaves_pod = at_peer && matches!(direction, Direction::Egress);
    if !leaves_pod && is_marked(packet.tc_index, session.target) {
        return Err(Verdict::Duplicate);
    }
    Ok(())
}

/// The second step, for sessions with a filter or a sample: whether the packet is one of those that were chosen.
#[inline(always)]
pub fn chosen(filter: Option<&FilterProgram>, share: u32, seed: u32, header: &Header) -> Result<(), Verdict> {
    if filter.is_some_and(|filter| !filter::matches(filter, header)) {
        return Err(Verdict::Filtered);
    }
    if !in_sample(header, seed, share) {
        return Err(Verdict::SampledOut);
    }
    Ok(())
}

/// The third step: the ifindex to which a copy must go. Limits come after it, so that a lost copy costs none of them.
#[inline(always)]
pub const fn reachable(packet: Packet, target: &Target) -> Result<u32, Verdict> {
    if target.ifindex == 0 || target.flags & TARGET_UP == 0 {
        return Err(Verdict::TargetDown);
    }
    if target.ifindex == packet.ifindex {
        return Err(Verdict::Loop);
    }
    Ok(target.ifindex)
}

/// The answers of `bpf_clone_redirect` that speak of the device (include/linux/netdevice.h, errno.h).
const NET_XMIT_SUCCESS: i64 = 0;
const NET_XMIT_CN: i64 = 2;
const EINVAL: i64 = 22;
const ENETDOWN: i64 = 100;

/// What the return code of `bpf_clone_redirect` to `target` means.
///
/// Negative codes are errors: no such device (`EINVAL`), the device is down (`ENETDOWN`), or the copy could not be
/// made. Positive ones are `NET_XMIT_*`: the device, or its queue, dropped the copy. They must never reach the verdict
/// of the program: `NET_XMIT_CN` and `TC_ACT_SHOT` are the same number. `NET_XMIT_CN` is also what the `noop_qdisc` of a
/// device that is down answers, and a device without a queue has no other reason for it.
#[inline(always)]
pub const fn outcome(code: i64, target: &Target) -> Verdict {
    let is_down = code == NET_XMIT_CN && target.flags & TARGET_QUEUELESS != 0;
    if code == NET_XMIT_SUCCESS {
        Verdict::Copied
    } else if is_down || code == -EINVAL || code == -ENETDOWN {
        Verdict::TargetDown
    } else if code > 0 {
        Verdict::Congested
    } else {
        Verdict::Failed
    }
}

#[cfg(test)]
mod tests {
    use proptest::{prelude::*, sample::select};

    use super::*;
    use crate::abi::MAX_TARGETS;

    /// Every packet, tap, session and target that can stand in the maps, and many that should not.
    fn world() -> impl Strategy<Value = (Packet, Tap, Session, Target)> {
        let tc_index = prop_oneof![Just(0), any::<u16>(), (0..0x1000u16).prop_map(|bits| COPIED_MARK | bits)];
        let packet = (select(&Hook::ALL[..]), 1..4u32, tc_index)
            .prop_map(|(hook, ifindex, tc_index)| Packet { hook, ifindex, tc_index });
        let tap = (0..2u32).prop_map(|flags| Tap { flags, session_count: 1, ..Tap::default() });
        let session = (0..MAX_TARGETS, 0..4u32).prop_map(|(target, directions)| Session {
            target,
            directions,
            ..Session::default()
        });
        let target =
            (0..4u32, 0..4u32).prop_map(|(ifindex, flags)| Target { ifindex, flags, ..Target::default() });
        (packet, tap, session, target)
    }

    /// The steps that need nothing but the packet's place.
    fn decide(packet: Packet, tap: &Tap, session: &Session, target: &Target) -> Result<u32, Verdict> {
        wanted(packet, tap, session)?;
        reachable(packet, target)
    }

    proptest! {
        #[test]
        fn a_copy_goes_to_a_target_that_is_up_and_never_back_to_where_the_packet_is(
            (packet, tap, session, target) in world(),
        ) {
            if let Ok(ifindex) = decide(packet, &tap, &session, &target) {
                prop_assert_eq!(ifindex, target.ifindex);
                prop_assert_ne!(ifindex, packet.ifindex);
                prop_assert_ne!(ifindex, 0);
                prop_assert_ne!(target.flags & TARGET_UP, 0);
                let direction = Direction::at(packet.hook, tap.flags & TAP_AT_PEER != 0);
                prop_assert_ne!(session.directions & direction.bit(), 0);
            }
        }

        /// The receiver's tap skips what the sender's has copied; no other target and no foreign value counts.
        #[test]
        fn a_marked_packet_is_a_duplicate_for_that_target_only(
            (packet, tap, session, target) in world(), other in 0..MAX_TARGETS,
        ) {
            let copied = Packet { tc_index: mark(packet.tc_index, other), ..packet };
            let leaves_pod = packet.hook == Hook::Ingress && tap.flags & TAP_AT_PEER != 0;
            match decide(copied, &tap, &session, &target) {
                Err(Verdict::Duplicate) => {
                    prop_assert!(!leaves_pod, "what leaves a pod is always new");
                    prop_assert!(session.target == other || is_marked(packet.tc_index, session.target));
                }
                verdict => prop_assert!(
                    leaves_pod || session.target != other || verdict == Err(Verdict::OtherDirection)
                ),
            }
        }

        #[test]
        fn marks_add_up(tc_index: u16, first in 0..MAX_TARGETS, second in 0..MAX_TARGETS) {
            let marked = mark(mark(tc_index, first), second);
            for target in 0..MAX_TARGETS {
                let expected = target == first || target == second || is_marked(tc_index, target);
                prop_assert_eq!(is_marked(marked, target), expected);
            }
            prop_assert_eq!(marked & 0x00ff, tc_index & 0x00ff, "those bits are others'");
        }

        /// The minor of a class id, which the kernel leaves in `tc_index`, is a small number.
        #[test]
        fn small_numbers_in_tc_index_are_no_mark(tc_index in 0..0xb000u16, target in 0..MAX_TARGETS) {
            prop_assert!(!is_marked(tc_index, target));
        }

        #[test]
        fn only_zero_means_copied(code: i64, flags in 0..4u32) {
            let target = Target { ifindex: 1, flags, ..Target::default() };
            prop_assert_eq!(outcome(code, &target) == Verdict::Copied, code == 0);
        }
    }

    #[test]
    fn both_hooks_of_a_veth_are_the_other_way_round() {
        assert_eq!(Direction::at(Hook::Ingress, true), Direction::Egress);
        assert_eq!(Direction::at(Hook::Egress, true), Direction::Ingress);
        assert_eq!(Direction::at(Hook::Ingress, false), Direction::Ingress);
        assert_eq!(Direction::at(Hook::Egress, false), Direction::Egress);
    }

    #[test]
    fn a_device_without_a_queue_is_down_where_another_is_congested() {
        let target = |flags| Target { ifindex: 1, flags, ..Target::default() };
        assert_eq!(outcome(2, &target(TARGET_UP)), Verdict::Congested);
        assert_eq!(outcome(2, &target(TARGET_UP | TARGET_QUEUELESS)), Verdict::TargetDown);
        assert_eq!(outcome(1, &target(TARGET_UP | TARGET_QUEUELESS)), Verdict::Congested, "too long for it");
        for gone in [-EINVAL, -ENETDOWN] {
            assert_eq!(outcome(gone, &target(TARGET_UP)), Verdict::TargetDown);
        }
        assert_eq!(outcome(-12, &target(TARGET_UP)), Verdict::Failed);
    }
}
