//! A ring that is read into a recording.
//!
//! Used by [`tail`](super), and by the [recorder](super::recorder), which continues the recording with the next agent.

use std::{ops::ControlFlow, time::Duration};

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
    control::{self, Wanted},
    dataplane::rings::RingReader,
    filter::Program,
    recording::{Clock, Excerpt, Fill, Progress, Recorder, Snapshot},
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
    /// Carries out the request.
    pub(super) fn answer(self, recorder: &mut Recorder) -> anyhow::Result<()> {
        let now = Clock::now()?;
        match self {
            Self::Notes(notes) => {
                let mut blocks = Vec::new();
                notes.iter().for_each(|json| pcapng::note(&mut blocks, json));
                recorder.append(&blocks)?;
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
                let excerpt = Excerpt { is_wanted, times: from..=to, filter: filter.as_ref() };
                if let Some(snapshot) = recorder.snapshot(&excerpt, now) {
                    // The client may have disconnected.
                    let _ = answer.send(snapshot);
                }
            }
        }
        Ok(())
    }
}

/// A ring that is being read.
pub(super) struct Reading {
    ring: RingReader,
    sessions: Sessions,
    recorder: Recorder,
    /// Requests to the recording. `None` for `tail`, which accepts none.
    asks: Option<mpsc::Receiver<Ask>>,
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
        let mut reading = Self { ring, sessions, recorder, asks, is_endless: false, past_ns: 0 };
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
                Some(ask) = async { self.asks.as_mut()?.recv().await },
                    if self.asks.is_some() && !self.recorder.is_stalled() =>
                {
                    // The answer includes everything that the taps have written until now.
                    let now_ns = Clock::now()?.monotonic_ns;
                    while let Batch::More = self.batch(now_ns)? {}
                    self.count()?;
                    ask.answer(&mut self.recorder)?;
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

    /// Reads some records that were written until `end_ns` (`CLOCK_MONOTONIC`). Reads nothing while earlier blocks
    /// still wait for the reader of the pipe: then the ring fills up, and the taps count the lost packets.
    fn batch(&mut self, end_ns: u64) -> anyhow::Result<Batch> {
        let Self { ring, sessions, recorder, past_ns, .. } = self;
        let mut progress = Progress::GoesOn;
        let mut is_late = false;
        let mut looked = Ok(());
        let mut is_empty = false;
        if !recorder.is_stalled() {
            is_empty = ring.read(|head, bytes| {
                is_late = head.time_ns > end_ns;
                if is_late {
                    return ControlFlow::Break(());
                }
                if head.time_ns <= *past_ns {
                    return ControlFlow::Continue(());
                }
                looked = sessions.read_one(head.serial, recorder);
                progress = recorder.record(head, bytes);
                if progress == Progress::Complete || looked.is_err() || recorder.is_stalled() {
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

    /// Closes the connection to the agent, and reads what was written until `end_ns` (`CLOCK_MONOTONIC`). The recording
    /// can continue with another ring.
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

/// The state of the ring after a batch.
enum Batch {
    /// There are more records.
    More,
    /// There are no records now, or no room for them.
    End,
    /// The recording is complete.
    Complete,
}
