//! The stream endpoint: sends the packets of a Mirror with a stream to the client that has its key.
//!
//! ```text
//! program (`kubectl mirror`, by a port-forward)        agent
//!   {"mirror": "shop/tail-1", "key": "..."}\n    ─►    looks for the Mirror, and for the key's SHA-256 in it
//!                                                ◄─    ok\n, or what keeps it from reading
//!                                                ◄─    pcapng: what `mirror-agent tail --mirror` writes
//!   writes one byte, or closes its half          ─►    ends `tail`
//!                                                ◄─    the rest, with the counters; the end of the connection
//! ```
//!
//! Each client gets its own `mirror-agent tail` process, with the connection as its standard output. So recordings are
//! made in one way only, and a flood delays neither the loop nor a probe. If a client does not read, its ring fills up
//! and the taps count the lost packets; after [`STALLED`] the kernel closes its connection.
//!
//! Anyone on the node can connect. At most [`STRANGERS`] unauthenticated connections exist, each for at most
//! [`PATIENCE`]; a new one evicts the oldest. They receive no byte of a stream. [`run`] is spawned by `cmd::run`.

use std::{
    collections::BTreeSet,
    env, io,
    net::SocketAddr,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, anyhow};
use mirror_common::abi::MAX_CAPTURES;
use nix::{
    sys::{
        signal::{Signal, kill},
        socket::{setsockopt, sockopt},
    },
    unistd::Pid,
};
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
    process::{Child, Command},
    time::timeout,
};
use tracing::{error, info, warn};

use crate::{
    accept,
    model::ResourceId,
    report::{Keyed, Report, Reports},
};

/// Maximum number of unauthenticated connections.
const STRANGERS: usize = 16;
/// Timeout for the key. A Mirror that was created just now reaches the agent meanwhile.
const PATIENCE: Duration = Duration::from_secs(5);
/// Timeout of a client that reads nothing while there are bytes for it.
const STALLED: Duration = Duration::from_secs(30);
/// Timeout for `tail` to end and to write the contents of its ring.
const LAST_WORDS: Duration = Duration::from_secs(15);
/// Maximum length of a request in bytes.
const MOST_BYTES: u64 = 1024;
/// The request of a client.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Namespace and name of the Mirror.
    mirror: String,
    /// The key; the Mirror contains its SHA-256.
    key: String,
    /// Frames stay as in the kernel, as with `tail --super-frames`.
    #[serde(default)]
    super_frames: bool,
    /// As `tail --since`.
    since: Option<String>,
    /// As `tail --no-follow`.
    #[serde(default)]
    no_follow: bool,
}

impl Request {
    /// Returns the requested Mirror if the key matches.
    pub fn admitted(&self, report: &Report) -> Option<(ResourceId, Keyed)> {
        let (namespace, name) = self.mirror.split_once('/')?;
        let id = ResourceId { namespace: Some(namespace.to_owned()), name: name.parse().ok()? };
        let keyed = report.streams.get(&id)?;
        let digest = Sha256::digest(self.key.as_bytes());
        bool::from(digest.as_slice().ct_eq(&keyed.key_sha256)).then(|| (id, keyed.clone()))
    }
}

/// The Mirrors whose streams are being read.
type Places = Arc<Mutex<BTreeSet<ResourceId>>>;

fn lock(places: &Places) -> MutexGuard<'_, BTreeSet<ResourceId>> {
    // A panic in another thread ends the agent.
    places.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reserves the stream of this Mirror, or returns why it is not available.
fn reserve(places: &Places, id: &ResourceId) -> Result<(), String> {
    let mut places = lock(places);
    if places.len() == MAX_CAPTURES as usize {
        return Err(format!("the limit of {MAX_CAPTURES} streams per node is reached"));
    }
    match places.insert(id.clone()) {
        true => Ok(()),
        false => Err("another program reads this stream on this node: it has one reader at a time".into()),
    }
}

/// Serves at `address` until the task is aborted. If the address cannot be bound, retries. `bpffs` is that of the
/// agent.
pub async fn run(address: SocketAddr, reports: Reports, bpffs: PathBuf) {
    let mut is_told = false;
    let failed = |error: io::Error| {
        if !std::mem::replace(&mut is_told, true) {
            error!(
                %address, %error,
                "streams for `kubectl mirror tail` are not served, and the agent retries; choose another --stream-listen, \
                 or disable it with --stream-listen ''"
            );
        }
    };
    let listener = accept::bind(address, failed).await;
    info!(listen = %address, "serving streams to programs that present the key of a Mirror");
    serve(listener, reports, bpffs.into()).await;
}

