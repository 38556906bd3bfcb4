//! The client of the Kubernetes API for the agent and the kubectl plugin alike. kubectl is the model: with each
//! kubeconfig both do what kubectl does, and `tests/kubeconfigs.rs` compares them with it.
//!
//! * [`kubeconfig`]: which files, which cluster and user of them, and the defaults of client-go.
//! * [`proxy`]: which proxy leads to the server, by the rules of Go. A pure function.
//! * [`connection`]: connections that notice that the server is cut off, through that proxy.
//! * [`helper`], [`token`] and [`tls`]: what kube's client lacks.

mod connection;
mod helper;
mod kubeconfig;
mod proxy;
#[cfg(feature = "tls")]
mod tls;
mod token;
mod words;

use std::{collections::BTreeMap, env, path::PathBuf};

use kube::Client;

pub use self::words::in_words;

/// What the command line says about the cluster.
#[derive(Debug, Default, Clone)]
pub struct Options {
    /// The only file that is read, which must be there.
    pub kubeconfig: Option<PathBuf>,
    /// The context, if not the current one.
    pub context: Option<String>,
}

/// What the environment says about the cluster and the way there.
#[derive(Debug, Default, Clone)]
pub struct Environment {
    /// All variables whose values are text.
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

/// Makes a client for the cluster of the kubeconfig, or for that of which this process is a pod. Runs the credential
/// helper that the kubeconfig names. Sends no request yet.
///
/// # Errors
///
/// Where there is neither, or the kubeconfig cannot be used.
pub async fn connect(options: &Options, environment: &Environment) -> anyhow::Result<Client> {
    connection::client(kubeconfig::load(options, environment).await?)
}
