//! Recognises the packets of podmirror's own tunnels, so that they are never copied again.
//!
//! On the sending node, they carry the mark of a copy. On another node that mark is missing. All agents of a cluster
//! have the same targets, so a packet with the protocol and the key of one of them belongs to a tunnel. The addresses
//! do not matter: a service may have changed them. Pure; the programs call it on the beginning of a packet.

pub mod arguments;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::packet::{Header, be16, be32, byte};

/// Maximum number of tunnels of a node: one for each target.
pub const MAX_TUNNELS: usize = crate::abi::MAX_TARGETS as usize;

/// Value of the array map `TUNNELS`, of one element: the tunnels of this node's targets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Tunnels {
    /// Number of used entries at the beginning of `known`.
    pub count: u32,
    /// The tunnels.
    pub known: [TunnelId; MAX_TUNNELS],
}

/// The common properties of a tunnel's packets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct TunnelId {
    /// The UDP destination port (VXLAN and GENEVE), or one of [`GRE`] and [`ERSPAN`].
    pub way: u32,
    /// The first key: VNI, GRE key, or ERSPAN session.
    pub first: u32,
    /// The last key.
    pub last: u32,
}

/// [`TunnelId::way`] of Ethernet in GRE (RFC 2890, the protocol type of RFC 1701 for bridged Ethernet).
pub const GRE: u32 = 0x1_6558;
/// [`TunnelId::way`] of ERSPAN type II.
pub const ERSPAN: u32 = 0x1_88be;

const VLAN: [u16; 2] = [0x8100, 0x88a8];
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const UDP: u8 = 17;
const PROTOCOL_GRE: u8 = 47;
/// Flags of a GRE header: checksum present, key present.
const HAS_CHECKSUM: u16 = 0x8000;
const HAS_KEY: u16 = 0x2000;
/// The bits of the session in the second half of the first word of an ERSPAN header.
const ERSPAN_SESSION: u16 = 0x3ff;

/// Whether a packet belongs to one of these tunnels. Later fragments of a fragmented packet are not recognised.
#[inline(always)]
pub fn is_of(header: &Header, tunnels: &Tunnels) -> bool {
    let Some((way, key)) = way_and_key(header) else { return false };
    for (at, known) in tunnels.known.iter().enumerate() {
        if at as u32 >= tunnels.count {
            break;
        }
        if known.way == way && known.first <= key && key <= known.last {
            return true;
        }
    }
    false
}

/// Returns the way and the key, if the packet belongs to a tunnel. VXLAN and GENEVE have the VNI at the same offset, so
/// any UDP packet that is long enough has some key.
#[inline(always)]
fn way_and_key(header: &Header) -> Option<(u32, u32)> {
    let mut ip = 14;
    // At most two VLAN tags.
    for _ in 0..2 {
        if is_in(VLAN, be16(header, ip - 2)) {
            ip += 4;
        }
    }
    let (protocol, inner) = match be16(header, ip - 2) {
        // Not a later fragment of a fragmented packet.
        IPV4 if be16(header, ip + 6) & 0x1fff == 0 => {
            (byte(header, ip + 9), ip + 4 * (byte(header, ip) & 0xf) as usize)
        }
        // The kernel adds no extension headers to a tunnel's packet.
        IPV6 => (byte(header, ip + 6), ip + 40),
        _ => return None,
    };
    match protocol {
        UDP => Some((be16(header, inner + 2) as u32, be32(header, inner + 12) >> 8)),
        PROTOCOL_GRE => {
            let (flags, way) = (be16(header, inner), 0x1_0000 | be16(header, inner + 2) as u32);
            let checksum = if flags & HAS_CHECKSUM == 0 { 0 } else { 4 };
            match way {
                GRE if flags & HAS_KEY != 0 => Some((way, be32(header, inner + 4 + checksum))),
                // A sequence number precedes the ERSPAN header.
                ERSPAN => Some((way, (be16(header, inner + 10) & ERSPAN_SESSION) as u32)),
                _ => None,
            }
        }
        _ => None,
    }
}

