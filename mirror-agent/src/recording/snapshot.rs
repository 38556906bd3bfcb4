//! Snapshots: files of the newest packets of a running [`Recorder`], for the callers of `recording`.
//!
//! A snapshot contains only the requested interfaces. So their numbers in the file differ from those in memory.

use std::{collections::BTreeMap, path::PathBuf};

use mirror_core::pcapng::InterfaceId;

use super::{
    Clock, Recorder, RecordingError, SOME_INTERFACES,
    interfaces::Interfaces,
    memory::{INTERFACE, Memory, TIME, time_bytes, time_of},
    names::Names,
    rotation,
};

/// The minimum difference that counts as a step of the wall clock. The two clocks are read one after the other, and
/// without a step a packet has the same timestamp in each snapshot.
const STEP_NS: u64 = 10_000_000;

/// A snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// A complete pcapng.
    pub bytes: Vec<u8>,
    /// The number of packets.
    pub packets: u64,
}

impl Recorder {
    /// Ends these sessions: no more packets of them arrive, and their serials can be reused. A recording of the newest
    /// packets that has no end drops the data of these sessions with their packets.
    pub fn part_with(&mut self, is_gone: impl Fn(u32) -> bool) {
        self.interfaces.part_with(is_gone);
        if self.interfaces.described().len() > self.most_interfaces
            && let Some((memory, _)) = self.store.newest()
        {
            self.interfaces.forget_unused(&memory.each().map(|(interface, _)| interface).collect());
            // So the scan of all packets is repeated only after many new interfaces.
            self.most_interfaces = 2 * self.interfaces.described().len() + SOME_INTERFACES;
        }
    }

    /// Returns the newest packets of the interfaces whose names are wanted; the recording continues. The timestamps are
    /// those of the present wall clock, even if it was set by 10 ms or more since the recording began. `None`: the
    /// recording does not keep the newest packets.
    pub fn snapshot(&mut self, is_wanted: impl Fn(&str) -> bool, now: Clock) -> Option<Snapshot> {
        let (memory, _) = self.store.newest()?;
        let late_ns = now.wall_ns.wrapping_sub(self.started.wall_at(now.monotonic_ns)) as i64;
        let late_ns = if late_ns.unsigned_abs() < STEP_NS { 0 } else { late_ns };
        Some(Snapshot::of(memory, &self.interfaces, is_wanted, now.wall_ns, late_ns))
    }

    /// Writes the newest packets to a new file in the directory of the recording's file, with a number and the time in
    /// its name as in a rotation; the recording continues. `now_ns` is on `CLOCK_MONOTONIC`. Returns the path of the
    /// file, and its number of packets. `None`: the recording does not keep the newest packets.
    pub fn save(&mut self, now_ns: u64) -> Result<Option<(PathBuf, u64)>, RecordingError> {
        let now = Clock { wall_ns: self.started.wall_at(now_ns), monotonic_ns: now_ns };
        let Some((_, output)) = self.store.newest() else { return Ok(None) };
        let names = output.path().and_then(Names::of).ok_or(RecordingError::NoName)?;
        let Some(Snapshot { bytes, packets }) = self.snapshot(|_| true, now) else { return Ok(None) };
        let (number, path, mut output) = rotation::create(&names, self.saved, now.wall_ns)?;
        self.saved = number;
        output.write(&bytes)?;
        output.close()?;
        Ok(Some((path, packets)))
    }
}

impl Snapshot {
    /// The packets of the interfaces whose names are wanted. `now_ns` is in ns since the epoch. All timestamps in
    /// memory are `late_ns` earlier than those in the file.
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
        // The exact size: a growing vector would take twice as much for a moment.
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
