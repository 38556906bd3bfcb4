//! `/healthz`, `/readyz`, `/metrics` over HTTP/1.
//!
//! The server reads state and changes nothing. It shares one thread with the work of the command, so its cost is
//! bounded: a connection carries one small request, each request has a deadline, and the number of connections is
//! limited. At the limit, a new connection evicts the oldest. So a silent client delays neither the loop nor a probe.
//! Spawned by `cmd::run` and `cmd::controller`.

use std::{collections::VecDeque, convert::Infallible, io, net::SocketAddr, sync::Arc, time::Duration};

use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::{ALLOW, CONTENT_TYPE, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    time::{sleep, timeout},
};
use tracing::{debug, error, info, warn};

use crate::metrics;

/// Maximum number of concurrent connections.
const CONNECTIONS: usize = 32;
/// Timeout from the accepted connection to the last byte of the answer.
const DEADLINE: Duration = Duration::from_secs(10);
/// Maximum length of a request in bytes: the minimum that hyper allows.
const REQUEST: usize = 8192;
/// The first and the longest delay before the next attempt to bind the address; the delay doubles.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Pause after `accept` failed, for example because descriptors or memory ran out.
const PAUSE: Duration = Duration::from_millis(100);

/// The sources of the answers, called for each request.
pub struct Admin {
    /// Whether the program is alive; otherwise the reason.
    pub alive: Check,
    /// Whether it is ready; otherwise the reason.
    pub ready: Check,
    /// Its metrics.
    pub metrics: Box<dyn Fn() -> anyhow::Result<String> + Send + Sync>,
}

/// An answer to a probe.
pub type Check = Box<dyn Fn() -> Result<(), String> + Send + Sync>;

/// Serves at `address` until the task is aborted. If the address cannot be bound, retries; `trouble` gets the reason,
/// and it is logged once. Mirroring does not depend on this server.
pub async fn run(address: SocketAddr, admin: Admin, trouble: watch::Sender<Option<String>>) {
    let mut wait = RETRY.0;
    let listener = loop {
        let why = match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(error) => format!(
                "cannot listen on {address}: {error}; choose another --listen, or switch it off with --listen ''"
            ),
        };
        let is_new = trouble.send_if_modified(|told| told.replace(why.clone()).as_ref() != Some(&why));
        if is_new {
            error!(
                error = why,
                "health, readiness and metrics are not served; mirroring continues, and the agent retries"
            );
        }
        sleep(wait).await;
        wait = (wait * 2).min(RETRY.1);
    };
    trouble.send_replace(None);
    let listen = listener.local_addr().unwrap_or(address);
    info!(%listen, "serving /healthz, /readyz and /metrics");
    serve(listener, admin).await;
}

/// Serves until the task is aborted.
async fn serve(listener: TcpListener, admin: Admin) {
    let admin = Arc::new(admin);
    let mut connections = VecDeque::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                connections.retain(|connection: &tokio::task::AbortHandle| !connection.is_finished());
                if connections.len() == CONNECTIONS
                    && let Some(oldest) = connections.pop_front()
                {
                    oldest.abort();
                }
                connections.push_back(tokio::spawn(connection(stream, Arc::clone(&admin))).abort_handle());
                // Many simultaneous connections must not delay the loop, nor each other.
                tokio::task::yield_now().await;
            }
            Err(error) if is_of_client(&error) => {}
            Err(error) => {
                warn!(%error, "cannot accept a connection to --listen");
                sleep(PAUSE).await;
            }
        }
    }
}

/// Whether the client disconnected before it was accepted.
fn is_of_client(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset)
}

/// Serves one request.
async fn connection(stream: TcpStream, admin: Arc<Admin>) {
    let answer = service_fn(|request: Request<Incoming>| {
        let response = admin.answer(request.method(), request.uri().path());
        async { Ok::<_, Infallible>(response) }
    });
    let served = http1::Builder::new()
        .keep_alive(false)
        .header_read_timeout(None)
        .max_buf_size(REQUEST)
        .serve_connection(TokioIo::new(stream), answer);
    match timeout(DEADLINE, served).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => debug!(%error, "a connection to --listen failed"),
        Err(_) => debug!("a connection to --listen took too long"),
    }
}

impl Admin {
    fn answer(&self, method: &Method, path: &str) -> Response<Full<Bytes>> {
        let answer: fn(&Self) -> Response<Full<Bytes>> = match path {
            "/healthz" => |admin| state((admin.alive)()),
            "/readyz" => |admin| state((admin.ready)()),
            "/metrics" => Self::metrics,
            _ => return text(StatusCode::NOT_FOUND, "there are /healthz, /readyz and /metrics\n".into()),
        };
        if !matches!(*method, Method::GET | Method::HEAD) {
            let mut response = text(StatusCode::METHOD_NOT_ALLOWED, "it can only be read\n".into());
            response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            return response;
        }
        answer(self)
    }

    fn metrics(&self) -> Response<Full<Bytes>> {
        match (self.metrics)() {
            Ok(metrics) => {
                let mut response = text(StatusCode::OK, metrics);
                response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(metrics::CONTENT_TYPE));
                response
            }
            Err(error) => {
                text(StatusCode::INTERNAL_SERVER_ERROR, format!("cannot read the metrics: {error:#}\n"))
            }
        }
    }
}

fn state(state: Result<(), String>) -> Response<Full<Bytes>> {
    match state {
        Ok(()) => text(StatusCode::OK, "ok\n".into()),
        Err(reason) => text(StatusCode::SERVICE_UNAVAILABLE, reason + "\n"),
    }
}

fn text(status: StatusCode, text: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}
