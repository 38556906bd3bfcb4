//! Reads the packets of a capture file: pcap and pcapng, of either byte order.
//!
//! A file may be larger than the memory, because one buffer is read at a time; `pcap-parser` parses the formats.

use std::io::Read;

use anyhow::{Context as _, anyhow, bail};
use pcap_parser::{
    Block, LegacyPcapBlock, Linktype, PcapBlockOwned, PcapError, PcapHeader, create_reader,
    traits::PcapNGPacketBlock as _,
};

/// Buffer size, and maximum length of a block: a packet is far shorter, a block of names or secrets may be as long.
pub(super) const BUFFER: usize = 16 << 20;
/// Maximum number of interfaces in one section of a pcapng file.
const MAX_INTERFACES: usize = 1 << 16;
/// The type of a pcapng block that has been obsolete since 2009, and the same in the other byte order.
const OLD_PACKET_BLOCK: [u32; 2] = [2, 2_u32.swap_bytes()];

/// A packet of a capture file.
pub(super) struct Packet<'a> {
    /// The captured bytes.
    pub(super) bytes: &'a [u8],
    /// The length on the wire, in bytes.
    pub(super) length: u32,
    /// The link type: a number of <https://www.tcpdump.org/linktypes.html>.
    pub(super) link_type: i32,
}

/// Calls `visit` for every packet of the file. The buffer has `buffer` bytes.
pub(super) fn each(
    buffer: usize,
    file: impl Read + Send,
    mut visit: impl FnMut(Packet<'_>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut reader = create_reader(buffer, file).map_err(|error| match error {
        PcapError::Eof => anyhow!("it is empty"),
        PcapError::Incomplete(_) | PcapError::UnexpectedEof => anyhow!("it is shorter than its header"),
        PcapError::ReadError => anyhow!("it cannot be read"),
        _ => anyhow!("it is neither a pcap nor a pcapng file"),
    })?;
    let mut count = 0_u64;
    // Link type and snap length in bytes (0: none) of each interface so far, by its number in the section. A pcap file
    // has one.
    let mut interfaces = Vec::new();
    loop {
        match reader.next() {
            Ok((length, block)) => {
                if let Some(packet) =
                    packet(block, &mut interfaces).with_context(|| format!("packet {}", count + 1))?
                {
                    count += 1;
                    visit(packet)?;
                }
                reader.consume(length);
            }
            Err(PcapError::Eof) => return Ok(()),
            Err(PcapError::Incomplete(_)) => {
                let before = reader.data().len();
                reader.refill().map_err(|_| anyhow!("it cannot be read after packet {count}"))?;
                // A broken block may need more bytes than its stated length.
                if reader.data().len() == before && !reader.reader_exhausted() {
                    bail!("it is broken after packet {count}");
                }
            }
            Err(PcapError::BufferTooSmall) => {
                bail!("it has a block of more than {buffer} bytes after packet {count}")
            }
            Err(PcapError::UnexpectedEof) => bail!("it ends in the middle of a block after packet {count}"),
            Err(PcapError::ReadError) => bail!("it cannot be read after packet {count}"),
            Err(_) => bail!("it is broken after packet {count}"),
        }
    }
}

/// Returns the packet in the block, if there is one. Notes the interface that it describes.
fn packet<'a>(
    block: PcapBlockOwned<'a>,
    interfaces: &mut Vec<(i32, u32)>,
) -> anyhow::Result<Option<Packet<'a>>> {
    match block {
        PcapBlockOwned::LegacyHeader(PcapHeader { network: Linktype(link_type), .. }) => {
            // The upper bits describe a frame check sequence.
            *interfaces = vec![(link_type & 0xffff, 0)];
        }
        PcapBlockOwned::Legacy(LegacyPcapBlock { data, origlen, .. }) => {
            let (link_type, _) = interface(interfaces, 0)?;
            return Ok(Some(Packet { bytes: data, length: origlen, link_type }));
        }
        PcapBlockOwned::NG(Block::SectionHeader(_)) => interfaces.clear(),
        PcapBlockOwned::NG(Block::InterfaceDescription(interface)) => {
            if interfaces.len() == MAX_INTERFACES {
                bail!("the file has more than {MAX_INTERFACES} interfaces");
            }
            interfaces.push((interface.linktype.0, interface.snaplen));
        }
        PcapBlockOwned::NG(Block::EnhancedPacket(packet)) => {
            let (link_type, _) = interface(interfaces, packet.if_id)?;
            let captured = packet.caplen as usize;
            let bytes = packet.data.get(..captured).unwrap_or(packet.data);
            return Ok(Some(Packet { bytes, length: packet.orig_len(), link_type }));
        }
        PcapBlockOwned::NG(Block::SimplePacket(packet)) => {
            // The block does not state the captured length. It follows from the snap length of the interface.
            let (link_type, snaplen) = interface(interfaces, 0)?;
            let captured = if snaplen == 0 { packet.origlen } else { packet.origlen.min(snaplen) };
            let bytes = packet.data.get(..captured as usize).unwrap_or(packet.data);
            return Ok(Some(Packet { bytes, length: packet.origlen, link_type }));
        }
        PcapBlockOwned::NG(Block::Unknown(block)) if OLD_PACKET_BLOCK.contains(&block.block_type) => {
            bail!("it has packet blocks of an obsolete kind; `editcap FILE NEW` converts it")
        }
        PcapBlockOwned::NG(_) => {}
    }
    Ok(None)
}

fn interface(interfaces: &[(i32, u32)], number: u32) -> anyhow::Result<(i32, u32)> {
    let interface = interfaces.get(number as usize).copied();
    interface.with_context(|| format!("interface {number} is not described"))
}
