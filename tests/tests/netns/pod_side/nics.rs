//! Kinds of NICs without a peer on the node, and pods with several of them. Not every kernel has all kinds.

use std::time::Duration;

use mirror_tests::{
    Agent, AttachMode, Capture, Conversation, Frame, Frames, Lab, Netns, Nic, PodNs, PodSpec, PodsFile, SOON,
    check, eventually, has_kind,
};
use serde_json::Value;

use super::{
    MACVLAN, Scene, a_pod_is_mirrored, has_exit, sent, switch, talk, talk_in_frames,
    two_pods_are_mirrored_once, up, wait_tapped,
};
use crate::{
    Inside, MIRROR, any_mode,
    coverage::{CLEAR, FEW_READINGS, reasons, wait_states},
    shows,
};

in_both_modes!(
    an_ipvlan_pod_is_mirrored,
    an_ipvlan_l3_pod_is_mirrored,
    two_mirrored_ipvlan_l3_pods_are_mirrored_once,
    two_mirrored_macvlan_vepa_pods_are_mirrored_once,
    a_device_without_an_end_anywhere_is_mirrored_where_it_is_named,
);

/// A host outside the node, and the node's address in its network.
const OUTSIDE: &str = "10.9.0.2";
const NODE: &str = "10.9.0.1";

/// Pods whose NICs send each frame to the switch at the other end of the link, even one for another NIC over the same
/// device. The switch sends it back.
fn behind_a_switch(story: &str) -> Scene {
    let lab = Lab::new(story);
    up(&lab, "up0", "up1");
    lab.bridge("hairpin");
    lab.node().ip("link set up1 master hairpin");
    lab.node().ip("link set up1 type bridge_slave hairpin on");
    Scene::over(lab, "macvlan mode vepa", "up0")
}

/// Sends packets of all kinds, and non-IP frames.
pub(super) fn talk_in_all_ways(web: &PodNs, db: &PodNs) {
    talk(web, db);
    talk_in_frames(web);
    talk_in_frames(db);
}

fn two_mirrored_macvlan_vepa_pods_are_mirrored_once(mode: AttachMode) {
    two_pods_are_mirrored_once(&behind_a_switch("vepas"), mode);
}

/// Pods with ipvlans in a routing mode, and a host outside. `None`: the kernel has no ipvlan.
fn routed(story: &str, mode: &str) -> Option<(Scene, Netns)> {
    let lab = Lab::new(story);
    if !has_kind(&lab, "ipvlan") {
        return None;
    }
    let outside = Netns::new(&format!("{}-outside", lab.node().name()));
    outside.keep_quiet();
    lab.node().ip(&format!("link add up0 type veth peer name up1 netns {}", outside.name()));
    for (netns, device, address) in [(lab.node(), "up0", NODE), (&outside, "up1", OUTSIDE)] {
        netns.sysctl(&format!("ipv6/conf/{device}/disable_ipv6"), "1");
        netns.ip(&format!("link set {device} up"));
        netns.ip(&format!("address add {address}/24 dev {device}"));
    }
    outside.ip(&format!("route add 10.0.0.0/24 via {NODE}"));
    let scene = Scene::over(lab, &format!("ipvlan mode {mode}"), "up0");
    for pod in [&scene.web, &scene.db] {
        pod.netns().ip("route add 10.9.0.0/24 dev eth0");
    }
    Some((scene, outside))
}

fn an_ipvlan_pod_is_mirrored(mode: AttachMode) {
    let lab = Lab::new("ipvlan-l2");
    if !has_kind(&lab, "ipvlan") {
        return;
    }
    up(&lab, "up0", "up1");
    a_pod_is_mirrored(&Scene::over(lab, "ipvlan mode l2", "up0"), mode, |web, db| {
        web.ping(db.v4(), 5, 56);
        db.ping(web.v6(), 5, 1400);
        web.udp_echo(db, db.v4(), &[0, 1400, 9000]);
        Conversation::open(web, db, db.v4()).exchange(100_000);
        talk_in_frames(web);
        talk_in_frames(db);
    });
}

fn an_ipvlan_l3_pod_is_mirrored(mode: AttachMode) {
    let Some((scene, outside)) = routed("ipvlan-l3", "l3") else { return };
    a_pod_is_mirrored(&scene, mode, |web, db| {
        talk(web, db);
        outside.ping_every(Duration::from_millis(2), web.v4(), 5, 1400);
        web.ping(OUTSIDE.parse().unwrap(), 5, 56);
        Conversation::between(&outside, web.netns(), web.v4()).exchange(100_000);
    });
}

