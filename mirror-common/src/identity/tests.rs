extern crate std;

use std::{vec, vec::Vec};

use proptest::{collection::vec as any_vec, prelude::*, sample::select};

use super::*;

/// A frame with an Ethernet header.
struct Frame(Vec<u8>);

impl Frame {
    fn words<const N: usize>(&self, at: usize) -> Option<[u32; N]> {
        let (words, _) = self.0.get(at..)?.as_chunks();
        Some(words.first_chunk::<N>()?.map(u32::from_ne_bytes))
    }
}

impl Bytes for Frame {
    fn network<const N: usize>(&mut self, offset: u32) -> Option<[u32; N]> {
        self.words(14 + offset as usize)
    }

    fn macs(&mut self) -> Option<[u32; 3]> {
        self.words(0)
    }
}

fn of(ethertype: u16, network: &[u8]) -> Option<u32> {
    let mut frame = vec![2; 12];
    frame.extend(ethertype.to_be_bytes());
    frame.extend(network);
    identity(&mut Frame(frame), ethertype)
}

/// The parts of a packet that belong to its identity, and those that change on its way.
#[derive(Debug, Clone, PartialEq)]
struct Packet {
    is_v6: bool,
    protocol: u8,
    from: [u8; 16],
    to: [u8; 16],
    /// The first eight bytes after the IP header.
    transport: [u8; 8],
    /// IP options, in words; IPv4 only.
    options: usize,
    /// Offset of a fragment in units of eight bytes, and its identification.
    fragment: Option<(u16, u16)>,
    ttl: u8,
}

impl Packet {
    fn identity(&self) -> Option<u32> {
        let Self { is_v6, protocol, from, to, transport, options, fragment, ttl } = self;
        let mut bytes = Vec::new();
        if *is_v6 {
            let next = if fragment.is_some() { IPV6_FRAGMENT } else { *protocol };
            bytes.extend([0x60, 0, 0, 0, 0, 0, next, *ttl]);
            bytes.extend(from);
            bytes.extend(to);
            if let Some((offset, id)) = fragment {
                let [high, low] = (offset << 3 | 1).to_be_bytes();
                let [id, of_it] = id.to_be_bytes();
                bytes.extend([*protocol, 0, high, low, 0, 0, id, of_it]);
            }
        } else {
            let (offset, id) = fragment.unwrap_or_default();
            let [high, low] = offset.to_be_bytes();
            let [id, of_it] = id.to_be_bytes();
            bytes.extend([0x45 + *options as u8, 0, 0, 0, id, of_it, high, low, *ttl, *protocol, 0, 0]);
            bytes.extend(&from[..4]);
            bytes.extend(&to[..4]);
            bytes.extend(vec![1; options * 4]);
        }
        bytes.extend(transport);
        of(if *is_v6 { IPV6 } else { IPV4 }, &bytes)
    }
}

fn any_packet() -> impl Strategy<Value = Packet> {
    let protocols = vec![TCP, UDP, SCTP];
    (any::<bool>(), select(protocols), any::<[[u8; 16]; 2]>(), any::<[u8; 8]>(), 0..11_usize, any::<u8>())
        .prop_map(|(is_v6, protocol, [from, to], transport, options, ttl)| Packet {
            is_v6,
            protocol,
            from,
            to,
            transport,
            options,
            fragment: None,
            ttl,
        })
}

