//! How many of a few pings a capture keeps in a gigabit of junk traffic. Run by `cargo xtask bench capture`.
//!
//! The published study of a switch's packet capture (Cisco 6500) does the same: 1500-byte frames fill a port in both
//! directions, 60 pings pass, and the number of captured pings depends on whether the filter is applied before the
//! limit. Here the pings are sent faster, so that a case takes 3 s.
//!
//! The junk has a CPU of its own. The node's time per junk frame is spent inside its `send`, which runs the path
//! through the node, including the tap. The pings and the reader run on another CPU; the reader's CPU time is measured
//! too.
//!
//! No time is a pass or fail: the bench prints, and a person judges.

#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has failed")]
#![expect(clippy::print_stdout, reason = "its output")]

#[expect(dead_code, reason = "what other benches compare")]
#[path = "measure/figures.rs"]
mod figures;
#[expect(dead_code, reason = "what other benches time")]
#[path = "measure/path.rs"]
mod path;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use mirror_tests::{
    Agent, AttachMode, FrameSocket, Lab, Mac, PodNs, PodSpec, PodsFile, Tail, check, cpu_time,
};

use self::{
    figures::quartiles,
    path::{pin_to_cpu, tcp_frame},
};

const ROUNDS: usize = 5;
const PINGS: usize = 60;
const EVERY: Duration = Duration::from_millis(50);
/// One gigabit per second in each direction.
const JUNK_BYTES: usize = 1500;
const JUNK_PER_MS: u32 = 83;
/// Bytes of the capture's memory buffer, as in the study.
const BUFFER: &str = "64MB";

/// A filter, a rate, and how the buffer is used; `{mac}` stands for the address of the pod that pings.
struct Case {
    name: &'static str,
    filter: &'static str,
    rate: &'static str,
    keep: &'static str,
}

const fn case(name: &'static str, filter: &'static str, rate: &'static str, keep: &'static str) -> Case {
    Case { name, filter, rate, keep }
}

const CIRCULAR: &str = "--ring";
const LINEAR: &str = "--first";
const CASES: [Case; 9] = [
    case("everything, circular", "", "", CIRCULAR),
    case("everything, linear", "", "", LINEAR),
    case("protocol (icmp), circular", "icmp", "", CIRCULAR),
    case("protocol (icmp), linear", "icmp", "", LINEAR),
    case("source MAC, circular", "ether src {mac}", "", CIRCULAR),
    case("length (less 100), circular", "less 100", "", CIRCULAR),
    case("everything, 100 a second", "", "100pps", CIRCULAR),
    case("protocol, 100 a second", "icmp", "100pps", CIRCULAR),
    case("source MAC, 100 a second", "ether src {mac}", "100pps", CIRCULAR),
];

/// The row without a capture.
const NO_CAPTURE: &str = "no capture";

/// Result of a case in one round.
#[derive(Default)]
struct Sample {
    pings: usize,
    packets: usize,
    bytes: u64,
    lost: u64,
    /// ns per junk frame.
    frame_ns: f64,
    /// CPU use of the reader in percent. `None` if the reader ends before the pings do.
    reader: Option<f64>,
}

