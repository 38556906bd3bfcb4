//! `mirror-agent run`: mirrors the pods of the node until it is stopped, and leaves the mirrors in place then.

use std::{io, process, thread};

use anyhow::Context as _;
use mirror_client::{Environment, Options};
use tokio::{sync::watch, time::Instant};
use tracing::{error, info, warn};

use super::{cleanup::remove_everything, mirrors, stop_signal};
use crate::{
    capture::{
        control::{self, Control},
        readers,
    },
    cli::args::{PodSideTaps, RunArgs, SettingArgs, StateArgs},
    kernel::{
        dataplane::{bpf::Bpf, hooks::end_other_versions, pins::Pins, readout::Reader},
        links::netlink::Netlink,
        when_read,
    },
    reconcile::Reconciler,
    report::{
        Reports, TICK,
        admin::{self, Admin},
        events, health,
        metrics::{LoopMetrics, Metrics},
        mirror_node, notes,
    },
    select::{Policy, Readers},
    sources::{
        PodSource,
        file::PodFile,
        kube::{KubePods, Watched, installation::Installation},
    },
};

/// Runs until SIGINT or SIGTERM.
pub async fn run(mut args: RunArgs) -> anyhow::Result<()> {
    let metrics = LoopMetrics::new()?;
    match (args.pods_from.take(), args.node_name.take()) {
        (Some(file), _) => {
            let pods = PodFile::watch(&file)?;
            follow(pods, true, None, args, metrics, |_, _| Ok(())).await
        }
        (None, node) => {
            let node = node.unwrap_or_default();
            let client = mirror_client::connect(&Options::default(), &Environment::of_process()).await?;
            let client = mirror_client::with_failures(client, metrics.request_failed());
            Watched::ALL.iter().for_each(|watched| metrics.watch_begins(watched.name()));
            let restarts = metrics.clone();
            let restarted = move |watched: Watched| restarts.watch_restart(watched.name());
            let pods = KubePods::watch(client.clone(), &node, restarted);
            info!(node, "following the pods of this node through the Kubernetes API");
            let own = args.daemonset.take().zip(args.namespace.take());
            let own = own.map(|(name, namespace)| pods.installation(client.clone(), namespace, name));
            let of_readers = args.apiserver.take().map(|(namespace, service)| readers::Options {
                namespace,
                service,
                token: args.apiserver_token.clone(),
                max_duration: args.max_reader_duration,
                bpffs: args.state.bpffs.clone(),
            });
            let tell = |reports: Reports, pins: &Pins| {
                let reader = Reader::open(pins)?;
                if let Some(options) = of_readers {
                    readers::start(options, client.clone(), reports.clone())
                        .context("cannot start the thread for readers")?;
                }
                tokio::spawn(events::post(client.clone(), node.clone(), reports.clone()));
                tokio::spawn(mirror_node::write(client, node, reports, reader));
                Ok(())
            };
            follow(pods, false, own, args, metrics, tell).await
        }
    }
}

/// Ends the process if the loop hangs; a kubelet or systemd then restarts it. The mirrors continue meanwhile. A network
/// probe cannot do this, because another process may have the port.
fn end_if_hung(reports: Reports) -> io::Result<()> {
    // A thread, because a task would hang with the loop.
    thread::Builder::new().name("health".to_owned()).spawn(move || {
        let reason = health::until_hung(&reports, TICK);
        error!(reason, "the agent hangs and exits");
        process::exit(1);
    })?;
    Ok(())
}

/// Follows a source of pods, and passes the reports of the loop and the pinned maps to `tell`. At the end it leaves the
/// mirrors in place, unless `own` is being uninstalled.
async fn follow(
    pods: impl PodSource,
    is_strict: bool,
    own: Option<Installation>,
    args: RunArgs,
    metrics: LoopMetrics,
    tell: impl FnOnce(Reports, &Pins) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let RunArgs { enable_mirror, listen, mirror, settings, state: StateArgs { bpffs }, .. } = args;
    let SettingArgs { settings, limits } = settings;
    let stop = stop_signal()?;
    let targets = mirror.targets()?;
    let links = Netlink::new()?;
    let pins = Pins::new(&bpffs);
    let lock = pins.claim()?;
    let (socket, control) = (lock.socket()?, lock.control()?);
    // Their taps would copy in addition to this version's. If they cannot be detached, the agent mirrors nevertheless.
    if let Err(error) = end_other_versions(&pins, &links.namespaces()).await {
        warn!("{error:#}");
    }
    let dataplane = Bpf::load(pins.clone(), lock, mirror.attach, links.namespaces())?;
    let method = dataplane.method().name();
    let mirror_iface = &mirror.mirror_iface;
    info!(version = env!("PODMIRROR_VERSION"), attach = method, mirror_iface, enable_mirror, "agent started");
    let mirrors = mirrors(&mirror);
    let policy = Policy {
        enable_mirror,
        annotations: args.annotations,
        kube_ovn_annotations: args.kube_ovn_annotations,
        exclude_namespaces: args.exclude_namespaces.into_iter().collect(),
        allow_namespaces: args.allow_namespaces.map(|names| names.into_iter().collect()),
        targets,
        target: mirror.target,
        limits,
        settings,
        is_strict,
        taps_inside: args.pod_side_taps == PodSideTaps::Auto,
        ..Policy::default()
    };
    if mirror.when_read {
        when_read::watch(dataplane.unread())?;
    }
    let source = pods.state();
    let rings = dataplane.rings();
    let readers = Control::new(rings.clone(), policy.clone());
    let mut reconciler =
        Reconciler::new(pods, links, dataplane, readers.watch(), policy, mirrors, metrics.clone());
    let reports = reconciler.reports();
    tell(reports.clone(), &pins)?;
    end_if_hung(reports.clone())?;
    let trouble = watch::Sender::new(None);
    notes::serve(socket, reports.clone(), trouble.subscribe())?;
    control::serve(control, readers.clone(), reports.clone())?;
    if let Some(address) = listen {
        let maps = Reader::open(&pins)?.with_rings(rings);
        let metrics = Metrics::new(&metrics, reports.clone(), maps, readers.fills(), args.metrics_per_pod)?;
        let (of_alive, of_ready) = (reports.clone(), reports);
        let admin = Admin {
            alive: Box::new(move || health::alive(&of_alive.borrow(), Instant::now())),
            ready: Box::new(move || health::ready(&of_ready.borrow(), *source.borrow(), Instant::now())),
            metrics: admin::kept(move || metrics.text()),
        };
        tokio::spawn(admin::run(address, admin, trouble));
    }
    reconciler.run(stop).await?;
    // The mirrors outlive the agent, its rings do not.
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
