//! The mirror interface is created or already exists, is refused, down, deleted or renamed. The pods' packets are not
//! disturbed.

use mirror_core::model::FIRST_IFINDEX;
use mirror_tests::{
    Agent, Capture, Flood, Frames, Lab, PodNs, PodSpec, PodsFile, SOON, Status, check, eventually,
};

use crate::{Inside, MIRROR, Node, any_mode, shows};

/// The output of `ip` for a device of the node, as JSON.
fn device(lab: &Lab, name: &str) -> serde_json::Value {
    let devices: serde_json::Value =
        serde_json::from_str(&lab.node().ip(&format!("-j -d -s link show {name}"))).unwrap();
    devices[0].clone()
}

/// The number of packets that a device has received and sent.
pub(crate) fn packets(lab: &Lab, name: &str) -> u64 {
    let device = device(lab, name);
    ["rx", "tx"].iter().map(|side| device["stats64"][side]["packets"].as_u64().unwrap()).sum()
}

/// An agent was killed between the requests that create the device. `cleanup` removes it, and an agent completes it.
#[test]
fn a_half_made_mirror_interface_is_made_again() {
    let Node { web, db, lab } = &Node::bridged("half");
    let before = lab.network_state();
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let half_made = || {
        let [index, peer] = [7, 8].map(|number| FIRST_IFINDEX.0 + number);
        lab.node().ip(&format!(
            "link add {MIRROR} index {index} mtu 1279 type veth peer name {MIRROR}p index {peer}"
        ));
    };
    half_made();
    let agent = Agent::run_until(lab, any_mode(), &pods, &[], &[web]);
    let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), MIRROR));
    web.ping(db.v4(), 5, 1400);
    shows(&mirror, || inside.capture.frames());
    assert_eq!(device(lab, MIRROR)["ifalias"].as_str(), Some("podmirror"));
    agent.stop();

    lab.node().ip(&format!("link delete {MIRROR}"));
    half_made();
    drop((inside, mirror));
    lab.cleanup();
    lab.network_is_as(&before);
}

#[test]
fn the_mtu_of_a_made_mirror_interface_is_as_told() {
    let Node { web, db: _db, lab } = &Node::bridged("mtu");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let _agent =
        Agent::run(lab, any_mode(), &pods, &["--mirror-iface", "tap-here", "--mirror-iface-mtu", "9000"]);
    lab.wait_mirrored(&[web]);
    assert_eq!(device(lab, "tap-here")["mtu"].as_u64(), Some(9000));
}

#[test]
fn a_device_that_exists_is_used_and_left_as_it_is() {
    let Node { web, db, lab } = &Node::bridged("found");
    lab.node().ip("link add cap0 mtu 4000 type veth peer name cap1");
    lab.node().ip("link set cap1 up");
    lab.node().ip("address add 192.0.2.1/24 dev cap0");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let agent = Agent::run_until(lab, any_mode(), &pods, &["--mirror-iface", "cap0"], &[web]);
    let settings = |lab: &Lab| {
        let mut cap0 = device(lab, "cap0");
        cap0.as_object_mut().unwrap().remove("stats64");
        (cap0, lab.node().ip("address show dev cap0"))
    };
    let used = settings(lab);
    assert_eq!(used.0["mtu"].as_u64(), Some(4000));
    assert!(used.0["ifalias"].is_null() && used.0["master"].is_null(), "{}", used.0);
    let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), "cap0"));
    web.ping(db.v4(), 5, 56);
    shows(&mirror, || inside.capture.frames());
    mirror.stop();
    agent.stop();
    lab.cleanup();
    assert_eq!(settings(lab), used, "still there, and as it was");
}

