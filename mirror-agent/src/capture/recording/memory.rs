//! A buffer of packets in memory, as pcapng blocks. Pure.
//!
//! The blocks are contiguous, without an index: each of them contains its length and its time. New blocks are appended
//! at the back, and the oldest are removed at the front. [`store`](super::store) decides which, and calls this module.

use std::{collections::VecDeque, iter};

use anyhow::anyhow;

/// Offsets in an enhanced packet block: length and interface (4 bytes each), and time (8).
pub(super) const LENGTH: usize = 4;
pub(super) const INTERFACE: usize = 8;
pub(super) const TIME: usize = 12;

/// Packets, the oldest first.
#[derive(Debug)]
pub(super) struct Memory {
    blocks: VecDeque<u8>,
    packets: u64,
}

impl Memory {
    /// Reserves `bytes` bytes. The kernel allocates pages on first use, so this costs little. Without it, a growing
    /// buffer would need half as much memory again while it is moved.
    pub(super) fn with_room(bytes: u64) -> anyhow::Result<Self> {
        let mut blocks = VecDeque::new();
        blocks
            .try_reserve_exact(usize::try_from(bytes).unwrap_or(usize::MAX))
            .map_err(|error| anyhow!("cannot get {bytes} bytes of memory for packets: {error}"))?;
        Ok(Self { blocks, packets: 0 })
    }

    /// Bytes of all packets.
    pub(super) fn len(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// How many packets there are.
    pub(super) fn packets(&self) -> u64 {
        self.packets
    }

    pub(super) fn push(&mut self, block: &[u8]) {
        self.blocks.extend(block);
        self.packets += 1;
    }

    /// Removes the oldest packets until at most `bytes` bytes are left.
    pub(super) fn shrink_to(&mut self, bytes: u64) {
        while self.len() > bytes {
            self.pop();
        }
    }

    /// Removes the packets at the front that are older than `time_ns`.
    pub(super) fn forget_before(&mut self, time_ns: u64) {
        while !self.blocks.is_empty() && self.oldest_time_ns() < time_ns {
            self.pop();
        }
    }

    /// Returns all packets as one slice.
    pub(super) fn as_blocks(&mut self) -> &[u8] {
        self.blocks.make_contiguous()
    }

    /// Returns each packet with the number of its interface.
    pub(super) fn each(&mut self) -> impl Iterator<Item = (u32, &[u8])> {
        blocks(self.as_blocks()).filter_map(|block| Some((number(block, INTERFACE)?, block)))
    }

    /// Removes the oldest packet. The buffer must not be empty.
    fn pop(&mut self) {
        let length = (u32::from_le_bytes(self.field(LENGTH)) as usize).clamp(1, self.blocks.len());
        self.blocks.drain(..length);
        self.packets -= 1;
    }

    /// The time of the oldest packet.
    pub(super) fn oldest_time_ns(&self) -> u64 {
        time_of(self.field(TIME))
    }

    /// A field of the oldest block.
    fn field<const N: usize>(&self, place: usize) -> [u8; N] {
        std::array::from_fn(|byte| self.blocks.get(place + byte).copied().unwrap_or_default())
    }
}

/// Decodes the time field of a block: the upper half comes first.
pub(super) fn time_of(field: [u8; 8]) -> u64 {
    u64::from_le_bytes(field).rotate_left(32)
}

/// Encodes the time field of a block.
pub(super) fn time_bytes(time_ns: u64) -> [u8; 8] {
    time_ns.rotate_left(32).to_le_bytes()
}

/// Splits the blocks that are complete.
pub(super) fn blocks(mut rest: &[u8]) -> impl Iterator<Item = &[u8]> {
    iter::from_fn(move || {
        let length = number(rest, LENGTH).filter(|length| *length > 0)? as usize;
        let block;
        (block, rest) = rest.split_at_checked(length)?;
        Some(block)
    })
}

/// Reads a 32-bit number of a block.
pub(super) fn number(block: &[u8], place: usize) -> Option<u32> {
    block.get(place..)?.first_chunk().copied().map(u32::from_le_bytes)
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use mirror_capture::pcapng::{Interface, Packet, Section, Writer};

    use super::*;

    /// The block of a packet with this time.
    fn block(time_ns: u64, bytes: &[u8]) -> Vec<u8> {
        let mut block = Vec::new();
        let mut writer = Writer::begin(&mut block, &Section::default());
        let interface = writer.interface(&mut block, &Interface::default());
        block.clear();
        let packet = Packet { interface, time_ns, bytes, len: 0, direction: None, comment: None };
        packet.write(&mut block);
        block
    }

    #[test]
    fn whole_packets_go_from_the_front() {
        let mut memory = Memory::with_room(1000).unwrap();
        let blocks = [1 << 40, 3 << 40, 2 << 40].map(|time_ns| block(time_ns, &[7; 60]));
        blocks.iter().for_each(|block| memory.push(block));
        memory.forget_before(2 << 40);
        assert_eq!((memory.packets(), memory.as_blocks()), (2, &blocks[1..].concat()[..]));
        memory.shrink_to(memory.len() - 1);
        assert_eq!((memory.packets(), memory.as_blocks()), (1, &blocks[2][..]));
        memory.forget_before(u64::MAX);
        assert_eq!((memory.packets(), memory.len()), (0, 0));
    }

    #[test]
    fn packets_that_come_and_go_need_no_more_memory() {
        let mut memory = Memory::with_room(10_000).unwrap();
        let capacity = memory.blocks.capacity();
        for length in (0..2000).cycle().take(20_000) {
            let block = block(1, &vec![0; length]);
            memory.shrink_to(10_000 - block.len() as u64);
            memory.push(&block);
            assert_eq!(memory.blocks.capacity(), capacity);
        }
        assert!(memory.len() > 7000);
    }
}