fn two_mirrored_ipvlan_l3_pods_are_mirrored_once(mode: AttachMode) {
    let Some((Scene { web, db, lab }, outside)) = routed("ipvlans-l3", "l3") else { return };
    let pods = PodsFile::new(&lab, &[&web, &db].map(|pod| PodSpec::of(pod).mirror("true")));
    let _agent = Agent::run(&lab, mode, &pods, &[]);
    wait_tapped(&lab, &[&web, &db]);
    let inside = [&web, &db].map(|pod| Capture::start(pod.netns(), "eth0"));
    let mirror = Capture::start(lab.node(), MIRROR);
    talk(&web, &db);
    let interval = Duration::from_millis(2);
    outside.ping_every(interval, web.v4(), 5, 56);
    let of_both = || {
        let from_outside = |frame: &[u8]| frame[12..14] == [8, 0] && frame[26..30] == [10, 9, 0, 2];
        let sent_by = |pod: &PodNs, capture: &Capture| sent(pod.eth0(), &capture.frames());
        sent_by(&web, &inside[0]).and(&sent_by(&db, &inside[1])).and(&inside[0].frames().only(from_outside))
    };
    shows(&mirror, of_both);
}

/// The kernel hands these packets to the pod's IP layer: they pass no hook of the NIC, and no packet socket sees them
/// there. The NIC counts them.
#[test]
fn what_reaches_an_ipvlan_l3s_pod_from_outside_is_told_as_missing() {
    let Some((scene, outside)) = routed("ipvlan-l3s", "l3s") else { return };
    let Scene { web, db, lab } = &scene;
    let pods = scene.pods_file(&[web]);
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    wait_tapped(lab, &[web]);
    let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), MIRROR));
    talk(web, db);
    shows(&mirror, || inside.capture.frames());
    // Everything was seen so far. The next packet could come from outside, so coverage is not claimed.
    let is_doubt = |told: &Value| {
        told["ingress"]["message"].as_str().unwrap().contains("but the NIC is an ipvlan in mode l3s")
    };
    let none_missing = |deadline| {
        eventually(deadline, || {
            let told = wait_states(lab, web, deadline, ["Unknown", "Covered"], || web.ping(db.v4(), 5, 56));
            check(is_doubt(&told), || format!("{told}"))
        });
        assert_eq!(reasons(lab), []);
    };
    none_missing(FEW_READINGS);

    let knock = || outside.ping_every(Duration::from_millis(2), web.v4(), 5, 56);
    let told = wait_states(lab, web, FEW_READINGS, ["Bypassed", "Covered"], knock);
    assert!(told["ingress"]["message"].as_str().unwrap().contains("mode l3s"), "{told}");
    eventually(FEW_READINGS, || {
        let reasons = reasons(lab);
        let is_told = matches!(&reasons[..], [(reason, remedy)] if reason == "Bypassed" && remedy.contains("mode l2 or l3"));
        check(is_told, || format!("{reasons:?}"))
    });
    agent.wait_for_log(&["partly mirrored", "\"Bypassed\"", "mode l3s"]);
    let words = lab.agent_exit(&["explain", "--pod", "default/web"]).stdout;
    assert!(words.contains("Coverage of what reaches the pod: Bypassed") && words.contains("l3s"), "{words}");
    // The answers are copied, and nothing else is missing.
    shows(&mirror, || inside.capture.frames());
    let from_outside = |frame: &[u8]| frame[12..14] == [8, 0] && frame[26..30] == [10, 9, 0, 2];
    assert!(mirror.frames().only(from_outside).is_empty());
    let to_outside = |frame: &[u8]| frame[12..14] == [8, 0] && frame[30..34] == [10, 9, 0, 2];
    assert!(mirror.frames().only(to_outside).len() >= 5, "{}", mirror.frames());

    // No more such packets arrive.
    none_missing(CLEAR);
    eventually(FEW_READINGS, || check(reasons(lab).is_empty(), || format!("{:?}", reasons(lab))));
    agent.stop();
}

