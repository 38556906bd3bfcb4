//! Tests of recordings: what `pcap-parser` reads back from the files. This module has the tests with one file. `files`
//! has those of directories and disks, `pipes` those of slow and closed readers, `newest` those of snapshots, and
//! `model` the properties.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{fs, path::Path};

use mirror_common::verdict;
use pcap_parser::{Block, InterfaceDescriptionBlock, OptionCode, PcapNGOption};

use super::*;

mod files;
mod model;
mod newest;
mod pipes;

/// The recording begins at this moment. A record with the time 5000 is a little more than a second after the epoch.
const STARTED: Clock = Clock { wall_ns: 1_000_000_000, monotonic_ns: 1000 };

/// A packet in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    interface: u32,
    time_ns: u64,
    bytes: Vec<u8>,
    len: u32,
    direction: Option<u8>,
}

/// The counters of an interface at the end of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Counted {
    start_ns: Option<u64>,
    end_ns: Option<u64>,
    received: Option<u64>,
    dropped: Option<u64>,
    limited: Option<u64>,
}

/// The contents of a file.
#[derive(Debug, Default)]
struct Contents {
    application: String,
    names: Vec<String>,
    packets: Vec<Seen>,
    /// The statistics of each interface, in order.
    statistics: Vec<Counted>,
}

/// Reads a file that consists of complete blocks only.
fn read(path: &Path) -> Contents {
    let file = fs::read(path).unwrap();
    let (contents, rest) = read_blocks(&file);
    assert_eq!(rest, 0, "{} bytes of {path:?} are no block", rest);
    contents
}

/// Reads the complete blocks at the beginning of a file. Returns the number of bytes left.
fn read_blocks(mut file: &[u8]) -> (Contents, usize) {
    let mut contents = Contents::default();
    let Ok((rest, section)) = pcap_parser::parse_sectionheaderblock_le(file) else {
        return (contents, file.len());
    };
    contents.application = text(&section.options, OptionCode::ShbUserAppl).unwrap();
    file = rest;
    while let Ok((rest, block)) = pcap_parser::parse_block_le(file) {
        file = rest;
        match block {
            Block::InterfaceDescription(interface) => {
                contents.names.push(text(&interface.options, OptionCode::IfName).unwrap());
            }
            Block::EnhancedPacket(packet) => {
                assert!((packet.if_id as usize) < contents.names.len(), "the interface comes ahead");
                contents.packets.push(Seen {
                    interface: packet.if_id,
                    time_ns: u64::from(packet.ts_high) << 32 | u64::from(packet.ts_low),
                    bytes: packet.data[..packet.caplen as usize].to_vec(),
                    len: packet.origlen,
                    direction: value(&packet.options, OptionCode(2)).map(|flags| flags[0]),
                });
            }
            Block::InterfaceStatistics(block) => {
                assert_eq!(block.if_id as usize, contents.statistics.len());
                let counter = |code| {
                    let bytes = value(&block.options, OptionCode(code))?;
                    Some(u64::from_le_bytes(bytes.try_into().unwrap()))
                };
                contents.statistics.push(Counted {
                    start_ns: counter(2).map(|time| time.rotate_left(32)),
                    end_ns: counter(3).map(|time| time.rotate_left(32)),
                    received: counter(4),
                    dropped: counter(5),
                    limited: counter(7),
                });
            }
            other => panic!("{other:?}"),
        }
    }
    (contents, file.len())
}

