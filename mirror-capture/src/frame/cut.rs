//! Cuts TCP and UDP super-frames into segments.
//!
//! [`plan`] decides whether a frame can be cut, [`Headers::begin`] writes the headers that all segments share, and
//! [`Cut::write`] builds one segment after the other in the same buffer. [`frame`](super) calls them, and its
//! documentation describes the segments.

use super::{
    Frame, begin_with_tag,
    bytes::{be16, be32, put},
    checksum::Sum,
    headers::{self, Datagram, IPV6_HEADER, JUMBO_HEADER, TCP, UDP, Version},
    tunnel,
};

/// Flags of TCP.
const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const CWR: u8 = 0x80;

/// Bytes that a file needs per frame in addition to its data: an enhanced packet block of pcapng with a direction,
/// rounded up.
const BLOCK: usize = 48;
/// Maximum size of a super-frame's headers and blocks, as a multiple of its captured bytes. TCP over IPv6 with
/// timestamps stays below it down to segments of 33 bytes, and Linux's shortest have 36 (`tcp_min_snd_mss` minus the
/// timestamps).
const GROWTH: usize = 4;
/// Additional size that is always allowed, up to the super-frame's own length: a short capture length leaves fewer
/// bytes of a super-frame than the headers of its segments.
const FREE: usize = 8 << 10;

/// The result for a frame with a `gso_size`.
pub(super) enum Super {
    /// The payload fits into one segment: treat it as an ordinary frame.
    OneSegment,
    /// It can be cut.
    Cut(Headers),
    /// The frame would need this many segments, which is more than [`may_become`] allows.
    TooMany(usize),
}

/// The headers of a super-frame.
pub(super) struct Headers {
    datagram: Datagram,
    /// Offset of the payload.
    payload: usize,
    gso_size: u16,
}

/// Examines a frame with a `gso_size`. `None`: it cannot be cut, and is returned as it is.
pub(super) fn plan(bytes: &[u8], len: usize, gso_size: u16) -> Option<Super> {
    let datagram = Datagram::parse(bytes, headers::ethernet(bytes, 0)?, len, true)?;
    let Datagram { transport, end, .. } = datagram;
    let payload = match datagram.protocol {
        TCP => transport + tcp_header(bytes, transport)?,
        UDP => transport + 8,
        _ => return None,
    };
    let payload_len = end.checked_sub(payload)?;
    if payload_len <= usize::from(gso_size) {
        return Some(Super::OneSegment);
    }
    let ip_len = payload - datagram.network.start + usize::from(gso_size);
    let can_be_cut = ip_len <= usize::from(u16::MAX)
        && payload <= bytes.len()
        && end == len
        // `ipv6_gso_segment` does not support fragment headers either.
        && !datagram.has_fragment_header
        && !(datagram.protocol == UDP && tunnel::is_in_udp(bytes, &datagram));
    let segments = payload_len.div_ceil(gso_size.into());
    match may_become(segments, payload, bytes.len(), len) {
        _ if !can_be_cut => None,
        true => Some(Super::Cut(Headers { datagram, payload, gso_size })),
        false => Some(Super::TooMany(segments)),
    }
}

/// Whether a frame of `len` bytes, with `captured` of them in the capture, can be cut into this many segments. Each
/// repeats `headers` bytes. The sender chooses all of these numbers, and the reader of the capture pays for the
/// segments.
fn may_become(segments: usize, headers: usize, captured: usize, len: usize) -> bool {
    segments.saturating_mul(headers + BLOCK) <= captured.saturating_mul(GROWTH) + len.min(FREE)
}

/// The length of a TCP header with its options, in bytes.
fn tcp_header(bytes: &[u8], start: usize) -> Option<usize> {
    let length = usize::from(bytes.get(start + 12)? >> 4) * 4;
    (length >= 20).then_some(length)
}

