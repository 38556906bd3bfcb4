//! Super-frames.

use super::{
    packet::{Extension, Ip, Jumbo, Transport},
    *,
};

/// The expected segments, each with the checksum that Linux leaves unfinished.
fn segments(spec: &Spec, gso_size: u16, vlan: Option<VlanTag>, has_checksum: bool) -> Vec<Packet> {
    let chunks: Vec<&[u8]> = spec.payload.chunks(gso_size.into()).collect();
    let mut offset = 0;
    let segment = |(index, chunk): (usize, &&[u8])| {
        let mut segment = Spec { payload: chunk.to_vec(), big: None, ..spec.clone() };
        segment.tags.splice(0..0, vlan.map(|tag| (tag.tpid, tag.tci)));
        if let Ip::V4 { id, .. } = &mut segment.ip {
            *id = id.wrapping_add(index as u16);
        }
        if let Transport::Tcp { sequence, flags, .. } = &mut segment.transport {
            *sequence = sequence.wrapping_add(offset);
            *flags &= if index == 0 { 0xff } else { 0x7f };
            *flags &= if index + 1 == chunks.len() { 0xff } else { 0xf6 };
        }
        offset += chunk.len() as u32;
        segment.build(if has_checksum { Check::Right } else { Check::Value(0) })
    };
    chunks.iter().enumerate().map(segment).collect()
}

/// A random super-frame. `spec` never draws fragment headers here, because the kernel does not segment such packets
/// either.
fn super_frame() -> impl Strategy<Value = (Spec, u16)> {
    let big = prop_oneof![3 => Just(None), 1 => Just(Some(Jumbo::With)), 1 => Just(Some(Jumbo::Without))];
    (spec(3000), big, 120..1500_u16).prop_map(|(mut spec, big, gso_size)| {
        if let Ip::V6 { extensions, .. } = &mut spec.ip {
            extensions.retain(|extension| extension.number != 44);
        }
        spec.big = big;
        (spec, gso_size)
    })
}

proptest! {
    #[test]
    fn a_super_frame_becomes_its_segments(
        (spec, gso_size) in super_frame(), vlan in option::of(tag()), check in prop_oneof![
            3 => Just(Check::Unfinished), 1 => any::<u16>().prop_map(Check::Value), 1 => Just(Check::Value(0)),
        ],
    ) {
        prop_assume!(spec.payload.len() > gso_size.into());
        let packet = spec.build(check);
        let all = wire(&Frame { gso_size, vlan, ..plain(&packet.bytes) });
        let is_tcp = matches!(spec.transport, Transport::Tcp { .. });
        let has_checksum = is_tcp || !matches!(check, Check::Value(0));
        let expected = segments(&spec, gso_size, vlan, has_checksum);
        prop_assert_eq!(all.len(), expected.len());
        for ((bytes, len), expected) in all.iter().zip(&expected) {
            prop_assert_eq!(bytes, &expected.bytes);
            prop_assert_eq!(*len as usize, bytes.len());
        }
        let payload: Vec<u8> =
            all.iter().zip(&expected).flat_map(|((bytes, _), expected)| &bytes[expected.payload..]).copied().collect();
        prop_assert_eq!(payload, spec.payload);
    }

    /// Every segment is returned, as far as it was captured. The headers are correct in any case.
    #[test]
    fn a_super_frame_that_was_cut_loses_payload_only(
        (spec, gso_size) in super_frame(), vlan in option::of(tag()), captured in 0..3500_usize,
    ) {
        prop_assume!(spec.payload.len() > gso_size.into());
        let packet = spec.build(Check::Unfinished);
        // Segments that consist of headers only have no more room than `FREE`.
        prop_assume!(captured > 1000 || spec.payload.len() / usize::from(gso_size) < 4);
        let whole = packet.bytes.len();
        let bytes = &packet.bytes[..captured.min(whole)];
        let all = wire(&Frame { bytes, len: whole as u32, gso_size, vlan });
        if bytes.len() < packet.payload {
            let tag = if vlan.is_some() { 4 } else { 0 };
            prop_assert_eq!(all, vec![(tagged(bytes, vlan), whole as u32 + tag)]);
        } else {
            let mut left = bytes.len() - packet.payload;
            let expected = segments(&spec, gso_size, vlan, true);
            prop_assert_eq!(all.len(), expected.len());
            for ((bytes, len), mut expected) in all.into_iter().zip(expected) {
                prop_assert_eq!(len as usize, expected.bytes.len());
                let payload = (expected.bytes.len() - expected.payload).min(left);
                left -= payload;
                let end = expected.payload + payload;
                if end < expected.bytes.len() {
                    expected.set(expected.unfinished);
                }
                prop_assert_eq!(&bytes, &expected.bytes[..end]);
            }
        }
    }

    #[test]
    fn what_fits_into_one_segment_is_a_frame_like_any_other(spec in spec(300), more in 0..50_u16) {
        let packet = spec.build(Check::Unfinished);
        let gso_size = (spec.payload.len() as u16 + more).max(1);
        let out = one(&Frame { gso_size, ..plain(&packet.bytes) });
        prop_assert_eq!(out, spec.build(Check::Right).bytes);
    }

    #[test]
    fn super_frames_that_cannot_be_cut_are_whole(
        (spec, gso_size) in super_frame(), vlan in option::of(tag()), reason in 0..6,
    ) {
        prop_assume!(spec.payload.len() > gso_size.into());
        let mut spec = Spec { big: None, ..spec };
        let (mut gso_size, mut more) = (gso_size, 0);
        match reason {
            0 => gso_size = 1,
            // SCTP, ESP and IPIP.
            1 => spec.transport = Transport::Other(132),
            2 => spec.transport = Transport::Other(50),
            3 => spec.transport = Transport::Other(4),
            // The frame is longer than the IP header says.
            4 => more = 1,
            _ => match &mut spec.ip {
                Ip::V4 { options, .. } => *options = vec![131, 3, 4, 1],
                Ip::V6 { extensions, .. } => {
                    extensions.push(Extension { number: 44, bytes: vec![0; 7], destination: None });
                }
            },
        }
        let mut bytes = spec.build(Check::Unfinished).bytes;
        bytes.resize(bytes.len() + more, 0);
        prop_assert_eq!(one(&Frame { gso_size, vlan, ..plain(&bytes) }), tagged(&bytes, vlan));
    }
}

