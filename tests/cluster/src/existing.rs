//! A cluster that this crate has not built, given by its kubeconfig.
//!
//! Its only node must be this machine or a container on it (kind, k3d), because stories capture on the node and enter
//! the pods. This crate cannot stop the components of such a cluster, so stories that stop components cannot run on it.

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use mirror_test_tools::process::{Run as _, command, find};
use serde_json::{Value, json};

use crate::{
    BUSYBOX, Components, Node, TestCluster,
    built::{apply, kubectl_program},
};

/// Timeout for a pod that only prints some text.
const PATIENCE: Duration = Duration::from_secs(60);

/// A cluster that exists.
#[derive(Debug)]
pub struct Existing {
    kubeconfig: PathBuf,
    kubectl: PathBuf,
    import: Option<String>,
}

impl Existing {
    /// Connects to the cluster of a kubeconfig's current context. `import` is a shell command line that loads an image
    /// onto the node; the archive's path is appended to it. Without `import`, the images must already be there.
    pub fn connect(kubeconfig: &Path, import: Option<String>) -> Result<Self> {
        let path = fs::canonicalize(kubeconfig).with_context(|| kubeconfig.display().to_string())?;
        let kubectl =
            find("kubectl").or_else(kubectl_program).context("kubectl is in no directory of PATH")?;
        Ok(Self { kubeconfig: path, kubectl, import })
    }

    /// Runs a container once on the node's network, and returns its output. The image must be on the node.
    fn output_of(&self, image: &str, words: &[&str]) -> Result<String> {
        let name = format!("podmirror-probe-{}", std::process::id());
        apply(self.kubectl(), &probe(&name, image, words))?;
        let outcome = self.wait_for(&name, image);
        let mut delete = self.kubectl();
        let deleted = delete.args(["delete", "pod", &name, "--namespace=default", "--now"]).read();
        outcome.and_then(|output| deleted.map(|_| output))
    }

    fn wait_for(&self, name: &str, image: &str) -> Result<String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let pod = self.json(&["get", "pod", name, "--namespace=default"])?;
            let waiting = &pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"];
            if pod["status"]["phase"] == "Succeeded" {
                return self.kubectl().args(["logs", name, "--namespace=default"]).read();
            } else if waiting == "ErrImageNeverPull" {
                bail!("the node does not have the image {image}: `--import` has not brought it");
            } else if pod["status"]["phase"] == "Failed" || Instant::now() > deadline {
                bail!("a pod with the image {image} did not run to its end: {}", pod["status"]);
            }
            thread::sleep(Duration::from_millis(200));
        }
    }

    fn json(&self, words: &[&str]) -> Result<Value> {
        let text = self.kubectl().args(words).args(["--output", "json"]).read()?;
        serde_json::from_str(&text).with_context(|| format!("kubectl {}", words.join(" ")))
    }
}

impl TestCluster for Existing {
    fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// kubectl with the environment of this process, because a kubeconfig can name a program that fetches the
    /// credentials.
    fn kubectl(&self) -> Command {
        let mut kubectl = command(&self.kubectl);
        kubectl.env("KUBECONFIG", &self.kubeconfig);
        kubectl
    }

    fn node(&self) -> Result<Node> {
        let nodes = self.json(&["get", "nodes"])?;
        let (name, address) = only_node(&nodes)?;
        let script = "cat /proc/sys/kernel/random/boot_id; readlink /proc/self/ns/net";
        let output = self.output_of(BUSYBOX, &["sh", "-c", script])?;
        let mut lines = output.lines();
        let (boot, netns) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
        if boot != fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim() {
            bail!("the node {name} is another machine: stories capture on the node, so run them there");
        }
        if link("self").is_some_and(|own| own == netns) {
            return Ok(Node::this_machine(&name, address));
        }
        let process = process_in_netns(netns).with_context(|| {
            format!(
                "no process of this machine is on the network of the node {name}: is this a container itself?"
            )
        })?;
        let proc = Path::new("/proc").join(process.to_string());
        Ok(Node { name, address, netns: proc.join("ns/net"), bpffs: proc.join("root/sys/fs/bpf") })
    }

    fn import(&self, archive: &Path) -> Result<()> {
        match &self.import {
            Some(line) => {
                let mut import = command("sh");
                import.args(["-c", &format!("{line} \"$1\""), "sh"]).arg(archive).run()
            }
            None => {
                println!("    taken to be on the node: {}", archive.display());
                Ok(())
            }
        }
    }

    fn components(&self) -> Option<&dyn Components> {
        None
    }
}

/// The first process of this machine in a network namespace, which has the form of the link `/proc/<pid>/ns/net`.
pub fn process_in_netns(netns: &str) -> Option<i32> {
    let entries = fs::read_dir("/proc").ok()?.flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| link(&pid.to_string()).is_some_and(|own| own == netns)).min()
}

/// The network namespace of a process, in the form "net:[4026531840]".
fn link(process: &str) -> Option<String> {
    let link = fs::read_link(Path::new("/proc").join(process).join("ns/net")).ok()?;
    Some(link.to_string_lossy().into_owned())
}

/// Returns name and address of the only node.
fn only_node(nodes: &Value) -> Result<(String, IpAddr)> {
    let nodes = nodes["items"].as_array().context("kubectl lists no nodes")?;
    let [node] = nodes.as_slice() else {
        bail!(
            "the cluster has {} nodes: the stories need one, so that every pod runs on this machine",
            nodes.len()
        );
    };
    let name = node["metadata"]["name"].as_str().context("a node has a name")?;
    let mut addresses = node["status"]["addresses"].as_array().into_iter().flatten();
    let address = addresses.find_map(|address| {
        let internal = address["type"] == "InternalIP";
        address["address"].as_str()?.parse().ok().filter(|_: &IpAddr| internal)
    });
    Ok((name.to_owned(), address.with_context(|| format!("the node {name} has no InternalIP"))?))
}

fn probe(name: &str, image: &str, words: &[&str]) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "hostNetwork": true,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{ "operator": "Exists" }],
            "containers": [{
                "name": "main",
                "image": image,
                "imagePullPolicy": "Never",
                "command": words,
            }],
        },
    })
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn node(name: &str) -> Value {
        json!({
            "metadata": { "name": name },
            "status": { "addresses": [
                { "type": "Hostname", "address": name },
                { "type": "ExternalIP", "address": "192.0.2.1" },
                { "type": "InternalIP", "address": "10.0.0.1" },
            ] },
        })
    }

    #[test]
    fn stories_run_where_every_pod_is_on_the_one_node() {
        let one = json!({ "items": [node("kind-control-plane")] });
        assert_eq!(only_node(&one).unwrap(), ("kind-control-plane".to_owned(), "10.0.0.1".parse().unwrap()));
        let two = json!({ "items": [node("a"), node("b")] });
        assert!(only_node(&two).unwrap_err().to_string().contains("2 nodes"));
    }

    #[test]
    fn a_process_is_found_by_its_network() {
        let own = link("self").unwrap();
        let found = process_in_netns(&own).unwrap();
        assert_eq!(link(&found.to_string()), Some(own));
        assert_eq!(process_in_netns("net:[1]"), None);
    }
}
