//! The decision about one packet and one session, step by step, and what the kernel's answer to the copy means.
//!
//! Pure: called by the tap programs for every packet, by `mirror-agent explain`, and by tests on the host. The order
//! of the steps is the order in which they are written here, with [`Meter::take`](crate::limit::Meter::take) last:
//! a limit ahead of the filter would lose the few packets that matter among the many that do not.

use crate::{
    abi::{
        COPIED_MARK, COPIED_MASK, FORM_BITS, Session, TARGET_CUTS, TARGET_QUEUELESS, TARGET_UP, Tap, Target,
    },
    filter::{self, FilterProgram},
    packet::Header,
    sample::in_sample,
    verdict::{Hook, Verdict},
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

/// What `tc_index` says once the packet has been copied in the form of the mark `form` ([`Session::mark`]), beside
/// what it said before.
#[inline(always)]
pub const fn mark(tc_index: u16, form: u32) -> u16 {
    let others = tc_index & !(COPIED_MASK | FORM_BITS);
    let forms = if tc_index & COPIED_MASK == COPIED_MARK { tc_index & FORM_BITS } else { 0 };
    COPIED_MARK | forms | form as u16 & FORM_BITS | others
}

/// Whether `tc_index` says that the packet has been copied in the form of the mark `form`.
#[inline(always)]
pub const fn is_marked(tc_index: u16, form: u32) -> bool {
    tc_index & COPIED_MASK == COPIED_MARK && tc_index & form as u16 & FORM_BITS != 0
}

/// The first step: whether `packet` is one for the session at all, by its direction and its mark.
#[inline(always)]
pub const fn screen(packet: Packet, tap: &Tap, session: &Session) -> Result<(), Verdict> {
    let kind = tap.kind();
    if session.directions & kind.direction(packet.hook).bit() == 0 {
        return Err(Verdict::OtherDirection);
    }
    // What leaves a pod has met no tap of this node in this form, whatever its tc_index says: a pod that routes
    // sends a changed packet, and a pod that marks its own packets must not be able to hide them.
    if !kind.leaves_pod(packet.hook) && is_marked(packet.tc_index, session.mark) {
        return Err(Verdict::Duplicate);
    }
    Ok(())
}

/// The second step, for sessions with a filter or a sample: whether the packet passes both.
#[inline(always)]
pub fn sift(filter: Option<&FilterProgram>, share: u32, seed: u32, header: &Header) -> Result<(), Verdict> {
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
pub const fn aim(packet: Packet, session: &Session, target: &Target) -> Result<u32, Verdict> {
    if target.ifindex == 0 || target.flags & TARGET_UP == 0 {
        return Err(Verdict::TargetDown);
    }
    if target.ifindex == packet.ifindex {
        return Err(Verdict::Loop);
    }
    if session.snaplen != 0 && target.flags & TARGET_CUTS == 0 {
        return Err(Verdict::Uncut);
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
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn marks_add_up(tc_index: u16, first in 0..4, second in 0..4) {
            let marked = mark(mark(tc_index, 0x100_u32 << first), 0x100_u32 << second);
            for form in 0..4 {
                let expected = form == first || form == second || is_marked(tc_index, 0x100_u32 << form);
                prop_assert_eq!(is_marked(marked, 0x100_u32 << form), expected);
            }
            prop_assert!(!is_marked(marked, 0), "a form without a bit is never marked");
            prop_assert_eq!(marked & 0x00ff, tc_index & 0x00ff, "those bits are others'");
        }

        /// The minor of a class id, which the kernel leaves in `tc_index`, is a small number.
        #[test]
        fn small_numbers_in_tc_index_are_no_mark(tc_index in 0..0xb000u16, form: u32) {
            prop_assert!(!is_marked(tc_index, form));
        }

        #[test]
        fn only_zero_means_copied(code: i64, flags in 0..4u32) {
            let target = Target { ifindex: 1, flags, ..Target::default() };
            prop_assert_eq!(outcome(code, &target) == Verdict::Copied, code == 0);
        }
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
