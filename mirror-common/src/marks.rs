//! Marks: the record in `skb->tc_index` of the copies of a packet, and whether it is still valid.
//!
//! A packet between two mirrored pods of one node passes two taps, and the reader of the mirror interface should get it
//! once. So a packet that has been copied carries a mark: a bit for each form, see
//! [`Session::mark`](crate::abi::Session::mark). A copy carries another mark, so that it is never copied itself. Called
//! by [`decide`](crate::decide).

use crate::{
    abi::{COPIED_MARK, COPIED_MASK, COPY_MARK, FORM_BITS},
    decide::{Kernel, Packet},
};

/// The bits of `tc_index` that belong to podmirror once it contains a mark.
const OURS: u16 = COPIED_MASK | FORM_BITS;

/// Returns the forms in which the packet has been copied, according to `tc_index`.
#[inline(always)]
pub const fn forms(tc_index: u16) -> u32 {
    if is_copied(tc_index) { (tc_index & FORM_BITS) as u32 } else { 0 }
}

/// Whether `tc_index` contains the mark of a packet that has been copied.
#[inline(always)]
const fn is_copied(tc_index: u16) -> bool {
    tc_index & COPIED_MASK == COPIED_MARK
}

/// Whether `tc_index` says that the packet is a copy.
#[inline(always)]
pub const fn is_copy(tc_index: u16) -> bool {
    tc_index & COPIED_MASK == COPY_MARK
}

/// Returns the `tc_index` of a copy of a packet.
#[inline(always)]
pub const fn of_copy(tc_index: u16) -> u16 {
    COPY_MARK | tc_index & !OURS
}

/// Whether `tc_index` contains a mark of podmirror.
#[inline(always)]
const fn is_marked(tc_index: u16) -> bool {
    is_copy(tc_index) || is_copied(tc_index)
}

/// Returns `tc_index` without a mark of podmirror; other values stay.
#[inline(always)]
pub const fn unmarked(tc_index: u16) -> u16 {
    if is_marked(tc_index) { tc_index & !OURS } else { tc_index }
}

/// Returns the `tc_index` of a packet that has been copied in exactly these forms. The mark of a copy stays.
#[inline(always)]
pub const fn with_forms(tc_index: u16, forms: u32) -> u16 {
    if forms != 0 {
        COPIED_MARK | forms as u16 & FORM_BITS | tc_index & !OURS
    } else if is_copy(tc_index) {
        tc_index
    } else {
        unmarked(tc_index)
    }
}

/// Returns the packet with the marks that are still valid.
///
/// No mark is valid for a packet that leaves a pod: in its present state it has passed no tap. A pod that routes sends
/// a changed packet, and a pod must not be able to hide its packets by marking them. No mark is valid either for a
/// packet whose [`identity`](crate::identity) differs from that of the copied packet: the node has translated its
/// addresses, or has written an answer into it (Cilium's ARP, ICMP errors and neighbour discovery).
#[inline(always)]
pub fn standing<K: Kernel>(kernel: &mut K, packet: Packet, leaves_pod: bool) -> Packet {
    if !is_marked(packet.tc_index) {
        return packet;
    }
    let is_new = leaves_pod || forms(packet.tc_index) != 0 && !kernel.is_still_copied(packet);
    let tc_index = if is_new { unmarked(packet.tc_index) } else { packet.tc_index };
    Packet { tc_index, ..packet }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn marks_add_up_and_leave_the_rest(
            tc_index: u16, first in 0..16u32, second in 0..16u32,
        ) {
            let (first, second) = (first << 8, second << 8);
            let marked = with_forms(tc_index, forms(tc_index) | first);
            prop_assert_eq!(forms(marked), forms(tc_index) | first);
            let marked = with_forms(marked, forms(marked) | second);
            prop_assert_eq!(forms(marked), forms(tc_index) | first | second);
            prop_assert_eq!(marked & 0x00ff, tc_index & 0x00ff, "those bits are others'");
        }

        #[test]
        fn a_mark_can_be_taken_away(tc_index: u16, some in 1..16u32) {
            let marked = with_forms(tc_index, some << 8);
            prop_assert_eq!(with_forms(marked, 0), tc_index & 0x00ff);
            prop_assert_eq!(unmarked(of_copy(tc_index)), tc_index & 0x00ff);
            prop_assert_eq!(with_forms(of_copy(tc_index), 0), of_copy(tc_index));
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
            prop_assert_eq!((with_forms(tc_index, 0), unmarked(tc_index)), (tc_index, tc_index));
        }
    }
}
