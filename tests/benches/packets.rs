//! The packets API by the rate of a pod and the number of its readers: packets read, packets lost and where, CPU time
//! and memory of kube-apiserver, of the server and of the agent; and the time to the first packet. Run by `cargo xtask
//! bench packets`. Prints; a person judges.
//!
//! ```text
//! pod ─► tap ─► ring of the reader ─► agent ─► relay ─► server ─► kube-apiserver ─► kubectl get --raw
//! ```
//!
//! Each reader selects each frame. For a reader, a frame is read, or it is not counted (it has not reached the tap), is
//! `limited` (the rate of the reader is used up), is `lost` (the ring is full: a program after it is too slow), or is
//! missing after the copy. The readers read on after the last frame. The sender stays on one CPU. It, the relay into the
//! node's namespace and kubectl are not measured, but take CPU time from the others. The cases take turns in every round.

#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has failed")]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "its output")]

#[expect(dead_code, reason = "what other benches compare")]
#[path = "measure/figures.rs"]
mod figures;
#[expect(dead_code, reason = "what other benches time")]
#[path = "measure/path.rs"]
mod path;

use std::{
    fs,
    io::{self, BufReader, Read},
    net::{SocketAddr, TcpListener},
    path::Path,
    process::{Child, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use mirror_test_cluster::{
    Built, Components as _,
    built::{BACKEND_IP, KUBECONFIG},
};
use mirror_tests::{
    Agent, Api, FrameSocket, Lab, OneCpu, PATIENCE, Relay, SOON, TapStatus, check, cpu_time, eventually,
    list, memory,
};
use serde_json::json;

use self::{figures::quartiles, path::tcp_frame};

/// Packets per second that the pod sends, and the numbers of readers: the last is the maximum for a namespace on a node.
const RATES: [u32; 3] = [1_000, 10_000, 100_000];
const READERS: [usize; 4] = [0, 1, 2, 5];
/// Bytes of a frame, without FCS.
const FRAME: usize = 200;
const SENDING: Duration = Duration::from_secs(4);
/// Timeout for the readers to read the copies that are in the rings.
const REST: Duration = Duration::from_secs(5);
/// The default of the server.
const MAX_RATE: &str = "100Mbit";
const ROUNDS: usize = 3;
/// No round begins later, so that the bench ends within 8 minutes on a slow machine too.
const LAST_ROUND: Duration = Duration::from_secs(270);
/// Number of readers whose first packet is timed, one after the other, and the timeout for it.
const STARTS: usize = 5;
const START: Duration = Duration::from_secs(5);

const GROUP: &str = "packets.podmirror.io";
/// The Service and the Secret of the server, and the ServiceAccount of the agent.
const SERVICE: &str = "packets";
const AGENT: &str = "agent";
const POD: &str = "web";

/// Shares are of the packets that were sent, once for each reader. The last columns have the CPU time, in percent of a
/// core, and the memory (RSS) of each program.
const HEADER: &str = "| packets/s | readers | sent a second | read a second by each | by the slowest | lost, % \
    | not counted, % | `limited`, % | `lost`, % | after the copy, % | kube-apiserver, % | MiB | server, % | MiB \
    | agent, % | MiB |";

fn main() {
    let begun = Instant::now();
    let lab = Lab::new("bench-packets");
    lab.bridge("br0");
    let pod = lab.pod(POD, "br0");
    let api = Api::new(&lab, "bench-packets");
    let _container = api.run(&lab, &pod, &[]);
    let host = Lab::at(Path::new("/proc/self/ns/net"), Path::new("/sys/fs/bpf"));
    // The ports are free afterwards, and unlikely to be taken before they are used.
    let listeners = [(); 2].map(|()| TcpListener::bind((BACKEND_IP, 0)).unwrap());
    let addresses = listeners.map(|listener| listener.local_addr().unwrap());
    let registration = Registration::new(&api, addresses);
    let server = serve(&api, &host, addresses);
    let (_relay, agent) = connect(&api, &lab, addresses[1]);
    let wait = format!("wait apiservice v1alpha1.{GROUP} --for=condition=Available");
    api.kubectl(&format!("{wait} --timeout={}s", PATIENCE.as_secs()));
    server.wait_for_log(&["has connected"]);

    let kube_apiserver = Built::at(Path::new(KUBECONFIG)).unwrap().pid("kube-apiserver").unwrap();
    let pids = [kube_apiserver.cast_unsigned(), server.pid(), agent.pid()];
    let bench = Bench { lab: &lab, api: &api, socket: pod.netns().sender("eth0"), pids };
    let [low, median, high] = quartiles((0..STARTS).map(|_| bench.start()));
    let cases: Vec<_> = RATES.iter().flat_map(|rate| READERS.map(|readers| (*rate, readers))).collect();
    let mut samples = vec![Vec::new(); cases.len()];
    let mut rounds = 0;
    while rounds < ROUNDS && begun.elapsed() < LAST_ROUND {
        for ((rate, readers), samples) in cases.iter().zip(&mut samples) {
            samples.push(bench.measure(*rate, *readers));
        }
        rounds += 1;
    }

    let cpus = OneCpu::usable().len();
    println!("{FRAME} bytes a frame, {MAX_RATE} a reader at most, {cpus} CPUs, medians of {rounds} rounds\n");
    println!("{HEADER}\n|{}", " --- |".repeat(HEADER.matches(" |").count()));
    for ((rate, readers), samples) in cases.iter().zip(&samples) {
        print!("| {rate} | {readers} |");
        for column in 0..samples[0].len() {
            match quartiles(samples.iter().map(|sample| sample[column]))[1] {
                // Without a reader there is no share.
                median if median.is_nan() => print!(" – |"),
                median if median >= 100.0 => print!(" {median:.0} |"),
                median => print!(" {median:.2} |"),
            }
        }
        println!();
    }
    println!("\nfrom the command to the first packet, n = {STARTS}: {median:.0} ms ({low:.0} … {high:.0})");
    // Before the server, so that kube-apiserver does not look for a server that has ended.
    drop(registration);
    agent.stop();
    server.stop();
}

struct Bench<'a> {
    lab: &'a Lab,
    api: &'a Api,
    socket: FrameSocket,
    /// kube-apiserver, the server and the agent.
    pids: [u32; 3],
}

impl Bench<'_> {
    /// The figures of one case, in the order of [`HEADER`].
    fn measure(&self, rate: u32, count: usize) -> Vec<f64> {
        let readers: Vec<_> = (0..count).map(|number| self.read(number)).collect();
        self.wait_for_sessions(count);
        for reader in &readers {
            eventually(SOON, || check(reader.counts()[0] > 0, || "no answer yet".into()));
        }
        let (begun, before) = (Instant::now(), self.pids.map(cpu_time));
        let sent = send(&self.socket, rate, SENDING) as f64;
        let (after, took) = (self.pids.map(cpu_time), begun.elapsed().as_secs_f64());
        let memory = self.pids.map(|pid| memory(pid).0);

        let status = self.lab.status();
        let total = |verdict| {
            let sessions = status.taps.iter().flat_map(|tap| &tap.sessions);
            sessions.map(|session| session.total(verdict)).sum::<u64>() as f64
        };
        let [copied, limited, lost] = ["copied", "limited", "lost"].map(total);
        let read = || readers.iter().map(|reader| reader.counts()[1] as f64);
        let ended = Instant::now();
        while read().sum::<f64>() < copied && ended.elapsed() < REST {
            thread::sleep(Duration::from_millis(20));
        }
        let (all, slowest) = (read().sum::<f64>(), read().reduce(f64::min).unwrap_or(f64::NAN));
        drop(readers);
        self.wait_for_sessions(0);

        let offered = sent * count as f64;
        let share = |packets: f64| 100.0 * packets / offered;
        let mut figures = vec![sent / took, all / count as f64 / took, slowest / took, share(offered - all)];
        figures.extend([offered - copied - limited - lost, limited, lost, copied - all].map(share));
        for ((before, after), memory) in before.into_iter().zip(after).zip(memory) {
            figures.extend([100.0 * (after - before).as_secs_f64() / took, memory]);
        }
        figures
    }

    /// The time in ms from the start of a reader to its first packet, while the pod sends.
    fn start(&self) -> f64 {
        let socket = &self.socket;
        let took = thread::scope(|scope| {
            scope.spawn(|| send(socket, RATES[0], START));
            let begun = Instant::now();
            let reader = self.read(0);
            while reader.counts()[1] == 0 {
                assert!(begun.elapsed() < START, "no packet");
                thread::sleep(Duration::from_millis(1));
            }
            begun.elapsed()
        });
        self.wait_for_sessions(0);
        took.as_secs_f64() * 1e3
    }

    /// Starts a reader. Each is another user, because the requests of a user are limited too.
    fn read(&self, number: usize) -> Reader {
        let path = format!("/apis/{GROUP}/v1alpha1/namespaces/{}/packets", self.api.namespace());
        let uri = format!("{path}?fieldSelector=metadata.name%3D{POD}&filter=tcp&watch=true");
        let user = format!("--as=reader-{number} --as-group=system:masters");
        let mut command = self.api.command(&format!("get --raw {uri} {user}"));
        let mut kubectl = command.stdout(Stdio::piped()).spawn().unwrap();
        let counts = Arc::<[AtomicU64; 2]>::default();
        let (stdout, of_thread) = (kubectl.stdout.take().unwrap(), Arc::clone(&counts));
        thread::spawn(move || count(stdout, &of_thread));
        Reader { kubectl, counts }
    }

    /// Waits until exactly this number of readers has its packets copied.
    fn wait_for_sessions(&self, count: usize) {
        self.lab.wait_status(|status| {
            let sessions = status.taps.iter().map(|tap| tap.sessions.len()).sum::<usize>();
            let are_attached = status.taps.iter().all(TapStatus::is_attached);
            check(sessions == count && are_attached, || format!("{sessions}, and not {count} sessions"))
        });
    }
}

