//! `mirror-agent recorder`: keeps the newest copies for a target in memory, for `tail --since`.
//!
//! ```text
//! agent ──ring──► recorder (Reading, Recorder) ◄── Ask::Snapshot ── socket ◄── tail, by root alone
//! ```
//!
//! It runs until it is stopped: after an agent ends, it continues with the next one, and keeps its packets. It writes
//! nothing to a disk. [`past`](super::past) is the client of the socket. A request is a line of JSON. The answer is a
//! line of JSON with the number of bytes that follow it: a complete pcapng.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::unix::net::UnixListener as StdListener,
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, anyhow};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{UnixListener, UnixStream, unix::WriteHalf},
    sync::{Semaphore, mpsc, oneshot},
    task::JoinHandle,
    time::{interval, sleep, timeout},
};
use tracing::{info, warn};

use super::{
    APPLICATION, Joined, join, memory,
    reading::{Ask, Reading},
};
use crate::{
    cli::{RecorderArgs, SubjectArgs},
    cmd::stop_signal,
    control,
    dataplane::{lock::RecorderSocket, pins::Pins},
    filter,
    recording::{Clock, Destination, Kept, Plan, Recorder, Snapshot},
};

/// Delay before the next attempt to reach an agent.
const AGAIN: Duration = Duration::from_secs(1);
/// Interval between two reports to the agent.
const REPORT: Duration = Duration::from_secs(2);
/// Timeout of a client for its request, and for each part of the answer. The reader behind a client can be slow.
const PATIENCE: Duration = Duration::from_secs(30);
/// Maximum length of a request in bytes: some thousand pods.
const MOST_REQUEST: u64 = 1 << 20;
/// Length of a part of the answer in bytes.
const PART: usize = 64 << 10;

/// The request of a client.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wanted {
    /// Whose packets: names of interfaces, or of pods (`NAMESPACE/NAME`, or `NAMESPACE/*`); `None`: all packets.
    pub(super) of: Option<BTreeSet<String>>,
    /// The pods and interfaces whose packets are left out all the same, unless `of` has their own names.
    pub(super) except: BTreeSet<String>,
    /// Only the packets that match.
    pub(super) filter: Option<String>,
    /// When they were copied, in ns of `CLOCK_MONOTONIC`: the first and the last moment.
    pub(super) times: (u64, u64),
}

impl Wanted {
    /// Whether the interface with this name is wanted. The name of a pod's interface is `NAMESPACE/NAME NIC`.
    pub(super) fn has(&self, interface: &str) -> bool {
        let Some(of) = &self.of else { return true };
        let pod = interface.split(' ').next().unwrap_or_default();
        let is_in_namespace =
            |(namespace, _): (&str, _)| of.contains(&format!("{namespace}/*")) && !self.except.contains(pod);
        of.contains(interface) || of.contains(pod) || pod.split_once('/').is_some_and(is_in_namespace)
    }
}

/// The head of the answer.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Given {
    /// The number of packets by interface.
    pub(super) packets: BTreeMap<String, u64>,
    /// Age of the oldest packet that the recorder can still have, in ns.
    pub(super) reach_ns: u64,
    /// The number of bytes that follow.
    pub(super) bytes: u64,
}

/// Keeps the newest copies until it is stopped.
pub async fn recorder(args: RecorderArgs) -> anyhow::Result<()> {
    let RecorderArgs { target, ring, super_frames, buffer, state } = args;
    let kept = Kept::Last(ring);
    memory::check_twice(kept, buffer)?;
    let stop = stop_signal()?;
    // It has no file, so it leaves nothing behind.
    let destination = Destination::File(PathBuf::from("/dev/null"));
    let plan = Plan { destination, kept, super_frames, max_packets: None, comment: None };
    let recorder = Recorder::begin(plan, Clock::now()?, APPLICATION)?;
    let (asks, asked) = mpsc::channel(1);
    let subject = SubjectArgs {
        interfaces: Vec::new(),
        pods: Vec::new(),
        target: Some(target.clone()),
        mirror: None,
        direction: None,
        filter: None,
        sample: None,
        snaplen: None,
        super_frames,
        packets: None,
        duration: None,
        buffer,
        state,
    };
    // An agent accepts one recorder at a time. While it was absent, another recorder may have used the target and the
    // socket.
    let listen = || {
        let socket = Pins::recorder(&target)?;
        Ok(Listening { task: serve(socket.listener()?, asks.clone())?, _socket: socket })
    };
    tokio::select! {
        outcome = record(&subject, recorder, asks.clone(), asked, listen) => outcome,
        () = stop => Ok(()),
    }
}

