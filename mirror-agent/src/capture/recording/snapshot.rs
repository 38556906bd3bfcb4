//! Snapshots: files of the newest packets of a running [`Recorder`], for the callers of `recording`.
//!
//! A snapshot contains only the requested interfaces. So their numbers in the file differ from those in memory.

use std::{collections::BTreeMap, ops::RangeInclusive, path::PathBuf};

use mirror_capture::{
    blocks,
    pcapng::{Direction, InterfaceId},
};
use mirror_core::{filter::Program, model::Directions};

use super::{
    Clock, Recorder, SOME_INTERFACES,
    interfaces::Interfaces,
    memory::{INTERFACE, LENGTH, Memory, TIME, number, time_bytes, time_of},
    rotation,
};
use crate::report::Fill;

/// The minimum difference that counts as a step of the wall clock. The two clocks are read one after the other, and
/// without a step a packet has the same timestamp in each snapshot.
const STEP_NS: u64 = 10_000_000;

/// Offsets in the block of a packet: the number of its bytes, its length on the wire, and its bytes.
const CAPTURED: usize = 20;
const LEN: usize = 24;
const BYTES: usize = 28;

/// The packets that are requested.
pub struct Excerpt<'e> {
    /// Those of the interfaces with these names.
    pub is_wanted: &'e dyn Fn(&str) -> bool,
    /// Those that were copied in this time of `CLOCK_MONOTONIC`, in ns.
    pub times: RangeInclusive<u64>,
    /// Those of these directions.
    pub directions: Directions,
    /// Those that match this filter.
    pub filter: Option<&'e Program>,
    /// Maximum number of bytes of each.
    pub snaplen: Option<u32>,
}

impl Excerpt<'_> {
    /// All packets.
    pub const ALL: Self = Self {
        is_wanted: &|_| true,
        times: 0..=i64::MAX as u64,
        directions: Directions::Both,
        filter: None,
        snaplen: None,
    };

    /// Whether the block of a packet is in this time (since the epoch), has one of these directions, and matches.
    fn has(&self, block: &[u8], times: &RangeInclusive<u64>) -> bool {
        let time = block.get(TIME..).and_then(<[u8]>::first_chunk);
        let has_direction = match self.directions {
            Directions::Both => true,
            Directions::Ingress => blocks::direction(block) == Some(Direction::Inbound),
            Directions::Egress => blocks::direction(block) == Some(Direction::Outbound),
        };
        let matches = |filter: &Program| {
            let bytes = number(block, CAPTURED).and_then(|bytes| block.get(BYTES..BYTES + bytes as usize));
            bytes.zip(number(block, LEN)).is_some_and(|(bytes, len)| filter.matches(bytes, len))
        };
        time.is_some_and(|time| times.contains(&time_of(*time)))
            && has_direction
            && self.filter.is_none_or(matches)
    }

    /// The block of a packet that is too long, with the bytes that are wanted.
    fn cut(&self, block: &[u8]) -> Option<Vec<u8>> {
        let captured = number(block, CAPTURED)?;
        let kept = self.snaplen.filter(|kept| *kept < captured)?;
        let end = |bytes: u32| BYTES + (bytes as usize).next_multiple_of(4);
        let mut cut = block.get(..BYTES + kept as usize)?.to_vec();
        cut.resize(end(kept), 0);
        cut.extend_from_slice(block.get(end(captured)..)?);
        let length = (cut.len() as u32).to_le_bytes();
        let last = cut.len() - length.len();
        replace(&mut cut, CAPTURED, |_| kept.to_le_bytes());
        [LENGTH, last].into_iter().for_each(|place| replace(&mut cut, place, |_| length));
        Some(cut)
    }
}

/// A snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// A complete pcapng.
    pub bytes: Vec<u8>,
    /// The number of packets by the name of their interface.
    pub packets: BTreeMap<String, u64>,
    /// Age of the oldest packet that the recording can still have, in ns.
    pub reach_ns: u64,
}

impl Recorder {
    /// Ends these sessions: no more packets of them arrive, and their serials can be reused. A recording of the newest
    /// packets that has no end drops the data of these sessions with their packets.
    pub fn part_with(&mut self, is_gone: impl Fn(u32) -> bool) {
        self.interfaces.part_with(is_gone);
        if self.interfaces.described().len() > self.most_interfaces
            && let Some((memory, ..)) = self.store.newest()
        {
            self.interfaces.forget_unused(&memory.each().map(|(interface, _)| interface).collect());
            // So the scan of all packets is repeated only after many new interfaces.
            self.most_interfaces = 2 * self.interfaces.described().len() + SOME_INTERFACES;
        }
    }