impl Headers {
    /// Replaces the buffer with the headers that all segments share.
    pub(super) fn begin(&self, frame: &Frame<'_>, buffer: &mut Vec<u8>) -> Cut {
        let Datagram { network, transport, protocol, pseudo, has_jumbo, end, .. } = self.datagram;
        let shift = begin_with_tag(frame, self.payload, buffer);
        let network_start = network.start + shift;
        let mut transport_start = transport + shift;
        if has_jumbo {
            let jumbo = network_start + IPV6_HEADER;
            if let Some(&[next, ..]) = buffer.get(jumbo..jumbo + JUMBO_HEADER) {
                put(buffer, network_start + 6, &[next]);
                buffer.drain(jumbo..jumbo + JUMBO_HEADER);
                transport_start -= JUMBO_HEADER;
            }
        }
        let check = transport_start + if protocol == TCP { 16 } else { 6 };
        Cut {
            version: network.version,
            protocol,
            network: network_start,
            transport: transport_start,
            headers: buffer.len(),
            check,
            payload: self.payload,
            payload_len: end - self.payload,
            gso_size: self.gso_size.into(),
            pseudo,
            id: be16(buffer, network_start + 4).unwrap_or_default(),
            sequence: be32(buffer, transport_start + 4).unwrap_or_default(),
            flags: buffer.get(transport_start + 13).copied().unwrap_or_default(),
            has_checksum: protocol == TCP || be16(buffer, check) != Some(0),
        }
    }
}

/// A super-frame that is being cut.
#[derive(Debug)]
pub(super) struct Cut {
    version: Version,
    protocol: u8,
    /// Offsets in a segment: the IP header, the transport header, the payload, the transport checksum.
    network: usize,
    transport: usize,
    headers: usize,
    check: usize,
    /// Offset of the payload in the super-frame, and its length in bytes.
    payload: usize,
    payload_len: usize,
    gso_size: usize,
    /// Checksum of the pseudo header without the length.
    pseudo: Sum,
    /// From the headers of the super-frame: the IPv4 identification, the TCP sequence number and the TCP flags.
    id: u16,
    sequence: u32,
    flags: u8,
    has_checksum: bool,
}

impl Cut {
    /// Number of segments.
    pub(super) fn segments(&self) -> usize {
        self.payload_len.div_ceil(self.gso_size)
    }

    /// Builds the segment with this index in the buffer that contains the headers. `bytes` is the super-frame. Returns
    /// the length of the segment on the wire, in bytes.
    pub(super) fn write(&self, index: usize, bytes: &[u8], buffer: &mut Vec<u8>) -> u32 {
        let offset = index * self.gso_size;
        let length = self.gso_size.min(self.payload_len.saturating_sub(offset));
        let payload = bytes.get(self.payload + offset..).unwrap_or_default();
        let payload = payload.get(..length).unwrap_or(payload);
        buffer.truncate(self.headers);
        buffer.extend_from_slice(payload);

        let end = self.headers + length;
        self.write_ip(index as u16, (end - self.network) as u16, buffer);
        let transport_len = (end - self.transport) as u32;
        if self.protocol == TCP {
            self.write_tcp(index, offset as u32, buffer);
        } else {
            put(buffer, self.transport + 4, &(transport_len as u16).to_be_bytes());
        }
        if self.has_checksum {
            let pseudo = self.pseudo.number(transport_len);
            put(buffer, self.check, &[0, 0]);
            let sum = pseudo.bytes(buffer.get(self.transport..).unwrap_or_default());
            let is_whole = payload.len() == length;
            let checksum = if is_whole { sum.checksum(self.protocol) } else { pseudo.folded() };
            put(buffer, self.check, &checksum.to_be_bytes());
        }
        end as u32
    }

    /// As `inet_gso_segment` and `ipv6_gso_segment` do.
    fn write_ip(&self, index: u16, length: u16, buffer: &mut [u8]) {
        let start = self.network;
        match self.version {
            Version::V4 => {
                put(buffer, start + 2, &length.to_be_bytes());
                put(buffer, start + 4, &self.id.wrapping_add(index).to_be_bytes());
                put(buffer, start + 10, &[0, 0]);
                let sum = Sum::default().bytes(buffer.get(start..self.transport).unwrap_or_default());
                put(buffer, start + 10, &(!sum.folded()).to_be_bytes());
            }
            Version::V6 => put(buffer, start + 4, &(length - IPV6_HEADER as u16).to_be_bytes()),
        }
    }

    /// As `tcp_gso_segment` does.
    fn write_tcp(&self, index: usize, offset: u32, buffer: &mut [u8]) {
        let mut flags = self.flags;
        if index > 0 {
            flags &= !CWR;
        }
        if index + 1 < self.segments() {
            flags &= !(FIN | PSH);
        }
        put(buffer, self.transport + 4, &self.sequence.wrapping_add(offset).to_be_bytes());
        put(buffer, self.transport + 13, &[flags]);
    }
}