/// A device that accepts a copy and drops it later need not return an error, but counts the drop.
#[test]
fn what_the_mirror_interface_drops_is_told() {
    let Node { web, db, lab } = &Node::bridged("dropping");
    lab.node().ip("link add cap0 mtu 4000 type veth peer name cap1 mtu 600");
    lab.node().ip("link set cap1 up");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let agent = Agent::run(lab, any_mode(), &pods, &["--mirror-iface", "cap0"]);
    let told = |status: &Status| {
        let series = "podmirror_target_dropped_frames_total{destination=\"cap0\",target=\"default\"}";
        (status.mirror().dropped, lab.metrics()[series])
    };
    assert_eq!(told(&lab.wait_mirrored(&[web])), (Some(0), 0.0));
    assert!(!lab.agent_exit(&["status"]).stdout.contains("dropped"));

    let (inside, arrived) = (Inside::of(web), Capture::start(lab.node(), "cap1"));
    web.ping(db.v4(), 3, 1000);
    web.ping(db.v4(), 5, 56);
    let that_fit = |frames: &Frames| frames.only(|frame| frame.len() < 600);
    shows(&arrived, || that_fit(&inside.capture.frames()));
    let (sent, received) = inside.stop();
    let all = sent.and(&received);
    arrived.stop().same_as(&that_fit(&all)).unwrap();
    let status = lab.status();
    assert_eq!(all.len() - that_fit(&all).len(), 6, "three pings of 1000 bytes and their answers");
    assert_eq!(told(&status), (Some(6), 6.0));
    // Newer kernels return an error when a veth drops a copy.
    let tap = status.tap(web.veth_host());
    let counted = (tap.total("copied"), tap.total("congested"));
    let dropped = if counted.1 == 0 { 0 } else { 6 };
    assert_eq!(counted, (all.len() as u64 - dropped, dropped));
    let line = format!("cap0 (up, ifindex {}, frames dropped by the device: 6)", lab.ifindex("cap0"));
    let table = lab.agent_exit(&["status"]).stdout;
    assert!(table.contains(&line), "{table}");
    agent.stop();
    let last = lab.status();
    assert_eq!(last.mirror().dropped, Some(6), "also without an agent");
}

#[test]
fn devices_that_would_bring_copies_back_are_refused() {
    let Node { web, db: _db, lab } = &Node::bridged("refused");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let tap = web.veth_host();
    lab.node().ip("link add ifb9 type ifb");
    lab.node().ip("link add one type veth peer name two");
    let before = lab.network_state();
    let run = |mirror| vec!["run", "--pods-from", pods.path(), "--mirror-iface", mirror];
    let attach = |device, mirror| vec!["attach", device, "--mirror-iface", mirror];
    for (arguments, named) in [
        (run("lo"), "lo cannot be the mirror interface"),
        (run("ifb9"), "ifb9 cannot be the mirror interface"),
        (run("br0"), tap),
        (run(tap), tap),
        (attach(tap, "lo"), "lo cannot be the mirror interface"),
        (attach(tap, "br0"), tap),
        (attach("one", "one"), "one is the mirror interface itself"),
        (attach("one", "two"), "the other end of one's veth"),
    ] {
        let exit = lab.agent_exit(&arguments);
        assert_eq!(exit.code, Some(1), "{arguments:?}: {exit:?}");
        assert!(exit.stderr.contains(named) && !exit.stderr.contains("panicked"), "{arguments:?}: {exit:?}");
        lab.network_is_as(&before);
    }
}

/// Checks that every packet of the pod since `before` is counted once, and at least `unreached` of them did not find the
/// mirror interface. The flood has had `rounds` of a datagram and its answer.
#[track_caller]
fn each_is_counted(lab: &Lab, web: &PodNs, before: u64, rounds: usize, unreached: u64) {
    let passed = packets(lab, web.veth_host()) - before;
    assert!(passed >= 2 * rounds as u64, "{passed} packets in {rounds} rounds");
    let status = lab.status();
    let tap = status.tap(web.veth_host());
    assert_eq!(tap.seen(), passed, "{tap:?}");
    assert_eq!(tap.total("copied") + tap.total("target_down") + tap.total("congested"), passed, "{tap:?}");
    assert!(tap.total("target_down") >= unreached, "{tap:?}");
}

/// Waits until the status shows the mirror interface as up or as down.
fn wait_mirror(lab: &Lab, up: bool) {
    lab.wait_status(|status| {
        check(status.mirror().up == up, || format!("the mirror interface is not up: {up}"))
    });
}

/// Waits until copies arrive on the mirror interface again, by its own counters: a capture of a flood would lose some.
fn copies_go_on(lab: &Lab, flood: &Flood, mirror: &str) {
    let before = packets(lab, mirror);
    flood.go_on(10);
    eventually(SOON, || {
        check(packets(lab, mirror) >= before + 20, || "no copies on the mirror interface".into())
    });
}

