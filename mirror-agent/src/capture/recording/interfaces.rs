//! The interfaces of a recording: the interface and the counters of each session. Pure.
//!
//! All files of a recording describe the interfaces in the same order. So an interface has the same number in each of
//! them, and a packet's block is valid in any of them. [`recording`](super) and its stores call it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use mirror_capture::pcapng::{Interface, InterfaceId, Section, Statistics, Writer};
use mirror_core::filter::{self, Program};

use super::{Counters, Flaws};

/// Maximum size of all descriptions, in memory and at the beginning of each file. The 4096 sessions that a node can
/// have at a time fit in with the longest filters.
const MAX_PREAMBLE: usize = 8 << 20;
/// Maximum size of the statistics of an interface: a block with two times and three counters.
const STATISTICS: usize = 88;
/// Maximum size of the comment about flaws of its packets: a text with three numbers of 20 digits.
const COMMENT: usize = 192;

/// The interfaces so far.
#[derive(Debug)]
pub(super) struct Interfaces {
    /// The beginning of the recording, in ns since the epoch.
    pub(super) started_ns: u64,
    writer: Writer,
    /// The section header, the beginning of every file.
    pub(super) header: Vec<u8>,
    /// By number, which is the order of the descriptions.
    described: BTreeMap<InterfaceId, Described>,
    /// Size of all descriptions in bytes.
    bytes: usize,
    /// The sum of the flaws of all interfaces.
    pub(super) flaws: Flaws,
    /// By text.
    filters: BTreeMap<String, Arc<Program>>,
    /// The interface of a session.
    places: HashMap<u32, InterfaceId>,
}

#[derive(Debug)]
pub(super) struct Described {
    /// Its name, such as `shop/web eth0`.
    pub(super) name: String,
    /// Its description block.
    pub(super) block: Vec<u8>,
    /// Its last known counters.
    counters: Option<Counters>,
    /// The flaws of its packets.
    flaws: Flaws,
    /// Its filter, if that may give another answer for a super-frame than for its segments. The tap then lets all
    /// super-frames pass.
    filter: Option<Arc<Program>>,
}

impl Interfaces {
    /// Starts without interfaces. `comment` is for the section; `started_ns` is the beginning of the recording, in ns
    /// since the epoch.
    pub(super) fn new(application: &str, comment: Option<&str>, started_ns: u64) -> Self {
        let mut header = Vec::new();
        let section = Section { application: Some(application), comment };
        let writer = Writer::begin(&mut header, &section);
        Self {
            started_ns,
            writer,
            header,
            described: BTreeMap::new(),
            bytes: 0,
            flaws: Flaws::default(),
            filters: BTreeMap::new(),
            places: HashMap::new(),
        }
    }

    /// Adds an interface, and returns its description for a file that has begun. The result is empty if the session has
    /// an interface already, or if there is no more room.
    pub(super) fn add(&mut self, serial: u32, interface: &Interface) -> &[u8] {
        if self.header.len() + self.bytes >= MAX_PREAMBLE || self.places.contains_key(&serial) {
            return &[];
        }
        let mut block = Vec::new();
        let id = self.writer.interface(&mut block, interface);
        let filter = interface.filter.as_deref().and_then(|text| self.filter_of_segments(text));
        self.bytes += block.len();
        self.places.insert(serial, id);
        let name = interface.name.clone();
        let described = Described { name, block, counters: None, flaws: Flaws::default(), filter };
        &self.described.entry(id).or_insert(described).block
    }

    /// Skips the number of an interface that another recording has described.
    pub(super) fn skip(&mut self) {
        self.writer.count();
    }

    /// Returns the program of a filter that is applied to each segment. Equal filters share one program.
    fn filter_of_segments(&mut self, text: &str) -> Option<Arc<Program>> {
        self.filters.retain(|_, program| Arc::strong_count(program) > 1);
        if let Some(program) = self.filters.get(text) {
            return Some(Arc::clone(program));
        }
        let program = filter::differs_on_segments(text).then(|| filter::compile(text).ok()).flatten()?;
        let program = Arc::new(program);
        self.filters.insert(text.to_owned(), Arc::clone(&program));
        Some(program)
    }

    /// Returns the filter for the segments of the interface's super-frames.
    pub(super) fn filter(&self, interface: InterfaceId) -> Option<Arc<Program>> {
        self.described.get(&interface)?.filter.clone()
    }

    /// Returns the interface of a session.
    pub(super) fn of(&self, serial: u32) -> Option<InterfaceId> {
        self.places.get(&serial).copied()
    }

    /// Notes the newest counters of a session.
    pub(super) fn note_counters(&mut self, serial: u32, counters: Counters) {
        let described = self.of(serial).and_then(|id| self.described.get_mut(&id));
        if let Some(described) = described {
            described.counters = Some(counters);
        }
    }

    /// Adds the flaws of a packet of an interface.
    pub(super) fn note_flaws(&mut self, interface: InterfaceId, flaws: Flaws) {
        if let Some(described) = self.described.get_mut(&interface) {
            described.flaws.add(flaws);
            self.flaws.add(flaws);
        }
    }

