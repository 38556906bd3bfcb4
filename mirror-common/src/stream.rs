//! Streams: frames that a tap writes into a ring buffer for userspace, in the place of a clone to a device.
//!
//! The format of a record, the sizes that records have, and who gets room in a ring. The programs write records, the
//! agent reads them; both call this module.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The beginning of a record. The captured bytes of the frame follow; what is behind them in the record is unused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RecordHead {
    /// When the tap saw the frame: ns of `CLOCK_MONOTONIC`.
    pub time_ns: u64,
    /// Number of the session: [`Session::serial`](crate::abi::Session::serial).
    pub serial: u32,
    /// The session whose part of the ring the record takes: [`Session::id`](crate::abi::Session::id).
    pub session: u32,
    /// Length of the frame in bytes, without a VLAN tag that is in `vlan_tci`.
    pub len: u32,
    /// Bytes of the frame that follow this head.
    pub captured: u32,
    /// Payload bytes of a segment of a super-frame; 0: the frame is no super-frame.
    pub gso_size: u16,
    /// [`Direction`](crate::verdict::Direction), as a number.
    pub direction: u16,
    /// Protocol id of a VLAN tag that the kernel keeps beside the frame (0x8100, 0x88a8); 0: there is none.
    pub vlan_protocol: u16,
    /// The tag.
    pub vlan_tci: u16,
}

/// Bytes of a [`RecordHead`].
pub const HEAD: usize = size_of::<RecordHead>();

/// The sizes of records in bytes, with their heads. The kernel reserves constant sizes only (before Linux 6.1), so a
/// record takes the next of these: at most half of it is unused, and a third on average of drawn lengths. A copy of
/// 96 bytes fits into the first, an Ethernet frame of 1514 bytes into 1568.
pub const SIZES: [usize; 14] =
    [128, 192, 256, 384, 512, 768, 1024, 1568, 2048, 4096, 8192, 16_384, 32_768, 65_600];

/// The most bytes of a frame that a record holds: an IP packet of the greatest length without jumbograms, behind an
/// Ethernet header with a tag.
pub const MAX_CAPTURE: u32 = (SIZES[SIZES.len() - 1] - HEAD) as u32;

/// Bytes that the ring has ahead of each record for itself (`BPF_RINGBUF_HDR_SZ`, include/uapi/linux/bpf.h).
pub const RING_HEADER: u64 = 8;

/// How much more than the free room of a ring one session may have taken.
const GREED: u64 = 4;

/// The room in a ring that a record of this many captured bytes takes.
pub const fn room(captured: u32) -> u64 {
    let mut at = 0;
    while at < SIZES.len() - 1 && SIZES[at] - HEAD < captured as usize {
        at += 1;
    }
    SIZES[at] as u64 + RING_HEADER
}

/// The bytes of a ring that a session has in use. The reader can return a record before the program has counted it as
/// taken, and a record of a session that had the same id before.
#[inline(always)]
pub const fn in_use(taken: u64, returned: u64) -> u64 {
    let difference = taken.wrapping_sub(returned);
    if difference > i64::MAX as u64 { 0 } else { difference }
}

/// Whether a session that has taken `taken` bytes of a ring, which its reader has not returned yet, may take `room`
/// bytes more. `filled` bytes of the ring's `size` are in use.
///
/// Dynamic thresholds (Choudhury and Hahne, 1998), as switches share their buffers: a session may take a multiple of
/// what is free. A session alone gets four fifths of the ring. The fifth that stays free is for the others, and the more
/// they take the less a flooding session gets. Sessions that all flood come to equal parts as the reader reads.
#[inline(always)]
pub const fn admits(taken: u64, room: u64, filled: u64, size: u64) -> bool {
    let free = size.saturating_sub(filled);
    room <= free && taken <= GREED.saturating_mul(free - room)
}

/// Whether a record of `room` bytes makes a ring of `size` bytes, of which `filled` are in use, so full that its reader
/// is woken: at a quarter. Otherwise the reader looks by itself from time to time. To wake it for every record would
/// cost a pod's packet more than anything else that a tap does.
#[inline(always)]
pub const fn wakes(room: u64, filled: u64, size: u64) -> bool {
    filled < size / 4 && filled + room >= size / 4
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    extern crate std;

    use std::{collections::VecDeque, vec, vec::Vec};

    use proptest::{prelude::*, sample};

    use super::*;

    #[test]
    fn a_record_is_as_long_as_it_must_be() {
        assert_eq!(HEAD, 32);
        assert_eq!([room(1), room(96), room(97)], [136, 136, 200]);
        assert_eq!([room(1514), room(1536), room(1537)], [1576, 1576, 2056]);
        assert_eq!([room(65_549), room(MAX_CAPTURE)], [65_608, 65_608]);
        assert!(SIZES.is_sorted() && SIZES.iter().all(|size| size % 8 == 0));
    }

    /// A ring with sessions that write records of these sizes as often as they may. Its reader takes one record a turn.
    struct Ring {
        size: u64,
        taken: Vec<u64>,
        records: VecDeque<(usize, u64)>,
    }

    impl Ring {
        fn flooded(size: u64, rooms: &[u64], turns: usize) -> Self {
            let mut ring = Self { size, taken: vec![0; rooms.len()], records: VecDeque::new() };
            for _ in 0..turns {
                for (session, room) in rooms.iter().enumerate() {
                    while admits(ring.taken[session], *room, ring.filled(), size) {
                        ring.taken[session] += room;
                        ring.records.push_back((session, *room));
                        if rooms.len() > 1 {
                            break;
                        }
                    }
                }
                if turns > 1 {
                    let (session, room) = ring.records.pop_front().unwrap();
                    ring.taken[session] -= room;
                }
            }
            ring
        }

        fn filled(&self) -> u64 {
            self.taken.iter().sum()
        }
    }

    #[test]
    fn what_was_returned_too_early_takes_no_room() {
        assert_eq!([in_use(500, 364), in_use(500, 500), in_use(500, 636)], [136, 0, 0]);
        assert_eq!(in_use(100, u64::MAX - 35), 136, "the numbers begin again");
    }

    #[test]
    fn one_session_gets_most_of_a_ring() {
        let one = Ring::flooded(1 << 20, &[136], 1).filled();
        assert!(one > (1 << 20) * 79 / 100 && one < (1 << 20) * 81 / 100, "{one}");
    }

    #[test]
    fn floods_of_short_and_long_records_come_to_equal_parts() {
        let ring = Ring::flooded(1 << 18, &[136, 1576], 20_000);
        let (short, long) = (ring.taken[0], ring.taken[1]);
        assert!(short.abs_diff(long) <= 8 * 1576, "{short} {long}");
        assert!(short + long > (1 << 18) * 85 / 100, "{short} {long}");
    }

    proptest! {
        /// A newcomer finds room beside sessions that flood.
        #[test]
        fn a_flood_leaves_room(rooms in prop::collection::vec(sample::select(vec![136, 520, 1576]), 1..8)) {
            let ring = Ring::flooded(1 << 18, &rooms, 5000);
            prop_assert!(ring.filled() <= ring.size);
            prop_assert!(admits(0, 1576, ring.filled(), ring.size), "{} of {} are in use", ring.filled(), ring.size);
        }

        #[test]
        fn no_number_is_too_large(taken: u64, room: u64, filled: u64, size: u64) {
            if admits(taken, room, filled, size) {
                prop_assert!(filled.saturating_add(room) <= size);
            }
        }
    }
}
