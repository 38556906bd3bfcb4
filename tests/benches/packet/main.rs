//! ns per packet: the tap programs against a bare clone and against no program. Run by `cargo xtask bench packet`.
//!
//! Two measurements, because each hides what the other shows. The program alone (`BPF_PROG_TEST_RUN`): the kernel times
//! a loop over one packet, so there is little noise, but caches are warmer than in production. The whole path: frames
//! that a pod sends through its veth until the node drops them. The candidates take turns in every round, and the
//! ratios within a round are compared; medians and quartiles are over the rounds.
//!
//! No time is a pass or fail: the bench prints, and a person judges.

#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has failed")]
#![expect(clippy::print_stdout, reason = "its output")]

#[path = "../measure/figures.rs"]
mod figures;
#[path = "../measure/path.rs"]
mod path;
mod rates;
mod readers;

use std::thread;

use aya::{
    Ebpf, EbpfLoader, TestRun as _, TestRunOptions,
    maps::{Array, ArrayOfMaps, HashMap, MapData, PerCpuArray, RingBuf},
    programs::{SchedClassifier, TcAttachType},
};
use mirror_agent::kernel::dataplane::filter_programs::{FilterMap, FilterProgram};
use mirror_common::{
    abi::{
        DeviceKey, SESSION_FILTERED, SESSION_METERED, Session, SessionCounters, TARGET_CUTS,
        TARGET_QUEUELESS, TARGET_STREAM, TARGET_UP, TARGET_WHEN_READ, Tap, Target,
    },
    limit::{Limits, TICKS_PER_NS},
    verdict::{TapKind, Verdict},
};
use mirror_core::settings::parse_filter;
use mirror_tests::{FrameSocket, Lab, kernel_is_at_least, super_frame};
use zerocopy::transmute;

use self::{
    figures::{ROUNDS, compare, report, rounds},
    path::{
        CUT_TO, FRAME, LONG_FRAME, PORT, SEGMENT, SUPER_FRAME, attach, pin_to_cpu, program, send, sink,
        tcp_frame,
    },
    rates::RATES,
    readers::{Mirred, Tcpdump, read},
};

/// Packets of one timed run of the program: fewer than the veth's backlog holds (`net.core.netdev_max_backlog`).
const RUN_PACKETS: u32 = 500;
/// Timed runs of a candidate in a round.
const RUNS: u32 = 40;
/// Frames of a candidate in a round, over the whole path.
const PATH_PACKETS: u32 = 100_000;
/// Super-frames of a candidate in a round: fewer than the backlog holds segments.
const SUPER_PACKETS: u32 = 2_000;

/// The targets. Every candidate with one session uses the first.
const TARGETS: [&str; 4] = ["target", "target1", "target2", "target3"];
/// Candidates for the program alone.
const ALONE: [&str; 22] = [
    "bare clone",
    "no tap entry",
    "nobody reads",
    "mirrored",
    "mirrored, 2 times",
    "mirrored, 4 times",
    "mirrored, 10 taps",
    "mirrored, 100 taps",
    "mirrored, 500 taps",
    FULL,
    "mirrored, 1 rule",
    "mirrored, 16 rules",
    "rejected, 1 rule",
    "rejected, 16 rules",
    "sampled out",
    "limited",
    "1400: bare clone",
    "1400: mirrored",
    "1400: cut to 96",
    "streamed",
    "1400: streamed",
    "1400: stream, 96",
];
/// A candidate on a node with almost as many taps as a node can have.
const FULL: &str = "mirrored, 4000 taps";
/// First ifindex of the other entries in the tap map. No device has it.
const OTHERS: u32 = 0x7000_0000;
/// Candidates for frames of 64 bytes over the whole path.
const PATH: [&str; 9] = [
    "no program",
    "no tap entry",
    "nobody reads",
    "bare clone",
    MIRRED,
    "mirrored",
    "rejected, 1 rule",
    "streamed",
    "tcpdump in the pod",
];
/// tc instead of a program: a filter that matches everything, with the action mirred.
const MIRRED: &str = "tc mirred";
/// Candidates for long frames over the whole path.
const LONG_PATH: [&str; 5] =
    ["1400: no program", "1400: bare clone", "1400: streamed", "1400: stream, 96", "1400: tcpdump, 96"];
/// Index of a target without a reader that gets copies only while it is read.
const UNREAD: u32 = 6;
/// Index of the stream target.
const STREAM: u32 = 7;
/// The session of the candidates with a stream.
const STREAMED: u32 = 9;
/// Bytes of the stream's ring.
const RING: u32 = 16 << 20;
/// Number of rules of a filter, and whether the frames match. A filter is port rules joined by `or`; its position here
/// is its index in the map.
const FILTERS: [(usize, bool); 4] = [(1, true), (16, true), (1, false), (16, false)];

