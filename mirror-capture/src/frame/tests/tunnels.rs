//! Packets inside tunnels.

use super::{
    packet::{Ip, Transport, ip},
    *,
};

/// The headers between the outer IP header and the inner frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tunnel {
    /// IPIP, IP6IP6, SIT.
    Ip,
    /// GRE with these flags. Contains an IP packet or a frame.
    Gre(u8, bool),
    Vxlan(u16),
    /// GENEVE with this many words of options. Contains an IP packet or a frame.
    Geneve(u8, bool),
}

impl Tunnel {
    fn is_udp(self) -> bool {
        matches!(self, Self::Vxlan(_) | Self::Geneve(..))
    }

    /// Returns the packet with `inner` inside, and the inner offset. `inner` can have a VLAN tag only if the tunnel
    /// carries frames.
    fn wrap(self, outer: &Ip, inner: &[u8], check: Check) -> (Packet, usize) {
        let is_v6 = inner[12..14] == [0x86, 0xdd];
        let ether_type: [u8; 2] = if is_v6 { [0x86, 0xdd] } else { [8, 0] };
        let (transport, header, is_frame) = match self {
            Self::Ip => (Transport::Other(if is_v6 { 41 } else { 4 }), Vec::new(), false),
            Self::Gre(flags, is_frame) => {
                let kind = if is_frame { [0x65, 0x58] } else { ether_type };
                let words = usize::from(flags >> 5 & 1) + usize::from(flags >> 4 & 1);
                let header = [&[flags, 0][..], &kind, &vec![9; words * 4]].concat();
                (Transport::Other(47), header, is_frame)
            }
            Self::Vxlan(port) => (Transport::Udp { port }, vec![8, 0, 0, 0, 0, 0, 42, 0], true),
            Self::Geneve(words, is_frame) => {
                let kind = if is_frame { [0x65, 0x58] } else { ether_type };
                let header =
                    [&[words, 0][..], &kind, &[0, 0, 42, 0], &vec![7; usize::from(words) * 4]].concat();
                (Transport::Udp { port: 6081 }, header, is_frame)
            }
        };
        let cut = if is_frame { 0 } else { 14 };
        let payload = [&header[..], &inner[cut..]].concat();
        let packet = Spec { tags: Vec::new(), ip: outer.clone(), transport, payload, big: None }.build(check);
        // The offset at which the inner frame would begin, even if only its packet is there.
        let offset = packet.payload + header.len() - cut;
        (packet, offset)
    }
}

fn tunnel() -> impl Strategy<Value = Tunnel> {
    prop_oneof![
        Just(Tunnel::Ip),
        (0..4_u8, any::<bool>()).prop_map(|(flags, is_frame)| Tunnel::Gre(flags << 4, is_frame)),
        prop_oneof![Just(4789), Just(8472)].prop_map(Tunnel::Vxlan),
        (0..64_u8, any::<bool>()).prop_map(|(words, is_frame)| Tunnel::Geneve(words, is_frame)),
    ]
}

fn inner() -> impl Strategy<Value = Spec> {
    spec(200).prop_map(|spec| Spec { tags: Vec::new(), ..spec })
}

proptest! {
    /// Linux computes an outer checksum for the finished inner one, or leaves it out.
    #[test]
    fn an_inner_checksum_is_finished(tunnel in tunnel(), outer in ip(), inner in inner(), has_outer: bool) {
        let right = inner.build(Check::Right);
        let check = if has_outer { Check::Right } else { Check::Value(0) };
        let (expected, offset) = tunnel.wrap(&outer, &right.bytes, check);
        prop_assume!(!tunnel.is_udp() || expected.unfinished != expected.checksum);
        let mut input = expected.bytes.clone();
        input[offset + right.field..][..2].copy_from_slice(&right.unfinished.to_be_bytes());
        prop_assert_eq!(one(&plain(&input)), expected.bytes);
    }

    /// A program's data inside UDP is not changed: only the outer checksum is the kernel's work.
    #[test]
    fn what_an_outer_checksum_covers_stays(
        tunnel in tunnel(), outer in ip(), inner in inner(), is_outer_finished: bool,
    ) {
        prop_assume!(tunnel.is_udp());
        let inner = inner.build(Check::Unfinished);
        let (expected, _) = tunnel.wrap(&outer, &inner.bytes, Check::Right);
        let check = if is_outer_finished { Check::Right } else { Check::Unfinished };
        let (input, _) = tunnel.wrap(&outer, &inner.bytes, check);
        prop_assert_eq!(one(&plain(&input.bytes)), expected.bytes);
    }

    #[test]
    fn super_frames_in_tunnels_are_whole(
        tunnel in tunnel(), outer in ip(), inner in inner(), gso_size in 8..100_u16, is_elsewhere: bool,
    ) {
        prop_assume!(inner.payload.len() > gso_size.into());
        let is_vxlan = matches!(tunnel, Tunnel::Vxlan(_));
        let tunnel = if is_elsewhere && is_vxlan { Tunnel::Vxlan(5000) } else { tunnel };
        let (input, _) = tunnel.wrap(&outer, &inner.build(Check::Unfinished).bytes, Check::Right);
        prop_assert_eq!(one(&Frame { gso_size, ..plain(&input.bytes) }), input.bytes);
    }
}

#[test]
fn tunnels_are_followed_to_a_bound() {
    let outer = Ip::V4 { source: [10, 0, 0, 1], destination: [10, 0, 0, 2], id: 1, options: Vec::new() };
    let tcp = Transport::Tcp { sequence: 1, flags: 0x10, options: Vec::new() };
    let spec =
        Spec { tags: Vec::new(), ip: outer.clone(), transport: tcp, payload: b"inside".to_vec(), big: None };
    let (mut input, mut right) = (spec.build(Check::Unfinished).bytes, spec.build(Check::Right).bytes);
    for depth in 0..8 {
        let expected = if depth <= 4 { &right } else { &input };
        assert_eq!(&one(&plain(&input)), expected, "{depth}");
        input = Tunnel::Ip.wrap(&outer, &input, Check::Right).0.bytes;
        right = Tunnel::Ip.wrap(&outer, &right, Check::Right).0.bytes;
    }
}