/// A dummy represents a VF: it has no lower device, and nothing on the node leads to it. The pod connects it with a
/// veth pair by its own filters, which stay.
fn a_device_without_an_end_anywhere_is_mirrored_where_it_is_named(mode: AttachMode) {
    let lab = Lab::new("vf");
    if !has_kind(&lab, "dummy") {
        return;
    }
    lab.bridge("br0");
    let (web, outside) = (lab.pod("web", "br0"), Netns::new(&format!("{}-outside", lab.node().name())));
    outside.keep_quiet();
    let inside = web.netns();
    inside.ip("link add vf0 address 02:00:00:00:07:01 type dummy");
    // With another address, the end of the veth pair would treat the packets as another host's.
    inside.ip(&format!(
        "link add cable address 02:00:00:00:07:01 type veth peer name far address 02:00:00:00:07:02 netns {}",
        outside.name()
    ));
    inside.sysctl("ipv6/conf/cable/disable_ipv6", "1");
    inside.ip("link set vf0 arp on up");
    inside.ip("link set cable up");
    outside.ip("link set far up");
    for (netns, device, number) in [(inside, "vf0", 1), (&outside, "far", 2)] {
        netns.keep_neighbours(device);
        netns.ip(&format!("address add 10.7.0.{number}/24 dev {device}"));
        netns.ip(&format!("address add fd07::{number}/64 dev {device} nodad"));
    }
    for (device, hook, to) in
        [("vf0", "egress", "egress redirect dev cable"), ("cable", "ingress", "ingress redirect dev vf0")]
    {
        inside.tc(&format!("qdisc add dev {device} clsact"));
        inside.tc(&format!(
            "filter add dev {device} {hook} pref 49 protocol all u32 match u32 0 0 action mirred {to}"
        ));
    }
    let state = || {
        let filters = ["ingress", "egress"].map(|hook| inside.tc(&format!("filter show dev vf0 {hook}")));
        (lab.network_state(), inside.devices(), filters.map(|text| text.matches("mirred").count()))
    };
    let before = state();

    let spec = || PodSpec::of(&web).mirror("true");
    let pods = PodsFile::new(&lab, &[spec()]);
    let agent = Agent::run(&lab, mode, &pods, &[]);
    agent.wait_for_log(&["not mirrored", "vf0", "has no veth peer on the node"]);
    lab.wait_taps(&[web.veth_host()]);
    pods.write(&[spec().annotated("podmirror.io/nics", "vf0")]);
    lab.wait_taps(&["vf0"]);
    wait_tapped(&lab, &[&web]);
    let (far, mirror) = (Capture::start(&outside, "far"), Capture::start(lab.node(), MIRROR));
    let interval = Duration::from_millis(2);
    for (from, to) in [(inside, ["10.7.0.2", "fd07::2"]), (&outside, ["10.7.0.1", "fd07::1"])] {
        let other = if std::ptr::eq(from, inside) { &outside } else { inside };
        for to in to.map(|to| to.parse().unwrap()) {
            from.ping_every(interval, to, 5, 1400);
            Conversation::between(from, other, to).exchange(100_000);
        }
    }
    let frame = |from, number| Frame::new(Frame::BROADCAST, from).vlan(5).filled(700, number).bytes();
    inside.send_frame("vf0", &frame([2, 0, 0, 0, 7, 1], 1));
    outside.send_frame("far", &frame([2, 0, 0, 0, 7, 2], 2));
    shows(&mirror, || far.frames());
    let (out, all) = (far.frames().only(|frame| frame[6..12] == [2, 0, 0, 0, 7, 1]), far.frames());
    let counted = [("egress copied", out.len()), ("ingress copied", all.len() - out.len())];
    let counted = counted.map(|(what, frames)| (what.to_owned(), frames as u64)).into();
    lab.wait_status(|status| {
        let verdicts = status.tap("vf0").verdicts();
        check(verdicts == counted, || format!("{verdicts:?} instead of {counted:?}"))
    });

    pods.write(&[PodSpec::of(&web)]);
    lab.wait_taps(&[]);
    eventually(SOON, || check(!has_exit(&web), || "the exit is left".to_owned()));
    inside.ping_every(interval, "10.7.0.2".parse().unwrap(), 3, 56);
    agent.stop();
    lab.cleanup();
    assert_eq!(state(), before);
}

