//! A file of the newest packets, while the recording goes on. Pure. [`recording`](super) calls it.
//!
//! The file has the interfaces that are wanted, and no others. So their numbers in the file are not those in memory.

use std::collections::BTreeMap;

use mirror_core::pcapng::InterfaceId;

use super::{
    interfaces::Interfaces,
    memory::{INTERFACE, Memory, TIME, time_bytes, time_of},
};

/// The newest packets at a moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// A whole pcapng.
    pub bytes: Vec<u8>,
    /// How many packets it has.
    pub packets: u64,
}

impl Snapshot {
    /// The packets of the interfaces whose names are wanted. `now_ns` is in ns since the epoch. All times in memory are
    /// `late_ns` earlier than those in the file.
    pub(super) fn of(
        memory: &mut Memory,
        interfaces: &Interfaces,
        is_wanted: impl Fn(&str) -> bool,
        now_ns: u64,
        late_ns: i64,
    ) -> Self {
        let wanted = interfaces.described().filter(|(_, described)| is_wanted(&described.name));
        let mut places = BTreeMap::new();
        let (mut bytes, mut statistics) = (interfaces.header().to_vec(), Vec::new());
        for ((id, described), place) in wanted.zip(0..) {
            places.insert(id.number(), place);
            bytes.extend_from_slice(&described.block);
            let begun_ns = interfaces.started_ns().saturating_add_signed(late_ns);
            described.count(InterfaceId::at(place), begun_ns, now_ns, &mut statistics);
        }
        let lengths = memory.each().filter(|(interface, _)| places.contains_key(interface));
        let length: usize = lengths.map(|(_, block)| block.len()).sum();
        // As much as is needed: a vector that grows would take twice as much for a moment.
        bytes.reserve_exact(length + statistics.len());
        let mut packets = 0;
        for (interface, block) in memory.each() {
            let Some(place) = places.get(&interface) else { continue };
            let start = bytes.len();
            bytes.extend_from_slice(block);
            let copied = bytes.get_mut(start..).unwrap_or_default();
            replace(copied, INTERFACE, |_| u32::to_le_bytes(*place));
            replace(copied, TIME, |time| time_bytes(time_of(time).saturating_add_signed(late_ns)));
            packets += 1;
        }
        bytes.extend_from_slice(&statistics);
        Self { bytes, packets }
    }
}

/// Replaces a field of a block.
fn replace<const N: usize>(block: &mut [u8], place: usize, new: impl FnOnce([u8; N]) -> [u8; N]) {
    if let Some(field) = block.get_mut(place..).and_then(|rest| rest.first_chunk_mut()) {
        *field = new(*field);
    }
}
