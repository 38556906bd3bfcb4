//! Readers of the API of packets: connections to its servers, which request packets and reports of this node.
//!
//! ```text
//! EndpointSlices ─► a task per ready server: dials, again after a pause
//! agent                                                 server (`apiserver::agents`)
//!   TLS, trusting APIService.spec.caBundle       ─►
//!   GET /agent, Upgrade: PROTOCOL, a token       ─►     the node of the token
//!                                                ◄─     101, and from here on HTTP/2 with the roles swapped:
//!                                                ◄─     POST /v1/packets, POST /v1/reports
//!   packets, reports ([`serve`])                 ─►
//! ```
//!
//! So no port of a node is open, and a server reaches the nodes that have dialled it. The caBundle and the token are
//! read at each dial, because both are replaced meanwhile. All of this has a thread of its own, so that a flood of packets
//! does not delay the loop.

mod reports;
mod serve;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::SocketAddr,
    path::PathBuf,
    pin::pin,
    sync::Arc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, bail};
use futures_util::StreamExt as _;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::{
    Request, StatusCode,
    body::Bytes,
    client::conn::http1,
    header::{AUTHORIZATION, CONNECTION, HOST, UPGRADE},
    upgrade::{self, Upgraded},
};
use hyper_util::rt::TokioIo;
use k8s_openapi::{
    api::discovery::v1::{Endpoint, EndpointPort, EndpointSlice},
    kube_aggregator::pkg::apis::apiregistration::v1::APIService,
};
use kube::{
    Api, Client,
    runtime::{
        WatchStreamExt as _, reflector,
        watcher::{self, Event},
    },
};
use mirror_api::packets::{GROUP, VERSION};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, ServerName, pem::PemObject as _},
    version::TLS13,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    runtime,
    sync::watch,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tokio_rustls::TlsConnector;
use tracing::{info, warn};

use self::serve::Node;
use crate::{
    report::Reports,
    util::{backoff::Backoff, told::is_news},
};

/// The protocol after the upgrade, with its version. A server takes this one and, once there is one, the one before.
pub(crate) const PROTOCOL: &str = "podmirror-packets/1";
/// The path of the upgrade.
pub(crate) const PATH: &str = "/agent";
/// Interval of the pings of both sides.
pub(crate) const PING: Duration = Duration::from_secs(10);
/// Timeout for the answer to a ping: then the connection is closed.
pub(crate) const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// The window of a stream in bytes: what an agent sends before the server has read it.
pub(crate) const WINDOW: u32 = 64 << 10;
/// The name of the port of the server's Service.
const PORT: &str = "agents";
/// Timeout from the dial to the upgrade.
const DIAL: Duration = Duration::from_secs(10);
/// The longest delay before the next dial. A connection that lasted longer had no failure.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// The delays before the next dial.
const RETRY: Backoff = Backoff::new(Duration::from_secs(1), LONGEST_PAUSE);
/// Maximum length of a server's reason for a refusal in bytes.
const MOST_REASON: usize = 4 << 10;

/// A request that is not served, and the reason.
pub(crate) struct Refused(pub(crate) StatusCode, pub(crate) String);

/// The server of the API of packets, and the bounds of its readers.
#[derive(Debug, Clone)]
pub struct Options {
    /// Namespace of the server's Service.
    pub namespace: String,
    /// Name of that Service.
    pub service: String,
    /// The file with the agent's token for the server.
    pub token: PathBuf,
    /// The time after which the agent ends a reader.
    pub max_duration: Duration,
    /// The directory of the agent's `--bpffs`.
    pub bpffs: PathBuf,
}

/// Starts the thread.
pub fn start(options: Options, client: Client, reports: Reports) -> io::Result<()> {
    let runtime = runtime::Builder::new_current_thread().enable_all().thread_name("reader").build()?;
    let node = Arc::new(Node::new(reports, options.bpffs.clone(), options.max_duration));
    let dial = Arc::new(Dial { options, client, node });
    thread::Builder::new().name("readers".to_owned()).spawn(move || runtime.block_on(follow(&dial)))?;
    Ok(())
}

/// Follows the ready endpoints of the server's Service, and has each dialled, forever.
async fn follow(dial: &Arc<Dial>) {
    let Dial { options: Options { namespace, service, .. }, client, .. } = &**dial;
    let api = Api::<EndpointSlice>::namespaced(client.clone(), namespace);
    let config = watcher::Config::default().labels(&format!("kubernetes.io/service-name={service}"));
    let (slices, writer) = reflector::store();
    let mut events = pin!(reflector(writer, watcher::watcher(api, config)).default_backoff());
    let servers = watch::Sender::new(BTreeSet::new());
    let mut tasks = BTreeMap::<SocketAddr, JoinHandle<()>>::new();
    let mut told = None;
    while let Some(event) = events.next().await {
        match event {
            // A list that fails begins as well.
            Ok(Event::Init) => {}
            Ok(_) => told = None,
            Err(error) => {
                let error = mirror_client::in_words(&error);
                if is_news(&mut told, &error) {
                    warn!(error, "cannot find the servers of packets; the agent retries");
                }
            }
        }
        let present: BTreeSet<_> = slices.state().iter().flat_map(|slice| endpoints(slice)).collect();
        servers.send_replace(present.clone());
        tasks.retain(|_, task| !task.is_finished());
        for server in present {
            tasks
                .entry(server)
                .or_insert_with(|| tokio::spawn(Arc::clone(dial).keep(server, servers.subscribe())));
        }
    }
}

