//! Properties: for any input in any order, each file parses, and contains the packets that a simple model expects.
//!
//! The model keeps all packets in a list, and assigns them to files at the end.

use std::collections::BTreeSet;

use mirror_capture::pcapng::{Section, Writer};
use proptest::{collection::vec, option, prelude::*, sample};

use super::*;

/// A call of the recorder.
#[derive(Debug, Clone)]
enum Step {
    Add(u32),
    Record(RecordHead, Vec<u8>),
    EndBatch,
}

fn any_record() -> impl Strategy<Value = Step> {
    let plain = (vec(any::<u8>(), 0..300), 0..20_u32).prop_map(|(bytes, more)| (bytes, more, 0));
    let cut = (1001..4000_usize).prop_map(|payload| {
        let (bytes, gso_size) = super_frame(payload);
        (bytes, 0, gso_size)
    });
    let vlan = option::of((sample::select(vec![0x8100, 0x88a8]), any::<u16>()));
    (1..5_u32, 0..100_u64, prop_oneof![4 => plain, 1 => cut], 0..3_u16, vlan).prop_map(
        |(serial, time, (bytes, more, gso_size), direction, vlan)| {
            let (vlan_protocol, vlan_tci) = vlan.unwrap_or_default();
            let head = head(serial, time * 1_000_000, bytes.len());
            let head = RecordHead { gso_size, direction, vlan_protocol, vlan_tci, ..head };
            Step::Record(RecordHead { len: head.len + more, ..head }, bytes)
        },
    )
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        1 => (1..5_u32).prop_map(Step::Add),
        8 => any_record(),
        1 => Just(Step::EndBatch),
    ]
}

fn any_kept() -> impl Strategy<Value = Kept> {
    let bytes = 0..9000_u64;
    prop_oneof![
        Just(Kept::All),
        bytes.clone().prop_map(|bytes| Kept::First { bytes }),
        bytes.clone().prop_map(|bytes| Kept::Last(Bound::Bytes(bytes))),
        (0..100_u64).prop_map(|time| Kept::Last(Bound::Time(Duration::from_millis(time)))),
        (bytes, 0..5_u32).prop_map(|(bytes, files)| Kept::Files { bytes, files }),
    ]
}

/// A recorded packet.
#[derive(Debug, Clone)]
struct Came {
    packet: Seen,
    /// The number of interfaces at that time.
    interfaces: usize,
}

/// The frames of a record: those of `Wire`, or the one with its tag.
fn frames(head: &RecordHead, bytes: &[u8], super_frames: bool) -> Vec<(Vec<u8>, u32)> {
    let vlan = (head.vlan_protocol > 0).then_some(VlanTag { tpid: head.vlan_protocol, tci: head.vlan_tci });
    if super_frames {
        let Some(VlanTag { tpid, tci }) = vlan else { return vec![(bytes.to_vec(), head.len)] };
        let mut tagged = bytes.to_vec();
        if bytes.len() >= 12 {
            tagged.splice(12..12, [tpid.to_be_bytes(), tci.to_be_bytes()].concat());
        }
        return vec![(tagged, head.len + 4)];
    }
    let mut wire = Wire::default();
    let mut frames = wire.frames(&Frame { bytes, len: head.len, gso_size: head.gso_size, vlan });
    let mut all = Vec::new();
    while let Some(frame) = frames.next_frame() {
        all.push((frame.bytes.to_vec(), frame.len));
    }
    all
}

/// All packets of sessions that are known when they arrive, and all sessions in order.
fn came(steps: &[Step], super_frames: bool) -> (Vec<Came>, Vec<u32>) {
    let (mut all, mut sessions) = (Vec::new(), Vec::new());
    for step in steps {
        match step {
            Step::Add(serial) if !sessions.contains(serial) => sessions.push(*serial),
            Step::Record(head, bytes) => {
                let Some(interface) = sessions.iter().position(|serial| *serial == head.serial) else {
                    continue;
                };
                for (bytes, len) in frames(head, bytes, super_frames) {
                    let direction = [Some(1), Some(2), None][usize::from(head.direction)];
                    let time_ns = STARTED.wall_ns + head.time_ns - STARTED.monotonic_ns;
                    let packet = Seen { interface: interface as u32, time_ns, bytes, len, direction };
                    all.push(Came { packet, interfaces: sessions.len() });
                }
            }
            _ => {}
        }
    }
    (all, sessions)
}

/// The length of a packet's block: the fixed fields, the bytes, and the options if there is a direction.
fn length(packet: &Seen) -> u64 {
    let options = if packet.direction.is_some() { 12 } else { 0 };
    32 + packet.bytes.len().next_multiple_of(4) as u64 + options
}

