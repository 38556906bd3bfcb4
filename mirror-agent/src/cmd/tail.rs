//! `mirror-agent tail` and `mirror-agent capture`: read the packets of pods and interfaces into pcapng files.
//!
//! The running agent of the node creates the capture, or gives this command the copies for one of its targets, and this
//! command reads the ring (`control`). If no agent runs, the command runs the loop itself, for interfaces, and sends
//! itself the same request. [`sessions`] finds the sessions whose packets arrive, [`losses`] counts their lost packets,
//! and [`memory`] checks the container's memory limit.

mod losses;
mod memory;
mod pipe;
mod reading;
mod recorder;
mod sessions;

use std::{
    collections::BTreeMap,
    future::{Future, pending},
    io::{self, IsTerminal as _},
    os::unix::net::UnixStream as StdStream,
};

use anyhow::{Context as _, anyhow, bail};
use tokio::{
    io::AsyncReadExt as _,
    net::UnixStream,
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};
use tracing::warn;

pub use self::recorder::{Given, Wanted, recorder};
use self::{
    reading::{Ask, Reading},
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
    recording::{Clock, Destination, Kept, Plan, Recorder},
    select::Policy,
};

/// The application name in the files.
const APPLICATION: &str = concat!("podmirror ", env!("PODMIRROR_VERSION"));

/// Reads packets as they arrive.
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

/// Keeps packets in memory or in rotating files.
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
    // First, so that from here on Ctrl-C leads to the clean-up.
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
                "no agent is running on this node, and the copies for target {target} need one; start \
                 it with `mirror-agent run --target {target}=stream`"
            )
        }
        (None, None) if !subject.pods.is_empty() || subject.mirror.is_some() => {
            bail!("no agent is running on this node, so pods cannot be found; name interfaces instead")
        }
        (None, None) => with_own_loop(&subject, plan, stop).await,
    }
}

/// Runs the loop for this capture only, and removes everything at its end.
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
    if installed != Actual::empty(installed.capacity) || !pins.other_versions()?.is_empty() {
        bail!(
            "no agent is running on this node, but an earlier one left its mirror; start it again, or remove the mirror \
             with `mirror-agent cleanup`"
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
    let agent = Pins::connect_control()?.context("cannot reach the control socket that was just created")?;
    let outcome = tokio::select! {
        outcome = reconciler.run(pending()) => outcome,
        outcome = read(agent, subject, plan, stop) => outcome,
    };
    let removed = remove_everything(&pins, &mut reconciler.links).await;
    outcome.and(removed)
}

/// Requests packets from an agent, and reads them to the end.
async fn read(
    agent: StdStream,
    subject: &SubjectArgs,
    plan: Plan,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    tokio::pin!(stop);
    let joined = tokio::select! {
        joined = join(agent, subject) => joined?,
        () = &mut stop => return Ok(()),
    };
    let Joined { mut agent, ring, sessions } = joined;
    // Without a buffer in memory, SIGUSR1 keeps its default action and ends the process.
    let asks = matches!(plan.kept, Kept::Last(_)).then(asks_by_signal).transpose()?;
    let recorder = Recorder::begin(plan, Clock::now()?, APPLICATION)?;
    let mut reading = Reading::begin(ring, sessions, recorder, asks)?;
    let end = subject.time.map(|time| Instant::now() + time);
    let outcome = tokio::select! {
        outcome = reading.run() => outcome.map(|()| Ended::Complete),
        () = &mut stop => Ok(Ended::Asked),
        () = async { sleep_until(end.unwrap_or_else(Instant::now)).await }, if end.is_some() => Ok(Ended::Asked),
        // The agent sends nothing after its answer, so this is the end of the connection.
        _ = agent.read_u8() => Err(anyhow!("the agent has ended, and the capture with it")),
    };
    let outcome = match outcome {
        Ok(Ended::Asked) if subject.target.is_some() => reading.let_go(&mut agent).await,
        outcome => outcome.map(drop),
    };
    outcome.and(reading.finish(agent))
}

/// The answer of an agent to a request.
struct Joined {
    /// The connection. It closes when the agent ends.
    agent: UnixStream,
    /// The ring with the packets.
    ring: RingReader,
    /// The sessions that write the packets.
    sessions: Sessions,
}

/// Requests packets from an agent.
async fn join(agent: StdStream, subject: &SubjectArgs) -> anyhow::Result<Joined> {
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
    let (agent, ring, answer) = control::ask(agent, &request).await?;
    let mut sessions = Sessions::open(&pins, &answer.target, before)?;
    match (sessions.are_there()?, &subject.target, &subject.mirror) {
        (true, ..) => {}
        (false, Some(target), _) => {
            warn!(%target, "no pod or interface of this node is mirrored to this target yet; waiting");
        }
        (false, None, Some((namespace, name))) => {
            warn!(mirror = format!("{namespace}/{name}"), "no pod of this node is mirrored yet; waiting");
        }
        (false, None, None) if answer.problems.is_empty() => {
            bail!("the agent has not attached the capture; `mirror-agent status` shows its failures")
        }
        (false, None, None) => bail!("{}", answer.problems.join("; ")),
    }
    answer.problems.iter().for_each(|problem| warn!("{problem}"));
    Ok(Joined { agent, ring: RingReader::new(ring, &pins)?, sessions })
}

/// Returns a receiver with an [`Ask::Save`] for each SIGUSR1.
fn asks_by_signal() -> anyhow::Result<mpsc::Receiver<Ask>> {
    let (asks, asked) = mpsc::channel(1);
    let mut wanted = signal(SignalKind::user_defined1()).context("cannot handle SIGUSR1")?;
    tokio::spawn(async move { while wanted.recv().await.is_some() && asks.send(Ask::Save).await.is_ok() {} });
    Ok(asked)
}

/// Why the reading ended without an error.
enum Ended {
    /// The recording is complete.
    Complete,
    /// The user ended it: by a signal, or by the time limit.
    Asked,
}