/// Sends frames that the node drops. Returns their number.
fn send(socket: &FrameSocket, rate: u32, lasts: Duration) -> usize {
    let _cpu = OneCpu::of_this_thread();
    let frame = tcp_frame(FRAME);
    let begun = Instant::now();
    let (mut sent, mut due) = (0, begun);
    while begun.elapsed() < lasts {
        // If the device's queue is full, the frame is simply not sent.
        sent += (0..rate / 1000).filter(|_| socket.send(&frame).is_ok()).count();
        due += Duration::from_millis(1);
        thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    sent
}

/// Counts the blocks and the packets of a pcapng until its end.
fn count(pcapng: impl Read, [blocks, packets]: &[AtomicU64; 2]) -> io::Result<()> {
    const ENHANCED_PACKET: u32 = 6;
    let mut pcapng = BufReader::with_capacity(1 << 18, pcapng);
    let (mut word, mut rest) = ([0; 4], Vec::new());
    loop {
        pcapng.read_exact(&mut word)?;
        let kind = u32::from_le_bytes(word);
        pcapng.read_exact(&mut word)?;
        rest.resize(u32::from_le_bytes(word) as usize - 8, 0);
        pcapng.read_exact(&mut rest)?;
        blocks.fetch_add(1, Ordering::Relaxed);
        packets.fetch_add((kind == ENHANCED_PACKET).into(), Ordering::Relaxed);
    }
}

/// A kubectl that reads packets. It is killed on drop.
struct Reader {
    kubectl: Child,
    counts: Arc<[AtomicU64; 2]>,
}

impl Reader {
    /// Number of blocks, and of packets, so far.
    fn counts(&self) -> [u64; 2] {
        self.counts.each_ref().map(|count| count.load(Ordering::Relaxed))
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // Both fail only if it has ended.
        let _ = self.kubectl.kill();
        let _ = self.kubectl.wait();
    }
}

/// The APIService, deleted on drop. The rest is deleted with its namespace.
struct Registration<'a>(&'a Api);

