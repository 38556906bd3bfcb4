//! Writes the packets of a ring buffer as pcapng: to one file, to rotating files, or to standard output.
//!
//! ```text
//! record ─► frames (mirror_capture::frame) ─► block (mirror_capture::pcapng) ─► store ─┬─ memory   (pure)
//! session ─► interfaces (pure) ────────────────────────────────────────────────► ├─ rotation ─► names (pure)
//!                                                                                └─► output  (the file) ─► pipe
//! ```
//!
//! Called by `tail` from one thread: a batch of records, then [`Recorder::end_batch`]. It opens
//! and writes files, which blocks. It does not wait for the reader of a pipe before the end of the recording: unread
//! blocks stay in memory, and the caller passes no more records while [`Recorder::is_stalled`]. It reads no ring, knows
//! no pods, decides nothing about packets, and reads the clock in [`Clock::now`] only.
//!
//! Packets keep the order of the ring, although timestamps of different CPUs can be slightly out of order. The order
//! within a flow is that of the ring, and sorting by time could break it.
//!
//! The memory of a recorder is bounded: by [`Kept`], by some MiB of interface descriptions, and by the blocks that
//! are not written yet. The unwritten blocks have at most 64 KiB plus the blocks of one call: the segments of a
//! record, a note or a block of the past, the descriptions of new interfaces, or the counters of all interfaces.

use std::{fmt, fs::File, io, os::fd::BorrowedFd, path::PathBuf, time::Duration};

use mirror_capture::{
    frame::{Frame, VlanTag, Wire},
    pcapng::{Direction, Interface, Packet},
};
use mirror_common::{
    stream::{MAX_CAPTURE, RecordHead},
    verdict,
};
use nix::time::{ClockId, clock_gettime};

use self::{interfaces::Interfaces, output::Output, store::Store};

mod interfaces;
mod memory;
mod names;
mod output;
mod pipe;
mod rotation;
mod snapshot;
mod store;

pub use self::{
    snapshot::{Excerpt, Snapshot},
    store::MAX_TIME_BYTES,
};

/// Destination and retention of a recording.
#[derive(Debug)]
pub struct Plan {
    /// The destination.
    pub output: Sink,
    /// Which packets are kept.
    pub kept: Kept,
    /// Frames stay as in the kernel: super-frames whole, checksums unfinished. Otherwise they become frames as on a
    /// wire ([`mirror_capture::frame`]). A VLAN tag is put into the bytes in both cases.
    pub super_frames: bool,
    /// The recording is complete after this number of packets. The segments of a super-frame count, and so do packets
    /// that were replaced by newer ones.
    pub max_packets: Option<u64>,
    /// Free text for the beginning of the file.
    pub comment: Option<String>,
}

/// The destination of a recording.
#[derive(Debug)]
pub enum Sink {
    /// A file. [`Kept::Files`] derives the names of its files from it. Otherwise an existing file is replaced when the
    /// recording begins. Its mode is 0600, because packets are confidential.
    Path(PathBuf),
    /// Standard output.
    Stdout,
    /// The open end of a pipe.
    Pipe(File),
}

/// Which packets are kept, and where they are until they are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// All packets. They are written at the end of each batch.
    All,
    /// The first packets, in memory. They are written at the end. The recording is complete at the first packet that
    /// does not fit.
    First {
        /// Maximum size of the file in bytes.
        bytes: u64,
    },
    /// The newest packets, in memory. They are written at the end.
    Last(Bound),
    /// The newest files of a rotation, as with `dumpcap -b`. All packets are written at the end of each batch. The
    /// files of `web.pcapng` are named `web_00001_20261122T051500.pcapng` and so on, after their number and the UTC
    /// time of their start. An existing file is not overwritten: its number is skipped.
    Files {
        /// Maximum size of a file in bytes. A file always has at least one packet, and the descriptions of all
        /// interfaces.
        bytes: u64,
        /// Number of files to keep; the oldest one is removed when there would be more. 0 counts as 1.
        files: u32,
    },
}

/// The bound that defines the newest packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    /// The packets that fit into a file of this many bytes. The newest packet is always kept.
    Bytes(u64),
    /// The packets that are at most this much older than the newest one, by the timestamps of their records. Also
    /// bounded by [`MAX_TIME_BYTES`].
    Time(Duration),
}

