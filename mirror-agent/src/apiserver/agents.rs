//! [`Agents`]: the agents that have dialled this server, and requests to them.
//!
//! ```text
//! agent ─► GET /agent, Upgrade ─► its token (TokenReview) ─► the node ─► 101, then HTTP/2: this server is the client
//! ```
//!
//! The other end is [`readers`](crate::capture::readers). An agent speaks for the node of its token alone: the token
//! has the audience of this API, belongs to the agents' ServiceAccount, and is bound to a pod of that node. Anyone can
//! connect, so a connection has no effect until its token is accepted.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::Context as _;
use futures_util::stream;
use http_body_util::{BodyExt as _, Limited, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    Method, Request, Response, StatusCode, Uri,
    body::{Bytes, Frame, Incoming},
    client::conn::http2,
    header::{AUTHORIZATION, CONNECTION, HeaderName, HeaderValue, UPGRADE},
    server::conn::http1,
    service::service_fn,
    upgrade::{self, Upgraded},
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use k8s_openapi::api::{
    authentication::v1::{TokenReview, TokenReviewSpec},
    core::v1::Pod,
};
use kube::{Api, Client, api::PostParams};
use mirror_api::packets::{GROUP, PodReport, ReadRequest, ReportRequest};
use mirror_core::status::printable;
use serde::Serialize;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::{Semaphore, mpsc, watch},
    time::timeout,
};
use tracing::{debug, info};

use super::{query::Refusal, reports::decode};
use crate::capture::readers::{PATH, PING, PING_TIMEOUT, PROTOCOL, Refused, WINDOW};

/// Timeout for an agent to be accepted, and for its answer to a request.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum length of the head of a request in bytes: the minimum that hyper allows.
const MOST_HEAD: usize = 8192;
/// The window of a connection in bytes: the sum of the windows of all requests that an agent serves.
const ALL_WINDOWS: u32 = 8 * WINDOW;
/// Maximum length of the reports of a node in bytes, maximum number of nodes whose reports are received at a time, and
/// timeout for that.
const MOST_REPORTS: usize = 4 << 20;
const REPORTS: usize = 8;
const TRANSFER: Duration = Duration::from_secs(3);
/// Maximum length of an agent's reason for a refusal in bytes, and of its beginning that users see.
const MOST_REASON: usize = 64 << 10;
const MOST_SHOWN: usize = 1 << 10;
/// Maximum number of tokens that are reviewed at a time.
const REVIEWS: usize = 16;

/// The agents that may connect.
#[derive(Debug, Clone)]
pub struct AgentOptions {
    /// Their namespace.
    pub namespace: String,
    /// Their ServiceAccount.
    pub service_account: String,
}

/// The connected agents, by node. The newest connection of a node wins.
#[derive(Debug, Clone, Default)]
pub struct Agents(watch::Sender<BTreeMap<String, Agent>>);

/// The connection to an agent.
#[derive(Debug, Clone)]
pub struct Agent {
    /// Distinguishes it from earlier connections.
    pub id: u64,
    send: http2::SendRequest<Parts>,
}

/// The packets of a node. Dropping it resets the stream.
#[derive(Debug)]
pub struct Reading {
    /// Dropping it tells the agent to end: the rest of the packets and the counters follow.
    pub let_go: mpsc::Sender<Bytes>,
    /// One section of pcapng.
    pub body: Incoming,
}

/// The body of a request, which ends with its sender.
type Parts = UnsyncBoxBody<Bytes, Infallible>;

impl Agents {
    /// The connected agents, and each change.
    pub fn watch(&self) -> watch::Receiver<BTreeMap<String, Agent>> {
        self.0.subscribe()
    }

    /// Serves a connection until it is refused, or an agent is accepted, for which another task goes on.
    pub async fn serve(
        &self,
        client: &Client,
        options: &AgentOptions,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    ) {
        let admitted = timeout(PATIENCE, admit(client, options, stream)).await;
        match admitted.context("the agent has not been accepted in time").flatten() {
            Ok((node, connection)) => {
                tokio::spawn(self.clone().keep(node, connection));
            }
            // Anyone can connect. An agent logs the reason itself.
            Err(error) => debug!(error = format!("{error:#}"), "a connection of an agent was refused"),
        }
    }

