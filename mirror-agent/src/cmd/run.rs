//! `mirror-agent run`: follows the pods until stopped, and leaves the mirror in place then.

use tracing::info;

use super::stop_signal;
use crate::{
    admin::{self, Admin},
    cli::{Listen, MirrorArgs, RunArgs, StateArgs},
    dataplane::{bpf::Bpf, pins::Pins, readout::Reader},
    links::netlink::Netlink,
    metrics::{LoopMetrics, Metrics},
    mirror_iface::MirrorIface,
    model::Directions,
    pods::{PodSource as _, file::PodFile},
    reconcile::Reconciler,
    select::Policy,
};

/// Runs until SIGINT or SIGTERM.
pub async fn run(args: RunArgs) -> anyhow::Result<()> {
    let RunArgs { pods_from, enable_mirror, listen, mirror, settings, state: StateArgs { bpffs } } = args;
    let MirrorArgs { mirror_iface, mirror_iface_mtu, attach } = mirror;
    let (settings, limits) = settings.settings()?;
    let stop = stop_signal()?;
    let pods = PodFile::watch(&pods_from)?;
    let links = Netlink::new()?;
    let pins = Pins::new(&bpffs);
    let lock = pins.claim()?;
    // Behind the lock, so that a second agent is told what it is; ahead of the maps, which stay.
    let listener = match listen {
        Listen::Off => None,
        Listen::At(address) => Some(admin::listen(address).await?),
    };
    let dataplane = Bpf::load(pins.clone(), lock, attach)?;
    let method = dataplane.method().name();
    info!(version = env!("PODMIRROR_VERSION"), attach = method, mirror_iface, enable_mirror, "agent started");
    let mirror = MirrorIface::new(&mirror_iface, mirror_iface_mtu, limits);
    let policy = Policy {
        enable_mirror,
        mirror_iface,
        interfaces: Vec::new(),
        interface_directions: Directions::Both,
        settings,
    };
    let (source, metrics) = (pods.state(), LoopMetrics::new()?);
    let mut reconciler = Reconciler::new(pods, links, dataplane, policy, mirror, metrics.clone());
    if let Some(listener) = listener {
        let reports = reconciler.reports();
        let metrics = Metrics::new(&metrics, reports.clone(), Reader::open(&pins)?)?;
        info!(listen = %listener.local_addr()?, "serving /healthz, /readyz and /metrics");
        tokio::spawn(admin::serve(listener, Admin { metrics, reports, source }));
    }
    reconciler.run(stop).await?;
    info!("agent stopped; the mirror stays in place until `mirror-agent cleanup`");
    Ok(())
}
