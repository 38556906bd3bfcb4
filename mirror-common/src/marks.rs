//! Marks: the information about the copies of a packet in `skb->tc_index`, and when it still holds.
//!
//! A packet between two mirrored pods of one node passes two taps, and the reader of the mirror interface is to get it
//! once. So a packet that has been copied carries a mark: a bit for each form, see
//! [`Session::mark`](crate::abi::Session::mark). A copy itself carries another mark, so that it is never copied. Called
//! by [`decide`](crate::decide).

use crate::{
    abi::{COPIED_INSIDE_MARK, COPIED_MARK, COPIED_MASK, COPY_MARK, FORM_BITS},
    decide::{Kernel, Packet},
    verdict::{Hook, TapKind},
};

/// The bits of `tc_index` that are ours as soon as a mark stands there.
const OURS: u16 = COPIED_MASK | FORM_BITS;

/// The forms in which `tc_index` says that the packet has been copied.
#[inline(always)]
pub const fn forms(tc_index: u16) -> u32 {
    if is_copied(tc_index) { (tc_index & FORM_BITS) as u32 } else { 0 }
}

/// Whether a mark of a packet that has been copied stands in `tc_index`.
#[inline(always)]
const fn is_copied(tc_index: u16) -> bool {
    tc_index & COPIED_MASK == COPIED_MARK || is_copied_inside(tc_index)
}

/// Whether `tc_index` says that a tap inside a pod has copied the packet last.
#[inline(always)]
const fn is_copied_inside(tc_index: u16) -> bool {
    tc_index & COPIED_MASK == COPIED_INSIDE_MARK
}

/// Whether `tc_index` says that the packet is a copy.
#[inline(always)]
pub const fn is_copy(tc_index: u16) -> bool {
    tc_index & COPIED_MASK == COPY_MARK
}

/// `tc_index` of a copy of a packet.
#[inline(always)]
pub const fn of_copy(tc_index: u16) -> u16 {
    COPY_MARK | tc_index & !OURS
}

/// Whether a mark of ours stands in `tc_index`.
#[inline(always)]
const fn is_marked(tc_index: u16) -> bool {
    is_copy(tc_index) || is_copied(tc_index)
}

/// `tc_index` without a mark of ours; anything else stays.
#[inline(always)]
pub const fn unmarked(tc_index: u16) -> u16 {
    if is_marked(tc_index) { tc_index & !OURS } else { tc_index }
}

/// `tc_index` of a packet that has been copied in these forms and no others, those that were not there by a tap of this
/// kind. The mark of a copy stays.
#[inline(always)]
pub const fn with_forms(tc_index: u16, forms: u32, kind: TapKind) -> u16 {
    if forms != 0 {
        let mark = if self::forms(tc_index) == forms {
            tc_index & COPIED_MASK
        } else if matches!(kind, TapKind::PodNic) {
            COPIED_INSIDE_MARK
        } else {
            COPIED_MARK
        };
        mark | forms as u16 & FORM_BITS | tc_index & !OURS
    } else if is_copy(tc_index) {
        tc_index
    } else {
        unmarked(tc_index)
    }
}

/// The packet with the marks that still hold.
///
/// No mark holds for a packet that leaves a pod: it has passed no tap in its present state, with any `tc_index`. A pod
/// that routes sends a changed packet, and a pod must not be able to hide its packets by marking them. No mark holds
/// either for a packet that comes back to the tap that has copied it, see [`came_back`].
#[inline(always)]
pub fn standing<K: Kernel>(kernel: &mut K, packet: Packet, kind: TapKind) -> Packet {
    if !is_marked(packet.tc_index) {
        return packet;
    }
    let is_new = kind.leaves_pod(packet.hook) || forms(packet.tc_index) != 0 && came_back(kernel, packet);
    let tc_index = if is_new { unmarked(packet.tc_index) } else { packet.tc_index };
    Packet { tc_index, ..packet }
}

