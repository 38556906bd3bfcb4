//! Reads the packets of a request into a recording: for the commands `tail`, `capture` and `recorder`, and as
//! [`stream`] for a reader of the API.
//!
//! The running agent of the node creates the capture, or gives its client the copies for one of its targets, and the
//! client reads the ring (`control`). [`sessions`] finds the sessions whose packets arrive, [`losses`] counts their
//! lost packets, [`past`] asks a recorder for earlier packets, and [`memory`] checks the container's memory limit.
//! Nothing here knows flags or starts a loop: `cli::tail` does.
//!
//! With `--since`, the recorder is asked when the sessions exist, for the packets until that moment; earlier ones in the
//! ring are skipped. So no packet is missing in between. A packet that two sessions copied around that moment can be
//! there twice.

mod losses;
pub(crate) mod memory;
mod past;
pub(crate) mod pipe;
mod reading;
pub(crate) mod recorder;
mod sessions;

use std::{fs::File, future::Future, os::unix::net::UnixStream as StdStream, path::PathBuf, time::Duration};

use anyhow::{Context as _, anyhow, bail};
use mirror_capture::pcapng::NO_PAST;
use tokio::{
    io::AsyncReadExt as _,
    net::UnixStream,
    sync::{mpsc, oneshot},
    time::{Instant, sleep_until, timeout},
};
use tracing::{info, warn};

pub use self::reading::Ask;
use self::{past::Past, reading::Reading, sessions::Sessions};
use crate::{
    capture::{
        control::{self, ReadOf, Request, Subject as Of, Wanted},
        recording::{Clock, Excerpt, Kept, Plan, Recorder, Sink},
    },
    kernel::dataplane::{pins::Pins, rings::RingReader},
    model::{Name, RingId, TargetName},
    settings::FILTER,
};

/// The application name in the files.
const APPLICATION: &str = concat!("podmirror ", env!("PODMIRROR_VERSION"));
/// Timeout for the first notes to a reader of the API, which come at once unless the node is busy.
const NOTES: Duration = Duration::from_secs(5);

/// The packets to read.
#[derive(Debug, Clone)]
pub struct Subject {
    /// The request to the agent.
    pub request: Request,
    /// The directory of the agent's `--bpffs`.
    pub bpffs: PathBuf,
    /// The packets of the past to begin with.
    pub since: Option<Since>,
    /// The time after which the reading ends.
    pub duration: Option<Duration>,
}

impl Subject {
    /// The target whose copies are read.
    fn target(&self) -> Option<TargetName> {
        let Of::Target(name) = &self.request.of else { return None };
        name.parse().ok().map(TargetName)
    }
}

/// The packets of the past that the user wants.
#[derive(Debug, Clone, Copy)]
pub struct Since {
    /// The time before the beginning of the command.
    pub time: Duration,
    /// No later packets are wanted.
    pub is_all: bool,
}

/// Reads the packets of a reader of the API into a pipe until `stop`, and then writes the rest and the counters. When
/// the agent has admitted the reader, `joined` gets its ring.
pub async fn stream(
    subject: &Subject,
    pipe: File,
    super_frames: bool,
    asks: mpsc::Receiver<Ask>,
    joined: oneshot::Sender<RingId>,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let agent = Pins::connect_control()?.context("no agent runs on this node")?;
    let output = Sink::Pipe(pipe);
    let plan = Plan { output, kept: Kept::All, super_frames, max_packets: None, comment: None };
    read(agent, subject, plan, Some(asks), Some(joined), stop).await
}

/// The packets of the past that belong to the subject: until now, or until the recorder answers if no later ones are
/// wanted. `joined`: the agent's answer.
pub(crate) fn wanted(subject: &Subject, since: Since, joined: Option<&mut Joined>) -> anyhow::Result<Wanted> {
    let now_ns = Clock::now()?.monotonic_ns;
    let end_ns = if since.is_all { *Excerpt::ALL.times.end() } else { now_ns };
    let times = (now_ns.saturating_sub(since.time.as_nanos() as u64), end_ns);
    Ok(match (joined, &subject.request.of) {
        (Some(Joined { sessions, past, .. }), Of::Reader { settings, .. }) => {
            let past = std::mem::take(past);
            // The agent does not return the filter of an interface, nor after a late round.
            let filter = settings.filter.clone();
            let of = Some(&past.of.unwrap_or_default() | &sessions.names()?);
            Wanted { of, filter, times, ..past }
        }
        (_, Of::Capture { pods, interfaces, settings, .. }) => {
            let pods = pods.iter().map(|(namespace, name)| format!("{namespace}/{name}"));
            let of = Some(pods.chain(interfaces.iter().cloned()).collect());
            Wanted { of, filter: settings.get(FILTER).cloned(), times, ..Wanted::default() }
        }
        _ => Wanted { times, ..Wanted::default() },
    })
}

/// Begins a recording with the packets of the past. If there are none, also returns the reason.
async fn begin_with_past(
    subject: &Subject,
    wanted: &Wanted,
    mut plan: Plan,
    since: Since,
) -> anyhow::Result<(Recorder, anyhow::Result<()>)> {
    let asked = Past::ask(subject.target().as_ref(), wanted).await;
    let words = match &asked {
        Ok(past) => past.words(since.time),
        Err(error) => format!("{NO_PAST}{error:#}"),
    };
    let is_empty = asked.as_ref().is_ok_and(Past::is_empty);
    plan.comment = (!is_empty).then(|| words.clone());
    let mut recorder = Recorder::begin(plan, Clock::now()?, APPLICATION)?;
    let written = match asked {
        Ok(past) => {
            info!("{words}");
            past.write(&mut recorder).await
        }
        Err(error) => Err(error),
    };
    Ok((recorder, written))
}

