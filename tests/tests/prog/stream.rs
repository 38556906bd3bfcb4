//! Streams: a record is the frame, byte for byte. A packet that does not fit into the ring is lost, and counted.

use aya::maps::{MapData, RingBuf};
use mirror_common::{
    abi::{Session, TARGET_STREAM, TARGET_UP},
    stream::{HEAD, MAX_CAPTURE, RecordHead, SIZES, room},
    verdict::{
        Direction::{self, Egress, Ingress},
        Hook, Misfit, Verdict,
    },
};
use mirror_tests::{Frame, SOON, check, eventually};
use nix::time::{ClockId, clock_gettime};
use zerocopy::FromBytes as _;

use crate::{
    bench::{BOTH, Bench, READY, at, counted, session},
    cut::{send_super_frame, tcp_over_ipv6},
};

const ROUTER: [u8; 6] = [2; 6];
const POD: [u8; 6] = [4; 6];
/// Bytes of a ring: 16 pages of 4 KiB.
const RING: u32 = 1 << 16;
/// The session's serial number.
const SERIAL: u32 = 0xdead_beef;

/// A ring from the reader's side.
struct Reader(RingBuf<MapData>);

impl Reader {
    /// The records in the ring.
    fn records(&mut self) -> Vec<(RecordHead, Vec<u8>)> {
        let mut records = Vec::new();
        while let Some(record) = self.0.next() {
            let (head, bytes) = RecordHead::read_from_prefix(&record).unwrap();
            assert_eq!(room(head.captured), record.len() as u64 + 8, "{head:?}");
            records.push((head, bytes[..head.captured as usize].to_vec()));
        }
        records
    }

    /// Waits for records.
    #[track_caller]
    fn wait(&mut self) -> Vec<(RecordHead, Vec<u8>)> {
        eventually(SOON, || {
            let records = self.records();
            check(!records.is_empty(), || "no record".into()).map(|()| records)
        })
    }
}

/// A pod's device with a session that streams up to `snaplen` bytes of each frame into a new ring of `bytes`.
fn bench(story: &str, snaplen: u32, bytes: u32) -> (Bench, Reader) {
    let mut bench = Bench::new(story);
    let ring = RingBuf::create(bytes, 0).unwrap();
    bench.put_ring(1, &ring);
    bench.put_target(1, 0, TARGET_UP | TARGET_STREAM);
    bench.attach("tap_ingress", "tap", Hook::Ingress);
    put_snaplen(&mut bench, snaplen);
    (bench, Reader(ring))
}

fn put_snaplen(bench: &mut Bench, snaplen: u32) {
    bench.put_tap(at(true), &[Session { snaplen, serial: SERIAL, ..session(0, 1, BOTH) }]);
}

fn head(frame: &[u8], captured: usize, direction: Direction) -> RecordHead {
    RecordHead {
        serial: SERIAL,
        len: frame.len() as u32,
        captured: captured as u32,
        direction: direction as u16,
        ..RecordHead::default()
    }
}

fn now_ns() -> u64 {
    std::time::Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap()).as_nanos() as u64
}

#[test]
fn a_record_is_the_frame_byte_for_byte() {
    let (mut bench, mut reader) = bench("record", 0, 1 << 20);
    let edges = SIZES.iter().flat_map(|size| [size - HEAD - 1, size - HEAD, size - HEAD + 1]);
    // Sizes that a test run accepts, and that a device could send.
    for size in [14, 15, 60, 1514].into_iter().chain(edges).filter(|size| *size <= 3500) {
        for (hook, direction) in [(Hook::Ingress, Egress), (Hook::Egress, Ingress)] {
            let frame = Frame::new(ROUTER, POD).filled(size, size).bytes();
            bench.reset(0);
            let before = now_ns();
            bench.run(hook, &frame, 1);
            let [(seen, bytes)] = &reader.records()[..] else { panic!("{size} bytes: no record") };
            assert!((before..now_ns()).contains(&seen.time_ns), "{seen:?}");
            assert_eq!(RecordHead { time_ns: 0, ..*seen }, head(&frame, size, direction));
            assert_eq!(bytes, &frame);
            assert_eq!(bench.counted(0), counted(size, &[(direction, Verdict::Copied, 1)]));
        }
    }
}

#[test]
fn a_record_is_cut_to_the_snap_length() {
    let (mut bench, mut reader) = bench("recordcut", 96, 1 << 20);
    for size in [95, 96, 97, 1000] {
        let frame = Frame::new(ROUTER, POD).filled(size, size).bytes();
        bench.reset(0);
        bench.run(Hook::Ingress, &frame, 1);
        assert_eq!(bench.counted(0), counted(size, &[(Egress, Verdict::Copied, 1)]));
        assert_eq!(bench.copied_bytes(0), size.min(96) as u64);
        let [(seen, bytes)] = &reader.records()[..] else { panic!("{size} bytes: no record") };
        assert_eq!((seen.len as usize, &bytes[..]), (size, &frame[..size.min(96)]));
    }
    // A length to which a clone could not be cut.
    put_snaplen(&mut bench, 40_000);
    let frame = tcp_over_ipv6(60_000);
    send_super_frame(&bench, "tapp", &frame);
    let records = reader.wait();
    assert_eq!((records[0].0.len, &records[0].1[..]), (60_000, &frame[..40_000]));
    assert_eq!(bench.misfit(0, Misfit::Cut), (0, 0), "it was asked for");
}

