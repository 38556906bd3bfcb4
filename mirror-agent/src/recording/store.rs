//! The storage of packets until they are in a file, for each [`Kept`].
//!
//! Called by [`recording`](super). It does not interpret the contents of a block.

use std::path::{Path, PathBuf};

use super::{
    Bound, Destination, Kept, Progress, RecordingError, interfaces::Interfaces, memory::Memory,
    output::Output, rotation::Rotation,
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
    Last { output: Output, memory: Memory, bytes: u64, newest: Newest },
    /// [`Kept::Files`].
    Files(Rotation),
}

/// The result of a recording.
#[derive(Debug)]
pub(super) struct Finished {
    /// Recorded packets, without those that a full disk did not accept.
    pub(super) packets: u64,
    /// Recorded packets that are in the files.
    pub(super) kept: u64,
    /// The files, the oldest first.
    pub(super) files: Vec<PathBuf>,
}

/// The age limit of packets.
#[derive(Debug)]
pub(super) struct Newest {
    /// The highest timestamp of a packet so far, in ns since the epoch.
    time_ns: u64,
    /// The maximum age of a packet, relative to it.
    span_ns: u64,
}

impl Store {
    /// Opens the file, and allocates the memory.
    pub(super) fn begin(
        destination: Destination,
        kept: Kept,
        interfaces: &Interfaces,
    ) -> Result<Self, RecordingError> {
        match (kept, destination) {
            (Kept::All, destination) => {
                let mut output = Output::open(destination)?;
                output.append(&interfaces.preamble())?;
                Ok(Self::All(output))
            }
            (Kept::First { bytes }, destination) => {
                Ok(Self::First { memory: memory(bytes)?, output: Output::open(destination)?, bytes })
            }
            (Kept::Last(bound), destination) => {
                let (bytes, span_ns) = match bound {
                    Bound::Bytes(bytes) => (bytes, u64::MAX),
                    Bound::Time(span) => (MAX_TIME_BYTES, u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)),
                };
                let newest = Newest { time_ns: 0, span_ns };
                Ok(Self::Last { memory: memory(bytes)?, output: Output::open(destination)?, bytes, newest })
            }
            (Kept::Files { bytes, files }, Destination::File(path)) => {
                Ok(Self::Files(Rotation::begin(&path, bytes, files, interfaces)?))
            }
            (Kept::Files { .. }, Destination::Stdout) => Err(RecordingError::NoName),
        }
    }

    /// Appends the description of an interface to the current file, if its beginning was written already.
    pub(super) fn describe(&mut self, description: &[u8]) -> Result<Progress, RecordingError> {
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
    ) -> Result<Progress, RecordingError> {
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
            Self::Last { memory, bytes, newest, .. } => {
                newest.time_ns = newest.time_ns.max(time_ns);
                memory.shrink_to(bytes.saturating_sub(length));
                memory.push(block);
                memory.forget_before(newest.time_ns.saturating_sub(newest.span_ns));
                Ok(Progress::GoesOn)
            }
            Self::Files(rotation) => rotation.append(block, time_ns, interfaces),
        }
    }

    /// Writes what need not wait for the end of the recording.
    pub(super) fn end_batch(&mut self) -> Result<Progress, RecordingError> {
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

    /// The bytes of the newest packets, and their maximum, if the recording keeps these.
    pub(super) fn use_of_memory(&self) -> Option<(u64, u64)> {
        match self {
            Self::Last { memory, bytes, .. } => Some((memory.len(), *bytes)),
            Self::All(_) | Self::First { .. } | Self::Files(_) => None,
        }
    }

    /// The newest packets, if the recording keeps these.
    pub(super) fn newest(&mut self) -> Option<(&mut Memory, &Output)> {
        match self {
            Self::Last { memory, output, .. } => Some((memory, output)),
            Self::All(_) | Self::First { .. } | Self::Files(_) => None,
        }
    }

    /// Writes the rest.
    pub(super) fn finish(
        mut self,
        interfaces: &Interfaces,
        packets: u64,
        ended_ns: u64,
    ) -> Result<Finished, RecordingError> {
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
        let unwritten = output.unwritten();
        Ok(Finished {
            packets: packets.saturating_sub(unwritten),
            kept: kept.saturating_sub(unwritten),
            files: output.path().map(Path::to_owned).into_iter().collect(),
        })
    }
}

fn memory(bytes: u64) -> Result<Memory, RecordingError> {
    Memory::with_room(bytes).map_err(|error| RecordingError::Memory { bytes, error })
}