fn tcp(payload: usize) -> Spec {
    Spec {
        tags: Vec::new(),
        ip: Ip::V4 { source: [10, 0, 0, 1], destination: [10, 0, 0, 2], id: 0xffff, options: Vec::new() },
        transport: Transport::Tcp { sequence: u32::MAX - 5, flags: 0xff, options: Vec::new() },
        payload: (0..payload).map(|place| place as u8).collect(),
        big: None,
    }
}

#[test]
fn big_tcp_is_cut() {
    let v6 = Ip::V6 { source: [1; 16], destination: [2; 16], extensions: Vec::new() };
    let v4 = tcp(1).ip;
    for (ip, big) in [(v4, Jumbo::Without), (v6.clone(), Jumbo::With), (v6, Jumbo::Without)] {
        let spec = Spec { ip, big: Some(big), ..tcp(200_000) };
        let packet = spec.build(Check::Unfinished);
        let all = wire(&Frame { gso_size: 1448, ..plain(&packet.bytes) });
        let expected = segments(&spec, 1448, None, true);
        assert_eq!(all.len(), 139);
        assert!(all.iter().zip(&expected).all(|((bytes, _), expected)| *bytes == expected.bytes));
    }
}

/// Returns the number of frames from a TCP super-frame over IPv4 with this payload, and of their bytes. `captured`:
/// captured bytes of the super-frame.
fn cut(payload: usize, gso_size: u16, captured: usize) -> (usize, usize) {
    let spec = Spec { big: (payload > 60_000).then_some(Jumbo::Without), ..tcp(payload) };
    let bytes = spec.build(Check::Unfinished).bytes;
    let len = bytes.len() as u32;
    let all = wire(&Frame { bytes: &bytes[..captured.min(bytes.len())], len, gso_size, vlan: None });
    (all.len(), all.iter().map(|(bytes, _)| bytes.len()).sum())
}

/// Super-frames of real connections are segmented, with any capture length that includes the headers: standard
/// Ethernet, jumbo frames, the minimum MTU of IPv6, the MTU that every IPv4 host accepts, and Linux's smallest
/// segments.
#[test]
fn segments_of_real_connections_come_out() {
    for (gso_size, captured, segments) in
        [(1448, 65_568, 42), (8948, 96, 7), (1220, 96, 50), (536, 65_568, 112), (36, 65_568, 1667)]
    {
        assert_eq!(cut(60_000, gso_size, captured).0, segments, "{gso_size} {captured}");
    }
    assert_eq!(cut(500_000, 1448, 65_568).0, 346, "BIG TCP");
}

/// The sender chooses the length of a segment.
#[test]
fn a_super_frame_of_tiny_segments_stays_whole() {
    assert_eq!(cut(53_680, 8, 128), (1, 128));
    assert_eq!(cut(53_680, 8, 65_568), (1, 53_734));
    assert_eq!(cut(100, 8, 200).0, 1);
    let packet = tcp(53_680).build(Check::Unfinished).bytes;
    let mut wire = Wire::default();
    assert_eq!(wire.frames(&Frame { gso_size: 8, ..plain(&packet) }).too_many(), Some(6710));
    assert_eq!(wire.frames(&Frame { gso_size: 1448, ..plain(&packet) }).too_many(), None);
    assert_eq!(wire.tagged(&Frame { gso_size: 8, ..plain(&packet) }).too_many(), None);
}

#[test]
fn segments_are_not_longer_than_ip_allows() {
    let spec = Spec { big: Some(Jumbo::Without), ..tcp(1000) };
    let bytes = spec.build(Check::Unfinished).bytes;
    let count = |len, gso_size| wire(&Frame { bytes: &bytes, len, gso_size, vlan: None }).len();
    assert_eq!(count(200_000, 65_495), 4);
    assert_eq!(count(200_000, 65_496), 1);
    assert_eq!(count(u32::MAX, 65_000), 1, "too many");
}

#[test]
fn long_headers_are_not_repeated_often() {
    let bytes = [&[60][..], &[0; 6 + 60 * 8]].concat();
    let extensions = vec![Extension { number: 60, bytes, destination: None }];
    let spec = Spec { ip: Ip::V6 { source: [1; 16], destination: [2; 16], extensions }, ..tcp(6000) };
    let packet = spec.build(Check::Unfinished);
    let count = |gso_size| wire(&Frame { gso_size, ..plain(&packet.bytes) }).len();
    assert_eq!([count(1000), count(100)], [6, 1]);
}