/// The length of a file without packets that has the first `count` of these interfaces.
fn file_bytes(sessions: &[u32], count: usize) -> u64 {
    let mut file = Vec::new();
    let section = Section { application: Some("mirror-agent test"), ..Section::default() };
    let mut writer = Writer::begin(&mut file, &section);
    for serial in &sessions[..count] {
        writer.interface(&mut file, &described(*serial));
    }
    (file.len() + 88 * count) as u64
}

/// The packets of each file.
fn model(came: &[Came], sessions: &[u32], kept: Kept) -> Vec<Vec<Seen>> {
    let packets = |came: &[Came]| came.iter().map(|came| came.packet.clone()).collect::<Vec<_>>();
    let total = |came: &[Came]| {
        let interfaces = came.last().map_or(0, |last| last.interfaces);
        file_bytes(sessions, interfaces) + came.iter().map(|came| length(&came.packet)).sum::<u64>()
    };
    match kept {
        Kept::All => vec![packets(came)],
        Kept::First { bytes } => {
            let fits = |count: &usize| total(&came[..*count]) <= bytes;
            vec![packets(&came[..(1..=came.len()).take_while(fits).last().unwrap_or(0)])]
        }
        Kept::Last(Bound::Bytes(bytes)) => {
            let start = (0..came.len()).find(|start| total(&came[*start..]) <= bytes);
            vec![packets(&came[start.unwrap_or(came.len().saturating_sub(1))..])]
        }
        Kept::Last(Bound::Time(span)) => {
            let newest = came.iter().map(|came| came.packet.time_ns).max().unwrap_or(0);
            let is_old = |came: &&Came| came.packet.time_ns + (span.as_nanos() as u64) < newest;
            vec![came.iter().skip_while(is_old).map(|came| came.packet.clone()).collect()]
        }
        Kept::Files { bytes, files } => {
            let mut starts = vec![0];
            for end in 0..came.len() {
                let start = starts[starts.len() - 1];
                if end > start && total(&came[start..=end]) > bytes {
                    starts.push(end);
                }
            }
            let ends = starts[1..].iter().copied().chain([came.len()]);
            let all: Vec<_> =
                starts.iter().zip(ends).map(|(start, end)| packets(&came[*start..end])).collect();
            all[all.len().saturating_sub(files.max(1) as usize)..].to_vec()
        }
    }
}

proptest! {
    #[test]
    fn every_file_holds_what_the_model_says(
        steps in vec(any_step(), 0..60), kept in any_kept(), super_frames: bool,
        max_packets in option::of(0..40_u64),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let output = Sink::Path(directory.path().join("web.pcapng"));
        let mut recorder = begin(Plan { output, kept, super_frames, max_packets, comment: None });
        for step in &steps {
            match step {
                Step::Add(serial) => add(&mut recorder, *serial),
                Step::Record(head, bytes) => {
 let _ = recorder.record(head, bytes);
}
                Step::EndBatch => {
 recorder.end_batch().unwrap();
}
            }
        }
        let summary = recorder.finish(200_000_000).unwrap();

        let (mut came, sessions) = came(&steps, super_frames);
        came.truncate(max_packets.map_or(usize::MAX, |most| most as usize));
        let expected = model(&came, &sessions, kept);
        let files: Vec<Contents> = summary.files.iter().map(|path| read(path)).collect();
        prop_assert_eq!(files.len(), expected.len());
        for (file, expected) in files.iter().zip(&expected) {
            prop_assert_eq!(&file.packets, expected);
            prop_assert_eq!(file.statistics.len(), file.names.len());
            let names: Vec<String> = sessions.iter().map(|serial| described(*serial).name).collect();
            prop_assert!(names.starts_with(&file.names), "{:?} {names:?}", file.names);
        }
        prop_assert_eq!(files.last().map(|file| file.names.len()), Some(sessions.len()));
        prop_assert_eq!(summary.kept, expected.iter().map(Vec::len).sum::<usize>() as u64);

        // The model's lengths, and so its bounds, equal those of the files.
        for (path, file) in summary.files.iter().zip(&files) {
            let packets: u64 = file.packets.iter().map(length).sum();
            prop_assert!(fs::metadata(path).unwrap().len() <= file_bytes(&sessions, file.names.len()) + packets);
        }

        // There are no other files.
        let left: BTreeSet<PathBuf> =
            fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        prop_assert_eq!(left, BTreeSet::from_iter(summary.files));
    }
}
