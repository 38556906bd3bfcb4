//! The recorder: keeps the newest copies for a target in memory, for `tail --since`.
//!
//! ```text
//! agent ──ring──► recorder (Reading, Recorder) ◄── Ask::Snapshot ── socket ◄── tail, by root alone
//! ```
//!
//! It runs until it is stopped: after an agent ends, it continues with the next one, and keeps its packets. It writes
//! nothing to a disk. [`past`](super::past) is the client of the socket. A request is a line of JSON. The answer is a
//! line of JSON, with the packets by interface, the age of the oldest one, and the number of bytes that follow: a
//! complete pcapng.

use std::{os::unix::net::UnixListener, sync::Arc, time::Duration};

use anyhow::{Context as _, anyhow};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{UnixStream, unix::WriteHalf},
    sync::{Semaphore, mpsc, oneshot},
    task::JoinSet,
    time::{interval, sleep, timeout},
};
use tracing::{info, warn};

use super::{
    APPLICATION, Joined, Subject, join,
    reading::{Ask, Reading},
};
use crate::{
    capture::{
        control::{self, Wanted},
        recording::{Clock, Plan, Recorder, Snapshot},
    },
    filter,
    kernel::dataplane::{lock::RecorderSocket, pins::Pins},
    model::TargetName,
    util::{accept, told::is_news},
};

/// Delay before the next attempt to reach an agent.
const AGAIN: Duration = Duration::from_secs(1);
/// Interval between two reports to the agent.
const REPORT: Duration = Duration::from_secs(2);
/// Timeout of a client for its request, and for each part of the answer. The reader behind a client can be slow.
const PATIENCE: Duration = Duration::from_secs(30);
/// Length of a part of the answer in bytes.
const PART: usize = 64 << 10;

/// Keeps the newest copies for a target, from one agent after the other. Only a failure ends it.
pub(crate) async fn run(target: &TargetName, subject: &Subject, plan: Plan) -> anyhow::Result<()> {
    let recorder = Recorder::begin(plan, Clock::now()?, APPLICATION)?;
    let (asks, asked) = mpsc::channel(1);
    // An agent accepts one recorder at a time. While it was absent, another recorder may have used the target and the
    // socket.
    let listen = || {
        let socket = Pins::recorder(target)?;
        Ok((serve(socket.listener()?, asks.clone())?, socket))
    };
    record(subject, recorder, asks.clone(), asked, listen).await
}

/// The server of the socket, and the socket. Both end when this is dropped, the server first.
type Listening = (JoinSet<()>, RecorderSocket);

/// Records from one agent after the other.
async fn record(
    subject: &Subject,
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
                if is_news(&mut told, &why) {
                    warn!("{why}; the recorder retries");
                }
            }
        }
        let again = sleep(AGAIN);
        tokio::pin!(again);
        loop {
            tokio::select! {
                () = &mut again => break,
                Some(ask) = asks.recv() => drop(ask.answer(&mut recorder)?),
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

async fn join_agent(subject: &Subject) -> anyhow::Result<Joined> {
    let agent = Pins::connect_control()?;
    join(agent.context("no agent runs on this node")?, subject).await
}

/// Spawns the server of the socket, which runs until the result is dropped.
fn serve(listener: UnixListener, asks: mpsc::Sender<Ask>) -> anyhow::Result<JoinSet<()>> {
    // One at a time, because each answer takes memory.
    let turn = Arc::new(Semaphore::new(1));
    let mut server = JoinSet::new();
    server.spawn(accept::of_root(listener, move |stream| {
        let (asks, turn) = (asks.clone(), turn.clone());
        async move {
            if let Err(error) = attend(stream, &asks, &turn).await {
                warn!(error = format!("{error:#}"), "the newest packets were not handed over");
            }
        }
    })?);
    Ok(server)
}

/// Serves one client.
async fn attend(mut stream: UnixStream, asks: &mpsc::Sender<Ask>, turn: &Semaphore) -> anyhow::Result<()> {
    let line = timeout(PATIENCE, control::read_line(&mut stream))
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
    let head = [serde_json::to_vec(&(packets, reach_ns, bytes.len()))?, b"\n".to_vec()].concat();
    for part in [&head[..]].into_iter().chain(bytes.chunks(PART)) {
        timeout(PATIENCE, stream.write_all(part)).await.context("the reader takes nothing")??;
    }
    info!(bytes = bytes.len(), "the newest packets were handed over");
    Ok(())
}
