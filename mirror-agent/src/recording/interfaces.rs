//! The interfaces of a recording: what the number of each session stands for, and what was counted there. Pure.
//!
//! All files of a recording describe the interfaces in the same order. So an interface has the same number in each of
//! them, and a packet's block fits into any. [`recording`](super) and its stores call it.

use std::collections::HashMap;

use mirror_core::pcapng::{Interface, InterfaceId, Section, Statistics, Writer};

use super::Source;

/// How many bytes all descriptions together take, in memory and at the beginning of each file, before no further one is
/// added. The 4096 sessions that a node can have at a time fit in with the longest filters.
const MAX_PREAMBLE: usize = 8 << 20;
/// Most bytes of the statistics of an interface: a block with two times and two counters.
const STATISTICS: usize = 76;

/// The interfaces so far.
#[derive(Debug)]
pub(super) struct Interfaces {
    started_ns: u64,
    writer: Writer,
    /// The beginning of every file: the section header and the descriptions.
    preamble: Vec<u8>,
    /// In the order of their descriptions.
    counted: Vec<Counted>,
    /// The place of a session's interface in `counted`.
    places: HashMap<u32, usize>,
}

/// An interface, and its counters if they are known.
#[derive(Debug)]
struct Counted {
    id: InterfaceId,
    seen: Option<u64>,
    lost: Option<u64>,
}

impl Interfaces {
    /// None yet. `started_ns` is the beginning of the recording, in ns since the epoch.
    pub(super) fn new(application: &str, started_ns: u64) -> Self {
        let mut preamble = Vec::new();
        let section = Section { application: Some(application), ..Section::default() };
        let writer = Writer::begin(&mut preamble, &section);
        Self { started_ns, writer, preamble, counted: Vec::new(), places: HashMap::new() }
    }

    /// Adds an interface, and returns its description for a file that has begun. It is empty if the session has an
    /// interface already, or if there is no more room.
    pub(super) fn add(&mut self, source: &Source) -> &[u8] {
        if self.preamble.len() >= MAX_PREAMBLE || self.places.contains_key(&source.serial) {
            return &[];
        }
        let before = self.preamble.len();
        let interface = Interface {
            // No limit, also where the session has one, which its comment says: libpcap, and with it tcpdump and
            // Suricata, refuses a file whose interfaces have different snap lengths.
            snaplen: 0,
            name: Some(&source.name),
            description: Some(&source.description),
            filter: source.filter.as_deref(),
            hardware: None,
            comment: source.comment.as_deref(),
        };
        let id = self.writer.interface(&mut self.preamble, &interface);
        self.places.insert(source.serial, self.counted.len());
        self.counted.push(Counted { id, seen: None, lost: None });
        self.preamble.get(before..).unwrap_or_default()
    }

    /// The interface of a session.
    pub(super) fn of(&self, serial: u32) -> Option<InterfaceId> {
        Some(self.counted.get(*self.places.get(&serial)?)?.id)
    }

    /// Notes the newest counters of a session.
    pub(super) fn note_counters(&mut self, serial: u32, seen: u64, lost: u64) {
        let counted = self.places.get(&serial).and_then(|place| self.counted.get_mut(*place));
        if let Some(counted) = counted {
            (counted.seen, counted.lost) = (Some(seen), Some(lost));
        }
    }

    /// The beginning of the recording, in ns since the epoch.
    pub(super) fn started_ns(&self) -> u64 {
        self.started_ns
    }

    /// The section header and all descriptions.
    pub(super) fn preamble(&self) -> &[u8] {
        &self.preamble
    }

    /// The statistics of all interfaces, for the end of a file. They count from the beginning of the recording.
    pub(super) fn statistics(&self, end_ns: u64) -> Vec<u8> {
        let mut blocks = Vec::with_capacity(self.counted.len() * STATISTICS);
        for Counted { id, seen, lost } in &self.counted {
            let statistics = Statistics {
                interface: *id,
                time_ns: end_ns,
                start_ns: Some(self.started_ns),
                end_ns: Some(end_ns),
                received: *seen,
                dropped: *lost,
                accepted: None,
            };
            statistics.write(&mut blocks);
        }
        blocks
    }

    /// Most bytes of a file that has no packets: its beginning and its end.
    pub(super) fn file_bytes(&self) -> u64 {
        (self.preamble.len() + self.counted.len() * STATISTICS) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_packets_is_as_long_as_foreseen() {
        let mut interfaces = Interfaces::new("podmirror", 1);
        for serial in 1..=3 {
            assert!(!interfaces.add(&Source { serial, ..Source::default() }).is_empty());
            interfaces.note_counters(serial, 10, 1);
        }
        let file = [interfaces.preamble(), &interfaces.statistics(2)].concat();
        assert_eq!(file.len() as u64, interfaces.file_bytes());
    }

    #[test]
    fn a_session_has_one_interface() {
        let mut interfaces = Interfaces::new("podmirror", 1);
        let source = Source { serial: 7, ..Source::default() };
        assert!(!interfaces.add(&source).is_empty());
        let id = interfaces.of(7);
        assert!(interfaces.add(&source).is_empty());
        assert_eq!(interfaces.of(7), id);
    }

    #[test]
    fn the_descriptions_are_bounded() {
        let mut interfaces = Interfaces::new("podmirror", 1);
        let filter = Some("x".repeat(1 << 10));
        for serial in 0..10_000 {
            interfaces.add(&Source { serial, filter: filter.clone(), ..Source::default() });
        }
        assert!(interfaces.preamble().len() < MAX_PREAMBLE + (2 << 10));
        assert_eq!(interfaces.of(9_999), None);
        interfaces.note_counters(9_999, 1, 1);
    }
}