/// BIG TCP: the record has no room for the whole packet, and the missing bytes are counted.
#[test]
fn what_a_record_has_no_room_for_is_counted() {
    let (bench, mut reader) = bench("recordbig", 0, 1 << 20);
    // Linux before 5.19 has no such super-frames.
    if !bench.lab.node().try_run("ip link set tapp gso_max_size 131072").status.success() {
        return;
    }
    let mut frame = tcp_over_ipv6(60_000);
    frame.resize(100_000, 7);
    frame.splice(18..20, [0, 0]);
    send_super_frame(&bench, "tapp", &frame);
    let records = reader.wait();
    let kept = MAX_CAPTURE as usize;
    assert_eq!((records[0].0.len, &records[0].1[..]), (100_000, &frame[..kept]));
    assert_eq!(bench.misfit(0, Misfit::Cut), (1, 100_000 - kept as u64));
    assert_eq!(bench.copied_bytes(0), kept as u64);
}

#[test]
fn a_super_frame_is_one_record_with_the_size_of_its_segments() {
    let (bench, mut reader) = bench("recordsuper", 0, 1 << 20);
    for size in [10_000, 32_000, 65_000] {
        let frame = tcp_over_ipv6(size);
        send_super_frame(&bench, "tapp", &frame);
        let records = reader.wait();
        let [(seen, bytes)] = &records[..] else { panic!("{} records", records.len()) };
        assert_eq!((seen.len as usize, seen.captured as usize), (size, size));
        assert!(seen.gso_size > 0, "{seen:?}");
        assert!(*bytes == frame, "{size} bytes: the record is another frame");
    }
    const { assert!(MAX_CAPTURE >= 65_549) };
}

#[test]
fn a_vlan_tag_stands_in_the_head() {
    let (mut bench, mut reader) = bench("recordtag", 0, RING);
    let frame = Frame::new(ROUTER, POD).vlan(7).filled(1000, 1).bytes();
    let untagged = [&frame[..12], &frame[16..]].concat();
    for (snaplen, kept) in [(0, 996), (96, 92)] {
        put_snaplen(&mut bench, snaplen);
        bench.lab.node().send_frame("tapp", &frame);
        let records = reader.wait();
        let [(seen, bytes)] = &records[..] else { panic!("{} records", records.len()) };
        let expected = RecordHead { vlan_protocol: 0x8100, vlan_tci: 7, ..head(&untagged, kept, Egress) };
        assert_eq!(RecordHead { time_ns: 0, ..*seen }, expected);
        assert_eq!(bytes, &untagged[..kept]);
    }
}

#[test]
fn what_a_full_ring_does_not_take_is_lost_and_counted() {
    let (mut bench, mut reader) = bench("recordlost", 0, RING);
    let frame = Frame::new(ROUTER, POD).filled(500, 1).bytes();
    let mut copied = 0;
    for sent in [1000, 2000, 3000] {
        bench.run(Hook::Ingress, &frame, 1000);
        let records = reader.records();
        assert!(records.len() > 60 && records.len() < 120, "{} records", records.len());
        assert!(records.iter().all(|(_, bytes)| *bytes == frame));
        copied += records.len() as u64;
        let expected = [(Egress, Verdict::Copied, copied), (Egress, Verdict::Lost, sent - copied)];
        assert_eq!(bench.counted(0), counted(500, &expected));
        assert_eq!(bench.taken(0), copied * room(500));
        // Until the reader has returned what it has read, the session occupies its part of the ring.
        bench.put_returned(0, bench.taken(0));
    }
}

#[test]
fn a_stream_without_a_ring_is_down() {
    let mut bench = Bench::new("noring");
    bench.put_target(1, 0, TARGET_UP | TARGET_STREAM);
    put_snaplen(&mut bench, 0);
    let frame = Frame::new(ROUTER, POD).filled(100, 1).bytes();
    bench.run(Hook::Ingress, &frame, 1);
    assert_eq!(bench.counted(0), counted(100, &[(Egress, Verdict::TargetDown, 1)]));
    let ring = RingBuf::create(RING, 0).unwrap();
    bench.put_ring(1, &ring);
    bench.put_target(1, 0, TARGET_STREAM);
    bench.run(Hook::Ingress, &frame, 1);
    assert_eq!(bench.counted(0), counted(100, &[(Egress, Verdict::TargetDown, 2)]));
}

/// The same packet for two mirrors, to a stream and to a device.
#[test]
fn a_packet_is_in_a_stream_once_and_on_the_device_besides() {
    let (mut bench, mut reader) = bench("recordonce", 0, RING);
    bench.put_device(0, "target0", READY);
    let target = bench.listen("target0");
    let streamed = Session { serial: SERIAL, ..session(0, 1, BOTH) };
    let again = Session { serial: 8, ..session(2, 1, BOTH) };
    bench.put_tap(at(true), &[streamed, session(1, 0, BOTH), again]);
    let frame = Frame::new(ROUTER, POD).filled(300, 1).bytes();
    bench.run(Hook::Ingress, &frame, 1);
    let [(seen, bytes)] = &reader.records()[..] else { panic!("not one record") };
    assert_eq!((seen.serial, bytes), (SERIAL, &frame));
    assert_eq!(target.arrived(), [frame]);
    assert_eq!(bench.counted(0), counted(300, &[(Egress, Verdict::Copied, 1)]));
    assert_eq!(bench.counted(1), counted(300, &[(Egress, Verdict::Copied, 1)]));
    assert_eq!(bench.counted(2), counted(300, &[(Egress, Verdict::Duplicate, 1)]));
}
