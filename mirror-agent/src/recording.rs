//! Keeps the packets of a ring buffer: in one file, in a rotation of files, or on standard output, as pcapng.
//!
//! ```text
//! record ─► frames (mirror_core::frame) ─► block (mirror_core::pcapng) ─► store ─┬─ memory   (pure)
//! source ─► interfaces (pure) ─────────────────────────────────────────────────► ├─ rotation ─► names (pure)
//!                                                                                └─► output  (the file) ─► pipe
//! ```
//!
//! `cmd::tail` and `cmd::capture` call it, from one thread: a batch of records, then [`Recorder::end_batch`]. It opens
//! and writes files, and blocks while it does. It never waits for the reader of a pipe before the end of the recording:
//! what the reader does not take stays in memory, and the caller hands over no more records while
//! [`Recorder::is_stalled`]. It reads no ring, knows no pods, and decides nothing about a packet. It reads no clock
//! either, but for [`Clock::now`].
//!
//! Packets keep the order in which they come, although the times of different CPUs can be a little out of order in the
//! ring. The order of a flow is that of the ring, and sorting by time could break it.
//!
//! The memory of a recorder is bounded: by [`Kept`], by some MiB of descriptions, and by 64 KiB of blocks that are not
//! written yet, with the segments of one record.

use std::{collections::TryReserveError, fmt, io, os::fd::BorrowedFd, path::PathBuf, time::Duration};

use mirror_common::{
    stream::{MAX_CAPTURE, RecordHead},
    verdict,
};
use mirror_core::{
    frame::{Frame, VlanTag, Wire},
    pcapng::{Direction, Packet},
};
use nix::time::{ClockId, clock_gettime};

use self::{
    interfaces::Interfaces,
    output::Output,
    store::{Finished, Store},
};

mod interfaces;
mod memory;
mod names;
mod output;
mod pipe;
mod rotation;
mod snapshot;
mod store;

pub use self::{snapshot::Snapshot, store::MAX_TIME_BYTES};

/// Where and how the packets are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Where they go.
    pub destination: Destination,
    /// Which of them are kept.
    pub kept: Kept,
    /// Frames stay as the kernel has them: super-frames whole, checksums unfinished. Otherwise they become frames as on
    /// a wire ([`mirror_core::frame`]). A VLAN tag is put into the bytes in both cases.
    pub super_frames: bool,
    /// The recording is complete after so many packets. The segments of a super-frame count, and so do packets that
    /// have made room for newer ones.
    pub max_packets: Option<u64>,
}

/// Where packets go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// Standard output.
    Stdout,
    /// A file with this path. [`Kept::Files`] makes the names of its files from it. Otherwise the file is replaced when
    /// the recording begins. Only its owner may read it (mode 0600), because packets are secrets.
    File(PathBuf),
}

/// Which packets are kept, and where until they are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// All of them. They are written at the end of each batch.
    All,
    /// The first ones, in memory. They are written at the end. The recording is complete at the first packet that does
    /// not fit.
    First {
        /// Most bytes of the file.
        bytes: u64,
    },
    /// The newest ones, in memory. They are written at the end.
    Last(Bound),
    /// The newest files of a rotation, as with `dumpcap -b`. All packets are written at the end of each batch. The
    /// files of `web.pcapng` are called `web_00001_20261122T051500.pcapng` and so on: their number, and the time in UTC
    /// at which they begin. A file that exists already stays as it is, and the number after it is taken.
    Files {
        /// Most bytes of a file. A file always has one packet, and the descriptions of all interfaces.
        bytes: u64,
        /// How many files are kept. The oldest one is removed when there would be more. 0 counts as 1.
        files: u32,
    },
}

/// What the newest packets are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    /// Those that fit into a file of so many bytes. The newest packet is always kept.
    Bytes(u64),
    /// Those that are at most so much older than the newest one, by the times of their records. They are also bounded
    /// by [`MAX_TIME_BYTES`].
    Time(Duration),
}

