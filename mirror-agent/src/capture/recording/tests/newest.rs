//! Tests of recordings of the newest packets, with snapshots while they run.

use mirror_core::model::Directions;
use proptest::{collection::vec, prelude::*};

use super::*;

/// A plan that keeps the newest packets, with this path as the file.
fn newest(path: &Path, bytes: u64) -> Plan {
    Plan { kept: Kept::Last(Bound::Bytes(bytes)), ..all(path) }
}

/// All packets of the interfaces with these names.
fn named(is_wanted: &dyn Fn(&str) -> bool) -> Excerpt<'_> {
    Excerpt { is_wanted, ..Excerpt::ALL }
}

/// The names and the first bytes of all packets in a snapshot.
fn contents(snapshot: &Snapshot) -> Vec<(String, u8)> {
    let (contents, rest) = read_blocks(&snapshot.bytes);
    assert_eq!((rest, contents.packets.len() as u64), (0, snapshot.packets.values().sum()));
    assert_eq!(contents.statistics.len(), contents.names.len());
    let named = |packet: &Seen| (contents.names[packet.interface as usize].clone(), packet.bytes[0]);
    contents.packets.iter().map(named).collect()
}

#[test]
fn a_snapshot_has_the_packets_that_are_wanted_by_the_clock_of_now() {
    let mut recorder = begin_with_two(newest(Path::new("/dev/null"), 1 << 20));
    for (serial, number) in [(1, 1), (2, 2), (1, 3)] {
        let head = head(serial, 5000, 60);
        assert_eq!(recorder.record(&head, &frame(number, 60)), Progress::GoesOn);
    }
    recorder.note_counters(2, Counters { matched: 1, lost: 0, limited: 0 });
    // The wall clock was set back by a second meanwhile.
    let now = Clock { wall_ns: 8000, monotonic_ns: 9000 };
    let snapshot = recorder.snapshot(&named(&|name| name == "shop/web-2 eth0"), now).unwrap();
    assert_eq!(contents(&snapshot), [("shop/web-2 eth0".to_owned(), 2)]);
    let (file, _) = read_blocks(&snapshot.bytes);
    assert_eq!(file.packets[0].time_ns, 4000);
    let counted = Counted {
        start_ns: Some(0),
        end_ns: Some(8000),
        received: Some(1),
        dropped: Some(0),
        limited: Some(0),
    };
    assert_eq!(file.statistics, [counted]);
    assert!(recorder.snapshot(&named(&|_| false), now).unwrap().packets.is_empty());
}

#[test]
fn a_snapshot_is_of_a_time_and_of_packets_that_match() {
    let mut recorder = begin_with_two(newest(Path::new("/dev/null"), 1 << 20));
    for (number, time_ns) in [(1, 2000), (2, 3000), (3, 4000)] {
        assert_eq!(recorder.record(&head(1, time_ns, 60), &frame(number, 60)), Progress::GoesOn);
    }
    let now = Clock { wall_ns: STARTED.wall_ns + 8000, monotonic_ns: STARTED.monotonic_ns + 8000 };
    let mut numbers = |excerpt: Excerpt<'_>| {
        let snapshot = recorder.snapshot(&excerpt, now).unwrap();
        assert_eq!(snapshot.reach_ns, 8000, "nothing was replaced");
        contents(&snapshot).into_iter().map(|(_, number)| number).collect::<Vec<_>>()
    };
    assert_eq!(numbers(Excerpt { times: 3000..=4000, ..Excerpt::ALL }), [2, 3]);
    assert_eq!(numbers(Excerpt { times: 0..=3999, ..Excerpt::ALL }), [1, 2]);
    let filter = mirror_core::filter::compile("ether[0] != 2 and len = 60").unwrap();
    assert_eq!(numbers(Excerpt { filter: Some(&filter), ..Excerpt::ALL }), [1, 3]);
    assert_eq!(numbers(Excerpt { filter: Some(&filter), times: 0..=3999, ..Excerpt::ALL }), [1]);
}

