//! The metrics, in Prometheus' text format.
//!
//! Packets, bytes and the state of the mirrors are read from the pinned maps and the newest report. Only
//! events without a lasting state (durations, failures) are counted as they happen, by the loop and the source of pods.
//! This module cannot change any mirror. [`apiserver`] and [`controller`] have metrics of their own.

pub mod apiserver;
pub mod controller;
mod maps;
mod sums;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use mirror_common::verdict::Direction;
use prometheus::{
    Histogram, HistogramOpts, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
    core::Collector, process_collector::ProcessCollector,
};
use tokio::sync::watch;

use self::{
    maps::{copied_directions, mirrored, register_recorders, register_rings, register_state},
    sums::{Part, Scrape, Sums},
};
use crate::{
    kernel::dataplane::readout::{Reader, Readout, RingFill, TapReadout, drops},
    model::{Op, Owner, TargetName},
    report::{Fill, NicCoverage, Report, Reports},
};

/// The content type of [`Metrics::text`].
pub const CONTENT_TYPE: &str = prometheus::TEXT_FORMAT;

/// Histogram bounds in seconds: one hook takes milliseconds, a round on a full node some seconds.
const SECONDS: [f64; 15] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

/// The counters that the loop and the source of pods increment.
#[derive(Debug, Clone)]
pub struct LoopMetrics {
    round: Histogram,
    attach: Histogram,
    tap_latency: Histogram,
    last_success: IntGauge,
    op_failures: IntCounterVec,
    watch_restarts: IntCounterVec,
    request_errors: IntCounterVec,
}

impl LoopMetrics {
    /// Creates the metrics, all zero.
    pub fn new() -> prometheus::Result<Self> {
        let op_failures = IntCounterVec::new(
            Opts::new("podmirror_op_failures_total", "Changes of the kernel's state that failed, by kind."),
            &["op"],
        )?;
        for name in Op::NAMES {
            op_failures.with_label_values(&[name]);
        }
        Ok(Self {
            round: seconds("podmirror_reconcile_duration_seconds", "Duration of a round of the loop.")?,
            attach: seconds("podmirror_attach_duration_seconds", "Time to attach one program to one hook.")?,
            tap_latency: seconds(
                "podmirror_tap_latency_seconds",
                "Time from the event that woke the loop to an installed tap.",
            )?,
            last_success: IntGauge::new(
                "podmirror_last_successful_reconcile_timestamp_seconds",
                "Unix time of the last complete round of the loop; 0 before the first. Failures of single devices do not count.",
            )?,
            op_failures,
            watch_restarts: IntCounterVec::new(
                Opts::new(
                    "podmirror_watch_restarts_total",
                    "Restarts of a watch of the Kubernetes API after a failure.",
                ),
                &["watch"],
            )?,
            request_errors: request_errors()?,
        })
    }

    /// Records the duration of a round, and its time if it was complete and only single devices failed, if any.
    pub fn round(&self, took: Duration, is_success: bool) {
        self.round.observe(took.as_secs_f64());
        if is_success {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            self.last_success.set(i64::try_from(now.as_secs()).unwrap_or(i64::MAX));
        }
    }

    /// Records the time from the event that woke the loop to the installation of a new tap.
    pub fn new_tap(&self, after: Duration) {
        self.tap_latency.observe(after.as_secs_f64());
    }

    /// Records the duration of an op, and whether it failed.
    pub fn op(&self, op: &Op, took: Duration, has_failed: bool) {
        if has_failed {
            self.op_failures.with_label_values(&[op.name()]).inc();
        } else if matches!(op, Op::Attach(..)) {
            self.attach.observe(took.as_secs_f64());
        }
    }

    /// Begins the counter of a watch of the source of pods at zero, so that `rate` sees its first restart.
    pub fn watch_begins(&self, watch: &str) {
        self.watch_restarts.with_label_values(&[watch]);
    }

    /// Counts a restart of a watch of the source of pods.
    pub fn watch_restart(&self, watch: &str) {
        self.watch_restarts.with_label_values(&[watch]).inc();
    }

    /// The function that counts a failed request to the Kubernetes API, by the status code of its answer.
    pub fn request_failed(&self) -> impl Fn(Option<u16>) + Clone + Send + Sync + use<> {
        request_failed(&self.request_errors)
    }
}