fn main() {
    let lab = Lab::new("bench-capture");
    let [web, db] = ["web", "db"].map(|name| lab.routed_pod(name));
    let pods = PodsFile::new(&lab, &[PodSpec::of(&web)]);
    let agent = Agent::run(&lab, AttachMode::Tcx, &pods, &["--define-target", "live=stream"]);
    let release = nix::sys::utsname::uname().unwrap();
    println!(
        "{PINGS} pings, {} ms apart, in frames of {JUNK_BYTES} bytes, {} a ms in each direction; {BUFFER} in memory, \
         Linux {}, {ROUNDS} rounds\n",
        EVERY.as_millis(),
        JUNK_PER_MS,
        release.release().to_string_lossy(),
    );
    let mut samples: Vec<Vec<Sample>> = CASES.iter().map(|_| Vec::new()).collect();
    let mut without = Vec::new();
    let junk = Junk::start(&lab, &web);
    pin_to_cpu(1);
    for _ in 0..ROUNDS {
        without.push(Sample { frame_ns: junk.frame_ns(|| ping(&web, &db)), ..Sample::default() });
        for (case, samples) in CASES.iter().zip(&mut samples) {
            samples.push(capture(&lab, &pods, [&web, &db], &junk, case));
        }
    }
    let (sent, late) = junk.stop();
    println!("junk: {sent} frames; {late} ms in which it was late\n");
    println!(
        "| case | pings of {PINGS} | packets | MB of file | lost | ns a frame of junk | reader, % of a CPU |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    let names = [NO_CAPTURE].into_iter().chain(CASES.iter().map(|case| case.name));
    for (name, samples) in names.zip([without].iter().chain(&samples)) {
        let of = |value: &dyn Fn(&Sample) -> f64| {
            let [low, median, high] = quartiles(samples.iter().map(value));
            (low, median, high)
        };
        let (least, pings, most) = of(&|sample| sample.pings as f64);
        let (_, packets, _) = of(&|sample| sample.packets as f64);
        let (_, bytes, _) = of(&|sample| sample.bytes as f64 / 1e6);
        let (_, lost, _) = of(&|sample| sample.lost as f64);
        let (ns_low, ns, ns_high) = of(&|sample| sample.frame_ns);
        let readers: Option<Vec<f64>> = samples.iter().map(|sample| sample.reader).collect();
        let reader =
            readers.map_or(String::new(), |readers| format!("{:.1}", quartiles(readers.into_iter())[1]));
        println!(
            "| {name} | {pings} ({least} … {most}) | {packets} | {bytes:.1} | {lost} \
             | {ns:.0} ({ns_low:.0} … {ns_high:.0}) | {reader} |"
        );
    }
    agent.stop();
    lab.cleanup();
}

fn ping(web: &PodNs, db: &PodNs) {
    web.ping_every(EVERY, db.v4(), PINGS, 56);
}

/// Runs one case: which of the pings are captured.
fn capture(lab: &Lab, pods: &PodsFile, [web, db]: [&PodNs; 2], junk: &Junk, case: &Case) -> Sample {
    let mac = mac_text(web.eth0().mac);
    let mut spec = PodSpec::of(web).mirror("true").annotated("podmirror.io/target", "live");
    for (key, value) in [("filter", case.filter.replace("{mac}", &mac)), ("rate", case.rate.to_owned())] {
        if !value.is_empty() {
            spec = spec.annotated(&format!("podmirror.io/{key}"), &value);
        }
    }
    pods.write(&[spec]);
    let mut tail = Tail::spawn(lab, &["capture", "--target", "live", case.keep, BUFFER, "--buffer", "16MiB"]);
    let fills_up = case.keep == LINEAR && case.filter.is_empty();
    // A buffer that stops when it is full can be full as soon as the reader starts.
    if !fills_up {
        tail.wait_until_it_reads(lab);
    }
    let reader_before = (!fills_up).then(|| (Instant::now(), cpu_time(tail.pid())));
    let frame_ns = junk.frame_ns(|| ping(web, db));
    let reader = reader_before.map(|(since, before)| {
        100.0 * (cpu_time(tail.pid()) - before).as_secs_f64() / since.elapsed().as_secs_f64()
    });
    let counts = lab.status();
    let lost = counts.taps.iter().map(|tap| tap.total("lost")).sum();
    let file = if fills_up { tail.wait() } else { tail.stop() };
    // Removes the session, so that the next case begins with a new one.
    pods.write(&[PodSpec::of(web)]);
    lab.wait_status(|status| check(status.taps.is_empty(), || format!("{status:?}")));
    let is_ping = |frame: &[u8]| frame[12..14] == [8, 0] && frame[23] == 1 && frame[34] == 8;
    let frames = file.all_frames();
    let pings = frames.only(is_ping).len();
    Sample { pings, packets: frames.len(), bytes: frames.bytes() as u64, lost, frame_ns, reader }
}

fn mac_text(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Sends frames that no pod accepts, from the pod and to it, on a CPU of its own, until it is stopped.
struct Junk {
    shared: Arc<Shared>,
    thread: JoinHandle<u64>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    /// Number of frames, and the ns spent in their `send`.
    sent: AtomicU64,
    took: AtomicU64,
}

impl Junk {
    fn start(lab: &Lab, pod: &PodNs) -> Self {
        let sockets = [pod.netns().sender("eth0"), lab.node().sender(pod.veth_host())];
        let shared = Arc::<Shared>::default();
        let of_thread = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            pin_to_cpu(0);
            send(&sockets, &of_thread)
        });
        Self { shared, thread }
    }

    /// ns per frame while `during` runs.
    fn frame_ns(&self, during: impl FnOnce()) -> f64 {
        let now = || [&self.shared.took, &self.shared.sent].map(|of| of.load(Ordering::Relaxed));
        let before = now();
        during();
        let [took, sent] = now();
        (took - before[0]) as f64 / (sent - before[1]) as f64
    }

    /// Returns the number of sent frames, and how often a frame was a millisecond late.
    fn stop(self) -> (u64, u64) {
        self.shared.stop.store(true, Ordering::Relaxed);
        let late = self.thread.join().unwrap();
        (self.shared.sent.load(Ordering::Relaxed), late)
    }
}

fn send(sockets: &[FrameSocket; 2], shared: &Shared) -> u64 {
    let mut frame = tcp_frame(JUNK_BYTES);
    // No pod's address.
    frame[6..12].fill(6);
    let (mut next, mut late) = (Instant::now(), 0);
    while !shared.stop.load(Ordering::Relaxed) {
        let begin = Instant::now();
        let sent = (0..JUNK_PER_MS)
            .flat_map(|_| sockets)
            // If the socket's queue is full, the frame is simply not sent.
            .filter(|socket| socket.send(&frame).is_ok())
            .count();
        shared.took.fetch_add(begin.elapsed().as_nanos() as u64, Ordering::Relaxed);
        shared.sent.fetch_add(sent as u64, Ordering::Relaxed);
        next += Duration::from_millis(1);
        match next.checked_duration_since(Instant::now()) {
            Some(pause) => thread::sleep(pause),
            None => late += 1,
        }
    }
    late
}
