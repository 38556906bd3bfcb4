//! Unfinished checksums of ordinary frames without tunnels.

use super::{
    packet::{Ip, Jumbo, Transport},
    *,
};

proptest! {
    #[test]
    fn an_unfinished_checksum_is_finished(
        spec in spec(200), vlan in option::of(tag()), padding in vec(any::<u8>(), 0..9),
    ) {
        let unfinished = [spec.build(Check::Unfinished).bytes, padding.clone()].concat();
        let right = [spec.build(Check::Right).bytes, padding].concat();
        let all = wire(&Frame { vlan, ..plain(&unfinished) });
        let expected = tagged(&right, vlan);
        let len = expected.len() as u32;
        prop_assert_eq!(all, vec![(expected, len)]);
    }

    #[test]
    fn any_other_checksum_stays(spec in spec(200), value: u16) {
        let packet = spec.build(Check::Value(value));
        prop_assume!(value != packet.unfinished);
        prop_assert_eq!(one(&plain(&packet.bytes)), packet.bytes);
    }

    #[test]
    fn without_the_whole_payload_the_checksum_stays(spec in spec(200), missing in 1..300_usize) {
        let packet = spec.build(Check::Unfinished);
        let len = packet.bytes.len() as u32;
        let bytes = &packet.bytes[..packet.bytes.len().saturating_sub(missing)];
        let all = wire(&Frame { len, ..plain(bytes) });
        prop_assert_eq!(all, vec![(bytes.to_vec(), len)]);
    }

    #[test]
    fn fragments_stay(spec in spec(200), field in any::<u16>()) {
        let mut packet = spec.build(Check::Unfinished);
        let network = 14 + 4 * spec.tags.len();
        let fragment_header = match &spec.ip {
            // The flag for more fragments or an offset, without DF.
            Ip::V4 { .. } => {
                prop_assume!(field & 0x3fff != 0);
                network + 6
            }
            Ip::V6 { extensions, .. } => {
                prop_assume!(field & 0xfff9 != 0);
                let number = extensions.iter().position(|extension| extension.number == 44);
                prop_assume!(number.is_some());
                let ahead = extensions.iter().take(number.unwrap_or_default());
                network + 40 + ahead.map(|extension| extension.bytes.len() + 1).sum::<usize>() + 2
            }
        };
        packet.bytes[fragment_header..fragment_header + 2].copy_from_slice(&field.to_be_bytes());
        prop_assert_eq!(one(&plain(&packet.bytes)), packet.bytes);
    }
}

fn udp(payload: &[u8]) -> Spec {
    Spec {
        tags: Vec::new(),
        ip: Ip::V4 { source: [10, 0, 0, 1], destination: [10, 0, 0, 2], id: 1, options: Vec::new() },
        transport: Transport::Udp { port: 53 },
        payload: payload.to_vec(),
        big: None,
    }
}

#[test]
fn udp_sends_ffff_for_0() {
    // The payload is the checksum that the same datagram with 0 would have.
    let checksum = udp(&[0, 0]).build(Check::Right).checksum;
    let spec = udp(&checksum.to_be_bytes());
    let packet = spec.build(Check::Unfinished);
    assert_eq!(packet.checksum, 0xffff);
    let out = one(&plain(&packet.bytes));
    assert_eq!(out[packet.field..packet.field + 2], [0xff, 0xff]);
    // TCP sends a 0 as it is.
    let tcp = Transport::Tcp { sequence: 1, flags: 0x10, options: Vec::new() };
    let checksum = Spec { transport: tcp.clone(), ..udp(&[0, 0]) }.build(Check::Right).checksum;
    let packet = Spec { transport: tcp, ..udp(&checksum.to_be_bytes()) }.build(Check::Unfinished);
    assert_eq!(packet.checksum, 0);
    let out = one(&plain(&packet.bytes));
    assert_eq!(out[packet.field..packet.field + 2], [0, 0]);
}

#[test]
fn udp_without_a_checksum_has_none() {
    let bytes = udp(b"query").build(Check::Value(0)).bytes;
    assert_eq!(one(&plain(&bytes)), bytes);
}

/// The length in the UDP header is used, even if the datagram has more bytes. A datagram with an impossible length is
/// not changed.
#[test]
fn udp_says_how_long_it_is() {
    let spec = udp(b"query and more");
    for length in 0..40_u16 {
        let mut packet = spec.build(Check::Value(0));
        let own = 8..=22;
        let pseudo = [&[10, 0, 0, 1, 10, 0, 0, 2, 0, 17][..], &length.to_be_bytes()].concat();
        let unfinished = packet::naive_sum(&pseudo);
        packet.bytes[packet.transport + 4..][..2].copy_from_slice(&length.to_be_bytes());
        packet.set(unfinished);
        let out = one(&plain(&packet.bytes));
        if own.contains(&length) {
            let covered = &out[packet.transport..][..length.into()];
            assert_eq!(packet::naive_sum(&[&pseudo, covered].concat()), 0xffff);
        } else {
            assert_eq!(out, packet.bytes);
        }
    }
}

/// A length of 0 means the rest of the frame only for a super-frame, or with a jumbo option.
#[test]
fn a_length_of_0_needs_a_reason() {
    let v6 = Ip::V6 { source: [1; 16], destination: [2; 16], extensions: Vec::new() };
    let tcp = Transport::Tcp { sequence: 1, flags: 0x10, options: Vec::new() };
    for (ip, big, gso_size, is_finished) in [
        (udp(&[]).ip, Jumbo::Without, 0, false),
        (udp(&[]).ip, Jumbo::Without, 1448, true),
        (v6.clone(), Jumbo::Without, 0, false),
        (v6.clone(), Jumbo::Without, 1448, true),
        (v6, Jumbo::With, 0, true),
    ] {
        let spec = Spec { ip, big: Some(big), transport: tcp.clone(), ..udp(b"payload") };
        let packet = spec.build(Check::Unfinished);
        let out = one(&Frame { gso_size, ..plain(&packet.bytes) });
        let right = if is_finished { Check::Right } else { Check::Unfinished };
        assert_eq!(out, spec.build(right).bytes);
    }
}

#[test]
fn a_source_route_hides_the_destination() {
    for option in [[131, 3, 4, 1], [1, 137, 3, 4], [7, 3, 4, 131]] {
        let ip =
            Ip::V4 { source: [10, 0, 0, 1], destination: [10, 0, 0, 2], id: 1, options: option.to_vec() };
        let spec = Spec { ip, ..udp(b"query") };
        let bytes = spec.build(Check::Unfinished).bytes;
        assert_eq!(one(&plain(&bytes)), bytes);
    }
}
