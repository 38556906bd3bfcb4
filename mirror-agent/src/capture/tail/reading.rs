//! A ring that is read into a recording.
//!
//! Used by [`tail`](super), and by the [recorder](super::recorder), which continues the recording with the next agent.

use std::{collections::VecDeque, ops::ControlFlow, time::Duration};

use anyhow::Context as _;
use mirror_capture::pcapng;
use tokio::{
    net::UnixStream,
    sync::{mpsc, oneshot},
    time::{MissedTickBehavior, interval, sleep},
};
use tracing::{info, warn};

use super::{pipe::Pipe, sessions::Sessions};
use crate::{
    capture::{
        control::{self, Wanted},
        recording::{Clock, Excerpt, Progress, Recorder, Snapshot},
    },
    filter::Program,
    kernel::dataplane::rings::RingReader,
    report::Fill,
};

/// Polling interval of the ring while it is not full enough to wake this command: the maximum delay of a packet.
const LOOK: Duration = Duration::from_millis(10);
/// Interval between two readings of the counters.
const COUNT: Duration = Duration::from_secs(1);
/// How long this command waits at its end until no mirror copies into its ring any more.
const PATIENCE: Duration = Duration::from_secs(5);

/// A request to a running recording.
pub enum Ask {
    /// Write notes for the reader, each in JSON.
    Notes(Vec<String>),
    /// Write the counters of the interfaces.
    Count,
    /// Write a file of the newest packets next to the recording's own file.
    Save,
    /// Return how full the memory is.
    Fill(oneshot::Sender<Fill>),
    /// Return the newest packets.
    Snapshot {
        /// Only these.
        wanted: Wanted,
        /// Of these, only those that match.
        filter: Option<Program>,
        /// Receiver of the answer.
        answer: oneshot::Sender<Snapshot>,
    },
}

impl Ask {
    /// Carries out the request. Returns the notes that have to wait for the reader of a pipe.
    pub(super) fn answer(self, recorder: &mut Recorder) -> anyhow::Result<Option<Self>> {
        let now = Clock::now()?;
        match self {
            Self::Notes(notes) => {
                let mut notes = VecDeque::from(notes);
                while !recorder.is_stalled()
                    && let Some(json) = notes.pop_front()
                {
                    let mut block = Vec::new();
                    pcapng::note(&mut block, &json);
                    recorder.append(&block)?;
                }
                return Ok((!notes.is_empty()).then(|| Self::Notes(notes.into())));
            }
            Self::Count => {
                recorder.count(now.monotonic_ns)?;
            }
            Self::Save => match recorder.save(now.monotonic_ns) {
                Ok(Some((file, packets))) => info!(file = %file.display(), packets, "saved"),
                Ok(None) => {}
                // A full disk does not affect the recording itself.
                Err(error) => warn!(%error, "the newest packets were not saved"),
            },
            Self::Fill(answer) => {
                if let Some(fill) = recorder.fill(now) {
                    let _ = answer.send(fill);
                }
            }
            Self::Snapshot { wanted, filter, answer } => {
                let (from, to) = wanted.times;
                let is_wanted: &dyn Fn(&str) -> bool = &|name| wanted.has(name);
                let (directions, snaplen) = (wanted.directions, wanted.snaplen);
                let excerpt =
                    Excerpt { is_wanted, times: from..=to, directions, filter: filter.as_ref(), snaplen };
                if let Some(snapshot) = recorder.snapshot(&excerpt, now) {
                    // The client may have disconnected.
                    let _ = answer.send(snapshot);
                }
            }
        }
        Ok(None)
    }
}

/// A ring that is being read.
pub(super) struct Reading {
    ring: RingReader,
    sessions: Sessions,
    recorder: Recorder,
    /// Requests to the recording. `None` for `tail`, which accepts none.
    asks: Option<mpsc::Receiver<Ask>>,
    /// The rest of the last request.
    rest: Option<Ask>,
    /// Whether the data about a session is dropped when the session ends.
    is_endless: bool,
    /// The time of the last packet that the recording has already (`CLOCK_MONOTONIC`).
    past_ns: u64,
}