    /// Returns these of the newest packets; the recording continues. The timestamps are those of the present wall
    /// clock, even if it was set by 10 ms or more since the recording began. `None`: the recording does not keep the
    /// newest packets.
    pub fn snapshot(&mut self, excerpt: &Excerpt<'_>, now: Clock) -> Option<Snapshot> {
        let reach_ns = self.reach_ns(now.monotonic_ns)?;
        let (memory, ..) = self.store.newest()?;
        let now_ns = self.started.wall_at(now.monotonic_ns);
        let late_ns = now.wall_ns.wrapping_sub(now_ns) as i64;
        let late_ns = if late_ns.unsigned_abs() < STEP_NS { 0 } else { late_ns };
        let [from, to] = [excerpt.times.start(), excerpt.times.end()].map(|time| self.started.wall_at(*time));
        let mut snapshot =
            Snapshot::of(memory, &self.interfaces, excerpt, &(from..=to), now.wall_ns, late_ns);
        snapshot.reach_ns = reach_ns;
        Some(snapshot)
    }

    /// Returns how full the memory for the newest packets is; `None`: the recording does not keep these.
    pub fn fill(&mut self, now: Clock) -> Option<Fill> {
        let (memory, _, size) = self.store.newest()?;
        let used = memory.len();
        Some(Fill { used, size, oldest_ns: now.wall_ns.saturating_sub(self.reach_ns(now.monotonic_ns)?) })
    }

    /// The age of the oldest packet that the recording can still have, in ns.
    fn reach_ns(&mut self, now_ns: u64) -> Option<u64> {
        let (memory, ..) = self.store.newest()?;
        let oldest_ns = match memory.packets() < self.packets {
            true => memory.oldest_time_ns(),
            false => self.started.wall_ns,
        };
        Some(self.started.wall_at(now_ns).saturating_sub(oldest_ns))
    }

    /// Writes the newest packets to a new file in the directory of the recording's file, with a number and the time in
    /// its name as in a rotation; the recording continues. `now_ns` is on `CLOCK_MONOTONIC`. Returns the path of the
    /// file, and its number of packets. `None`: the recording does not keep the newest packets.
    pub fn save(&mut self, now_ns: u64) -> anyhow::Result<Option<(PathBuf, u64)>> {
        let now = Clock { wall_ns: self.started.wall_at(now_ns), monotonic_ns: now_ns };
        let Some((_, output, _)) = self.store.newest() else { return Ok(None) };
        let of = output.path.clone().unwrap_or_default();
        let Some(Snapshot { bytes, packets, .. }) = self.snapshot(&Excerpt::ALL, now) else {
            return Ok(None);
        };
        let (number, path, mut output) = rotation::create(&of, self.saved, now.wall_ns)?;
        self.saved = number;
        output.write(&bytes)?;
        output.close()?;
        Ok(Some((path, packets.values().sum())))
    }
}

impl Snapshot {
    /// The requested packets in memory, whose `times` are in ns since the epoch, as is `now_ns`. All timestamps in
    /// memory are `late_ns` earlier than those in the file.
    fn of(
        memory: &mut Memory,
        interfaces: &Interfaces,
        excerpt: &Excerpt<'_>,
        times: &RangeInclusive<u64>,
        now_ns: u64,
        late_ns: i64,
    ) -> Self {
        let wanted = interfaces.described().filter(|(_, described)| (excerpt.is_wanted)(&described.name));
        let mut places = BTreeMap::new();
        let (mut bytes, mut statistics) = (interfaces.header.clone(), Vec::new());
        for ((id, described), place) in wanted.zip(0..) {
            places.insert(id.number(), (place, described.name.as_str()));
            bytes.extend_from_slice(&described.block);
            let begun_ns = interfaces.started_ns.saturating_add_signed(late_ns);
            described.count(InterfaceId::at(place), begun_ns, now_ns, &mut statistics);
        }
        let has =
            |(interface, block): &(u32, &[u8])| places.contains_key(interface) && excerpt.has(block, times);
        let length: usize = memory.each().filter(has).map(|(_, block)| block.len()).sum();
        // At least the size: a growing vector would take twice as much for a moment.
        bytes.reserve_exact(length + statistics.len());
        let mut counts = BTreeMap::<&str, u64>::new();
        for (interface, block) in memory.each().filter(has) {
            let Some((place, name)) = places.get(&interface) else { continue };
            let start = bytes.len();
            bytes.extend_from_slice(excerpt.cut(block).as_deref().unwrap_or(block));
            let copied = bytes.get_mut(start..).unwrap_or_default();
            replace(copied, INTERFACE, |_| u32::to_le_bytes(*place));
            replace(copied, TIME, |time| time_bytes(time_of(time).saturating_add_signed(late_ns)));
            *counts.entry(name).or_default() += 1;
        }
        bytes.extend_from_slice(&statistics);
        let packets = counts.into_iter().map(|(name, packets)| (name.to_owned(), packets)).collect();
        Self { bytes, packets, reach_ns: 0 }
    }
}

/// Replaces a field of a block.
fn replace<const N: usize>(block: &mut [u8], place: usize, new: impl FnOnce([u8; N]) -> [u8; N]) {
    if let Some(field) = block.get_mut(place..).and_then(|rest| rest.first_chunk_mut()) {
        *field = new(*field);
    }
}
