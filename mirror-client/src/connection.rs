//! [`client`]: the client of the Kubernetes API, with connections that detect an unreachable server.
//!
//! A watch can be silent for minutes, so a dead connection looks like one without events. The kernel detects it with
//! TCP keepalive probes, which wake neither the agent nor the API server's watch cache. kube's own builder cannot
//! configure them, so its layers are assembled here. A server that is alive and does not answer is detected by the
//! agent's watches, and by the deadline of each request.

use std::time::Duration;

#[cfg(feature = "tls")]
use anyhow::Context as _;
use anyhow::{Error, anyhow};
use http::Uri;
use hyper::rt::{Read, Write};
#[cfg(feature = "tls")]
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::{
        legacy::{
            Client as HttpClient, Error as HttpError,
            connect::{
                Connection, HttpConnector,
                proxy::{SocksV5, Tunnel},
            },
        },
        proxy::matcher::{Intercept, Matcher},
    },
    rt::TokioExecutor,
};
use kube::{
    Client, Config,
    client::{Body, ConfigExt as _, middleware::AuthLayer, retry::RetryPolicy},
    config::AuthInfo,
};
use tower::{
    BoxError, Service, ServiceBuilder,
    filter::AsyncFilterLayer,
    retry::RetryLayer,
    timeout::TimeoutLayer,
    util::{MapFuture, MapRequestLayer},
};

use crate::{helper::Helper, token::TokenFile};

/// Timeout for opening a connection.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// Keepalive: the time without a packet before the first probe.
const IDLE: Duration = Duration::from_secs(20);
/// Keepalive: the interval of the probes, and their number before the connection is closed: so after 50 s.
const PROBES: (Duration, u32) = (Duration::from_secs(10), 3);
/// How long sent data may remain unacknowledged.
#[cfg(target_os = "linux")]
const UNACKNOWLEDGED: Duration = Duration::from_secs(50);

/// The headers of a client's requests, and their route.
struct Way {
    config: Config,
    credentials: Option<AuthLayer>,
    helper: Option<Helper>,
    token_file: Option<TokenFile>,
    timeout: Option<Duration>,
    #[cfg(feature = "tls")]
    tls: Option<rustls::ClientConfig>,
}

/// Creates the client, with a timeout for the answer to a request to begin. Runs the credential helper, and sends no
/// request yet.
pub(crate) fn client(mut config: Config, timeout: Option<Duration>) -> anyhow::Result<Client> {
    // Removed, because kube would run the helper again, and ignore the reason of its failure.
    let exec = config.auth_info.exec.take().filter(|_| !has_other(&config.auth_info));
    let helper = exec.map(|exec| Helper::start(exec, &mut config.auth_info)).transpose()?.flatten();
    let token_file =
        config.auth_info.token_file.take().map(|file| TokenFile::open(file.into())).transpose()?;
    let credentials = config.auth_layer().map_err(|error| anyhow!("{error}"))?;
    let proxy = config.proxy_url.take().map(|proxy| proxy.to_string());
    // The matcher splits the user and the password off the URL.
    let proxy = proxy.and_then(|proxy| Matcher::builder().all(proxy).build().intercept(&config.cluster_url));
    let scheme = proxy.as_ref().and_then(|proxy| proxy.uri().scheme_str());
    #[cfg(feature = "tls")]
    let tls = [config.cluster_url.scheme_str(), scheme]
        .contains(&Some("https"))
        .then(|| tls(&config))
        .transpose()?;
    let mut connector = HttpConnector::new();
    connector.enforce_http(false);
    connector.set_connect_timeout(Some(CONNECT_DEADLINE));
    connector.set_keepalive(Some(IDLE));
    connector.set_keepalive_interval(Some(PROBES.0));
    connector.set_keepalive_retries(Some(PROBES.1));
    #[cfg(target_os = "linux")]
    connector.set_tcp_user_timeout(Some(UNACKNOWLEDGED));
    let way = Way {
        config,
        credentials,
        helper,
        token_file,
        timeout,
        #[cfg(feature = "tls")]
        tls,
    };
    match (&proxy, scheme) {
        (None, _) => way.by(connector),
        (Some(proxy), Some("socks5" | "socks5h")) => {
            let socks = SocksV5::new(proxy.uri().clone(), connector);
            match proxy.raw_auth() {
                Some((user, password)) => way.by(socks.with_auth(user.to_owned(), password.to_owned())),
                None => way.by(socks),
            }
        }
        #[cfg(feature = "tls")]
        (Some(proxy), Some("https")) => {
            let connector = way.encrypted(connector, None)?;
            way.by(tunnel(proxy, connector))
        }
        (Some(proxy), _) => way.by(tunnel(proxy, connector)),
    }
}