fn main() {
    pin_to_cpu(0);
    let mut rig = Rig::new();
    let release = nix::sys::utsname::uname().unwrap();
    println!(
        "ns per packet: frames of {FRAME} bytes, copies to a {}, Linux {}, {ROUNDS} rounds, candidates interleaved\n",
        rig.target_kind,
        release.release().to_string_lossy(),
    );
    // The second stage is attached by TCX in this bench.
    let has_tcx = kernel_is_at_least(6, 6);
    let alone: Vec<_> = ALONE.into_iter().filter(|name| has_tcx || !name.contains("cut")).collect();
    let measured = rounds(&alone, |name| rig.program(name));
    report("the program alone", &alone, "bare clone", &measured);
    for (name, base) in [
        ("rejected, 1 rule", "no tap entry"),
        ("rejected, 16 rules", "no tap entry"),
        ("mirrored, 1 rule", "mirrored"),
        ("mirrored, 16 rules", "mirrored"),
        ("1400: cut to 96", "1400: mirrored"),
        ("mirrored, 2 times", "mirrored"),
        ("mirrored, 4 times", "mirrored"),
        ("mirrored, 10 taps", "mirrored"),
        ("mirrored, 100 taps", "mirrored"),
        ("mirrored, 500 taps", "mirrored"),
        (FULL, "mirrored"),
    ] {
        compare(&alone, name, base, &measured);
    }
    println!();
    if has_tcx {
        let measured = rounds(&PATH, |name| rig.path(name));
        report("the whole path", &PATH, "bare clone", &measured);
        compare(&PATH, "mirrored", MIRRED, &measured);
        compare(&PATH, "rejected, 1 rule", "no program", &measured);
        compare(&PATH, MIRRED, "no program", &measured);
        let measured = rounds(&LONG_PATH, |name| rig.path(name));
        report("the whole path", &LONG_PATH, "1400: bare clone", &measured);
        for rate in RATES {
            let measured =
                rounds(&rates::CANDIDATES, |name| rig.sent(name, |socket| rate.send(socket, &[0; FRAME])));
            report(&rate.title(), &rates::CANDIDATES, "bare clone", &measured);
        }
        let supers = ["no program", "bare clone", "mirrored", "mirrored, wire"];
        let measured = rounds(&supers, |name| rig.super_path(name));
        report(&format!("{SUPER_FRAME} bytes"), &supers, "bare clone", &measured);
        rig.report_loss();
        compare(&supers, "mirrored, wire", "mirrored", &measured);
    }
}

/// The programs, a target, and two pods' veths: one with a tap entry, one without.
struct Rig {
    lab: Lab,
    ours: Ebpf,
    probes: Ebpf,
    target_kind: &'static str,
    tapped: Device,
    untapped: Device,
    /// Number of tap entries for other devices.
    others: u32,
}

/// The node side of a pod's veth.
struct Device {
    ifindex: u32,
    /// Name of the pod side.
    pod: String,
    /// Socket that sends from the pod side.
    socket: FrameSocket,
}

