//! The stream endpoint: gives the packets of a Mirror with a stream to the program that has its key.
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
//! Each program gets a process `mirror-agent tail` of its own, with the connection as its standard output. So there is one
//! way to make a recording, and a flood delays neither the loop nor a probe. A program that does not read has a full ring,
//! and the taps count what is lost; after [`STALLED`] the kernel ends its connection.
//!
//! Anybody on the node can connect. Who has no key gets no byte, and has one of [`STRANGERS`] places for [`PATIENCE`] at
//! most, of which the newest connection takes the oldest. `cmd::run` spawns [`run`].

use std::{
    collections::{BTreeSet, VecDeque},
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
    task::AbortHandle,
    time::{sleep, timeout},
};
use tracing::{error, info, warn};

use crate::{
    model::{Name, ResourceId},
    report::{Keyed, Report, Reports},
};

/// How many connections there are at once that have not shown a key.
const STRANGERS: usize = 16;
/// How long a connection may take to show a key. A Mirror that was made just now reaches the agent meanwhile.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a program may take nothing while there is something to take.
const STALLED: Duration = Duration::from_secs(30);
/// How long `tail` may take to end, with what is in its ring.
const LAST_WORDS: Duration = Duration::from_secs(15);
/// Most bytes of a request.
const MOST_BYTES: u64 = 1024;
/// The wait until an address that could not be used is tried again.
const RETRY: Duration = Duration::from_secs(30);
/// The pause after a connection could not be accepted, for want of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(100);

/// What a program asks for.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    /// The Mirror, by namespace and name.
    mirror: String,
    /// The key whose SHA-256 the Mirror has.
    key: String,
    /// Frames stay as the kernel has them, as with `tail --super-frames`.
    #[serde(default)]
    super_frames: bool,
}

impl Request {
    /// The Mirror that is asked for, if the key is that of this Mirror.
    fn admitted(&self, report: &Report) -> Option<(ResourceId, Keyed)> {
        let (namespace, name) = self.mirror.split_once('/')?;
        let id = ResourceId { namespace: Some(namespace.to_owned()), name: Name::of_resource(name).ok()? };
        let keyed = report.streams.get(&id)?;
        let digest = Sha256::digest(self.key.as_bytes());
        bool::from(digest.as_slice().ct_eq(&keyed.key_sha256)).then(|| (id, keyed.clone()))
    }
}

/// The Mirrors whose streams are read now.
#[derive(Clone, Default)]
struct Places(Arc<Mutex<BTreeSet<ResourceId>>>);

impl Places {
    /// Takes the place of this Mirror until the result is dropped, or says why not.
    fn take(&self, id: &ResourceId) -> Result<Place, String> {
        let mut all = self.all();
        if all.len() == MAX_CAPTURES as usize {
            return Err(format!("{MAX_CAPTURES} streams of this node are read now, and no more fit"));
        }
        match all.insert(id.clone()) {
            true => Ok(Place { places: self.clone(), id: id.clone() }),
            false => {
                Err("another program reads this stream on this node: it has one reader at a time".into())
            }
        }
    }

    fn all(&self) -> MutexGuard<'_, BTreeSet<ResourceId>> {
        // A panic in another thread ends the agent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A stream that is read.
struct Place {
    places: Places,
    id: ResourceId,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.all().remove(&self.id);
    }
}

/// Answers at `address` until the task is aborted. While the address cannot be used, the agent tries again. `bpffs` is
/// that of the agent.
pub async fn run(address: SocketAddr, reports: Reports, bpffs: PathBuf) {
    let mut is_told = false;
    let listener = loop {
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(error) if !is_told => {
                error!(
                    %address, %error,
                    "no streams for `kubectl mirror tail`; it will be tried again; choose another --stream-listen, or \
                     switch it off with --stream-listen ''"
                );
                is_told = true;
            }
            Err(_) => {}
        }
        sleep(RETRY).await;
    };
    info!(listen = %address, "giving streams to programs that have the key of a Mirror");
    serve(listener, reports, bpffs.into()).await;
}

async fn serve(listener: TcpListener, reports: Reports, bpffs: Arc<Path>) {
    let places = Places::default();
    let mut strangers = VecDeque::<AbortHandle>::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                strangers.retain(|stranger| !stranger.is_finished());
                if strangers.len() == STRANGERS
                    && let Some(oldest) = strangers.pop_front()
                {
                    oldest.abort();
                }
                let (reports, bpffs, places) = (reports.clone(), Arc::clone(&bpffs), places.clone());
                strangers.push_back(tokio::spawn(meet(stream, reports, bpffs, places)).abort_handle());
                // Many connections at once must not hold up the loop, nor each other.
                tokio::task::yield_now().await;
            }
            Err(error) => {
                warn!(%error, "cannot accept a connection to --stream-listen");
                sleep(PAUSE).await;
            }
        }
    }
}

/// A connection, until it has shown a key. Then another task goes on with it.
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
        let place = match places.take(&id) {
            Ok(place) => place,
            Err(why) => {
                // A program that has gone gets no answer.
                let _ = timeout(PATIENCE, stream.write_all(format!("{why}\n").as_bytes())).await;
                return;
            }
        };
        let mirror = id.to_string();
        if let Err(error) = give(stream, &request, &id, &keyed, reports, &bpffs).await {
            warn!(mirror, error = format!("{error:#}"), "a stream has ended");
        }
        drop(place);
    });
}

/// Gives the packets of a Mirror to a program, until one of both has gone.
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
    // Both processes have the connection in their own way of waiting. The writer asks whether the connection is ready, so
    // it does not matter that it never blocks.
    let output = stream.as_fd().try_clone_to_owned().context("cannot hand on the connection")?;
    let mut command = Command::new(env::current_exe().context("the path of this program")?);
    command.args(["tail", "--write", "-", "--mirror", &request.mirror, "--bpffs"]).arg(bpffs);
    if request.super_frames {
        command.arg("--super-frames");
    }
    command.stdin(Stdio::null()).stdout(output).spawn().context("cannot start `mirror-agent tail`")
}

fn outcome(ended: io::Result<std::process::ExitStatus>) -> anyhow::Result<()> {
    match ended.context("`mirror-agent tail`")? {
        status if status.success() => Ok(()),
        status => {
            Err(anyhow!("`mirror-agent tail` has failed ({status}); the lines before this one say why"))
        }
    }
}

#[cfg(test)]
mod tests;
