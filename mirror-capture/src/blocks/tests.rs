//! Tests of the parser: what is written is read, and the bytes of a stranger do no harm.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::{collection::vec, option, prelude::*};

use super::*;
use crate::pcapng::{self, Section, Writer};

/// A stream: two interfaces, one packet with these bytes for each, and counters; then names and a note.
fn stream(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut writer = Writer::begin(&mut out, &Section { comment: Some("a comment"), ..Section::default() });
    for name in ["shop/web eth0", "shop/db eth0"] {
        let interface = writer.interface(&mut out, &interface(name));
        packet(interface, bytes).write(&mut out);
        counters(interface).write(&mut out);
    }
    named_addresses().write(&mut out);
    pcapng::note(&mut out, NOTE_JSON);
    out
}

fn interface(name: &str) -> Interface {
    Interface {
        name: name.to_owned(),
        description: Some("device veth1 of the node".to_owned()),
        filter: Some("tcp port 443".to_owned()),
        hardware: Some("node-a".to_owned()),
        comment: None,
    }
}

fn counters(interface: InterfaceId) -> Statistics {
    Statistics {
        interface,
        time_ns: 5 << 33,
        start_ns: Some(1),
        end_ns: Some(7 << 40),
        received: Some(9),
        dropped: Some(2),
        limited: Some(4),
        comment: Some("2 of its super-frames were cut".to_owned()),
    }
}

fn packet(interface: InterfaceId, bytes: &[u8]) -> pcapng::Packet<'_> {
    pcapng::Packet {
        interface,
        time_ns: 1_795_305_601_123_456_789,
        bytes,
        len: bytes.len() as u32,
        direction: Some(Direction::Inbound),
        comment: None,
    }
}

const NOTE_JSON: &str = r#"{"pod":"shop/db","reason":"OptedOut","message":"not mirrored"}"#;

fn named_addresses() -> Names {
    let of = |address: &str, name: &str| (address.parse().unwrap(), name.to_owned());
    Names {
        addresses: vec![of("10.0.0.1", "web.shop"), of("fd00::1", "checkout.shop.svc")],
        comment: Some("podmirror: shop/db: OptedOut".into()),
    }
}

fn all(blocks: &mut Blocks) -> Vec<Block> {
    std::iter::from_fn(|| blocks.pop().unwrap()).collect()
}

#[test]
fn what_is_written_is_read() {
    let mut blocks = Blocks::default();
    blocks.push(&stream(b"a packet"));
    let all = all(&mut blocks);
    assert!(!blocks.is_within_a_block());
    assert_eq!(all[0], Block::Section("a comment".into()));
    assert_eq!((all.len(), &all[4]), (9, &Block::Interface(interface("shop/db eth0"))));
    let Block::Packet(packet) = all[5].clone() else { unreachable!("{all:?}") };
    assert_eq!((packet.interface, packet.time_ns), (1, 1_795_305_601_123_456_789));
    let block = packet.clone().with_interface(77);
    assert_eq!((block[8], &block[12..]), (77, &packet.block[12..]));
    assert_eq!(all[6], Block::Statistics(counters(InterfaceId::at(1))));
    assert_eq!(all[7..], [Block::Names(named_addresses()), Block::Note(NOTE_JSON.into())]);
}

#[test]
fn a_block_beyond_the_bound_is_refused_at_its_head() {
    for kind in [1, 4, 5, 6, NOTE] {
        let mut blocks = Blocks::default();
        blocks.push(&[kind.to_le_bytes(), (MOST as u32 + 4).to_le_bytes()].concat());
        assert!(blocks.pop().is_err());
    }
}

/// One such block would make the file of all nodes unreadable.
#[test]
fn a_damaged_packet_ends_its_stream() {
    let written = |packet: pcapng::Packet<'_>| {
        let mut block = Vec::new();
        packet.write(&mut block);
        block
    };
    let pop = |block: &[u8]| {
        let mut blocks = Blocks::default();
        blocks.push(block);
        blocks.pop()
    };
    let interface = InterfaceId::at(0);
    let whole = pcapng::Packet { comment: Some("text"), ..packet(interface, b"a packet") };
    let whole = written(whole);
    assert!(matches!(pop(&whole), Ok(Some(Block::Packet(_)))));
    // The captured length, the length of the comment, the code and the length of the direction, and the last length.
    for place in [20..24, 38..40, 44..46, 46..48, whole.len() - 4..whole.len()] {
        let mut damaged = whole.clone();
        damaged[place.clone()].fill(0xff);
        assert!(pop(&damaged).is_err(), "{place:?}");
    }
    // A direction without a value, and its bytes as an empty comment.
    let mut damaged = whole;
    damaged[46] = 0;
    assert!(pop(&damaged).is_err());
    let mut long = written(packet(interface, &vec![7; MAX_CAPTURED]));
    assert!(matches!(pop(&long), Ok(Some(Block::Packet(_)))));
    long.splice(28..28, [7; 4]);
    for place in [4, 20, long.len() - 4] {
        let length = word(&long, place).unwrap() + 4;
        long[place..place + 4].copy_from_slice(&length.to_le_bytes());
    }
    assert!(pop(&long).is_err());
}

