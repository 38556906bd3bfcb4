//! `/healthz`, `/readyz`, `/metrics` over HTTP/1.
//!
//! The server reads state and changes nothing. It shares one thread with the work of the command, so its cost is
//! bounded: a connection carries one small request, each request has a deadline, the number of connections is limited,
//! and metrics that took long are collected less often. At the limit, a new connection evicts the oldest. So neither a
//! silent client nor one that asks again and again delays the loop or a probe.
//! Spawned by `cli::run` and `cli::controller`.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    header::{ALLOW, CONTENT_TYPE, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use tokio::{net::TcpStream, sync::watch, time::timeout};
use tracing::{debug, error, info};

use crate::{
    kernel::cpu,
    report::metrics,
    util::{accept, told::is_news},
};

/// Maximum number of concurrent connections.
const CONNECTIONS: usize = 32;
/// Timeout from the accepted connection to the last byte of the answer.
const DEADLINE: Duration = Duration::from_secs(10);
/// Maximum length of a request in bytes: the minimum that hyper allows.
const REQUEST: usize = 8192;
/// Metrics are kept for this many times the CPU time that it took to compute them, or for [`WAITS`] times the whole time
/// if that is more, but not longer than [`LONGEST`].
const KEPT: u32 = 10;
const WAITS: u32 = 4;
/// Half of the chart's interval between two scrapes.
const LONGEST: Duration = Duration::from_secs(15);

/// The sources of the answers, called for each request.
pub struct Admin {
    /// Whether the program is alive; otherwise the reason.
    pub alive: Check,
    /// Whether it is ready; otherwise the reason.
    pub ready: Check,
    /// Its metrics, or the reason why they cannot be read; see [`kept`].
    pub metrics: Box<dyn Fn() -> Result<Bytes, String> + Send + Sync>,
}

/// An answer to a probe.
pub type Check = Box<dyn Fn() -> Result<(), String> + Send + Sync>;

/// Returns a source of metrics that computes them if the last ones are too old. All answers share one copy.
pub fn kept<F>(compute: F) -> Box<dyn Fn() -> Result<Bytes, String> + Send + Sync>
where
    F: Fn() -> anyhow::Result<String> + Send + Sync + 'static,
{
    let last = Mutex::new((Instant::now(), Ok(Bytes::new())));
    Box::new(move || {
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.0 <= Instant::now() {
            let (begun, cpu) = (Instant::now(), cpu::time());
            let metrics = compute().map(Bytes::from).map_err(|error| format!("{error:#}"));
            let lasts = kept_for(cpu::time().saturating_sub(cpu), begun.elapsed());
            *last = (Instant::now() + lasts, metrics);
        }
        last.1.clone()
    })
}

/// How long metrics are kept that took this CPU time and this time.
fn kept_for(cpu: Duration, whole: Duration) -> Duration {
    (cpu * KEPT).max(whole * WAITS).min(LONGEST)
}

/// Serves at `address` until the task is aborted. If the address cannot be bound, retries; `trouble` gets the reason,
/// and it is logged once. Mirroring does not depend on this server.
pub async fn run(address: SocketAddr, admin: Admin, trouble: watch::Sender<Option<String>>) {
    let failed = |error: io::Error| {
        let why = format!(
            "cannot listen on {address}: {error}; choose another --listen, or switch it off with --listen ''"
        );
        if trouble.send_if_modified(|told| is_news(told, &why)) {
            error!(
                error = why,
                "health, readiness and metrics are not served; mirroring continues, and the agent retries"
            );
        }
    };
    let listener = accept::bind(address, failed).await;
    trouble.send_replace(None);
    let listen = listener.local_addr().unwrap_or(address);
    info!(%listen, "serving /healthz, /readyz and /metrics");
    let admin = Arc::new(admin);
    let serve = |stream| connection(stream, Arc::clone(&admin));
    accept::of_anybody(listener, CONNECTIONS, "--listen", serve).await;
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
            _ => return text(StatusCode::NOT_FOUND, "there are /healthz, /readyz and /metrics\n"),
        };
        if !matches!(*method, Method::GET | Method::HEAD) {
            let mut response = text(StatusCode::METHOD_NOT_ALLOWED, "it can only be read\n");
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
                text(StatusCode::INTERNAL_SERVER_ERROR, format!("cannot read the metrics: {error}\n"))
            }
        }
    }
}

/// The answer to a probe.
fn state(state: Result<(), String>) -> Response<Full<Bytes>> {
    match state {
        Ok(()) => text(StatusCode::OK, "ok\n"),
        Err(reason) => text(StatusCode::SERVICE_UNAVAILABLE, reason + "\n"),
    }
}

fn text(status: StatusCode, text: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(text.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests panic")]

    use std::hint;

    use super::*;

    #[test]
    fn metrics_are_kept_by_the_time_that_they_took() {
        let ms = Duration::from_millis;
        assert_eq!(kept_for(ms(20), ms(20)), ms(200));
        assert_eq!(kept_for(ms(20), ms(1000)), ms(4000), "a busy node");
        assert_eq!(kept_for(ms(2000), ms(2000)), LONGEST);
    }

    #[test]
    fn a_client_that_asks_again_and_again_gets_metrics_that_were_computed_before() {
        const TAKES: Duration = Duration::from_millis(20);
        let computed = Arc::new(Mutex::new(0_u32));
        let of_source = Arc::clone(&computed);
        let source = kept(move || {
            let begun = cpu::time();
            while cpu::time() - begun < TAKES {
                hint::spin_loop();
            }
            let mut computed = of_source.lock().unwrap();
            *computed += 1;
            Ok(computed.to_string())
        });
        let begun = Instant::now();
        while source().unwrap() != "3" {
            assert!(begun.elapsed() < LONGEST * 4, "old metrics are never computed again");
        }
        // Twice, the kept metrics have become too old.
        assert!(begun.elapsed() >= TAKES * KEPT * 2);
        assert_eq!(*computed.lock().unwrap(), 3);
    }
}
