//! Finds the IP header inside a tunnel packet.
//!
//! Supports the tunnels whose packets identify the inner protocol. The inner packet is not checked. Used by `checksum`
//! and `cut`.

use super::{
    bytes::be16,
    headers::{self, Datagram, Network, UDP, Version},
};

const IPIP: u8 = 4;
const IPV6: u8 = 41;
const GRE: u8 = 47;
/// The EtherType of an Ethernet frame inside GRE and GENEVE.
const ETHERNET: u16 = 0x6558;
/// The length of a UDP header, in bytes.
const UDP_HEADER: usize = 8;

/// The IP header inside a datagram. `None`: it is not a supported tunnel packet, or does not contain IP.
pub(super) fn inside(bytes: &[u8], datagram: &Datagram) -> Option<Network> {
    let start = datagram.transport;
    match datagram.protocol {
        IPIP => Some(Network { version: Version::V4, start }),
        IPV6 => Some(Network { version: Version::V6, start }),
        GRE => gre(bytes, start),
        UDP => match be16(bytes, start + 2)? {
            // The port assigned by IANA, and Linux's earlier default.
            4789 | 8472 => vxlan(bytes, start + UDP_HEADER),
            6081 => geneve(bytes, start + UDP_HEADER),
            _ => None,
        },
        _ => None,
    }
}

/// Whether a UDP super-frame is a tunnel packet, so that its segments are not UDP's own. On an unknown port, the inner
/// packet must fill it exactly.
pub(super) fn is_in_udp(bytes: &[u8], datagram: &Datagram) -> bool {
    let start = datagram.transport + UDP_HEADER;
    let fills = |network| {
        Datagram::parse(bytes, network, datagram.end, false).is_some_and(|inner| inner.end == datagram.end)
    };
    inside(bytes, datagram).is_some()
        || vxlan(bytes, start).is_some_and(fills)
        || geneve(bytes, start).is_some_and(fills)
}

/// RFC 2784 and RFC 2890. Also `None` if there is a checksum, or for another version.
fn gre(bytes: &[u8], start: usize) -> Option<Network> {
    let flags = be16(bytes, start)?;
    // Key and sequence number.
    let length = match flags & 0x3000 {
        0 => 4,
        0x3000 => 12,
        _ => 8,
    };
    if flags & !0x3000 != 0 {
        return None;
    }
    of_kind(bytes, be16(bytes, start + 2)?, start + length)
}

/// RFC 7348.
fn vxlan(bytes: &[u8], start: usize) -> Option<Network> {
    let has_id = bytes.get(start)? & 0x08 != 0;
    if has_id { headers::ethernet(bytes, start + 8) } else { None }
}

/// RFC 8926.
fn geneve(bytes: &[u8], start: usize) -> Option<Network> {
    let first = *bytes.get(start)?;
    let length = 8 + usize::from(first & 0x3f) * 4;
    if first >> 6 == 0 { of_kind(bytes, be16(bytes, start + 2)?, start + length) } else { None }
}

/// The inner IP header, for the EtherType in a tunnel header.
fn of_kind(bytes: &[u8], ether_type: u16, start: usize) -> Option<Network> {
    match ether_type {
        ETHERNET => headers::ethernet(bytes, start),
        ether_type => Network::of(ether_type, start),
    }
}