/// One moment on two clocks. The times of all records are converted with the one at which the recording began, so a
/// step of the wall clock during a recording is not in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clock {
    /// Nanoseconds since the epoch.
    pub wall_ns: u64,
    /// Nanoseconds of `CLOCK_MONOTONIC`.
    pub monotonic_ns: u64,
}

impl Clock {
    /// This moment.
    pub fn now() -> io::Result<Self> {
        let read = |clock| Ok::<_, io::Error>(Duration::from(clock_gettime(clock)?).as_nanos() as u64);
        Ok(Self { wall_ns: read(ClockId::CLOCK_REALTIME)?, monotonic_ns: read(ClockId::CLOCK_MONOTONIC)? })
    }

    /// Nanoseconds since the epoch at another time of `CLOCK_MONOTONIC`.
    fn wall_at(self, monotonic_ns: u64) -> u64 {
        self.wall_ns.saturating_add_signed(monotonic_ns.wrapping_sub(self.monotonic_ns) as i64)
    }
}

/// What the number of a session ([`RecordHead::serial`]) stands for: an interface of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Source {
    /// The number of the session.
    pub serial: u32,
    /// The name of the interface, such as `shop/web eth0`.
    pub name: String,
    /// What it is.
    pub description: String,
    /// The filter of the session. What becomes of a super-frame is left out if it does not match, where the filter can say
    /// something else of the super-frame itself ([`mirror_core::filter::differs_on_segments`]).
    pub filter: Option<String>,
    /// Anything else.
    pub comment: Option<String>,
}

/// What was counted for a session since the recording began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// The packets that it has matched.
    pub matched: u64,
    /// Those of them for which the ring had no room.
    pub lost: u64,
    /// Those of them that a rate or a budget has kept out.
    pub limited: u64,
}

/// Super-frames that are not in the file as they were on the wire.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flaws {
    /// Those that are longer than a record, and the bytes of them that are missing.
    pub cut: (u64, u64),
    /// Those that stay whole, because they would have too many segments.
    pub whole: u64,
}

impl Flaws {
    /// What is wrong with the frames of a record, for the file; nothing with most of them. A length that was asked for is
    /// no flaw.
    fn of(head: &RecordHead, too_many: Option<usize>) -> (Self, Option<String>) {
        let missing =
            if head.captured >= MAX_CAPTURE { u64::from(head.len - head.captured.min(head.len)) } else { 0 };
        let flaws = Self { cut: (u64::from(missing > 0), missing), whole: too_many.is_some().into() };
        let cut = (missing > 0)
            .then(|| format!("the last {missing} of the {} bytes of its super-frame are missing", head.len));
        let whole = too_many
            .map(|segments| format!("a super-frame of {segments} segments of {} bytes", head.gso_size));
        (flaws, cut.or(whole))
    }

    fn add(&mut self, more: Self) {
        self.cut.0 += more.cut.0;
        self.cut.1 += more.cut.1;
        self.whole += more.whole;
    }
}

impl fmt::Display for Flaws {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cut: (cut, bytes), whole } = self;
        write!(
            f,
            "{cut} super-frames were longer than a record and lack {bytes} bytes, and {whole} are whole because of their \
             many segments"
        )
    }
}

/// Whether a recording takes more packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// It does.
    GoesOn,
    /// It does not: it is full, it has failed, or its reader has closed the pipe. The next step is
    /// [`Recorder::finish`].
    Complete,
}

/// What has become of a recording.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Summary {
    /// Packets that were recorded. The segments of a super-frame count, and what a full disk did not take does not.
    pub packets: u64,
    /// Those of them that have not made room for newer ones.
    pub kept: u64,
    /// Records of sessions that have no [`Source`]. They are in no file.
    pub unknown: u64,
    /// Super-frames that are not in the file as they were on the wire.
    pub flawed: Flaws,
    /// The files, the oldest first. Standard output is none.
    pub files: Vec<PathBuf>,
}

