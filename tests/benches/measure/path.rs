//! The packet path that the benches time: frames enter one end of a veth, and the node drops them at the other end.
//! Used by the benches `packet` and `target`.

use std::{net::Ipv4Addr, time::Instant};

use aya::{
    Ebpf,
    programs::{LinkOrder, SchedClassifier, TcAttach, TcAttachType, tc::SchedClassifierLink},
};
use mirror_tests::{Frame, FrameSocket, Netns};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

/// Bytes of a small frame, without FCS.
pub(crate) const FRAME: usize = 64;
/// Bytes of a frame before it is cut, and after.
pub(crate) const LONG_FRAME: usize = 1400;
pub(crate) const CUT_TO: u32 = 96;
/// Bytes of a super-frame, and of the payload of each segment.
pub(crate) const SUPER_FRAME: usize = 32_000;
pub(crate) const SEGMENT: u16 = 1460;
/// Source and destination port of the TCP frames.
pub(crate) const PORT: u16 = 443;

/// ns per frame, for a frame that is sent `times` times.
pub(crate) fn send(socket: &FrameSocket, frame: &[u8], times: u32) -> f64 {
    let start = Instant::now();
    for _ in 0..times {
        assert_eq!(socket.send(frame).unwrap(), frame.len());
    }
    start.elapsed().as_nanos() as f64 / f64::from(times)
}

/// A frame of `len` bytes with a TCP segment over IPv4, addressed to nobody on the node.
pub(crate) fn tcp_frame(len: usize) -> Vec<u8> {
    let mut frame = Frame::new([2, 0, 0, 0, 0, 2], [2, 0, 0, 0, 0, 1])
        .filled(len - 28, 0)
        .ipv4(Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2))
        .bytes();
    // Changes the protocol from UDP to TCP, whose header is longer.
    frame[23] = 6;
    frame[34..38].copy_from_slice(&[PORT, PORT].map(u16::to_be_bytes).concat());
    frame[46..48].copy_from_slice(&[0x50, 0x10]);
    frame
}

/// Creates a device that drops what it sends: a dummy device, or a veth pair where the kernel has no dummy. Returns its
/// kind.
pub(crate) fn sink(node: &Netns, name: &str) -> &'static str {
    let kind = if node.try_run(&format!("ip link add {name} type dummy")).status.success() {
        "dummy"
    } else {
        node.ip(&format!("link add {name} type veth peer name {name}p"));
        node.ip(&format!("link set {name}p arp off up"));
        "veth pair"
    };
    node.ip(&format!("link set {name} arp off up"));
    kind
}

/// Attaches a program to a hook of a device in a namespace until the link is dropped. Needs TCX.
pub(crate) fn attach(
    netns: &Netns,
    program: &mut SchedClassifier,
    ifindex: u32,
    attach_type: TcAttachType,
) -> SchedClassifierLink {
    let how = TcAttach::Tcx { attach_type, order: LinkOrder::first() };
    let id = netns.enter(|| program.attach(ifindex, how)).unwrap();
    program.take_link(id).unwrap()
}

pub(crate) fn program<'a>(ebpf: &'a mut Ebpf, name: &str) -> &'a mut SchedClassifier {
    ebpf.program_mut(name).unwrap().try_into().unwrap()
}

/// Pins the caller to one CPU, with all threads and processes that it starts later, and the softirqs that it causes.
pub(crate) fn pin_to_cpu(cpu: usize) {
    let mut cpus = CpuSet::new();
    cpus.set(cpu).unwrap();
    sched_setaffinity(Pid::from_raw(0), &cpus).unwrap();
}
