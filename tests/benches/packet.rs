//! ns per packet: the tap programs against a bare clone and against nothing. Run by `cargo xtask bench packet`.
//!
//! Two measurements, because each hides what the other shows. The program alone (`BPF_PROG_TEST_RUN`): the kernel
//! times a loop over one packet, so the noise is small, but caches are warmer than in life. The whole path: frames
//! that a pod sends through its veth until the node drops them. The candidates take turns in every round, and what
//! is compared is the ratio within a round; medians and quartiles are over the rounds.
//!
//! Times nothing for a verdict: it prints, and a person reads.

#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has failed")]
#![expect(clippy::print_stdout, reason = "its output")]

use std::{
    io,
    os::fd::{AsRawFd as _, OwnedFd},
    time::Instant,
};

use aya::{
    Ebpf, EbpfLoader, TestRun as _, TestRunOptions,
    maps::{Array, HashMap},
    programs::{LinkOrder, SchedClassifier, TcAttach, TcAttachType},
};
use mirror_common::abi::{Session, TAP_AT_PEER, TARGET_QUEUELESS, TARGET_UP, Tap, Target};
use mirror_tests::{Lab, kernel_is_at_least};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    sys::socket::{AddressFamily, SockFlag, SockType, socket},
    unistd::Pid,
};
use zerocopy::transmute;

const ROUNDS: usize = 41;
/// Bytes of a frame, FCS left out.
const FRAME: usize = 64;
/// Packets of one timed run of the program: fewer than the veth's backlog holds (`net.core.netdev_max_backlog`).
const RUN_PACKETS: u32 = 500;
/// Timed runs of a candidate in a round.
const RUNS: u32 = 40;
/// Frames of a candidate in a round, over the whole path.
const PATH_PACKETS: u32 = 100_000;

fn main() {
    pin_to_cpu(0);
    let mut rig = Rig::new();
    let release = nix::sys::utsname::uname().unwrap();
    println!(
        "ns per packet: frames of {FRAME} bytes, copies to a {}, Linux {}, {ROUNDS} rounds, candidates interleaved\n",
        rig.target_kind,
        release.release().to_string_lossy(),
    );
    let alone = ["bare clone", "mirrored", "no tap entry"];
    report("the program alone", &alone, "bare clone", &rounds(&alone, |name| rig.program(name)));
    if kernel_is_at_least(6, 6) {
        let path = ["no program", "no tap entry", "bare clone", "mirrored"];
        report("the whole path", &path, "bare clone", &rounds(&path, |name| rig.path(name)));
    }
}

/// ns per packet of each candidate in each round, without the first round, which warms up.
fn rounds(names: &[&str], mut measure: impl FnMut(&str) -> f64) -> Vec<Vec<f64>> {
    let all = (0..=ROUNDS).map(|_| names.iter().map(|name| measure(name)).collect());
    all.skip(1).collect()
}

fn report(title: &str, names: &[&str], base: &str, rounds: &[Vec<f64>]) {
    let base = names.iter().position(|name| *name == base).unwrap();
    println!("{title:<20}  median  quartiles      against a bare clone");
    for (column, name) in names.iter().enumerate() {
        let [low, median, high] = quartiles(rounds.iter().map(|round| round[column]));
        let [ratio_low, ratio, ratio_high] =
            quartiles(rounds.iter().map(|round| round[column] / round[base]));
        println!(
            "  {name:<18}  {median:>6.0}  {low:>4.0} … {high:<6.0}  {ratio:.3}  ({ratio_low:.3} … {ratio_high:.3})"
        );
    }
    println!();
}

fn quartiles(values: impl Iterator<Item = f64>) -> [f64; 3] {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| values[(values.len() - 1) * quarter / 4])
}

/// The programs, a target, and two pods' veths: one with a tap entry, one without.
struct Rig {
    lab: Lab,
    ours: Ebpf,
    probes: Ebpf,
    target_kind: &'static str,
    tapped: Device,
    untapped: Device,
}

/// The node's end of a pod's veth.
struct Device {
    ifindex: u32,
    /// Sends into it from the pod's end.
    socket: OwnedFd,
}

