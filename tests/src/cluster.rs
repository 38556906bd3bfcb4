//! Installs the agent on a real Kubernetes node as users do, and lets stories change the node and the agent.
//!
//! `cargo xtask test --level cluster` starts the node, or uses an existing cluster (`--kubeconfig`). The difference
//! matters only to [`Cluster::stop`], [`Cluster::bring_back`] and [`Cluster::runtime`]. One story runs at a time,
//! because stories share the node, its agent and its mirror interface.

use std::{
    fs,
    net::IpAddr,
    ops::Deref,
    sync::{Once, OnceLock},
    time::{Duration, Instant},
};

use mirror_test_cluster::{Components, Node};

use crate::{
    Kubectl, Lab, MIRROR, check, eventually,
    kubectl::{LABEL, succeeded, with_words},
};

/// The agent's namespace, and the name of its DaemonSet.
pub const AGENT: &str = "podmirror";
/// Timeout for Kubernetes to start something from nothing.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// The agent's arguments in the published manifests.
const ARGUMENTS: &str = "args: [run]";

/// The node, and a namespace for one story. If the story fails, the components that it has stopped are started again.
/// The agent stays installed.
#[derive(Debug)]
pub struct Cluster {
    host: Lab,
    address: IpAddr,
    kubectl: Kubectl,
    begun: Instant,
}

impl Cluster {
    /// Installs the agent if it is not installed, waits until it is ready and mirrors nothing, and creates the
    /// namespace.
    #[track_caller]
    pub fn new(story: &str) -> Self {
        static SWEPT: Once = Once::new();
        // On a cluster that this crate has not built, finding the node takes a pod.
        static NODE: OnceLock<Node> = OnceLock::new();
        let kubectl = Kubectl::new(story);
        let node = NODE.get_or_init(|| kubectl.cluster().node().unwrap_or_else(|error| panic!("{error:#}")));
        let host = Lab::at(&node.netns, &node.bpffs);
        let cluster = Self { host, address: node.address, kubectl, begun: Instant::now() };
        // Removes an agent of an earlier image, and the leftovers of killed test processes. While the APIService exists
        // without its server, no namespace could be deleted.
        SWEPT.call_once(|| {
            cluster.uninstall();
            cluster.kubectl(&format!("delete namespaces -l {LABEL}"));
        });
        cluster.install();
        cluster.host.wait_taps(&[]);
        cluster.make_namespace();
        // The API server refuses pods until the service account exists.
        eventually(PATIENCE, || cluster.try_kubectl("get serviceaccount default").map(drop));
        cluster
    }

    /// Applies the published manifests, and waits until the agent is ready, and the packets API too.
    #[track_caller]
    pub fn install(&self) {
        self.kubectl(&format!("apply -f {}", Self::manifests()));
        self.wait_rolled_out();
        self.wait_served();
    }

    /// Applies the published manifests with this flag of the agent, and waits until the agent is ready.
    #[track_caller]
    pub fn install_with(&self, flag: &str) {
        let manifests = fs::read_to_string(Self::manifests()).unwrap();
        assert_eq!(manifests.matches(ARGUMENTS).count(), 1);
        self.kubectl_with("apply -f -", &manifests.replace(ARGUMENTS, &format!("args: [run, {flag}]")));
        self.wait_rolled_out();
    }

    /// Deletes what [`Cluster::install`] has applied, and waits until the agent has ended.
    #[track_caller]
    pub fn uninstall(&self) {
        self.kubectl(&format!("delete --ignore-not-found -f {}", Self::manifests()));
        self.wait_ended();
    }

    fn wait_ended(&self) {
        eventually(PATIENCE, || check(self.agent_pid().is_none(), || "the agent still runs".into()));
    }

    /// Waits until no agent runs, and checks that nothing of an agent is left on the node.
    #[track_caller]
    pub fn has_left_nothing(&self) {
        self.wait_ended();
        let node = &self.host;
        assert!(!fs::exists(node.bpffs().join("podmirror")).unwrap(), "{:?}", node.pins());
        assert!(!node.devices().iter().any(|device| device == MIRROR));
        let state = node.network_state();
        let is_ours = |line: &String| line.contains("tap_ingress") || line.contains("tap_egress");
        assert!(!state.iter().any(is_ours), "{state:#?}");
    }

