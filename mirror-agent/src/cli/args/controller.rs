//! `mirror-agent controller`.

use std::time::Duration;

use clap::{Args, builder::NonEmptyStringValueParser};

use super::{DEFAULT_LISTEN, Listen, listen};

/// `mirror-agent controller`.
#[derive(Debug, Args)]
pub struct ControllerArgs {
    /// Namespace of the Lease. The API is located through KUBECONFIG, ~/.kube/config, or the service account
    /// of the controller's own pod.
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    pub namespace: String,
    /// Name of this controller, unique among the controllers.
    #[arg(long, env = "POD_NAME", value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    pub pod_name: String,
    /// Name of the Lease. Of the controllers that use the same Lease, one is active, and the others wait.
    #[arg(
        long, env = "PODMIRROR_LEASE", value_name = "NAME", default_value = "podmirror-controller",
        value_parser = NonEmptyStringValueParser::new()
    )]
    pub lease: String,
    /// Seconds for which a controller that no longer renews the Lease keeps it, from 3 to 600.
    #[arg(
        long, env = "PODMIRROR_LEASE_SECONDS", value_name = "N", default_value = "30",
        value_parser = clap::value_parser!(u16).range(3..=600)
    )]
    pub lease_seconds: u16,
    /// Address for /healthz, /readyz and /metrics, for example 127.0.0.1:10706 or [::]:10706. An empty value
    /// disables it.
    #[arg(
        long, env = "PODMIRROR_LISTEN", value_name = "ADDR", default_value = DEFAULT_LISTEN, value_parser = listen
    )]
    pub listen: Listen,
}

impl ControllerArgs {
    /// How long the Lease holds without being renewed.
    pub fn duration(&self) -> Duration {
        Duration::from_secs(self.lease_seconds.into())
    }
}
