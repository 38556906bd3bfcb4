//! Tests of the merge: no packet is lost or changed, and invalid files are refused.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::{io::Cursor, path::Path};

use mirror_core::pcapng::{self, Interface, InterfaceId, Section, Writer};
use proptest::{collection::vec, prelude::*};

use super::*;

/// The number of packets in the file of node a, or the reason for its refusal.
fn counted(file: &[u8]) -> Result<u64, String> {
    match count("a", Cursor::new(file), &Place::beside(Path::new("/d"))) {
        Ok(packets) => Ok(packets),
        Err(Failure::There(error)) => Err(error.to_string()),
        Err(Failure::Here(error)) => panic!("{error:#}"),
    }
}

/// A packet: its interface, its time, and its bytes.
type Drawn = (u32, u64, Vec<u8>);

/// The pods of a file, one interface each.
const PODS: [&str; 2] = ["shop/web", "shop/db"];

/// A file as written by a recorder.
fn file(packets: &[Drawn]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut writer = Writer::begin(&mut out, &Section::default());
    for pod in PODS {
        writer.interface(&mut out, &Interface { name: Some(&format!("{pod} eth0")), ..Interface::default() });
    }
    for (interface, time_ns, bytes) in packets {
        let packet = pcapng::Packet {
            interface: InterfaceId::at(*interface),
            time_ns: *time_ns,
            bytes,
            len: bytes.len() as u32,
            direction: None,
            lost: None,
            comment: None,
        };
        packet.write(&mut out);
    }
    for place in 0..PODS.len() as u32 {
        let of_it = packets.iter().filter(|(interface, ..)| *interface == place).count() as u64;
        let counters = pcapng::Statistics {
            interface: InterfaceId::at(place),
            time_ns: 7,
            start_ns: None,
            end_ns: None,
            received: Some(of_it + 1),
            dropped: Some(1),
            accepted: None,
            limited: Some(0),
            comment: None,
        };
        counters.write(&mut out);
    }
    out
}

/// The packets in a file, with the index of the interface.
fn packets(file: &[u8]) -> Vec<Drawn> {
    let mut blocks = Blocks::default();
    blocks.push(file);
    let mut packets = Vec::new();
    while let Some(block) = blocks.next().unwrap() {
        if let Block::Packet(packet) = block {
            let length = u32::from_le_bytes(packet.block[20..24].try_into().unwrap()) as usize;
            packets.push((packet.interface, packet.time_ns, packet.block[28..28 + length].to_vec()));
        }
    }
    packets
}

fn merged(files: &[Vec<u8>]) -> (Vec<u8>, Saved) {
    let named = files.iter().zip(0..).map(|(file, node)| (format!("n{node}"), &file[..])).collect();
    let mut out = Vec::new();
    let saved = merge(named, 9, &mut out).unwrap();
    (out, saved)
}

#[test]
fn the_summary_has_the_pods_of_each_node() {
    let web = |time_ns| (0, time_ns, vec![1]);
    let (out, saved) = merged(&[file(&[web(5), web(9)]), file(&[(1, 7, vec![2, 2])])]);
    assert_eq!(packets(&out), [(0, 5, vec![1]), (3, 7, vec![2, 2]), (0, 9, vec![1])]);
    let counted = saved.pods.iter().map(|((pod, node), packets)| format!("{pod} {node} {packets}"));
    assert_eq!(Vec::from_iter(counted), ["shop/db n1 1", "shop/web n0 2"]);
    let lines = saved.counted.lines(3, 2);
    assert_eq!(
        lines[..2],
        [
            "3 packets; 4 interfaces; 2 nodes; 0 packets limited; 4 packets lost",
            "shop/web eth0 on node n0: 1 of 3 packets were lost"
        ]
    );
}

#[test]
fn a_file_that_ends_early_is_no_file() {
    let file = file(&[(0, 5, vec![1; 100]), (0, 6, vec![1; 100])]);
    assert_eq!(counted(&file).unwrap(), 2);
    assert_eq!(counted(&file[..file.len() - 4]).unwrap_err(), "the packets of node a end within a block");
    let error = counted(b"no recorder of target live runs on this node").unwrap_err();
    assert!(error.contains("cannot be read"), "{error}");
}

/// Otherwise it would end the merge, and lose the packets of all nodes.
#[test]
fn a_file_with_a_packet_of_no_interface_is_refused_before_the_merge() {
    let bad = file(&[(0, 5, vec![1]), (PODS.len() as u32, 6, vec![1])]);
    let error = counted(&bad).unwrap_err();
    assert_eq!(error, "the packets of node a cannot be read: one is of no interface");
    assert!(merge(vec![("a".to_owned(), &bad[..])], 9, &mut Vec::new()).is_err());
}

/// The failure is that of the machine with the file, not of the node.
#[test]
fn a_file_that_this_machine_cannot_read_is_no_failure_of_the_node() {
    let unreadable = tempfile::NamedTempFile::new().unwrap();
    let to_write = std::fs::OpenOptions::new().write(true).open(unreadable.path()).unwrap();
    let place = Place::beside(Path::new("/d"));
    assert!(matches!(count("a", to_write, &place), Err(Failure::Here(_))));
}

proptest! {
    /// Each packet is in the output once and unchanged, in the order of its own file; and the output is ordered by time
    /// if each file is.
    #[test]
    fn nothing_is_lost_changed_or_put_out_of_order(
        mut drawn in vec(vec((0..2_u32, 0..50_u64, vec(any::<u8>(), 0..90)), 0..20), 0..5),
        is_sorted: bool,
    ) {
        if is_sorted {
            drawn.iter_mut().for_each(|packets| packets.sort_by_key(|(_, time_ns, _)| *time_ns));
        }
        let (out, saved) = merged(&drawn.iter().map(|packets| file(packets)).collect::<Vec<_>>());
        let found = packets(&out);
        for (number, packets) in (0..).zip(&drawn) {
            let of_it = found.iter().filter(|(interface, ..)| interface / 2 == number);
            let of_it: Vec<Drawn> = of_it.map(|(interface, time_ns, bytes)| (interface % 2, *time_ns, bytes.clone())).collect();
            prop_assert_eq!(&of_it, packets);
        }
        prop_assert_eq!(found.len() as u64, saved.pods.values().sum::<u64>());
        prop_assert_eq!(counted(&out).unwrap(), found.len() as u64);
        if is_sorted {
            prop_assert!(found.is_sorted_by_key(|(_, time_ns, _)| *time_ns));
        }
    }
}
