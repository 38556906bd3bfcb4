//! `mirror-agent apiserver`.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::{Args, builder::NonEmptyStringValueParser};
use mirror_core::settings::{Rate, parse_duration, parse_rate};

use super::{
    DEFAULT_LISTEN, Listen,
    boolean::{self, Boolean as _},
    listen,
};

/// `mirror-agent apiserver`.
#[derive(Debug, Args)]
#[command(mut_args = boolean::spaced)]
pub struct ApiserverArgs {
    /// Namespace of the Service and the Secret. The API is located through KUBECONFIG, ~/.kube/config, or the
    /// service account of the server's own pod.
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    pub namespace: String,
    /// Service of the server, which the APIService names.
    #[arg(
        long, env = "PODMIRROR_SERVICE", value_name = "NAME", default_value = "podmirror-apiserver",
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub service: String,
    /// Secret of the CA that signs the server's certificates. It must exist, and is empty at first: the server makes
    /// the CA, and writes it to the APIService.
    #[arg(
        long, env = "PODMIRROR_SECRET", value_name = "NAME", default_value = "podmirror-apiserver-ca",
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub secret: String,
    /// Lifetime of a CA. Tests renew certificates within seconds.
    #[arg(
        long, env = "PODMIRROR_CA_LIFETIME", value_name = "TIME", default_value = "365d",
        value_parser = parse_duration, hide = true
    )]
    pub ca_lifetime: Duration,
    /// Directory with the files tls.crt and tls.key, for example of cert-manager [default: the server makes its
    /// certificates itself].
    #[arg(long, env = "PODMIRROR_CERTIFICATES", value_name = "DIR")]
    pub certificates: Option<PathBuf>,
    /// Address for kube-apiserver.
    #[arg(long, env = "PODMIRROR_APISERVER_LISTEN", value_name = "ADDR", default_value = "0.0.0.0:10708")]
    pub apiserver_listen: SocketAddr,
    /// Address for agents.
    #[arg(long, env = "PODMIRROR_AGENTS_LISTEN", value_name = "ADDR", default_value = "0.0.0.0:10709")]
    pub agents_listen: SocketAddr,
    /// ServiceAccount of the agents, in the same namespace.
    #[arg(
        long, env = "PODMIRROR_AGENTS_SERVICE_ACCOUNT", value_name = "NAME", default_value = "podmirror",
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub agents_service_account: String,
    /// Maximum rate of a request for packets, in bits per second.
    #[arg(long, env = "PODMIRROR_MAX_RATE", value_name = "RATE", default_value = "100Mbit", value_parser = bits)]
    pub max_rate: u64,
    /// Maximum duration of a request for packets.
    #[arg(
        long, env = "PODMIRROR_MAX_DURATION", value_name = "TIME", default_value = "1h", value_parser = parse_duration
    )]
    pub max_duration: Duration,
    /// Post an Event on a pod when a user begins to read its packets.
    #[arg(long, env = "PODMIRROR_POD_EVENTS", boolean(false))]
    pub pod_events: bool,
    /// Address for /healthz, /readyz and /metrics, for example 127.0.0.1:10706 or [::]:10706. An empty value
    /// disables it.
    #[arg(
        long, env = "PODMIRROR_LISTEN", value_name = "ADDR", default_value = DEFAULT_LISTEN, value_parser = listen
    )]
    pub listen: Listen,
}

/// A rate in bits per second alone.
fn bits(text: &str) -> Result<u64, String> {
    match parse_rate(text)? {
        Rate { packets: None, bits: Some(bits), .. } if !text.contains(',') => Ok(bits),
        _ => Err("use bits per second as in 100Mbit".to_owned()),
    }
}
