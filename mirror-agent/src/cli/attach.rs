//! `mirror-agent attach`: mirrors interfaces until it is stopped, and removes everything then.
//!
//! [`run_alone`] is also for `tail` and `capture` on a node without an agent.

use std::{
    future::{Future, pending},
    path::Path,
};

use anyhow::bail;
use tokio::sync::watch;
use tracing::info;

use super::{cleanup::remove_everything, mirrors, stop_signal};
use crate::{
    capture::control::{self, Control},
    cli::args::{AttachArgs, MirrorArgs, SettingArgs, StateArgs},
    kernel::{
        dataplane::{Dataplane as _, bpf::Bpf, pins::Pins},
        links::netlink::Netlink,
        when_read,
    },
    mirror_iface::{MirrorIface, MirrorIfaces},
    model::Actual,
    reconcile::Reconciler,
    report::{metrics::LoopMetrics, notes},
    select::Policy,
    sources::NoPods,
};

/// Runs until SIGINT or SIGTERM.
pub async fn attach(args: AttachArgs) -> anyhow::Result<()> {
    let AttachArgs { interfaces, direction, mirror, settings, state: StateArgs { bpffs } } = args;
    let SettingArgs { settings, limits } = settings;
    let stop = stop_signal()?;
    let policy = Policy {
        targets: mirror.targets()?,
        target: mirror.target.clone(),
        limits,
        interfaces,
        interface_directions: direction,
        settings,
        ..Policy::default()
    };
    let is_left = |installed: &Actual| {
        installed.taps.values().any(|tap| tap.tap.as_ref().is_some_and(|tap| tap.head.owner.pod.is_some()))
    };
    let work = async {
        info!("mirroring until Ctrl-C");
        pending().await
    };
    run_alone(&bpffs, Some(&mirror), policy, is_left, stop, work).await
}

/// Runs a loop for this command alone, until `stop` is ready or `work` ends, and removes everything at its end.
///
/// # Errors
///
/// An agent has left its mirror, which is so if what is installed `is_left`.
pub(super) async fn run_alone(
    bpffs: &Path,
    mirror: Option<&MirrorArgs>,
    policy: Policy,
    is_left: impl Fn(&Actual) -> bool,
    stop: impl Future<Output = ()>,
    work: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<()> {
    let pins = Pins::new(bpffs);
    let lock = pins.claim()?;
    // Before anything is loaded, which would pin maps beside those of the other version.
    if let Some(other) = pins.other_versions()?.first() {
        bail!(
            "an agent of another version left its mirror on this node ({}); if no agent runs here any more, remove it \
             with `mirror-agent cleanup`",
            other.maps().display()
        );
    }
    let (socket, control) = (lock.socket()?, lock.control()?);
    let links = Netlink::new()?;
    let mode = mirror.and_then(|mirror| mirror.attach);
    let mut dataplane = Bpf::load(pins.clone(), lock, mode, links.namespaces())?;
    if is_left(&dataplane.observe().await?) {
        bail!(
            "no agent is running on this node, but an earlier one left its mirror; start it again, or remove the mirror \
             with `mirror-agent cleanup`"
        );
    }
    if mirror.is_some_and(|mirror| mirror.when_read) {
        when_read::watch(dataplane.unread())?;
    }
    let mirrors = mirror.map_or_else(|| MirrorIfaces::new(MirrorIface::new("", None)), mirrors);
    let readers = Control::new(dataplane.rings(), policy.clone());
    let metrics = LoopMetrics::new()?;
    let mut reconciler = Reconciler::new(NoPods, links, dataplane, readers.watch(), policy, mirrors, metrics);
    // There is no HTTP server, so there are no problems with one.
    let trouble = watch::Sender::new(None);
    notes::serve(socket, reconciler.reports(), trouble.subscribe())?;
    control::serve(control, readers, reconciler.reports())?;
    let outcome = tokio::select! {
        outcome = reconciler.run(stop) => outcome,
        outcome = work => outcome,
    };
    // Also after a refusal, which may leave pinned maps. The reconciler owns the lock and lives until the end.
    let removed = remove_everything(&pins, &mut reconciler.links).await;
    outcome.and(removed)
}
