//! A ring that is read into a recording.
//!
//! [`tail`](super) begins it and ends it, as does the [recorder](super::recorder), which goes from one agent to the next.

use std::{collections::BTreeSet, ops::ControlFlow, time::Duration};

use anyhow::Context as _;
use tokio::{
    net::UnixStream,
    sync::{mpsc, oneshot},
    time::{MissedTickBehavior, interval, sleep},
};
use tracing::{info, warn};

use super::{pipe::Pipe, sessions::Sessions};
use crate::{
    control,
    dataplane::rings::RingReader,
    recording::{Clock, Flaws, Progress, Recorder, Snapshot},
};

/// How often the ring is read while it is not filled far enough to wake this command: packets are seen after this time
/// at the latest.
const LOOK: Duration = Duration::from_millis(10);
/// How often the counters are read.
const COUNT: Duration = Duration::from_secs(1);
/// How long this command waits at its end until no mirror copies into its ring any more.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a recording can be asked for while it goes on.
pub(super) enum Ask {
    /// A file of the newest packets beside its own file.
    Save,
    /// The newest packets.
    Snapshot {
        /// Of these pods alone (`NAMESPACE/NAME`, or `NAMESPACE/*`), if there are any here.
        pods: BTreeSet<String>,
        /// Where the answer goes.
        answer: oneshot::Sender<Snapshot>,
    },
}

impl Ask {
    /// Does it.
    pub(super) fn answer(self, recorder: &mut Recorder) -> anyhow::Result<()> {
        let now = Clock::now()?;
        match self {
            Self::Save => match recorder.save(now.monotonic_ns) {
                Ok(Some((file, packets))) => info!(file = %file.display(), packets, "saved"),
                Ok(None) => {}
                // The recording itself does not suffer from a full disk.
                Err(error) => warn!(%error, "the newest packets were not saved"),
            },
            Self::Snapshot { pods, answer } => {
                let is_wanted = |name: &str| is_of(&pods, name);
                if let Some(snapshot) = recorder.snapshot(is_wanted, now) {
                    // Who has asked can be gone.
                    let _ = answer.send(snapshot);
                }
            }
        }
        Ok(())
    }
}

/// Whether the interface with this name is of one of these pods; each is, if there are none here. An interface of a pod has
/// the name `NAMESPACE/NAME NIC`.
fn is_of(pods: &BTreeSet<String>, interface: &str) -> bool {
    let of_pod = || {
        let (pod, _) = interface.split_once(' ')?;
        let (namespace, _) = pod.split_once('/')?;
        Some(pods.contains(pod) || pods.contains(&format!("{namespace}/*")))
    };
    pods.is_empty() || of_pod().unwrap_or(false)
}

/// A ring that is being read.
pub(super) struct Reading {
    ring: RingReader,
    sessions: Sessions,
    recorder: Recorder,
    /// What the recording is asked for while it goes on. `None`: nothing, as for `tail`.
    asks: Option<mpsc::Receiver<Ask>>,
    /// Whether what is known of a session goes with the session.
    is_endless: bool,
}

impl Reading {
    /// Has the sessions and counters of now.
    pub(super) fn begin(
        ring: RingReader,
        sessions: Sessions,
        recorder: Recorder,
        asks: Option<mpsc::Receiver<Ask>>,
    ) -> anyhow::Result<Self> {
        let mut reading = Self { ring, sessions, recorder, asks, is_endless: false };
        reading.count()?;
        Ok(reading)
    }

    /// The same, for a recording that has no end.
    pub(super) fn endless(self) -> Self {
        Self { is_endless: true, ..self }
    }

    /// Reads until the recording is complete, which it also is when the reader of its pipe is gone.
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
                Some(ask) = async { self.asks.as_mut()?.recv().await }, if self.asks.is_some() => {
                    // What the taps have written until now belongs to the answer.
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
                // A flood must not keep the other tasks from their turn.
                tokio::task::yield_now().await;
            }
        }
    }

    /// Reads some of what is in the ring, as far as it was written until `end_ns` (`CLOCK_MONOTONIC`). Nothing if what was
    /// read before still waits for the reader of the pipe: then the ring fills, and the taps count what is lost.
    fn batch(&mut self, end_ns: u64) -> anyhow::Result<Batch> {
        let Self { ring, sessions, recorder, .. } = self;
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

    /// Reads the counters, and says which sessions have gone.
    fn count(&mut self) -> anyhow::Result<()> {
        self.sessions.note(&mut self.recorder)?;
        if self.is_endless {
            self.sessions.forget_gone(&mut self.recorder);
        }
        Ok(())
    }

    /// Ends the copies for the ring of a target, and reads on until then. The mirrors stay, and so do their counters: a
    /// packet that counts as copied is in the ring.
    pub(super) async fn let_go(&mut self, agent: &mut UnixStream) -> anyhow::Result<()> {
        tokio::select! {
            outcome = self.run() => outcome,
            outcome = control::let_go(agent) => outcome,
            () = sleep(PATIENCE) => Ok(()),
        }
    }

    /// Ends the connection to the agent, reads what was written until now, and ends the recording.
    pub(super) fn finish(self, agent: UnixStream) -> anyhow::Result<()> {
        let end_ns = Clock::now()?.monotonic_ns;
        let (recorder, _) = self.leave(agent, end_ns)?;
        let summary = recorder.finish(end_ns)?;
        if summary.unknown > 0 {
            warn!(packets = summary.unknown, "packets of sessions that ended at once are not in the file");
        }
        if summary.flawed != Flaws::default() {
            warn!("{}", summary.flawed);
        }
        info!(packets = summary.packets, kept = summary.kept, files = summary.files.len(), "done");
        Ok(())
    }

    /// Ends the connection to the agent, and reads what was written until `end_ns` (`CLOCK_MONOTONIC`). The recording can
    /// go on with another ring.
    pub(super) fn leave(
        mut self,
        agent: UnixStream,
        end_ns: u64,
    ) -> anyhow::Result<(Recorder, Option<mpsc::Receiver<Ask>>)> {
        self.sessions.note(&mut self.recorder)?;
        // From here on, the next reader can have the sessions, and the reader of a pipe can take its time.
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
    /// There is more to read.
    More,
    /// There is nothing to read now, or no room for it.
    End,
    /// The recording takes no more.
    Complete,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_are_wanted_by_name_or_by_namespace() {
        let is_wanted =
            |pods: &[&str], interface| is_of(&pods.iter().map(|pod| (*pod).to_owned()).collect(), interface);
        assert!(is_wanted(&[], "shop/web eth0") && is_wanted(&[], "veth1"));
        assert!(is_wanted(&["shop/web"], "shop/web eth0") && is_wanted(&["a/b", "shop/*"], "shop/db net1"));
        for interface in ["shop/web-2 eth0", "shop2/web eth0", "other/web eth0", "veth1", "shop/web", "shop"]
        {
            assert!(!is_wanted(&["shop/web", "stop/*"], interface), "{interface}");
        }
    }
}