/// The addresses of the ready endpoints.
fn endpoints(slice: &EndpointSlice) -> Vec<SocketAddr> {
    let is_for_agents = |port: &&EndpointPort| port.name.as_deref() == Some(PORT);
    let port = slice.ports.iter().flatten().find(is_for_agents).and_then(|port| port.port);
    let port = port.and_then(|port| u16::try_from(port).ok());
    let is_ready =
        |endpoint: &&Endpoint| endpoint.conditions.as_ref().is_none_or(|of| of.ready != Some(false));
    let addresses = slice.endpoints.iter().filter(is_ready).flat_map(|endpoint| &endpoint.addresses);
    addresses.filter_map(|address| Some(SocketAddr::new(address.parse().ok()?, port?))).collect()
}

/// The data for all dials.
struct Dial {
    options: Options,
    client: Client,
    node: Arc<Node>,
}

impl Dial {
    /// Keeps a connection to a server while it is one of the `servers`. The end of an endpoint ends the dial, because
    /// another pod can get the address. It does not end the connection: a server that is about to stop ends its requests
    /// itself.
    async fn keep(self: Arc<Self>, server: SocketAddr, mut servers: watch::Receiver<BTreeSet<SocketAddr>>) {
        let (mut backoff, mut told) = (RETRY, None);
        while servers.borrow().contains(&server) {
            let begun = Instant::now();
            let dialled = tokio::select! {
                dialled = timeout(DIAL, self.dial(server)) => dialled,
                _ = servers.wait_for(|servers| !servers.contains(&server)) => return,
            };
            let error = match dialled {
                Ok(Ok(connection)) => {
                    info!(%server, "connected to a server of packets");
                    told = None;
                    match serve::serve(&self.node, connection).await {
                        Ok(()) => "the server has closed the connection".to_owned(),
                        Err(error) => mirror_client::in_words(&error),
                    }
                }
                Ok(Err(error)) => mirror_client::in_words(error.as_ref()),
                Err(_) => "the server does not answer".to_owned(),
            };
            if begun.elapsed() > LONGEST_PAUSE {
                backoff = RETRY;
            }
            if is_news(&mut told, &error) {
                warn!(%server, error, "no connection to a server of packets; the agent retries");
            }
            sleep(backoff.pause()).await;
        }
    }

    /// Connects to a server, and becomes its agent.
    async fn dial(&self, server: SocketAddr) -> anyhow::Result<Upgraded> {
        let Options { namespace, service, token, .. } = &self.options;
        let name = format!("{service}.{namespace}.svc");
        let tls = TlsConnector::from(Arc::new(self.tls().await?));
        let token = fs::read_to_string(token).with_context(|| format!("cannot read {}", token.display()))?;
        let stream = TcpStream::connect(server).await?;
        stream.set_nodelay(true)?;
        let stream = tls.connect(ServerName::try_from(name.clone())?, stream).await?;
        become_agent(stream, &name, token.trim()).await
    }

    /// The TLS settings, with the authorities that kube-apiserver trusts for this API.
    async fn tls(&self) -> anyhow::Result<ClientConfig> {
        let name = format!("{VERSION}.{GROUP}");
        let service = Api::<APIService>::all(self.client.clone()).get(&name).await?;
        let bundle = service.spec.and_then(|spec| spec.ca_bundle);
        let bundle = bundle.with_context(|| format!("the APIService {name} has no caBundle yet"))?;
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&bundle.0) {
            roots.add(certificate.context("caBundle")?)?;
        }
        let tls = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        Ok(tls.with_protocol_versions(&[&TLS13])?.with_root_certificates(roots).with_no_client_auth())
    }
}

/// Requests the upgrade. Returns the connection, on which the server sends the requests from then on.
async fn become_agent(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    host: &str,
    token: &str,
) -> anyhow::Result<Upgraded> {
    let (mut server, connection) = http1::handshake(TokioIo::new(stream)).await?;
    // It ends with the upgrade, or when `server` is dropped.
    tokio::spawn(connection.with_upgrades());
    let request = Request::get(PATH)
        .header(HOST, host)
        .header(CONNECTION, "upgrade")
        .header(UPGRADE, PROTOCOL)
        .header(AUTHORIZATION, format!("Bearer {token}"))
        .body(Empty::<Bytes>::new())?;
    let answer = server.send_request(request).await?;
    let status = answer.status();
    if status != StatusCode::SWITCHING_PROTOCOLS {
        let reason =
            Limited::new(answer.into_body(), MOST_REASON).collect().await.map(|body| body.to_bytes());
        let reason = reason.unwrap_or_default();
        bail!("the server refuses this agent: {status}: {}", String::from_utf8_lossy(&reason).trim());
    }
    Ok(upgrade::on(answer).await?)
}

#[cfg(test)]
mod tests;