#[inline(always)]
fn is_in(of: [u16; 2], value: u16) -> bool {
    of[0] == value || of[1] == value
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;
    use crate::packet::header;

    const VXLAN: u32 = 4789;

    fn tunnels() -> Tunnels {
        let known =
            [(VXLAN, 77, 77), (6081, 0x01_02_03, 0x01_02_ff), (GRE, 1 << 31, u32::MAX), (ERSPAN, 5, 9)];
        let mut tunnels = Tunnels { count: 4, ..Tunnels::default() };
        for (at, (way, first, last)) in known.into_iter().enumerate() {
            tunnels.known[at] = TunnelId { way, first, last };
        }
        // Beyond `count`.
        tunnels.known[4] = TunnelId { way: 4790, first: 77, last: 77 };
        tunnels
    }

    /// The frame of a tunnel's packet, with `options` words of IPv4 options.
    fn frame(is_v6: bool, tags: usize, options: u8, way: u32, key: u32) -> Vec<u8> {
        let mut frame = [[2; 6], [4; 6]].concat();
        let protocol = if way < 0x1_0000 { UDP } else { PROTOCOL_GRE };
        frame.extend([0x81, 0, 0, 7].repeat(tags));
        if is_v6 {
            frame.extend(IPV6.to_be_bytes());
            frame.extend([0x60, 0, 0, 0, 0, 0, protocol, 64]);
            frame.extend([9; 32]);
        } else {
            frame.extend(IPV4.to_be_bytes());
            frame.extend([0x45 + options, 0, 0, 0, 0, 0, 0x40, 0, 64, protocol, 0, 0]);
            frame.extend([9; 8]);
            frame.extend(std::iter::repeat_n(1, 4 * options as usize));
        }
        let way_bytes = (way as u16).to_be_bytes();
        match way {
            GRE => {
                frame.extend([0xa0, 0]);
                frame.extend(way_bytes);
                frame.extend([7; 4]);
                frame.extend(key.to_be_bytes());
            }
            ERSPAN => {
                frame.extend([0x10, 0]);
                frame.extend(way_bytes);
                frame.extend([0, 0, 0, 3, 0x10, 0]);
                // The bits above the session have another meaning.
                frame.extend((key as u16 | 0xfc00).to_be_bytes());
            }
            _ => {
                frame.extend([0xc0, 0]);
                frame.extend(way_bytes);
                frame.extend([0, 0, 0, 0, 8, 0, 0, 0]);
                frame.extend((key << 8).to_be_bytes());
            }
        }
        frame.extend([0; 14]);
        frame
    }

    fn is_ours(frame: &[u8]) -> bool {
        is_of(&header(frame, frame.len() as u32), &tunnels())
    }

    proptest! {
        #[test]
        fn a_packet_of_a_tunnel_is_known_by_way_and_key(
            is_v6: bool, tags in 0..3_usize, options in 0..11_u8,
            way in prop::sample::select(std::vec![VXLAN, 6081, 4790, GRE, ERSPAN]),
            key in prop_oneof![Just(77), Just(0x01_02_03), Just(0x01_02_ff), Just(5), Just(9), any::<u32>()],
        ) {
            let key = match way {
                GRE => key,
                ERSPAN => key & 0x3ff,
                _ => key & 0xff_ffff,
            };
            let expected = match way {
                VXLAN => key == 77,
                6081 => (0x01_02_03..=0x01_02_ff).contains(&key),
                GRE => key >= 1 << 31,
                ERSPAN => (5..=9).contains(&key),
                _ => false,
            };
            prop_assert_eq!(is_ours(&frame(is_v6, tags, options, way, key)), expected);
        }

        #[test]
        fn any_bytes_have_an_answer(bytes in prop::collection::vec(any::<u8>(), 0..124), tunnels: [u32; 49]) {
            let tunnels: Tunnels = zerocopy::transmute!(tunnels);
            is_of(&header(&bytes, bytes.len() as u32), &tunnels);
        }
    }

    #[test]
    fn what_only_resembles_a_tunnel_is_copied() {
        let ours = frame(false, 0, 0, VXLAN, 77);
        assert!(is_ours(&ours));
        for (offset, value) in [(12, 9), (23, 6), (21, 1), (48, 0)] {
            let mut other = ours.clone();
            other[offset] = value;
            assert!(!is_ours(&other), "byte {offset}");
        }
        assert!(!is_of(&header(&ours, 64), &Tunnels::default()));
        assert!(!is_ours(&ours[..46]), "a truncated packet has no VNI");
        let mut without_key = frame(false, 0, 0, GRE, u32::MAX);
        assert!(is_ours(&without_key));
        without_key[34] = 0x80;
        assert!(!is_ours(&without_key));
    }
}
