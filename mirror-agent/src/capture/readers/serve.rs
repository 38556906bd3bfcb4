//! The requests of a server: packets and reports of this node, over HTTP/2.
//!
//! ```text
//! POST /v1/packets  a line with a ReadRequest. While the server wants packets, it does not end the body
//!   200             pcapng, as `tail` writes it, with a Finding for each selected pod, or the interface, and each
//!                   change, and one without both ("ready") after the first ones; the counters each second and at the
//!                   end. The past alone has the first Findings at its end
//! POST /v1/reports  a line with a ReportRequest
//!   200             an array of PodReports
//! 400, 409 (the interface cannot be read), 429 (no place for a reader), 503: the reason, as text
//! ```
//!
//! A reader has a thread, because its end waits for the pipe:
//!
//! ```text
//! thread: ring ─► recording ─► pipe ─► body of the answer ─► window of the stream ─► server
//! ```
//!
//! If a server does not read, the pipe and then the ring fill up, and the taps count the lost packets.

use std::{
    collections::BTreeSet, convert::Infallible, fs::File, future::Future, io, path::PathBuf, sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, bail};
use futures_util::stream;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Frame, Incoming},
    server::conn::http2,
    service::service_fn,
    upgrade::Upgraded,
};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use mirror_api::packets::{ReadOf, ReadRequest, ReportRequest};
use mirror_core::{settings::show_kubernetes_duration, status::Finding};
use serde::de::DeserializeOwned;
use tokio::{
    io::AsyncReadExt as _,
    net::unix::pipe,
    runtime,
    sync::{Semaphore, mpsc, oneshot},
    task::{JoinHandle, spawn_blocking},
    time::{Instant, MissedTickBehavior, interval_at, timeout},
};
use tracing::{info, warn};

use super::{PING, PING_TIMEOUT, Refused, WINDOW, reports};
use crate::{
    capture::{
        control::{self, Subject},
        tail::{self, Ask, Since},
    },
    model::{MirrorId, PodId, RingId},
    report::{Report, Reports},
    select::{Coverage, MAX_READERS, Skipped, Why},
    sources::kube::directions,
    util::places::{Place, Places},
};

/// Maximum number of requests for packets of a namespace. `kubectl mirror tail` sends one for each of up to 5 pods.
const FOR_A_NAMESPACE: usize = MAX_READERS - 1;
/// Maximum number of readings of the node's status at a time, for reports.
const MAX_REPORTS: usize = 2;
/// Maximum number of streams of a connection: twice the number of requests that are served, so that other readers are
/// refused at once.
const MAX_STREAMS: u32 = 2 * (MAX_READERS + MAX_REPORTS) as u32;
/// Maximum length of a request in bytes: a filter and a selector have up to 8 KiB each.
const MOST_BYTES: usize = 64 << 10;
/// Timeout for a request.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum length of a part of an answer in bytes: a frame of HTTP/2.
const PART: usize = 16 << 10;
/// Interval of the counters.
const COUNT: Duration = Duration::from_secs(1);
/// The message about a pod or an interface that is read.
const READ: &str = "its packets are read";

type Body = UnsyncBoxBody<Bytes, io::Error>;

/// The node, as it serves requests.
pub(super) struct Node {
    reports: Reports,
    bpffs: PathBuf,
    max_duration: Duration,
    readers: Places,
    reporters: Arc<Semaphore>,
}

/// Serves the requests on a connection until it ends.
pub(super) async fn serve(node: &Arc<Node>, connection: Upgraded) -> hyper::Result<()> {
    let service = |request: Request<Incoming>| {
        let node = Arc::clone(node);
        async move { Ok::<_, Infallible>(node.answer(request).await) }
    };
    http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_send_buf_size(WINDOW as usize)
        .keep_alive_interval(PING)
        .keep_alive_timeout(PING_TIMEOUT)
        .serve_connection(connection, service_fn(service))
        .await
}

impl Node {
    pub(super) fn new(reports: Reports, bpffs: PathBuf, max_duration: Duration) -> Self {
        let reporters = Arc::new(Semaphore::new(MAX_REPORTS));
        Self { reports, bpffs, max_duration, readers: Places::default(), reporters }
    }