    /// Removes ended sessions: their serials can be reused for others.
    pub(super) fn part_with(&mut self, is_gone: impl Fn(u32) -> bool) {
        self.places.retain(|serial, _| !is_gone(*serial));
    }

    /// Removes the interfaces of [ended](Self::part_with) sessions, except for `used` ones.
    pub(super) fn forget_unused(&mut self, used: &BTreeSet<u32>) {
        let present: BTreeSet<_> = self.places.values().copied().collect();
        let is_kept = |id: &InterfaceId| present.contains(id) || used.contains(&id.number());
        self.described.retain(|id, _| is_kept(id));
        self.bytes = self.described.values().map(|described| described.block.len()).sum();
    }

    /// All interfaces.
    pub(super) fn described(&self) -> impl ExactSizeIterator<Item = (InterfaceId, &Described)> {
        self.described.iter().map(|(id, described)| (*id, described))
    }

    /// The section header and all descriptions.
    pub(super) fn preamble(&self) -> Vec<u8> {
        let blocks = self.described.values().map(|described| &described.block[..]);
        std::iter::once(&self.header[..]).chain(blocks).collect::<Vec<_>>().concat()
    }

    /// The statistics of all interfaces, for the end of a file. They count from the beginning of the recording.
    pub(super) fn statistics(&self, end_ns: u64) -> Vec<u8> {
        let mut blocks = Vec::with_capacity(self.described.len() * STATISTICS);
        for (id, described) in self.described() {
            described.count(id, self.started_ns, end_ns, &mut blocks);
        }
        blocks
    }

    /// Maximum size of a file without packets: its beginning and its end.
    pub(super) fn file_bytes(&self) -> u64 {
        let comment = if self.flaws == Flaws::default() { 0 } else { COMMENT };
        (self.header.len() + self.bytes + self.described.len() * (STATISTICS + comment)) as u64
    }
}

impl Described {
    /// Appends its statistics, from the beginning of the recording to the end of the file, with its number `id`.
    pub(super) fn count(&self, id: InterfaceId, begun_ns: u64, end_ns: u64, out: &mut Vec<u8>) {
        let statistics = Statistics {
            interface: id,
            time_ns: end_ns,
            start_ns: Some(begun_ns),
            end_ns: Some(end_ns),
            received: self.counters.map(|counters| counters.matched),
            dropped: self.counters.map(|counters| counters.lost),
            limited: self.counters.map(|counters| counters.limited),
            comment: (self.flaws != Flaws::default()).then(|| self.flaws.to_string()),
        };
        statistics.write(out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_packets_is_as_long_as_foreseen() {
        let mut interfaces = Interfaces::new("podmirror", None, 1);
        for serial in 1..=3 {
            assert!(!interfaces.add(serial, &Interface::default()).is_empty());
            interfaces.note_counters(serial, Counters::default());
        }
        let bytes =
            |interfaces: &Interfaces| [interfaces.preamble(), interfaces.statistics(2)].concat().len() as u64;
        assert_eq!(bytes(&interfaces), interfaces.file_bytes());
        interfaces.part_with(|serial| serial > 1);
        interfaces.forget_unused(&[2].into());
        assert_eq!(bytes(&interfaces), interfaces.file_bytes());
        assert_eq!(interfaces.described().map(|(id, _)| id.number()).collect::<Vec<_>>(), [0, 2]);
    }

    #[test]
    fn a_number_that_comes_again_is_another_interface() {
        let mut interfaces = Interfaces::new("podmirror", None, 1);
        let described = |name: &str| Interface { name: name.into(), ..Interface::default() };
        interfaces.add(7, &described("shop/old eth0"));
        let old = interfaces.of(7);
        interfaces.part_with(|_| true);
        assert_eq!(interfaces.of(7), None);
        interfaces.add(7, &described("shop/new eth0"));
        assert!(interfaces.of(7) > old);
        let names: Vec<_> = interfaces.described().map(|(_, described)| &described.name[..]).collect();
        assert_eq!(names, ["shop/old eth0", "shop/new eth0"]);
    }

    #[test]
    fn a_session_has_one_interface() {
        let mut interfaces = Interfaces::new("podmirror", None, 1);
        assert!(!interfaces.add(7, &Interface::default()).is_empty());
        let id = interfaces.of(7);
        assert!(interfaces.add(7, &Interface::default()).is_empty());
        assert_eq!(interfaces.of(7), id);
    }

    #[test]
    fn the_descriptions_are_bounded() {
        let mut interfaces = Interfaces::new("podmirror", None, 1);
        let interface = Interface { filter: Some("x".repeat(1 << 10)), ..Interface::default() };
        for serial in 0..10_000 {
            interfaces.add(serial, &interface);
        }
        assert!(interfaces.preamble().len() < MAX_PREAMBLE + (2 << 10));
        assert_eq!(interfaces.of(9_999), None);
        interfaces.note_counters(9_999, Counters::default());
    }
}
