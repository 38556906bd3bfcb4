//! `mirror-agent tail` and `mirror-agent capture`: read the packets of pods and interfaces into pcapng files.
//!
//! The agent that runs on the node makes the capture and this command reads its ring (`control`). Where no agent runs,
//! the command runs the loop itself, for interfaces, and asks itself in the same way.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    io::IsTerminal as _,
    ops::ControlFlow,
    os::unix::net::UnixStream as StdStream,
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use tokio::{
    io::AsyncReadExt as _,
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, sleep_until},
};
use tracing::{info, warn};

use super::{cleanup::remove_everything, stop_signal};
use crate::{
    cli::{CaptureArgs, Keep, StateArgs, SubjectArgs, TailArgs},
    control::{self, Captures, Request},
    dataplane::{
        Dataplane as _,
        bpf::Bpf,
        hooks::AttachMode,
        pins::Pins,
        readout::{Reader, Readout, SessionReadout, TapReadout},
        rings::RingReader,
    },
    links::netlink::Netlink,
    metrics::LoopMetrics,
    model::Actual,
    notes,
    pods::NoPods,
    reconcile::Reconciler,
    recording::{Clock, Destination, Kept, Plan, Progress, Recorder, Source},
    select::Policy,
};
use mirror_common::verdict::Verdict;

/// How often the ring is read while it is not filled far enough to wake this command: packets are seen after this time
/// at the latest.
const LOOK: Duration = Duration::from_millis(10);
/// How often the counters are read.
const COUNT: Duration = Duration::from_secs(1);

/// Reads packets as they come.
pub async fn tail(args: TailArgs) -> anyhow::Result<()> {
    let destination = if args.write.as_os_str() == "-" {
        if std::io::stdout().is_terminal() {
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
    run(args.subject, Destination::File(args.write), kept).await
}

async fn run(subject: SubjectArgs, destination: Destination, kept: Kept) -> anyhow::Result<()> {
    let plan = Plan { destination, kept, super_frames: subject.super_frames, max_packets: subject.packets };
    // First, so that Ctrl-C finds its way to the clean-up from here on.
    let stop = stop_signal()?;
    match Pins::connect_control()? {
        Some(agent) => read(agent, &subject, plan, stop).await,
        None if !subject.pods.is_empty() => {
            bail!(
                "no agent runs on this node, and only an agent knows which device is a pod's; name interfaces instead"
            )
        }
        None => with_own_loop(&subject, plan, stop).await,
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
    let mut dataplane = Bpf::load(pins.clone(), lock, AttachMode::Auto)?;
    let installed = dataplane.observe().await?;
    if installed != Actual::empty(installed.capacity) {
        bail!(
            "no agent runs on this node, but one has left its mirror here; start it again, or end that mirror with \
             `mirror-agent cleanup`"
        );
    }
    let captures = Captures::new(dataplane.rings());
    let policy = Policy { targets: BTreeMap::new(), ..Policy::default() };
    let (links, metrics) = (Netlink::new()?, LoopMetrics::new()?);
    let mut reconciler =
        Reconciler::new(NoPods, links, dataplane, captures.watch(), policy, BTreeMap::new(), metrics);
    let trouble = watch::Sender::new(None);
    notes::serve(socket, reconciler.reports(), trouble.subscribe())?;
    control::serve(control, captures, reconciler.reports())?;
    let agent = Pins::connect_control()?.context("cannot reach the control socket that was made just now")?;
    let outcome = tokio::select! {
        outcome = reconciler.run(std::future::pending()) => outcome,
        outcome = read(agent, subject, plan, stop) => outcome,
    };
    let removed = remove_everything(&pins, &mut reconciler.links).await;
    outcome.and(removed)
}

/// Asks an agent for a capture, and reads it to its end.
async fn read(
    agent: StdStream,
    subject: &SubjectArgs,
    plan: Plan,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    tokio::pin!(stop);
    let asked = [("filter", &subject.filter), ("sample", &subject.sample), ("snaplen", &subject.snaplen)];
    let asked = asked.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value.clone()?)));
    let request = Request {
        pods: subject.pods.iter().cloned().collect(),
        interfaces: subject.interfaces.iter().cloned().collect(),
        direction: subject.direction.name().to_owned(),
        settings: asked.collect(),
        ring_bytes: subject.buffer,
    };
    let (mut agent, ring, answer) = tokio::select! {
        answered = control::ask(agent, &request) => answered?,
        () = &mut stop => return Ok(()),
    };
    let pins = Pins::new(&subject.state.bpffs);
    let mut sessions = Sessions { maps: Reader::open(&pins)?, mirror: answer.mirror, known: BTreeMap::new() };
    if sessions.find()?.is_empty() {
        match answer.problems.is_empty() {
            true => bail!("the agent has not attached the capture; `mirror-agent status` shows its failures"),
            false => bail!("{}", answer.problems.join("; ")),
        }
    }
    answer.problems.iter().for_each(|problem| warn!("{problem}"));

    let application = concat!("podmirror ", env!("PODMIRROR_VERSION"));
    let recorder = Recorder::begin(plan, Clock::now()?, application)?;
    let mut reading = Reading { ring: RingReader::new(ring, &pins)?, sessions, recorder };
    reading.count()?;
    let end = subject.time.map(|time| Instant::now() + time);
    let outcome = tokio::select! {
        outcome = reading.run() => outcome,
        () = &mut stop => Ok(()),
        () = async { sleep_until(end.unwrap_or_else(Instant::now)).await }, if end.is_some() => Ok(()),
        // Nothing is said after the answer, so this is the end.
        _ = agent.read_u8() => Err(anyhow!("the agent has ended, and with it the capture")),
    };
    let finished = reading.finish();
    drop(agent);
    outcome.and(finished)
}

