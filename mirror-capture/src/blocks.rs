//! Parses the pcapng that an agent sends. Pure.
//!
//! It parses what [`pcapng`](crate::pcapng) writes, and no other files: one section, little endian, times in nanoseconds.
//! Other blocks and options, which a newer agent could add, are ignored. An agent is a program on another machine, so
//! nothing in a block is trusted: an impossible length is an error, and [`MOST`] bounds the buffer.

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
    Interface(Description),
    /// A packet.
    Packet(Packet),
    /// The counters of an interface.
    Statistics(Statistics),
}

/// The description of an interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Description {
    /// Its name, such as `shop/web eth0`.
    pub name: String,
    /// Free text.
    pub description: Option<String>,
    /// The filter of its packets.
    pub filter: Option<String>,
    /// A comment.
    pub comment: Option<String>,
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

/// The counters of an interface.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Statistics {
    /// The index of the interface in the stream.
    pub interface: u32,
    /// When the counters were read, in ns since the epoch.
    pub time_ns: u64,
    /// When the stream began, in ns since the epoch.
    pub start_ns: Option<u64>,
    /// When the stream ended.
    pub end_ns: Option<u64>,
    /// Packets that the capture matched, including lost ones.
    pub received: Option<u64>,
    /// Matched packets that were lost.
    pub lost: Option<u64>,
    /// Matched packets that a rate or a budget refused.
    pub limited: Option<u64>,
    /// A text about what the packets lack.
    pub comment: Option<String>,
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
            Ok(Some(Block::Interface(Description {
                name: text(2).unwrap_or_default(),
                description: text(3),
                filter,
                comment: text(1),
            })))
        }
        6 => {
            let (Some(interface), Some(time_ns), Some(_)) = (word(body, 0), time(body, 4), body.get(..20))
            else {
                return Err(short);
            };
            Ok(Some(Block::Packet(Packet { interface, time_ns, block: block.to_owned() })))
        }
        5 => {
            let (Some(interface), Some(time_ns)) = (word(body, 0), time(body, 4)) else { return Err(short) };
            let options = body.get(12..).unwrap_or_default();
            let number = |code| Some(u64::from_le_bytes(option(options, code)?.try_into().ok()?));
            Ok(Some(Block::Statistics(Statistics {
                interface,
                time_ns,
                start_ns: option(options, 2).and_then(|value| time(value, 0)),
                end_ns: option(options, 3).and_then(|value| time(value, 0)),
                received: number(4),
                lost: number(5),
                limited: number(7),
                comment: option(options, 1).map(text),
            })))
        }
        _ => Ok(None),
    }
}

/// The value of an option.
fn option(mut options: &[u8], code: u16) -> Option<&[u8]> {
    loop {
        let (head, rest) = options.split_first_chunk::<4>()?;
        let [of, length] = [[head[0], head[1]], [head[2], head[3]]].map(u16::from_le_bytes);
        if of == code {
            return rest.get(..length.into());
        }
        options = rest.get(usize::from(length).next_multiple_of(4)..)?;
    }
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
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use crate::pcapng::{self, Direction, Interface, Section, Writer};
    use proptest::{collection::vec, prelude::*};

    use super::*;

    /// A stream as an agent sends it: two interfaces, one packet with these bytes for each, and counters.
    fn stream(packet: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let mut writer =
            Writer::begin(&mut out, &Section { comment: Some("a comment"), ..Section::default() });
        for name in ["shop/web eth0", "shop/db eth0"] {
            let interface = Interface {
                name: Some(name),
                description: Some("device veth1 of the node"),
                filter: Some("tcp port 443"),
                ..Interface::default()
            };
            let interface = writer.interface(&mut out, &interface);
            let packet = pcapng::Packet {
                interface,
                time_ns: 1_795_305_601_123_456_789,
                bytes: packet,
                len: packet.len() as u32,
                direction: Some(Direction::Inbound),
                lost: None,
                comment: None,
            };
            packet.write(&mut out);
            let counters = pcapng::Statistics {
                interface,
                time_ns: 5 << 33,
                start_ns: Some(1),
                end_ns: Some(7 << 40),
                received: Some(9),
                dropped: Some(2),
                accepted: None,
                limited: Some(4),
                comment: Some("2 of its super-frames were cut"),
            };
            counters.write(&mut out);
        }
        out
    }

    fn all(blocks: &mut Blocks) -> Vec<Block> {
        std::iter::from_fn(|| blocks.pop().unwrap()).collect()
    }

    #[test]
    fn what_an_agent_writes_is_read() {
        let mut blocks = Blocks::default();
        blocks.push(&stream(b"a packet"));
        let all = all(&mut blocks);
        assert!(!blocks.is_within_a_block());
        let description = Description {
            name: "shop/db eth0".into(),
            description: Some("device veth1 of the node".into()),
            filter: Some("tcp port 443".into()),
            comment: None,
        };
        assert_eq!(all[0], Block::Section("a comment".into()));
        assert_eq!((all.len(), &all[4]), (7, &Block::Interface(description)));
        let Block::Packet(packet) = all[5].clone() else { unreachable!("{all:?}") };
        assert_eq!((packet.interface, packet.time_ns), (1, 1_795_305_601_123_456_789));
        let block = packet.clone().with_interface(77);
        assert_eq!((block[8], &block[12..]), (77, &packet.block[12..]));
        let statistics = Statistics {
            interface: 1,
            time_ns: 5 << 33,
            start_ns: Some(1),
            end_ns: Some(7 << 40),
            received: Some(9),
            lost: Some(2),
            limited: Some(4),
            comment: Some("2 of its super-frames were cut".into()),
        };
        assert_eq!(all[6], Block::Statistics(statistics));
    }

    proptest! {
        /// The blocks do not depend on how the bytes are divided.
        #[test]
        fn the_parts_in_which_bytes_come_do_not_matter(packet in vec(any::<u8>(), 0..300), parts in vec(1..200_usize, 1..20)) {
            let stream = stream(&packet);
            let (mut whole, mut parted, mut found) = (Blocks::default(), Blocks::default(), Vec::new());
            whole.push(&stream);
            let mut rest = &stream[..];
            for part in parts.into_iter().cycle() {
                let (now, later) = rest.split_at(part.min(rest.len()));
                parted.push(now);
                found.extend(all(&mut parted));
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(found, all(&mut whole));
        }

        /// The bytes of a compromised machine are parsed or end the stream; they do no other harm.
        #[test]
        fn any_bytes_are_survived(random in vec(any::<u8>(), 0..500), flips in vec((0..2000_usize, any::<u8>()), 0..8)) {
            let mut written = stream(b"a packet");
            for (at, byte) in flips {
                let at = at % written.len();
                written[at] = byte;
            }
            for bytes in [random, written] {
                let mut blocks = Blocks::default();
                blocks.push(&bytes);
                let mut count = 0;
                while let Ok(Some(_)) = blocks.pop() {
                    count += 1;
                }
                prop_assert!(count * AROUND <= bytes.len());
            }
        }
    }
}