    async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let answered = match (request.method(), request.uri().path()) {
            (&Method::POST, "/v1/packets") => self.packets(request.into_body()).await,
            (&Method::POST, "/v1/reports") => self.pod_reports(request.into_body()).await,
            _ => Err(Refused(StatusCode::NOT_FOUND, "the agent knows no such request".to_owned())),
        };
        answered.unwrap_or_else(|Refused(status, why)| {
            let mut response = whole(why);
            *response.status_mut() = status;
            response
        })
    }

    async fn pod_reports(&self, mut body: Incoming) -> Result<Response<Body>, Refused> {
        let request: ReportRequest = read_line(&mut body).await?;
        // The server gives up after some time, which ends this future.
        let reports = reports::answer(&self.bpffs, request, &self.reporters).await;
        reports.map(whole).map_err(|why| Refused(StatusCode::SERVICE_UNAVAILABLE, format!("{why:#}")))
    }

    async fn packets(&self, mut body: Incoming) -> Result<Response<Body>, Refused> {
        let request: ReadRequest = read_line(&mut body).await?;
        let subject = self.subject(&request);
        let subject = subject.map_err(|why| Refused(StatusCode::BAD_REQUEST, format!("{why:#}")))?;
        if !self.reports.borrow().is_reconciled {
            let why = "the agent is not ready yet; `mirror-agent status` on its node shows why";
            return Err(Refused(StatusCode::SERVICE_UNAVAILABLE, why.to_owned()));
        }
        let place = self.place(&request.of).map_err(|why| Refused(StatusCode::TOO_MANY_REQUESTS, why))?;
        let pipe = pipe::pipe().and_then(|(to, from)| Ok((to.into_blocking_fd()?, from)));
        let (to, from) =
            pipe.map_err(|error| Refused(StatusCode::SERVICE_UNAVAILABLE, format!("no pipe: {error}")))?;
        let (asks, asked) = mpsc::channel(1);
        let (joined, joins) = oneshot::channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let ReadRequest { of, super_frames, reader, .. } = request;
        info!(reader, "a user reads packets");
        let reading = on_thread(move || async move {
            let _place = place;
            let stop = async {
                let _ = stopped.await;
            };
            tail::stream(&subject, File::from(to), super_frames, asked, joined, stop).await
        });
        let Ok(ring) = joins.await else {
            let code = match of {
                ReadOf::Interface(_) => StatusCode::CONFLICT,
                ReadOf::Pods { .. } => StatusCode::SERVICE_UNAVAILABLE,
            };
            let why = outcome(reading).await.err();
            return Err(Refused(code, why.unwrap_or_else(|| "the agent has ended the request".to_owned())));
        };
        let interface = if let ReadOf::Interface(name) = of { Some(name) } else { None };
        let reports = self.reports.clone();
        tokio::spawn(async move {
            tokio::select! {
                // The server wants no more packets, or has disconnected.
                () = async { while let Some(Ok(_)) = body.frame().await {} } => {}
                () = tell(ring, interface, reports, asks) => {}
            }
            drop(stop);
            match outcome(reading).await {
                Ok(()) => info!(reader, "a user has read packets"),
                Err(error) => warn!(reader, error, "packets for a user have ended"),
            }
        });
        Ok(Response::new(parts(from)))
    }

    /// Takes a place for a request for packets.
    fn place(&self, of: &ReadOf) -> Result<Place, String> {
        let mut counted = vec![("requests on the node".to_owned(), MAX_READERS)];
        if let ReadOf::Pods { namespace: Some(namespace), .. } = of {
            counted.push((format!("requests for the namespace {namespace} on the node"), FOR_A_NAMESPACE));
        }
        self.readers.take(counted)
    }

    /// The packets of a request.
    fn subject(&self, request: &ReadRequest) -> anyhow::Result<tail::Subject> {
        let ReadRequest { of, direction, settings, since_seconds, follow, .. } = request;
        let (most, mut settings) = (self.max_duration, Box::new(settings.clone()));
        let duration = control::read(&settings)?.budget.duration.map_or(most, |time| time.min(most));
        // The kernel ends a reader, too, even if neither the server nor this thread does.
        settings.limits.get_or_insert_default().duration = Some(show_kubernetes_duration(duration));
        let of = Subject::Reader { of: of.clone(), direction: directions(*direction), settings };
        let since = since_seconds.map(|time| Since { time: Duration::from_secs(time), is_all: !follow });
        let request = control::Request { of, ring_bytes: control::READER_RING };
        Ok(tail::Subject { request, bpffs: self.bpffs.clone(), since, duration: Some(duration) })
    }
}

