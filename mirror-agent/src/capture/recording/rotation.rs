//! Rotating files; the newest ones are kept.
//!
//! Each file is complete: it begins with the present interfaces and ends with their statistics. [`store`](super::store)
//! calls it.

use std::{
    collections::VecDeque,
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use anyhow::bail;

use super::{Progress, Summary, interfaces::Interfaces, names::numbered, output::Output};

/// Maximum number of existing names to skip. Only another recording that began a file within the same second can have
/// created them.
const ATTEMPTS: u64 = 1000;

/// The files of a rotation.
#[derive(Debug)]
pub(super) struct Rotation {
    /// The path that the files' names are made from.
    path: PathBuf,
    /// Maximum size of a file in bytes, and maximum number of files.
    bytes: u64,
    most_files: usize,
    /// The number of the current file.
    number: u64,
    /// The current file.
    output: Output,
    /// Bytes of the packets in the current file.
    packet_bytes: u64,
    /// All kept files and their numbers of packets, the current one last.
    files: VecDeque<(PathBuf, u64)>,
}

impl Rotation {
    /// Begins the first file.
    pub(super) fn begin(
        path: &Path,
        bytes: u64,
        files: u32,
        interfaces: &Interfaces,
    ) -> anyhow::Result<Self> {
        let (number, first, mut output) = create(path, 0, interfaces.started_ns)?;
        output.append(&interfaces.preamble())?;
        let most_files = usize::try_from(files).unwrap_or(usize::MAX).max(1);
        let files = [(first, 0)].into();
        Ok(Self { path: path.to_owned(), bytes, most_files, number, output, packet_bytes: 0, files })
    }

    /// The current file, for blocks other than packets.
    pub(super) fn output(&mut self) -> &mut Output {
        &mut self.output
    }

    /// Adds a packet to the current file, or to the next one if it does not fit.
    pub(super) fn append(
        &mut self,
        block: &[u8],
        time_ns: u64,
        interfaces: &Interfaces,
    ) -> anyhow::Result<Progress> {
        let length = block.len() as u64;
        if self.packet_bytes > 0 && interfaces.file_bytes() + self.packet_bytes + length > self.bytes {
            self.next(time_ns, interfaces)?;
        }
        let progress = self.output.append(block)?;
        if progress == Progress::GoesOn {
            self.packet_bytes += length;
            if let Some((_, packets)) = self.files.back_mut() {
                *packets += 1;
            }
        }
        Ok(progress)
    }

    /// Ends the current file. `packets` counts the recording.
    pub(super) fn finish(
        mut self,
        interfaces: &Interfaces,
        packets: u64,
        ended_ns: u64,
    ) -> anyhow::Result<Summary> {
        let ended = self.end_file(interfaces, ended_ns);
        let unwritten = self.output.unwritten;
        self.leave_out(unwritten)?;
        ended?;
        Ok(Summary {
            packets: packets.saturating_sub(unwritten),
            kept: self.files.iter().map(|(_, packets)| packets).sum(),
            files: self.files.into_iter().map(|(path, _)| path).collect(),
            ..Summary::default()
        })
    }

    /// Subtracts packets that the current file did not accept, and removes the file if it has no others.
    fn leave_out(&mut self, unwritten: u64) -> anyhow::Result<()> {
        let Some((_, packets)) = self.files.back_mut().filter(|_| self.output.has_failed) else {
            return Ok(());
        };
        *packets = packets.saturating_sub(unwritten);
        if *packets > 0 || self.files.len() == 1 {
            return Ok(());
        }
        self.files.pop_back().map_or(Ok(()), |(empty, _)| remove(&empty))
    }

    /// Ends the current file, and begins the next one. The oldest file is removed first, so that the configured number
    /// of files is never exceeded.
    fn next(&mut self, time_ns: u64, interfaces: &Interfaces) -> anyhow::Result<()> {
        self.end_file(interfaces, time_ns)?;
        if self.files.len() >= self.most_files
            && let Some((oldest, _)) = self.files.pop_front()
        {
            remove(&oldest)?;
        }
        let (number, path, output) = create(&self.path, self.number, time_ns)?;
        (self.number, self.output, self.packet_bytes) = (number, output, 0);
        self.files.push_back((path, 0));
        self.output.append(&interfaces.preamble())?;
        Ok(())
    }

    fn end_file(&mut self, interfaces: &Interfaces, ended_ns: u64) -> anyhow::Result<()> {
        self.output.append(&interfaces.statistics(ended_ns))?;
        self.output.close()
    }
}

/// Creates the file with the next free number after this one. Its name is made from that of `of`.
pub(super) fn create(of: &Path, number: u64, begins_ns: u64) -> anyhow::Result<(u64, PathBuf, Output)> {
    let mut next = number + 1;
    loop {
        let path = numbered(of, next, begins_ns)?;
        match Output::create(&path) {
            Ok(output) => return Ok((next, path, output)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists && next - number < ATTEMPTS => next += 1,
            Err(error) => bail!("cannot create {}: {error}", path.display()),
        }
    }
}

/// Removes a file. It is not an error if the user has moved it away. After another error, to continue would fill up the
/// disk.
fn remove(path: &Path) -> anyhow::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            bail!("cannot remove {}, the oldest file: {error}", path.display())
        }
        _ => Ok(()),
    }
}