/// Why a recording cannot begin or go on.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// A file cannot be created.
    #[error("cannot create {}: {error}", path.display())]
    Create {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// A file or standard output takes no more. What was written before stays readable.
    #[error("cannot write to {place}: {error}")]
    Write {
        /// The path of the file, or "standard output".
        place: String,
        /// The reason.
        error: io::Error,
    },
    /// The oldest file of a rotation cannot be removed. Without that the disk would fill up.
    #[error("cannot remove {}, the oldest file: {error}", path.display())]
    Remove {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// [`Kept::Files`] without a name that it could make the files' names from.
    #[error("several files need the path of a file to make their names from, as in web.pcapng")]
    NoName,
    /// The packets would not fit into the memory.
    #[error("cannot get {bytes} bytes of memory for packets: {error}")]
    Memory {
        /// The bytes that [`Kept`] asks for.
        bytes: u64,
        /// The reason.
        error: TryReserveError,
    },
}

/// So many interfaces without packets cost little.
const SOME_INTERFACES: usize = 256;

/// A recording.
#[derive(Debug)]
pub struct Recorder {
    started: Clock,
    super_frames: bool,
    max_packets: u64,
    wire: Wire,
    interfaces: Interfaces,
    store: Store,
    /// The block of one packet. It is here so that its memory is used again.
    block: Vec<u8>,
    packets: u64,
    unknown: u64,
    progress: Progress,
    /// Why the recording has failed, until the caller is told.
    failure: Option<RecordingError>,
    /// How many interfaces there are before unused ones are looked for.
    most_interfaces: usize,
    /// The number of the file that was saved last.
    saved: u64,
}

impl Recorder {
    /// Begins a recording. The file is created now, so that a wrong path does not come out at the end. `application` is
    /// the program's name and version, for the file.
    pub fn begin(plan: Plan, started: Clock, application: &str) -> Result<Self, RecordingError> {
        let interfaces = Interfaces::new(application, started.wall_ns);
        let store = Store::begin(plan.destination, plan.kept, &interfaces)?;
        let max_packets = plan.max_packets.unwrap_or(u64::MAX);
        Ok(Self {
            started,
            super_frames: plan.super_frames,
            max_packets,
            wire: Wire::default(),
            interfaces,
            store,
            block: Vec::new(),
            packets: 0,
            unknown: 0,
            progress: if max_packets == 0 { Progress::Complete } else { Progress::GoesOn },
            failure: None,
            most_interfaces: SOME_INTERFACES,
            saved: 0,
        })
    }

    /// Adds an interface, at any time. The current file and all later ones have it. If the bytes of a file are bounded,
    /// it takes room from the packets that come after it. A number that has a source already keeps it. When all
    /// descriptions together have 8 MiB, further sources are left out, and their records are [`Summary::unknown`].
    pub fn add_source(&mut self, source: &Source) {
        let description = self.interfaces.add(source);
        let described = self.store.describe(description);
        self.note(described);
    }

    /// Notes the newest counters of a session. The file has the last ones that were noted before its end.
    pub fn note_counters(&mut self, serial: u32, counters: Counters) {
        self.interfaces.note_counters(serial, counters);
    }

    /// Records a frame. `bytes` are what follows the head; what is behind [`RecordHead::captured`] is ignored. The next
    /// [`end_batch`](Self::end_batch) says why if a failure completes the recording.
    #[must_use]
    pub fn record(&mut self, head: &RecordHead, bytes: &[u8]) -> Progress {
        if self.progress == Progress::GoesOn {
            let kept = self.keep(head, bytes);
            self.note(kept);
        }
        self.progress
    }

    /// Writes what is due, as far as the reader of a pipe takes it. The recording is complete if that reader is gone,
    /// also if nothing is due.
    pub fn end_batch(&mut self) -> Result<Progress, RecordingError> {
        let written = self.store.end_batch();
        self.note(written);
        self.failure.take().map_or(Ok(self.progress), Err)
    }

    /// The pipe or socket that packets go to. When it takes more, it is time for [`end_batch`](Self::end_batch).
    pub fn pipe(&self) -> Option<BorrowedFd<'_>> {
        self.store.output()?.pipe()
    }

    /// Whether blocks wait for the reader of the pipe.
    pub fn is_pending(&self) -> bool {
        self.store.output().is_some_and(Output::is_pending)
    }

    /// Whether so many blocks wait for the reader of the pipe that records should stay where they are.
    pub fn is_stalled(&self) -> bool {
        self.store.output().is_some_and(Output::is_stalled)
    }

    /// The end is near: from now on, each write waits for the reader of the pipe. It is a failure if the reader takes
    /// nothing for some seconds.
    pub fn wait_for_reader(&mut self) {
        self.store.wait_for_reader();
    }

    /// Writes the rest, and the counters of each interface. It [waits](Self::wait_for_reader) for the reader of a pipe.
    /// `ended_ns` is the end of the recording on `CLOCK_MONOTONIC`. After a failure nothing more is written: the failure is told here, if
    /// [`end_batch`](Self::end_batch) has not told it.
    pub fn finish(self, ended_ns: u64) -> Result<Summary, RecordingError> {
        let finished = self.store.finish(&self.interfaces, self.packets, self.started.wall_at(ended_ns));
        if let Some(failure) = self.failure {
            return Err(failure);
        }
        let Finished { packets, kept, files } = finished?;
        Ok(Summary { packets, kept, unknown: self.unknown, flawed: self.interfaces.flaws(), files })
    }

    fn keep(&mut self, head: &RecordHead, bytes: &[u8]) -> Result<Progress, RecordingError> {
        let Some(interface) = self.interfaces.of(head.serial) else {
            self.unknown += 1;
            return Ok(Progress::GoesOn);
        };
        let frame = Frame {
            bytes: bytes.get(..head.captured as usize).unwrap_or(bytes),
            len: head.len,
            gso_size: head.gso_size,
            vlan: (head.vlan_protocol != 0)
                .then_some(VlanTag { tpid: head.vlan_protocol, tci: head.vlan_tci }),
        };
        let time_ns = self.started.wall_at(head.time_ns);
        let direction = direction(head.direction);
        let mut frames = if self.super_frames { self.wire.tagged(&frame) } else { self.wire.frames(&frame) };
        let (flaws, mut comment) = Flaws::of(head, frames.too_many());
        if flaws != Flaws::default() {
            self.interfaces.note_flaws(interface, flaws);
        }
        let filter = if head.gso_size > 0 { self.interfaces.filter(interface) } else { None };
        while let Some(frame) = frames.next_frame() {
            let (bytes, len) = (frame.bytes, frame.len);
            if filter.as_ref().is_some_and(|filter| !filter.matches(bytes, len)) {
                continue;
            }
            self.block.clear();
            // At the first frame alone: a comment can be as long as a short frame.
            let comment = comment.take();
            Packet { interface, time_ns, bytes, len, direction, lost: None, comment: comment.as_deref() }
                .write(&mut self.block);
            if self.store.keep(&self.block, time_ns, &self.interfaces)? == Progress::Complete {
                return Ok(Progress::Complete);
            }
            self.packets += 1;
            if self.packets >= self.max_packets {
                return Ok(Progress::Complete);
            }
        }
        Ok(Progress::GoesOn)
    }

    /// Notes how far the recording is.
    fn note(&mut self, outcome: Result<Progress, RecordingError>) {
        match outcome {
            Ok(Progress::GoesOn) => {}
            Ok(Progress::Complete) => self.progress = Progress::Complete,
            Err(failure) => {
                self.progress = Progress::Complete;
                self.failure = Some(failure);
            }
        }
    }
}

/// The direction as an interface has it. That of a record is seen from the pod, whose interface this is.
fn direction(direction: u16) -> Option<Direction> {
    const INGRESS: u32 = verdict::Direction::Ingress as u32;
    const EGRESS: u32 = verdict::Direction::Egress as u32;
    match direction.into() {
        INGRESS => Some(Direction::Inbound),
        EGRESS => Some(Direction::Outbound),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
