//! `kubectl` as the administrator of a real cluster, in a namespace that is one story's own.
//!
//! `cargo xtask test` brings the cluster up and names it by `KUBECONFIG`, beside which lies all that the cluster writes.

use std::{
    env, fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};

use serde_json::{Value, json};
use tempfile::TempDir;

/// The label of the stories' namespaces.
pub(crate) const LABEL: &str = "podmirror-story";

/// `kubectl`, and the namespace of one story. The namespace and its pods are removed on drop.
#[derive(Debug)]
pub struct Kubectl {
    directory: PathBuf,
    files: TempDir,
    namespace: String,
}

impl Kubectl {
    /// For the cluster of `KUBECONFIG`. The namespace is still to be made.
    #[track_caller]
    pub(crate) fn new(story: &str) -> Self {
        static STORIES: AtomicU32 = AtomicU32::new(0);
        let kubeconfig = env::var_os("KUBECONFIG").map(PathBuf::from);
        let directory = kubeconfig.as_deref().and_then(Path::parent).map(Path::to_owned);
        let directory = directory.filter(|directory| directory.join("bin/kubectl").exists()).expect(
            "KUBECONFIG names no cluster of `cargo xtask cluster up`; `cargo xtask test` brings one up for its tests",
        );
        let number = STORIES.fetch_add(1, Ordering::Relaxed);
        let namespace = format!("{story}-{}-{number}", std::process::id());
        let kubectl = Self { directory, files: tempfile::tempdir().unwrap(), namespace };
        fs::copy(kubeconfig.unwrap(), kubectl.kubeconfig()).unwrap();
        kubectl.kubectl(&format!("config set-context --current --namespace={}", kubectl.namespace));
        kubectl
    }

    /// Makes the namespace.
    #[track_caller]
    pub(crate) fn make_namespace(&self) {
        self.apply(&json!({
            "apiVersion": "v1", "kind": "Namespace",
            "metadata": { "name": self.namespace, "labels": { LABEL: "" } },
        }));
    }

    /// The story's namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Where the cluster has its files.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The administrator's kubeconfig, in which the story's namespace is the usual one.
    pub fn kubeconfig(&self) -> PathBuf {
        self.files.path().join("kubeconfig")
    }

    /// `kubectl` with these words, in the story's namespace unless they name another. It must succeed.
    #[track_caller]
    pub fn kubectl(&self, words: &str) -> String {
        self.try_kubectl(words).unwrap_or_else(|error| panic!("{error}"))
    }

    /// As [`Cluster::kubectl`]; what it complains of, if it fails.
    pub fn try_kubectl(&self, words: &str) -> Result<String, String> {
        let output = self.command(words).output().unwrap();
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
        let mut command = self.command(words);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut kubectl = command.spawn().unwrap();
        kubectl.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = kubectl.wait_with_output().unwrap();
        succeeded("kubectl", words, &output).unwrap_or_else(|error| panic!("{error}"))
    }

    /// `kubectl` with these words, for who wants to do more with it.
    pub fn command(&self, words: &str) -> Command {
        self.program("kubectl", words)
    }

    /// A program of the cluster with these words, and nothing from our environment.
    pub(crate) fn program(&self, name: &str, words: &str) -> Command {
        let mut command = Command::new(self.directory.join("bin").join(name));
        command.env_clear().env("HOME", &self.directory).env("KUBECONFIG", self.kubeconfig());
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").stdin(Stdio::null());
        command.args(words.split_whitespace());
        command
    }
}

/// Its standard output, or what it complains of.
pub(crate) fn succeeded(program: &str, words: &str, output: &Output) -> Result<String, String> {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    Err(format!("{program} {words}: {}{}", text(&output.stdout), text(&output.stderr)))
}

impl Drop for Kubectl {
    fn drop(&mut self) {
        // The pods first: the namespace alone would take its time over them.
        let pods = self.try_kubectl("delete pods --all --wait=false");
        let namespace = self.try_kubectl(&format!("delete namespace {} --wait=false", self.namespace));
        if let Err(error) = pods.and(namespace) {
            eprintln!("the story's namespace stays: {error}");
        }
    }
}
