//! Cilium on the node of a cluster that was built here: its modes, and restarts of its agent.

use mirror_test_cluster::built::cilium::{self, OUTSIDE};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

pub use mirror_test_cluster::built::cilium::{EDGE, Settings};

use crate::{Cluster, Netns, PATIENCE, check, eventually, kubectl::succeeded};

/// Cilium's agent, as a component of the cluster.
const AGENT: &str = "cilium-agent";

impl Cluster {
    /// Lets Cilium run with these settings. It starts anew if it has run with others.
    #[track_caller]
    pub fn cilium_runs_with(&self, settings: Settings) {
        if cilium::settings().ok() != Some(settings) {
            cilium::set(settings).unwrap_or_else(|error| panic!("{error:#}"));
            self.stop(AGENT);
            self.bring_back();
        }
    }

    /// Ends Cilium's agent by this signal, and starts it again.
    #[track_caller]
    pub fn restart_cilium(&self, signal: Signal) {
        let pid = self.component(AGENT).expect("Cilium's agent runs");
        kill(Pid::from_raw(pid), signal).unwrap();
        eventually(PATIENCE, || check(self.component(AGENT) != Some(pid), || format!("{pid} has not ended")));
        self.bring_back();
    }

    /// Lets Cilium load the programs of all pods again.
    #[track_caller]
    pub fn regenerate(&self) {
        let list = cilium_dbg("endpoint list -o jsonpath={[*].id}");
        list.split_whitespace().for_each(|id| drop(cilium_dbg(&format!("endpoint regenerate {id}"))));
    }

    /// The network beyond the node.
    pub fn outside(&self) -> Netns {
        Netns::at(OUTSIDE)
    }
}

/// Runs `cilium-dbg`, which asks the running agent.
#[track_caller]
fn cilium_dbg(words: &str) -> String {
    let mut dbg = cilium::dbg().unwrap_or_else(|error| panic!("{error:#}"));
    let output = dbg.args(words.split(' ')).output().unwrap();
    succeeded("cilium-dbg", words, &output).unwrap_or_else(|error| panic!("{error}"))
}