impl Reading {
    /// Begins with the present sessions and counters.
    pub(super) fn begin(
        ring: RingReader,
        sessions: Sessions,
        recorder: Recorder,
        asks: Option<mpsc::Receiver<Ask>>,
    ) -> anyhow::Result<Self> {
        let mut reading = Self { ring, sessions, recorder, asks, rest: None, is_endless: false, past_ns: 0 };
        reading.count()?;
        Ok(reading)
    }

    /// The same, for a recording without an end.
    pub(super) fn endless(self) -> Self {
        Self { is_endless: true, ..self }
    }

    /// The same, for a recording that has the packets until this time already.
    pub(super) fn after(self, past_ns: u64) -> Self {
        Self { past_ns, ..self }
    }

    /// Reads until the recording is complete, which is also the case when the reader of its pipe closed it.
    pub(super) async fn run(&mut self) -> anyhow::Result<()> {
        let woken = self.ring.wakes().context("cannot wait for the ring")?;
        let pipe = Pipe::new(self.recorder.pipe()).context("cannot wait for the pipe")?;
        let mut look = interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut count = interval(COUNT);
        count.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                guard = woken.readable() => guard.context("cannot wait for the ring")?.clear_ready(),
                _ = look.tick() => {}
                _ = count.tick() => self.count()?,
                // A slow reader gets later counters, and notes without those that have changed since.
                Some(ask) = next(&mut self.rest, &mut self.asks),
                    if self.asks.is_some() && !self.recorder.is_stalled() =>
                {
                    // The answer includes everything that the taps have written until now.
                    let now_ns = Clock::now()?.monotonic_ns;
                    while let Batch::More = self.batch(now_ns)? {}
                    self.count()?;
                    self.rest = ask.answer(&mut self.recorder)?;
                }
                taken = pipe.taken(), if self.recorder.is_pending() => taken.context("cannot wait for the pipe")?,
            }
            while let Batch::More = match self.batch(u64::MAX)? {
                Batch::Complete => return Ok(()),
                batch => batch,
            } {
                // A flood must not starve the other tasks.
                tokio::task::yield_now().await;
            }
        }
    }

    /// Reads some records, until one that was written after `end_ns` (`CLOCK_MONOTONIC`). Reads nothing while earlier
    /// blocks still wait for the reader of the pipe: then the ring fills up, and the taps count the lost packets.
    fn batch(&mut self, end_ns: u64) -> anyhow::Result<Batch> {
        let Self { ring, sessions, recorder, past_ns, .. } = self;
        let mut progress = Progress::GoesOn;
        let mut is_late = false;
        let mut looked = Ok(());
        let mut is_empty = false;
        if !recorder.is_stalled() {
            is_empty = ring.read(|head, bytes| {
                if head.time_ns > *past_ns {
                    looked = sessions.read_one(head.serial, recorder);
                    progress = recorder.record(head, bytes);
                }
                // A late record is recorded, too: it is no longer in the ring.
                is_late = head.time_ns > end_ns;
                if is_late || progress == Progress::Complete || looked.is_err() || recorder.is_stalled() {
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                }
            })?;
        }
        looked?;
        if recorder.end_batch()? == Progress::Complete || progress == Progress::Complete {
            return Ok(Batch::Complete);
        }
        Ok(if is_empty || is_late || recorder.is_stalled() { Batch::End } else { Batch::More })
    }

    /// Reads the counters. In a recording without an end, also drops ended sessions.
    fn count(&mut self) -> anyhow::Result<()> {
        self.sessions.note(&mut self.recorder)?;
        if self.is_endless {
            self.sessions.forget_gone(&mut self.recorder);
        }
        Ok(())
    }

    /// Ends the copies into the ring of a target, and reads on until then. The mirrors stay, and so do their counters:
    /// each packet that counts as copied is in the ring.
    pub(super) async fn let_go(&mut self, agent: &mut UnixStream) -> anyhow::Result<()> {
        tokio::select! {
            outcome = self.run() => outcome,
            outcome = control::let_go(agent) => outcome,
            () = sleep(PATIENCE) => Ok(()),
        }
    }

    /// Closes the connection to the agent, reads what was written until now, and ends the recording.
    pub(super) fn finish(self, agent: UnixStream) -> anyhow::Result<()> {
        let end_ns = Clock::now()?.monotonic_ns;
        let (recorder, _) = self.leave(agent, end_ns)?;
        let summary = recorder.finish(end_ns)?;
        summary.warnings().iter().for_each(|warning| warn!("{warning}"));
        info!(packets = summary.packets, kept = summary.kept, files = summary.files.len(), "done");
        Ok(())
    }

    /// Closes the connection to the agent, and reads what was written until `end_ns` (`CLOCK_MONOTONIC`) or just after.
    /// The recording can continue with another ring.
    pub(super) fn leave(
        mut self,
        agent: UnixStream,
        end_ns: u64,
    ) -> anyhow::Result<(Recorder, Option<mpsc::Receiver<Ask>>)> {
        self.sessions.note(&mut self.recorder)?;
        // From here on, the next program can read the sessions, so a slow reader of the pipe delays nobody.
        self.ring.keep_room();
        drop(agent);
        self.recorder.wait_for_reader();
        while let Batch::More = self.batch(end_ns)? {}
        self.sessions.tell(&mut self.recorder);
        Ok((self.recorder, self.asks))
    }
}

