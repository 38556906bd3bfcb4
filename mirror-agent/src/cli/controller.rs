//! `mirror-agent controller`: aggregates the MirrorNodes of the cluster until it is stopped.

use mirror_client::{Environment, Options};
use tokio::sync::watch;
use tracing::info;

use super::stop_signal;
use crate::{
    cli::args::ControllerArgs,
    controller::{self, Health, Identity},
    report::{
        admin::{self, Admin},
        metrics::controller::ControllerMetrics,
    },
};

/// Runs until SIGINT or SIGTERM.
pub(super) async fn controller(args: ControllerArgs) -> anyhow::Result<()> {
    let stop = stop_signal()?;
    let client = mirror_client::connect(&Options::default(), &Environment::of_process()).await?;
    let (health, metrics) = (Health::default(), ControllerMetrics::new()?);
    let client = mirror_client::with_failures(client, metrics.request_failed());
    info!(version = env!("PODMIRROR_VERSION"), pod = args.pod_name, "controller started");
    if let Some(address) = args.listen {
        let (of_ready, of_metrics) = (health.clone(), metrics.clone());
        let admin = Admin {
            // There is one thread, so it is alive if it answers.
            alive: Box::new(|| Ok(())),
            ready: Box::new(move || of_ready.ready()),
            metrics: admin::kept(move || of_metrics.text()),
        };
        tokio::spawn(admin::run(address, admin, watch::Sender::new(None)));
    }
    let identity = Identity {
        duration: args.duration(),
        namespace: args.namespace,
        lease: args.lease,
        holder: args.pod_name,
    };
    controller::run(client, identity, health, metrics, stop).await;
    info!("controller stopped; statuses are no longer updated");
    Ok(())
}
