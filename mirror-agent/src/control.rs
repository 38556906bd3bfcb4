//! The control socket: programs on the node request packets from the running agent.
//!
//! ```text
//! program                                       agent
//!   {"of": {"capture": ...}, ...}\n       ─►    makes a ring, adds a capture, waits for a round of the loop
//!    or {"of": {"mirror": ...}, ...}\n
//!    or {"of": {"target": "live"}, ...}\n ─►    makes a ring, gives it to the target, waits for a round of the loop
//!   (reads the ring)                      ◄─    one byte with the ring's descriptor, then {"target": ...}\n
//!   (a recorder) {"used": ...}\n          ─►    keeps it for the metrics
//!   writes one byte (let_go)              ─►    takes the ring away, waits for a round
//!   (knows that no more packets come)     ◄─    closes its half of the connection
//!   closes the connection                 ─►    forgets the ring; the target is free for the next program
//! ```
//!
//! A program can also just close the connection. The program reads the ring itself, so packets never pass through the
//! agent; when an agent ends, its connections close. Only root can open the socket (`dataplane::lock`). [`serve`] is
//! called by the commands that run a loop, [`ask`] and [`let_go`] by `cmd::tail`.
//!
//! **One reader at a time.** The reader of a stream returns room with a read and a write of a counter for each session
//! (`dataplane::rings`), and the agent sets these counters when a target gets a ring. Two concurrent readers could
//! leave a counter too low for good: the session would get less room than it should, or none. So the next program gets
//! its ring after the one before has closed the connection, and a program returns no room after that. A stopped program
//! (`SIGSTOP`) blocks the next one for at most [`PATIENCE`]. It can return one more batch when it continues. No record
//! is lost or read twice then, because each program has its own ring.

mod messages;

use std::{
    collections::{BTreeMap, BTreeSet},
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream as StdStream},
    },
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use mirror_common::abi::MAX_CAPTURES;
use mirror_core::destination::Destination;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    sync::watch,
    time::{Instant, timeout, timeout_at},
};
use tracing::info;

pub use self::messages::{Answer, Request, Subject, Wanted, read_line, write_line};
use self::messages::{receive_ring, write_answer};
use crate::{
    accept,
    dataplane::rings::Rings,
    model::{Directions, Name, PodId, ResourceId, RingId, TargetName},
    recording::Fill,
    report::{Keyed, Report, Reports},
    select::{Capture, Readers},
    settings::{KEYS, Settings},
};

/// Timeout for a program to write its request, to read the answer, and to close the connection.
const PATIENCE: Duration = Duration::from_secs(2);
/// Timeout of the agent between request and answer, all waits together, and for a round without the ring: a round can
/// take some seconds on a node with many taps.
const ROUND: Duration = Duration::from_secs(30);
/// Timeout of the program for the answer: longer than the agent's, so that the answer of a slow agent, which contains
/// the reason, still arrives.
const ANSWER: Duration = Duration::from_secs(PATIENCE.as_secs() + ROUND.as_secs() + PATIENCE.as_secs());

/// The programs that read packets of an agent. The control socket updates them, the loop reads them.
#[derive(Clone)]
pub struct Control {
    readers: watch::Sender<Arc<Readers>>,
    rings: Rings,
    targets: Arc<BTreeMap<TargetName, Destination>>,
    /// The targets that still have the ring of a program that has ended.
    left: watch::Sender<BTreeSet<TargetName>>,
    fills: watch::Sender<BTreeMap<TargetName, Fill>>,
}

impl Control {
    /// Creates an empty set of programs. The rings are created in `rings`; `targets` are those of the agent.
    pub fn new(rings: Rings, targets: BTreeMap<TargetName, Destination>) -> Self {
        Self {
            readers: watch::Sender::new(Arc::default()),
            rings,
            targets: Arc::new(targets),
            left: watch::Sender::default(),
            fills: watch::Sender::default(),
        }
    }

    /// The present programs, for the loop.
    pub fn watch(&self) -> watch::Receiver<Arc<Readers>> {
        self.readers.subscribe()
    }

    /// How full the recorders are, by their targets.
    pub fn fills(&self) -> watch::Receiver<BTreeMap<TargetName, Fill>> {
        self.fills.subscribe()
    }

    /// Removes all programs: the agent ends.
    pub fn end(&self) {
        self.readers.send_replace(Arc::default());
    }