#[test]
fn a_snapshot_has_the_directions_and_the_bytes_that_are_wanted() {
    let mut recorder = begin_with_two(newest(Path::new("/dev/null"), 1 << 20));
    for (direction, number) in [(verdict::Direction::Ingress, 1), (verdict::Direction::Egress, 2)] {
        for len in [60, 99] {
            let head = RecordHead { direction: direction as u16, ..head(1, 2000, len) };
            assert_eq!(recorder.record(&head, &frame(number, len)), Progress::GoesOn);
        }
    }
    let mut packets = |directions, snaplen| {
        let excerpt = Excerpt { directions, snaplen, ..Excerpt::ALL };
        let snapshot = recorder.snapshot(&excerpt, STARTED).unwrap();
        let (contents, rest) = read_blocks(&snapshot.bytes);
        assert_eq!((rest, contents.packets.len() as u64), (0, snapshot.packets.values().sum()));
        let packet = |of: Seen| (of.bytes[0], of.bytes.len(), of.len, of.direction);
        contents.packets.into_iter().map(packet).collect::<Vec<_>>()
    };
    let [ingress, egress] = [(1_u8, Some(1_u8)), (2, Some(2))];
    let of = |(number, direction), bytes: [usize; 2]| {
        [(number, bytes[0], 60_u32, direction), (number, bytes[1], 99, direction)]
    };
    assert_eq!(packets(Directions::Both, None), [of(ingress, [60, 99]), of(egress, [60, 99])].concat());
    assert_eq!(packets(Directions::Ingress, None), of(ingress, [60, 99]));
    assert_eq!(packets(Directions::Egress, Some(65)), of(egress, [60, 65]));
    assert_eq!(packets(Directions::Both, Some(60)), [of(ingress, [60; 2]), of(egress, [60; 2])].concat());
    assert_eq!(packets(Directions::Ingress, Some(99)), of(ingress, [60, 99]));
}

#[test]
fn the_memory_reaches_back_to_the_oldest_packet_that_was_not_replaced() {
    let mut recorder = begin_with_two(newest(Path::new("/dev/null"), 1000));
    for number in 0..100 {
        let _ = recorder.record(&head(1, 2000 + u64::from(number), 60), &frame(number, 60));
    }
    let now = Clock { wall_ns: STARTED.wall_ns + 9000, monotonic_ns: STARTED.monotonic_ns + 9000 };
    let snapshot = recorder.snapshot(&Excerpt::ALL, now).unwrap();
    let (_, oldest) = contents(&snapshot)[0].clone();
    assert!(oldest > 0);
    assert_eq!(snapshot.reach_ns, 10_000 - 2000 - u64::from(oldest));
}

#[test]
fn other_recordings_have_no_snapshot() {
    let directory = tempfile::tempdir().unwrap();
    let mut recorder = begin_with_two(all(&directory.path().join("web.pcapng")));
    assert_eq!(recorder.save(2000).unwrap(), None);
    assert_eq!(recorder.snapshot(&Excerpt::ALL, STARTED), None);
}

/// An event of a recording without an end.
#[derive(Debug, Clone)]
enum Step {
    /// A session begins, if its serial is free.
    Come(u32),
    /// The session ends.
    Go(u32),
    /// A packet of the session.
    Record(u32),
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        1 => (0..4_u32).prop_map(Step::Come),
        1 => (0..4_u32).prop_map(Step::Go),
        4 => (0..4_u32).prop_map(Step::Record),
    ]
}

proptest! {
    /// Serials of sessions are reused, and unused interfaces are removed at once: each packet keeps the name of its
    /// session.
    #[test]
    fn each_packet_keeps_its_name(steps in vec(any_step(), 0..200), bytes in 200..4000_u64, wanted in 0..4_u32) {
        let mut recorder = begin(newest(Path::new("/dev/null"), bytes));
        let mut names: [Option<String>; 4] = [const { None }; 4];
        let mut came = Vec::new();
        for (step, number) in steps.into_iter().zip(0_u8..) {
            match step {
                Step::Come(serial) => {
                    names[serial as usize].get_or_insert_with(|| {
                        let name = format!("shop/web-{serial} {number}");
                        recorder.add_interface(serial, &Interface { name: name.clone(), ..described(serial) });
                        name
                    });
                }
                Step::Go(serial) => {
                    names[serial as usize] = None;
                    recorder.most_interfaces = 0;
                    recorder.part_with(|gone| gone == serial);
                }
                Step::Record(serial) => {
                    let _ = recorder.record(&head(serial, 5000, 60), &frame(number, 60));
                    came.extend(names[serial as usize].clone().map(|name| (name, number)));
                }
            }
        }
        let kept = contents(&recorder.snapshot(&Excerpt::ALL, STARTED).unwrap());
        prop_assert_eq!(&came[came.len() - kept.len()..], &kept[..]);
        prop_assert!(came.is_empty() || !kept.is_empty());
        let prefix = format!("shop/web-{wanted} ");
        let of_one = recorder.snapshot(&named(&|name| name.starts_with(&prefix)), STARTED).unwrap();
        let expected: Vec<_> = kept.into_iter().filter(|(name, _)| name.starts_with(&prefix)).collect();
        prop_assert_eq!(contents(&of_one), expected);
    }
}
