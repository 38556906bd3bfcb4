//! Stories that need an API server and no kubelet: the built agent on a node of its own, with a real API server.
//!
//! `cargo xtask test --level api` runs the stories in parallel.
#![expect(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "tests")]

use mirror_tests::{Api, Comparison, Lab, PodNs};

mod absence;
mod aggregation;
mod chart;
mod check;
mod controller;
mod dashboard;
mod events;
mod examples;
mod many;
mod metrics;
mod mirror_nodes;
mod packets;
mod places;
mod plugin;
mod resources;
mod roles;
mod selection;
mod sysdump;
mod targets;
mod watching;

/// A node of a real API server, with a bridge for pods. The node is the last field, so it is dropped last.
struct Node {
    api: Api,
    lab: Lab,
}

impl Node {
    #[track_caller]
    fn new(story: &str) -> Self {
        let lab = Lab::new(story);
        lab.bridge("br0");
        Self { api: Api::new(&lab, story), lab }
    }

    #[track_caller]
    fn pods<const N: usize>(&self, names: [&str; N]) -> [PodNs; N] {
        names.map(|name| self.lab.pod(name, "br0"))
    }

    /// Checks that the mirror interface shows all packets between `pod` and `other`, each once and unchanged.
    #[track_caller]
    fn is_mirrored(&self, pod: &PodNs, other: &PodNs) {
        let comparison = Comparison::of(pod.netns(), &self.lab);
        other.ping(pod.v4(), 5, 56);
        assert_eq!(comparison.is_equal().len(), 10);
    }
}
