//! Measures the order of captured frames: how often the sequence numbers of a connection go back.

use std::collections::BTreeMap;

use crate::Captured;

/// The connection and direction of a TCP segment: the addresses and ports in the frame.
type Flow = Vec<u8>;

/// How often, over all connections and directions, a TCP segment over IPv4 with data comes after a segment with later
/// data.
///
/// A retransmission counts as well, so compare the number with that of another capture.
pub fn steps_back(frames: &[Captured]) -> usize {
    let mut newest: BTreeMap<Flow, u32> = BTreeMap::new();
    let mut steps = 0;
    for (flow, sequence) in frames.iter().filter_map(|frame| segment(&frame.bytes)) {
        match newest.insert(flow, sequence) {
            Some(before) if sequence.wrapping_sub(before).cast_signed() < 0 => steps += 1,
            _ => {}
        }
    }
    steps
}

/// The number of TCP segments over IPv4 with data.
pub fn segments(frames: &[Captured]) -> usize {
    frames.iter().filter(|frame| segment(&frame.bytes).is_some()).count()
}

fn segment(frame: &[u8]) -> Option<(Flow, u32)> {
    let (ethernet, ip) = (14, 20);
    let is_tcp = frame.get(12..15)? == [8, 0, 0x45] && frame.get(23)? == &6;
    let tcp = frame.get(ethernet + ip..).filter(|_| is_tcp)?;
    let header = usize::from(tcp.get(12)? >> 4) * 4;
    let length = usize::from(u16::from_be_bytes(frame.get(16..18)?.try_into().ok()?));
    let flow = [frame.get(26..34)?, tcp.get(..4)?].concat();
    let sequence = u32::from_be_bytes(tcp.get(4..8)?.try_into().ok()?);
    (length > ip + header).then_some((flow, sequence))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_connection_has_its_own_order() {
        let frame = |port: u16, sequence: u32, data: usize| {
            let mut frame = vec![0; 54 + data];
            frame[12..15].copy_from_slice(&[8, 0, 0x45]);
            frame[16..18].copy_from_slice(&(40 + data as u16).to_be_bytes());
            frame[23] = 6;
            frame[34..36].copy_from_slice(&port.to_be_bytes());
            frame[38..42].copy_from_slice(&sequence.to_be_bytes());
            frame[46] = 0x50;
            Captured { length: frame.len(), bytes: frame }
        };
        let other = Captured { bytes: vec![0; 60], length: 60 };
        let frames = [
            frame(1, u32::MAX, 10),
            frame(2, 5, 10),
            frame(1, 9, 10),
            other,
            frame(1, 0, 0),
            frame(1, 8, 1),
            frame(2, 5, 1),
            frame(1, 10, 1),
        ];
        assert_eq!((steps_back(&frames), segments(&frames)), (1, 6));
    }
}