/// Reads the first line of a body.
async fn read_line<T: DeserializeOwned>(body: &mut Incoming) -> Result<T, Refused> {
    let read = async {
        let mut line = Vec::new();
        while !line.ends_with(b"\n") {
            let frame = body.frame().await.context("the request is not complete")??;
            line.extend_from_slice(&frame.into_data().unwrap_or_default());
            if line.len() > MOST_BYTES {
                bail!("the request has more than {MOST_BYTES} bytes");
            }
        }
        Ok(serde_json::from_slice(&line)?)
    };
    let read = timeout(PATIENCE, read).await.context("the request has not come in time").flatten();
    read.map_err(|why| Refused(StatusCode::BAD_REQUEST, format!("{why:#}")))
}

/// An answer that is known as a whole.
fn whole(body: impl Into<Bytes>) -> Response<Body> {
    let body: Bytes = body.into();
    Response::new(Full::new(body).map_err(|never| match never {}).boxed_unsync())
}

/// A body with everything that comes out of a pipe.
fn parts(pipe: pipe::Receiver) -> Body {
    let parts = stream::try_unfold(pipe, |mut pipe: pipe::Receiver| async move {
        let mut part = Vec::<u8>::with_capacity(PART);
        pipe.read_buf(&mut part).await?;
        Ok::<_, io::Error>((!part.is_empty()).then(|| (Frame::data(Bytes::from(part)), pipe)))
    });
    StreamBody::new(parts).boxed_unsync()
}

/// Does work on a thread of its own, which can wait without delaying others.
pub(super) fn on_thread<T, F>(work: impl FnOnce() -> F + Send + 'static) -> JoinHandle<anyhow::Result<T>>
where
    T: Send + 'static,
    F: Future<Output = anyhow::Result<T>>,
{
    spawn_blocking(move || runtime::Builder::new_current_thread().enable_all().build()?.block_on(work()))
}

/// The outcome of work on a thread, or what has kept it from being done.
async fn outcome<T>(work: JoinHandle<anyhow::Result<T>>) -> Result<T, String> {
    work.await.map_err(anyhow::Error::from).flatten().map_err(|why| format!("{why:#}"))
}

/// Writes notes and counters among the packets of a reader, until the reading ends.
async fn tell(ring: RingId, interface: Option<String>, mut reports: Reports, asks: mpsc::Sender<Ask>) {
    let ready = Finding { message: "ready".to_owned(), ..Finding::default() };
    let (mut told, mut first) = (BTreeSet::new(), serde_json::to_string(&ready).ok());
    let mut count = interval_at(Instant::now() + COUNT, COUNT);
    count.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let now = notes(&reports.borrow_and_update(), ring, interface.as_ref());
        let new: Vec<_> = now.difference(&told).cloned().chain(first.take()).collect();
        told = now;
        if !new.is_empty() && asks.send(Ask::Notes(new)).await.is_err() {
            return;
        }
        tokio::select! {
            Ok(()) = reports.changed() => {}
            _ = count.tick() => {
                if asks.send(Ask::Count).await.is_err() {
                    return;
                }
            }
            () = asks.closed() => return,
        }
    }
}

/// The notes about the pods that a reader selects, or about its interface, in JSON.
fn notes(report: &Report, ring: RingId, interface: Option<&String>) -> BTreeSet<String> {
    let note = |pod: Option<&PodId>, nic: Option<&String>, reason: &str, message: &str| Finding {
        pod: pod.map(PodId::to_string),
        nic: nic.cloned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        ..Finding::default()
    };
    if interface.is_some() {
        let number = |mirror: &MirrorId| mirror.0.capture_number();
        let is_of_it = |of: &&Skipped| of.mirror.as_ref().and_then(number) == Some(ring.0);
        let why = report.skipped.iter().find(is_of_it).map(|of| &of.why);
        let message = why.map_or_else(|| READ.to_owned(), Why::to_string);
        let note = note(None, interface, why.map(Why::name).unwrap_or_default(), &message);
        return serde_json::to_string(&note).into_iter().collect();
    }
    let Some(Coverage { of, covered, not_covered }) = report.readers.get(&ring) else {
        return BTreeSet::new();
    };
    let refused = of.refused.iter().map(|(reason, message)| note(None, None, reason, message));
    let read = covered.iter().map(|pod| note(Some(pod), None, "", READ));
    let unread = not_covered.iter();
    let unread = unread.map(|of| note(Some(&of.pod), of.nic.as_ref(), of.reason, &of.message));
    refused.chain(read).chain(unread).filter_map(|note| serde_json::to_string(&note).ok()).collect()
}

#[cfg(test)]
mod tests;
