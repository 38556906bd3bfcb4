//! Runs two pods and a ping, and checks that nothing is left of them: the node works.

use std::{collections::BTreeSet, fs, process::Stdio, time::Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use super::{
    NODE, SERVICE_IP,
    binaries::Binaries,
    control::{apply, kubectl, wait_for},
    images, is_up, node, state,
};
use mirror_test_tools::process::{Run as _, step};

/// Names of the pods. They are in the namespace `default`, because the deletion of a namespace takes seconds.
const PODS: [&str; 2] = ["podmirror-smoke-a", "podmirror-smoke-b"];

/// Runs the check. Removes the pods after a failure, too.
pub(super) fn run(binaries: &Binaries) -> Result<()> {
    if !is_up()? {
        bail!("there is no running node: `cargo xtask cluster up` brings one up");
    }
    remove(binaries)?;
    let before = Traces::read();
    let outcome = check(binaries, &before);
    step("removing the pods");
    let begun = Instant::now();
    let removed = remove(binaries).and_then(|()| {
        wait_for("the pods' devices, namespaces and addresses to go", || Traces::read() == before)
            .with_context(|| format!("before: {before:?}; now: {:?}", Traces::read()))
    });
    outcome?;
    removed?;
    println!("    gone after {:.1} s, and nothing is left of them", begun.elapsed().as_secs_f32());
    step("smoke: the node runs pods, joins them, and forgets them");
    Ok(())
}

fn check(binaries: &Binaries, before: &Traces) -> Result<()> {
    let [a, b] = PODS;
    step("starting two pods");
    let begun = Instant::now();
    apply(kubectl(binaries), &json!({ "apiVersion": "v1", "kind": "List", "items": PODS.map(pod) }))?;
    let mut wait = kubectl(binaries);
    wait.args(["wait", "pod", "--for=condition=Ready", "--timeout=60s"]).args(PODS).run()?;
    println!("    ready after {:.1} s", begun.elapsed().as_secs_f32());
    kubectl(binaries).args(["get", "pods", "-o", "wide"]).args(PODS).run()?;
    let devices = Traces::read().devices.difference(&before.devices).count();
    if devices != 2 {
        bail!("two pods have {devices} new devices on the node");
    }

    step("one pings the other, and reaches the API server");
    let address = kubectl(binaries).args(["get", "pod", b, "-o", "jsonpath={.status.podIP}"]).read()?;
    kubectl(binaries).args(["exec", a, "--", "ping", "-c", "3", "-W", "5", &address]).run()?;
    // Connects, sends nothing, and waits until the server hangs up.
    kubectl(binaries).args(["exec", a, "--", "nc", "-w", "5", SERVICE_IP, "443"]).run()
}

fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name },
        "spec": {
            "nodeSelector": { "kubernetes.io/hostname": NODE },
            "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "main",
                "image": images::BUSYBOX,
                "imagePullPolicy": "Never",
                "command": ["sleep", "3600"],
            }],
        },
    })
}

/// Deletes the pods, and waits until they no longer exist.
fn remove(binaries: &Binaries) -> Result<()> {
    let mut delete = kubectl(binaries);
    delete.args(["delete", "pod", "--ignore-not-found", "--timeout=60s"]).args(PODS);
    delete.stdout(Stdio::null()).run()
}

/// What would be left on the machine if a pod were not removed completely.
#[derive(Debug, PartialEq, Eq)]
struct Traces {
    devices: BTreeSet<String>,
    namespaces: BTreeSet<String>,
    addresses: BTreeSet<String>,
    sandboxes: BTreeSet<String>,
}

impl Traces {
    fn read() -> Self {
        let veth = |name: &String| name.starts_with("veth") || name.starts_with("lxc");
        let address = |name: &String| name.parse::<std::net::Ipv4Addr>().is_ok();
        Self {
            devices: names("/sys/class/net").filter(veth).collect(),
            namespaces: names(&state::text("containerd-state/io.containerd.grpc.v1.cri/netns")).collect(),
            addresses: names(&state::text(&format!("cni/ipam/{}", node::NETWORK))).filter(address).collect(),
            sandboxes: names(&state::text("runc/k8s.io")).collect(),
        }
    }
}

fn names(dir: &str) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned())
}