impl Rig {
    fn new() -> Self {
        let lab = Lab::new("bench-packet");
        let node = lab.node();
        let [target_kind, ..] = TARGETS.map(|target| sink(node, target));
        let device = |name: &str| {
            let pod = format!("{name}p");
            node.ip(&format!("link add {name} type veth peer name {pod}"));
            node.ip(&format!("link set {name} arp off up"));
            node.ip(&format!("link set {pod} arp off up"));
            let socket = node.sender(&pod);
            Device { ifindex: lab.ifindex(name), pod, socket }
        };
        let (tapped, untapped) = (device("tapped"), device("untapped"));
        let target = lab.ifindex(TARGETS[0]);

        let mut ours = EbpfLoader::new()
            .default_map_pin_directory(lab.bpffs())
            .load(aya::include_bytes_aligned!(env!("PODMIRROR_EBPF")))
            .unwrap();
        for name in ["tap_ingress", "deliver"] {
            program(&mut ours, name).load().unwrap();
        }
        let mut filters = FilterMap::new(ours.take_map("FILTERS").unwrap()).unwrap();
        for (place, (rules, is_match)) in (0..).zip(FILTERS) {
            filters.set(place, &filter(rules, is_match)).unwrap();
        }
        // One packet an hour: after the first packet there is no credit.
        let hour = 3_600_000_000_000 * TICKS_PER_NS;
        let limits = Limits { ticks_per_packet: hour, burst_ticks: TICKS_PER_NS, ..Limits::default() };
        let mut all_limits: Array<_, [u8; size_of::<Limits>()]> =
            ours.map_mut("LIMITS").unwrap().try_into().unwrap();
        all_limits.set(0, &transmute!(limits), 0).unwrap();
        let mut targets: Array<_, [u8; size_of::<Target>()]> =
            ours.map_mut("TARGETS").unwrap().try_into().unwrap();
        for (index, name) in (0..).zip(TARGETS) {
            let flags = TARGET_UP | TARGET_QUEUELESS | TARGET_CUTS;
            let wire = Target { ifindex: lab.ifindex(name), flags, ..Target::default() };
            targets.set(index, &transmute!(wire), 0).unwrap();
        }
        let flags = TARGET_UP | TARGET_QUEUELESS | TARGET_WHEN_READ;
        let wire = Target { ifindex: target, flags, ..Target::default() };
        targets.set(UNREAD, &transmute!(wire), 0).unwrap();
        let wire = Target { flags: TARGET_UP | TARGET_STREAM, ..Target::default() };
        targets.set(STREAM, &transmute!(wire), 0).unwrap();
        let mut unread: Array<_, u64> = ours.map_mut("UNREAD").unwrap().try_into().unwrap();
        unread.set(UNREAD, &u64::MAX, 0).unwrap();
        let ring = RingBuf::create(RING, 0).unwrap();
        let mut streams: ArrayOfMaps<_, RingBuf<MapData>> =
            ours.map_mut("STREAMS").unwrap().try_into().unwrap();
        streams.set(STREAM, &ring, 0).unwrap();
        let mut numbers = |name| -> Array<MapData, u64> { ours.take_map(name).unwrap().try_into().unwrap() };
        let (taken, returned) = (numbers("TAKEN"), numbers("RETURNED"));
        thread::spawn(move || read(ring, &taken, returned));

        let mut probes = EbpfLoader::new()
            .override_global("TARGET", &target, true)
            .load(aya::include_bytes_aligned!(env!("PODMIRROR_PROBES")))
            .unwrap();
        program(&mut probes, "bare_clone").load().unwrap();
        Self { lab, ours, probes, target_kind, tapped, untapped, others: 0 }
    }

    /// Returns the program and the device of a candidate, after installing its session.
    fn candidate(&mut self, name: &str) -> (&Lab, &mut SchedClassifier, &Device) {
        let Self { lab, ours, probes, tapped, untapped, others, .. } = self;
        if name.ends_with("bare clone") {
            return (lab, program(probes, "bare_clone"), tapped);
        }
        if matches!(name, "no tap entry" | "no program") {
            return (lab, program(ours, "tap_ingress"), untapped);
        }
        let session_count = match name {
            "mirrored, 2 times" => 2,
            "mirrored, 4 times" => 4,
            _ => 1,
        };
        let mut tap = Tap { kind: TapKind::HostVeth.wire(), session_count, ..Tap::default() };
        for (index, place) in (0..).zip(&mut tap.sessions[..session_count as usize]) {
            // Each session has a target of its own; with a shared target there would be only one copy.
            let session = session(name);
            *place = match session.target {
                STREAM => Session { id: STREAMED, ..session },
                UNREAD => session,
                _ => Session { id: index, target: index, mark: 0x100 << index, ..session },
            };
        }
        let key = DeviceKey { netns: 0, ifindex: tapped.ifindex };
        let mut taps: HashMap<_, [u8; size_of::<DeviceKey>()], [u8; size_of::<Tap>()]> =
            ours.map_mut("TAPS").unwrap().try_into().unwrap();
        taps.insert(&transmute!(key), &transmute!(tap), 0).unwrap();
        let wanted = taps_in(name) - 1;
        for at in wanted.min(*others)..wanted.max(*others) {
            let key = transmute!(DeviceKey { netns: 0, ifindex: OTHERS + at });
            if wanted > *others { taps.insert(&key, &transmute!(tap), 0) } else { taps.remove(&key) }
                .unwrap();
        }
        *others = wanted;
        (lab, program(ours, "tap_ingress"), tapped)
    }

    /// Prints the share of streamed packets that found no room in the ring: a lost record costs less than a written
    /// one.
    fn report_loss(&self) {
        let counters: PerCpuArray<_, [u8; size_of::<SessionCounters>()]> =
            self.ours.map("COUNTERS").unwrap().try_into().unwrap();
        let of_cpus = counters.get(&STREAMED, 0).unwrap();
        let count = |verdict: Verdict| -> u64 {
            let of_cpu = |cpu: &[u8; size_of::<SessionCounters>()]| {
                let counters: SessionCounters = transmute!(*cpu);
                counters.counters.iter().map(|counters| counters[verdict as usize].packets).sum::<u64>()
            };
            of_cpus.iter().map(of_cpu).sum()
        };
        println!("streamed packets: {} in the ring, {} lost", count(Verdict::Copied), count(Verdict::Lost));
    }

