//! The metrics of the server of packets.

use prometheus::{IntCounterVec, IntGauge, Opts, Registry, TextEncoder};

/// The metrics of the server of packets, updated while it runs.
#[derive(Debug, Clone)]
pub struct ApiserverMetrics {
    registry: Registry,
    agents: IntGauge,
    requests: IntCounterVec,
    foreign: IntCounterVec,
    request_errors: IntCounterVec,
}

impl ApiserverMetrics {
    /// Creates the metrics, all zero.
    pub fn new() -> prometheus::Result<Self> {
        let registry = super::of_process()?;
        let counters = |name, help, labels: &[&str]| {
            let counters = IntCounterVec::new(Opts::new(name, help), labels)?;
            super::register(&registry, &counters)?;
            prometheus::Result::Ok(counters)
        };
        let requests = counters(
            "podmirror_apiserver_requests_total",
            "Requests that have an answer, by resource and status code; a stream counts when it begins.",
            &["resource", "code"],
        )?;
        let foreign = counters(
            "podmirror_apiserver_foreign_interfaces_total",
            "Interfaces in the packets of a node that are not of its pods, or of no requested pod. Their packets are dropped.",
            &["node"],
        )?;
        let agents = IntGauge::new("podmirror_apiserver_agents", "Connected agents.")?;
        super::register(&registry, &agents)?;
        let request_errors = super::request_errors()?;
        super::register(&registry, &request_errors)?;
        Ok(Self { registry, agents, requests, foreign, request_errors })
    }

    /// Counts an answer to a request for a resource. Empty: for none.
    pub(crate) fn answered(&self, resource: &str, code: u16) {
        self.requests.with_label_values(&[resource, &code.to_string()]).inc();
    }

    /// Counts an interface that is not one of the node that sends it.
    pub(crate) fn foreign(&self, node: &str) {
        self.foreign.with_label_values(&[node]).inc();
    }

    /// The function that counts a failed request to the Kubernetes API, by the status code of its answer.
    pub(crate) fn request_failed(&self) -> impl Fn(Option<u16>) + Clone + Send + Sync + use<> {
        super::request_failed(&self.request_errors)
    }

    /// Returns the text of all metrics. `agents`: the number of connected ones.
    pub fn text(&self, agents: usize) -> anyhow::Result<String> {
        self.agents.set(i64::try_from(agents).unwrap_or(i64::MAX));
        Ok(TextEncoder::new().encode_to_string(&self.registry.gather())?)
    }
}
