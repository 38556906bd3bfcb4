//! The connection to the API server, the namespaces, and the detection of missing rights. Used by all commands.

use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client,
    client::UpgradeConnectionError,
    config::{self, AuthInfo},
};
use mirror_client::{Environment, Options};

use crate::cli::Connection;

/// A cluster, with the rights of one user.
pub(crate) struct Cluster {
    /// The client of the API server.
    pub(crate) client: Client,
    /// The namespace of pods and Mirrors.
    pub(crate) namespace: String,
    /// The namespace of podmirror's agents.
    pub(crate) agents: String,
}

impl Cluster {
    /// Connects to the cluster of the kubeconfig. Sends no request yet.
    pub(crate) async fn connect(connection: &Connection) -> anyhow::Result<Self> {
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
                impersonate: of.as_user,
                impersonate_groups: of.as_group,
                impersonate_uid: of.as_uid,
                ..AuthInfo::default()
            },
            request_timeout: of.request_timeout.filter(|time| !time.is_zero()),
        };
        let client = mirror_client::connect(&options, &Environment::of_process()).await?;
        let namespace = of.namespace.unwrap_or_else(|| client.default_namespace().to_owned());
        Ok(Self { client, namespace, agents: of.agents })
    }

    /// The agents' pods.
    pub(crate) fn agent_pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.agents)
    }

    /// The namespace of the command; `None`: all namespaces.
    pub(crate) fn scope(&self, all_namespaces: bool) -> Option<&str> {
        (!all_namespaces).then_some(&self.namespace)
    }
}

/// Whether the API server rejected the request because this user lacks the right.
pub(crate) fn is_refusal(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => [401, 403].contains(&status.code),
        kube::Error::UpgradeConnection(UpgradeConnectionError::ProtocolSwitch(status)) => {
            [401, 403].contains(&status.as_u16())
        }
        _ => false,
    }
}

/// Whether the cause is that the API server rejected a request because this user lacks the right.
pub(crate) fn lacks_right(error: &anyhow::Error) -> bool {
    error.downcast_ref().is_some_and(is_refusal)
}