#[test]
fn no_packet_is_lost_while_the_mirror_interface_goes_down_and_up() {
    let Node { web, db, lab } = &Node::bridged("down-up");
    let _agent = Agent::mirroring(lab, any_mode(), &[PodSpec::of(web).mirror("true")], &[], &[web]);
    let before = packets(lab, web.veth_host());
    let flood = Flood::start(web, db);
    copies_go_on(lab, &flood, MIRROR);
    lab.node().ip(&format!("link set {MIRROR} down"));
    wait_mirror(lab, false);
    flood.go_on(300);
    lab.node().ip(&format!("link set {MIRROR} up"));
    wait_mirror(lab, true);
    copies_go_on(lab, &flood, MIRROR);
    each_is_counted(lab, web, before, flood.stop(), 400);
}

#[test]
fn no_packet_is_lost_while_the_mirror_interface_is_deleted() {
    let Node { web, db, lab } = &Node::bridged("deleted");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    let made = lab.wait_mirrored(&[web]).mirror().ifindex;
    agent.stop();
    // The next agent knows the device as its own.
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    agent.wait_for_log(&["the mirror interface is up"]);
    assert_eq!(lab.wait_mirrored(&[web]).mirror().ifindex, made);
    let before = packets(lab, web.veth_host());
    let flood = Flood::start(web, db);
    for _ in 0..5 {
        let old = lab.ifindex(MIRROR);
        lab.node().ip(&format!("link delete {MIRROR}"));
        lab.wait_status(|status| {
            let again = status.mirror().up && status.mirror().ifindex.is_some_and(|ifindex| ifindex != old);
            check(again, || "the mirror interface is not made again".into())
        });
        copies_go_on(lab, &flood, MIRROR);
    }
    // Without an agent it is not created again.
    agent.kill();
    lab.node().ip(&format!("link delete {MIRROR}"));
    flood.go_on(300);
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    agent.wait_for_log(&["the mirror interface is up"]);
    copies_go_on(lab, &flood, MIRROR);
    each_is_counted(lab, web, before, flood.stop(), 500);
}

#[test]
fn no_packet_is_lost_while_the_mirror_interface_is_renamed() {
    let Node { web, db, lab } = &Node::bridged("renamed");
    lab.node().ip("link add cap0 mtu 65535 type veth peer name cap1 mtu 65535");
    lab.node().ip("link set cap1 up");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let _agent = Agent::run_until(lab, any_mode(), &pods, &["--mirror-iface", "cap0"], &[web]);
    let before = packets(lab, web.veth_host());
    let flood = Flood::start(web, db);
    flood.go_on(100);
    lab.node().ip("link set cap0 down");
    lab.node().ip("link set cap0 name other");
    lab.node().ip("link set other up");
    let status = lab
        .wait_status(|status| check(status.mirror().ifindex.is_none(), || "the name is still known".into()));
    assert!(!status.mirror().up);
    // A renamed device is no longer the mirror interface, although its index is the same: nothing is copied to it.
    let before_other = packets(lab, "other");
    flood.go_on(300);
    assert_eq!(packets(lab, "other"), before_other);
    lab.node().ip("link set other down");
    lab.node().ip("link set other name cap0");
    lab.node().ip("link set cap0 up");
    wait_mirror(lab, true);
    copies_go_on(lab, &flood, "cap0");
    each_is_counted(lab, web, before, flood.stop(), 600);
}

/// Root in a pod can give its NICs the agent's alias. The kernel moves a physical NIC to the node when the pod ends,
/// and the CNI plugin host-device does so with others. The story uses a bridge instead, because it is not deleted with
/// a pod.
#[test]
fn devices_of_others_with_our_alias_stay_and_keep_nobody_from_working() {
    let Node { web, db, lab } = &Node::bridged("alias");
    for add in ["nic0 type bridge", "nic1 type veth peer name nic2"] {
        lab.node().ip(&format!("link add {add}"));
    }
    for of in ["nic0", "nic1"] {
        lab.node().ip(&format!("link set {of} up alias podmirror"));
    }
    lab.node().ip("link set nic2 up");
    let before = lab.network_state();
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    let status = lab.wait_mirrored(&[web]);
    web.ping(db.v4(), 5, 56);
    assert!(lab.status().tap(web.veth_host()).total("copied") >= 10);
    lab.wait_get("/readyz", 200);
    assert_eq!(status.notes.unwrap()["failures"], serde_json::json!([]));
    agent.stop();
    lab.cleanup();
    lab.network_is_as(&before);
}