/// One moment on two clocks. All timestamps are converted with the moment at which the recording began, so a step of
/// the wall clock during a recording has no effect on the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clock {
    /// Nanoseconds since the epoch.
    pub wall_ns: u64,
    /// Nanoseconds of `CLOCK_MONOTONIC`.
    pub monotonic_ns: u64,
}

impl Clock {
    /// The present moment: the closest of three pairs of readings, because this thread can lose its CPU between two.
    pub fn now() -> io::Result<Self> {
        let read = |clock| Ok::<_, io::Error>(Duration::from(clock_gettime(clock)?).as_nanos() as u64);
        let pair = || {
            let before_ns = read(ClockId::CLOCK_MONOTONIC)?;
            let wall_ns = read(ClockId::CLOCK_REALTIME)?;
            let monotonic_ns = read(ClockId::CLOCK_MONOTONIC)?;
            Ok::<_, io::Error>((monotonic_ns - before_ns, Self { wall_ns, monotonic_ns }))
        };
        let (mut apart_ns, mut closest) = pair()?;
        for _ in 0..2 {
            let (other_ns, other) = pair()?;
            if other_ns < apart_ns {
                (apart_ns, closest) = (other_ns, other);
            }
        }
        Ok(closest)
    }

    /// Converts a time of `CLOCK_MONOTONIC` to nanoseconds since the epoch.
    fn wall_at(self, monotonic_ns: u64) -> u64 {
        self.wall_ns.saturating_add_signed(monotonic_ns.wrapping_sub(self.monotonic_ns) as i64)
    }
}

/// The counters of a session since the recording began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Packets that the session matched.
    pub matched: u64,
    /// Matched packets for which the ring had no room.
    pub lost: u64,
    /// Matched packets that a rate or a budget refused.
    pub limited: u64,
}

/// Super-frames that are not in the file as they were on the wire.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flaws {
    /// Super-frames longer than a record, and the number of their missing bytes.
    pub cut: (u64, u64),
    /// Super-frames that stay whole, because they would have too many segments.
    pub whole: u64,
}

impl Flaws {
    /// The flaws of a record's frames, as a comment for the file; `None` for most records. A snap length that was
    /// configured is no flaw.
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
    /// Further packets are accepted.
    GoesOn,
    /// No further packets: the recording is full, it failed, or its reader closed the pipe. The next step is
    /// [`Recorder::finish`].
    Complete,
}

/// The result of a recording.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Summary {
    /// Recorded packets. The segments of a super-frame count; packets that a full disk did not take do not.
    pub packets: u64,
    /// Recorded packets that were not replaced by newer ones.
    pub kept: u64,
    /// Records of sessions without an interface. They are in no file.
    pub unknown: u64,
    /// Super-frames that are not in the file as they were on the wire.
    pub flawed: Flaws,
    /// The files, the oldest first; empty for standard output.
    pub files: Vec<PathBuf>,
}

impl Summary {
    /// The sentences about packets that are not in the files, or not as they were on the wire.
    pub fn warnings(&self) -> Vec<String> {
        let unknown =
            || format!("{} packets of sessions that ended at once are not in the file", self.unknown);
        let unknown = (self.unknown > 0).then(unknown);
        let flawed = (self.flawed != Flaws::default()).then(|| self.flawed.to_string());
        unknown.into_iter().chain(flawed).collect()
    }
}

/// The types of blocks.
const SECTION: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const PACKET: u32 = 6;
/// Up to this number of interfaces, those without packets are not removed: they cost little.
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
    /// The block of one packet. Kept here to reuse its memory.
    block: Vec<u8>,
    packets: u64,
    unknown: u64,
    progress: Progress,
    /// The failure of the recording, until it is returned to the caller.
    failure: Option<anyhow::Error>,
    /// Number of interfaces at which unused ones are removed next.
    most_interfaces: usize,
    /// The number of the newest snapshot file.
    saved: u64,
}