/// Whether a marked packet has been copied at this very tap and now comes back to it. It was either answered in place
/// (Cilium's ARP, ICMP errors and neighbour discovery), or sent back by a service or a bridge. The tap has copied the
/// packet on its way out. The packet that comes back has at least other addresses.
///
/// The device that received the packet last decides. It is either the device where the mark was made, or a device of
/// the node on the packet's way up (a bridge, a bond, a VLAN). The latter stands for the tap that copied last on this
/// CPU, because the kernel takes a packet from there to here without a pause.
///
/// A packet that was copied inside a pod waits in a queue on its way to the node, and other packets are copied meanwhile.
/// But it was copied elsewhere, and its mark says so.
///
/// Two cases cannot be told apart, and are decided by the tap that has copied last on this CPU: a packet that went up
/// through such a device and then changed the CPU (RPS on the bridge, a queue of nftables to user space), and a packet
/// that a pod without a tap has forwarded.
#[inline(always)]
pub fn came_back<K: Kernel>(kernel: &mut K, packet: Packet) -> bool {
    // At the hook of received packets the last device is always this one.
    if matches!(packet.hook, Hook::Ingress) {
        return false;
    }
    if is_copied_inside(packet.tc_index) {
        return false;
    }
    match packet.ingress_ifindex {
        // Made by the node: marked on its way out, at the hook of another device.
        0 => false,
        device if device == packet.ifindex => true,
        // A packet that a tap receives from a pod has no marks but those that it gets there.
        device if kernel.is_tap(device) => false,
        _ => kernel.origin() == packet.ifindex,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_kind() -> impl Strategy<Value = TapKind> {
        prop::sample::select(&[TapKind::Interface, TapKind::HostVeth, TapKind::PodNic][..])
    }

    proptest! {
        /// The tap that has made the last copy is the one that the mark tells of.
        #[test]
        fn a_mark_tells_where_the_last_copy_was_made(
            tc_index: u16, some in 1..16u32, kind in any_kind(), others in any_kind(),
        ) {
            let marked = with_forms(unmarked(tc_index), some << 8, kind);
            prop_assert_eq!(is_copied_inside(marked), kind == TapKind::PodNic);
            prop_assert_eq!(with_forms(marked, some << 8, others), marked, "no further copy");
        }

        #[test]
        fn marks_add_up_and_leave_the_rest(
            tc_index: u16, first in 0..16u32, second in 0..16u32, kinds in (any_kind(), any_kind()),
        ) {
            let (first, second) = (first << 8, second << 8);
            let marked = with_forms(tc_index, forms(tc_index) | first, kinds.0);
            prop_assert_eq!(forms(marked), forms(tc_index) | first);
            let marked = with_forms(marked, forms(marked) | second, kinds.1);
            prop_assert_eq!(forms(marked), forms(tc_index) | first | second);
            prop_assert_eq!(marked & 0x00ff, tc_index & 0x00ff, "those bits are others'");
        }

        #[test]
        fn a_mark_can_be_taken_away(tc_index: u16, some in 1..16u32, kind in any_kind()) {
            let marked = with_forms(tc_index, some << 8, kind);
            prop_assert_eq!(with_forms(marked, 0, kind), tc_index & 0x00ff);
            prop_assert_eq!(unmarked(of_copy(tc_index)), tc_index & 0x00ff);
            prop_assert_eq!(with_forms(of_copy(tc_index), 0, TapKind::HostVeth), of_copy(tc_index));
        }

        #[test]
        fn a_copy_is_one_and_says_nothing_of_forms(tc_index: u16) {
            let copy = of_copy(tc_index);
            prop_assert!(is_copy(copy));
            prop_assert_eq!(forms(copy), 0);
            prop_assert_eq!(copy & 0x00ff, tc_index & 0x00ff, "those bits are others'");

        }

        /// The minor of a class id, which the kernel leaves in `tc_index`, is a small number.
        #[test]
        fn small_numbers_in_tc_index_are_no_mark_and_stay(tc_index in 0..0xb000u16) {
            prop_assert_eq!((forms(tc_index), is_copy(tc_index)), (0, false));
            prop_assert_eq!((with_forms(tc_index, 0, TapKind::HostVeth), unmarked(tc_index)), (tc_index, tc_index));
        }
    }
}