    /// The published manifests.
    pub fn manifests() -> &'static str {
        concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/rendered/podmirror.yaml")
    }

    /// Waits until the agent of the present DaemonSet is ready.
    #[track_caller]
    pub fn wait_rolled_out(&self) {
        self.kubectl(&format!(
            "-n {AGENT} rollout status daemonset/{AGENT} --timeout={}s",
            PATIENCE.as_secs()
        ));
    }

    /// Waits until the agent answers a request to the packets API.
    #[track_caller]
    pub fn wait_served(&self) {
        let reports = format!("/apis/packets.podmirror.io/v1alpha1/namespaces/{AGENT}/podreports");
        eventually(PATIENCE, || self.try_kubectl(&format!("get --raw {reports}")).map(drop));
    }

    /// The node.
    pub fn host(&self) -> &Lab {
        &self.host
    }

    /// The node's address.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// Runs the client of the container runtime (containerd's `ctr`) with these arguments, on a cluster that was built
    /// here. It must succeed.
    #[track_caller]
    pub fn runtime(&self, words: &str) -> String {
        let output = with_words(self.components().runtime(), words).output().unwrap();
        succeeded("ctr", words, &output).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Whether the cluster was built here. It then has both address families.
    pub fn is_built(&self) -> bool {
        self.cluster().components().is_some()
    }

    #[track_caller]
    fn components(&self) -> &dyn Components {
        self.cluster()
            .components()
            .expect("stories of a cluster that was built here are in the module `built`")
    }

    /// The log of the running agent since the start of the story, one JSON object per line.
    fn agent_log(&self) -> Result<String, String> {
        let seconds = self.begun.elapsed().as_secs() + 1;
        self.try_kubectl(&format!("-n {AGENT} logs daemonset/{AGENT} --since={seconds}s"))
    }

    /// Waits for a line in the agent's log that contains all of these texts.
    #[track_caller]
    pub fn wait_agent_log(&self, deadline: Duration, texts: &[&str]) {
        eventually(deadline, || {
            let log = self.agent_log()?;
            let is_there = log.lines().any(|line| texts.iter().all(|text| line.contains(text)));
            check(is_there, || format!("no line with {texts:?} in\n{log}"))
        });
    }

    /// The agent's process, if one runs.
    pub fn agent_pid(&self) -> Option<u32> {
        self.pid_of(&["run"])
    }

    /// The process in the agent's container with these arguments, if one runs.
    pub fn pid_of(&self, arguments: &[&str]) -> Option<u32> {
        self.pids_of(arguments).first().copied()
    }

    /// The processes of the agent's image with these arguments.
    pub fn pids_of(&self, arguments: &[&str]) -> Vec<u32> {
        let command: String =
            [&["/mirror-agent"], arguments].concat().iter().map(|word| format!("{word}\0")).collect();
        let is_it =
            |pid: &u32| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line == command.as_bytes());
        let entries = fs::read_dir("/proc").unwrap().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_it).collect()
    }

    /// The process of a component of a cluster that was built here, if it runs.
    pub fn component(&self, component: &str) -> Option<i32> {
        self.components().pid(component)
    }

    /// Stops a component of a cluster that was built here, by SIGTERM or, if it does not end, by SIGKILL. The API
    /// server waits up to a minute for its clients.
    #[track_caller]
    pub fn stop(&self, component: &str) {
        self.components().stop(component).unwrap_or_else(|error| panic!("{error:#}"));
    }

    /// Starts stopped components, and waits until the node works.
    #[track_caller]
    pub fn bring_back(&self) {
        self.components().bring_back().unwrap_or_else(|error| panic!("{error:#}"));
    }
}

impl Deref for Cluster {
    type Target = Kubectl;

    fn deref(&self) -> &Kubectl {
        &self.kubectl
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The story may have ended while a component was stopped.
            let back = self.cluster().components().map_or(Ok(()), |components| components.bring_back());
            back.unwrap_or_else(|error| eprintln!("{error:#}"));
            eprintln!("the agent's log:\n{}", self.agent_log().unwrap_or_else(|error| error));
            for words in [
                "get pods,events -A -o wide",
                "describe apiservice v1alpha1.packets.podmirror.io",
                &format!("-n {AGENT} logs deployment/{AGENT}-apiserver --all-pods --prefix"),
            ] {
                eprintln!("{}", self.try_kubectl(words).unwrap_or_else(|error| error));
            }
        }
    }
}