proptest! {
    /// A router changes the TTL, and the packets of a flow have other sequence numbers.
    #[test]
    fn the_packets_of_a_flow_have_one_identity(packet in any_packet(), ttl: u8, rest: [u8; 4]) {
        let mut other = Packet { ttl, ..packet.clone() };
        other.transport[4..].copy_from_slice(&rest);
        prop_assert_eq!(packet.identity(), other.identity());
    }

    #[test]
    fn a_translation_makes_another_packet(packet in any_packet(), byte in 1..=255_u8, at in 0..4_usize, field in 0..4) {
        let mut other = packet.clone();
        match field {
            0 => other.from[at] ^= byte,
            1 => other.to[at] ^= byte,
            2 => other.transport[at] ^= byte,
            _ => (other.from, other.to) = (packet.to, packet.from),
        }
        prop_assume!(field != 3 || packet.from[..4] != packet.to[..4]);
        prop_assert_ne!(packet.identity(), other.identity());
    }

    /// Later fragments have no ports: those bytes are payload.
    #[test]
    fn a_later_fragment_is_known_by_its_identification(
        packet in any_packet(), offset in 1..0x1fff_u16, ids: [u16; 2], payload: [u8; 8],
    ) {
        let fragment = |id, transport| Packet { fragment: Some((offset, id)), transport, ..packet.clone() }.identity();
        prop_assert_eq!(fragment(ids[0], packet.transport), fragment(ids[0], payload));
        prop_assert_eq!(ids[0] == ids[1], fragment(ids[0], payload) == fragment(ids[1], payload));
        let first = Packet { fragment: Some((0, ids[0])), ..packet.clone() };
        prop_assert_eq!(first.identity(), packet.identity(), "the first fragment has the ports");
    }

    #[test]
    fn an_icmp_message_is_known_by_type_and_id(packet in any_packet(), kinds: [u8; 2], ids: [u16; 2], rest: [u8; 5]) {
        let message = |kind, id: u16, rest: [u8; 5]| {
            let [high, low] = id.to_be_bytes();
            let transport = [kind, rest[0], rest[1], rest[2], high, low, rest[3], rest[4]];
            let protocol = if packet.is_v6 { ICMPV6 } else { ICMP };
            Packet { protocol, transport, ..packet.clone() }.identity()
        };
        let this = message(kinds[0], ids[0], rest);
        prop_assert_eq!(this, message(kinds[0], ids[0], [0; 5]), "the sequence number and the checksum change");
        prop_assert_eq!(kinds[0] == kinds[1], this == message(kinds[1], ids[0], rest));
        prop_assert_eq!(ids[0] == ids[1], this == message(kinds[0], ids[1], rest));
    }

    #[test]
    fn any_bytes_have_an_answer(ethertype in select(vec![IPV4, IPV6, 0x0806]), bytes in any_vec(any::<u8>(), 0..80)) {
        let answer = of(ethertype, &bytes);
        let header = match ethertype { IPV4 => 20, IPV6 => 40, _ => 0 };
        prop_assert!(answer.is_none() || bytes.len() >= header);
    }

    /// For a while, a copy stands for a later packet with the same identity at another hook.
    #[test]
    fn a_note_stands_for_its_packet_elsewhere_and_soon(
        identity: u32, places in (0..1_u32 << PLACE_BITS, 0..1_u32 << PLACE_BITS), unit: u32, age in 0..1_u32 << TIME_BITS, other: u32,
    ) {
        let (here, there) = places;
        let noted = note(identity, here, unit);
        let later = unit.wrapping_add(age);
        prop_assert_eq!(stands_for(noted, identity, there, later), here != there && age <= 1);
        if slot(other) == slot(identity) && other != identity {
            prop_assert!(!stands_for(noted, other, there, unit));
        }
        let tag = identity ^ 1 << SLOT_BITS;
        prop_assert!(slot(tag) == slot(identity) && !stands_for(noted, tag, there, unit));
    }

    #[test]
    fn the_hooks_of_a_namespace_are_places_of_their_own(netns: u32, one in 0..1_u32 << 21, other in 0..1_u32 << 21, sides: [bool; 2]) {
        let at = |ifindex, is_egress| place(netns, ifindex, is_egress) & ((1 << PLACE_BITS) - 1);
        prop_assert_eq!(one == other && sides[0] == sides[1], at(one, sides[0]) == at(other, sides[1]));
    }
}

#[test]
fn what_is_no_ip_is_known_by_its_macs_and_type() {
    let frame = |to: u8, ethertype: u16| identity(&mut Frame([[to; 6], [4; 6]].concat()), ethertype);
    assert_eq!(frame(0xff, 0x0806), frame(0xff, 0x0806));
    assert_ne!(frame(0xff, 0x0806), frame(2, 0x0806), "an answer that is written into the request");
    assert_ne!(frame(0xff, 0x0806), frame(0xff, 0x88cc));
    assert_eq!(identity(&mut Frame(vec![1; 11]), 0x0806), None);
}
