//! `mirror-agent apiserver`: serves the API of packets until it is stopped.

use std::sync::Arc;

use mirror_client::{Environment, Options as ClientOptions};
use tokio::sync::watch;
use tracing::info;

use super::stop_signal;
use crate::{
    apiserver::{
        self, Options, Server,
        agents::{AgentOptions, Agents},
        certificates::{Certificates, Source},
        front_proxy::FrontProxy,
        limits::Limits,
    },
    cli::args::ApiserverArgs,
    report::{
        admin::{self, Admin},
        metrics::apiserver::ApiserverMetrics,
    },
};

/// Runs until SIGINT or SIGTERM.
pub(super) async fn apiserver(args: ApiserverArgs) -> anyhow::Result<()> {
    let stop = stop_signal()?;
    let client = mirror_client::connect(&ClientOptions::default(), &Environment::of_process()).await?;
    let metrics = ApiserverMetrics::new()?;
    let client = mirror_client::with_failures(client, metrics.request_failed());
    let ApiserverArgs { namespace, service, secret, agents_service_account: service_account, .. } = args;
    let names = vec![format!("{service}.{namespace}.svc")];
    let of_namespace = Source::Own { namespace: namespace.clone(), secret };
    let source = args.certificates.map_or(of_namespace, Source::Files);
    let certificates = Certificates::new(source, client.clone(), names, args.ca_lifetime);
    tokio::spawn(Arc::clone(&certificates).keep());
    let (stopping, stopped) = watch::channel(false);
    let server = Arc::new(Server {
        front_proxy: FrontProxy::start(client.clone()),
        client,
        certificates,
        agents: Agents::default(),
        limits: Limits::default(),
        metrics,
        options: Options {
            agents: AgentOptions { namespace: namespace.clone(), service_account },
            namespace,
            service,
            max_rate: args.max_rate,
            max_duration: args.max_duration,
            pod_events: args.pod_events,
        },
        stop: stopped,
    });
    info!(version = env!("PODMIRROR_VERSION"), "server of packets started");
    if let Some(address) = args.listen {
        let (of_ready, of_metrics) = (Arc::clone(&server), Arc::clone(&server));
        let admin = Admin {
            // There is one thread, so it is alive if it answers.
            alive: Box::new(|| Ok(())),
            ready: Box::new(move || of_ready.ready()),
            metrics: admin::kept(move || of_metrics.scrape()),
        };
        tokio::spawn(admin::run(address, admin, watch::Sender::new(None)));
    }
    let stop = async {
        stop.await;
        stopping.send_replace(true);
    };
    tokio::join!(apiserver::run(&server, args.apiserver_listen, args.agents_listen), stop);
    info!("server of packets stopped; its requests have ended");
    Ok(())
}