    /// ns per packet of one program, as the kernel measures it.
    fn program(&mut self, name: &str) -> f64 {
        let frame = tcp_frame(if name.starts_with("1400") { LONG_FRAME } else { FRAME });
        let second_stage = name.contains("cut").then(|| {
            let (target, deliver) = (self.lab.ifindex("target"), program(&mut self.ours, "deliver"));
            attach(self.lab.node(), deliver, target, TcAttachType::Egress)
        });
        let (lab, program, device) = self.candidate(name);
        // `__sk_buff` up to and including `ifindex`; the kernel assumes zeros for the rest.
        let mut context = [0_u8; 44];
        context[40..].copy_from_slice(&device.ifindex.to_ne_bytes());
        let run = || {
            let options = TestRunOptions {
                data_in: Some(&frame),
                ctx_in: Some(&context),
                repeat: RUN_PACKETS,
                ..TestRunOptions::default()
            };
            program.test_run(options).unwrap().duration.as_nanos() as f64
        };
        // The kernel looks up the device in the caller's namespace.
        let time = lab.node().enter(|| (0..RUNS).map(|_| run()).sum::<f64>() / f64::from(RUNS));
        drop(second_stage);
        time
    }

    /// ns per frame from the pod's `send` until the node has dropped it, with one program on the node side.
    fn path(&mut self, name: &str) -> f64 {
        let (frame, packets) = match name.starts_with("1400") {
            true => (&[0; LONG_FRAME][..], PATH_PACKETS / 2),
            false => (&[0; FRAME][..], PATH_PACKETS),
        };
        self.sent(name, |socket| send(socket, frame, packets))
    }

    /// The same for frames that `send` sends from the pod.
    fn sent(&mut self, name: &str, send: impl FnOnce(&FrameSocket) -> f64) -> f64 {
        let (lab, program, device) = self.candidate(name);
        let tcpdump = name.contains("tcpdump").then(|| Tcpdump::start(lab, &device.pod));
        let mirred = (name == MIRRED).then(|| Mirred::start(lab));
        let has_program = !name.contains("no program") && tcpdump.is_none() && mirred.is_none();
        let link = has_program.then(|| attach(lab.node(), program, device.ifindex, TcAttachType::Ingress));
        let time = send(&device.socket);
        drop((link, tcpdump, mirred));
        time
    }

    /// As [`Rig::path`], for super-frames of TCP; "wire": the target has no offloads.
    fn super_path(&mut self, name: &str) -> f64 {
        let state = if name.ends_with("wire") { "off" } else { "on" };
        self.lab.node().run(&format!("ethtool -K target tx {state} tso {state}"));
        let (lab, program, device) = self.candidate(name);
        let link = (name != "no program")
            .then(|| attach(lab.node(), program, device.ifindex, TcAttachType::Ingress));
        let socket = lab.node().sender(&device.pod).with_super_frames();
        let frame = super_frame(&tcp_frame(SUPER_FRAME), SEGMENT);
        let time = send(&socket, &frame, SUPER_PACKETS);
        drop(link);
        time
    }
}

/// Number of taps on the node, including the candidate's.
fn taps_in(name: &str) -> u32 {
    let taps = name.strip_prefix("mirrored, ").and_then(|rest| rest.strip_suffix(" taps"));
    taps.map_or(1, |taps| taps.parse().unwrap())
}

/// The session of a candidate.
fn session(name: &str) -> Session {
    let plain = Session { directions: 3, ..Session::default() };
    let filtered = Session { flags: SESSION_FILTERED, ..plain };
    match name {
        "mirrored, 1 rule" => Session { filter: 0, ..filtered },
        "mirrored, 16 rules" => Session { filter: 1, ..filtered },
        "rejected, 1 rule" => Session { filter: 2, ..filtered },
        "rejected, 16 rules" => Session { filter: 3, ..filtered },
        // The smallest share; the frames' flow is not in it.
        "sampled out" => Session { sample: 1, ..plain },
        "nobody reads" => Session { target: UNREAD, ..plain },
        "limited" => Session { flags: SESSION_METERED, ..plain },
        "1400: cut to 96" => Session { snaplen: CUT_TO, ..plain },
        "streamed" | "1400: streamed" => Session { target: STREAM, ..plain },
        "1400: stream, 96" => Session { target: STREAM, snaplen: CUT_TO, ..plain },
        _ => plain,
    }
}

/// A filter of `rules` rules. If the frames match, they match the last rule only.
fn filter(rules: usize, is_match: bool) -> FilterProgram {
    let last = if is_match { PORT } else { 1000 };
    let ports = (1..rules as u16).chain([last]);
    let rules: Vec<String> = ports.map(|port| format!("tcp port {port}")).collect();
    let filter = parse_filter(&rules.join(" or ")).unwrap();
    FilterProgram::load(&filter.instructions().unwrap()).unwrap()
}
