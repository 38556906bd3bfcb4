//! Cilium on the node of a cluster that this crate has built: its modes, and restarts of its agent.

use mirror_test_cluster::built::cilium::{self, OUTSIDE};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

pub use mirror_test_cluster::built::cilium::{EDGE, Settings};

use crate::{Cluster, Netns, PATIENCE, check, eventually, kubectl::succeeded};

/// Cilium's agent, as a component of the cluster.
const AGENT: &str = "cilium-agent";

impl Cluster {
    /// Runs Cilium with these settings. Restarts its agent if it runs with others. Cilium's own status must confirm the
    /// host routing: on some kernels and with some options Cilium falls back to the other one.
    #[track_caller]
    pub fn cilium_runs_with(&self, settings: Settings) {
        if cilium::settings().ok() != Some(settings) {
            // Written only now: if the story fails before, it must not leave settings with which Cilium does not run.
            self.stop(AGENT);
            cilium::set(settings).unwrap_or_else(|error| panic!("{error:#}"));
            self.bring_back();
        }
        let set = if settings.legacy_host_routing { "Legacy" } else { "BPF" };
        let status: Value = serde_json::from_str(&cilium_dbg("status -o json")).expect("JSON");
        let routing = &status["routing"];
        assert_eq!(routing["intra-host-routing-mode"], set, "Cilium's host routing: {routing}");
    }

    /// Ends Cilium's agent by this signal, and starts it again.
    #[track_caller]
    pub fn restart_cilium(&self, signal: Signal) {
        let pid = self.component(AGENT).expect("Cilium's agent runs");
        kill(Pid::from_raw(pid), signal).unwrap();
        eventually(PATIENCE, || check(self.component(AGENT) != Some(pid), || format!("{pid} has not ended")));
        self.bring_back();
    }

    /// Makes Cilium load the programs of all pods again.
    #[track_caller]
    pub fn regenerate(&self) {
        let list = cilium_dbg("endpoint list -o jsonpath={[*].id}");
        list.split_whitespace().for_each(|id| drop(cilium_dbg(&format!("endpoint regenerate {id}"))));
    }

    /// The network outside the node.
    pub fn outside(&self) -> Netns {
        Netns::at(OUTSIDE)
    }
}

/// Runs `cilium-dbg`, which queries the running agent.
#[track_caller]
fn cilium_dbg(words: &str) -> String {
    let mut dbg = cilium::dbg().unwrap_or_else(|error| panic!("{error:#}"));
    let output = dbg.args(words.split(' ')).output().unwrap();
    succeeded("cilium-dbg", words, &output).unwrap_or_else(|error| panic!("{error}"))
}
