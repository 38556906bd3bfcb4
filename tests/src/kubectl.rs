//! Runs `kubectl` as the administrator of a real cluster, in the namespace of one story.
//!
//! `cargo xtask test` sets the cluster's `KUBECONFIG`. `mirror-test-cluster` implements access to the cluster.

use std::{
    env, fs,
    io::Write as _,
    path::PathBuf,
    process::{Command, Output, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};

use mirror_test_cluster::TestCluster;
use serde_json::{Value, json};
use tempfile::TempDir;

/// The label of the namespaces of stories.
pub(crate) const LABEL: &str = "podmirror-story";

/// `kubectl`, and the namespace of one story. The namespace and its pods are deleted on drop.
#[derive(Debug)]
pub struct Kubectl {
    cluster: Box<dyn TestCluster>,
    files: TempDir,
    namespace: String,
}

impl Kubectl {
    /// Uses the cluster of `KUBECONFIG`. Does not create the namespace yet.
    #[track_caller]
    pub(crate) fn new(story: &str) -> Self {
        static STORIES: AtomicU32 = AtomicU32::new(0);
        let cluster = mirror_test_cluster::of_environment().unwrap_or_else(|error| panic!("{error:#}"));
        let number = STORIES.fetch_add(1, Ordering::Relaxed);
        let namespace = format!("{story}-{}-{number}", std::process::id());
        // The paths in a kubeconfig can be relative to it.
        let words = "config view --raw --flatten --minify";
        let config = succeeded("kubectl", words, &with_words(cluster.kubectl(), words).output().unwrap());
        let kubectl = Self { cluster, files: tempfile::tempdir().unwrap(), namespace };
        fs::write(kubectl.kubeconfig(), config.unwrap_or_else(|error| panic!("{error}"))).unwrap();
        kubectl.kubectl(&format!("config set-context --current --namespace={}", kubectl.namespace));
        kubectl
    }

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

    pub(crate) fn cluster(&self) -> &dyn TestCluster {
        &*self.cluster
    }

    /// The administrator's kubeconfig, with the story's namespace as the default.
    pub fn kubeconfig(&self) -> PathBuf {
        self.files.path().join("kubeconfig")
    }

    /// Writes a kubeconfig that authenticates with this token.
    pub fn kubeconfig_with(&self, token: &str) -> PathBuf {
        let mut config: Value = serde_json::from_str(&self.kubectl("config view --raw -o json")).unwrap();
        config["users"][0]["user"] = json!({ "token": token.trim() });
        let path = self.files.path().join("kubeconfig-with-token");
        fs::write(&path, config.to_string()).unwrap();
        path
    }

    /// Runs `kubectl` with these arguments, in the story's namespace unless they name another one. It must succeed.
    #[track_caller]
    pub fn kubectl(&self, words: &str) -> String {
        self.try_kubectl(words).unwrap_or_else(|error| panic!("{error}"))
    }

    /// As [`Cluster::kubectl`], but returns the message of a failure as an error.
    pub fn try_kubectl(&self, words: &str) -> Result<String, String> {
        let output = self.command(words).output().unwrap();
        succeeded("kubectl", words, &output)
    }

    /// Runs `kubectl apply` for an object, in the story's namespace unless the object names another one.
    #[track_caller]
    pub fn apply(&self, object: &Value) {
        self.kubectl_with("apply -f -", &object.to_string());
    }

    /// As [`Cluster::kubectl`], with text for the argument `-f -`.
    #[track_caller]
    pub fn kubectl_with(&self, words: &str, input: &str) -> String {
        self.try_kubectl_with(words, input).unwrap_or_else(|error| panic!("{error}"))
    }

    /// As [`Cluster::kubectl_with`], but returns the message of a failure as an error.
    pub fn try_kubectl_with(&self, words: &str, input: &str) -> Result<String, String> {
        let mut command = self.command(words);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut kubectl = command.spawn().unwrap();
        kubectl.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = kubectl.wait_with_output().unwrap();
        succeeded("kubectl", words, &output)
    }

    /// Runs `helm` with these arguments, as the checks of the chart do, and returns its output. It must succeed.
    #[track_caller]
    pub fn helm(&self, words: &str) -> String {
        self.try_helm(words).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Runs `helm` as [`Kubectl::helm`] does; returns its output, or the reason for its failure.
    pub fn try_helm(&self, words: &str) -> Result<String, String> {
        let helm = env::var_os("MIRROR_HELM").expect("MIRROR_HELM names the program of helm");
        let mut helm = with_words(Command::new(helm), words);
        helm.env_clear().env("HOME", self.files.path()).env("KUBECONFIG", self.kubeconfig());
        succeeded("helm", words, &helm.output().unwrap())
    }

    /// The command `kubectl` with these arguments, for the caller to change and run.
    pub fn command(&self, words: &str) -> Command {
        let mut kubectl = with_words(self.cluster.kubectl(), words);
        kubectl.env("KUBECONFIG", self.kubeconfig());
        kubectl
    }
}

/// Adds these arguments to a program without standard input.
pub(crate) fn with_words(mut program: Command, words: &str) -> Command {
    program.stdin(Stdio::null()).args(words.split_whitespace());
    program
}

/// The standard output of a program, or its error message if it has failed.
pub(crate) fn succeeded(program: &str, words: &str, output: &Output) -> Result<String, String> {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    Err(format!("{program} {words}: {}{}", text(&output.stdout), text(&output.stderr)))
}

impl Drop for Kubectl {
    fn drop(&mut self) {
        // Deletes the pods first: the deletion of the namespace alone would take longer.
        let pods = self.try_kubectl("delete pods --all --wait=false");
        let namespace = self.try_kubectl(&format!("delete namespace {} --wait=false", self.namespace));
        if let Err(error) = pods.and(namespace) {
            eprintln!("the story's namespace stays: {error}");
        }
    }
}
