//! Finds the headers of a frame: Ethernet with VLAN tags, IPv4 with options, IPv6 with extension headers.
//!
//! The bytes can be hostile: every offset is checked, and every walk has a bound. Read-only, and the transport header
//! is the last one. Used by `checksum`, `cut` and `tunnel`.

use super::{
    bytes::{be16, be32},
    checksum::Sum,
};

/// The length of the two MAC addresses, in bytes.
pub(super) const MAC_ADDRESSES: usize = 12;
/// The length of an IPv6 header without extension headers, in bytes.
pub(super) const IPV6_HEADER: usize = 40;
/// The length of the hop-by-hop header that BIG TCP adds: `struct hop_jumbo_hdr` of include/net/ipv6.h.
pub(super) const JUMBO_HEADER: usize = 8;

/// The protocol numbers of TCP and UDP.
pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;

/// Maximum number of VLAN tags in the bytes of a frame: `VLAN_MAX_DEPTH` of include/linux/if_vlan.h.
const MAX_TAGS: usize = 8;
/// Maximum number of extension headers of an IPv6 packet. RFC 8200 4.1 lists 7.
const MAX_EXTENSIONS: usize = 8;

const HOP_BY_HOP: u8 = 0;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const DESTINATION: u8 = 60;

/// The versions of IP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    V4,
    V6,
}

/// An IP header that begins at an offset.
#[derive(Debug, Clone, Copy)]
pub(super) struct Network {
    pub(super) version: Version,
    pub(super) start: usize,
}

impl Network {
    /// The IP header at `start`, for an EtherType. `None`: it is not IP.
    pub(super) fn of(ether_type: u16, start: usize) -> Option<Self> {
        let version = match ether_type {
            0x0800 => Version::V4,
            0x86dd => Version::V6,
            _ => return None,
        };
        Some(Self { version, start })
    }
}

/// The IP header of the Ethernet frame that begins at `start`, after its VLAN tags.
pub(super) fn ethernet(bytes: &[u8], start: usize) -> Option<Network> {
    let mut at = start + MAC_ADDRESSES;
    for _ in 0..=MAX_TAGS {
        match be16(bytes, at)? {
            0x8100 | 0x88a8 | 0x9100 => at += 4,
            ether_type => return Network::of(ether_type, at + 2),
        }
    }
    None
}

/// A complete IP datagram. Offsets are in bytes from the start of the frame.
#[derive(Debug, Clone, Copy)]
pub(super) struct Datagram {
    pub(super) network: Network,
    /// Offset of the transport header. The captured bytes can end before it.
    pub(super) transport: usize,
    /// Offset of the end of the datagram. The captured bytes can end before it, and padding can follow it.
    pub(super) end: usize,
    /// The protocol of the header at `transport`.
    pub(super) protocol: u8,
    /// Checksum of the pseudo header without the length.
    pub(super) pseudo: Sum,
    /// Whether the first extension header is that of BIG TCP, and the IP header has no length.
    pub(super) has_jumbo: bool,
    /// Whether there is an IPv6 fragment header, although the datagram is complete.
    pub(super) has_fragment_header: bool,
}

impl Datagram {
    /// Parses the datagram at `network`, which ends at `end` at the latest. `None`: its headers were not captured or
    /// are invalid, or it is a fragment, or its final destination is unknown.
    ///
    /// A super-frame that is too long for the length field has the length 0 there (BIG TCP). It ends at `end`.
    pub(super) fn parse(bytes: &[u8], network: Network, end: usize, is_super: bool) -> Option<Self> {
        match network.version {
            Version::V4 => ipv4(bytes, network, end, is_super),
            Version::V6 => ipv6(bytes, network, end, is_super),
        }
    }
}

/// RFC 791.
fn ipv4(bytes: &[u8], network: Network, end: usize, is_super: bool) -> Option<Datagram> {
    let start = network.start;
    let first = *bytes.get(start)?;
    let transport = start + usize::from(first & 0xf) * 4;
    let header = bytes.get(start..transport)?;
    let (_, options) = header.split_at_checked(20)?;
    let is_fragment = be16(header, 6)? & 0x3fff != 0;
    if first >> 4 != 4 || is_fragment || has_source_route(options) {
        return None;
    }
    let own_end = match be16(header, 2)? {
        0 if is_super => end,
        length => start + usize::from(length),
    };
    let protocol = *header.get(9)?;
    (transport <= own_end && own_end <= end).then_some(Datagram {
        network,
        transport,
        end: own_end,
        protocol,
        pseudo: Sum::default().number(be32(header, 12)?).number(be32(header, 16)?).number(protocol.into()),
        has_jumbo: false,
        has_fragment_header: false,
    })
}

/// Whether these IPv4 options include a source route. The destination in the header is then possibly not the final one.
fn has_source_route(mut options: &[u8]) -> bool {
    loop {
        options = match options {
            [131 | 137, ..] => return true,
            [1, rest @ ..] => rest,
            // End of options, or no options.
            [0, ..] | [] | [_] | [_, 0 | 1, ..] => return false,
            [_, length, ..] => options.get(usize::from(*length)..).unwrap_or_default(),
        };
    }
}

/// RFC 8200.
fn ipv6(bytes: &[u8], network: Network, end: usize, is_super: bool) -> Option<Datagram> {
    let start = network.start;
    let header: &[u8; IPV6_HEADER] = bytes.get(start..)?.first_chunk()?;
    let mut at = start + IPV6_HEADER;
    let mut protocol = *header.get(6)?;
    let length = be16(header, 4)?;
    // RFC 2675.
    let has_jumbo = length == 0
        && protocol == HOP_BY_HOP
        && matches!(bytes.get(at..at + JUMBO_HEADER), Some([_, 0, 0xc2, 4, ..]));
    let own_end = if has_jumbo || (length == 0 && is_super) { end } else { at + usize::from(length) };
    if header.first()? >> 4 != 6 || own_end > end {
        return None;
    }
    let (mut destination, mut has_fragment_header) = (start + 24, false);
    for _ in 0..MAX_EXTENSIONS {
        if !matches!(protocol, HOP_BY_HOP | ROUTING | FRAGMENT | DESTINATION) {
            let addresses =
                Sum::default().bytes(header.get(8..24)?).bytes(bytes.get(destination..)?.get(..16)?);
            let pseudo = addresses.number(protocol.into());
            let transport = at;
            return (transport <= own_end).then_some(Datagram {
                network,
                transport,
                end: own_end,
                protocol,
                pseudo,
                has_jumbo,
                has_fragment_header,
            });
        }
        let [next, length, kind, left, ..] = *bytes.get(at..)?.first_chunk::<8>()?;
        let mut behind = at + (usize::from(length) + 1) * 8;
        if protocol == FRAGMENT {
            behind = at + 8;
            has_fragment_header = true;
            // The fragment offset, and the flag for more fragments.
            if be16(bytes, at + 2)? & 0xfff9 != 0 {
                return None;
            }
        } else if protocol == ROUTING && left > 0 {
            destination = final_destination(at, behind, kind)?;
        }
        (at, protocol) = (behind, next);
    }
    None
}

/// The offset of the final destination in a routing header with hops left. `None`: the kind is unknown, or the header
/// has no address.
fn final_destination(at: usize, behind: usize, kind: u8) -> Option<usize> {
    let first = at + 8;
    let last = behind.checked_sub(16).filter(|last| *last >= first)?;
    match kind {
        // RFC 2460 and RFC 6275: the last address.
        0 | 2 => Some(last),
        // RFC 8754: the segments are in reverse order.
        4 => Some(first),
        _ => None,
    }
}
