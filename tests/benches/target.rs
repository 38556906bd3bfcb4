//! ns per packet by kind of target, for whole and cut copies: one agent, and one pod per target. Run by `cargo xtask
//! bench target`.
//!
//! The whole path is timed: frames that a pod sends through its veth, until the node has dropped them and has handed
//! over the copies. The built agent mirrors each pod to a different target. Two pods are not mirrored: one has no
//! program, and one has a program that only makes a bare copy with `bpf_clone_redirect`. The pods take turns in every
//! round, and the ratios within a round are compared; medians and quartiles are over the rounds.
//!
//! Other pods have a NIC whose packets bypass the node, so they are tapped inside: their copies leave by the relay
//! device (`exit`) and the relay hub. They are compared with a bare clone inside a pod, to a device of the pod.
//!
//! The receivers' time is not measured: nothing captures, and the tunnels' packets are dropped after the node's uplink.
//! The reader of the stream runs on another CPU. The bench `packet` measures the programs alone.
//!
//! No time is a pass or fail: the bench prints, and a person judges.

#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has failed")]
#![expect(clippy::print_stdout, reason = "its output")]

#[expect(dead_code, reason = "what the bench `packet` compares")]
#[path = "measure/figures.rs"]
mod figures;
#[path = "measure/path.rs"]
mod path;

use std::{thread, time::Duration};

use aya::{
    Ebpf, EbpfLoader,
    programs::{TcAttachType, tc::SchedClassifierLink},
};
use mirror_tests::{
    Agent, AttachMode, Lab, Netns, PodNs, PodSpec, PodsFile, TapStatus, check, kernel_is_at_least,
    super_frame,
};

use self::{
    figures::{ROUNDS, quartiles, report, rounds},
    path::{
        CUT_TO, FRAME, LONG_FRAME, SEGMENT, SUPER_FRAME, attach, pin_to_cpu, program, send, sink, tcp_frame,
    },
};

#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    destination: &'static str,
    /// The kernel's name for the tunnel's device type. Some kernels lack it.
    tunnel: Option<&'static str>,
}

impl Kind {
    const fn on_the_node(name: &'static str, destination: &'static str) -> Self {
        Self { name, destination, tunnel: None }
    }

    const fn tunnel(name: &'static str, destination: &'static str, device: &'static str) -> Self {
        Self { name, destination, tunnel: Some(device) }
    }
}

/// The tunnels leave super-frames whole, as the node's own packets are.
const KINDS: [Kind; 7] = [
    Kind::on_the_node("interface", "ids0"),
    Kind::on_the_node(STREAM, "stream"),
    Kind::on_the_node("collector", "pod:default/ids"),
    Kind::tunnel("vxlan", "vxlan:10.9.0.5:14789/vni=77/oversize=segment", "vxlan"),
    Kind::tunnel("geneve", "geneve:10.9.0.5:16081/vni=77/oversize=segment", "geneve"),
    Kind::tunnel("gre", "gre:10.9.0.5/key=77/oversize=segment", "gretap"),
    Kind::tunnel("erspan", "erspan:10.9.0.5/session=77/oversize=segment", "erspan"),
];
const STREAM: &str = "stream";
/// The pods that are not mirrored.
const NOTHING: &str = "no program";
const BARE: &str = "bare clone";
/// Pods that are tapped inside, with the target of their mirror.
const INSIDE: [(&str, Option<Kind>); 4] = [
    ("inside: no program", None),
    (BARE_INSIDE, None),
    ("inside: interface", Some(KINDS[0])),
    ("inside: stream", Some(KINDS[1])),
];
const BARE_INSIDE: &str = "inside: bare clone";
/// Target of the bare clone: a mirror interface as the agent creates it, which no mirror uses.
const BARE_TARGET: &str = "bare=bare0";

/// Bytes of a frame, and frames per pod and round. The stream's ring holds more frames than this, so its reader gets
/// all of them, however late it is.
const SIZES: [(usize, u32); 3] = [(FRAME, 100_000), (LONG_FRAME, 25_000), (SUPER_FRAME, 1_200)];
const RING: &str = "64MiB";
/// Time for the stream's reader to finish after its turn, so that it does not run beside other candidates.
const READER: Duration = Duration::from_millis(100);
/// The device by which the tunnels' packets leave. Its MTU has room for the segments of super-frames with all headers.
const UPLINK: &str = "up0";
const UPLINK_MTU: u32 = 9000;

fn main() {
    assert!(kernel_is_at_least(6, 6), "the bench attaches its program by TCX: it needs Linux 6.6 or newer");
    let lab = Lab::new("bench-target");
    let rig = Rig::new(&lab);
    for (is_inside, base) in [(false, BARE), (true, BARE_INSIDE)] {
        let names = rig.candidates.iter().filter(|candidate| candidate.is_inside == is_inside);
        let names: Vec<_> = names.map(|candidate| candidate.name.as_str()).collect();
        let measured = SIZES.map(|(bytes, times)| {
            let measured = rounds(&names, |name| rig.time(name, bytes, times));
            report(&format!("{bytes} bytes"), &names, base, &measured);
            measured
        });
        summary(&names, base, &measured);
    }
    rig.report_copies(&lab);
    rig.end();
    lab.cleanup();
}

