//! Computes what a NIC makes of a frame before it is on the wire: segments and checksums.
//!
//! It is the oracle for copies without offloads: TCP super-frames are cut at an MTU of 1500 bytes, checksums of TCP and
//! UDP are completed, and all other bytes stay unchanged. Frames with a VLAN tag, IP options, extension headers or
//! tunnels are not parsed, because the stories do not send them.

use crate::Frames;

/// Largest IP packet on the wire, in bytes.
const MTU: usize = 1500;
const ETHERNET: usize = 14;
const TCP: u8 = 6;
const UDP: u8 = 17;

impl Frames {
    /// The frames as they would be on a wire.
    pub fn on_a_wire(&self) -> Self {
        self.iter().fold(Self::default(), |wire, (frame, times)| {
            on_a_wire(frame).iter().fold(wire, |wire, frame| wire.with(frame, times))
        })
    }
}

/// A TCP or UDP packet in a frame.
#[derive(Clone, Copy)]
struct Packet {
    is_v6: bool,
    protocol: u8,
    /// Offset of the TCP or UDP header.
    transport: usize,
    /// Offset of the payload.
    payload: usize,
}

impl Packet {
    fn of(frame: &[u8]) -> Option<Self> {
        let (is_v6, protocol) = match frame.get(12..15)? {
            [0x08, 0x00, 0x45] if u16_at(frame, 20) & 0x3fff == 0 => (false, frame[23]),
            [0x86, 0xdd, _] => (true, frame[20]),
            _ => return None,
        };
        let transport = ETHERNET + if is_v6 { 40 } else { 20 };
        let header = match protocol {
            TCP => usize::from(frame[transport + 12] >> 4) * 4,
            UDP => 8,
            _ => return None,
        };
        Some(Self { is_v6, protocol, transport, payload: transport + header })
    }

    /// Fills in all lengths and checksums of a frame.
    fn finish(self, mut frame: Vec<u8>) -> Vec<u8> {
        let Self { is_v6, protocol, transport, .. } = self;
        let length = frame.len() - transport;
        let addresses = if is_v6 {
            put(&mut frame, 18, length as u16);
            22..54
        } else {
            put(&mut frame, 16, (20 + length) as u16);
            put(&mut frame, 24, 0);
            let checksum = !sum(&frame[ETHERNET..transport], 0);
            put(&mut frame, 24, checksum);
            26..34
        };
        let at = transport + if protocol == TCP { 16 } else { 6 };
        put(&mut frame, at, 0);
        let pseudo_header = sum(&frame[addresses], length as u32 + u32::from(protocol));
        let checksum = !sum(&frame[transport..], pseudo_header.into());
        // In UDP, a checksum of zero means "no checksum".
        put(&mut frame, at, if protocol == UDP && checksum == 0 { 0xffff } else { checksum });
        frame
    }
}

fn on_a_wire(frame: &[u8]) -> Vec<Vec<u8>> {
    let Some(packet) = Packet::of(frame) else { return vec![frame.to_vec()] };
    let Packet { is_v6, protocol, transport, payload } = packet;
    let (header, data) = frame.split_at(payload);
    let most = ETHERNET + MTU - payload;
    if protocol != TCP || data.len() <= most {
        return vec![packet.finish(frame.to_vec())];
    }
    let (sequence, last) = (u32_at(frame, transport + 4), data.len().div_ceil(most) - 1);
    let segment = |(index, data): (usize, &[u8])| {
        let mut segment = [header, data].concat();
        let number = sequence.wrapping_add((index * most) as u32);
        segment[transport + 4..transport + 8].copy_from_slice(&number.to_be_bytes());
        let flags = &mut segment[transport + 13];
        if index != 0 {
            *flags &= !0x80; // CWR: only in the first segment
        }
        if index != last {
            *flags &= !0x09; // FIN and PSH: only in the last segment
        }
        if !is_v6 {
            put(&mut segment, 18, u16_at(frame, 18).wrapping_add(index as u16));
        }
        packet.finish(segment)
    };
    data.chunks(most).enumerate().map(segment).collect()
}

/// Replaces a TCP checksum of 0xffff by 0: both represent the same sum. The kernel writes 0xffff (`CSUM_MANGLED_0`)
/// into a single frame, but 0 into a segment of a super-frame.
pub(crate) fn with_one_zero(mut frame: Vec<u8>) -> Vec<u8> {
    if let Some(Packet { protocol: TCP, transport, .. }) = Packet::of(&frame)
        && u16_at(&frame, transport + 16) == 0xffff
    {
        put(&mut frame, transport + 16, 0);
    }
    frame
}

/// The sum of the Internet checksum (RFC 1071), folded.
fn sum(bytes: &[u8], start: u32) -> u16 {
    let words =
        bytes.chunks(2).map(|word| u32::from(word[0]) << 8 | word.get(1).map_or(0, |low| u32::from(*low)));
    let mut sum = words.fold(start, |sum, word| sum + word);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

fn u16_at(frame: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([frame[at], frame[at + 1]])
}

fn u32_at(frame: &[u8], at: usize) -> u32 {
    u32::from(u16_at(frame, at)) << 16 | u32::from(u16_at(frame, at + 2))
}

fn put(frame: &mut [u8], at: usize, value: u16) {
    frame[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Offset of the checksum in a frame of TCP over IPv4.
    const AT: usize = 50;

    /// About one frame in 65536 has this checksum.
    #[test]
    fn a_checksum_of_zero_has_two_forms_and_another_one_has_one() {
        let mut frame = [&[2; 12][..], &[8, 0, 0x45], &[0; 41], &[9; 6]].concat();
        (frame[23], frame[46]) = (TCP, 0x50);
        let finished = on_a_wire(&frame).remove(0);
        let checksum = u16_at(&finished, AT);
        // With its own checksum as an additional word of data, a packet has the checksum 0.
        put(&mut frame, 54, 0);
        let without = u16_at(&on_a_wire(&frame).remove(0), AT);
        put(&mut frame, 54, without);
        let zero = on_a_wire(&frame).remove(0);
        assert_eq!(u16_at(&zero, AT), 0);
        let mut mangled = zero.clone();
        put(&mut mangled, AT, 0xffff);
        assert_eq!(with_one_zero(mangled), zero);
        assert_eq!(with_one_zero(zero.clone()), zero);

        assert_eq!(with_one_zero(finished.clone()), finished);
        let mut wrong = finished.clone();
        put(&mut wrong, AT, !checksum);
        assert_ne!(with_one_zero(wrong), finished);
    }
}
