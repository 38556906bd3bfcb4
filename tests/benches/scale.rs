//! The agent on a node with many pods: time until pods are tapped, time until a change takes effect, memory, CPU time.
//! Run by `cargo xtask bench scale`. Prints; a person judges.
//!
//! A pod is an object of a real API server, a network namespace with a veth, and a process in a cgroup: everything that
//! the agent sees of a pod. `Node` contains everything that depends on how pods are made.

#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has failed")]
#![expect(clippy::print_stdout, reason = "its output")]

use std::{
    collections::BTreeMap,
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use mirror_tests::{
    Agent, Api, AttachMode, Container, FrameSocket, Lab, Netns, Proxy, check, cpu_time, eventually, memory,
};
use serde_json::json;

const PODS: usize = 250;
/// Number of starts on a node without a tap.
const FRESH_STARTS: usize = 3;
/// Number of starts on a node where an earlier agent has left its taps.
const RESTARTS: usize = 11;
/// The pod whose annotation is changed repeatedly. All others have this filter.
const CHANGED: usize = PODS / 2;
const FILTER: &str = "tcp port 443 and not net 10.0.0.0/8";
const CHANGES: usize = 150;
/// Long enough for one tick of the loop (60 s).
const IDLE: Duration = Duration::from_secs(65);
/// Interval between new pods, number of pods alive at a time, and number of pods in all.
const CHURN: (Duration, usize, usize) = (Duration::from_millis(100), 20, 100);
/// Timeout for every wait.
const PATIENCE: Duration = Duration::from_secs(120);

/// Pod counts at which the agent's use is compared; the last one exceeds the count of the other measurements.
const GROWTH: [usize; 5] = [1, 10, 100, PODS, 500];

fn main() {
    let mut node = Node::new();
    println!(
        "| pods | start to the last tap, s | memory (RSS), MiB | memory of the maps, MiB | series of metrics | KiB |"
    );
    println!("| --- | --- | --- | --- | --- | --- |");
    for pods in GROWTH {
        (node.pods.len()..pods).for_each(|number| node.add(number));
        growth(&node);
    }
    for number in PODS..node.pods.len() {
        node.remove(number);
    }
    println!("\n{PODS} pods on one node, {}", node.mode.name());
    println!("{:<58} {:>8} {:>8} {:>8} {:>4}", "", "median", "99 %", "worst", "n");
    starts(&node);

    let agent = node.start();
    node.wait_until_ready();
    changes(&node, &agent);
    tell_memory("memory (RSS) after that", &agent);
    let cpu = node.cpu_while(&agent, |_| thread::sleep(IDLE));
    println!("CPU while nothing happens for {} s: {:.3} % of a core", IDLE.as_secs(), cpu * 100.0);
    let cpu = node.cpu_while(&agent, churn);
    let (every, _, count) = CHURN;
    println!(
        "CPU while a pod comes and one goes each {} ms, {count} times: {:.1} % of a core",
        every.as_millis(),
        cpu * 100.0
    );
    tell_memory("memory (RSS) after that", &agent);
    agent.stop();
    node.lab.cleanup();
}

/// Prints the agent's use by the number of pods.
fn growth(node: &Node) {
    node.lab.cleanup();
    let start = Instant::now();
    let agent = node.start();
    node.wait_until_ready();
    let tapped = start.elapsed().as_secs_f64();
    let metrics = node.lab.request("GET", "/metrics").unwrap().body;
    let series = metrics.lines().filter(|line| !line.starts_with('#')).count();
    let (rss, _) = memory(agent.pid());
    println!(
        "| {} | {tapped:.2} | {rss:.1} | {:.1} | {series} | {:.0} |",
        node.pods.len(),
        map_memory(agent.pid()),
        metrics.len() as f64 / 1024.0
    );
    agent.stop();
}

/// Memory in MiB of the maps that a process has open, as the kernel accounts it (`memlock` in the file of each
/// descriptor, proc_pid_fdinfo(5)).
fn map_memory(pid: u32) -> f64 {
    let files = fs::read_dir(format!("/proc/{pid}/fdinfo")).unwrap();
    let mut maps = BTreeMap::new();
    for text in files.filter_map(|file| fs::read_to_string(file.ok()?.path()).ok()) {
        let value = |key: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(key))?;
            line.trim().parse::<u64>().ok()
        };
        // A program also has `memlock`.
        if let (Some(id), Some(bytes)) = (value("map_id:"), value("memlock:")) {
            maps.insert(id, bytes);
        }
    }
    maps.values().sum::<u64>() as f64 / f64::from(1 << 20)
}

