//! The Internet checksum (RFC 1071), and the search for the one that Linux left unfinished.
//!
//! Computes values and changes no frame. Used by [`frame`](super) and `cut`.

use super::{
    bytes::be16,
    headers::{self, Datagram, TCP, UDP},
    tunnel,
};

/// Maximum number of nested tunnels that are searched for an unfinished checksum.
const MAX_TUNNELS: usize = 4;

/// A sum of 16-bit words in network byte order. Longer words can be added too, because folding adds their halves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Sum(u64);

impl Sum {
    /// Adds a number.
    pub(super) fn number(self, number: u32) -> Self {
        Self(self.0 + u64::from(number))
    }

    /// Adds bytes, which must start at an even offset of the summed data. An odd last byte is padded with a 0.
    pub(super) fn bytes(self, bytes: &[u8]) -> Self {
        let (words, rest) = bytes.as_chunks::<4>();
        let mut last = [0; 4];
        last.iter_mut().zip(rest).for_each(|(place, byte)| *place = *byte);
        let words = words.iter().map(|word| u64::from(u32::from_be_bytes(*word))).sum::<u64>();
        Self(self.0 + words).number(u32::from_be_bytes(last))
    }

    /// The sum as a 16-bit number with the carries added. It is 0 only if all input is 0.
    pub(super) fn folded(self) -> u16 {
        let mut sum = self.0;
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum as u16
    }

    /// The checksum as it is in the header of this protocol. UDP sends 0xffff in place of 0, because 0 means no
    /// checksum (RFC 768).
    pub(super) fn checksum(self, protocol: u8) -> u16 {
        match (!self.folded(), protocol) {
            (0, UDP) => 0xffff,
            (checksum, _) => checksum,
        }
    }
}

/// A TCP segment or a UDP datagram. Offsets are in bytes from the start of the frame.
struct Transport {
    protocol: u8,
    /// Offset of the first byte, and of the one after the last.
    start: usize,
    end: usize,
    /// Offset of the checksum field.
    field: usize,
    pseudo: Sum,
}

impl Transport {
    /// The transport header of a datagram, if it is TCP or UDP with possible lengths.
    fn of(bytes: &[u8], datagram: &Datagram) -> Option<Self> {
        let start = datagram.transport;
        let room = datagram.end.checked_sub(start)?;
        let (field, length) = match datagram.protocol {
            TCP if room >= 20 => (start + 16, room),
            // The datagram can be longer than the length in the UDP header.
            UDP => (start + 6, usize::from(be16(bytes, start + 4)?)),
            _ => return None,
        };
        if datagram.protocol == UDP && !(8..=room).contains(&length) {
            return None;
        }
        let pseudo = datagram.pseudo.number(u32::try_from(length).ok()?);
        Some(Self { protocol: datagram.protocol, start, end: start + length, field, pseudo })
    }

    /// The correct value of the field, if all bytes were captured.
    fn checksum(&self, bytes: &[u8]) -> Option<u16> {
        let before = bytes.get(self.start..self.field)?;
        let behind = bytes.get(self.field + 2..self.end)?;
        Some(self.pseudo.bytes(before).bytes(behind).checksum(self.protocol))
    }
}

/// The checksum that Linux left unfinished, if there is one and it can be finished: the offset of its field, and its
/// correct value. `len` is the length of the frame before the capture length cut it.
pub(super) fn unfinished(bytes: &[u8], len: usize, is_super: bool) -> Option<(usize, u16)> {
    let (mut network, mut end) = (headers::ethernet(bytes, 0)?, len);
    for _ in 0..=MAX_TUNNELS {
        let datagram = Datagram::parse(bytes, network, end, is_super)?;
        let inside = tunnel::inside(bytes, &datagram);
        if let Some(transport) = Transport::of(bytes, &datagram) {
            let field = be16(bytes, transport.field)?;
            if field == transport.pseudo.folded() {
                return Some((transport.field, transport.checksum(bytes)?));
            }
            // A correct outer checksum covers an inner one as it is in the frame. Linux computes the outer one for a
            // finished inner one (`lco_csum`), so it is incorrect as long as the inner one is unfinished.
            if field != 0 && inside.is_some() && field == transport.checksum(bytes)? {
                return None;
            }
        }
        (network, end) = (inside?, datagram.end);
    }
    None
}