    /// Waits until the target of the request has no ring of an earlier program. The resources of a program that ended a
    /// moment ago may not be free yet, so this waits for them, too, for a short time.
    async fn vacancy(&self, request: &Request) {
        let mut left = self.left.subscribe();
        // The sender is in `self`, so the channel is open.
        if let Subject::Target(name) = &request.of {
            let _ = left.wait_for(|left| left.iter().all(|target| target.0.as_str() != name)).await;
        }
        let _ = timeout(PATIENCE, left.wait_for(|_| self.rings.have_room(request.ring_bytes))).await;
    }

    /// Drops the ring of a program that has ended.
    fn forget(&self, target: &TargetName, ring: RingId) {
        self.rings.forget(ring);
        self.left.send_if_modified(|left| left.remove(target));
    }

    /// Removes a program. Its target stays taken until [`forget`](Self::forget).
    fn remove(&self, target: &TargetName, ring: RingId) {
        self.left.send_if_modified(|left| left.insert(target.clone()));
        self.fills.send_if_modified(|fills| fills.remove(target).is_some());
        self.readers.send_modify(|readers| *readers = Arc::new(readers.without(ring)));
    }

    /// Adds a program, until it is [removed](Self::remove). Returns its target and its ring.
    fn add(&self, request: Request) -> anyhow::Result<(TargetName, RingId, OwnedFd)> {
        let Request { of, ring_bytes } = request;
        let mut readers = Readers::clone(&self.readers.borrow());
        let added = match of {
            Subject::Capture { pods, interfaces, direction, settings } => {
                let directions = Directions::from_name(&direction);
                let directions = directions.ok_or_else(|| anyhow!("unknown direction {direction:?}"))?;
                let settings = parse(&settings)?;
                let capture = |ring| Capture { ring, pods, interfaces, directions, settings, resource: None };
                self.add_capture(&mut readers, ring_bytes, capture)?
            }
            Subject::Mirror { namespace, name } => {
                let name = name.parse::<Name>().map_err(|why| anyhow!(why))?;
                let resource = Some(ResourceId { namespace: Some(namespace.clone()), name: name.clone() });
                if readers.captures.iter().any(|capture| capture.resource == resource) {
                    bail!(
                        "another program reads the stream of the Mirror {namespace}/{name} on this node; a stream has one \
                         reader at a time: stop that program first"
                    );
                }
                let capture = |ring| Capture {
                    ring,
                    pods: BTreeSet::new(),
                    interfaces: BTreeSet::new(),
                    directions: Directions::Both,
                    settings: Settings::default(),
                    resource,
                };
                self.add_capture(&mut readers, ring_bytes, capture)?
            }
            Subject::Target(name) => {
                let target = self.stream(&name)?;
                if readers.streams.contains_key(&target) {
                    bail!(
                        "another program reads target {target}; a stream has one reader at a time: stop that program first"
                    );
                }
                let (ring, fd) = self.rings.make(ring_bytes)?;
                readers.streams.insert(target.clone(), ring);
                (target, ring, fd)
            }
        };
        self.readers.send_replace(Arc::new(readers));
        Ok(added)
    }

    /// Adds a capture with a new ring.
    fn add_capture(
        &self,
        readers: &mut Readers,
        ring_bytes: u32,
        capture: impl FnOnce(RingId) -> Capture,
    ) -> anyhow::Result<(TargetName, RingId, OwnedFd)> {
        if readers.captures.len() >= MAX_CAPTURES as usize {
            bail!("the limit of {MAX_CAPTURES} captures per node is reached; stop one of them");
        }
        let (ring, fd) = self.rings.make(ring_bytes)?;
        let capture = capture(ring);
        let target = capture.target();
        readers.captures.push(capture);
        Ok((target, ring, fd))
    }

    /// Returns the target of this name, if it is a stream.
    fn stream(&self, name: &str) -> anyhow::Result<TargetName> {
        match self.targets.iter().find(|(target, _)| target.0.as_str() == name) {
            Some((target, Destination::Stream)) => Ok(target.clone()),
            Some((_, destination)) => {
                bail!("target {name} is not a stream: its copies go to {destination}; read them there")
            }
            None => {
                bail!(
                    "this node has no target {name:?}; define it with --define-target {name}=stream of the agent"
                )
            }
        }
    }
}

