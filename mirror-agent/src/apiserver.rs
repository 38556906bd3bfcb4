//! The server of the API of packets, behind kube-apiserver.
//!
//! ```text
//! kubectl ─► kube-apiserver ─► query        what is requested, and what kube-apiserver has to authorise for it
//!                              front_proxy  the user, and whether kube-apiserver authorises the request again
//!                              packets      the streams of the agents, merged   ◄─┐
//!                              reports      the reports of the agents           ◄─┤
//! agent ─────────────────────────────────────────────────────────────────────► agents
//! ```
//!
//! Agents connect to this server, and it sends requests over their connections. Anyone can connect to both ports; a
//! client that is not authenticated within [`PATIENCE`] is disconnected. [`certificates`] maintains the certificate of
//! both. The server stores nothing, so several replicas run side by side.

pub mod agents;
pub mod certificates;
pub mod front_proxy;
pub mod limits;
pub mod names;
pub mod packets;
pub mod query;
pub mod reports;
pub mod told;

use std::{convert::Infallible, future::Future, io, net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use http::{HeaderMap, request::Parts};
use http_body_util::{BodyExt as _, Full, combinators::BoxBody};
use hyper::{
    Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::{ACCEPT, CONTENT_TYPE, HeaderValue, RETRY_AFTER},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use kube::Client;
use mirror_api::packets::{GROUP, VERSION};
use rustls::{ServerConfig, pki_types::CertificateDer, version::TLS13};
use serde_json::{Value, json};
use tokio::{
    net::TcpStream,
    sync::{mpsc, watch},
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tracing::{debug, error, info};

use self::{
    agents::{AgentOptions, Agents},
    certificates::Certificates,
    front_proxy::FrontProxy,
    limits::Limits,
    query::{Cause, Open, Query, Refusal},
};
use crate::{report::metrics::apiserver::ApiserverMetrics, util::accept};

/// Timeout for kube-apiserver, and for clients to authenticate.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum number of connections before authentication: for kube-apiserver, and for agents, which all dial at the
/// same time after an outage. A new connection evicts the oldest.
const STRANGERS: usize = 64;
const NEW_AGENTS: usize = 1024;
/// Maximum number of headers. There is one for each group of a user.
const HEADERS: usize = 1024;
/// The time without a request after which a connection is closed. kube-apiserver closes it before, after 90 s.
const IDLE: Duration = Duration::from_secs(120);
/// The seconds after which the kernel closes the connection of a client that acknowledges nothing, and from Linux 5.11
/// on also of one that has no room for more. A request gives up such a client before, so that the log has the reason.
const SILENCE: u32 = 90;
/// Timeout for requests to end at the end of the server.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// The body of an answer.
pub type Body = BoxBody<Bytes, Infallible>;

/// What the flags say.
pub struct Options {
    /// The namespace of the server.
    pub namespace: String,
    /// The Service of the server.
    pub service: String,
    /// Which connections are those of agents.
    pub agents: AgentOptions,
    /// Maximum rate of a request for packets, in bits per second.
    pub max_rate: u64,
    /// Maximum duration of a request for packets.
    pub max_duration: Duration,
    /// Whether an Event on a pod says who reads its packets.
    pub pod_events: bool,
}

/// The state that all requests share.
pub struct Server {
    /// The client of the Kubernetes API.
    pub client: Client,
    /// Who sends requests, and with which rights.
    pub front_proxy: Arc<FrontProxy>,
    /// The certificate of this server.
    pub certificates: Arc<Certificates>,
    /// The connected agents.
    pub agents: Agents,
    /// The places for requests.
    pub limits: Limits,
    /// The metrics.
    pub metrics: ApiserverMetrics,
    /// The options.
    pub options: Options,
    /// Whether the server ends.
    pub stop: watch::Receiver<bool>,
}

impl Server {
    /// Whether requests can be served; otherwise the reason.
    pub fn ready(&self) -> Result<(), String> {
        if !self.certificates.is_ready() {
            return Err("there is no certificate yet that kube-apiserver trusts".into());
        }
        if !self.front_proxy.is_ready() {
            return Err("the API server has not said yet how it identifies itself".into());
        }
        Ok(())
    }

    /// The text of all metrics.
    pub fn scrape(&self) -> anyhow::Result<String> {
        self.metrics.text(self.agents.watch().borrow().len())
    }

    /// Becomes ready when the server ends.
    pub async fn stopped(&self) {
        // Also if nobody can say so any more.
        let _ = self.stop.clone().wait_for(|stop| *stop).await;
    }

    /// Answers a request of a client with this certificate.
    async fn answer(self: &Arc<Self>, peer: &[CertificateDer<'_>], request: &Parts) -> Response<Body> {
        let query = query::parse(&request.method, &request.uri);
        let resource = match &query {
            Ok(Query::Packets(packets)) => packets.scope.attributes()[1].to_owned(),
            Ok(Query::Reports(reports)) => reports.scope.attributes()[1].to_owned(),
            _ => String::new(),
        };
        let response = self.serve(query, peer, &request.headers).await.unwrap_or_else(|why| status(&why));
        self.metrics.answered(&resource, response.status().as_u16());
        response
    }

    async fn serve(
        self: &Arc<Self>,
        query: Result<Query, Refusal>,
        peer: &[CertificateDer<'_>],
        headers: &HeaderMap,
    ) -> Result<Response<Body>, Refusal> {
        let user = self.front_proxy.user(peer, headers)?;
        match query? {
            // Without a review: kube-apiserver itself reads these all the time, to know whether this server is there.
            Query::Open(open) => Ok(document(open)),
            Query::Reports(reports) => {
                self.front_proxy.authorise(&user, &reports.scope).await?;
                let _place = self.limits.reports(&user.name)?;
                let accept = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok());
                reports::serve(self, &reports, accept).await
            }
            Query::Packets(packets) => {
                self.front_proxy.authorise(&user, &packets.scope).await?;
                packets::serve(Arc::clone(self), *packets, user).await
            }
        }
    }
}

/// Answers what everyone may read.
fn document(open: Open) -> Response<Body> {
    let group_version = format!("{GROUP}/{VERSION}");
    let version = json!({ "groupVersion": group_version, "version": VERSION });
    let group = json!({
        "kind": "APIGroup", "apiVersion": "v1", "name": GROUP, "versions": [version], "preferredVersion": version,
    });
    let resource = |name: &str, kind: &str, is_namespaced: bool, verbs: &[&str]| {
        let singular = kind.to_lowercase();
        json!({
            "name": name, "singularName": singular, "kind": kind, "namespaced": is_namespaced, "verbs": verbs,
        })
    };
    let document = match open {
        Open::Groups => json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": [group] }),
        Open::Versions => group,
        Open::Resources => json!({
            "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version,
            "resources": [
                resource("nodepackets", "NodePackets", false, &["watch"]),
                resource("packets", "Packets", true, &["watch"]),
                resource("podreports", "PodReport", true, &["get", "list"]),
            ],
        }),
    };
    in_json(StatusCode::OK, &document)
}

/// The answer to a request that is not served: a Status of Kubernetes.
pub fn status(refusal: &Refusal) -> Response<Body> {
    let Refusal { code, reason, message, causes, retry } = refusal;
    let cause = |Cause { reason, field, message }: &Cause| json!({ "reason": reason, "field": field, "message": message });
    let causes: Vec<_> = causes.iter().map(cause).collect();
    let document = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code, "reason": reason,
        "message": message,
        "details": { "group": GROUP, "causes": causes, "retryAfterSeconds": retry.unwrap_or_default() },
    });
    let code = StatusCode::from_u16(*code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = in_json(code, &document);
    if let Some(seconds) = *retry {
        response.headers_mut().insert(RETRY_AFTER, seconds.into());
    }
    response
}

fn in_json(code: StatusCode, document: &Value) -> Response<Body> {
    let mut response = Response::new(Full::<Bytes>::from(document.to_string()).boxed());
    *response.status_mut() = code;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Serves kube-apiserver at one address and agents at another, until the server ends. Then requests have a short time
/// to end.
pub async fn run(server: &Arc<Server>, listen: SocketAddr, agents_listen: SocketAddr) {
    // The receiver gets nothing. It is ready when no connection has a sender any more.
    let (open, mut ended) = mpsc::channel::<Infallible>(1);
    let of_clients = Arc::clone(server);
    let clients = move |stream| attend(Arc::clone(&of_clients), stream, open.clone());
    let tls = || server.front_proxy.tls(server.certificates.clone());
    let tls_of_agents = ServerConfig::builder_with_protocol_versions(&[&TLS13]).with_no_client_auth();
    let tls_of_agents = Arc::new(tls_of_agents.with_cert_resolver(server.certificates.clone()));
    let of_agents = Arc::clone(server);
    let agents = move |stream: TlsStream<TcpStream>| {
        let server = Arc::clone(&of_agents);
        async move { server.agents.serve(&server.client, &server.options.agents, stream).await }
    };
    tokio::select! {
        () = serve_at(listen, STRANGERS, "--apiserver-listen", tls, clients) => {}
        () = serve_at(agents_listen, NEW_AGENTS, "--agents-listen", || Arc::clone(&tls_of_agents), agents) => {}
        () = server.stopped() => {}
    }
    let _ = timeout(LAST_WORDS, ended.recv()).await;
}

/// Accepts TLS connections forever, each in a task.
async fn serve_at<F>(
    address: SocketAddr,
    most: usize,
    flag: &str,
    tls: impl Fn() -> Arc<ServerConfig>,
    attend: impl Fn(TlsStream<TcpStream>) -> F + Clone + Send + 'static,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let failed = |error: io::Error| {
        error!(%address, %error, "the server cannot listen, and retries; choose another {flag}");
    };
    let listener = accept::bind(address, failed).await;
    info!(%address, "listening, as {flag} says");
    let meet = |stream: TcpStream| {
        let (tls, attend) = (TlsAcceptor::from(tls()), attend.clone());
        async move {
            // Otherwise the kernel would hold back a block that soon follows another one.
            let _ = stream.set_nodelay(true);
            let _ = accept::close_if_silent(&stream, SILENCE);
            if let Ok(Ok(stream)) = timeout(PATIENCE, tls.accept(stream)).await {
                attend(stream).await;
            }
        }
    };
    accept::of_anybody(listener, most, flag, meet).await;
}

/// Serves a client: kube-apiserver in a task of its own until the connection ends, and others for a short time.
async fn attend(server: Arc<Server>, stream: TlsStream<TcpStream>, open: mpsc::Sender<Infallible>) {
    let peer: Arc<[_]> = stream.get_ref().1.peer_certificates().unwrap_or_default().into();
    let is_kube_apiserver = server.front_proxy.admits(&peer).is_some();
    let served = async move {
        let _open = open;
        let answer = service_fn(|request: Request<Incoming>| {
            let (server, peer) = (Arc::clone(&server), Arc::clone(&peer));
            // No request has a body.
            let head = request.into_parts().0;
            async move { Ok::<_, Infallible>(server.answer(&peer, &head).await) }
        });
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(IDLE).max_headers(HEADERS);
        let mut connection = pin!(http.serve_connection(TokioIo::new(stream), answer));
        let served = tokio::select! {
            served = connection.as_mut() => served,
            () = server.stopped() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = served {
            debug!(%error, "a connection of a client failed");
        }
    };
    if is_kube_apiserver {
        tokio::spawn(served);
    } else {
        let _ = timeout(PATIENCE, served).await;
    }
}
