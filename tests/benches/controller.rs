//! The controller with 1000 simulated nodes and a real API server: time until it has summed up, writes, memory, CPU
//! time. Run by `cargo xtask bench controller`. Prints; a person judges.
//!
//! A node is simulated by its MirrorNode, which is written once a minute with new counters, as agents with busy mirrors
//! do.

#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has failed")]
#![expect(clippy::print_stdout, reason = "its output")]

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use k8s_openapi::jiff::Timestamp;
use mirror_tests::{Agent, Api, Lab, Proxy, check, cpu_time, eventually, list, memory};
use serde_json::{Value, json};

const NODES: usize = 1000;
const MIRRORS: usize = 100;
/// Mirrors on each node. Each Mirror is on a tenth of the nodes.
const MIRRORS_OF_A_NODE: usize = 10;
const PODS_OF_A_MIRROR: i64 = 5;
/// Duration of the phase in which each node has busy mirrors and reports once a minute.
const BUSY: Duration = Duration::from_secs(120);
const MINUTE: Duration = Duration::from_secs(60);
const IDLE: Duration = Duration::from_secs(30);
/// Timeout for every wait.
const PATIENCE: Duration = Duration::from_secs(120);
const RESOURCES: &str = "/apis/podmirror.io/v1alpha1";
const LABEL: &str = "podmirror-bench";

fn main() {
    let lab = Lab::new("bench-controller");
    let api = Api::new(&lab, "bench-controller");
    let crds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/chart/files/crds.yaml");
    api.kubectl_with("apply -f -", &fs::read_to_string(crds).unwrap());
    api.kubectl(
        "wait --for=condition=Established --timeout=30s crd mirrors.podmirror.io mirrornodes.podmirror.io",
    );
    let bench = Bench { proxy: Proxy::start(&api), api, lab };
    bench.run();
}

struct Bench {
    proxy: Proxy,
    api: Api,
    lab: Lab,
}

impl Bench {
    fn run(&self) {
        let uids = self.make_mirrors();
        println!("{MIRRORS} Mirrors on {NODES} nodes, {MIRRORS_OF_A_NODE} on each");
        let begun = Instant::now();
        for node in 0..NODES {
            self.report(node, &uids, 0);
        }
        println!("{NODES} MirrorNodes have been made in {:.1} s", begun.elapsed().as_secs_f64());

        let kubeconfig = self.api.kubeconfig();
        let words = ["controller", "--namespace", self.api.namespace(), "--pod-name", "one"];
        let begun = Instant::now();
        let controller =
            Agent::with_environment(&self.lab, &words, &[("KUBECONFIG", kubeconfig.to_str().unwrap())]);
        eventually(PATIENCE, || self.all_summed_up());
        println!("start to the last status: {:.1} s", begun.elapsed().as_secs_f64());
        tell_memory("memory (RSS) after that", &controller);

        let (before, written, begun) = (cpu_time(controller.pid()), self.writes(), Instant::now());
        let mut reports = 0_usize;
        while begun.elapsed() < BUSY {
            self.report(reports % NODES, &uids, (reports / NODES + 1) as i64);
            reports += 1;
            let due = MINUTE.mul_f64(reports as f64 / NODES as f64);
            thread::sleep(due.saturating_sub(begun.elapsed()));
        }
        let took = begun.elapsed().as_secs_f64();
        println!(
            "while {:.1} MirrorNodes a second are written: CPU {:.2} % of a core, {:.2} statuses a second",
            reports as f64 / took,
            (cpu_time(controller.pid()) - before).as_secs_f64() / took * 100.0,
            (self.writes() - written) / took,
        );
        tell_memory("memory (RSS) after that", &controller);

        let (before, written) = (cpu_time(controller.pid()), self.writes());
        // Waits for the status with the last counters.
        thread::sleep(MINUTE);
        let late = self.writes() - written;
        let (idle, begun) = (cpu_time(controller.pid()), Instant::now());
        thread::sleep(IDLE);
        println!(
            "without news: CPU {:.3} % of a core ({late:.0} statuses and {:.2} s of CPU in the minute before)",
            (cpu_time(controller.pid()) - idle).as_secs_f64() / begun.elapsed().as_secs_f64() * 100.0,
            (idle - before).as_secs_f64(),
        );
        controller.stop();
    }

