//! [`client`]: the client of the Kubernetes API, whose connections notice that the server is cut off.
//!
//! A watch can be quiet for minutes, so a connection that nobody answers looks like one without news. The kernel finds out
//! by TCP's own probes, which wake neither the agent nor the API server's watch cache. kube's own builder cannot set
//! them, so its layers are put together here. The agent's watches find out what a server does not answer that lives, and
//! so does the deadline of each request.

use std::time::Duration;

#[cfg(feature = "tls")]
use anyhow::Context as _;
use anyhow::anyhow;
use http::Uri;
use hyper::rt::{Read, Write};
#[cfg(feature = "tls")]
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::{
        legacy::{
            Client as HttpClient,
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
    util::{MapFuture, MapRequestLayer},
};

use crate::{helper::Helper, kubeconfig::Access, token::TokenFile};

/// How long a connection may take.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
/// After so long without a packet, the peer is asked for a sign of life.
const IDLE: Duration = Duration::from_secs(20);
/// How often it is asked again, and how many times in all, before it is taken for dead: so after 50 s.
const PROBES: (Duration, u32) = (Duration::from_secs(10), 3);
/// How long data may remain without an acknowledgement.
#[cfg(target_os = "linux")]
const UNACKNOWLEDGED: Duration = Duration::from_secs(50);

/// How the requests of a client look, and where they go.
struct Way {
    config: Config,
    credentials: Option<AuthLayer>,
    helper: Option<Helper>,
    token_file: Option<TokenFile>,
    #[cfg(feature = "tls")]
    tls: Option<rustls::ClientConfig>,
}

/// Makes the client. Runs the credential helper, and sends no request yet.
pub(crate) fn client(Access { mut config, proxy }: Access) -> anyhow::Result<Client> {
    let token_file =
        config.auth_info.token_file.take().map(|file| TokenFile::open(file.into())).transpose()?;
    // Before TLS: kube runs the helper again if it brings a certificate, and ignores why it fails.
    let exec = if has_other(&config.auth_info) { None } else { config.auth_info.exec.take() };
    let helper = exec.as_ref().map(Helper::start).transpose()?.flatten();
    let credentials = config.auth_layer().map_err(|error| anyhow!("{error}"))?;
    if helper.is_none() {
        config.auth_info.exec = exec;
    }
    let proxy = proxy.map(|proxy| proxy.to_string());
    // It takes the user and the password out of the URL.
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

/// The settings of TLS: who is trusted, and the client's certificate.
#[cfg(feature = "tls")]
fn tls(config: &Config) -> anyhow::Result<rustls::ClientConfig> {
    let mut tls = config.rustls_client_config().map_err(|why| anyhow!("{why}"))?;
    if let Some(certificates) = config.root_cert.as_ref().filter(|_| !config.accept_invalid_certs) {
        crate::tls::trust(&mut tls, certificates, config.root_cert_file.clone())?;
    }
    Ok(tls)
}

/// Whether a user has credentials that count before those of a helper.
fn has_other(user: &AuthInfo) -> bool {
    let has_password = user.username.is_some() && user.password.is_some();
    has_password || user.auth_provider.is_some() || user.token.is_some()
}

impl Way {
    /// The client whose connections this connector makes, with TLS over them if the server has it.
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
        // hyper wants a future that it can move.
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
        let Self { config, credentials, helper, token_file, .. } = self;
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
            .map_err(BoxError::from)
            .service(http);
        Ok(Client::new(service, config.default_namespace))
    }
}
