//! One pcapng of those of several recorders.
//!
//! These are whole files, so the packets need not wait for a clock as in `tail`: at each step there is a packet of each file
//! that has one left, and the earliest goes first. A file is read as it is needed. `save` calls it.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    time::Duration,
};

use anyhow::{Context as _, bail};

use crate::tail::{
    blocks::{Block, Blocks, Malformed},
    combined::{Combined, Summary},
    merge::{Bounds, Merge, StreamId},
};

/// The packets that wait are one for each file.
const BOUNDS: Bounds = Bounds { hold: Duration::MAX, bytes: usize::MAX };
/// Bytes that are read at a time.
const PART: usize = 64 << 10;

/// What is in the file.
#[derive(Debug, Default)]
pub(super) struct Saved {
    /// The packets of each pod on each node.
    pub(super) pods: BTreeMap<(String, String), u64>,
    /// What was counted.
    pub(super) counted: Summary,
}

/// How many packets there are in the file of a node.
///
/// # Errors
///
/// It cannot be understood to its end.
pub(super) fn count(node: &str, from: impl Read) -> anyhow::Result<u64> {
    let (mut stream, mut packets) = (Stream::new(node, from), 0);
    while let Some(block) = stream.next()? {
        packets += u64::from(matches!(block, Block::Packet(_)));
    }
    Ok(packets)
}

/// Writes the packets of these nodes in the order of their times. `now_ns` counts from 1970.
///
/// # Errors
///
/// A file cannot be read or understood to its end, or the output takes no more.
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

/// The files on their way to one.
struct Merging<R> {
    streams: BTreeMap<StreamId, Stream<R>>,
    combined: Combined,
    merge: Merge<(StreamId, Vec<u8>)>,
    /// Blocks that are not written yet.
    pending: Vec<u8>,
    saved: Saved,
}

impl<R: Read> Merging<R> {
    /// Reads on to the next packet of a file, or to its end.
    fn advance(&mut self, id: StreamId) -> anyhow::Result<()> {
        let Self { streams, combined, merge, pending, saved } = self;
        let Some(stream) = streams.get_mut(&id) else { return Ok(()) };
        while let Some(block) = stream.next()? {
            match block {
                Block::Interface(description) => {
                    combined.interface(id, &stream.node, &description, pending);
                    // An interface of a pod has the name `NAMESPACE/NAME NIC`.
                    let pod = description.name.split(' ').next().unwrap_or_default();
                    stream.pods.push(pod.to_owned());
                }
                Block::Packet(packet) => {
                    let (time_ns, pod) = (packet.time_ns, stream.pods.get(packet.interface as usize));
                    let pod = pod.cloned().unwrap_or_default();
                    let block = combined.packet(id, packet);
                    let block =
                        block.with_context(|| format!("node {}: a packet of no interface", stream.node))?;
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

/// The file of a node, as it is read.
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

    /// The next block; `None`: there are no more.
    fn next(&mut self) -> anyhow::Result<Option<Block>> {
        let Self { node, from, part, blocks, .. } = self;
        loop {
            match blocks.next() {
                Ok(Some(block)) => return Ok(Some(block)),
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
}

#[cfg(test)]
mod tests;