/// The rest of a request, or the next request. Cancel safe.
async fn next(rest: &mut Option<Ask>, asks: &mut Option<mpsc::Receiver<Ask>>) -> Option<Ask> {
    match rest.take() {
        Some(rest) => Some(rest),
        None => asks.as_mut()?.recv().await,
    }
}

/// The state of the ring after a batch.
enum Batch {
    /// There are more records.
    More,
    /// There are no records now, or no room for them.
    End,
    /// The recording is complete.
    Complete,
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::{
        fs::File,
        io::{self, Read as _},
        os::fd::OwnedFd,
    };

    use mirror_capture::blocks::{Block, Blocks};

    use super::*;
    use crate::capture::recording::{Kept, Plan, Sink};

    /// A reader that takes nothing makes the recording keep a bounded number of notes, and gets the others later.
    #[test]
    fn notes_wait_for_their_reader() {
        let (mut reader, pipe) = io::pipe().unwrap();
        let output = Sink::Pipe(File::from(OwnedFd::from(pipe)));
        let plan = Plan { output, kept: Kept::All, super_frames: false, max_packets: None, comment: None };
        let mut recorder = Recorder::begin(plan, Clock::now().unwrap(), "test").unwrap();
        let notes: Vec<_> = (0..1000).map(|number| format!("{number:0>1000}")).collect();
        let mut rest = Ask::Notes(notes.clone()).answer(&mut recorder).unwrap();
        assert!(recorder.is_stalled());
        // 64 KiB are in the pipe, and 64 KiB wait.
        assert!(matches!(&rest, Some(Ask::Notes(rest)) if rest.len() > 800));
        let (mut bytes, mut blocks, mut read) = (vec![0; 4096], Blocks::default(), Vec::new());
        while read.len() < notes.len() {
            let count = reader.read(&mut bytes).unwrap();
            blocks.push(&bytes[..count]);
            while let Some(block) = blocks.pop().unwrap() {
                read.extend(if let Block::Note(note) = block { Some(note) } else { None });
            }
            recorder.end_batch().unwrap();
            if let Some(ask) = rest.take() {
                rest = ask.answer(&mut recorder).unwrap();
            }
        }
        assert_eq!(read, notes);
    }
}