/// A pod with NICs of all kinds, each in a network of its own, as Multus creates it: each has its tap, on the node side
/// or inside, and its own counters.
#[test]
fn each_of_many_nics_is_mirrored() {
    let lab = Lab::new("many-nics");
    for bridge in ["br0", "br1", "hairpin"] {
        lab.bridge(bridge);
    }
    for (device, peer) in [("up0", "up1"), ("up2", "up3"), ("up4", "up5")] {
        up(&lab, device, peer);
    }
    lab.node().ip("link set up3 master hairpin");
    lab.node().ip("link set up3 type bridge_slave hairpin on");
    let switch = switch(&lab);
    let (has_ipvlan, has_netkit) = (has_kind(&lab, "ipvlan"), has_kind(&lab, "netkit"));
    let [web, db] = ["web", "db"].map(|name| {
        let mut pod = lab.pod(name, "br0");
        pod.add_nic_over(&lab, MACVLAN, "up0");
        pod.add_nic_over(&lab, "macvlan mode vepa", "up2");
        pod.add_nic_elsewhere(&lab, &switch, "br0");
        if has_ipvlan {
            pod.add_nic_over(&lab, "ipvlan mode l2", "up4");
        }
        if has_netkit {
            pod.add_netkit_nic(&lab, "br1");
        }
        pod
    });
    let nics = || web.nics().iter().zip(db.nics());
    let names = web.nics().iter().map(|nic| nic.name.as_str()).collect::<Vec<_>>().join(",");
    let spec = || PodSpec::of(&web).mirror("true").annotated("podmirror.io/nics", &names);
    let state = || (lab.network_state(), web.netns().devices());
    let before = state();
    let pods = PodsFile::new(&lab, &[spec(), PodSpec::of(&db)]);
    let agent = Agent::run(&lab, any_mode(), &pods, &[]);
    let devices: Vec<_> = web.nics().iter().map(|nic| nic.host.as_str()).collect();
    lab.wait_taps(&devices);
    let inside: Vec<_> = web.nics().iter().map(|nic| Capture::start(web.netns(), &nic.name)).collect();
    let mirror = Capture::start(lab.node(), MIRROR);
    for (of_web, of_db) in nics() {
        let is_one_of_many = of_web.mac == of_db.mac;
        for (there, back) in [(of_db.v4.into(), of_web.v4.into()), (of_db.v6.into(), of_web.v6.into())] {
            web.ping(there, 5, 56);
            db.ping(back, 5, 1400);
            Conversation::open(&web, &db, there).exchange(100_000);
        }
        // Frames of an ipvlan do not show their sender.
        if !is_one_of_many {
            web.netns().send_frame(&of_web.name, &broadcast(of_web));
            db.netns().send_frame(&of_db.name, &broadcast(of_db));
        }
    }
    let all = || inside.iter().fold(Frames::default(), |all, capture| all.and(&capture.frames()));
    shows(&mirror, all);
    for ((of_web, of_db), capture) in nics().zip(&inside) {
        let frames = capture.frames();
        let out = if of_web.mac == of_db.mac {
            sent(of_web, &frames)
        } else {
            frames.only(|frame| frame[6..12] == of_web.mac)
        };
        let counted = [("egress copied", out.len()), ("ingress copied", frames.len() - out.len())];
        let counted = counted.map(|(what, frames)| (what.to_owned(), frames as u64)).into();
        lab.wait_status(|status| {
            let verdicts = status.tap(&of_web.host).verdicts();
            check(verdicts == counted, || format!("{}: {verdicts:?} instead of {counted:?}", of_web.name))
        });
    }

    // Without the annotation, all NICs except the one that bypasses the node.
    pods.write(&[PodSpec::of(&web).mirror("true"), PodSpec::of(&db)]);
    let past = web.nics()[3].host.as_str();
    lab.wait_taps(&devices.iter().copied().filter(|device| *device != past).collect::<Vec<_>>());
    pods.write(&[PodSpec::of(&web), PodSpec::of(&db)]);
    lab.wait_taps(&[]);
    eventually(SOON, || check(!has_exit(&web), || "the exit is left".to_owned()));
    agent.stop();
    lab.cleanup();
    assert_eq!(state(), before);
}

fn broadcast(nic: &Nic) -> Vec<u8> {
    Frame::new(Frame::BROADCAST, nic.mac).filled(300, usize::from(nic.mac[5])).bytes()
}
