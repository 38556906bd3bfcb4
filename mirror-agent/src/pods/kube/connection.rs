//! [`connect`]: the client of the Kubernetes API, whose connections notice that the server is cut off.
//!
//! A watch can be quiet for minutes, so a connection that nobody answers looks like one without news. The kernel finds out
//! by TCP's own probes, which wake neither the agent nor the API server's watch cache. kube's own builder cannot set
//! them, so its layers are put together here. What a server does not answer that lives is found out by `follow`, and by
//! the deadline of each request. Called by the commands; `follow` and the rest use what it returns.

use std::time::Duration;

use anyhow::{Context as _, bail};
use hyper_util::{
    client::legacy::{Client as HttpClient, connect::HttpConnector},
    rt::TokioExecutor,
};
use kube::{
    Client, Config,
    client::{Body, ConfigExt as _, retry::RetryPolicy},
};
use tower::{BoxError, ServiceBuilder, retry::RetryLayer};

/// How long a connection may take.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// After so long without a packet, the peer is asked for a sign of life.
const IDLE: Duration = Duration::from_secs(20);
/// How often it is asked again, and how many times in all, before it is taken for dead: so after 50 s.
const PROBES: (Duration, u32) = (Duration::from_secs(10), 3);
/// How long data may remain without an acknowledgement.
const UNACKNOWLEDGED: Duration = Duration::from_secs(50);

/// Connects to the API that the environment names: `KUBECONFIG`, `~/.kube/config`, or the API of the cluster that this
/// process is a pod of. Sends no request yet.
///
/// # Errors
///
/// Where none of these is there, or it cannot be used.
pub async fn connect() -> anyhow::Result<Client> {
    let config = Config::infer().await.context(
        "cannot find the Kubernetes API; set KUBECONFIG, run in a pod with a service account, or use --pods-from",
    )?;
    client(config).context("cannot use the configuration for the Kubernetes API")
}

fn client(config: Config) -> anyhow::Result<Client> {
    if let Some(proxy) = &config.proxy_url {
        bail!("proxies are not supported, and proxy-url is {proxy}");
    }
    let mut connector = HttpConnector::new();
    connector.enforce_http(false);
    connector.set_connect_timeout(Some(CONNECT_DEADLINE));
    connector.set_keepalive(Some(IDLE));
    connector.set_keepalive_interval(Some(PROBES.0));
    connector.set_keepalive_retries(Some(PROBES.1));
    connector.set_tcp_user_timeout(Some(UNACKNOWLEDGED));
    let connector = config.rustls_https_connector_with_connector(connector)?;
    let http: HttpClient<_, Body> = HttpClient::builder(TokioExecutor::new()).build(connector);
    let retry = config.default_retry.then(|| RetryLayer::new(RetryPolicy::server_retry()));
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(retry)
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(http);
    Ok(Client::new(service, config.default_namespace))
}