/// Creates the counter of failed requests to the Kubernetes API.
fn request_errors() -> prometheus::Result<IntCounterVec> {
    let help = "Requests to the Kubernetes API that failed, by the status code of the answer; none: without an answer.";
    IntCounterVec::new(Opts::new("podmirror_api_request_errors_total", help), &["code"])
}

/// Begins the counter at zero, so that `rate` sees the first request without an answer. Returns the function that
/// increments it.
fn request_failed(errors: &IntCounterVec) -> impl Fn(Option<u16>) + Clone + Send + Sync + use<> {
    errors.with_label_values(&["none"]);
    let errors = errors.clone();
    move |code: Option<u16>| {
        let code = code.map_or_else(|| "none".to_owned(), |code| code.to_string());
        errors.with_label_values(&[code]).inc();
    }
}

/// Reads the maps, and how full the rings are.
type Read = Box<dyn FnMut() -> anyhow::Result<(Readout, Vec<RingFill>)> + Send>;

/// All metrics.
pub struct Metrics {
    /// The counters that are incremented as events happen.
    counted: Registry,
    /// The maps, and the sums of the last scrape.
    scrapes: Mutex<(Read, Option<Sums>)>,
    reports: Reports,
    recorders: watch::Receiver<BTreeMap<TargetName, Fill>>,
    /// Whether the labels `pod` and `nic` have values. On nodes with many short-lived pods, they make many series.
    has_pods: bool,
}

impl Metrics {
    /// Creates the metrics of a loop, its reports, the maps and the recorders. `has_pods`: the labels `pod` and `nic`
    /// have values; otherwise series are the sums over a namespace.
    pub fn new(
        of_loop: &LoopMetrics,
        reports: Reports,
        mut maps: Reader,
        recorders: watch::Receiver<BTreeMap<TargetName, Fill>>,
        has_pods: bool,
    ) -> prometheus::Result<Self> {
        let LoopMetrics {
            round,
            attach,
            tap_latency,
            last_success,
            op_failures,
            watch_restarts,
            request_errors,
        } = of_loop;
        let counted = of_process()?;
        for histogram in [round, attach, tap_latency] {
            counted.register(Box::new(histogram.clone()))?;
        }
        register(&counted, last_success)?;
        for counters in [op_failures, watch_restarts, request_errors] {
            counted.register(Box::new(counters.clone()))?;
        }
        let read: Read = Box::new(move || anyhow::Ok((maps.read()?, maps.ring_fills()?)));
        Ok(Self { counted, scrapes: Mutex::new((read, None)), reports, recorders, has_pods })
    }

    /// Returns the text of all metrics, with the present values.
    pub fn text(&self) -> anyhow::Result<String> {
        let (now, drops) = (Registry::new(), drops()?);
        // Locked until the sums are gathered: each needs those of the scrape before, and can add series to them.
        let mut scrapes = self.scrapes.lock().unwrap_or_else(PoisonError::into_inner);
        let (read, sums) = &mut *scrapes;
        let (mut readout, rings) = read()?;
        let mut scrape = Scrape { before: sums.take(), now: None };
        if !self.has_pods {
            readout.taps.iter_mut().for_each(|tap| without_names(&mut tap.owner));
            scrape.now = Some(Sums::default());
        }
        register_state(&now, &readout, &drops, &mut scrape)?;
        register_rings(&now, &rings)?;
        register_recorders(&now, &self.recorders.borrow())?;
        register_report(&now, &self.reports.borrow(), &readout.taps, &mut scrape)?;
        *sums = scrape.now;
        let families = [now.gather(), self.counted.gather()].concat();
        drop(scrapes);
        Ok(TextEncoder::new().encode_to_string(&families)?)
    }
}

/// Removes the names of the pod and the NIC. Prometheus treats an empty label as an absent one.
fn without_names(owner: &mut Owner) {
    owner.nic.clear();
    owner.network = None;
    if let Some(pod) = &mut owner.pod {
        pod.name.clear();
    }
}

/// A registry with the metrics of this process and its version.
fn of_process() -> prometheus::Result<Registry> {
    let registry = Registry::new();
    registry.register(Box::new(ProcessCollector::for_self()))?;
    let build = IntGaugeVec::new(
        Opts::new("podmirror_build_info", "Always 1; the labels are the version of the program."),
        &["version", "revision"],
    )?;
    build.with_label_values(&[env!("CARGO_PKG_VERSION"), env!("PODMIRROR_REVISION")]).set(1);
    register(&registry, &build)?;
    Ok(registry)
}