/// Prints the medians as a table of docs/benchmarks/packets.md.
fn summary(names: &[&str], base: &str, measured: &[Vec<Vec<f64>>]) {
    let base = names.iter().position(|name| *name == base).unwrap();
    println!("| target | {} |", SIZES.map(|(bytes, _)| format!("{bytes} bytes")).join(" | "));
    println!("| --- | {} |", SIZES.map(|_| "---").join(" | "));
    for (column, name) in names.iter().enumerate() {
        let cells = measured.iter().map(|rounds| {
            let [_, time, _] = quartiles(rounds.iter().map(|round| round[column]));
            let [_, ratio, _] = quartiles(rounds.iter().map(|round| round[column] / round[base]));
            format!("{time:.0} ({ratio:.2})")
        });
        println!("| {name} | {} |", cells.collect::<Vec<_>>().join(" | "));
    }
    println!();
}

/// The agent, the reader of the stream, the pods, and the program of the pod that has no mirror.
struct Rig {
    candidates: Vec<Candidate>,
    agent: Agent,
    reader: Agent,
    _ids: PodNs,
    _switch: Netns,
    _bare: [(Ebpf, SchedClassifierLink); 2],
}

/// A pod that takes turns.
struct Candidate {
    name: String,
    pod: PodNs,
    mirror: Option<(Kind, u32)>,
    is_inside: bool,
}

impl Candidate {
    fn new(lab: &Lab, name: &str, mirror: Option<(Kind, u32)>) -> Self {
        let pod = lab.routed_pod(&name.replace(", ", "-").replace(' ', "-"));
        Self { name: name.to_owned(), pod, mirror, is_inside: false }
    }

    /// A pod whose NIC leads to a bridge of another namespace.
    fn inside(lab: &Lab, switch: &Netns, name: &str, mirror: Option<Kind>) -> Self {
        let pod = lab.pod_elsewhere(&name.replace(": ", "-").replace(' ', "-"), switch, "br0");
        Self { name: name.to_owned(), pod, mirror: mirror.map(|kind| (kind, 0)), is_inside: true }
    }

    /// The pod's entry in the pods file, with its annotations.
    fn spec(&self) -> PodSpec {
        let spec = PodSpec::of(&self.pod);
        let spec = if self.is_inside { spec.annotated("podmirror.io/nics", "eth0") } else { spec };
        match self.mirror {
            None => spec,
            Some((kind, 0)) => spec.mirror("true").annotated("podmirror.io/target", kind.name),
            Some((kind, snaplen)) => spec
                .mirror("true")
                .annotated("podmirror.io/target", kind.name)
                .annotated("podmirror.io/snaplen", &snaplen.to_string()),
        }
    }
}

