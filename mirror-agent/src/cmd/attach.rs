//! `mirror-agent attach`: mirrors interfaces until it is stopped, and removes everything then.

use anyhow::bail;
use tokio::sync::watch;
use tracing::info;

use super::{cleanup::remove_everything, mirrors, stop_signal};
use crate::{
    cli::{AttachArgs, SettingArgs, StateArgs},
    control::{self, Control},
    dataplane::{Dataplane as _, bpf::Bpf, pins::Pins},
    links::netlink::Netlink,
    metrics::LoopMetrics,
    notes,
    pods::NoPods,
    reconcile::Reconciler,
    select::Policy,
    when_read,
};

/// Runs until SIGINT or SIGTERM.
pub async fn attach(args: AttachArgs) -> anyhow::Result<()> {
    let AttachArgs { interfaces, direction, mirror, settings, state: StateArgs { bpffs } } = args;
    let SettingArgs { settings, limits } = settings;
    let targets = mirror.targets()?;
    let stop = stop_signal()?;
    let pins = Pins::new(&bpffs);
    let lock = pins.claim()?;
    if let Some(other) = pins.other_versions()?.first() {
        bail!(
            "an agent of another version left its mirror on this node ({}); if no agent runs here any more, remove it \
             with `mirror-agent cleanup`",
            other.maps().display()
        );
    }
    let (socket, control) = (lock.socket()?, lock.control()?);
    let links = Netlink::new()?;
    let mut dataplane = Bpf::load(pins.clone(), lock, mirror.attach, links.namespaces())?;
    let installed = dataplane.observe().await?;
    if installed.taps.values().any(|tap| tap.tap.as_ref().is_some_and(|tap| tap.owner.pod.is_some())) {
        bail!(
            "pods are mirrored on this node; if no agent runs here any more, end that with `mirror-agent cleanup`"
        );
    }
    let mirrors = mirrors(&mirror);
    let policy = Policy {
        targets,
        target: mirror.target,
        limits,
        interfaces,
        interface_directions: direction,
        settings,
        ..Policy::default()
    };
    if mirror.when_read {
        when_read::watch(dataplane.unread())?;
    }
    let readers = Control::new(dataplane.rings(), policy.targets.clone());
    let metrics = LoopMetrics::new()?;
    let mut reconciler = Reconciler::new(NoPods, links, dataplane, readers.watch(), policy, mirrors, metrics);
    // This command has no HTTP server, so there are no problems with one.
    let trouble = watch::Sender::new(None);
    notes::serve(socket, reconciler.reports(), trouble.subscribe())?;
    control::serve(control, readers, reconciler.reports())?;
    info!("mirroring until Ctrl-C");
    let outcome = reconciler.run(stop).await;
    // Also after a refusal, which may leave pinned maps. The reconciler owns the lock and lives until the end.
    let removed = remove_everything(&pins, &mut reconciler.links).await;
    outcome.and(removed)
}