/// Time until everything is tapped, on a fresh node and after an earlier agent.
fn starts(node: &Node) {
    let (mut first, mut all, mut again) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..FRESH_STARTS {
        node.lab.cleanup();
        let start = Instant::now();
        let agent = node.start();
        eventually(PATIENCE, || check(!agent.log_with(&["\"mirroring\""]).is_empty(), String::new));
        first.push(ms(start.elapsed()));
        node.wait_until_ready();
        all.push(ms(start.elapsed()));
        // The agent can be ready before the bench has read its log.
        eventually(PATIENCE, || {
            let tapped = agent.log_with(&["\"mirroring\""]).len();
            check(tapped == PODS, || format!("{tapped} of {PODS}"))
        });
        agent.stop();
    }
    for _ in 0..RESTARTS {
        let start = Instant::now();
        let agent = node.start();
        node.wait_until_ready();
        again.push(ms(start.elapsed()));
        agent.stop();
    }
    tell("start to the first tap, ms", first);
    tell("start to the last tap, ms", all);
    tell("restart to its programs at all hooks, ms", again);
}

/// Time until a changed annotation takes effect: from the request to the pod's packets.
fn changes(node: &Node, agent: &Agent) {
    let mirror = node.lab.node().listener("mirror0");
    let _senders = [
        Sender::start(node.pods[&CHANGED].netns.sender("eth0"), Way::FromPod),
        Sender::start(node.lab.node().sender(&device(CHANGED)), Way::ToPod),
    ];
    let (mut first, mut both) = (Vec::new(), Vec::new());
    for change in 0..CHANGES {
        node.annotate(CHANGED, "false");
        let gone = "no longer mirroring";
        eventually(PATIENCE, || check(agent.log_with(&[gone]).len() > change, || format!("no {gone:?}")));
        // The varying pause avoids locking onto a period of the agent or the kernel, and keeps earlier copies out of
        // the next change.
        thread::sleep(Duration::from_millis(60 + (change as u64 * 7) % 40));
        while mirror.receive(&mut [0; 64], Duration::from_micros(1)).is_ok() {}

        let start = Instant::now();
        node.annotate(CHANGED, "true");
        let mut seen = BTreeMap::new();
        while seen.len() < 2 {
            let mut frame = [0; 64];
            mirror.receive(&mut frame, PATIENCE).unwrap();
            if let Some(way) = Way::of(&frame) {
                seen.entry(way).or_insert_with(|| ms(start.elapsed()));
            }
        }
        first.push(seen.values().copied().fold(f64::INFINITY, f64::min));
        both.push(seen.values().copied().fold(0.0, f64::max));
    }
    tell("annotation to the first copy, ms", first);
    tell("annotation to the first copies of both directions, ms", both);
}

/// Measures the agent while pods are created and deleted.
fn churn(node: &mut Node) {
    let (every, stay, count) = CHURN;
    let start = Instant::now();
    for turn in 0..count {
        node.add(PODS + turn);
        if let Some(old) = turn.checked_sub(stay) {
            node.remove(PODS + old);
        }
        thread::sleep((every * (turn as u32 + 1)).saturating_sub(start.elapsed()));
    }
    println!("{count} pods have come in {:.1} s", start.elapsed().as_secs_f64());
}

/// A node of a real API server, and its pods.
struct Node {
    pods: BTreeMap<usize, Pod>,
    proxy: Proxy,
    api: Api,
    mode: AttachMode,
    lab: Lab,
}

/// Everything that the agent sees of a pod. The process is dropped first.
struct Pod {
    _process: Container,
    netns: Netns,
}

impl Node {
    fn new() -> Self {
        let lab = Lab::new("bench-scale");
        // Only the bench sends packets.
        lab.node().sysctl("ipv6/conf/default/disable_ipv6", "1");
        let mode = if AttachMode::Tcx.is_applicable() { AttachMode::Tcx } else { AttachMode::Clsact };
        let api = Api::new(&lab, "bench-scale");
        Self { pods: BTreeMap::new(), proxy: Proxy::start(&api), api, mode, lab }
    }

