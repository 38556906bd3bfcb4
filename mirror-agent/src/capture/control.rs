//! The control socket: programs on the node request packets from the running agent.
//!
//! ```text
//! program                                       agent
//!   {"of": {"capture": ...}, ...}\n       ─►    makes a ring, adds a capture, waits for a round of the loop
//!    or {"of": {"reader": ...}, ...}\n
//!    or {"of": {"target": "live"}, ...}\n ─►    makes a ring, gives it to the target, waits for a round of the loop
//!   (reads the ring)                      ◄─    one byte with the ring's descriptor, then {"target": ...}\n
//!   (a recorder) {"used": ...}\n          ─►    keeps it for the metrics
//!   writes one byte (let_go)              ─►    takes the ring away, waits for a round
//!   (knows that no more packets come)     ◄─    closes its half of the connection
//!   closes the connection                 ─►    forgets the ring; the target is free for the next program
//! ```
//!
//! A program can also just close the connection. The program reads the ring itself, so packets never pass through the
//! agent; when an agent ends, its connections close. Only root can open the socket (`kernel::dataplane::lock`).
//! [`serve`] is called by the commands that run a loop, [`ask`] and [`let_go`] by `capture::tail`.
//!
//! **One reader at a time.** The reader of a stream returns room with a read and a write of a counter for each session
//! (`kernel::dataplane::rings`), and the agent sets these counters when a target gets a ring. Two concurrent readers
//! could leave a counter too low for good: the session would get less room than it should, or none. So the next program
//! gets its ring after the one before has closed the connection, and a program returns no room after that. A stopped
//! program (`SIGSTOP`) blocks the next one for at most [`PATIENCE`]. It can return one more batch when it continues. No
//! record is lost or read twice then, because each program has its own ring.

mod messages;
mod problems;

use std::{
    collections::{BTreeMap, BTreeSet},
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream as StdStream},
    },
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, bail};
use mirror_common::abi::MAX_CAPTURES;
use mirror_core::destination::Destination;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::UnixStream,
    sync::watch,
    time::{Instant, timeout, timeout_at},
};
use tracing::info;

pub(super) use self::messages::read;
pub use self::messages::{Answer, ReadOf, Request, Subject, Wanted, parse, read_line, write_line};
use self::messages::{receive_ring, write_answer};
use crate::{
    kernel::dataplane::rings::Rings,
    model::{self, Origin, PodId, Resource, RingId, TargetName},
    report::{Fill, Report, Reports},
    select::{Capture, MAX_READERS, Policy, Readers, Wants},
    sources::kube::selector,
    util::accept,
};

/// Maximum size of the ring of a reader of the API, in bytes. All readers together leave room to root.
pub const READER_RING: u32 = 4 << 20;
/// Maximum number of pods that an answer excepts from the packets of the past: the answer has a bound, and each of them
/// has up to 320 bytes.
const MOST_EXCEPT: usize = 2000;
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
    policy: Arc<Policy>,
    /// The targets that still have the ring of a program that has ended.
    left: watch::Sender<BTreeSet<TargetName>>,
    fills: watch::Sender<BTreeMap<TargetName, Fill>>,
}

impl Control {
    /// Creates an empty set of programs. The rings are created in `rings`; `policy` is that of the agent.
    pub fn new(rings: Rings, policy: Policy) -> Self {
        Self {
            readers: watch::Sender::new(Arc::default()),
            rings,
            policy: Arc::new(policy),
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
        let is_reader = matches!(of, Subject::Reader { .. });
        let (wants, directions, settings) = match of {
            Subject::Capture { pods, interfaces, direction, settings } => {
                (Wants::Named { pods, interfaces }, direction, parse(&settings)?)
            }
            Subject::Reader { of, direction: directions, settings } => {
                if ring_bytes > READER_RING {
                    bail!("the buffer of a reader has at most {} MiB", READER_RING >> 20);
                }
                let settings = read(&settings)?;
                let wants = match of {
                    ReadOf::Pods { namespace, name, labels, nics } => {
                        let labels = selector(labels).map_err(anyhow::Error::msg)?;
                        let (settings, none) = (settings.clone(), model::Request::default());
                        let request = model::Request { nics, directions, settings, ..none };
                        Wants::Reader(Box::new(Resource::of_reader(namespace, name, labels, request)))
                    }
                    ReadOf::Interface(name) => {
                        Wants::Named { pods: BTreeSet::new(), interfaces: [name].into() }
                    }
                };
                (wants, directions, settings)
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
                self.readers.send_replace(Arc::new(readers));
                return Ok((target, ring, fd));
            }
        };
        let of_readers = readers.captures.iter().filter(|of| of.origin == Origin::Reader).count();
        if readers.captures.len() >= MAX_CAPTURES as usize {
            bail!("the limit of {MAX_CAPTURES} captures per node is reached; stop one of them");
        }
        if is_reader && of_readers >= MAX_READERS {
            bail!("the limit of {MAX_READERS} readers per node is reached");
        }
        let (ring, fd) = self.rings.make(ring_bytes)?;
        let origin = if is_reader { Origin::Reader } else { Origin::Capture };
        let capture = Capture { ring, origin, wants, directions, settings };
        let target = capture.target();
        readers.captures.push(capture);
        self.readers.send_replace(Arc::new(readers));
        Ok((target, ring, fd))
    }

    /// The packets of the past that belong to the pods that a reader of the API selects.
    fn past_of(&self, capture: &Capture, report: &Report) -> Wanted {
        let Wants::Reader(resource) = &capture.wants else { return Wanted::default() };
        let Capture { directions, settings, .. } = capture;
        let filter = settings.filter.as_ref().map(|filter| filter.text.clone());
        let nics = resource.request.as_ref().ok().and_then(|request| request.nics.clone());
        let namespace = resource.id.namespace.as_ref();
        let is_within = |pod: &&PodId| Some(&pod.namespace) == namespace;
        let present = report.pods.iter().flat_map(BTreeMap::keys).filter(is_within);
        let mut except: BTreeSet<_> = present.map(PodId::to_string).collect();
        let may_ask = namespace.is_some_and(|namespace| self.policy.may_ask(namespace));
        let mut named = resource.named().filter(|named| may_ask && !except.contains(named));
        // A pod that is left out of the exceptions could be one that opts out.
        if except.len() > MOST_EXCEPT {
            (named, except) = (None, BTreeSet::new());
        }
        Wanted {
            of: Some(named.into_iter().collect()),
            except,
            nics: nics.map(BTreeSet::from_iter),
            directions: *directions,
            filter,
            snaplen: settings.snaplen,
            ..Wanted::default()
        }
    }

    /// Returns the target of this name, if it is a stream.
    fn stream(&self, name: &str) -> anyhow::Result<TargetName> {
        match self.policy.targets.iter().find(|(target, _)| target.0.as_str() == name) {
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
            past = capture.map(|capture| control.past_of(capture, &report)).unwrap_or_default();
            let skipped = capture.map(|capture| problems::of(capture, &report)).unwrap_or_default();
            unwritten.into_iter().chain(skipped).collect()
        }
        _ => vec!["the agent has not completed the request yet; it retries".into()],
    };
    Answer { target: target.to_string(), problems, past }
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