fn seconds(name: &str, help: &str) -> prometheus::Result<Histogram> {
    Histogram::with_opts(HistogramOpts::new(name, help).buckets(SECONDS.to_vec()))
}

fn register(registry: &Registry, metric: &(impl Collector + Clone + 'static)) -> prometheus::Result<()> {
    registry.register(Box::new(metric.clone()))
}

fn gauge(registry: &Registry, name: &str, help: &str, value: usize) -> prometheus::Result<()> {
    let gauge = IntGauge::new(name, help)?;
    gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
    register(registry, &gauge)
}

/// Registers the values from the report of the last round. `taps`: the taps in the maps.
fn register_report(
    registry: &Registry,
    report: &Report,
    taps: &[TapReadout],
    scrape: &mut Scrape,
) -> prometheus::Result<()> {
    let (mirrored, copied) = (mirrored(taps), copied_directions(taps));
    let Report { wanted, attached, skipped, bad, failures, coverage, .. } = report;
    gauge(registry, "podmirror_taps_desired", "NICs that should have a tap.", *wanted)?;
    gauge(
        registry,
        "podmirror_taps",
        "NICs whose tap is attached, of those that should have one.",
        *attached,
    )?;
    let pods = IntGaugeVec::new(
        Opts::new(
            "podmirror_pods_not_mirrored",
            "Pods that are not mirrored as requested, by reason. Extent: whole if no mirror is installed for the pod, else part.",
        ),
        &["reason", "extent"],
    )?;
    let mut by_reason = BTreeMap::<_, BTreeSet<_>>::new();
    for skipped in skipped.iter().filter(|skipped| !skipped.is_of_capture()) {
        by_reason.entry(skipped.why.name()).or_default().insert(&skipped.pod);
    }
    for (reason, skipped) in by_reason {
        for pod in skipped {
            let is_part = pod.as_ref().is_some_and(|pod| mirrored.contains(pod.uid.as_str()));
            pods.with_label_values(&[reason, if is_part { "part" } else { "whole" }]).inc();
        }
    }
    register(registry, &pods)?;
    // A series for each direction that a mirror copies: the present state is a label, and other states have no series.
    let states = IntGaugeVec::new(
        Opts::new(
            "podmirror_nic_coverage",
            "NICs, by direction and by whether their taps see what they carry.",
        ),
        &["namespace", "pod", "nic", "direction", "state"],
    )?;
    let packets =
        |name, help| IntCounterVec::new(Opts::new(name, help), &["namespace", "pod", "nic", "direction"]);
    let seen = packets("podmirror_nic_seen_packets_total", "Packets that the tap of a NIC has seen.")?;
    let carried = packets("podmirror_nic_carried_packets_total", "Packets that the NIC itself has counted.")?;
    for (device, NicCoverage { pod, nic, directions, .. }) in coverage {
        let has_pods = scrape.now.is_none();
        let (name, nic) = if has_pods { (pod.name.as_str(), nic.as_str()) } else { ("", "") };
        for (direction, judged) in Direction::ALL.into_iter().zip(directions) {
            let labels: [&str; 4] = [&pod.namespace, name, nic, direction.name()];
            let is_copied = copied.get(device).is_some_and(|bits| bits & direction.bit() != 0);
            for (packets, value) in [(&seen, judged.seen), (&carried, judged.carried)] {
                scrape.add(packets, is_copied.then_some(&labels[..]), Part::Nic(*device, direction), value);
            }
            if is_copied {
                let [namespace, pod, nic, direction] = labels;
                states.with_label_values(&[namespace, pod, nic, direction, judged.state.name()]).inc();
            }
        }
    }
    register(registry, &states)?;
    register(registry, &seen)?;
    register(registry, &carried)?;
    gauge(
        registry,
        "podmirror_bad_annotations",
        "Annotations with an invalid value, which are ignored.",
        bad.len(),
    )?;
    gauge(
        registry,
        "podmirror_pending_failures",
        "Failures of the last round of the loop, which the agent retries.",
        failures.len(),
    )
}

#[cfg(test)]
mod tests;
