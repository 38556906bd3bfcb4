//! Recognises the packets of our own tunnels, so that they are never copied again.
//!
//! On the node that makes them, they carry the mark of a copy. On another node that mark is gone. All agents of a cluster
//! have the same targets, so a packet with the UDP port and the VNI of one of them is a tunnel's. The addresses do not
//! matter: a service may have changed them. Pure; the programs call it on the beginning of a packet.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::packet::{HEADER_BYTES, Header};

/// Most tunnels of a node: as many as it has targets.
pub const MAX_TUNNELS: usize = crate::abi::MAX_TARGETS as usize;

/// Value of the array map `TUNNELS`, of one element: the tunnels of this node's targets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Tunnels {
    /// How many of `known` are in use, from the first on.
    pub count: u32,
    /// The tunnels.
    pub known: [TunnelId; MAX_TUNNELS],
}

/// What the packets of a tunnel have in common.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct TunnelId {
    /// The UDP port to which they go.
    pub port: u32,
    /// The VNI.
    pub vni: u32,
}

const VLAN: [u16; 2] = [0x8100, 0x88a8];
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const UDP: u8 = 17;
/// Flag of a VXLAN header: it has a VNI.
const HAS_VNI: u8 = 0x08;

/// Whether a packet is one of these tunnels. The parts of a fragmented packet behind the first are not recognised.
#[inline(always)]
pub fn is_of(header: &Header, tunnels: &Tunnels) -> bool {
    let tag = if is_in(VLAN, u16_at(header, 12)) { 4 } else { 0 };
    let ip = 14 + tag;
    let udp = match u16_at(header, 12 + tag) {
        IPV4 if byte(header, ip + 9) == UDP && u16_at(header, ip + 6) & 0x1fff == 0 => {
            ip + 4 * (byte(header, ip) & 0xf) as usize
        }
        // The kernel puts no extension headers into a tunnel's packet.
        IPV6 if byte(header, ip + 6) == UDP => ip + 40,
        _ => return false,
    };
    if byte(header, udp + 8) & HAS_VNI == 0 {
        return false;
    }
    let port = u16_at(header, udp + 2) as u32;
    let vni = u32::from_be_bytes([0, byte(header, udp + 12), byte(header, udp + 13), byte(header, udp + 14)]);
    for (at, known) in tunnels.known.iter().enumerate() {
        if at as u32 >= tunnels.count {
            break;
        }
        if known.port == port && known.vni == vni {
            return true;
        }
    }
    false
}

#[inline(always)]
fn is_in(of: [u16; 2], value: u16) -> bool {
    of[0] == value || of[1] == value
}

#[inline(always)]
fn u16_at(header: &Header, at: usize) -> u16 {
    u16::from_be_bytes([byte(header, at), byte(header, at + 1)])
}

/// The mask shows the verifier that the index is in bounds. No offset here is that large.
#[inline(always)]
fn byte(header: &Header, at: usize) -> u8 {
    header[at & (HEADER_BYTES - 1)]
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;
    use crate::packet::header;

    fn tunnels() -> Tunnels {
        let mut tunnels = Tunnels { count: 2, ..Tunnels::default() };
        tunnels.known[0] = TunnelId { port: 4789, vni: 77 };
        tunnels.known[1] = TunnelId { port: 8472, vni: 0x01_02_03 };
        // Beyond the count.
        tunnels.known[2] = TunnelId { port: 4790, vni: 77 };
        tunnels
    }

    /// The frame of a VXLAN packet, with `options` words of IPv4 options.
    fn frame(is_v6: bool, tagged: bool, options: u8, port: u16, vni: u32) -> Vec<u8> {
        let mut frame = [[2; 6], [4; 6]].concat();
        if tagged {
            frame.extend([0x81, 0, 0, 7]);
        }
        if is_v6 {
            frame.extend(IPV6.to_be_bytes());
            frame.extend([0x60, 0, 0, 0, 0, 0, UDP, 64]);
            frame.extend([9; 32]);
        } else {
            frame.extend(IPV4.to_be_bytes());
            frame.extend([0x45 + options, 0, 0, 0, 0, 0, 0x40, 0, 64, UDP, 0, 0]);
            frame.extend([9; 8]);
            frame.extend(std::iter::repeat_n(1, 4 * options as usize));
        }
        frame.extend([0xc0, 0]);
        frame.extend(port.to_be_bytes());
        frame.extend([0; 4]);
        frame.extend([HAS_VNI, 0, 0, 0]);
        frame.extend((vni << 8).to_be_bytes());
        frame.extend([0; 14]);
        frame
    }

    fn is_ours(frame: &[u8]) -> bool {
        is_of(&header(frame, frame.len() as u32), &tunnels())
    }

    proptest! {
        #[test]
        fn a_packet_of_a_tunnel_is_known_by_port_and_number(
            is_v6: bool, tagged: bool, options in 0..11_u8, port in prop_oneof![Just(4789), Just(8472), Just(4790)],
            vni in prop_oneof![Just(77), Just(0x01_02_03), 0..0xff_ffff_u32],
        ) {
            let expected = (port, vni) == (4789, 77) || (port, vni) == (8472, 0x01_02_03);
            prop_assert_eq!(is_ours(&frame(is_v6, tagged, options, port, vni)), expected);
        }

        #[test]
        fn any_bytes_have_an_answer(bytes in prop::collection::vec(any::<u8>(), 0..124), tunnels: [u32; 33]) {
            let tunnels: Tunnels = zerocopy::transmute!(tunnels);
            is_of(&header(&bytes, bytes.len() as u32), &tunnels);
        }
    }

    #[test]
    fn what_only_resembles_a_tunnel_is_copied() {
        let ours = frame(false, false, 0, 4789, 77);
        assert!(is_ours(&ours));
        for (offset, value) in [(12, 9), (23, 6), (21, 1), (36, 0), (42, 0)] {
            let mut other = ours.clone();
            other[offset] = value;
            assert!(!is_ours(&other), "byte {offset}");
        }
        assert!(!is_of(&header(&ours, 64), &Tunnels::default()));
        assert!(!is_ours(&ours[..40]), "a truncated packet has no VNI");
    }
}
