//! With `--mirror-offloads=false`, copies arrive in the order in which the tap saw the packets. The segments of a
//! super-frame arrive consecutively, or not at all.

use std::{collections::BTreeMap, net::UdpSocket, ops::Range, thread, time::Duration};

use mirror_tests::{
    Agent, AttachMode, Capture, Captured, Conversation, Lab, PodNs, PodSpec, PodsFile, SOON, check,
    eventually, kernel_is_at_least, segments, steps_back,
};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    sys::socket::{setsockopt, sockopt::UdpGsoSegment},
    unistd::Pid,
};

use crate::{MIRROR, Node, any_mode};

in_both_modes!(copies_do_not_overtake_each_other_without_offloads);

/// Bytes of each connection in each direction.
const BYTES: usize = 5_000_000;
const CONNECTIONS: usize = 4;
/// Number of backward steps that two CPUs can cause between the tap and the queue.
const MARGIN: usize = 3;

/// Bytes of data in a segment.
const SEGMENT: usize = 1400;
const SEGMENTS: Range<u16> = 0..40;
const SUPER_FRAMES: Range<u32> = 0..300;
const SENDERS: Range<u8> = 0..2;
// Without the dummy driver, the mirror interface is a veth pair, and each segment crosses it. A CPU queues 1000 packets
// for all veths (net.core.netdev_max_backlog), including those of other stories. So the number of packets in transit
// must be limited.
/// Receive buffer of a connection: minimum, default and maximum in bytes (tcp(7), `tcp_rmem`).
const WINDOW: &str = "4096 16384 32768";
/// Super-frames that a sender sends before a pause.
const PAUSE: u32 = 5;

/// The label in a segment of [`burst`]: its sender, the number of its super-frame, and its position in the super-frame.
type Label = (u8, u32, u16);

/// Whether a veth accepts UDP super-frames. Before Linux 5.11, the sender segments them.
fn carries_bursts() -> bool {
    let carries = kernel_is_at_least(5, 11);
    if !carries {
        eprintln!("not applicable: this kernel's veths carry no super-frames of UDP");
    }
    carries
}

/// Sends super-frames from one UDP socket, from two CPUs at once if there are two.
fn burst(from: &PodNs, to: &PodNs) {
    let server = to.netns().enter(|| UdpSocket::bind((to.v4(), 0))).unwrap();
    let client = from.netns().enter(|| UdpSocket::bind((from.v4(), 0))).unwrap();
    client.connect(server.local_addr().unwrap()).unwrap();
    setsockopt(&client, UdpGsoSegment, &(SEGMENT as i32)).unwrap();
    let allowed = sched_getaffinity(Pid::from_raw(0)).unwrap();
    let cpus: Vec<usize> = (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).unwrap()).collect();
    thread::scope(|scope| {
        for (sender, cpu) in SENDERS.zip(cpus.iter().cycle()) {
            let client = &client;
            scope.spawn(move || {
                let mut only = CpuSet::new();
                only.set(*cpu).unwrap();
                sched_setaffinity(Pid::from_raw(0), &only).unwrap();
                for number in SUPER_FRAMES {
                    let data = SEGMENTS.flat_map(|place| segment((sender, number, place)));
                    client.send(&data.collect::<Vec<u8>>()).unwrap();
                    if number % PAUSE == 0 {
                        thread::sleep(Duration::from_millis(1));
                    }
                }
            });
        }
    });
}

fn segment((sender, number, place): Label) -> Vec<u8> {
    let mut data = [&[sender][..], &number.to_be_bytes(), &place.to_be_bytes()].concat();
    data.resize(SEGMENT, 0);
    data
}

fn label(frame: &Captured) -> Option<Label> {
    let is_udp = frame.bytes.get(12..15)? == [8, 0, 0x45] && frame.bytes.get(23)? == &17;
    let data: [u8; 7] = frame.bytes.get(42..49).filter(|_| is_udp)?.try_into().ok()?;
    let [sender, a, b, c, d, high, low] = data;
    Some((sender, u32::from_be_bytes([a, b, c, d]), u16::from_be_bytes([high, low])))
}

fn labels(capture: &Capture) -> Vec<Label> {
    capture.in_order().iter().filter_map(label).collect()
}

/// The super-frames of the segments, by sender. Each must be complete and contiguous, and those of a sender in order.
#[track_caller]
fn in_one_piece(shown: &[Label]) -> BTreeMap<u8, Vec<u32>> {
    let mut whole: BTreeMap<u8, Vec<u32>> = BTreeMap::new();
    let mut torn = Vec::new();
    for segments in shown.chunks(SEGMENTS.len()) {
        let (sender, number, _) = segments[0];
        if segments.iter().copied().eq(SEGMENTS.map(|place| (sender, number, place))) {
            whole.entry(sender).or_default().push(number);
        } else {
            torn.push((sender, number));
        }
    }
    assert!(torn.is_empty(), "{} of {} segments are mixed", torn.len() * SEGMENTS.len(), shown.len());
    assert!(whole.values().all(|numbers| numbers.is_sorted()), "{whole:?}");
    whole
}

