//! The metrics of the controller.

use std::{borrow::Cow, time::Duration};

use prometheus::{Histogram, IntCounterVec, IntGauge, Opts, Registry, TextEncoder};

/// The metrics of the controller, updated while it runs.
#[derive(Debug, Clone)]
pub struct ControllerMetrics {
    registry: Registry,
    leads: IntGauge,
    nodes: IntGauge,
    stale: IntGauge,
    mirrors: IntGauge,
    reconcile: Histogram,
    writes: IntCounterVec,
    failures: IntCounterVec,
    watch_restarts: IntCounterVec,
    request_errors: IntCounterVec,
}

impl ControllerMetrics {
    /// Creates the metrics, all zero.
    pub fn new() -> prometheus::Result<Self> {
        let registry = super::of_process()?;
        let gauge = |name, help| {
            let gauge = IntGauge::new(name, help)?;
            registry.register(Box::new(gauge.clone()))?;
            prometheus::Result::Ok(gauge)
        };
        let counters = |name, help, label| {
            let counters = IntCounterVec::new(Opts::new(name, help), &[label])?;
            registry.register(Box::new(counters.clone()))?;
            prometheus::Result::Ok(counters)
        };
        let reconcile = super::seconds(
            "podmirror_controller_reconcile_duration_seconds",
            "Time to compute and write the status of an object, also if the write failed.",
        )?;
        registry.register(Box::new(reconcile.clone()))?;
        let request_errors = super::request_errors()?;
        super::register(&registry, &request_errors)?;
        Ok(Self {
            leads: gauge(
                "podmirror_controller_is_leader",
                "1 if this controller holds the Lease and writes statuses, else 0.",
            )?,
            nodes: gauge("podmirror_controller_nodes", "MirrorNodes that the controller has read.")?,
            stale: gauge(
                "podmirror_controller_stale_nodes",
                "Stale MirrorNodes: their agents have not written them for 15 minutes.",
            )?,
            mirrors: gauge(
                "podmirror_controller_mirrors",
                "Mirrors and ClusterMirrors that the controller has read.",
            )?,
            reconcile,
            writes: counters(
                "podmirror_controller_writes_total",
                "Statuses that were written, by kind of object.",
                "kind",
            )?,
            failures: counters(
                "podmirror_controller_write_failures_total",
                "Statuses that could not be written and are retried, by kind of object.",
                "kind",
            )?,
            watch_restarts: counters(
                "podmirror_controller_watch_restarts_total",
                "Restarts of a watch of the Kubernetes API after a failure.",
                "watch",
            )?,
            request_errors,
            registry,
        })
    }

    /// Begins the counters of writes of these kinds at zero, so that `rate` sees the first failure.
    pub(crate) fn writes_begin(&self, kinds: &[Cow<'_, str>]) {
        for kind in kinds {
            self.writes.with_label_values(&[kind]);
            self.failures.with_label_values(&[kind]);
        }
    }

    /// Sets whether this replica holds the Lease.
    pub(crate) fn leads(&self, leads: bool) {
        self.leads.set(leads.into());
        if !leads {
            self.knows(0, 0, 0);
        }
    }

    /// Sets the number of MirrorNodes, of stale ones, and of Mirrors.
    pub(crate) fn knows(&self, nodes: usize, stale: usize, mirrors: usize) {
        for (gauge, value) in [(&self.nodes, nodes), (&self.stale, stale), (&self.mirrors, mirrors)] {
            gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        }
    }

    /// Counts a write of a status of this kind, or a failed one, and the time since its computation began.
    pub(crate) fn written(&self, kind: &str, is_written: bool, took: Duration) {
        if is_written { &self.writes } else { &self.failures }.with_label_values(&[kind]).inc();
        self.reconcile.observe(took.as_secs_f64());
    }

    /// Begins the counter of restarts of a watch of these objects at zero.
    pub(crate) fn watch_begins(&self, objects: &str) {
        self.watch_restarts.with_label_values(&[objects]);
    }

    /// Counts a restart of a watch of these objects.
    pub(crate) fn watch_restart(&self, objects: &str) {
        self.watch_restarts.with_label_values(&[objects]).inc();
    }

    /// The function that counts a failed request to the Kubernetes API, by the status code of its answer.
    pub(crate) fn request_failed(&self) -> impl Fn(Option<u16>) + Clone + Send + Sync + use<> {
        super::request_failed(&self.request_errors)
    }

    /// Returns the text of all metrics.
    pub fn text(&self) -> anyhow::Result<String> {
        Ok(TextEncoder::new().encode_to_string(&self.registry.gather())?)
    }
}