fn value<'a>(options: &'a [PcapNGOption<'_>], code: OptionCode) -> Option<&'a [u8]> {
    options.iter().find(|option| option.code == code)?.as_bytes().ok()
}

fn text(options: &[PcapNGOption<'_>], code: OptionCode) -> Option<String> {
    Some(String::from_utf8(value(options, code)?.to_vec()).unwrap())
}

/// A plan that writes everything into this file.
fn all(path: &Path) -> Plan {
    Plan {
        output: Sink::Path(path.to_owned()),
        kept: Kept::All,
        super_frames: false,
        max_packets: None,
        comment: None,
    }
}

fn begin(plan: Plan) -> Recorder {
    Recorder::begin(plan, STARTED, "mirror-agent test").unwrap()
}

/// A recording with the sessions 1 and 2.
fn begin_with_two(plan: Plan) -> Recorder {
    let mut recorder = begin(plan);
    add(&mut recorder, 1);
    add(&mut recorder, 2);
    recorder
}

/// Adds the interface of a session.
fn add(recorder: &mut Recorder, serial: u32) {
    recorder.add_interface(serial, &described(serial));
}

fn described(serial: u32) -> Interface {
    Interface { name: format!("shop/web-{serial} eth0"), ..Interface::default() }
}

/// The head of a record with a frame of `len` bytes.
fn head(serial: u32, time_ns: u64, len: usize) -> RecordHead {
    RecordHead { time_ns, serial, len: len as u32, captured: len as u32, ..RecordHead::default() }
}

/// A frame of no known protocol, distinguishable from others.
fn frame(number: u8, len: usize) -> Vec<u8> {
    vec![number; len]
}

/// Records a frame of session 1 with the time 5000.
fn record(recorder: &mut Recorder, bytes: &[u8]) -> Progress {
    recorder.record(&head(1, 5000, bytes.len()), bytes)
}

/// A TCP super-frame over IPv4 with an unfinished checksum, and its `gso_size`.
fn super_frame(payload: usize) -> (Vec<u8>, u16) {
    let ip_len = ((40 + payload) as u16).to_be_bytes();
    let ethernet = [&[2; 12][..], &[8, 0]].concat();
    let ip = [&[0x45, 0][..], &ip_len, &[0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]].concat();
    let tcp = [&[0x80, 0, 0, 80][..], &[0; 8], &[0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0]].concat();
    ([ethernet, ip, tcp, (0..payload).map(|byte| byte as u8).collect()].concat(), 1000)
}

#[test]
fn a_file_says_what_was_where_when_and_which_way() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web.pcapng");
    let mut recorder = begin_with_two(all(&path));
    let ingress = RecordHead { direction: verdict::Direction::Ingress as u16, ..head(1, 2000, 60) };
    let egress = RecordHead { direction: verdict::Direction::Egress as u16, ..head(2, 3000, 60) };
    // From a CPU that was slower; its time is before the start of the recording.
    let unordered = RecordHead { len: 1500, direction: 7, ..head(1, 900, 60) };
    assert_eq!(recorder.record(&ingress, &frame(1, 60)), Progress::GoesOn);
    assert_eq!(recorder.record(&egress, &frame(2, 60)), Progress::GoesOn);
    // Bytes beyond the captured ones do not belong to the record.
    assert_eq!(recorder.record(&unordered, &frame(3, 96)), Progress::GoesOn);
    recorder.note_counters(1, Counters { matched: 10, lost: 1, limited: 0 });
    recorder.note_counters(1, Counters { matched: 20, lost: 3, limited: 5 });
    assert_eq!(recorder.end_batch().unwrap(), Progress::GoesOn);
    let summary = recorder.finish(9000).unwrap();
    assert_eq!(summary, Summary { packets: 3, kept: 3, files: vec![path.clone()], ..Summary::default() });

    let contents = read(&path);
    let seen = |interface, time_ns, number, len, direction| Seen {
        interface,
        time_ns,
        bytes: frame(number, 60),
        len,
        direction,
    };
    assert_eq!(contents.application, "mirror-agent test");
    assert_eq!(contents.names, ["shop/web-1 eth0", "shop/web-2 eth0"]);
    assert_eq!(
        contents.packets,
        [
            seen(0, 1_000_001_000, 1, 60, Some(1)),
            seen(1, 1_000_002_000, 2, 60, Some(2)),
            seen(0, 999_999_900, 3, 1500, None),
        ]
    );
    let times = Counted {
        start_ns: Some(1_000_000_000),
        end_ns: Some(1_000_008_000),
        received: None,
        dropped: None,
        limited: None,
    };
    let first = Counted { received: Some(20), dropped: Some(3), limited: Some(5), ..times.clone() };
    assert_eq!(contents.statistics, [first, times]);
}

#[test]
fn an_interface_is_described_in_full() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web.pcapng");
    let mut recorder = begin(all(&path));
    let first = Interface {
        name: "shop/web eth0".into(),
        description: Some("node n1".into()),
        filter: Some("tcp port 80".into()),
        hardware: None,
        comment: Some("snaplen 96".into()),
    };
    recorder.add_interface(1, &first);
    add(&mut recorder, 2);
    recorder.finish(9000).unwrap();
    let file = fs::read(&path).unwrap();
    let (rest, _) = pcap_parser::parse_sectionheaderblock_le(&file).unwrap();
    let (rest, first) = pcap_parser::parse_block_le(rest).unwrap();
    let (_, second) = pcap_parser::parse_block_le(rest).unwrap();
    let (Block::InterfaceDescription(first), Block::InterfaceDescription(second)) = (first, second) else {
        panic!("the descriptions come first");
    };
    let texts = |interface: &InterfaceDescriptionBlock<'_>| {
        [1, 2, 3, 11].map(|code| text(&interface.options, OptionCode(code)).unwrap_or_default())
    };
    assert_eq!(texts(&first), ["snaplen 96", "shop/web eth0", "node n1", "\0tcp port 80"]);
    assert_eq!((first.snaplen, second.snaplen), (0, 0), "libpcap wants the same of all");
    assert_eq!(texts(&second), ["", "shop/web-2 eth0", "", ""]);
}

#[test]
fn a_record_of_nobody_is_counted_and_left_out() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web.pcapng");
    let mut recorder = begin_with_two(all(&path));
    assert_eq!(recorder.record(&head(3, 5000, 60), &frame(3, 60)), Progress::GoesOn);
    recorder.note_counters(3, Counters { matched: 1, lost: 1, limited: 0 });
    // The interface of a session can be added later.
    add(&mut recorder, 3);
    assert_eq!(recorder.record(&head(3, 6000, 60), &frame(4, 60)), Progress::GoesOn);
    let summary = recorder.finish(9000).unwrap();
    assert_eq!((summary.packets, summary.unknown), (1, 1));
    let contents = read(&path);
    assert_eq!((contents.packets[0].interface, &contents.packets[0].bytes), (2, &frame(4, 60)));
}

