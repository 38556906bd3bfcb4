//! Copies leave the node in a tunnel. The receiver is the kernel's own device for such tunnels, on a directly connected
//! machine.

use std::net::{Ipv4Addr, UdpSocket};

use mirror_tests::{
    Agent, Capture, Conversation, Flood, PodNs, PodSpec, PodsFile, SOON, Status, TapStatus, check, eventually,
};

use crate::{
    Inside, Node, any_mode,
    far::{DEVICE, FAR, Scene, VNI, mirrored, unreached, wait_target, wait_target_of},
    shows,
};

#[test]
fn a_tunnel_brings_every_frame_once_and_unchanged() {
    let scene = Scene::new("tunnel", 9000);
    let Node { web, lab, .. } = &scene.node;
    scene.receiver("vx6", "vxlan id 78 dstport 4789 local fd09::5 nolearning");
    let before = lab.network_state();
    let targets = [
        "--define-target",
        "v4=vxlan:10.9.0.5:4789/vni=77/oversize=segment",
        "--define-target",
        "v6=vxlan:[fd09::5]:4789/vni=78",
    ];
    for (target, device, room) in [("v4", "vx4", 8964), ("v6", "vx6", 8944)] {
        let pods = scene.pods(target);
        let agent = Agent::run_until(lab, any_mode(), &pods, &targets, &[web]);
        let status = wait_target(lab, target, true);
        assert_eq!(status.target(target).device, DEVICE, "both share it");
        agent.wait_for_log(&["the target is up", &format!("\"room\":{room}")]);
        let link = lab.node().ip(&format!("link show {DEVICE}"));
        assert!(link.contains("NOARP") && link.contains("alias podmirror"), "{link}");
        scene.brings_every_frame(&[device], target == "v4");
        agent.stop();
        lab.cleanup();
    }
    lab.network_is_as(&before);
}

/// Each NIC has a key of a range. It keeps the key over a restart, and a free key is given to the next NIC.
#[test]
fn each_nic_has_its_own_key() {
    let scene = Scene::new("tunnel-keys", 1500);
    let Scene { far, node: Node { web, db, lab }, .. } = &scene;
    let third = lab.pod("third", "br0");
    third.ping(db.v4(), 2, 56);
    scene.receiver("vx78", "vxlan id 78 dstport 4789 local 10.9.0.5 nolearning");
    let both = [mirrored(web, "far"), mirrored(db, "far")];
    let all = [&both[..], &[mirrored(&third, "far")]].concat();
    let pods = PodsFile::new(lab, &both);
    let targets = ["--define-target", "far=vxlan:10.9.0.5:4789/vni=77-78"];
    let keys = |status: &Status| {
        let key = |pod: &PodNs| status.tap(pod.veth_host()).sessions[0].tunnel_key;
        [key(web), key(db)]
    };
    let mut agent = Agent::run_until(lab, any_mode(), &pods, &targets, &[web, db]);
    let given = keys(&wait_target_of(lab, "far", true, 2));
    assert!(given == [Some(77), Some(78)] || given == [Some(78), Some(77)], "{given:?}");
    for round in 0..2 {
        let [of_web, of_db] = given.map(|key| if key == Some(77) { "vx4" } else { "vx78" });
        let (by_web, by_db) = (Capture::start(far, of_web), Capture::start(far, of_db));
        let (inside, outside) = (Inside::of(web), Inside::of(db));
        // A packet between the two is copied once, at the sender's tap.
        web.ping(db.v4(), 10, 56);
        third.ping(db.v4(), 7, 56);
        shows(&by_web, || inside.frames().0);
        shows(&by_db, || outside.capture.frames().only(|frame| frame[6..12] != web.eth0().mac));
        agent.stop();
        agent = Agent::run(lab, any_mode(), &pods, &targets);
        agent.wait_for_log(&["the target is up"]);
        assert_eq!(keys(&lab.status()), given, "the same after a restart, round {round}");
    }
    // There is no third key until a pod is deleted.
    pods.write(&all);
    lab.wait_status(|status| {
        let notes = status.notes.clone().unwrap_or_default();
        let why = notes["not_mirrored"].to_string();
        check(
            why.contains("NoRoom") && why.contains("all 2 keys of the target's tunnel, one for each NIC"),
            || why,
        )
    });
    pods.write(&all[1..]);
    let status = lab.wait_status(|status| {
        let has_session = |tap: &TapStatus| tap.device == third.veth_host() && !tap.sessions.is_empty();
        check(status.taps.iter().any(has_session), || "no third session".into())
    });
    assert_eq!(status.tap(third.veth_host()).sessions[0].tunnel_key, given[0], "the key of web is free");
    assert_eq!(status.tap(db.veth_host()).sessions[0].tunnel_key, given[1]);
    agent.stop();
    lab.cleanup();
}