    /// Creates a pod that is to be mirrored.
    fn add(&mut self, number: usize) {
        let netns = Netns::new(&format!("{}-{number}", self.lab.node().name()));
        netns.sysctl("ipv6/conf/default/disable_ipv6", "1");
        let host = device(number);
        self.lab.node().ip(&format!("link add {host} up type veth peer name eth0 netns {}", netns.name()));
        netns.ip("link set eth0 up");
        let filter = (number != CHANGED).then_some(("podmirror.io/filter", FILTER));
        let annotations: Vec<_> = [("podmirror.io/mirror", "true")].into_iter().chain(filter).collect();
        let object = self.api.object(&name(number), &annotations);
        let made = self.ask("POST", "", "application/json", &object.to_string());
        let made: serde_json::Value = serde_json::from_str(&made).unwrap();
        let uid = made["metadata"]["uid"].as_str().unwrap();
        let process = self.lab.container(&netns, &format!("kubepods/burstable/pod{uid}/1"));
        self.pods.insert(number, Pod { _process: process, netns });
    }

    fn remove(&mut self, number: usize) {
        self.ask("DELETE", &format!("/{}", name(number)), "application/json", "");
        self.pods.remove(&number);
    }

    fn annotate(&self, number: usize, value: &str) {
        let patch = json!({ "metadata": { "annotations": { "podmirror.io/mirror": value } } });
        let path = format!("/{}", name(number));
        self.ask("PATCH", &path, "application/merge-patch+json", &patch.to_string());
    }

    fn ask(&self, method: &str, path: &str, kind: &str, body: &str) -> String {
        let path = format!("/api/v1/namespaces/{}/pods{path}", self.api.namespace());
        self.proxy.ask(method, &path, kind, body)
    }

    fn start(&self) -> Agent {
        self.api.agent(&self.lab, &["--attach", self.mode.name()])
    }

    /// Waits until the agent has reconciled everything.
    fn wait_until_ready(&self) {
        eventually(PATIENCE, || {
            let answer = self.lab.request("GET", "/readyz")?;
            check(answer.status == 200, || answer.body)
        });
    }

    /// CPU time of the agent while `work` runs, as a share of one core.
    fn cpu_while(&mut self, agent: &Agent, work: impl FnOnce(&mut Self)) -> f64 {
        let used = || cpu_time(agent.pid());
        let (before, start) = (used(), Instant::now());
        work(self);
        (used() - before).as_secs_f64() / start.elapsed().as_secs_f64()
    }
}

/// `metadata.name`.
fn name(pod: usize) -> String {
    format!("pod{pod}")
}

/// Name of the node side of a pod's veth.
fn device(pod: usize) -> String {
    format!("veth{pod}")
}

/// Direction of a frame of the bench.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    FromPod = 1,
    ToPod = 2,
}

impl Way {
    /// An EtherType for local experiments.
    const ETHERTYPE: [u8; 2] = [0x88, 0xb5];

    fn frame(self) -> [u8; 60] {
        let mut frame = [0; 60];
        frame[..6].fill(0xff);
        frame[6] = 2;
        frame[12..14].copy_from_slice(&Self::ETHERTYPE);
        frame[14] = self as u8;
        frame
    }

    fn of(frame: &[u8]) -> Option<Self> {
        [Self::FromPod, Self::ToPod].into_iter().find(|way| frame.starts_with(&way.frame()[..15]))
    }
}

/// Sends a frame every half millisecond until it is dropped.
struct Sender {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Sender {
    fn start(socket: FrameSocket, way: Way) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let send = move || {
            while !stopped.load(Ordering::Relaxed) {
                socket.send(&way.frame()).unwrap();
                thread::sleep(Duration::from_micros(500));
            }
        };
        Self { stop, thread: Some(thread::spawn(send)) }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().into_iter().for_each(|thread| thread.join().unwrap());
    }
}

fn tell_memory(what: &str, agent: &Agent) {
    let (now, most) = memory(agent.pid());
    println!("{what}: {now:.1} MiB, at most {most:.1} MiB");
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn tell(what: &str, mut values: Vec<f64>) {
    values.sort_by(f64::total_cmp);
    let at = |share: f64| values[((values.len() - 1) as f64 * share).round() as usize];
    println!("{what:<58} {:>8.1} {:>8.1} {:>8.1} {:>4}", at(0.5), at(0.99), at(1.0), values.len());
}
