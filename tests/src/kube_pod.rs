//! Creates pods in a real cluster, and finds them on the node.
//!
//! The harness finds a pod through the pod itself or its runtime, not through anything that the agent reads.

use std::{net::IpAddr, path::Path, time::Duration};

use mirror_test_cluster::{BUSYBOX, process_in_netns};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::{Cluster, Lab, Netns, cluster::PATIENCE, eventually};

/// The object of a pod with one container that runs a shell command line and ends at once when the runtime stops it.
pub fn pod_object(name: &str, shell: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name, "labels": { "app": name }, "annotations": {} },
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "main",
                "image": BUSYBOX,
                "imagePullPolicy": "Never",
                "command": ["sh", "-c", shell],
            }],
        },
    })
}

/// A `List` object of several objects.
pub fn list(objects: &[Value]) -> Value {
    json!({ "apiVersion": "v1", "kind": "List", "items": objects })
}

/// A running pod with a network namespace of its own.
#[derive(Debug)]
pub struct KubePod {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.uid`.
    pub uid: String,
    /// Its address.
    pub ip: IpAddr,
    /// Its network namespace.
    pub netns: Netns,
    /// The node side of its `eth0`.
    pub device: String,
}

impl Cluster {
    /// Creates idle pods, with the given value of the annotation `podmirror.io/mirror` or without it. Waits until they
    /// run.
    #[track_caller]
    pub fn pods<const N: usize>(&self, pods: [(&str, Option<&str>); N]) -> [KubePod; N] {
        let object = |(name, mirror): (&str, Option<&str>)| {
            let mut object = pod_object(name, "exec sleep 3600");
            if let Some(mirror) = mirror {
                object["metadata"]["annotations"]["podmirror.io/mirror"] = mirror.into();
            }
            object
        };
        self.apply(&list(&pods.map(object)));
        pods.map(|(name, _)| self.running(name))
    }

    /// Waits until the pod of this name is ready, and returns it.
    #[track_caller]
    pub fn running(&self, name: &str) -> KubePod {
        let timeout = PATIENCE.as_secs();
        self.kubectl(&format!("wait pod {name} --for=condition=Ready --timeout={timeout}s"));
        let uid = self.kubectl(&format!("get pod {name} -o jsonpath={{.metadata.uid}}"));
        let netns = self.kubectl(&format!("exec {name} -- readlink /proc/self/ns/net"));
        let process = process_in_netns(netns.trim()).expect("a pod that is ready has processes on its node");
        KubePod::of(self.host(), name, &uid, process)
    }

    /// Waits until the pod's container runs in another sandbox than before, and returns the pod. Queries only the
    /// runtime, because the API server may be down, and gets the news later.
    #[track_caller]
    pub fn with_new_sandbox(&self, name: &str, uid: &str, former: i32) -> KubePod {
        let sandbox = eventually(PATIENCE, || {
            let sandbox = self.task(uid, "sandbox").filter(|sandbox| *sandbox != former);
            let found = sandbox.filter(|_| self.task(uid, "container").is_some());
            found.ok_or_else(|| format!("{name} has no new sandbox"))
        });
        KubePod::of(self.host(), name, uid, sandbox)
    }

    /// The running process of a pod's sandbox or container.
    pub fn task(&self, uid: &str, kind: &str) -> Option<i32> {
        let filter =
            format!("labels.\"io.kubernetes.pod.uid\"=={uid},labels.\"io.cri-containerd.kind\"=={kind}");
        let ids = self.runtime(&format!("containers list --quiet {filter}"));
        let tasks = self.runtime("tasks list");
        let pid = |line: &str| match line.split_whitespace().collect::<Vec<_>>()[..] {
            [id, pid, "RUNNING"] if ids.lines().any(|own| own == id) => pid.parse().ok(),
            _ => None,
        };
        tasks.lines().find_map(pid)
    }

    /// Kills the process of a pod's sandbox or container without the knowledge of kubelet and the runtime.
    #[track_caller]
    pub fn kill_task(&self, pod: &KubePod, kind: &str) {
        let pid = self.task(&pod.uid, kind).unwrap();
        kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    }
}

impl KubePod {
    #[track_caller]
    fn of(node: &Lab, name: &str, uid: &str, process: i32) -> Self {
        let netns = Netns::at(Path::new("/proc").join(process.to_string()).join("ns/net"));
        let device = end_of(node, &netns, "eth0");
        let ip = between(&netns.ip("-o -4 address show dev eth0"), "inet ", "/").parse().unwrap();
        Self { name: name.into(), uid: uid.into(), ip, netns, device }
    }

    /// Pings an address `count` times from inside the pod. Every ping must be answered.
    #[track_caller]
    pub fn ping(&self, to: IpAddr, count: usize) {
        self.netns.ping_every(Duration::from_millis(2), to, count, 56);
    }

    /// The node side of a NIC of the pod.
    #[track_caller]
    pub fn end_of(&self, node: &Lab, nic: &str) -> String {
        end_of(node, &self.netns, nic)
    }

    /// The MAC address of the pod's `eth0`.
    #[track_caller]
    pub fn mac(&self) -> [u8; 6] {
        self.mac_of("eth0")
    }

    /// The MAC address of a NIC of the pod.
    #[track_caller]
    pub fn mac_of(&self, nic: &str) -> [u8; 6] {
        let line = self.netns.ip(&format!("-o link show dev {nic}"));
        let mut bytes =
            between(&line, "link/ether ", " ").split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap());
        [(); 6].map(|()| bytes.next().unwrap())
    }
}

/// The text between the first `start` and the next `end`.
#[track_caller]
fn between<'a>(text: &'a str, start: &str, end: &str) -> &'a str {
    let rest = text.split_once(start).unwrap_or_else(|| panic!("no {start:?} in {text}")).1;
    rest.split_once(end).map_or(rest, |(found, _)| found)
}

/// The node side of a NIC.
#[track_caller]
fn end_of(node: &Lab, netns: &Netns, nic: &str) -> String {
    // "2: eth0@if12: <BROADCAST,…": its peer is the node's device 12.
    device_with(node, between(&netns.ip(&format!("-o link show dev {nic}")), "@if", ":"))
}

/// The device of the node with this ifindex.
#[track_caller]
fn device_with(node: &Lab, index: &str) -> String {
    // "12: veth1a2b@if2: <BROADCAST,…"
    let links = node.node().ip("-o link show");
    let line = links.lines().find_map(|line| line.strip_prefix(index)?.strip_prefix(": "));
    let line = line.unwrap_or_else(|| panic!("no device {index} in\n{links}"));
    line.split([':', '@']).next().unwrap().to_owned()
}