/// Reads the settings of a capture, as a request has them.
pub fn parse(asked: &BTreeMap<String, String>) -> anyhow::Result<Settings> {
    let mut settings = Settings::default();
    for (key, value) in asked {
        let known = KEYS.into_iter().find(|known| known == key);
        settings.set(known.ok_or_else(|| anyhow!("a capture has no setting {key:?}"))?, value)?;
    }
    Ok(settings)
}

/// Spawns the server of the control socket, which runs forever. Must be called within the runtime.
pub fn serve(listener: UnixListener, control: Control, reports: Reports) -> anyhow::Result<()> {
    tokio::spawn(accept::of_root(listener, move |stream| {
        let (control, reports) = (control.clone(), reports.clone());
        async move {
            // A program that has disconnected gets no answer.
            let _ = attend(stream, &control, reports).await;
        }
    })?);
    Ok(())
}

/// Serves one program, from its request to its end.
async fn attend(mut stream: UnixStream, control: &Control, mut reports: Reports) -> anyhow::Result<()> {
    let request = timeout(PATIENCE, read_line(&mut stream)).await??;
    let deadline = Instant::now() + ROUND;
    let (target, id, ring) = match admit(&request, control, &mut reports, deadline).await {
        Ok(added) => added,
        Err(error) => {
            let answer = Answer { problems: vec![format!("{error:#}")], ..Answer::default() };
            return timeout(PATIENCE, write_answer(&mut stream, &answer, None)).await?;
        }
    };
    let served = serve_ring(&mut stream, (&target, id), ring, control, reports.clone(), deadline).await;
    control.remove(&target, id);
    // Until a round has removed the ring, the loop may still be about to write it.
    let _ = timeout(ROUND, reports.wait_for(|report| !report.rings.contains(&id))).await;
    // This tells a program that has let go that no more packets arrive. Then it closes the connection.
    if stream.shutdown().await.is_ok() {
        // A recorder may have sent another report in the meantime.
        let _ = timeout(PATIENCE, tokio::io::copy(&mut stream, &mut tokio::io::sink())).await;
    }
    control.forget(&target, id);
    served
}

/// Adds the program of a request when its target is free.
async fn admit(
    request: &str,
    control: &Control,
    reports: &mut Reports,
    deadline: Instant,
) -> anyhow::Result<(TargetName, RingId, OwnedFd)> {
    let request: Request =
        serde_json::from_str(request).context("the client and the agent have different versions")?;
    // Before the first complete round, the pods are unknown. The sessions that an earlier agent left still copy to the
    // targets.
    let is_ready = |report: &Arc<Report>| report.is_reconciled || matches!(request.of, Subject::Target(_));
    let ready = timeout_at(deadline, reports.wait_for(is_ready)).await.is_ok_and(|ready| ready.is_ok());
    if !ready {
        bail!("the agent is not ready yet; `mirror-agent status` shows why");
    }
    if timeout_at(deadline, control.vacancy(&request)).await.is_err() {
        bail!("the agent has not yet detached the previous reader; `mirror-agent status` shows its failures");
    }
    control.add(request)
}

/// Serves one ring, from the answer to the end of its program.
async fn serve_ring(
    stream: &mut UnixStream,
    (target, id): (&TargetName, RingId),
    ring: OwnedFd,
    control: &Control,
    reports: Reports,
    deadline: Instant,
) -> anyhow::Result<()> {
    let mut reading = control.watch();
    let answer = round_with(target, id, control, reports, deadline).await;
    info!(%target, "a program reads packets");
    timeout(PATIENCE, write_answer(stream, &answer, Some(&ring))).await??;
    drop(ring);
    // The program lets go or disconnects, or the agent ends.
    let goes_on = async {
        while let Ok(fill) = serde_json::from_str(&read_line(stream).await.unwrap_or_default()) {
            control.fills.send_modify(|fills| {
                fills.insert(target.clone(), fill);
            });
        }
    };
    tokio::select! {
        () = goes_on => {}
        _ = reading.wait_for(|readers| !readers.rings().contains(&id)) => {}
    }
    info!(%target, "the program that reads packets has ended");
    Ok(())
}

