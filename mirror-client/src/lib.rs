//! The Kubernetes API client of the agent and the kubectl plugin. kubectl is the reference: with each kubeconfig both
//! behave as kubectl does, and `tests/kubeconfigs.rs` compares them with it.
//!
//! * [`kubeconfig`]: the choice of files, cluster and user, and the defaults of client-go.
//! * [`proxy`]: the choice of the proxy for a server, by the rules of Go. A pure function.
//! * [`connection`]: connections through that proxy, which notice that the server is unreachable.
//! * [`failures`]: a client that reports its failed requests.
//! * [`helper`], [`token`] and [`tls`]: features that kube's client lacks.

mod connection;
mod failures;
mod helper;
mod kubeconfig;
mod proxy;
#[cfg(feature = "tls")]
mod tls;
mod token;
mod words;

use std::{collections::BTreeMap, env, path::PathBuf, time::Duration};

use kube::{
    Client,
    config::{AuthInfo, Cluster},
};

pub use self::{failures::with_failures, kubeconfig::read as read_kubeconfig, words::in_words};

/// The cluster options of the command line, with the meaning of kubectl's.
#[derive(Debug, Default, Clone)]
pub struct Options {
    /// The only kubeconfig file to read; it must exist.
    pub kubeconfig: Option<PathBuf>,
    /// The context, if not the current one.
    pub context: Option<String>,
    /// The cluster of the kubeconfig, if not that of the context.
    pub cluster: Option<String>,
    /// The user of the kubeconfig, if not that of the context.
    pub user: Option<String>,
    /// Fields that replace those of the cluster: the server, its name in the certificate, and how it is verified.
    pub cluster_fields: Cluster,
    /// Fields that replace those of the user: the token, the certificate with its key, and whom to impersonate.
    pub user_fields: AuthInfo,
    /// Timeout for the answer to a request to begin.
    pub request_timeout: Option<Duration>,
    /// Whether an answer that the server may give later (429, 503, 504) is an error at once. Otherwise such a request is
    /// repeated, for some minutes.
    pub no_retry: bool,
}

/// The environment variables and the home directory.
#[derive(Debug, Default, Clone)]
pub struct Environment {
    /// All variables with UTF-8 values.
    pub variables: BTreeMap<String, String>,
    /// The home directory.
    pub home: Option<PathBuf>,
}

impl Environment {
    /// The environment of this process.
    #[must_use]
    pub fn of_process() -> Self {
        let text = |(name, value): (_, std::ffi::OsString)| {
            Some((std::ffi::OsString::into_string(name).ok()?, value.into_string().ok()?))
        };
        Self { variables: env::vars_os().filter_map(text).collect(), home: env::home_dir() }
    }

    /// The first of these variables that is not empty, as in Go's `net/http`.
    fn first(&self, names: &[&str]) -> Option<&str> {
        let values = names.iter().filter_map(|name| self.variables.get(*name));
        values.map(String::as_str).find(|value| !value.is_empty())
    }
}

/// Creates a client for the cluster of the kubeconfig, or for the cluster that this process runs in. Runs the
/// credential helper of the kubeconfig. Sends no request yet.
///
/// # Errors
///
/// There is neither of them, or the kubeconfig is invalid.
pub async fn connect(options: &Options, environment: &Environment) -> anyhow::Result<Client> {
    let mut config = kubeconfig::load(options, environment).await?;
    config.default_retry &= !options.no_retry;
    connection::client(config, options.request_timeout)
}