impl Rig {
    fn new(lab: &Lab) -> Self {
        let sink_kind = sink(lab.node(), UPLINK);
        lab.node().ip(&format!("link set {UPLINK} mtu {UPLINK_MTU}"));
        lab.node().ip(&format!("address add 10.9.0.1/24 dev {UPLINK}"));
        let is_here = |kind: &Kind| kind.tunnel.is_none_or(|device| lab.node().has_link_kind(device));
        let (kinds, missing): (Vec<_>, Vec<_>) = KINDS.into_iter().partition(is_here);
        let release = nix::sys::utsname::uname().unwrap();
        println!(
            "ns per packet over the whole path, Linux {}, {ROUNDS} rounds, candidates interleaved\n\
             copies and tunnels leave by a {sink_kind}; a frame of {SUPER_FRAME} bytes is a super-frame of TCP with \
             segments of {SEGMENT}; \"{CUT_TO}\": cut to {CUT_TO} bytes",
            release.release().to_string_lossy(),
        );
        for kind in missing {
            println!("not on this kernel: {}", kind.name);
        }
        println!();

        let mut candidates = vec![Candidate::new(lab, NOTHING, None), Candidate::new(lab, BARE, None)];
        for kind in &kinds {
            candidates.push(Candidate::new(lab, kind.name, Some((*kind, 0))));
            candidates.push(Candidate::new(lab, &format!("{}, {CUT_TO}", kind.name), Some((*kind, CUT_TO))));
        }
        let switch = Netns::new(&format!("{}-switch", lab.node().name()));
        switch.keep_quiet();
        switch.ip("link add br0 type bridge mcast_snooping 0");
        switch.ip("link set br0 up");
        candidates.extend(INSIDE.map(|(name, mirror)| Candidate::inside(lab, &switch, name, mirror)));
        let ids = lab.routed_pod("ids");
        let mut specs: Vec<_> = candidates.iter().map(Candidate::spec).collect();
        specs.push(PodSpec::of(&ids));
        let targets: Vec<_> =
            kinds.iter().map(|Kind { name, destination, .. }| format!("{name}={destination}")).collect();
        let targets = targets.iter().map(String::as_str).chain([BARE_TARGET]);
        let flags: Vec<_> = targets.flat_map(|target| ["--define-target", target]).collect();

        // The agent and the reader must not run on the pods' CPU.
        pin_to_cpu(1);
        let agent = Agent::run(lab, AttachMode::Tcx, &PodsFile::new(lab, &specs), &flags);
        let mirrored = candidates.iter().filter(|candidate| candidate.mirror.is_some()).count();
        lab.wait_status(|status| {
            let mut attached = status.taps.iter().flat_map(|tap| tap.attached.values());
            let are_tapped = status.taps.len() == mirrored && attached.all(|attached| attached == "tcx");
            check(are_tapped, || format!("{} of {mirrored} taps", status.taps.len()))
        });
        let words = ["tail", "--target", STREAM, "--super-frames", "--buffer", RING, "-w", "/dev/null"];
        let reader = Agent::readable(lab, &words);
        lab.wait_status(|status| {
            let down: Vec<_> = kinds.iter().filter(|kind| !status.target(kind.name).up).collect();
            check(down.is_empty(), || {
                format!("down: {:?}", down.iter().map(|kind| kind.name).collect::<Vec<_>>())
            })
        });
        pin_to_cpu(0);

        let pod_of = |name| &candidates.iter().find(|candidate| candidate.name == name).unwrap().pod;
        let (outside, inside) = (pod_of(BARE).veth_host(), pod_of(BARE_INSIDE).netns());
        sink(inside, "bare1");
        let bare = [
            bare_clone(lab.node(), outside, "bare0", TcAttachType::Ingress),
            bare_clone(inside, "eth0", "bare1", TcAttachType::Egress),
        ];
        Self { candidates, agent, reader, _ids: ids, _switch: switch, _bare: bare }
    }

    /// ns per frame of `bytes` bytes that a pod sends.
    fn time(&self, name: &str, bytes: usize, times: u32) -> f64 {
        let Candidate { pod, mirror, .. } =
            self.candidates.iter().find(|candidate| candidate.name == name).unwrap();
        let (socket, frame) = (pod.netns().sender("eth0"), tcp_frame(bytes));
        let time = match bytes {
            SUPER_FRAME => send(&socket.with_super_frames(), &super_frame(&frame, SEGMENT), times),
            _ => send(&socket, &frame, times),
        };
        if mirror.is_some_and(|(kind, _)| kind.name == STREAM) {
            thread::sleep(READER);
        }
        time
    }

    /// Prints whether the copies were made: a packet without a copy costs less.
    fn report_copies(&self, lab: &Lab) {
        let status = lab.status();
        let (mut copies, mut by_tunnel) = (0, 0);
        for Candidate { name, pod, mirror, .. } in &self.candidates {
            let Some((kind, _)) = mirror else { continue };
            let of_pod = |tap: &&TapStatus| tap.pod.as_ref().is_some_and(|of| of.name == pod.name());
            let session = status.taps.iter().find(of_pod).unwrap().session("default");
            let copied = session.total("copied");
            copies += copied;
            by_tunnel += if kind.tunnel.is_some() { copied } else { 0 };
            if copied != session.seen() {
                println!("not all packets were copied, {name}: {:?}", session.verdicts());
            }
        }
        let uplink = lab.node().ip(&format!("-j -s link show dev {UPLINK}"));
        let uplink: serde_json::Value = serde_json::from_str(&uplink).unwrap();
        let sent = &uplink[0]["stats64"]["tx"]["packets"];
        println!("{copies} copies; {by_tunnel} of them into tunnels, and {sent} packets left by the uplink");
    }

    /// Stops the reader and the agent.
    fn end(self) {
        self.reader.interrupt();
        self.agent.stop();
    }
}

/// Attaches a program that clones to a device, and does nothing else, to a hook of another device.
fn bare_clone(netns: &Netns, device: &str, target: &str, hook: TcAttachType) -> (Ebpf, SchedClassifierLink) {
    let index = |name: &str| netns.enter(|| nix::net::if_::if_nametoindex(name)).unwrap();
    let mut probes = EbpfLoader::new()
        .override_global("TARGET", &index(target), true)
        .load(aya::include_bytes_aligned!(env!("PODMIRROR_PROBES")))
        .unwrap();
    let bare_clone = program(&mut probes, "bare_clone");
    bare_clone.load().unwrap();
    let link = attach(netns, bare_clone, index(device), hook);
    (probes, link)
}
