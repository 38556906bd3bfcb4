//! Parses the pcapng that an agent sends. Pure.
//!
//! It parses what [`pcapng`](crate::pcapng) writes, and no other files: one section, little endian, times in
//! nanoseconds. Other blocks and options, which a newer agent could add, are ignored. But another option of a
//! packet is an error, because the block of a packet becomes a part of a file. An agent is a program on another
//! machine, so nothing in a block is trusted: an impossible length is an error, and [`MOST`] bounds the buffer.

use core::net::IpAddr;

use crate::pcapng::{Direction, Interface, InterfaceId, MAX_CAPTURED, NOTE, Names, Statistics};

/// Maximum length of a block: the longest packet, with its options.
const MOST: usize = 512 << 10;
/// Bytes of a block around its body: type and length before it, the length again after it.
const AROUND: usize = 12;

/// A block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Block {
    /// The beginning of the stream, with the agent's message about it.
    Section(String),
    /// The next interface.
    Interface(Interface),
    /// A packet.
    Packet(Packet),
    /// The counters of an interface.
    Statistics(Statistics),
    /// Names of addresses: the first name in each record.
    Names(Names),
    /// A message of the agent, in JSON.
    Note(String),
}

/// A packet, as the block that holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet {
    /// The index of the interface in the stream.
    pub interface: u32,
    /// The time of the copy, in ns since the epoch.
    pub time_ns: u64,
    /// The whole block.
    pub block: Vec<u8>,
}

impl Packet {
    /// Returns the block with another interface number.
    pub fn with_interface(mut self, interface: u32) -> Vec<u8> {
        if let Some(number) = self.block.get_mut(8..12) {
            number.copy_from_slice(&interface.to_le_bytes());
        }
        self.block
    }
}

/// The bytes of a stream that are not parsed yet.
#[derive(Debug, Default)]
pub struct Blocks {
    bytes: Vec<u8>,
    /// The number of bytes already parsed.
    taken: usize,
}

impl Blocks {
    /// Appends received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.taken);
        self.taken = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the next block; `None`: it is not complete yet.
    ///
    /// # Errors
    ///
    /// The reason why the stream cannot be parsed.
    pub fn pop(&mut self) -> Result<Option<Block>, &'static str> {
        loop {
            let rest = self.bytes.get(self.taken..).unwrap_or_default();
            let (Some(kind), Some(length)) = (word(rest, 0), word(rest, 4)) else { return Ok(None) };
            let length = length as usize;
            if !(AROUND..=MOST).contains(&length) || !length.is_multiple_of(4) {
                return Err("a block with an impossible length");
            }
            let Some(block) = rest.get(..length) else { return Ok(None) };
            if word(block, length - 4) != word(block, 4) {
                return Err("a block with two different lengths");
            }
            self.taken += length;
            let body = block.get(8..length - 4).unwrap_or_default();
            if let Some(block) = parse(kind, block, body)? {
                return Ok(Some(block));
            }
        }
    }

    /// Whether an incomplete block is left.
    pub fn is_within_a_block(&self) -> bool {
        self.taken < self.bytes.len()
    }
}

