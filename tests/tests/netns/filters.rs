//! The programs of filters: replacement, sharing, and removal.

mod table;

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use mirror_core::settings::parse_filter;
use mirror_tests::{
    Agent, BpfObjects, Capture, Frame, Frames, Lab, PodNs, PodSpec, PodsFile, SOON, check, eventually,
};

use self::table::FilterTable;
use crate::{Inside, MIRROR, Node, any_mode, shows};

const FILTER: &str = "podmirror.io/filter";

/// Byte range of a datagram's number.
const NUMBER: Range<usize> = 42..50;

/// A datagram from `from` to `to` with this source and destination port and this number.
fn datagram(from: &PodNs, to: &PodNs, port: u16, number: u64) -> Vec<u8> {
    let (from, to) = (from.eth0(), to.eth0());
    let mut frame = Frame::new(to.mac, from.mac).filled(60, 1).ipv4(from.v4, to.v4).bytes();
    frame[34..38].copy_from_slice(&[port, port].map(u16::to_be_bytes).concat());
    // No checksum.
    frame[40..42].fill(0);
    frame[NUMBER].copy_from_slice(&number.to_be_bytes());
    frame
}

fn port_of(frame: &[u8]) -> u16 {
    u16::from_be_bytes([frame[34], frame[35]])
}

/// Sends datagrams to several ports in turn, until it is stopped or dropped.
struct Flow {
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<u64>>,
}

impl Flow {
    fn start(from: &PodNs, to: &PodNs, ports: &[u16]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let socket = from.netns().sender("eth0");
        let templates: Vec<_> = ports.iter().map(|port| datagram(from, to, *port, 0)).collect();
        let is_stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let mut sent = 0_u64;
            while !is_stopped.load(Ordering::Relaxed) {
                for template in &templates {
                    let mut frame = template.clone();
                    frame[NUMBER].copy_from_slice(&sent.to_be_bytes());
                    socket.send(&frame).unwrap();
                    sent += 1;
                }
                // Slow enough that a capture loses none.
                thread::sleep(Duration::from_millis(2));
            }
            sent
        });
        Self { stop, thread: Some(thread) }
    }

    /// Ends the flow, and returns the number of sent datagrams.
    fn stop(mut self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Waits until the node has exactly the programs of these filters.
#[track_caller]
fn wait_loaded(lab: &Lab, filters: &[&str]) {
    let mut wanted: Vec<u64> = filters.iter().map(|text| parse_filter(text).unwrap().hash).collect();
    wanted.sort_unstable();
    let table = FilterTable::of(lab);
    eventually(SOON, || {
        let mut hashes: Vec<u64> = table.programs().keys().map(|place| table.hash(*place)).collect();
        hashes.sort_unstable();
        check(hashes == wanted, || format!("{hashes:x?} are loaded, not {wanted:x?} ({filters:?})"))
    });
}

/// Two narrow filters alternate. A packet that neither matches is never copied, and none is copied or counted twice.
#[test]
fn a_filter_is_replaced_while_packets_flow() {
    const FILTERS: [&str; 2] = ["udp port 1111", "udp port 2222"];
    let Node { web, db, lab } = &Node::bridged("replaced");
    let spec = |filter| [PodSpec::of(web).mirror("true").annotated(FILTER, filter)];
    let pods = PodsFile::new(lab, &spec(FILTERS[0]));
    let _agent = Agent::run_until(lab, any_mode(), &pods, &[], &[web]);
    let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), MIRROR));
    let flow = Flow::start(web, db, &[1111, 2222, 3333]);
    for round in 1..=15 {
        pods.write(&spec(FILTERS[round % 2]));
        wait_loaded(lab, &[FILTERS[round % 2]]);
    }
    let sent = flow.stop();
    let status = lab.wait_status(|status| {
        let seen = status.tap(web.veth_host()).packets("egress", "copied")
            + status.tap(web.veth_host()).packets("egress", "filtered");
        check(seen >= sent, || format!("{seen} of {sent}"))
    });
    let counted = status.tap(web.veth_host()).verdicts();
    let copied = counted.get("egress copied").copied().unwrap_or_default();
    eventually(SOON, || check(mirror.frames().len() as u64 >= copied, || format!("{copied} are copied")));
    let (copies, sent_frames) = (mirror.stop(), inside.stop().0);
    assert_eq!(copies.len() as u64, copied);
    for (frame, times) in copies.iter() {
        assert!(times == 1 && matches!(port_of(frame), 1111 | 2222), "{times} copies of {frame:02x?}");
        assert_eq!(sent_frames.count(frame), 1, "not as it was sent: {frame:02x?}");
    }
    for port in [1111, 2222] {
        let of_port = copies.only(|frame| port_of(frame) == port).len();
        assert!(of_port > 50 && of_port < sent as usize / 3, "{of_port} of {sent} to port {port}");
    }
    let verdicts: Vec<_> = counted.keys().map(String::as_str).collect();
    assert!(
        verdicts
            .iter()
            .all(|verdict| ["egress copied", "egress filtered", "ingress filtered"].contains(verdict)),
        "{counted:?}"
    );
    assert_eq!(counted["egress copied"] + counted["egress filtered"], sent_frames.len() as u64);
}

