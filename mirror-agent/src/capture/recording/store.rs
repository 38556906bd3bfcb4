//! The storage of packets until they are in a file, for each [`Kept`].
//!
//! Called by [`recording`](super). It does not interpret the contents of a block.

use std::path::PathBuf;

use super::{
    Bound, Kept, Progress, Sink, Summary, interfaces::Interfaces, memory::Memory, output::Output,
    rotation::Rotation,
};

/// Maximum size of a file of [`Bound::Time`], which has no bound in bytes: a quarter of the memory limit of the agent's
/// container in the chart, in which a recording runs as a second `mirror-agent` process.
pub const MAX_TIME_BYTES: u64 = 64 << 20;

/// The storage of the blocks.
#[derive(Debug)]
pub(super) enum Store {
    /// [`Kept::All`].
    All(Output),
    /// [`Kept::First`].
    First { output: Output, memory: Memory, bytes: u64 },
    /// [`Kept::Last`].
    Last {
        output: Output,
        memory: Memory,
        bytes: u64,
        /// The highest timestamp of a packet so far, in ns since the epoch.
        newest_ns: u64,
        /// The maximum age of a packet, relative to it.
        span_ns: u64,
    },
    /// [`Kept::Files`].
    Files(Rotation),
}

impl Store {
    /// Opens the output, and allocates the memory.
    pub(super) fn begin(to: Sink, kept: Kept, interfaces: &Interfaces) -> anyhow::Result<Self> {
        match kept {
            Kept::All => {
                let mut output = Output::open(to)?;
                output.append(&interfaces.preamble())?;
                Ok(Self::All(output))
            }
            Kept::First { bytes } => {
                Ok(Self::First { memory: Memory::with_room(bytes)?, output: Output::open(to)?, bytes })
            }
            Kept::Last(bound) => {
                let (bytes, span_ns) = match bound {
                    Bound::Bytes(bytes) => (bytes, u64::MAX),
                    Bound::Time(span) => (MAX_TIME_BYTES, u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)),
                };
                let (memory, output) = (Memory::with_room(bytes)?, Output::open(to)?);
                Ok(Self::Last { output, memory, bytes, newest_ns: 0, span_ns })
            }
            Kept::Files { bytes, files } => {
                let path = if let Sink::Path(path) = to { path } else { PathBuf::new() };
                Ok(Self::Files(Rotation::begin(&path, bytes, files, interfaces)?))
            }
        }
    }

    /// Appends the description of an interface to the current file, if its beginning was written already.
    pub(super) fn describe(&mut self, description: &[u8]) -> anyhow::Result<Progress> {
        match self {
            Self::All(output) => output.append(description),
            Self::First { .. } | Self::Last { .. } => Ok(Progress::GoesOn),
            Self::Files(rotation) => rotation.output().append(description),
        }
    }

    /// Stores the block of a packet. [`Progress::Complete`]: it was not stored.
    pub(super) fn keep(
        &mut self,
        block: &[u8],
        time_ns: u64,
        interfaces: &Interfaces,
    ) -> anyhow::Result<Progress> {
        let length = interfaces.file_bytes() + block.len() as u64;
        match self {
            Self::All(output) => output.append(block),
            Self::First { memory, bytes, .. } => {
                if length + memory.len() > *bytes {
                    return Ok(Progress::Complete);
                }
                memory.push(block);
                Ok(Progress::GoesOn)
            }
            Self::Last { memory, bytes, newest_ns, span_ns, .. } => {
                *newest_ns = time_ns.max(*newest_ns);
                memory.shrink_to(bytes.saturating_sub(length));
                memory.push(block);
                memory.forget_before(newest_ns.saturating_sub(*span_ns));
                Ok(Progress::GoesOn)
            }
            Self::Files(rotation) => rotation.append(block, time_ns, interfaces),
        }
    }

    /// Writes what need not wait for the end of the recording.
    pub(super) fn end_batch(&mut self) -> anyhow::Result<Progress> {
        match self {
            // `First` and `Last` have nothing to write yet, but the reader of a pipe may have closed it.
            Self::All(output) | Self::First { output, .. } | Self::Last { output, .. } => output.flush(),
            Self::Files(rotation) => rotation.output().flush(),
        }
    }

    /// The output. That of a rotation is never a pipe.
    pub(super) fn output(&self) -> Option<&Output> {
        match self {
            Self::All(output) | Self::First { output, .. } | Self::Last { output, .. } => Some(output),
            Self::Files(_) => None,
        }
    }

    /// From now on, writes to a pipe wait for its reader.
    pub(super) fn wait_for_reader(&mut self) {
        match self {
            Self::All(output) | Self::First { output, .. } | Self::Last { output, .. } => {
                output.wait_for_reader();
            }
            Self::Files(_) => {}
        }
    }

    /// The newest packets, the output, and the maximum of the packets' bytes, if the recording keeps these.
    pub(super) fn newest(&mut self) -> Option<(&mut Memory, &Output, u64)> {
        match self {
            Self::Last { memory, output, bytes, .. } => Some((memory, output, *bytes)),
            Self::All(_) | Self::First { .. } | Self::Files(_) => None,
        }
    }

    /// Writes the rest.
    pub(super) fn finish(
        mut self,
        interfaces: &Interfaces,
        packets: u64,
        ended_ns: u64,
    ) -> anyhow::Result<Summary> {
        self.wait_for_reader();
        let (mut output, kept) = match self {
            Self::All(output) => (output, packets),
            Self::First { mut output, mut memory, .. } | Self::Last { mut output, mut memory, .. } => {
                output.write(&interfaces.preamble())?;
                output.write(memory.as_blocks())?;
                (output, memory.packets())
            }
            Self::Files(rotation) => return rotation.finish(interfaces, packets, ended_ns),
        };
        output.append(&interfaces.statistics(ended_ns))?;
        output.close()?;
        let unwritten = output.unwritten;
        Ok(Summary {
            packets: packets.saturating_sub(unwritten),
            kept: kept.saturating_sub(unwritten),
            files: output.path.into_iter().collect(),
            ..Summary::default()
        })
    }
}