fn parse(kind: u32, block: &[u8], body: &[u8]) -> Result<Option<Block>, &'static str> {
    let short = "a block that is too short";
    match kind {
        0x0a0d_0d0a if word(body, 0) != Some(0x1a2b_3c4d) => Err("a section that is not little endian"),
        0x0a0d_0d0a => Ok(option(body.get(16..).unwrap_or_default(), 1).map(text).map(Block::Section)),
        1 => {
            let options = body.get(8..).ok_or(short)?;
            // The tag of a filter option names the language of the filter.
            let filter = option(options, 11).and_then(<[u8]>::split_first).map(|(_, filter)| text(filter));
            let text = |code| option(options, code).map(text);
            Ok(Some(Block::Interface(Interface {
                name: text(2).unwrap_or_default(),
                description: text(3),
                filter,
                hardware: text(15),
                comment: text(1),
            })))
        }
        6 => {
            let captured = word(body, 12).map(|captured| captured as usize);
            let captured = captured.filter(|captured| *captured <= MAX_CAPTURED);
            let options = captured.and_then(|captured| body.get(20 + captured.next_multiple_of(4)..));
            let (Some(interface), Some(time_ns), true) =
                (word(body, 0), time(body, 4), options.is_some_and(are_options))
            else {
                return Err("a packet that is damaged");
            };
            Ok(Some(Block::Packet(Packet { interface, time_ns, block: block.to_owned() })))
        }
        5 => {
            let (Some(interface), Some(time_ns)) = (word(body, 0), time(body, 4)) else { return Err(short) };
            let options = body.get(12..).unwrap_or_default();
            let number = |code| Some(u64::from_le_bytes(option(options, code)?.try_into().ok()?));
            Ok(Some(Block::Statistics(Statistics {
                interface: InterfaceId::at(interface),
                time_ns,
                start_ns: option(options, 2).and_then(|value| time(value, 0)),
                end_ns: option(options, 3).and_then(|value| time(value, 0)),
                received: number(4),
                dropped: number(5),
                limited: number(7),
                comment: option(options, 1).map(text),
            })))
        }
        4 => {
            let (mut addresses, mut rest) = (Vec::new(), body);
            loop {
                let (kind, record, later) = first(rest).ok_or(short)?;
                rest = later;
                match kind {
                    0 => break,
                    1 => addresses.extend(named::<4>(record)),
                    2 => addresses.extend(named::<16>(record)),
                    _ => {}
                }
            }
            Ok(Some(Block::Names(Names { addresses, comment: option(rest, 1).map(text) })))
        }
        NOTE => Ok(option(body, 1).map(text).map(Block::Note)),
        _ => Ok(None),
    }
}

/// The direction of the packet in a block, seen from its interface, if it is known.
pub fn direction(block: &[u8]) -> Option<Direction> {
    let captured = word(block, 20)? as usize;
    let options = block.get(28 + captured.next_multiple_of(4)..block.len().checked_sub(4)?)?;
    match option(options, 2)?.first()? & 3 {
        1 => Some(Direction::Inbound),
        2 => Some(Direction::Outbound),
        _ => None,
    }
}

/// The address and the first name of a record. Further names are ignored: each takes more memory than it has bytes.
fn named<const N: usize>(record: &[u8]) -> Option<(IpAddr, String)>
where
    IpAddr: From<[u8; N]>,
{
    let (address, names) = record.split_first_chunk::<N>()?;
    let name = names.split(|byte| *byte == 0).next().filter(|name| !name.is_empty())?;
    Some((IpAddr::from(*address), text(name)))
}

/// Whether a packet has these options: only those of [`pcapng::Packet`](crate::pcapng::Packet), because Wireshark rejects
/// a whole file if a known option has another length.
fn are_options(mut options: &[u8]) -> bool {
    while !options.is_empty() {
        match first(options) {
            Some((0, ..)) => return true,
            Some((code, value, rest)) if matches!((code, value.len()), (1, _) | (2, 4)) => {
                options = rest;
            }
            _ => return false,
        }
    }
    true
}

/// The value of an option.
fn option(mut options: &[u8], code: u16) -> Option<&[u8]> {
    loop {
        let (of, value, rest) = first(options)?;
        if of == code {
            return Some(value);
        }
        options = rest;
    }
}

/// The code and the value of the first option or record, and the bytes after it.
fn first(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let (head, rest) = bytes.split_first_chunk::<4>()?;
    let [code, length] = [[head[0], head[1]], [head[2], head[3]]].map(u16::from_le_bytes);
    let padded = usize::from(length).next_multiple_of(4);
    Some((code, rest.get(..length.into())?, rest.get(padded..).unwrap_or_default()))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|word| u32::from_le_bytes(*word))
}

/// A time has its upper 32 bits first.
fn time(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from(word(bytes, at)?) << 32 | u64::from(word(bytes, at + 4)?))
}

#[cfg(test)]
mod tests;