impl Recorder {
    /// Begins a recording. Creates the file now, so that a wrong path is reported at once and not at the end.
    /// `application` is the program's name and version, for the file.
    pub fn begin(plan: Plan, started: Clock, application: &str) -> anyhow::Result<Self> {
        let interfaces = Interfaces::new(application, plan.comment.as_deref(), started.wall_ns);
        let store = Store::begin(plan.output, plan.kept, &interfaces)?;
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

    /// Adds the interface of a session ([`RecordHead::serial`]), at any time. The current file and all later ones contain
    /// it. If the size of a file is bounded, the description reduces the room for later packets. A serial that has an
    /// interface already keeps it. When the descriptions reach 8 MiB, further interfaces are ignored, and their records
    /// are [`Summary::unknown`].
    ///
    /// The segments of a super-frame are filtered again if the filter can give another answer for them than for the
    /// super-frame itself ([`mirror_core::filter::differs_on_segments`]).
    pub fn add_interface(&mut self, serial: u32, interface: &Interface) {
        let description = self.interfaces.add(serial, interface);
        let described = self.store.describe(description);
        self.note(described);
    }

    /// Appends a note, or, before any interface is added, a block of another recording: the packets of the past, their
    /// interfaces and counters. Only for [`Kept::All`].
    pub fn append(&mut self, block: &[u8]) -> anyhow::Result<Progress> {
        match block.first_chunk().map(|kind| u32::from_le_bytes(*kind)) {
            Some(SECTION) | None => return Ok(self.progress),
            Some(INTERFACE) => self.interfaces.skip(),
            Some(PACKET) => self.packets += 1,
            Some(_) => {}
        }
        let described = self.store.describe(block);
        self.note(described);
        self.failure.take().map_or(Ok(self.progress), Err)
    }

    /// Writes the counters of each interface so far, at this time of `CLOCK_MONOTONIC`. Only for [`Kept::All`].
    pub fn count(&mut self, now_ns: u64) -> anyhow::Result<Progress> {
        let counters = self.interfaces.statistics(self.started.wall_at(now_ns));
        self.append(&counters)
    }

    /// Notes the newest counters of a session. A file contains the last ones that were noted before its end.
    pub fn note_counters(&mut self, serial: u32, counters: Counters) {
        self.interfaces.note_counters(serial, counters);
    }

    /// Records a frame. `bytes` follow the head; bytes beyond [`RecordHead::captured`] are ignored. If a failure
    /// completes the recording, the next [`end_batch`](Self::end_batch) returns it.
    #[must_use]
    pub fn record(&mut self, head: &RecordHead, bytes: &[u8]) -> Progress {
        if self.progress == Progress::GoesOn {
            let kept = self.keep(head, bytes);
            self.note(kept);
        }
        self.progress
    }

    /// Writes what is due, as far as the reader of a pipe accepts it. The recording is complete if that reader closed
    /// the pipe, even if nothing is due.
    pub fn end_batch(&mut self) -> anyhow::Result<Progress> {
        let written = self.store.end_batch();
        self.note(written);
        self.failure.take().map_or(Ok(self.progress), Err)
    }

    /// The pipe or socket of the output. When it is writable, [`end_batch`](Self::end_batch) can make progress.
    pub fn pipe(&self) -> Option<BorrowedFd<'_>> {
        self.store.output()?.pipe()
    }

    /// Whether blocks wait for the reader of the pipe.
    pub fn is_pending(&self) -> bool {
        self.store.output().is_some_and(Output::is_pending)
    }

    /// Whether the buffer of blocks for the reader of the pipe is full, so that the caller should leave records in the
    /// ring.
    pub fn is_stalled(&self) -> bool {
        self.store.output().is_some_and(Output::is_stalled)
    }

    /// From now on, each write waits for the reader of the pipe. The recording fails if the reader takes nothing for
    /// some seconds. Called near the end of the recording.
    pub fn wait_for_reader(&mut self) {
        self.store.wait_for_reader();
    }

    /// Writes the rest, and the counters of each interface. It [waits](Self::wait_for_reader) for the reader of a pipe.
    /// `ended_ns` is the end of the recording on `CLOCK_MONOTONIC`. After a failure nothing more is written, and the
    /// failure is returned unless [`end_batch`](Self::end_batch) has returned it already.
    pub fn finish(self, ended_ns: u64) -> anyhow::Result<Summary> {
        let finished = self.store.finish(&self.interfaces, self.packets, self.started.wall_at(ended_ns));
        if let Some(failure) = self.failure {
            return Err(failure);
        }
        Ok(Summary { unknown: self.unknown, flawed: self.interfaces.flaws, ..finished? })
    }

    fn keep(&mut self, head: &RecordHead, bytes: &[u8]) -> anyhow::Result<Progress> {
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
            // On the first frame only: a comment can be as long as a short frame.
            let comment = comment.take();
            Packet { interface, time_ns, bytes, len, direction, comment: comment.as_deref() }
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

    /// Notes whether the recording is complete or has failed.
    fn note(&mut self, outcome: anyhow::Result<Progress>) {
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

/// The direction as seen from the interface. In a record, it is as seen from the pod, which owns the interface.
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