/// Another program uses the port. Only the target reports that; everything else works: the agent is ready, and mirrors
/// to other targets. The other program's device cannot be mirrored into a tunnel.
#[test]
fn a_port_that_is_taken_is_a_reason_of_its_target_alone() {
    let scene = Scene::new("tunnel-taken", 1500);
    let Scene { node: Node { web, db, lab }, .. } = &scene;
    lab.node().ip("link add cni type vxlan id 1 dstport 4789");
    lab.node().ip("link set cni up");
    let pods = PodsFile::new(lab, &[mirrored(web, "far"), PodSpec::of(db).mirror("true")]);
    let agent = Agent::run_until(lab, any_mode(), &pods, &["--define-target", FAR], &[web, db]);
    lab.wait_get("/readyz", 200);
    let status = lab.wait_status(|status| {
        let why = unreached(status);
        check(why.contains("may use port 4789: name another port"), || why)
    });
    assert!(!status.target("far").up);
    let mirror = Capture::start(lab.node(), mirror_tests::MIRROR);
    web.ping(db.v4(), 5, 56);
    eventually(SOON, || check(mirror.frames().len() == 10, || format!("{} of 10", mirror.frames().len())));
    mirror.stop();
    assert!(lab.devices().contains(&"cni".to_owned()) && !lab.devices().contains(&DEVICE.to_owned()));
    agent.stop();
    lab.cleanup();
    // The packets of such a device can carry tunnel addresses of its owner, which the copies would overwrite.
    let exit = lab.agent_exit(&["attach", "cni", "--define-target", FAR, "--target", "far"]);
    assert!(exit.code == Some(1) && exit.stderr.contains("it is a tunnel's device (vxlan)"), "{exit:?}");

    // A device of another program with the tunnel device's name is not changed.
    lab.node().ip("link delete cni");
    lab.node().ip(&format!("link add {DEVICE} type vxlan id 1 dstport 4790"));
    lab.node().ip(&format!("link set {DEVICE} up"));
    let agent = Agent::run(lab, any_mode(), &pods, &["--define-target", FAR]);
    agent.wait_for_log(&["the agent did not create the device"]);
    agent.stop();
    lab.cleanup();
    assert!(lab.devices().contains(&DEVICE.to_owned()));
}

/// Bulk data arrives, because super-frames are segmented. With other options they are cut, and a snap length applies.
/// What was cut is counted.
#[test]
fn a_super_frame_arrives_whole_or_is_counted_as_cut() {
    let scene = Scene::new("tunnel-super", 1500);
    let Scene { far, node: Node { web, db, lab }, .. } = &scene;
    for (option, snaplen) in [("", None), ("/oversize=truncate", None), ("", Some(96))] {
        let pods = scene.pods("far");
        let target = format!("{FAR}{option}");
        let words = ["--define-target", &target, "--snaplen", "96"];
        let agent = Agent::run(lab, any_mode(), &pods, &words[..if snaplen.is_some() { 4 } else { 2 }]);
        lab.wait_mirrored(&[web]);
        wait_target(lab, "far", true);
        let (inside, arrived) = (Inside::of(web), Capture::start(far, "vx4"));
        Conversation::open(web, db, db.v4()).exchange(200_000);
        let lengths =
            |capture: &Capture| capture.in_order().iter().map(|frame| frame.length).collect::<Vec<_>>();
        let room = 1464;
        // The bytes of a pod's packet that must arrive.
        let kept = |length: usize| match (option, snaplen) {
            (_, Some(most)) => length.min(most),
            ("", None) if length > 1514 => length,
            _ => length.min(room),
        };
        let cut = |length: usize| snaplen.is_none().then(|| length - kept(length)).filter(|bytes| *bytes > 0);
        eventually(SOON, || {
            let sent = lengths(&inside.capture);
            // Segments have additional headers of their own.
            let expected: usize = sent.iter().map(|length| kept(*length)).sum();
            let now: usize = lengths(&arrived).iter().sum();
            check(now >= expected, || format!("{now} bytes, not {expected}"))
        });
        let sent = lengths(&inside.capture);
        assert!(sent.iter().any(|length| *length > 2000), "there are super-frames");
        let cuts: Vec<_> = sent.iter().filter_map(|length| cut(*length)).collect();
        let expected = (cuts.len() as u64, cuts.iter().sum::<usize>() as u64);
        assert_eq!(lab.status().tap(web.veth_host()).cut(), expected, "{option} {snaplen:?}");
        assert!(expected.0 > 0 || option.is_empty(), "{sent:?}");
        agent.stop();
        lab.cleanup();
    }
}

