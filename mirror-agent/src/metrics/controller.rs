//! The metrics of the controller.

use prometheus::{IntCounter, IntGauge, Registry, TextEncoder};

/// The metrics of the controller, updated while it runs.
#[derive(Debug, Clone)]
pub struct ControllerMetrics {
    registry: Registry,
    leads: IntGauge,
    nodes: IntGauge,
    stale: IntGauge,
    mirrors: IntGauge,
    writes: IntCounter,
    failures: IntCounter,
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
        let counter = |name, help| {
            let counter = IntCounter::new(name, help)?;
            registry.register(Box::new(counter.clone()))?;
            prometheus::Result::Ok(counter)
        };
        Ok(Self {
            leads: gauge(
                "podmirror_controller_is_leader",
                "1 if this controller holds the Lease and writes statuses, else 0.",
            )?,
            nodes: gauge("podmirror_controller_nodes", "MirrorNodes that the controller has read.")?,
            stale: gauge(
                "podmirror_controller_stale_nodes",
                "MirrorNodes that do not count, because their agents have not written them for 15 minutes.",
            )?,
            mirrors: gauge(
                "podmirror_controller_mirrors",
                "Mirrors and ClusterMirrors that the controller has read.",
            )?,
            writes: counter("podmirror_controller_writes_total", "Statuses that were written.")?,
            failures: counter(
                "podmirror_controller_write_failures_total",
                "Statuses that could not be written, and are retried.",
            )?,
            registry,
        })
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

    /// Counts a write of a status, or a failed one.
    pub(crate) fn written(&self, is_written: bool) {
        if is_written { &self.writes } else { &self.failures }.inc();
    }

    /// Returns the text of all metrics.
    pub fn text(&self) -> anyhow::Result<String> {
        Ok(TextEncoder::new().encode_to_string(&self.registry.gather())?)
    }
}