/// Returns the answer after a round of the loop that includes the program.
async fn round_with(
    target: &TargetName,
    id: RingId,
    control: &Control,
    mut reports: Reports,
    deadline: Instant,
) -> Answer {
    let readers = control.readers.borrow().clone();
    let knows = |report: &Arc<Report>| report.rings.contains(&id);
    let mut past = Wanted::default();
    let problems = match timeout_at(deadline, reports.wait_for(knows)).await {
        Ok(Ok(report)) => {
            let unwritten = report
                .unwritten
                .get(target)
                .map(|why| format!("nothing is copied for this command yet: {why}; the agent retries"));
            let capture = readers.captures.iter().find(|capture| capture.ring == id);
            let skipped = capture.map(|capture| match &capture.resource {
                Some(resource) => {
                    past = past_of(resource, &report);
                    problems_of_mirror(capture, &report)
                }
                None => problems(capture, &report),
            });
            let skipped = skipped.unwrap_or_default();
            unwritten.into_iter().chain(skipped).collect()
        }
        _ => vec!["the agent has not completed the request yet; it retries".into()],
    };
    Answer { target: target.to_string(), problems, past }
}

/// The packets of the past that belong to the stream of a Mirror.
fn past_of(resource: &ResourceId, report: &Report) -> Wanted {
    let Some(Keyed { named, filter, .. }) = report.streams.get(resource) else { return Wanted::default() };
    let is_within = |pod: &&PodId| Some(&pod.namespace) == resource.namespace.as_ref();
    let present = report.pods.iter().flat_map(BTreeMap::keys).filter(is_within);
    let except: BTreeSet<_> = present.map(PodId::to_string).collect();
    Wanted { of: Some(named - &except), except, filter: filter.clone(), ..Wanted::default() }
}

/// The reasons why a capture is not installed as requested.
fn problems(capture: &Capture, report: &Report) -> Vec<String> {
    let mirror = capture.mirror();
    let is_asked = |namespace: &str, name: &str| capture.pods.contains(&(namespace.into(), name.into()));
    let skipped = report.skipped.iter().filter(|skipped| match (&skipped.mirror, &skipped.pod) {
        (Some(of), _) if *of == mirror => true,
        // Another capture may select the pod, too.
        (_, Some(pod)) if skipped.mirror.is_none() || skipped.is_of_capture() => {
            is_asked(&pod.namespace, &pod.name)
        }
        (None, None) => skipped.nic.as_ref().is_some_and(|nic| capture.interfaces.contains(nic)),
        _ => false,
    });
    let said = skipped.map(|skipped| {
        let subject = match (&skipped.pod, &skipped.nic) {
            (Some(pod), Some(nic)) => format!("{pod} {nic}: "),
            (Some(pod), None) => format!("{pod}: "),
            (None, Some(nic)) => format!("{nic}: "),
            (None, None) => String::new(),
        };
        format!("{subject}{}", skipped.why)
    });
    said.collect()
}

/// The same, for a Mirror.
fn problems_of_mirror(capture: &Capture, report: &Report) -> Vec<String> {
    let mirror = Some(capture.mirror());
    let of = report.resources.iter().filter(|coverage| coverage.of.mirror == mirror);
    let said = of.flat_map(|coverage| {
        let refused = coverage.of.refused.iter().map(|(_, message)| message.clone());
        let pods = coverage.not_covered.iter().map(|of| match &of.nic {
            Some(nic) => format!("{} {nic}: {}", of.pod, of.message),
            None => format!("{}: {}", of.pod, of.message),
        });
        refused.chain(pods)
    });
    said.collect()
}

/// Tells the agent to stop copying, and returns when no more packets can arrive.
pub async fn let_go(agent: &mut UnixStream) -> anyhow::Result<()> {
    agent.write_all(b"-\n").await.context("cannot notify the agent of the end")?;
    // Waits for the end of the connection.
    let _ = agent.read_u8().await;
    Ok(())
}

/// Requests packets from the agent. Returns the connection, which keeps the ring in use, the ring, and the answer.
///
/// # Errors
///
/// The agent refuses the request, or does not answer.
pub async fn ask(agent: StdStream, request: &Request) -> anyhow::Result<(UnixStream, OwnedFd, Answer)> {
    agent.set_nonblocking(true)?;
    let mut stream = UnixStream::from_std(agent)?;
    let asked = async {
        write_line(&mut stream, request).await?;
        let ring = receive_ring(&stream).await?;
        let answer: Answer = serde_json::from_str(&read_line(&mut stream).await?)?;
        anyhow::Ok((ring, answer))
    };
    let answered = timeout(ANSWER, asked).await.context("the agent does not answer")?;
    match answered.context("the agent's answer is invalid")? {
        (Some(ring), answer) => Ok((stream, ring, answer)),
        (None, answer) => bail!("{}", answer.problems.join("; ")),
    }
}

#[cfg(test)]
mod tests;
