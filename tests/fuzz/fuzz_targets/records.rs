//! Records of a ring, and the blocks that a recorder hands over: what a recording keeps is within its bound, and a
//! snapshot is a pcapng with the packets that it counts.

#![no_main]

use std::path::PathBuf;

use libfuzzer_sys::{
    arbitrary::{self, Arbitrary},
    fuzz_target,
};
use mirror_agent::{
    capture::recording::{Bound, Clock, Excerpt, Kept, Plan, Recorder, Sink},
    kernel::dataplane::rings::split,
};
use mirror_capture::{
    blocks::{Block, Blocks},
    pcapng::Interface,
};
use mirror_common::stream::HEAD;

/// A call of the recorder.
#[derive(Arbitrary, Debug)]
enum Step<'a> {
    /// A session begins.
    Source { serial: u8, name: &'a str, filter: Option<&'a str> },
    /// A record arrives whose session has begun, if its head names one.
    Record { serial: Option<u8>, record: &'a [u8] },
    /// Sessions end.
    PartWith { serial: u8 },
    Snapshot { name: &'a str, times: (u64, u64), snaplen: Option<u8> },
}

/// Checks that a snapshot is a pcapng with these packets, and returns the bytes of their blocks.
fn check(snapshot: &[u8], packets: u64) -> usize {
    let mut blocks = Blocks::default();
    blocks.push(snapshot);
    let (mut interfaces, mut found, mut bytes) = (0, 0, 0);
    while let Some(block) = blocks.pop().unwrap() {
        match block {
            Block::Section(_) | Block::Names(_) | Block::Note(_) => {}
            Block::Interface(_) => interfaces += 1,
            Block::Packet(packet) => {
                assert!(packet.interface < interfaces);
                found += 1;
                bytes += packet.block.len();
            }
            Block::Statistics(statistics) => assert!(statistics.interface.number() < interfaces),
        }
    }
    assert!(!blocks.is_within_a_block());
    assert_eq!(found, packets);
    bytes
}

/// Records the steps, and keeps the newest packets within `most` bytes.
fn record(most: u64, super_frames: bool, steps: &[Step<'_>]) {
    let mut recorder = begin("/dev/null", Kept::Last(Bound::Bytes(most)), super_frames);
    for step in steps {
        match step {
            Step::Source { serial, name, filter } => {
                let (name, filter) = ((*name).to_owned(), filter.map(str::to_owned));
                let interface = Interface { name, filter, ..Interface::default() };
                recorder.add_interface(u32::from(*serial), &interface);
            }
            Step::Record { serial, record } => {
                let Some((mut head, bytes)) = split(record) else {
                    assert!(record.len() < HEAD);
                    continue;
                };
                assert!(bytes.len() <= head.captured as usize && HEAD + bytes.len() <= record.len());
                head.serial = serial.map_or(head.serial, u32::from);
                let _ = recorder.record(&head, bytes);
            }
            Step::PartWith { serial } => recorder.part_with(|of| of <= u32::from(*serial)),
            Step::Snapshot { name, times, snaplen } => {
                let is_wanted: &dyn Fn(&str) -> bool = &|of| of != *name;
                let snaplen = snaplen.map(u32::from);
                let excerpt = Excerpt { is_wanted, times: times.0..=times.1, snaplen, ..Excerpt::ALL };
                let snapshot = recorder.snapshot(&excerpt, NOW).unwrap();
                check(&snapshot.bytes, snapshot.packets.values().sum());
            }
        }
    }
    let snapshot = recorder.snapshot(&Excerpt::ALL, NOW).unwrap();
    let packets = snapshot.packets.values().sum();
    let bytes = check(&snapshot.bytes, packets);
    assert!(bytes as u64 <= most || packets == 1, "{bytes} bytes of {packets} packets");
    let summary = recorder.finish(NOW.monotonic_ns).unwrap();
    assert!(summary.kept <= summary.packets);
}

/// Appends blocks that a recorder hands over, each with the length that it states. The disk is full, or not.
fn append(mut past: &[u8], is_full: bool) {
    let file = if is_full { "/dev/full" } else { "/dev/null" };
    let mut recorder = begin(file, Kept::All, false);
    let mut has_failed = false;
    while let Some(length) = past.get(4..).and_then(|rest| rest.first_chunk()) {
        let length = u32::from_le_bytes(*length) as usize;
        let Some((block, rest)) = past.split_at_checked(length).filter(|_| length >= 12) else { break };
        past = rest;
        has_failed |= recorder.append(block).is_err();
    }
    let summary = recorder.finish(NOW.monotonic_ns);
    has_failed |= summary.is_err();
    assert_eq!(has_failed, is_full);
    assert!(!is_full || summary.is_err() || summary.is_ok_and(|summary| summary.packets == 0));
}

const NOW: Clock = Clock { wall_ns: 1_795_305_601_123_456_789, monotonic_ns: 77_000_000_000 };

fn begin(file: &str, kept: Kept, super_frames: bool) -> Recorder {
    let output = Sink::Path(PathBuf::from(file));
    let plan = Plan { output, kept, super_frames, max_packets: None, comment: None };
    Recorder::begin(plan, NOW, "fuzz").unwrap()
}

fuzz_target!(|input: (u16, bool, bool, Vec<Step<'_>>, &[u8])| {
    let (most, super_frames, is_full, steps, past) = input;
    record(most.into(), super_frames, &steps);
    append(past, is_full);
});
