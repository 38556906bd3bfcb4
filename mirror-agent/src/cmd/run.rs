//! `mirror-agent run`: follows the pods until stopped, and leaves the mirror in place then.

use tracing::info;

use super::stop_signal;
use crate::{
    cli::{MirrorArgs, RunArgs, StateArgs, Switch},
    dataplane::{bpf::Bpf, pins::Pins},
    links::netlink::Netlink,
    mirror_iface::MirrorIface,
    model::Directions,
    pods::file::PodFile,
    reconcile::Reconciler,
    select::Policy,
};

/// Runs until SIGINT or SIGTERM.
pub async fn run(args: RunArgs) -> anyhow::Result<()> {
    let RunArgs { pods_from, enable_mirror, mirror, settings, state: StateArgs { bpffs } } = args;
    let MirrorArgs { mirror_iface, mirror_iface_mtu, mirror_offloads, attach } = mirror;
    let (settings, limits) = settings.settings()?;
    let stop = stop_signal()?;
    let pods = PodFile::watch(&pods_from)?;
    let links = Netlink::new()?.with_offloads_of(&mirror_iface);
    let dataplane = Bpf::load(Pins::new(&bpffs), attach)?;
    let method = dataplane.method().name();
    info!(version = env!("PODMIRROR_VERSION"), attach = method, mirror_iface, enable_mirror, "agent started");
    let mirror =
        MirrorIface::new(&mirror_iface, mirror_iface_mtu, limits).offloads(mirror_offloads == Switch::On);
    let policy = Policy {
        enable_mirror,
        mirror_iface,
        interfaces: Vec::new(),
        interface_directions: Directions::Both,
        settings,
    };
    Reconciler::new(pods, links, dataplane, policy, mirror).run(stop).await?;
    info!("agent stopped; the mirror stays in place until `mirror-agent cleanup`");
    Ok(())
}