fn tunnel<C>(proxy: &Intercept, connector: C) -> Tunnel<C> {
    let tunnel = Tunnel::new(proxy.uri().clone(), connector);
    match proxy.basic_auth().cloned() {
        Some(password) => tunnel.with_auth(password),
        None => tunnel,
    }
}

/// The TLS settings: the trusted authorities, and the client's certificate.
#[cfg(feature = "tls")]
fn tls(config: &Config) -> anyhow::Result<rustls::ClientConfig> {
    let mut tls = config.rustls_client_config().map_err(|why| anyhow!("{why}"))?;
    if let Some(certificates) = config.root_cert.as_ref().filter(|_| !config.accept_invalid_certs) {
        crate::tls::trust(&mut tls, certificates, config.root_cert_file.clone())?;
    }
    Ok(tls)
}

/// Whether a user has credentials for which client-go does not run a helper.
fn has_other(user: &AuthInfo) -> bool {
    let has_token = user.token.is_some() || user.token_file.is_some();
    let has_certificate = user.client_certificate.is_some() || user.client_certificate_data.is_some();
    user.username.is_some() || has_token || has_certificate || user.auth_provider.is_some()
}

/// The server in messages: its URL without a path and a password.
fn in_messages(server: &Uri) -> String {
    let authority = server.authority().map_or("", |authority| authority.as_str());
    let host = authority.rsplit('@').next().unwrap_or_default();
    format!("the API server {}://{host}", server.scheme_str().unwrap_or("http"))
}

impl Way {
    /// Returns the client with this connector, and with TLS if the server uses it.
    fn by<C>(self, connector: C) -> anyhow::Result<Client>
    where
        C: Service<Uri> + Clone + Send + Sync + 'static,
        C::Response: Connection + Read + Write + Send + Unpin + 'static,
        C::Future: Send + 'static,
        C::Error: Into<BoxError>,
    {
        #[cfg(feature = "tls")]
        if self.config.cluster_url.scheme_str() == Some("https") {
            let connector = self.encrypted(connector, self.config.tls_server_name.as_ref())?;
            return self.over(connector);
        }
        // hyper requires a future that is `Unpin`.
        self.over(MapFuture::new(connector, Box::pin))
    }

    #[cfg(feature = "tls")]
    fn encrypted<C>(&self, connector: C, name: Option<&String>) -> anyhow::Result<HttpsConnector<C>> {
        let tls = self.tls.clone().context("no settings for TLS")?;
        let mut builder = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http();
        if let Some(name) = name {
            let resolver = FixedServerNameResolver::new(name.clone().try_into().context("tls-server-name")?);
            builder = builder.with_server_name_resolver(resolver);
        }
        Ok(builder.enable_http1().wrap_connector(connector))
    }

    fn over<C>(self, connector: C) -> anyhow::Result<Client>
    where
        C: Service<Uri> + Clone + Send + Sync + 'static,
        C::Response: Connection + Read + Write + Send + Unpin + 'static,
        C::Future: Send + Unpin + 'static,
        C::Error: Into<BoxError>,
    {
        let Self { config, credentials, helper, token_file, timeout, .. } = self;
        let server = in_messages(&config.cluster_url);
        let http: HttpClient<_, Body> = HttpClient::builder(TokioExecutor::new()).build(connector);
        let retry = config.default_retry.then(|| RetryLayer::new(RetryPolicy::server_retry()));
        let token = token_file.map(|file| MapRequestLayer::new(move |request| file.authorize(request)));
        let service = ServiceBuilder::new()
            .layer(config.base_uri_layer())
            .option_layer(retry)
            .option_layer(credentials)
            .option_layer(helper.map(AsyncFilterLayer::new))
            .option_layer(token)
            .layer(config.extra_headers_layer()?)
            .option_layer(timeout.map(TimeoutLayer::new))
            .map_err(move |error: HttpError| BoxError::from(Error::new(error).context(server.clone())))
            .service(http);
        Ok(Client::new(service, config.default_namespace))
    }
}
