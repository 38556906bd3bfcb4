//! `mirror-agent tail` and `mirror-agent capture`: read the packets of pods and interfaces into pcapng files.
//!
//! The agent that runs on the node makes the capture, or gives the copies for one of its targets, and this command reads
//! the ring (`control`). Where no agent runs, the command runs the loop itself, for interfaces, and asks itself in the
//! same way. [`sessions`] finds the sessions whose packets come, [`losses`] counts
//! what was lost of them, and [`memory`] refuses what the container has no memory for.

mod losses;
mod memory;
mod pipe;
mod sessions;

use std::{
    collections::BTreeMap,
    future::{Future, pending},
    io::{self, IsTerminal as _},
    ops::ControlFlow,
    os::unix::net::UnixStream as StdStream,
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use tokio::{
    io::AsyncReadExt as _,
    net::UnixStream,
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, sleep, sleep_until},
};
use tracing::{info, warn};

use self::{
    pipe::Pipe,
    sessions::{Before, Sessions},
};
use super::{cleanup::remove_everything, stop_signal};
use crate::{
    cli::{CaptureArgs, Keep, StateArgs, SubjectArgs, TailArgs},
    control::{self, Control, Request, Subject},
    dataplane::{Dataplane as _, bpf::Bpf, hooks::AttachMode, pins::Pins, rings::RingReader},
    links::netlink::Netlink,
    metrics::LoopMetrics,
    mirror_iface::MirrorIfaces,
    model::Actual,
    netns::Namespaces,
    notes,
    pods::NoPods,
    reconcile::Reconciler,
    recording::{Clock, Destination, Kept, Plan, Progress, Recorder},
    select::Policy,
};

/// How often the ring is read while it is not filled far enough to wake this command: packets are seen after this time
/// at the latest.
const LOOK: Duration = Duration::from_millis(10);
/// How often the counters are read.
const COUNT: Duration = Duration::from_secs(1);
/// How long this command waits at its end until no mirror copies into its ring any more.
const PATIENCE: Duration = Duration::from_secs(5);

/// Reads packets as they come.
pub async fn tail(args: TailArgs) -> anyhow::Result<()> {
    let destination = if args.write.as_os_str() == "-" {
        if io::stdout().is_terminal() {
            bail!("packets are not for a terminal: use -w FILE, or a pipe, as in `... | tcpdump -nr -`");
        }
        Destination::Stdout
    } else {
        Destination::File(args.write)
    };
    run(args.subject, destination, Kept::All).await
}

/// Keeps packets in memory or in a rotation of files.
pub async fn capture(args: CaptureArgs) -> anyhow::Result<()> {
    if args.write.as_os_str() == "-" {
        bail!("`capture` writes a file: use -w FILE, or `tail` for standard output");
    }
    let kept = match args.keep {
        Keep { ring: Some(bound), .. } => Kept::Last(bound),
        Keep { first: Some(bytes), .. } => Kept::First { bytes },
        Keep { rotate: Some(bytes), files, .. } => Kept::Files { bytes, files },
        Keep { .. } => Kept::All,
    };
    memory::check(kept, args.subject.buffer, &args.write)?;
    run(args.subject, Destination::File(args.write), kept).await
}

async fn run(subject: SubjectArgs, destination: Destination, kept: Kept) -> anyhow::Result<()> {
    subject.check()?;
    let plan = Plan { destination, kept, super_frames: subject.super_frames, max_packets: subject.packets };
    // First, so that Ctrl-C finds its way to the clean-up from here on.
    let stop = stop_signal()?;
    tokio::pin!(stop);
    let _open = tokio::select! {
        open = pipe::has_reader(&plan.destination) => open,
        () = &mut stop => return Ok(()),
    };
    match (Pins::connect_control()?, &subject.target) {
        (Some(agent), _) => read(agent, &subject, plan, stop).await,
        (None, Some(target)) => {
            bail!(
                "no agent runs on this node, and only an agent gives the copies for target {target} to a program; start \
                 one with `mirror-agent run --target {target}=stream`"
            )
        }
        (None, None) if !subject.pods.is_empty() || subject.mirror.is_some() => {
            bail!(
                "no agent runs on this node, and only an agent knows which device is a pod's; name interfaces instead"
            )
        }
        (None, None) => with_own_loop(&subject, plan, stop).await,
    }
}

/// Runs the loop for this one capture, and removes everything at its end.
async fn with_own_loop(
    subject: &SubjectArgs,
    plan: Plan,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let StateArgs { bpffs } = &subject.state;
    let pins = Pins::new(bpffs);
    let lock = pins.claim()?;
    let (socket, control) = (lock.socket()?, lock.control()?);
    let mut dataplane = Bpf::load(pins.clone(), lock, AttachMode::Auto, Namespaces::default())?;
    let installed = dataplane.observe().await?;
    if installed != Actual::empty(installed.capacity) {
        bail!(
            "no agent runs on this node, but one has left its mirror here; start it again, or end that mirror with \
             `mirror-agent cleanup`"
        );
    }
    let policy = Policy { targets: BTreeMap::new(), ..Policy::default() };
    let readers = Control::new(dataplane.rings(), policy.targets.clone());
    let (links, metrics) = (Netlink::new()?, LoopMetrics::new()?);
    let no_mirrors = MirrorIfaces::new(None, true);
    let mut reconciler =
        Reconciler::new(NoPods, links, dataplane, readers.watch(), policy, no_mirrors, metrics);
    let trouble = watch::Sender::new(None);
    notes::serve(socket, reconciler.reports(), trouble.subscribe())?;
    control::serve(control, readers, reconciler.reports())?;
    let agent = Pins::connect_control()?.context("cannot reach the control socket that was made just now")?;
    let outcome = tokio::select! {
        outcome = reconciler.run(pending()) => outcome,
        outcome = read(agent, subject, plan, stop) => outcome,
    };
    let removed = remove_everything(&pins, &mut reconciler.links).await;
    outcome.and(removed)
}