/// A comment shows the reader of the file that bytes are missing.
#[test]
fn super_frames_that_are_not_as_on_the_wire_have_a_comment() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web.pcapng");
    let (bytes, _) = super_frame(1600);
    let mut recorder = begin_with_two(all(&path));
    // BIG TCP: the record is full.
    let captured = [&bytes[..], &vec![0; MAX_CAPTURE as usize - bytes.len()]].concat();
    let cut = RecordHead { captured: MAX_CAPTURE, gso_size: 1000, ..head(1, 5000, 100_000) };
    assert_eq!(recorder.record(&cut, &captured), Progress::GoesOn);
    let tiny = RecordHead { gso_size: 8, ..head(2, 5000, bytes.len()) };
    assert_eq!(recorder.record(&tiny, &bytes), Progress::GoesOn);
    // A configured snap length is not a flaw.
    let short = RecordHead { captured: 60, gso_size: 1000, ..head(2, 5000, bytes.len()) };
    assert_eq!(recorder.record(&short, &bytes), Progress::GoesOn);
    let summary = recorder.finish(9000).unwrap();
    assert_eq!(summary.flawed, Flaws { cut: (1, 34_432), whole: 1 });
    // `tail` ends with these.
    assert_eq!(
        Summary { unknown: 7, ..summary }.warnings(),
        [
            "7 packets of sessions that ended at once are not in the file",
            "1 super-frames were longer than a record and lack 34432 bytes, and 1 are whole because of their many segments",
        ]
    );
    assert_eq!(Summary::default().warnings(), Vec::<String>::new());
    let file = fs::read(&path).unwrap();
    let comments = comments(&file);
    assert_eq!(
        comments,
        [
            "the last 34432 of the 100000 bytes of its super-frame are missing",
            "a super-frame of 200 segments of 8 bytes",
            "1 super-frames were longer than a record and lack 34432 bytes, and 0 are whole because of their many segments",
            "0 super-frames were longer than a record and lack 0 bytes, and 1 are whole because of their many segments",
        ]
    );
}

/// The comments of all packets and statistics.
fn comments(mut file: &[u8]) -> Vec<String> {
    let mut comments = Vec::new();
    while let Ok((rest, block)) = pcap_parser::parse_block_le(file) {
        file = rest;
        comments.extend(match block {
            Block::EnhancedPacket(packet) => text(&packet.options, OptionCode::Comment),
            Block::InterfaceStatistics(block) => text(&block.options, OptionCode::Comment),
            _ => None,
        });
    }
    comments
}

/// The tap lets a super-frame pass if its filter may give another answer for the segments.
#[test]
fn a_filter_is_asked_for_what_is_written() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web.pcapng");
    let (bytes, gso_size) = super_frame(2500);
    let written = |filter: &str, super_frames: bool| {
        let mut recorder = begin(Plan { super_frames, ..all(&path) });
        recorder.add_interface(1, &Interface { filter: Some(filter.into()), ..described(1) });
        let head = RecordHead { gso_size, ..head(1, 5000, bytes.len()) };
        assert_eq!(recorder.record(&head, &bytes), Progress::GoesOn);
        recorder.finish(9000).unwrap();
        read(&path).packets.iter().map(|packet| packet.len).collect::<Vec<_>>()
    };
    assert_eq!(written("greater 1515", false), [0; 0]);
    assert_eq!(written("less 1514", false), [1054, 1054, 554]);
    assert_eq!(written("less 600", false), [554]);
    assert_eq!(written("ip[2:2] = 1040", false), [1054, 1054]);
    assert_eq!(written("greater 1515", true), [2554], "the super-frame is what is written");
    assert_eq!(written("less 1514", true), [0; 0]);
    // The tap has applied this one.
    assert_eq!(written("udp", false), [1054, 1054, 554]);
}

#[test]
fn the_first_packets_end_at_the_bound_for_good() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web.pcapng");
    let mut recorder = begin_with_two(Plan { kept: Kept::First { bytes: 2000 }, ..all(&path) });
    assert_eq!(record(&mut recorder, &frame(1, 1000)), Progress::GoesOn);
    assert_eq!(recorder.end_batch().unwrap(), Progress::GoesOn);
    assert_eq!(record(&mut recorder, &frame(2, 1000)), Progress::Complete);
    // This packet would fit, but the recorded packets must be the first ones, without a gap.
    assert_eq!(record(&mut recorder, &frame(3, 60)), Progress::Complete);
    assert_eq!(recorder.finish(9000).unwrap().kept, 1);
    assert_eq!(read(&path).packets.len(), 1);
    assert!(fs::metadata(&path).unwrap().len() <= 2000);
}
