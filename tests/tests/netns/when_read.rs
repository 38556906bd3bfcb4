//! `--when-read`: copies are made only while a program reads the mirror interface.

use std::time::{Duration, Instant};

use mirror_tests::{
    Agent, Capture, Frames, Lab, PodNs, PodSpec, PodsFile, SOON, Status, TapStatus, check, eventually, scaled,
};

use crate::{Inside, MIRROR, Node, any_mode, pod_side::up, shows};

const WHEN_READ: &[&str] = &["--when-read"];

/// Number of a pod's copies, and of its packets that had no reader.
fn counted(lab: &Lab, pod: &PodNs) -> [u64; 2] {
    let status = lab.status();
    let of_pod = |tap: &&TapStatus| tap.pod.as_ref().is_some_and(|of| of.name == pod.name());
    let tap = status.taps.iter().find(of_pod).unwrap();
    ["copied", "unread"].map(|verdict| tap.total(verdict))
}

/// Waits until a ping changes one count and not the other.
#[track_caller]
fn wait_for(node: &Node, grows: usize) {
    eventually(SOON, || {
        let before = counted(&node.lab, &node.web);
        node.web.ping(node.db.v4(), 1, 56);
        let after = counted(&node.lab, &node.web);
        let [grown, other] = [grows, 1 - grows].map(|of| after[of] - before[of]);
        check(grown >= 2 && other == 0, || format!("{before:?}, then {after:?}"))
    });
}

const COPIED: usize = 0;
const UNREAD: usize = 1;

/// A capture that the agent has found, and the frames in it so far.
fn reader(node: &Node, device: &str) -> (Capture, Frames) {
    let capture = Capture::start(node.lab.node(), device);
    wait_for(node, COPIED);
    let before = capture.frames();
    (capture, before)
}

/// Checks that all later packets of the pod are on the mirror interface, each once.
#[track_caller]
fn is_read((capture, before): &(Capture, Frames), node: &Node) {
    let Node { web, db, .. } = node;
    let inside = Inside::of(web);
    // Longer than the agent waits for a reader to come back.
    let begun = Instant::now();
    while begun.elapsed() < scaled(Duration::from_secs(2)) {
        web.ping(db.v4(), 5, 56);
    }
    web.udp_echo(db, db.v4(), &[0, 1472, 9000]);
    let all = || {
        let (sent, received) = inside.frames();
        before.and(&sent).and(&received)
    };
    // Copies of packets from just before the start of the pod's capture can arrive late; a ping ends only after its
    // answer.
    shows(capture, all);
}

#[test]
fn copies_are_made_for_readers_alone() {
    let node = Node::bridged("when-read");
    let Node { web, db, lab } = &node;
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let agent = Agent::run(lab, any_mode(), &pods, WHEN_READ);
    let status = lab.wait_mirrored(&[web]);
    assert!(status.mirror().when_read);
    wait_for(&node, UNREAD);

    // An agent that is late makes copies for a moment. Each packet is counted once in any case.
    eventually(SOON, || {
        let before = counted(lab, web);
        web.ping(db.v4(), 20, 56);
        let [copied, unread] = counted(lab, web);
        let [copied, unread] = [copied - before[COPIED], unread - before[UNREAD]];
        assert!(copied + unread >= 40, "{copied} and {unread}");
        check(copied == 0 && unread == 40, || format!("{copied} and {unread} of 40"))
    });
    let table = lab.agent_exit(&["status"]).stdout;
    assert!(table.contains("copies only while a program reads it"), "{table}");
    let pod = format!("default/{}", web.name());
    let words = lab.agent_exit(&["explain", "--pod", &pod]).stdout;
    assert!(words.contains("No program read the mirror interface"), "{words}");

    // A capture on the device, on the other end of a veth that replaces a dummy device, and on all devices.
    let ends = lab.devices().into_iter().filter(|name| name.starts_with(MIRROR));
    for device in ends.collect::<Vec<_>>() {
        let reader = reader(&node, &device);
        is_read(&reader, &node);
        reader.0.stop();
        wait_for(&node, UNREAD);
    }
    let any = Capture::start(lab.node(), "any");
    wait_for(&node, COPIED);
    any.stop();
    wait_for(&node, UNREAD);

    // One of two readers ends.
    let (first, second) = (reader(&node, MIRROR), reader(&node, MIRROR));
    first.0.stop();
    is_read(&(second.0, second.1), &node);
    agent.stop();
    lab.cleanup();
}

#[test]
fn without_an_agent_copies_are_made() {
    let node = Node::routed("unread-alone");
    let Node { web, lab, .. } = &node;
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let agent = Agent::run_until(lab, any_mode(), &pods, WHEN_READ, &[web]);
    wait_for(&node, UNREAD);
    agent.meanwhile_paused(|| wait_for(&node, COPIED));
    wait_for(&node, UNREAD);
    agent.kill();
    wait_for(&node, COPIED);

    // The next agent finds the target unchanged, and looks for readers.
    let agent = Agent::run_until(lab, any_mode(), &pods, WHEN_READ, &[web]);
    wait_for(&node, UNREAD);
    agent.stop();
    // An agent without the flag does not.
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_status(|status| check(!status.mirror().when_read, || format!("{status:?}")));
    wait_for(&node, COPIED);
    let reading = Capture::start(lab.node(), MIRROR);
    let before = reading.frames();
    is_read(&(reading, before), &node);
    agent.stop();
    lab.cleanup();
}

#[test]
fn a_tap_inside_a_pod_waits_for_readers_too() {
    let lab = Lab::new("unread-inside");
    up(&lab, "up0", "up1");
    let pod = |name| lab.pod_over(name, "macvlan mode bridge", "up0");
    let node = Node { web: pod("web"), db: pod("db"), lab };
    let Node { web, lab, .. } = &node;
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let agent = Agent::run(lab, any_mode(), &pods, WHEN_READ);
    let is_tapped =
        |status: &Status| check(status.taps.iter().any(TapStatus::is_attached), || format!("{status:?}"));
    assert!(lab.wait_status(is_tapped).taps[0].inside);
    wait_for(&node, UNREAD);
    is_read(&reader(&node, MIRROR), &node);
    wait_for(&node, UNREAD);
    agent.stop();
    lab.cleanup();
}

#[test]
fn a_mirror_interface_that_is_made_again_is_looked_after() {
    let node = Node::bridged("unread-again");
    let Node { web, lab, .. } = &node;
    let _agent = Agent::mirroring(lab, any_mode(), &[PodSpec::of(web).mirror("true")], WHEN_READ, &[web]);
    wait_for(&node, UNREAD);
    let before = lab.ifindex(MIRROR);
    lab.node().ip(&format!("link delete {MIRROR}"));
    lab.wait_status(|status| {
        let now = status.mirror().ifindex;
        check(now.is_some_and(|now| now != before) && status.mirror().when_read, || format!("{status:?}"))
    });
    wait_for(&node, UNREAD);
    is_read(&reader(&node, MIRROR), &node);
}
