//! `mirror-agent tail` and `mirror-agent capture`: read the packets of pods and interfaces into pcapng files.
//!
//! The agent that runs on the node makes the capture and this command reads its ring (`control`). Where no agent runs,
//! the command runs the loop itself, for interfaces, and asks itself in the same way.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::IsTerminal as _,
    os::unix::net::UnixStream as StdStream,
    time::Duration,
};

use anyhow::{Context as _, bail};
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
        bpf::Bpf,
        hooks::AttachMode,
        pins::Pins,
        readout::{Reader, Readout, SessionReadout, TapReadout},
        rings::RingReader,
    },
    links::netlink::Netlink,
    metrics::LoopMetrics,
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
    match Pins::connect_control() {
        Some(agent) => read(agent, &subject, plan).await,
        None if !subject.pods.is_empty() => {
            bail!(
                "no agent runs on this node, and only an agent knows which device is a pod's; name interfaces instead"
            )
        }
        None => with_own_loop(&subject, plan).await,
    }
}

/// Runs the loop for this one capture, and removes everything at its end.
async fn with_own_loop(subject: &SubjectArgs, plan: Plan) -> anyhow::Result<()> {
    let StateArgs { bpffs } = &subject.state;
    let pins = Pins::new(bpffs);
    let lock = pins.claim()?;
    let (socket, control) = (lock.socket()?, lock.control()?);
    let dataplane = Bpf::load(pins.clone(), lock, AttachMode::Auto)?;
    let captures = Captures::new(dataplane.rings());
    let policy = Policy { targets: BTreeMap::new(), ..Policy::default() };
    let (links, metrics) = (Netlink::new()?, LoopMetrics::new()?);
    let mut reconciler =
        Reconciler::new(NoPods, links, dataplane, captures.watch(), policy, BTreeMap::new(), metrics);
    let trouble = watch::Sender::new(None);
    notes::serve(socket, reconciler.reports(), trouble.subscribe())?;
    control::serve(control, captures, reconciler.reports())?;
    let agent = Pins::connect_control().context("cannot reach the control socket that was made just now")?;
    let outcome = tokio::select! {
        outcome = reconciler.run(std::future::pending()) => outcome,
        outcome = read(agent, subject, plan) => outcome,
    };
    let removed = remove_everything(&pins, &mut reconciler.links).await;
    outcome.and(removed)
}

/// Asks an agent for a capture, and reads it to its end.
async fn read(agent: StdStream, subject: &SubjectArgs, plan: Plan) -> anyhow::Result<()> {
    let stop = stop_signal()?;
    let asked = [("filter", &subject.filter), ("sample", &subject.sample), ("snaplen", &subject.snaplen)];
    let asked = asked.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value.clone()?)));
    let request = Request {
        pods: subject.pods.iter().cloned().collect(),
        interfaces: subject.interfaces.iter().cloned().collect(),
        direction: subject.direction.name().to_owned(),
        settings: asked.collect(),
        ring_bytes: subject.buffer,
    };
    let (mut agent, ring, answer) = control::ask(agent, &request).await?;
    let pins = Pins::new(&subject.state.bpffs);
    let mut sessions = Sessions::new(Reader::open(&pins)?, answer.mirror);
    if sessions.find()?.is_empty() {
        bail!("{}", answer.problems.join("; "));
    }
    answer.problems.iter().for_each(|problem| warn!("{problem}"));

    let application = concat!("podmirror ", env!("PODMIRROR_VERSION"));
    let recorder = Recorder::begin(plan, Clock::now()?, application)?;
    let mut reading = Reading { ring: RingReader::new(ring, &pins)?, sessions, recorder };
    reading.count()?;
    let end = subject.time.map(|time| Instant::now() + time);
    tokio::pin!(stop);
    let outcome = tokio::select! {
        outcome = reading.run() => outcome,
        () = &mut stop => Ok(()),
        () = async { sleep_until(end.unwrap_or_else(Instant::now)).await }, if end.is_some() => Ok(()),
        // Nothing is said after the answer, so this is the end.
        _ = agent.read_u8() => {
            warn!("the agent has ended, and with it the capture");
            Ok(())
        }
    };
    let finished = reading.finish();
    drop(agent);
    outcome.and(finished)
}

/// The sessions of a capture, as they stand in the agent's maps.
struct Sessions {
    maps: Reader,
    mirror: String,
    known: BTreeSet<u32>,
}

/// The counts of a session.
struct Counted {
    source: Source,
    /// The packets that are in the ring or should be.
    seen: u64,
    lost: u64,
}

impl Sessions {
    fn new(maps: Reader, mirror: String) -> Self {
        Self { maps, mirror, known: BTreeSet::new() }
    }

    /// The sessions as they are now.
    fn find(&mut self) -> anyhow::Result<Vec<Counted>> {
        let Readout { taps, .. } = self.maps.read()?;
        let mut found = Vec::new();
        for tap in &taps {
            let ours = tap.sessions.iter().filter(|session| session.mirror.to_string() == self.mirror);
            found.extend(ours.map(|session| counted(tap, session)));
        }
        Ok(found)
    }
}

fn counted(tap: &TapReadout, session: &SessionReadout) -> Counted {
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
    let of = |verdict: Verdict| {
        session
            .counts
            .iter()
            .filter(move |count| count.verdict == verdict)
            .map(|count| count.packets)
            .sum::<u64>()
    };
    let lost = of(Verdict::Lost);
    Counted { source, seen: of(Verdict::Copied) + lost, lost }
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
            loop {
                let (progress, is_empty) = self.batch()?;
                if progress == Progress::Complete {
                    return Ok(());
                }
                if is_empty {
                    break;
                }
                // A flood must not keep the other tasks from their turn.
                tokio::task::yield_now().await;
            }
        }
    }

    /// Reads what is in the ring, up to a bound. Returns whether it was read to its end.
    fn batch(&mut self) -> anyhow::Result<(Progress, bool)> {
        let Self { ring, sessions, recorder } = self;
        let mut progress = Progress::GoesOn;
        let mut failed = None;
        let is_empty = ring.read(|head, bytes| {
            if sessions.known.insert(head.serial) {
                // The session was added since the maps were read last.
                match sessions.find() {
                    Ok(found) => found.iter().for_each(|found| recorder.add_source(&found.source)),
                    Err(error) => failed = Some(error),
                }
            }
            if progress == Progress::GoesOn {
                progress = recorder.record(head, bytes);
            }
        })?;
        if let Some(error) = failed {
            return Err(error);
        }
        if recorder.end_batch()? == Progress::Complete {
            progress = Progress::Complete;
        }
        Ok((progress, is_empty))
    }

    /// Reads the counters. New sessions become known before their first packet.
    fn count(&mut self) -> anyhow::Result<()> {
        for Counted { source, seen, lost } in self.sessions.find()? {
            self.sessions.known.insert(source.serial);
            self.recorder.add_source(&source);
            self.recorder.note_counters(source.serial, seen, lost);
        }
        Ok(())
    }

    /// Reads what is still in the ring, and ends the recording.
    fn finish(mut self) -> anyhow::Result<()> {
        // One ring's worth: under a flood, the ring would never be empty.
        let counted = self.count();
        for _ in 0..64 {
            if matches!(self.batch()?, (Progress::Complete, _) | (_, true)) {
                break;
            }
        }
        let summary = self.recorder.finish(Clock::now()?.monotonic_ns)?;
        if summary.unknown > 0 {
            warn!(packets = summary.unknown, "packets of sessions that ended at once are not in the file");
        }
        info!(packets = summary.packets, kept = summary.kept, files = summary.files.len(), "done");
        counted
    }
}