    /// Keeps an agent connected until its connection ends.
    async fn keep(self, node: String, connection: Upgraded) {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let connected = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(ALL_WINDOWS)
            .keep_alive_interval(PING)
            .keep_alive_timeout(PING_TIMEOUT)
            .keep_alive_while_idle(true)
            .handshake::<_, Parts>(connection);
        let Ok((send, connection)) = connected.await else { return };
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        // An earlier connection ends with its last request.
        self.0.send_modify(|agents| {
            agents.insert(node.clone(), Agent { id, send });
        });
        info!(node, "the agent of a node has connected");
        let error = connection.await.err().map(|error| mirror_client::in_words(&error));
        self.0.send_if_modified(|agents| {
            let is_newest = agents.get(&node).is_some_and(|agent| agent.id == id);
            is_newest && agents.remove(&node).is_some()
        });
        info!(node, error, "a connection to the agent of a node has ended");
    }
}

/// Waits for the request of an agent, and accepts or refuses it. Returns the node, and the connection.
async fn admit(
    client: &Client,
    options: &AgentOptions,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> anyhow::Result<(String, Upgraded)> {
    let admitted = OnceLock::new();
    let answer = |mut request: Request<Incoming>| {
        let admitted = &admitted;
        async move {
            let mut response = Response::new(String::new());
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
            response.headers_mut().insert(UPGRADE, HeaderValue::from_static(PROTOCOL));
            let checked = match token(&request) {
                Ok(token) => node_of(client, options, token).await,
                Err(refused) => Err(refused),
            };
            *response.status_mut() = match checked {
                Ok(node) => {
                    // It is empty: after this answer, the connection has no more requests.
                    let _ = admitted.set((node, upgrade::on(&mut request)));
                    StatusCode::SWITCHING_PROTOCOLS
                }
                Err(Refused(status, why)) => {
                    // A connection has one token reviewed.
                    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close, upgrade"));
                    *response.body_mut() = why;
                    status
                }
            };
            Ok::<_, Infallible>(response)
        }
    };
    http1::Builder::new()
        .header_read_timeout(None)
        .max_buf_size(MOST_HEAD)
        .serve_connection(TokioIo::new(stream), service_fn(answer))
        .with_upgrades()
        .await?;
    let (node, connection) = admitted.into_inner().context("it has not become an agent")?;
    Ok((node, connection.await?))
}

/// The token of a request to become an agent.
fn token<B>(request: &Request<B>) -> Result<String, Refused> {
    let header = |name: HeaderName| request.headers().get(name).and_then(|value| value.to_str().ok());
    if (request.method(), request.uri().path()) != (&Method::GET, PATH) {
        return Err(Refused(StatusCode::NOT_FOUND, format!("the only request is GET {PATH}")));
    }
    if header(UPGRADE) != Some(PROTOCOL) {
        return Err(Refused(StatusCode::UPGRADE_REQUIRED, format!("this server speaks {PROTOCOL}")));
    }
    let token = header(AUTHORIZATION).and_then(|value| value.strip_prefix("Bearer "));
    let missing = || Refused(StatusCode::UNAUTHORIZED, "there is no token".to_owned());
    token.map(str::to_owned).ok_or_else(missing)
}

/// The node of the agent that has a token.
async fn node_of(client: &Client, options: &AgentOptions, token: String) -> Result<String, Refused> {
    static TURN: Semaphore = Semaphore::const_new(REVIEWS);
    let AgentOptions { namespace, service_account } = options;
    let failed =
        |error: kube::Error| Refused(StatusCode::SERVICE_UNAVAILABLE, mirror_client::in_words(&error));
    let forbidden = |why: String| Refused(StatusCode::FORBIDDEN, why);
    let spec = TokenReviewSpec { token: Some(token), audiences: Some(vec![GROUP.to_owned()]) };
    let review = TokenReview { spec, ..TokenReview::default() };
    let reviews = Api::<TokenReview>::all(client.clone());
    let turn = TURN.acquire().await;
    let review = reviews.create(&PostParams::default(), &review).await.map_err(failed)?;
    drop(turn);
    let status = review.status.unwrap_or_default();
    // An API server that knows no audiences accepts any.
    let is_ours = status.audiences.iter().flatten().any(|audience| audience == GROUP);
    let user = status.user.filter(|_| status.authenticated == Some(true) && is_ours);
    let invalid = || Refused(StatusCode::UNAUTHORIZED, "the token is not valid for this server".to_owned());
    let user = user.ok_or_else(invalid)?;
    let expected = format!("system:serviceaccount:{namespace}:{service_account}");
    if user.username.as_ref() != Some(&expected) {
        return Err(forbidden(format!("the token is not one of {expected}")));
    }
    let extra = user.extra.unwrap_or_default();
    let extra = |key: &str| extra.get(&format!("authentication.kubernetes.io/{key}"))?.first().cloned();
    if let Some(node) = extra("node-name") {
        return Ok(node);
    }
    // Before Kubernetes 1.30, a token has the pod alone.
    let pod = extra("pod-name").zip(extra("pod-uid"));
    let (name, uid) = pod.ok_or_else(|| forbidden("the token is bound to no pod".to_owned()))?;
    let pod = Api::<Pod>::namespaced(client.clone(), namespace).get_opt(&name).await.map_err(failed)?;
    let pod = pod.filter(|pod| pod.metadata.uid.as_ref() == Some(&uid));
    let node = pod.and_then(|pod| pod.spec?.node_name);
    node.ok_or_else(|| forbidden(format!("the pod {namespace}/{name} of the token is on no node")))
}

impl Agent {
    /// Requests packets.
    ///
    /// # Errors
    ///
    /// The agent refuses the request, or does not answer.
    pub async fn read(&self, of: &ReadRequest) -> Result<Reading, Refusal> {
        within(PATIENCE, self.ask("/v1/packets", of)).await
    }

    /// Requests reports about pods.
    ///
    /// # Errors
    ///
    /// As [`Self::read`], or the answer is too long.
    pub async fn reports(&self, of: &ReportRequest) -> Result<Vec<PodReport>, Refusal> {
        static TURN: Semaphore = Semaphore::const_new(REPORTS);
        let Reading { body, let_go: _let_go } = within(PATIENCE, self.ask("/v1/reports", of)).await?;
        // Until then, the agent keeps all but a window of its answer.
        let _turn = TURN.acquire().await;
        within(TRANSFER, async {
            let reports = Limited::new(body, MOST_REPORTS).collect().await;
            let reports = reports.map_err(|error| Refusal::unavailable(error.to_string()))?;
            decode(&reports.to_bytes())
        })
        .await
    }

    /// Sends a request: a line, after which its body stays open.
    async fn ask(&self, path: &'static str, of: &impl Serialize) -> Result<Reading, Refusal> {
        let line = serde_json::to_vec(of).map_err(|error| Refusal::unavailable(error.to_string()))?;
        let (let_go, parts) = mpsc::channel::<Bytes>(1);
        // The channel has room.
        let _ = let_go.try_send([line, b"\n".to_vec()].concat().into());
        let parts = stream::unfold(parts, |mut parts| async move {
            let part = Frame::data(parts.recv().await?);
            Some((Ok::<_, Infallible>(part), parts))
        });
        let mut request = Request::new(StreamBody::new(parts).boxed_unsync());
        *request.method_mut() = Method::POST;
        *request.uri_mut() = Uri::from_static(path);
        let answer = self.send.clone().send_request(request).await;
        let answer = answer.map_err(|error| Refusal::unavailable(mirror_client::in_words(&error)))?;
        let (status, body) = (answer.status(), answer.into_body());
        if status == StatusCode::OK {
            return Ok(Reading { let_go, body });
        }
        let why = Limited::new(body, MOST_REASON).collect().await.map(|why| why.to_bytes());
        let why = String::from_utf8_lossy(&why.unwrap_or_default()).into_owned();
        Err(match status {
            StatusCode::BAD_REQUEST => Refusal::new(400, "BadRequest", why),
            StatusCode::CONFLICT => Refusal::new(409, "Conflict", why),
            StatusCode::TOO_MANY_REQUESTS => Refusal::for_now(429, "TooManyRequests", why),
            _ => Refusal::unavailable(why),
        })
    }
}

/// The outcome of a request to an agent that answers in time. The message of a failure can have text of the agent, so it
/// is cut, and made printable for terminals.
async fn within<T>(time: Duration, asked: impl Future<Output = Result<T, Refusal>>) -> Result<T, Refusal> {
    let late = || {
        let why = format!("the agent of the node has not answered in {} s", time.as_secs());
        Refusal::for_now(504, "Timeout", why)
    };
    timeout(time, asked).await.unwrap_or_else(|_| Err(late())).map_err(|refusal| {
        let shown = &refusal.message[..refusal.message.floor_char_boundary(MOST_SHOWN)];
        Refusal { message: printable(shown), ..refusal }
    })
}
