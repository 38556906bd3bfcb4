//! A real Kubernetes node, with the agent on it as people install it, and what people do to both.
//!
//! `cargo xtask test --level cluster` brings the node up and names it by `KUBECONFIG`, beside which lies all that the
//! node writes. One story at a time: they share the node, its agent and its mirror interface.

use std::{
    env, fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::{
        Once,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::{Lab, SOON, check, eventually};

/// The namespace that the agent is installed in, and the name of its DaemonSet.
pub const AGENT: &str = "podmirror";
/// How long Kubernetes may take over something that it has to begin from nothing.
pub const PATIENCE: Duration = Duration::from_secs(90);
/// The label of the stories' namespaces.
const LABEL: &str = "podmirror-story";
/// How long a component may take over an orderly end.
const ORDERLY: Duration = Duration::from_secs(3);

/// The node, and a namespace for one story. The namespace is removed on drop, and what the story stopped is brought
/// back; the agent stays.
#[derive(Debug)]
pub struct Cluster {
    host: Lab,
    directory: PathBuf,
    namespace: String,
    begun: Instant,
}

impl Cluster {
    /// Installs the agent unless it is, waits until it works and nothing is mirrored, and makes the namespace.
    #[track_caller]
    pub fn new(story: &str) -> Self {
        static STORIES: AtomicU32 = AtomicU32::new(0);
        static SWEPT: Once = Once::new();
        let kubeconfig = env::var_os("KUBECONFIG").map(PathBuf::from);
        let directory = kubeconfig.as_deref().and_then(Path::parent).map(Path::to_owned);
        let directory = directory.filter(|directory| directory.join("pid/kubelet").exists()).expect(
            "KUBECONFIG names no cluster of `cargo xtask cluster up`; `cargo xtask test --level cluster` brings one up",
        );
        let number = STORIES.fetch_add(1, Ordering::Relaxed);
        let namespace = format!("{story}-{}-{number}", std::process::id());
        let cluster = Self { host: Lab::host(), directory, namespace, begun: Instant::now() };
        fs::copy(kubeconfig.unwrap(), cluster.kubeconfig()).unwrap();
        cluster.kubectl(&format!("config set-context --current --namespace={}", cluster.namespace));
        // What test processes have left that were killed; and an agent of an earlier image.
        SWEPT.call_once(|| {
            cluster.kubectl(&format!("delete namespaces -l {LABEL}"));
            cluster.uninstall();
        });
        cluster.install();
        cluster.host.wait_taps(&[]);
        cluster.apply(&json!({
            "apiVersion": "v1", "kind": "Namespace",
            "metadata": { "name": cluster.namespace, "labels": { LABEL: "" } },
        }));
        // Pods are refused until it has this.
        eventually(PATIENCE, || cluster.try_kubectl("get serviceaccount default").map(drop));
        cluster
    }

    /// Applies the manifests that are handed out, and waits until the agent is ready.
    #[track_caller]
    pub fn install(&self) {
        self.kubectl(&format!("apply -f {}", Self::manifests()));
        self.wait_rolled_out();
    }

    /// Deletes what [`Cluster::install`] has applied, and waits until the agent has ended.
    #[track_caller]
    pub fn uninstall(&self) {
        self.kubectl(&format!("delete --ignore-not-found -f {}", Self::manifests()));
        eventually(PATIENCE, || check(self.agent_pid().is_none(), || "the agent still runs".into()));
    }

    /// The manifests that are handed out.
    pub fn manifests() -> &'static str {
        concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/rendered/podmirror.yaml")
    }

    /// Waits until the agent that the DaemonSet now asks for is ready.
    #[track_caller]
    pub fn wait_rolled_out(&self) {
        self.kubectl(&format!(
            "-n {AGENT} rollout status daemonset/{AGENT} --timeout={}s",
            PATIENCE.as_secs()
        ));
    }

    /// This machine, as the node.
    pub fn host(&self) -> &Lab {
        &self.host
    }

    /// The story's namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// `kubectl` with these words, in the story's namespace unless they name another. It must succeed.
    #[track_caller]
    pub fn kubectl(&self, words: &str) -> String {
        self.try_kubectl(words).unwrap_or_else(|error| panic!("{error}"))
    }

    /// As [`Cluster::kubectl`]; what it complains of, if it fails.
    pub fn try_kubectl(&self, words: &str) -> Result<String, String> {
        let output = self.program("kubectl", words).output().unwrap();
        succeeded("kubectl", words, &output)
    }

    /// `kubectl apply` of an object, in the story's namespace unless it names another.
    #[track_caller]
    pub fn apply(&self, object: &Value) {
        self.kubectl_with("apply -f -", &object.to_string());
    }

    /// As [`Cluster::kubectl`], with text for `-f -`.
    #[track_caller]
    pub fn kubectl_with(&self, words: &str, input: &str) -> String {
        let mut command = self.program("kubectl", words);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut kubectl = command.spawn().unwrap();
        kubectl.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = kubectl.wait_with_output().unwrap();
        succeeded("kubectl", words, &output).unwrap_or_else(|error| panic!("{error}"))
    }

    /// containerd's `ctr` with these words. It must succeed.
    #[track_caller]
    pub fn ctr(&self, words: &str) -> String {
        let output = self.program("ctr", words).output().unwrap();
        succeeded("ctr", words, &output).unwrap_or_else(|error| panic!("{error}"))
    }

    fn program(&self, name: &str, words: &str) -> Command {
        let mut command = Command::new(self.directory.join("bin").join(name));
        command.env_clear().env("HOME", &self.directory).env("KUBECONFIG", self.kubeconfig());
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").stdin(Stdio::null());
        command.args(words.split_whitespace());
        command
    }

    /// The administrator's, in which the story's namespace is the usual one.
    fn kubeconfig(&self) -> PathBuf {
        self.host.files().join("kubeconfig")
    }

    /// The log of the agent that runs now since the story began, a JSON object a line.
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
        let is_agent = |pid: &u32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line == b"/mirror-agent\0run\0"
        };
        let entries = fs::read_dir("/proc").unwrap().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(is_agent)
    }

    /// Stops a component of the node as a service manager does: SIGTERM, and SIGKILL where that takes too long. The API
    /// server waits for its clients, up to a minute.
    #[track_caller]
    pub fn stop(&self, component: &str) {
        let text = fs::read_to_string(self.directory.join("pid").join(component)).unwrap();
        let pid = text.split(' ').next().unwrap().parse().unwrap();
        let (begun, mut signal) = (Instant::now(), Signal::SIGTERM);
        kill(Pid::from_raw(pid), signal).unwrap();
        eventually(SOON, || {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            if stat.is_empty() || stat.contains(") Z ") {
                return Ok(());
            }
            if signal == Signal::SIGTERM && begun.elapsed() > ORDERLY {
                signal = Signal::SIGKILL;
                kill(Pid::from_raw(pid), signal).unwrap();
            }
            Err(format!("{component} does not end"))
        });
    }

    /// Brings back what was stopped, and waits until the node works.
    #[track_caller]
    pub fn bring_back(&self) {
        Self::try_bring_back().unwrap_or_else(|error| panic!("{error}"));
    }

    fn try_bring_back() -> Result<String, String> {
        let xtask = env::var_os("MIRROR_XTASK").expect("MIRROR_XTASK names the program of `cargo xtask`");
        let words = "cluster up";
        let output = Command::new(xtask).args(words.split(' ')).output().unwrap();
        succeeded("cargo xtask", words, &output)
    }
}

/// Its standard output, or what it complains of.
fn succeeded(program: &str, words: &str, output: &Output) -> Result<String, String> {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    Err(format!("{program} {words}: {}{}", text(&output.stdout), text(&output.stderr)))
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The story may have ended while something was stopped.
            let back = Self::try_bring_back();
            eprintln!("{}", back.unwrap_or_else(|error| error));
            eprintln!("the agent's log:\n{}", self.agent_log().unwrap_or_else(|error| error));
            let pods = self.try_kubectl("get pods,events -A -o wide");
            eprintln!("{}", pods.unwrap_or_else(|error| error));
        }
        // The pods first: the namespace alone would take its time over them.
        let pods = self.try_kubectl("delete pods --all --wait=false");
        let namespace = self.try_kubectl(&format!("delete namespace {} --wait=false", self.namespace));
        if let Err(error) = pods.and(namespace) {
            eprintln!("the story's namespace stays: {error}");
        }
    }
}