    /// Creates the Mirrors and returns their UIDs.
    fn make_mirrors(&self) -> Vec<String> {
        let mirror = |number| {
            json!({
                "apiVersion": "podmirror.io/v1alpha1", "kind": "Mirror", "metadata": { "name": mirror(number) },
                "spec": { "podSelector": {}, "filter": "tcp port 443" },
            })
        };
        let mirrors: Vec<_> = (0..MIRRORS).map(mirror).collect();
        self.api.kubectl_with("create -f -", &list(&mirrors).to_string());
        (0..MIRRORS)
            .map(|number| {
                let path = format!(
                    "{RESOURCES}/namespaces/{}/mirrors/{}",
                    self.api.namespace(),
                    self::mirror(number)
                );
                let object: Value =
                    serde_json::from_str(&self.ask("GET", &path, "application/json", "")).unwrap();
                object["metadata"]["uid"].as_str().unwrap().to_owned()
            })
            .collect()
    }

    /// Writes the MirrorNode of a node for this minute, as its agent does.
    fn report(&self, node: usize, uids: &[String], minute: i64) {
        let summary = |number: usize| {
            let mirror = (node + number * MIRRORS / MIRRORS_OF_A_NODE) % MIRRORS;
            json!({
                "kind": "Mirror", "namespace": self.api.namespace(), "name": self::mirror(mirror), "uid": uids[mirror],
                "observedGeneration": 1, "pods": { "selected": PODS_OF_A_MIRROR, "covered": PODS_OF_A_MIRROR },
                "packets": { "copied": 1_000_000 * minute, "lost": minute }, "nics": PODS_OF_A_MIRROR, "ended": 0,
            })
        };
        let name = format!("bench-{node}");
        let mut object = json!({
            "apiVersion": "podmirror.io/v1alpha1", "kind": "MirrorNode",
            "metadata": { "name": name, "labels": { LABEL: "" } },
        });
        let path = format!("{RESOURCES}/mirrornodes/{name}");
        let apply = "application/apply-patch+yaml";
        if minute == 0 {
            self.ask("PATCH", &format!("{path}?fieldManager=bench"), apply, &object.to_string());
        }
        object["status"] = json!({
            "lastReportTime": Timestamp::now().to_string(), "mirrorCount": MIRRORS_OF_A_NODE, "refusedCount": 0,
            "pods": { "selected": PODS_OF_A_MIRROR, "covered": PODS_OF_A_MIRROR },
            "mirrors": (0..MIRRORS_OF_A_NODE).map(summary).collect::<Vec<_>>(),
        });
        self.ask("PATCH", &format!("{path}/status?fieldManager=bench"), apply, &object.to_string());
    }

    fn ask(&self, method: &str, path: &str, kind: &str, body: &str) -> String {
        self.proxy.ask(method, path, kind, body)
    }

    fn all_summed_up(&self) -> Result<(), String> {
        let path = format!("{RESOURCES}/namespaces/{}/mirrors", self.api.namespace());
        let list: Value = serde_json::from_str(&self.ask("GET", &path, "application/json", "")).unwrap();
        let mirrors = list["items"].as_array().unwrap();
        let nodes = NODES * MIRRORS_OF_A_NODE / MIRRORS;
        let done = mirrors.iter().filter(|mirror| mirror["status"]["reportingNodes"] == nodes).count();
        check(done == MIRRORS, || format!("{done} of {MIRRORS} are summed up"))
    }

    /// Number of status writes of the controller.
    fn writes(&self) -> f64 {
        let metrics = self.lab.metrics();
        let of_kinds =
            metrics.iter().filter(|(series, _)| series.starts_with("podmirror_controller_writes_total"));
        of_kinds.map(|(_, writes)| writes).sum()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // The Mirrors are deleted with their namespace. One request deletes all MirrorNodes; kubectl would send one for
        // each.
        let words = format!("delete --raw {RESOURCES}/mirrornodes?labelSelector={LABEL}");
        if let Err(error) = self.api.try_kubectl(&words) {
            println!("MirrorNodes of the bench stay: {error}");
        }
    }
}

fn tell_memory(what: &str, controller: &Agent) {
    let (now, most) = memory(controller.pid());
    println!("{what}: {now:.1} MiB, at most {most:.1} MiB");
}

fn mirror(number: usize) -> String {
    format!("m{number}")
}