/// Records the packets of the past alone, and then the notes. If there are no packets because of a failure, that is the
/// only reason.
pub(crate) async fn read_past(
    subject: &Subject,
    wanted: &Wanted,
    plan: Plan,
    since: Since,
    notes: Option<Ask>,
) -> anyhow::Result<()> {
    let (mut recorder, written) = begin_with_past(subject, wanted, plan, since).await?;
    recorder.wait_for_reader();
    let mut notes = notes.filter(|_| written.is_ok());
    while let Some(ask) = notes.take() {
        notes = ask.answer(&mut recorder)?;
    }
    recorder.finish(Clock::now()?.monotonic_ns)?;
    written
}

/// Requests packets from an agent, and reads them to the end.
pub(crate) async fn read(
    agent: StdStream,
    subject: &Subject,
    plan: Plan,
    mut asks: Option<mpsc::Receiver<Ask>>,
    told: Option<oneshot::Sender<RingId>>,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    tokio::pin!(stop);
    let mut joined = tokio::select! {
        joined = join(agent, subject) => joined?,
        () = &mut stop => return Ok(()),
    };
    if let (Some(told), Some(ring)) = (told, joined.capture) {
        // The receiver may have ended.
        let _ = told.send(ring);
    }
    let (recorder, past_ns) = match subject.since {
        None => (Recorder::begin(plan, Clock::now()?, APPLICATION)?, 0),
        Some(since) => {
            let wanted = wanted(subject, since, Some(&mut joined))?;
            if since.is_all {
                let past = async {
                    // The agent has notes about a reader until the connection closes.
                    let notes = match &mut asks {
                        Some(asks) => timeout(NOTES, asks.recv()).await.ok().flatten(),
                        None => None,
                    };
                    drop(joined);
                    read_past(subject, &wanted, plan, since, notes).await
                };
                return tokio::select! {
                    outcome = past => outcome,
                    () = stop => Ok(()),
                };
            }
            let (recorder, written) = tokio::select! {
                begun = begin_with_past(subject, &wanted, plan, since) => begun?,
                () = &mut stop => return Ok(()),
            };
            let past_ns = if written.is_ok() { wanted.times.1 } else { 0 };
            if let Err(error) = written {
                warn!("{error:#}");
            }
            (recorder, past_ns)
        }
    };
    let Joined { mut agent, ring, sessions, .. } = joined;
    let mut reading = Reading::begin(ring, sessions, recorder, asks)?.after(past_ns);
    let end = subject.duration.map(|time| Instant::now() + time);
    // Whether the user has ended it, by a signal or by the time limit; otherwise the recording is complete.
    let is_ended = tokio::select! {
        outcome = reading.run() => outcome.map(|()| false),
        () = &mut stop => Ok(true),
        () = async { sleep_until(end.unwrap_or_else(Instant::now)).await }, if end.is_some() => Ok(true),
        // The agent sends nothing after its answer, so this is the end of the connection.
        _ = agent.read_u8() => Err(anyhow!("the agent has ended, and the capture with it")),
    };
    let outcome = match is_ended {
        Ok(true) if matches!(subject.request.of, Of::Target(_)) => reading.let_go(&mut agent).await,
        outcome => outcome.map(|_| ()),
    };
    outcome.and(reading.finish(agent))
}

/// The answer of an agent to a request.
pub(crate) struct Joined {
    /// The connection. It closes when the agent ends.
    agent: UnixStream,
    /// The ring with the packets.
    ring: RingReader,
    /// The id of the ring, for a capture.
    capture: Option<RingId>,
    /// The sessions that write the packets.
    sessions: Sessions,
    /// What the packets of selected pods can begin with.
    past: Wanted,
}

/// Requests packets from an agent.
async fn join(agent: StdStream, subject: &Subject) -> anyhow::Result<Joined> {
    let pins = Pins::new(&subject.bpffs);
    let before = subject.target().map(|target| sessions::losses_before(&pins, &target));
    let (agent, ring, answer) = control::ask(agent, &subject.request).await?;
    let mut sessions = Sessions::open(&pins, &answer.target, before.unwrap_or_default())?;
    let has_sessions = !sessions.names()?.is_empty();
    match &subject.request.of {
        _ if has_sessions => {}
        Of::Reader { of: ReadOf::Pods { .. }, .. } => {}
        Of::Target(target) => {
            warn!(%target, "no pod or interface of this node is mirrored to this target yet; waiting");
        }
        _ if answer.problems.is_empty() => {
            bail!("the agent has not attached the capture; `mirror-agent status` shows its failures")
        }
        _ => bail!("{}", answer.problems.join("; ")),
    }
    // A reader of the API gets the problems as notes.
    if !matches!(subject.request.of, Of::Reader { .. }) {
        answer.problems.iter().for_each(|problem| warn!("{problem}"));
    }
    let capture = Name::of_written(&answer.target).and_then(|name| name.capture_number()).map(RingId);
    Ok(Joined { agent, ring: RingReader::new(ring, &pins)?, capture, sessions, past: answer.past })
}
