//! `mirror-agent run`: follows the pods until stopped, and leaves the mirror in place then.

use std::{io, process, thread};

use tokio::sync::watch;
use tracing::{error, info};

use super::{cleanup::remove_everything, links_of, mirrors, stop_signal};
use crate::{
    admin::{self, Admin},
    cli::{Listen, RunArgs, SettingArgs, StateArgs},
    control::{self, Control},
    dataplane::{bpf::Bpf, pins::Pins, readout::Reader},
    events, health,
    metrics::{LoopMetrics, Metrics},
    notes,
    pods::{
        PodSource,
        file::PodFile,
        kube::{KubePods, Watched, connect, installation::Installation},
    },
    reconcile::{Reconciler, TICK},
    report::Reports,
    select::{Policy, Readers},
};

/// Runs until SIGINT or SIGTERM.
pub async fn run(mut args: RunArgs) -> anyhow::Result<()> {
    let metrics = LoopMetrics::new()?;
    match (args.pods_from.take(), args.node_name.take()) {
        (Some(file), _) => {
            let pods = PodFile::watch(&file)?;
            follow(pods, true, None, args, metrics, |_| {}).await
        }
        (None, node) => {
            let node = node.unwrap_or_default();
            let client = connect().await?;
            let restarts = metrics.clone();
            let restarted = move |watched: Watched| restarts.watch_restart(watched.name());
            let pods = KubePods::watch(client.clone(), &node, restarted);
            info!(node, "following the pods of this node through the Kubernetes API");
            let own = args.daemonset.take().zip(args.namespace.take());
            let own = own.map(|(name, namespace)| pods.installation(client.clone(), namespace, name));
            let post = |reports| drop(tokio::spawn(events::post(client, node, reports)));
            follow(pods, false, own, args, metrics, post).await
        }
    }
}

/// Ends the process, from now on, if the loop hangs; a kubelet or systemd then starts it again. The mirror goes on
/// meanwhile. A probe over the network cannot do this, because another process may have the port.
fn end_if_hung(reports: Reports) -> io::Result<()> {
    // A task would hang with the loop.
    thread::Builder::new().name("health".to_owned()).spawn(move || {
        let reason = health::until_hung(&reports, TICK);
        error!(reason, "the agent hangs, and ends");
        process::exit(1);
    })?;
    Ok(())
}

/// Follows a source of pods, and gives the reports of the loop to `tell`. At the end it leaves the mirror in place,
/// unless `own` is being uninstalled.
async fn follow(
    pods: impl PodSource,
    is_strict: bool,
    own: Option<Installation>,
    args: RunArgs,
    metrics: LoopMetrics,
    tell: impl FnOnce(Reports),
) -> anyhow::Result<()> {
    let RunArgs { enable_mirror, listen, mirror, settings, state: StateArgs { bpffs }, .. } = args;
    let SettingArgs { settings, limits } = settings;
    let stop = stop_signal()?;
    let targets = mirror.targets()?;
    let links = links_of(&targets)?;
    let pins = Pins::new(&bpffs);
    let lock = pins.claim()?;
    let (socket, control) = (lock.socket()?, lock.control()?);
    let dataplane = Bpf::load(pins.clone(), lock, mirror.attach)?;
    let method = dataplane.method().name();
    let mirror_iface = &mirror.mirror_iface;
    info!(version = env!("PODMIRROR_VERSION"), attach = method, mirror_iface, enable_mirror, "agent started");
    let mirrors = mirrors(&mirror, &targets);
    let policy = Policy {
        enable_mirror,
        exclude_namespaces: args.exclude_namespaces.into_iter().collect(),
        allow_namespaces: args.allow_namespaces.map(|names| names.into_iter().collect()),
        targets,
        target: mirror.mirror_target,
        limits,
        settings,
        is_strict,
        ..Policy::default()
    };
    let source = pods.state();
    let readers = Control::new(dataplane.rings(), policy.targets.clone());
    let mut reconciler =
        Reconciler::new(pods, links, dataplane, readers.watch(), policy, mirrors, metrics.clone());
    let reports = reconciler.reports();
    tell(reports.clone());
    end_if_hung(reports.clone())?;
    let trouble = watch::Sender::new(None);
    notes::serve(socket, reports.clone(), trouble.subscribe())?;
    control::serve(control, readers.clone(), reports.clone())?;
    if let Listen::At(address) = listen {
        let metrics = Metrics::new(&metrics, reports.clone(), Reader::open(&pins)?)?;
        tokio::spawn(admin::run(address, Admin { metrics, reports, source }, trouble));
    }
    reconciler.run(stop).await?;
    // The mirror outlives the agent, rings do not.
    if **readers.watch().borrow() != Readers::default() {
        readers.end();
        reconciler.last_round().await;
    }
    match own {
        Some(own) if own.is_going().await => {
            info!("agent stopped for good; removing everything from this node");
            remove_everything(&pins, &mut reconciler.links).await
        }
        _ => {
            info!("agent stopped; the mirror stays in place until `mirror-agent cleanup`");
            Ok(())
        }
    }
}