/// Asks an agent for packets, and reads them to the end.
async fn read(
    agent: StdStream,
    subject: &SubjectArgs,
    plan: Plan,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    tokio::pin!(stop);
    let of = match (&subject.target, &subject.mirror) {
        (Some(target), _) => Subject::Target(target.to_string()),
        (_, Some((namespace, name))) => Subject::Mirror { namespace: namespace.clone(), name: name.clone() },
        (None, None) => Subject::Capture {
            pods: subject.pods.iter().cloned().collect(),
            interfaces: subject.interfaces.iter().cloned().collect(),
            direction: subject.direction.unwrap_or_default().name().to_owned(),
            settings: subject.settings(),
        },
    };
    let request = Request { of, ring_bytes: subject.buffer };
    let pins = Pins::new(&subject.state.bpffs);
    let before = subject.target.as_ref().map_or_else(Before::default, |target| Before::read(&pins, target));
    let (mut agent, ring, answer) = tokio::select! {
        answered = control::ask(agent, &request) => answered?,
        () = &mut stop => return Ok(()),
    };
    let mut sessions = Sessions::open(&pins, &answer.target, before)?;
    match (sessions.are_there()?, &subject.target, &subject.mirror) {
        (true, ..) => {}
        (false, Some(target), _) => {
            warn!(%target, "no pod or interface of this node is mirrored to this target; packets come when one is");
        }
        (false, None, Some((namespace, name))) => {
            warn!(
                mirror = format!("{namespace}/{name}"),
                "no pod of this node is mirrored now; packets come when one is"
            );
        }
        (false, None, None) if answer.problems.is_empty() => {
            bail!("the agent has not attached the capture; `mirror-agent status` shows its failures")
        }
        (false, None, None) => bail!("{}", answer.problems.join("; ")),
    }
    answer.problems.iter().for_each(|problem| warn!("{problem}"));

    let application = concat!("podmirror ", env!("PODMIRROR_VERSION"));
    let recorder = Recorder::begin(plan, Clock::now()?, application)?;
    let mut reading = Reading { ring: RingReader::new(ring, &pins)?, sessions, recorder };
    reading.count()?;
    let end = subject.time.map(|time| Instant::now() + time);
    let outcome = tokio::select! {
        outcome = reading.run() => outcome.map(|()| Ended::Complete),
        () = &mut stop => Ok(Ended::Asked),
        () = async { sleep_until(end.unwrap_or_else(Instant::now)).await }, if end.is_some() => Ok(Ended::Asked),
        // Nothing is said after the answer, so this is the end.
        _ = agent.read_u8() => Err(anyhow!("the agent has ended, and with it the capture")),
    };
    let outcome = match outcome {
        Ok(Ended::Asked) if subject.target.is_some() => reading.let_go(&mut agent).await,
        outcome => outcome.map(drop),
    };
    outcome.and(reading.finish(agent))
}

/// Why the reading has ended in order.
enum Ended {
    /// The recording takes no more.
    Complete,
    /// The user wanted it: a signal, or the time is up.
    Asked,
}

/// A ring that is being read.
struct Reading {
    ring: RingReader,
    sessions: Sessions,
    recorder: Recorder,
}

impl Reading {
    /// Reads until the recording is complete, which it also is when the reader of its pipe is gone.
    async fn run(&mut self) -> anyhow::Result<()> {
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
        let Self { ring, sessions, recorder } = self;
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
        self.sessions.note(&mut self.recorder)
    }

    /// Ends the copies for the ring of a target, and reads on until then. The mirrors stay, and so do their counters: a
    /// packet that counts as copied is in the ring.
    async fn let_go(&mut self, agent: &mut UnixStream) -> anyhow::Result<()> {
        tokio::select! {
            outcome = self.run() => outcome,
            outcome = control::let_go(agent) => outcome,
            () = sleep(PATIENCE) => Ok(()),
        }
    }

    /// Ends the connection to the agent, reads what was written until now, and ends the recording.
    fn finish(mut self, agent: UnixStream) -> anyhow::Result<()> {
        let end_ns = Clock::now()?.monotonic_ns;
        self.count()?;
        // From here on, the next reader can have the sessions, and the reader of a pipe can take its time.
        self.ring.keep_room();
        drop(agent);
        self.recorder.wait_for_reader();
        while let Batch::More = self.batch(end_ns)? {}
        self.sessions.tell(&mut self.recorder);
        let summary = self.recorder.finish(end_ns)?;
        if summary.unknown > 0 {
            warn!(packets = summary.unknown, "packets of sessions that ended at once are not in the file");
        }
        info!(packets = summary.packets, kept = summary.kept, files = summary.files.len(), "done");
        Ok(())
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
