//! The connection to the API server, the namespaces, and the detection of missing rights. Used by all commands.

use std::{path::PathBuf, time::Duration};

use clap::Args;
use clap_complete::engine::ArgValueCompleter;
use kube::{
    Api, Client,
    config::{self, AuthInfo},
    core::NamespaceResourceScope,
};
use mirror_client::{Environment, Options};
use mirror_core::settings::parse_duration;
use tokio::time;

use crate::complete;

/// Which cluster, and where podmirror is in it. The flags of kubectl have its meaning.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Connection {
    /// The kubeconfig file [default: KUBECONFIG, or ~/.kube/config].
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// The context of the kubeconfig [default: the current one].
    #[arg(long, global = true, value_name = "NAME", add = ArgValueCompleter::new(complete::contexts))]
    pub(crate) context: Option<String>,
    /// The cluster of the kubeconfig [default: that of the context].
    #[arg(long, global = true, value_name = "NAME", add = ArgValueCompleter::new(complete::clusters))]
    pub(crate) cluster: Option<String>,
    /// The user of the kubeconfig [default: that of the context].
    #[arg(long, global = true, value_name = "NAME", add = ArgValueCompleter::new(complete::users))]
    pub(crate) user: Option<String>,
    /// The namespace of the pods and Mirrors [default: that of the context].
    #[arg(long, short, global = true, value_name = "NAME", add = ArgValueCompleter::new(complete::namespaces))]
    pub(crate) namespace: Option<String>,
    /// The address and port of the API server.
    #[arg(long, short, global = true, value_name = "URL")]
    pub(crate) server: Option<String>,
    /// The file with the certificate authority of the API server.
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) certificate_authority: Option<String>,
    /// The name in the API server's certificate [default: its host name].
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) tls_server_name: Option<String>,
    /// Trust any certificate of the API server. The connection is then insecure.
    #[arg(long, global = true)]
    pub(crate) insecure_skip_tls_verify: bool,
    /// The file with the client's certificate for the API server.
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) client_certificate: Option<String>,
    /// The file with the key of the client's certificate.
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) client_key: Option<String>,
    /// The bearer token for the API server.
    #[arg(long, global = true, value_name = "TOKEN")]
    pub(crate) token: Option<String>,
    /// The user to impersonate.
    #[arg(long = "as", global = true, value_name = "USER")]
    pub(crate) as_user: Option<String>,
    /// A group to impersonate; can be repeated.
    #[arg(long, global = true, value_name = "GROUP")]
    pub(crate) as_group: Option<Vec<String>>,
    /// The UID to impersonate.
    #[arg(long, global = true, value_name = "UID")]
    pub(crate) as_uid: Option<String>,
    /// How long to wait for the answer to a request, as in 5s [default: 0, without an end].
    #[arg(long, global = true, value_name = "TIME", value_parser = timeout)]
    pub(crate) request_timeout: Option<Duration>,
    /// The namespace of podmirror's agents.
    #[arg(
        long,
        global = true,
        env = "PODMIRROR_NAMESPACE",
        value_name = "NAME",
        default_value = "podmirror",
        add = ArgValueCompleter::new(complete::namespaces)
    )]
    pub(crate) agents: String,
}

/// A timeout as kubectl takes it: a number alone has seconds, and 0 is none.
fn timeout(text: &str) -> Result<Duration, String> {
    text.parse().map(Duration::from_secs).or_else(|_| parse_duration(text))
}

/// A cluster, with the rights of one user.
#[derive(Clone)]
pub(crate) struct Cluster {
    pub(crate) client: Client,
    /// The namespace of pods and Mirrors.
    pub(crate) namespace: String,
    /// The namespace of podmirror's agents.
    pub(crate) agents: String,
}

impl Cluster {
    /// Connects to the cluster of the kubeconfig. Sends no request yet. If `is_patient`, a request that the server
    /// wants to have later is repeated, as kubectl does; otherwise that is an error, with its reason.
    pub(crate) async fn connect(connection: &Connection, is_patient: bool) -> anyhow::Result<Self> {
        let of = connection.clone();
        let options = Options {
            kubeconfig: of.kubeconfig,
            context: of.context,
            cluster: of.cluster,
            user: of.user,
            cluster_fields: config::Cluster {
                server: of.server,
                certificate_authority: of.certificate_authority,
                tls_server_name: of.tls_server_name,
                insecure_skip_tls_verify: of.insecure_skip_tls_verify.then_some(true),
                ..config::Cluster::default()
            },
            user_fields: AuthInfo {
                token: of.token.map(Into::into),
                client_certificate: of.client_certificate,
                client_key: of.client_key,
                impersonate: of.as_user,
                impersonate_groups: of.as_group,
                impersonate_uid: of.as_uid,
                ..AuthInfo::default()
            },
            request_timeout: of.request_timeout.filter(|time| !time.is_zero()),
            no_retry: !is_patient,
        };
        let client = mirror_client::connect(&options, &Environment::of_process()).await?;
        let namespace = of.namespace.unwrap_or_else(|| client.default_namespace().to_owned());
        Ok(Self { client, namespace, agents: of.agents })
    }

    /// The objects of all namespaces, or of none.
    pub(crate) fn all<K: kube::Resource<DynamicType = ()>>(&self) -> Api<K> {
        Api::all(self.client.clone())
    }

    /// The objects of the namespace of pods and Mirrors.
    pub(crate) fn own<K: kube::Resource<DynamicType = (), Scope = NamespaceResourceScope>>(&self) -> Api<K> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub(crate) fn of_agents<K: kube::Resource<DynamicType = (), Scope = NamespaceResourceScope>>(
        &self,
    ) -> Api<K> {
        Api::namespaced(self.client.clone(), &self.agents)
    }

    /// The namespace of the command; `None`: all namespaces.
    pub(crate) fn scope(&self, all_namespaces: bool) -> Option<&str> {
        (!all_namespaces).then_some(&self.namespace)
    }
}

/// Waits for an answer. An error is in words.
pub(crate) async fn within<T, E: Into<anyhow::Error>>(
    patience: Duration,
    answer: impl Future<Output = Result<T, E>>,
) -> Result<T, String> {
    let answer = time::timeout(patience, answer).await;
    let answer = answer.map_err(|_| format!("no answer within {} s", patience.as_secs()))?;
    answer.map_err(|error| {
        let error: anyhow::Error = error.into();
        mirror_client::in_words(error.as_ref())
    })
}

/// Whether the API server rejected a request because this user lacks the right.
pub(crate) fn lacks_right(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(kube::Error::Api(status)) if [401, 403].contains(&status.code))
}