impl Rig {
    fn new() -> Self {
        let lab = Lab::new("bench-packet");
        let node = lab.node();
        let is_dummy = node.try_run("ip link add target type dummy").status.success();
        if !is_dummy {
            node.ip("link add target type veth peer name targetp");
            node.ip("link set targetp arp off up");
        }
        let device = |name: &str| {
            let pod = format!("{name}p");
            node.ip(&format!("link add {name} type veth peer name {pod}"));
            node.ip(&format!("link set {name} arp off up"));
            node.ip(&format!("link set {pod} arp off up"));
            let pod = lab.ifindex(&pod);
            Device { ifindex: lab.ifindex(name), socket: node.enter(|| packet_socket(pod)) }
        };
        let (tapped, untapped) = (device("tapped"), device("untapped"));
        node.ip("link set target arp off up");
        let target = lab.ifindex("target");

        let mut ours = EbpfLoader::new()
            .default_map_pin_directory(lab.bpffs())
            .load(aya::include_bytes_aligned!(env!("PODMIRROR_EBPF")))
            .unwrap();
        program(&mut ours, "tap_ingress").load().unwrap();
        let session = Session { directions: 3, ..Session::default() };
        let tap = Tap { flags: TAP_AT_PEER, session_count: 1, sessions: [session; 4] };
        let mut taps: HashMap<_, u32, [u8; size_of::<Tap>()]> =
            ours.map_mut("TAPS").unwrap().try_into().unwrap();
        taps.insert(&tapped.ifindex, &transmute!(tap), 0).unwrap();
        let wire = Target { ifindex: target, flags: TARGET_UP | TARGET_QUEUELESS, name: [0; 16] };
        let mut targets: Array<_, [u8; size_of::<Target>()]> =
            ours.map_mut("TARGETS").unwrap().try_into().unwrap();
        targets.set(0, &transmute!(wire), 0).unwrap();

        let mut probes = EbpfLoader::new()
            .override_global("TARGET", &target, true)
            .load(aya::include_bytes_aligned!(env!("PODMIRROR_PROBES")))
            .unwrap();
        program(&mut probes, "bare_clone").load().unwrap();
        let target_kind = if is_dummy { "dummy" } else { "veth pair" };
        Self { lab, ours, probes, target_kind, tapped, untapped }
    }

    /// The program and the device of a candidate.
    fn candidate(&mut self, name: &str) -> (&Lab, &mut SchedClassifier, &Device) {
        let Self { lab, ours, probes, tapped, untapped, .. } = self;
        match name {
            "bare clone" => (lab, program(probes, "bare_clone"), tapped),
            "mirrored" => (lab, program(ours, "tap_ingress"), tapped),
            _ => (lab, program(ours, "tap_ingress"), untapped),
        }
    }

    /// ns per packet of one program, timed by the kernel.
    fn program(&mut self, name: &str) -> f64 {
        let (lab, program, device) = self.candidate(name);
        // `__sk_buff` up to and with `ifindex`; the kernel takes the rest for zeros.
        let mut context = [0_u8; 44];
        context[40..].copy_from_slice(&device.ifindex.to_ne_bytes());
        let run = || {
            let options = TestRunOptions {
                data_in: Some(&[0; FRAME]),
                ctx_in: Some(&context),
                repeat: RUN_PACKETS,
                ..TestRunOptions::default()
            };
            program.test_run(options).unwrap().duration.as_nanos() as f64
        };
        // The kernel looks for the device in the namespace of the caller.
        lab.node().enter(|| (0..RUNS).map(|_| run()).sum::<f64>() / f64::from(RUNS))
    }

    /// ns per frame from the pod's `send` until the node has dropped it, with one program at the node's end.
    fn path(&mut self, name: &str) -> f64 {
        let (lab, program, device) = self.candidate(name);
        let link = (name != "no program").then(|| {
            let attach = TcAttach::Tcx { attach_type: TcAttachType::Ingress, order: LinkOrder::first() };
            let id = lab.node().enter(|| program.attach(device.ifindex, attach)).unwrap();
            program.take_link(id).unwrap()
        });
        let frame = [0_u8; FRAME];
        let start = Instant::now();
        for _ in 0..PATH_PACKETS {
            // SAFETY: pointer and length are of one array.
            let sent = unsafe { libc::send(device.socket.as_raw_fd(), frame.as_ptr().cast(), FRAME, 0) };
            assert_eq!(sent, FRAME.cast_signed(), "{}", io::Error::last_os_error());
        }
        let elapsed = start.elapsed();
        drop(link);
        elapsed.as_nanos() as f64 / f64::from(PATH_PACKETS)
    }
}

fn program<'a>(ebpf: &'a mut Ebpf, name: &str) -> &'a mut SchedClassifier {
    ebpf.program_mut(name).unwrap().try_into().unwrap()
}

/// Keeps the bench, and with it the softirqs that it causes, on one CPU; namespaces are entered on threads that
/// inherit it.
fn pin_to_cpu(cpu: usize) {
    let mut cpus = CpuSet::new();
    cpus.set(cpu).unwrap();
    sched_setaffinity(Pid::from_raw(0), &cpus).unwrap();
}

/// A socket that sends whole frames out of a device.
fn packet_socket(ifindex: u32) -> OwnedFd {
    let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, None).unwrap();
    // SAFETY: every field of a `sockaddr_ll` is a number.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_ifindex = ifindex.cast_signed();
    let length = size_of::<libc::sockaddr_ll>() as u32;
    // SAFETY: pointer and length are of one `sockaddr_ll`.
    let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) };
    assert_eq!(bound, 0, "{}", io::Error::last_os_error());
    socket
}
