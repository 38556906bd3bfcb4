//! Merges the pcapng files of several recorders into one.
//!
//! These are complete files, so packets need not wait for a timeout as in `tail`: at each step one packet of each
//! unfinished file is available, and the earliest is written first. A file is read as it is needed. Called by `save`.

use std::{
    collections::BTreeMap,
    io::{self, Read, Seek, Write},
    time::Duration,
};

use anyhow::{Context as _, bail};

use super::kept::{Failure, Place};
use crate::tail::{
    blocks::{Block, Blocks, Malformed, Packet},
    combined::{Combined, Summary},
    merge::{Bounds, Merge, StreamId},
};

/// One packet of each file waits.
const BOUNDS: Bounds = Bounds { hold: Duration::MAX, bytes: usize::MAX };
/// Bytes read at a time.
const PART: usize = 64 << 10;

/// The contents of the output.
#[derive(Debug, Default)]
pub(super) struct Saved {
    /// The number of packets of each pod on each node.
    pub(super) pods: BTreeMap<(String, String), u64>,
    /// The sums of all counters.
    pub(super) counted: Summary,
}

/// Returns the number of packets in the file of a node, which is in `place`. Reads it from its beginning.
///
/// # Errors
///
/// It cannot be read or parsed to its end. [`merge`] would fail then, for all nodes.
pub(super) fn count(node: &str, mut from: impl Read + Seek, place: &Place) -> Result<u64, Failure> {
    from.rewind().map_err(|error| place.failed(error))?;
    let (mut stream, mut packets) = (Stream::new(node, from), 0);
    loop {
        match stream.next() {
            Ok(Some(block)) => packets += u64::from(matches!(block, Block::Packet(_))),
            Ok(None) => return Ok(packets),
            Err(error) if error.is::<io::Error>() => return Err(place.failed(error)),
            Err(error) => return Err(Failure::There(error)),
        }
    }
}

/// Writes the packets of these nodes in the order of their timestamps. `now_ns` is ns since the epoch.
///
/// # Errors
///
/// A file cannot be read or parsed to its end, or the output accepts no more.
pub(super) fn merge<R: Read>(
    files: Vec<(String, R)>,
    now_ns: u64,
    output: &mut impl Write,
) -> anyhow::Result<Saved> {
    let (combined, begin) = Combined::begin(concat!("kubectl-mirror ", env!("CARGO_PKG_VERSION")));
    let (merge, saved) = (Merge::new(BOUNDS), Saved::default());
    let streams = (0..).zip(files).map(|(id, (node, from))| (id, Stream::new(&node, from))).collect();
    let mut merging = Merging { streams, combined, merge, pending: begin, saved };
    let ids: Vec<_> = merging.streams.keys().copied().collect();
    for id in &ids {
        merging.merge.open(*id);
    }
    for id in ids {
        merging.advance(id)?;
    }
    while let Some((id, block)) = merging.merge.pop(Duration::ZERO) {
        merging.pending.extend_from_slice(&block);
        merging.advance(id)?;
        if merging.pending.len() >= PART {
            output.write_all(&merging.pending)?;
            merging.pending.clear();
        }
    }
    merging.saved.counted = merging.combined.end(now_ns, &mut merging.pending);
    output.write_all(&merging.pending)?;
    output.flush()?;
    Ok(merging.saved)
}

/// The state of a merge.
struct Merging<R> {
    streams: BTreeMap<StreamId, Stream<R>>,
    combined: Combined,
    merge: Merge<(StreamId, Vec<u8>)>,
    /// Blocks that are not written yet.
    pending: Vec<u8>,
    saved: Saved,
}

impl<R: Read> Merging<R> {
    /// Reads up to the next packet of a file, or to its end.
    fn advance(&mut self, id: StreamId) -> anyhow::Result<()> {
        let Self { streams, combined, merge, pending, saved } = self;
        let Some(stream) = streams.get_mut(&id) else { return Ok(()) };
        while let Some(block) = stream.next()? {
            match block {
                Block::Interface(description) => {
                    combined.interface(id, &stream.node, &description, pending);
                }
                Block::Packet(packet) => {
                    let time_ns = packet.time_ns;
                    let pod = stream.pod(&packet)?.to_owned();
                    let block = combined.packet(id, packet).context("each interface is in the file")?;
                    *saved.pods.entry((pod, stream.node.clone())).or_default() += 1;
                    merge.push(id, time_ns, block.len(), (id, block), Duration::ZERO);
                    return Ok(());
                }
                Block::Statistics(statistics) => combined.statistics(id, statistics),
            }
        }
        merge.close(id);
        streams.remove(&id);
        Ok(())
    }
}

/// The file of a node while it is read.
struct Stream<R> {
    node: String,
    from: R,
    part: Vec<u8>,
    blocks: Blocks,
    /// The pod of each interface.
    pods: Vec<String>,
}

impl<R: Read> Stream<R> {
    fn new(node: &str, from: R) -> Self {
        let (node, part) = (node.to_owned(), vec![0; PART]);
        Self { node, from, part, blocks: Blocks::default(), pods: Vec::new() }
    }

    /// Returns the next block; `None`: the end of the file.
    fn next(&mut self) -> anyhow::Result<Option<Block>> {
        let Self { node, from, part, blocks, .. } = self;
        loop {
            match blocks.next() {
                Ok(Some(block)) => return self.known(block).map(Some),
                Ok(None) => {}
                Err(Malformed(why)) => bail!("the packets of node {node} cannot be read: {why}"),
            }
            let read = from.read(part).context("cannot read a temporary file")?;
            match part.get(..read) {
                Some(bytes) if read > 0 => blocks.push(bytes),
                _ if blocks.is_within_a_block() => bail!("the packets of node {node} end within a block"),
                _ => return Ok(None),
            }
        }
    }

    /// Notes an interface, and refuses a packet of an unknown one.
    fn known(&mut self, block: Block) -> anyhow::Result<Block> {
        match &block {
            // The name of a pod's interface is `NAMESPACE/NAME NIC`.
            Block::Interface(of) => self.pods.push(of.name.split(' ').next().unwrap_or_default().to_owned()),
            Block::Packet(packet) => drop(self.pod(packet)?),
            Block::Statistics(_) => {}
        }
        Ok(block)
    }

    /// The pod of a packet.
    fn pod(&self, packet: &Packet) -> anyhow::Result<&str> {
        let pod = self.pods.get(packet.interface as usize);
        let Some(pod) = pod else {
            bail!("the packets of node {} cannot be read: one is of no interface", self.node)
        };
        Ok(pod)
    }
}

#[cfg(test)]
mod tests;