/// The server of the socket; it stops when this is dropped.
struct Listening {
    task: JoinHandle<()>,
    _socket: RecorderSocket,
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Records from one agent after the other.
async fn record(
    subject: &SubjectArgs,
    mut recorder: Recorder,
    own_asks: mpsc::Sender<Ask>,
    mut asks: mpsc::Receiver<Ask>,
    listen: impl Fn() -> anyhow::Result<Listening>,
) -> anyhow::Result<()> {
    let mut listening = None;
    let mut told = None;
    loop {
        match join_agent(subject).await {
            Ok(Joined { mut agent, ring, sessions, .. }) => {
                told = None;
                drop(listening.take());
                listening = Some(listen()?);
                info!("recording");
                // Another agent may reuse the serials for other sessions.
                recorder.part_with(|_| true);
                let mut reading = Reading::begin(ring, sessions, recorder, Some(asks))?.endless();
                let (mut from_agent, to_agent) = agent.split();
                let ended = async {
                    tokio::select! {
                        _ = from_agent.read_u8() => {}
                        () = report_fill(&own_asks, to_agent) => {}
                    }
                };
                tokio::select! {
                    outcome = reading.run() => outcome?,
                    () = ended => warn!("the agent has ended; the recorder keeps what it has, and waits for the next agent"),
                }
                let (left, asked) = reading.leave(agent, Clock::now()?.monotonic_ns)?;
                (recorder, asks) = (left, asked.context("a recorder can be asked")?);
            }
            Err(why) => {
                let why = format!("{why:#}");
                if told.as_ref() != Some(&why) {
                    warn!("{why}; the recorder retries");
                    told = Some(why);
                }
            }
        }
        let again = sleep(AGAIN);
        tokio::pin!(again);
        loop {
            tokio::select! {
                () = &mut again => break,
                Some(ask) = asks.recv() => ask.answer(&mut recorder)?,
            }
        }
    }
}

/// Reports to the agent how full the memory is, for its metrics, until the agent ends.
async fn report_fill(asks: &mpsc::Sender<Ask>, mut agent: WriteHalf<'_>) {
    let mut times = interval(REPORT);
    loop {
        times.tick().await;
        let (answer, answered) = oneshot::channel();
        // The receiver is the recording, which outlives this task.
        let _ = asks.send(Ask::Fill(answer)).await;
        let Ok(fill) = answered.await else { return };
        if control::write_line(&mut agent, &fill).await.is_err() {
            return;
        }
    }
}

async fn join_agent(subject: &SubjectArgs) -> anyhow::Result<Joined> {
    let agent = Pins::connect_control()?;
    join(agent.context("no agent runs on this node")?, subject).await
}

/// Spawns the server of the socket, which runs forever.
fn serve(listener: StdListener, asks: mpsc::Sender<Ask>) -> anyhow::Result<JoinHandle<()>> {
    listener.set_nonblocking(true)?;
    let listener = UnixListener::from_std(listener)?;
    // One at a time, because each answer takes memory.
    let turn = Arc::new(Semaphore::new(1));
    Ok(tokio::spawn(async move {
        loop {
            let Ok((stream, _)) = listener.accept().await else {
                sleep(AGAIN).await;
                continue;
            };
            // Only root can open the socket. This check still holds if its directory is opened to other users.
            if stream.peer_cred().is_ok_and(|peer| peer.uid() == 0) {
                let (asks, turn) = (asks.clone(), turn.clone());
                tokio::spawn(async move {
                    if let Err(error) = attend(stream, &asks, &turn).await {
                        warn!(error = format!("{error:#}"), "the newest packets were not handed over");
                    }
                });
            }
        }
    }))
}

/// Serves one client.
async fn attend(stream: UnixStream, asks: &mpsc::Sender<Ask>, turn: &Semaphore) -> anyhow::Result<()> {
    let (from, mut to) = stream.into_split();
    let mut line = String::new();
    timeout(PATIENCE, BufReader::new(from.take(MOST_REQUEST)).read_line(&mut line))
        .await
        .context("the request has not come in time")??;
    let wanted: Wanted =
        serde_json::from_str(&line).context("the client and the agent have different versions")?;
    let filter = wanted.filter.as_deref().map(filter::compile).transpose();
    let filter = filter.context("the filter of the request")?;
    let _turn = turn.acquire().await?;
    let (answer, answered) = oneshot::channel();
    asks.send(Ask::Snapshot { wanted, filter, answer }).await.map_err(|_| anyhow!("the recorder ends"))?;
    let Snapshot { bytes, packets, reach_ns } = answered.await.context("the recorder ends")?;
    let given = Given { packets, reach_ns, bytes: bytes.len() as u64 };
    let head = [serde_json::to_vec(&given)?, b"\n".to_vec()].concat();
    for part in [&head[..]].into_iter().chain(bytes.chunks(PART)) {
        timeout(PATIENCE, to.write_all(part)).await.context("the reader takes nothing")??;
    }
    info!(bytes = bytes.len(), "the newest packets were handed over");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_are_wanted_by_name_or_by_namespace() {
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        let wanted = |of: &[&str], interface| {
            Wanted { of: Some(set(of)), except: set(&["shop/out"]), ..Wanted::default() }.has(interface)
        };
        assert!(Wanted::default().has("shop/web eth0") && Wanted::default().has("veth1"));
        assert!(wanted(&["shop/web"], "shop/web eth0") && wanted(&["a/b", "shop/*"], "shop/db net1"));
        assert!(wanted(&["veth1"], "veth1") && wanted(&["shop/*", "shop/out eth0"], "shop/out eth0"));
        assert!(!wanted(&[], "shop/web eth0") && !wanted(&["shop/*"], "shop/out eth0"));
        for interface in ["shop/web-2 eth0", "shop2/web eth0", "other/web eth0", "veth1", "shop"] {
            assert!(!wanted(&["shop/web", "stop/*"], interface), "{interface}");
        }
    }
}