/// The sessions of a capture, in the agent's maps.
struct Sessions {
    maps: Reader,
    mirror: String,
    /// The sessions that have been seen, by their number.
    known: BTreeMap<u32, Known>,
}

/// A session of the capture.
#[derive(Default)]
struct Known {
    name: String,
    /// The packets that were read.
    read: u64,
    /// It is in the maps no more.
    is_gone: bool,
}

/// A session as it is in the maps.
struct Found {
    source: Source,
    /// The packets that were written into the ring.
    copied: u64,
    /// The packets for which the ring had no room.
    lost: u64,
}

impl Sessions {
    /// The sessions that are in the maps now.
    fn find(&mut self) -> anyhow::Result<Vec<Found>> {
        let Readout { taps, .. } = self.maps.read_mirrors(|mirror| mirror.0.as_str() == self.mirror)?;
        let of_tap =
            |tap: &TapReadout| tap.sessions.iter().map(|session| found(tap, session)).collect::<Vec<_>>();
        Ok(taps.iter().flat_map(of_tap).collect())
    }
}

fn found(tap: &TapReadout, session: &SessionReadout) -> Found {
    let owner = &tap.owner;
    let name = match &owner.pod {
        Some(pod) => format!("{pod} {}", owner.nic),
        None => owner.device.clone(),
    };
    let settings = &session.session.settings;
    let source = Source {
        serial: session.serial,
        name,
        description: format!("device {} of the node", owner.device),
        filter: settings.filter.as_ref().map(|filter| filter.text.clone()),
        snaplen: settings.snaplen,
        comment: (!settings.words().is_empty()).then(|| settings.words().join(", ")),
    };
    let count = |verdict: Verdict| {
        let counts = session.counts.iter().filter(|count| count.verdict == verdict);
        counts.map(|count| count.packets).sum()
    };
    Found { source, copied: count(Verdict::Copied), lost: count(Verdict::Lost) }
}

/// A capture that is being read.
struct Reading {
    ring: RingReader,
    sessions: Sessions,
    recorder: Recorder,
}

impl Reading {
    /// Reads until the recording is complete.
    async fn run(&mut self) -> anyhow::Result<()> {
        let woken = self.ring.wakes().context("cannot wait for the ring")?;
        let mut look = interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut count = interval(COUNT);
        count.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                guard = woken.readable() => guard.context("cannot wait for the ring")?.clear_ready(),
                _ = look.tick() => {}
                _ = count.tick() => self.count()?,
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

    /// Reads some of what is in the ring, as far as it was written until `end_ns` (`CLOCK_MONOTONIC`).
    fn batch(&mut self, end_ns: u64) -> anyhow::Result<Batch> {
        let Self { ring, sessions, recorder } = self;
        let mut progress = Progress::GoesOn;
        let mut is_late = false;
        let mut looked = Ok(());
        let is_empty = ring.read(|head, bytes| {
            is_late = head.time_ns > end_ns;
            if is_late {
                return ControlFlow::Break(());
            }
            if !sessions.known.contains_key(&head.serial) {
                // The session was added since the maps were read last.
                looked = note(sessions, recorder);
            }
            sessions.known.entry(head.serial).or_default().read += 1;
            progress = recorder.record(head, bytes);
            if progress == Progress::Complete || looked.is_err() {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })?;
        looked?;
        if recorder.end_batch()? == Progress::Complete || progress == Progress::Complete {
            return Ok(Batch::Complete);
        }
        Ok(if is_empty || is_late { Batch::End } else { Batch::More })
    }

    /// Reads the counters, and says which sessions have gone.
    fn count(&mut self) -> anyhow::Result<()> {
        note(&mut self.sessions, &mut self.recorder)
    }

    /// Reads what was written until now, and ends the recording.
    fn finish(mut self) -> anyhow::Result<()> {
        let end_ns = Clock::now()?.monotonic_ns;
        while let Batch::More = self.batch(end_ns)? {}
        self.count()?;
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
    /// There is nothing to read now.
    End,
    /// The recording takes no more.
    Complete,
}

/// Gives the recorder the sessions and their counters.
fn note(sessions: &mut Sessions, recorder: &mut Recorder) -> anyhow::Result<()> {
    let found = sessions.find()?;
    let here: BTreeSet<u32> = found.iter().map(|found| found.source.serial).collect();
    for (_, known) in
        sessions.known.iter_mut().filter(|(serial, known)| !known.is_gone && !here.contains(serial))
    {
        known.is_gone = true;
        warn!(
            source = known.name,
            "no more packets come from here: the pod or the device has gone, or another mirror has its place"
        );
    }
    for Found { source, copied, lost } in found {
        let known = sessions.known.entry(source.serial).or_default();
        known.name.clone_from(&source.name);
        recorder.add_source(&source);
        // A packet can be read before it is counted.
        recorder.note_counters(source.serial, copied.max(known.read) + lost, lost);
    }
    Ok(())
}
