//! The packets of a capture file, one after the other: pcap and pcapng, of either byte order.
//!
//! It holds one block of the file at a time, so that a file may be larger than the memory; `pcap-parser` knows the
//! formats. It decides nothing about a packet.

use std::io::{self, ErrorKind, Read};

use anyhow::{Context as _, anyhow, bail};
use pcap_parser::{
    Block, LegacyPcapBlock, Linktype, PcapBlockOwned, PcapError, PcapHeader, create_reader,
    traits::PcapNGPacketBlock as _,
};

/// How much of the file is read at once, in bytes.
const BUFFER: usize = 1 << 20;
/// Longest block that is read, in bytes. A packet is far shorter; a block of names or secrets may be this long.
const LONGEST_BLOCK: usize = 16 << 20;
/// Most interfaces that one section of a pcapng file may describe.
const MAX_INTERFACES: usize = 1 << 16;
/// The type of a pcapng block that files have not had since 2009, and the same in the other byte order.
const OLD_PACKET_BLOCK: [u32; 2] = [2, 2_u32.swap_bytes()];

/// A packet of a capture file.
pub(super) struct Packet<'a> {
    /// The captured bytes.
    pub(super) bytes: &'a [u8],
    /// How long it was on the wire, in bytes.
    pub(super) length: u32,
    /// The type of its first header: a number of <https://www.tcpdump.org/linktypes.html>.
    pub(super) link_type: i32,
}

/// Calls `visit` for every packet of the file.
pub(super) fn each(
    file: impl Read + Send,
    mut visit: impl FnMut(Packet<'_>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut reader = create_reader(BUFFER, Filling(file)).map_err(|error| match error {
        PcapError::Eof => anyhow!("it is empty"),
        PcapError::Incomplete(_) | PcapError::UnexpectedEof => anyhow!("it is shorter than its header"),
        PcapError::ReadError => anyhow!("it cannot be read"),
        _ => anyhow!("it is neither a pcap nor a pcapng file"),
    })?;
    let (mut capacity, mut count) = (BUFFER, 0_u64);
    let mut links = Links::default();
    loop {
        let step = match reader.next() {
            Ok((length, block)) => {
                if let Some(packet) = links.packet(block).with_context(|| format!("packet {}", count + 1))? {
                    count += 1;
                    visit(packet)?;
                }
                Step::Next(length)
            }
            Err(PcapError::Eof) => return Ok(()),
            Err(PcapError::Incomplete(_)) => Step::Refill,
            Err(PcapError::BufferTooSmall) => Step::Grow,
            Err(PcapError::UnexpectedEof) => bail!("it ends in the middle, behind packet {count}"),
            Err(PcapError::ReadError) => bail!("it cannot be read, behind packet {count}"),
            Err(_) => bail!("it is broken, behind packet {count}"),
        };
        match step {
            Step::Next(length) => reader.consume(length),
            Step::Grow if capacity < LONGEST_BLOCK => {
                capacity *= 2;
                reader.grow(capacity);
            }
            Step::Grow => {
                bail!("behind packet {count} a block is broken, or longer than {LONGEST_BLOCK} bytes")
            }
            Step::Refill => {
                let before = reader.data().len();
                reader.refill().map_err(|_| anyhow!("it cannot be read, behind packet {count}"))?;
                // A broken block may need more bytes than its stated length.
                if reader.data().len() == before && !reader.reader_exhausted() {
                    bail!("it is broken, behind packet {count}");
                }
            }
        }
    }
}

/// The step that is necessary before the next block can be read.
enum Step {
    /// Go behind this many bytes.
    Next(usize),
    Refill,
    Grow,
}

/// The interfaces that the file has described so far.
#[derive(Default)]
struct Links {
    /// Link type and snap length in bytes (0: none) of each, by its number in the section. A pcap file has one.
    interfaces: Vec<(i32, u32)>,
}

impl Links {
    /// The packet in the block, if there is one.
    fn packet<'a>(&mut self, block: PcapBlockOwned<'a>) -> anyhow::Result<Option<Packet<'a>>> {
        match block {
            PcapBlockOwned::LegacyHeader(PcapHeader { network: Linktype(link_type), .. }) => {
                // The upper bits describe a frame check sequence.
                self.interfaces = vec![(link_type & 0xffff, 0)];
            }
            PcapBlockOwned::Legacy(LegacyPcapBlock { data, origlen, .. }) => {
                let (link_type, _) = self.interface(0)?;
                return Ok(Some(Packet { bytes: data, length: origlen, link_type }));
            }
            PcapBlockOwned::NG(Block::SectionHeader(_)) => self.interfaces.clear(),
            PcapBlockOwned::NG(Block::InterfaceDescription(interface)) => {
                if self.interfaces.len() == MAX_INTERFACES {
                    bail!("the file has more than {MAX_INTERFACES} interfaces");
                }
                self.interfaces.push((interface.linktype.0, interface.snaplen));
            }
            PcapBlockOwned::NG(Block::EnhancedPacket(packet)) => {
                let (link_type, _) = self.interface(packet.if_id)?;
                let captured = packet.caplen as usize;
                let bytes = packet.data.get(..captured).unwrap_or(packet.data);
                return Ok(Some(Packet { bytes, length: packet.orig_len(), link_type }));
            }
            PcapBlockOwned::NG(Block::SimplePacket(packet)) => {
                // The block does not state the captured length. The snap length of the interface does.
                let (link_type, snaplen) = self.interface(0)?;
                let captured = if snaplen == 0 { packet.origlen } else { packet.origlen.min(snaplen) };
                let bytes = packet.data.get(..captured as usize).unwrap_or(packet.data);
                return Ok(Some(Packet { bytes, length: packet.origlen, link_type }));
            }
            PcapBlockOwned::NG(Block::Unknown(block)) if OLD_PACKET_BLOCK.contains(&block.block_type) => {
                bail!("it is in a form that pcapng has given up; `editcap FILE NEW` writes the present one")
            }
            PcapBlockOwned::NG(_) => {}
        }
        Ok(None)
    }

    fn interface(&self, number: u32) -> anyhow::Result<(i32, u32)> {
        let interface = self.interfaces.get(number as usize).copied();
        interface.with_context(|| format!("the file does not say what interface {number} is"))
    }
}

/// Reads until the buffer is full or the file ends: a pipe can give fewer bytes at a time than a header has.
struct Filling<R>(R);

impl<R: Read> Read for Filling<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match self.0.read(rest) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if filled == 0 => return Err(error),
                // It comes again with the next read.
                Err(_) => break,
            }
        }
        Ok(filled)
    }
}