impl<'a> Registration<'a> {
    /// Registers a server by its addresses for kube-apiserver and for agents.
    fn new(api: &'a Api, [https, agents]: [SocketAddr; 2]) -> Self {
        let slice = json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": { "name": SERVICE, "labels": { "kubernetes.io/service-name": SERVICE } },
            "ports": [{ "name": "https", "port": https.port() }, { "name": "agents", "port": agents.port() }],
            "endpoints": [{ "addresses": [BACKEND_IP] }],
        });
        let service = json!({
            "apiVersion": "v1", "kind": "Service", "metadata": { "name": SERVICE },
            "spec": { "ports": [{ "name": "https", "port": 443 }, { "name": "agents", "port": 10709 }] },
        });
        let of_group = json!({
            "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
            "metadata": { "name": format!("v1alpha1.{GROUP}") },
            "spec": {
                "group": GROUP, "version": "v1alpha1", "groupPriorityMinimum": 100, "versionPriority": 100,
                "service": { "name": SERVICE, "namespace": api.namespace() },
            },
        });
        let registration = Self(api);
        api.apply(&list(&[slice, service, of_group]));
        api.kubectl(&format!("create secret generic {SERVICE}"));
        api.kubectl(&format!("create serviceaccount {AGENT}"));
        registration
    }
}

impl Drop for Registration<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.0.try_kubectl(&format!("delete apiservice v1alpha1.{GROUP}")) {
            eprintln!("the APIService stays: {error}");
        }
    }
}

/// Starts the server.
fn serve(api: &Api, host: &Lab, [https, agents]: [SocketAddr; 2]) -> Agent {
    let names = format!("--namespace {} --service {SERVICE} --secret {SERVICE}", api.namespace());
    let listen = format!("--apiserver-listen {https} --agents-listen {agents}");
    let words = format!("apiserver {names} --agents-service-account {AGENT} {listen} --max-rate {MAX_RATE}");
    let words = [&words.split(' ').collect::<Vec<_>>()[..], &["--listen", ""]].concat();
    Agent::with_environment(host, &words, &[("KUBECONFIG", api.kubeconfig().to_str().unwrap())])
}

/// Starts the agent of the node, with a token for a pod of the node, and with a way to the server.
fn connect(api: &Api, lab: &Lab, server: SocketAddr) -> (Relay, Agent) {
    lab.node().ip(&format!("address add {BACKEND_IP}/32 dev lo"));
    let relay = Relay::start(lab.node(), server);
    let mut pod = api.object(AGENT, &[]);
    pod["spec"]["serviceAccountName"] = AGENT.into();
    api.apply(&pod);
    let bound = format!("--bound-object-kind=Pod --bound-object-name={AGENT} --audience={GROUP}");
    let token = lab.files().join("apiserver-token");
    fs::write(&token, api.kubectl(&format!("create token {AGENT} {bound}")).trim()).unwrap();
    let service = format!("{}/{SERVICE}", api.namespace());
    let words = ["--apiserver", &service, "--apiserver-token", token.to_str().unwrap()];
    (relay, api.agent(lab, &words))
}
