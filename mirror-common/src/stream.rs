//! Streams: frames that a tap writes into a ring buffer for userspace, instead of a clone to a device.
//!
//! Defines the record format, the record sizes, and the sharing of a ring among sessions. The programs write records,
//! the agent reads them; both use this module.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The head of a record. The captured bytes of the frame follow; any further bytes of the record are unused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RecordHead {
    /// When the tap saw the frame: ns of `CLOCK_MONOTONIC`.
    pub time_ns: u64,
    /// Number of the session: [`Session::serial`](crate::abi::Session::serial).
    pub serial: u32,
    /// The session whose share of the ring the record uses: [`Session::id`](crate::abi::Session::id).
    pub session: u32,
    /// Length of the frame in bytes, without a VLAN tag that is in `vlan_tci`.
    pub len: u32,
    /// Bytes of the frame that follow this head.
    pub captured: u32,
    /// Payload bytes of a segment of a super-frame; 0: the frame is not a super-frame.
    pub gso_size: u16,
    /// [`Direction`](crate::verdict::Direction), as a number.
    pub direction: u16,
    /// Protocol id of a VLAN tag that the kernel keeps in metadata (0x8100, 0x88a8); 0: there is none.
    pub vlan_protocol: u16,
    /// The tag.
    pub vlan_tci: u16,
}

/// Length of a [`RecordHead`].
pub const HEAD: usize = size_of::<RecordHead>();

/// Record sizes in bytes, with their heads. The kernel reserves constant sizes only (before Linux 6.1), so a record
/// takes the next of these sizes: at most half of it is unused, and a third on average for random lengths. A copy of 96
/// bytes fits into the first, an Ethernet frame of 1514 bytes into 1568.
pub const SIZES: [usize; 14] =
    [128, 192, 256, 384, 512, 768, 1024, 1568, 2048, 4096, 8192, 16_384, 32_768, 65_600];

/// Maximum frame bytes in a record: an IP packet of the maximum length without jumbograms, after an Ethernet header
/// with a tag.
pub const MAX_CAPTURE: u32 = (SIZES[SIZES.len() - 1] - HEAD) as u32;

/// Bytes of the ring buffer's own header before each record (`BPF_RINGBUF_HDR_SZ`, include/uapi/linux/bpf.h).
pub const RING_HEADER: u64 = 8;

/// The maximum use of one session, as a multiple of the free room of the ring.
const GREED: u64 = 4;

/// The room in a ring for a record of this many captured bytes.
pub const fn room(captured: u32) -> u64 {
    let mut at = 0;
    while at < SIZES.len() - 1 && SIZES[at] - HEAD < captured as usize {
        at += 1;
    }
    SIZES[at] as u64 + RING_HEADER
}

/// The bytes of a ring that a session has in use. Saturating: the reader can return a record before the program has
/// counted it as taken, and a record of an earlier session with the same id.
#[inline(always)]
pub const fn in_use(taken: u64, returned: u64) -> u64 {
    let difference = taken.wrapping_sub(returned);
    if difference > i64::MAX as u64 { 0 } else { difference }
}

/// Whether a session may take `room` bytes more of a ring. It has taken `taken` bytes that the reader has not returned
/// yet. `filled` bytes of the ring's `size` are in use.
///
/// Dynamic thresholds (Choudhury and Hahne, 1998), as switches use them to share buffers: a session may use a multiple
/// of the free room. A single session gets four fifths of the ring. The remaining fifth is for the others, and the more
/// they use, the less a flooding session gets. If all sessions flood, they converge to equal shares as the reader
/// reads.
#[inline(always)]
pub const fn admits(taken: u64, room: u64, filled: u64, size: u64) -> bool {
    let free = size.saturating_sub(filled);
    room <= free && taken <= GREED.saturating_mul(free - room)
}

/// Whether a record of `room` bytes fills a ring of `size` bytes, with `filled` in use, so far that its reader is
/// woken: to a quarter. Below that the reader polls. Waking it for every record would be the most expensive part of a
/// tap's work for a packet.
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

    /// A ring with sessions that write records of these sizes as often as allowed. Its reader reads one record a turn.
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
        /// A new session finds room next to flooding sessions.
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