/// The link fails and comes back. The pod's traffic is not affected, and each packet is counted.
#[test]
fn copying_goes_on_when_the_way_is_back() {
    let scene = Scene::new("tunnel-down", 1500);
    let Scene { far, node: Node { web, db, lab }, .. } = &scene;
    let pods = scene.pods("far");
    let agent = Agent::run_until(lab, any_mode(), &pods, &["--define-target", FAR], &[web]);
    wait_target(lab, "far", true);
    let flood = Flood::start(web, db);
    let arrives = || {
        let before = far.ip("-s -j link show vx4");
        flood.go_on(50);
        eventually(SOON, || check(far.ip("-s -j link show vx4") != before, || "no copies".into()));
    };
    arrives();
    lab.node().ip("link set up0 down");
    lab.wait_status(|status| {
        let why = unreached(status);
        check(!status.target("far").up && why.contains("no route to 10.9.0.5"), || why)
    });
    flood.go_on(200);
    lab.node().ip("link set up0 up");
    wait_target(lab, "far", true);
    arrives();
    lab.node().ip(&format!("link delete {DEVICE}"));
    eventually(SOON, || check(lab.devices().contains(&DEVICE.to_owned()), || "not made again".into()));
    wait_target(lab, "far", true);
    arrives();
    let rounds = flood.stop();
    let status = lab.status();
    let tap = status.tap(web.veth_host());
    assert!(tap.seen() >= 2 * rounds as u64 && tap.total("target_down") >= 400, "{rounds} rounds: {tap:?}");
    let explained = ["copied", "target_down", "congested"].map(|verdict| tap.total(verdict));
    assert_eq!(explained.iter().sum::<u64>(), tap.seen(), "{tap:?}");
    agent.stop();
    lab.cleanup();
}

/// A mirrored pod can be the receiver of another node's copies. Packets that carry copies to it are recognised by port
/// and VNI, and are not copied to any target. Packets of other tunnels are copied, and so are those that a pod sends:
/// otherwise it could hide its packets this way.
#[test]
fn packets_that_bring_copies_are_not_copied_again() {
    let scene = Scene::new("tunnel-loop", 1500);
    let Scene { node: Node { web, db, lab }, .. } = &scene;
    let web_spec = PodSpec::of(web).mirror("true");
    let agent = Agent::mirroring(lab, any_mode(), &[web_spec], &["--define-target", FAR], &[web]);
    wait_target(lab, "far", true);
    for (vni, from, to, direction, verdict) in [
        (VNI, db, web, "ingress", "loop"),
        (VNI + 1, db, web, "ingress", "copied"),
        (VNI, web, db, "egress", "copied"),
    ] {
        let before = lab.status().tap(web.veth_host()).packets(direction, verdict);
        let header = [[8, 0, 0, 0], (vni << 8).to_be_bytes()].concat();
        from.netns().enter(|| {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
            socket.send_to(&[&header[..], &[7; 100]].concat(), (to.v4(), 4789)).unwrap();
        });
        lab.wait_status(|status| {
            let tap = status.tap(web.veth_host());
            check(tap.packets(direction, verdict) > before, || format!("not {verdict}: {tap:?}"))
        });
    }
    agent.stop();
    lab.cleanup();
}