fn copies_do_not_overtake_each_other_without_offloads(mode: AttachMode) {
    let Node { web, db, lab } = &Node::bridged("order");
    for pod in [web, db] {
        pod.netns().sysctl("ipv4/tcp_rmem", WINDOW);
    }
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let agent = Agent::run_until(lab, mode, &pods, &["--mirror-offloads=false"], &[web]);
    for _ in 0..3 {
        let (tap, mirror) = captures(lab, web);
        let talks: Vec<_> = (0..CONNECTIONS).map(|_| Conversation::open(web, db, db.v4())).collect();
        thread::scope(|scope| {
            talks.iter().for_each(|talk| drop(scope.spawn(|| talk.exchange(BYTES))));
        });
        let all = CONNECTIONS * 2 * BYTES / 1448;
        eventually(SOON, || {
            let shown = segments(&mirror.in_order());
            check(shown >= all, || format!("{shown} of {all} segments"))
        });
        let [at_tap, at_mirror] = [&tap, &mirror].map(|capture| steps_back(&capture.in_order()));
        assert!(at_mirror <= at_tap + MARGIN, "{at_mirror} steps back, and {at_tap} at the tap");
    }
    let bursts = if carries_bursts() { 4 } else { 0 };
    for _ in 0..bursts {
        let (tap, mirror) = captures(lab, web);
        burst(web, db);
        let seen = labels(&tap);
        assert_eq!(seen.len(), SENDERS.len() * SUPER_FRAMES.len(), "the tap has seen super-frames");
        eventually(SOON, || {
            let (shown, all) = (labels(&mirror).len(), seen.len() * SEGMENTS.len());
            check(shown == all, || format!("{shown} of {all} segments"))
        });
        let whole = in_one_piece(&labels(&mirror));
        assert!(whole.values().all(|numbers| numbers.iter().copied().eq(SUPER_FRAMES)), "{whole:?}");
    }
    // The queue belongs to the flag: it is removed with it.
    assert!(queue(lab, MIRROR).contains("pfifo 706d: root"), "{}", queue(lab, MIRROR));
    agent.stop();
    let agent = Agent::run(lab, mode, &pods, &[]);
    agent.wait_for_log(&["the mirror interface is up"]);
    eventually(SOON, || {
        let queue = queue(lab, MIRROR);
        check(queue.contains("noqueue"), || queue)
    });
}

/// Captures at the tap of a pod, and on the mirror interface.
fn captures(lab: &Lab, pod: &PodNs) -> (Capture, Capture) {
    (Capture::of_headers(lab.node(), pod.veth_host()), Capture::of_headers(lab.node(), MIRROR))
}

/// The root qdisc of a device of the node.
pub(crate) fn queue(lab: &Lab, device: &str) -> String {
    lab.node().tc(&format!("qdisc show dev {device} root"))
}

#[test]
fn a_super_frame_that_does_not_fit_into_the_queue_is_congested_as_a_whole() {
    if !carries_bursts() {
        return;
    }
    let Node { web, db, lab } = &Node::bridged("full");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("egress")]);
    let agent = Agent::run_until(lab, any_mode(), &pods, &["--mirror-offloads=false"], &[web]);
    let total = |verdict: &str| lab.status().tap(web.veth_host()).packets("egress", verdict);
    let all = (SENDERS.len() * SUPER_FRAMES.len()) as u64;
    // Resolves the pods' addresses first: below, only super-frames may be counted.
    web.ping(db.v4(), 1, 56);
    // No slot at all, one slot, and the default number again.
    for limit in [0, 1, 1000] {
        lab.node().tc(&format!("qdisc change dev {MIRROR} root handle 706d: pfifo limit {limit}"));
        let (copied, congested) = (total("copied"), total("congested"));
        let mirror = Capture::of_headers(lab.node(), MIRROR);
        burst(web, db);
        let [copied, congested] = [total("copied") - copied, total("congested") - congested];
        assert_eq!(copied + congested, all, "{:?}", lab.status());
        eventually(SOON, || {
            let (shown, expected) = (labels(&mirror).len() as u64, copied * SEGMENTS.len() as u64);
            check(shown == expected, || format!("{shown} segments, {expected} copied"))
        });
        in_one_piece(&labels(&mirror));
        match limit {
            0 => assert_eq!(copied, 0),
            1000 => assert_eq!(congested, 0),
            _ => {}
        }
    }
    agent.stop();
}

#[test]
fn a_queue_that_was_taken_away_comes_back_and_one_of_somebody_else_stays() {
    let Node { web, db: _db, lab } = &Node::bridged("queue");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let is = |expected: &str| {
        let queue = queue(lab, MIRROR);
        check(queue.contains(expected), || format!("no {expected:?}: {queue}"))
    };
    let agent = Agent::run_until(lab, any_mode(), &pods, &["--mirror-offloads=false"], &[web]);
    is("pfifo 706d: root").unwrap();
    lab.node().tc(&format!("qdisc del dev {MIRROR} root"));
    eventually(SOON, || is("pfifo 706d: root"));
    lab.node().tc(&format!("qdisc replace dev {MIRROR} root handle 9: pfifo limit 50"));
    agent.stop();
    for offloads in ["--mirror-offloads=false", "--mirror-offloads"] {
        let agent = Agent::run(lab, any_mode(), &pods, &[offloads]);
        agent.wait_for_log(&["the mirror interface is up"]);
        is("pfifo 9: root").unwrap();
        assert_eq!(agent.log_with(&["ERROR"]), Vec::<String>::new());
        agent.stop();
    }
}