/// An agent is killed at each point between loading a program and writing the tap's entry, and a corrected compiler
/// makes another program of the same text.
#[test]
fn what_a_killed_agent_has_left_is_not_trusted() {
    const OLD: &str = "udp port 1111";
    const NEW: &str = "udp port 2222";
    let Node { web, db, lab } = &Node::bridged("killed");
    let spec = |filter| [PodSpec::of(web).mirror("true").annotated(FILTER, filter)];
    let pods = PodsFile::new(lab, &spec(OLD));
    let agent = Agent::run_until(lab, any_mode(), &pods, &[], &[web]);
    wait_loaded(lab, &[OLD]);
    agent.kill();
    let table = FilterTable::of(lab);
    let old = table.programs();
    // Three programs without a session: one with the hash of another filter, one with its own hash, one without a hash.
    let hash = parse_filter(NEW).unwrap().hash;
    for (place, filter, hash) in [(70, "ip", hash), (71, NEW, hash), (72, "arp", 0)] {
        table.put(place, filter);
        table.put_hash(place, hash);
    }
    // The session's text is new, its program is old.
    table.put_text(NEW);
    assert_eq!(table.programs().len(), 4);

    pods.write(&spec(NEW));
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    wait_loaded(lab, &[NEW]);
    assert!(table.programs().values().all(|id| !old.values().any(|old| old == id)));
    let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), MIRROR));
    let mut number = 0;
    let mut send = || {
        for port in [1111, 2222, 3333] {
            number += 1;
            web.send_frame(&datagram(web, db, port, number));
        }
    };
    let wanted = || inside.frames().0.only(|frame| port_of(frame) == 2222);
    (0..5).for_each(|_| send());
    shows(&mirror, wanted);

    // As if an earlier compiler had made another program of the same text.
    agent.stop();
    send();
    let [(place, before)] = table.programs().into_iter().collect::<Vec<_>>()[..] else { unreachable!() };
    table.put_hash(place, hash ^ 1);
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    wait_loaded(lab, &[NEW]);
    assert!(table.programs().values().all(|after| *after != before), "it was loaded again");
    send();
    shows(&mirror, wanted);
    assert_eq!(wanted().len(), 7);

    // An agent that finds no difference changes nothing.
    agent.stop();
    let before = table.programs();
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    agent.wait_for_log(&["attach"]);
    lab.wait_mirrored(&[web]);
    send();
    shows(&mirror, wanted);
    assert_eq!(table.programs(), before);
    let (sent, copied) = (inside.stop().0, mirror.stop());
    copied.same_as(&sent.only(|frame| port_of(frame) == 2222)).unwrap();
}

/// 40 pods with 8 mirrors: one filter that all pods share, and 280 filters of their own.
#[test]
fn hundreds_of_filters_are_loaded_once_each_and_none_is_left() {
    const PODS: u16 = 40;
    let Node { web, db, lab } = &Node::bridged("hundreds");
    let others: Vec<PodNs> = (1..PODS).map(|number| lab.pod(&format!("pod-{number}"), "br0")).collect();
    let all: Vec<&PodNs> = std::iter::once(web).chain(&others).collect();
    // The ports of a pod, one for each of its mirrors; the first is shared by all pods.
    let ports = |pod: u16| (0..8).map(move |mirror| if mirror == 0 { 999 } else { 1000 + 8 * pod + mirror });
    let spec = |number: u16| {
        let mut spec = PodSpec::of(all[usize::from(number)]).mirror("false");
        for (mirror, port) in ports(number).enumerate() {
            spec = spec
                .annotated(&format!("podmirror.io/mirror.m{mirror}"), "egress")
                .annotated(&format!("podmirror.io/filter.m{mirror}"), &format!("udp port {port}"));
        }
        spec
    };
    let specs = |pods: u16| (0..pods).map(spec).collect::<Vec<_>>();
    let pods = PodsFile::new(lab, &specs(PODS));
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    let table = FilterTable::of(lab);
    let loads = |count: usize| {
        eventually(Duration::from_secs(60), || {
            let programs = table.programs();
            check(programs.len() == count, || format!("{} of {count} filters", programs.len()))
        });
    };
    loads(7 * usize::from(PODS) + 1);
    lab.wait_mirrored(&all);
    let mirror = Capture::start(lab.node(), MIRROR);
    let mut sent = Frames::default();
    for (number, pod) in (0..).zip(&all) {
        for port in ports(number).chain([7]) {
            let frame = datagram(pod, db, port, 0);
            pod.send_frame(&frame);
            sent = if port == 7 { sent } else { sent.with(&frame, 1) };
        }
    }
    shows(&mirror, || sent.clone());
    let status = lab.status();
    for pod in &all {
        let tap = status.tap(pod.veth_host());
        for session in &tap.sessions {
            assert_eq!(session.total("copied"), 1, "{session:?}");
            assert_eq!(session.total("filtered"), session.packets("egress", "filtered"), "{session:?}");
            assert!(session.packets("egress", "filtered") >= 8, "{session:?}");
        }
    }
    mirror.stop().same_as(&sent).unwrap();

    // The filters of a pod are removed with it, and the shared one stays for the others.
    pods.write(&specs(2));
    loads(15);
    pods.write(&specs(1));
    loads(8);
    agent.stop();
    assert_eq!(table.programs().len(), 8, "the mirrors outlive the agent");
    let objects = BpfObjects::of(lab);
    lab.cleanup();
    eventually(SOON, || {
        let remaining = objects.remaining();
        check(remaining == BpfObjects::default(), || format!("still there: {remaining:?}"))
    });
}