proptest! {
    /// The blocks do not depend on how the bytes are divided.
    #[test]
    fn the_parts_in_which_bytes_come_do_not_matter(packet in vec(any::<u8>(), 0..300), parts in vec(1..200_usize, 1..20)) {
        let stream = stream(&packet);
        let (mut whole, mut parted, mut found) = (Blocks::default(), Blocks::default(), Vec::new());
        whole.push(&stream);
        let mut rest = &stream[..];
        for part in parts.into_iter().cycle() {
            let (now, later) = rest.split_at(part.min(rest.len()));
            parted.push(now);
            found.extend(all(&mut parted));
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(found, all(&mut whole));
    }

    #[test]
    fn names_and_notes_are_read_as_they_were_written(
        addresses in vec((any::<IpAddr>(), "[^\\x00]{1,20}"), 0..5),
        comment in option::of(".{0,20}"), json in ".{0,20}",
    ) {
        let names = Names { addresses, comment };
        let (mut out, mut blocks) = (Vec::new(), Blocks::default());
        names.write(&mut out);
        pcapng::note(&mut out, &json);
        blocks.push(&out);
        prop_assert_eq!(all(&mut blocks), [Block::Names(names), Block::Note(json)]);
        prop_assert!(!blocks.is_within_a_block());
    }

    /// Records and options whose lengths may be wrong are read or end the stream, and take memory as the block does.
    #[test]
    fn the_names_and_the_note_of_a_stranger_are_bounded(
        is_note: bool,
        records in vec((0..4_u16, option::weighted(0.2, 0..100_u16), vec(any::<u8>(), 0..40)), 0..20),
    ) {
        let mut body = Vec::<u8>::new();
        for (kind, length, value) in records {
            body.extend(kind.to_le_bytes());
            body.extend(length.unwrap_or(value.len() as u16).to_le_bytes());
            body.extend(&value);
            body.resize(body.len().next_multiple_of(4), 0);
        }
        let kind = if is_note { NOTE } else { 4 };
        let length = ((body.len() + AROUND) as u32).to_le_bytes();
        let mut blocks = Blocks::default();
        blocks.push(&[&kind.to_le_bytes()[..], &length[..], &body[..], &length[..]].concat());
        let found = blocks.pop();
        prop_assert!(!blocks.is_within_a_block());
        // An invalid byte becomes a character of three bytes.
        let most = 3 * body.len();
        match found {
            Ok(Some(Block::Names(names))) => {
                // A record has a head of 4 bytes and, padded, at least 8 for an address and a name.
                prop_assert!(!is_note && names.addresses.len() * 12 <= body.len());
                let texts = names.addresses.iter().map(|(_, name)| name).chain(&names.comment);
                prop_assert!(texts.map(String::len).sum::<usize>() <= most);
            }
            Ok(Some(Block::Note(json))) => prop_assert!(is_note && json.len() <= most),
            Ok(Some(other)) => unreachable!("{other:?}"),
            Ok(None) => prop_assert!(is_note, "a note without its text"),
            Err(_) => prop_assert!(!is_note, "names without an end"),
        }
    }

    /// The bytes of a compromised machine are parsed or end the stream; they do no other harm.
    #[test]
    fn any_bytes_are_survived(random in vec(any::<u8>(), 0..500), flips in vec((0..2000_usize, any::<u8>()), 0..8)) {
        let mut written = stream(b"a packet");
        for (at, byte) in flips {
            let at = at % written.len();
            written[at] = byte;
        }
        for bytes in [random, written] {
            let mut blocks = Blocks::default();
            blocks.push(&bytes);
            let mut count = 0;
            while let Ok(Some(_)) = blocks.pop() {
                count += 1;
            }
            prop_assert!(count * AROUND <= bytes.len());
        }
    }
}