async fn serve(listener: TcpListener, reports: Reports, bpffs: Arc<Path>) {
    let places = Places::default();
    let attend = |stream| meet(stream, reports.clone(), Arc::clone(&bpffs), Arc::clone(&places));
    accept::of_anybody(listener, STRANGERS, "--stream-listen", attend).await;
}

/// Serves a connection until it is authenticated. Then another task continues.
async fn meet(mut stream: TcpStream, mut reports: Reports, bpffs: Arc<Path>, places: Places) {
    let asked = timeout(PATIENCE, async {
        let mut line = String::new();
        BufReader::new((&mut stream).take(MOST_BYTES)).read_line(&mut line).await.ok()?;
        let request: Request = serde_json::from_str(&line).ok()?;
        let report = reports.wait_for(|report| request.admitted(report).is_some()).await.ok()?;
        let (id, keyed) = request.admitted(&report)?;
        Some((request, id, keyed))
    });
    let Ok(Some((request, id, keyed))) = asked.await else { return };
    tokio::spawn(async move {
        if let Err(why) = reserve(&places, &id) {
            // A client that has disconnected gets no answer.
            let _ = timeout(PATIENCE, stream.write_all(format!("{why}\n").as_bytes())).await;
            return;
        }
        let mirror = id.to_string();
        if let Err(error) = give(stream, &request, &id, &keyed, reports, &bpffs).await {
            warn!(mirror, error = format!("{error:#}"), "a stream has ended");
        }
        lock(&places).remove(&id);
    });
}

/// Sends the packets of a Mirror to a client, until the Mirror is deleted or the client disconnects.
async fn give(
    mut stream: TcpStream,
    request: &Request,
    id: &ResourceId,
    keyed: &Keyed,
    mut reports: Reports,
    bpffs: &Path,
) -> anyhow::Result<()> {
    setsockopt(&stream, sockopt::TcpUserTimeout, &(STALLED.as_millis() as u32))
        .context("cannot bound the time of a program that does not read")?;
    timeout(PATIENCE, stream.write_all(b"ok\n")).await.context("the program does not read")??;
    let mut tail = tail(&stream, request, bpffs)?;
    let is_gone = |report: &Arc<Report>| report.streams.get(id).is_none_or(|now| now.uid != keyed.uid);
    let mut byte = [0];
    tokio::select! {
        ended = tail.wait() => return outcome(ended),
        _ = stream.read(&mut byte) => {}
        _ = reports.wait_for(is_gone) => {}
    }
    let pid = tail.id().and_then(|pid| pid.try_into().ok()).context("the process of `tail` has no id")?;
    kill(Pid::from_raw(pid), Signal::SIGTERM).context("cannot end `tail`")?;
    match timeout(LAST_WORDS, tail.wait()).await {
        Ok(ended) => outcome(ended),
        Err(_) => tail.kill().await.context("cannot kill `tail`"),
    }
}

/// Starts `mirror-agent tail` with the connection as its standard output.
fn tail(stream: &TcpStream, request: &Request, bpffs: &Path) -> anyhow::Result<Child> {
    // Both processes share the connection, in non-blocking mode. The child polls the connection before it writes, so
    // the mode does not matter.
    let output = stream.as_fd().try_clone_to_owned().context("cannot pass on the connection")?;
    let mut command = Command::new(env::current_exe().context("the path of this program")?);
    command.args(["tail", "--write", "-", "--mirror", &request.mirror, "--bpffs"]).arg(bpffs);
    if request.super_frames {
        command.arg("--super-frames");
    }
    if let Some(since) = &request.since {
        command.arg(format!("--since={since}")).arg(format!("--no-follow={}", request.no_follow));
    }
    command.stdin(Stdio::null()).stdout(output).spawn().context("cannot start `mirror-agent tail`")
}

fn outcome(ended: io::Result<std::process::ExitStatus>) -> anyhow::Result<()> {
    match ended.context("`mirror-agent tail`")? {
        status if status.success() => Ok(()),
        status => {
            Err(anyhow!("`mirror-agent tail` has failed ({status}); see the log lines before this one"))
        }
    }
}

#[cfg(test)]
mod tests;
