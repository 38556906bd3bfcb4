//! Copies leave the node in a tunnel. The receiver is the kernel's own VXLAN device, on a machine at the other end of a
//! cable.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, UdpSocket},
};

use mirror_tests::{
    Agent, AttachMode, Capture, Conversation, Flood, Lab, Netns, PodSpec, PodsFile, SOON, Status, Tail,
    check, eventually,
};

use crate::{Inside, Node, any_mode, shows};

in_both_modes!(a_tunnel_brings_every_frame_once_and_unchanged);

const VNI: u32 = 77;
const DEVICE: &str = "pm-vxlan4789";

/// A node with a cable to another machine, which has a VXLAN device for each family of addresses.
struct Scene {
    far: Netns,
    node: Node,
}

impl Scene {
    fn new(story: &str, mtu: u32) -> Self {
        let node = Node::bridged(story);
        let near = node.lab.node();
        let far = Netns::new(&format!("{}-far", near.name()));
        far.keep_quiet();
        near.ip(&format!("link add up0 mtu {mtu} type veth peer name up1 mtu {mtu} netns {}", far.name()));
        for (netns, device, number) in [(near, "up0", 1), (&far, "up1", 5)] {
            netns.keep_neighbours(device);
            netns.ip(&format!("link set {device} up"));
            netns.ip(&format!("address add 10.9.0.{number}/24 dev {device}"));
            netns.ip(&format!("address add fd09::{number}/64 dev {device} nodad"));
        }
        for (name, local) in [("vx4", "10.9.0.5"), ("vx6", "fd09::5")] {
            let vni = if name == "vx4" { VNI } else { VNI + 1 };
            far.ip(&format!("link add {name} type vxlan id {vni} dstport 4789 local {local} nolearning"));
            far.sysctl(&format!("ipv6/conf/{name}/disable_ipv6"), "1");
            far.ip(&format!("link set {name} up"));
        }
        // All learn where the others are, so that there is no other traffic.
        for address in ["10.9.0.5", "fd09::5"] {
            near.run(&format!("ping -c 1 -W 5 {address}"));
        }
        let Node { web, db, .. } = &node;
        web.ping(db.v4(), 2, 56);
        web.ping(db.v6(), 2, 56);
        Self { far, node }
    }

    fn pods(&self, target: &str) -> PodsFile {
        let web = PodSpec::of(&self.node.web).mirror("true").annotated("podmirror.io/target", target);
        PodsFile::new(&self.node.lab, &[web])
    }
}

/// Waits until the target's state is that.
fn wait_target(lab: &Lab, name: &str, is_up: bool) -> Status {
    lab.wait_status(|status| {
        let up = status.target(name).up;
        check(up == is_up && status.taps.len() == 1, || format!("target {name} is up: {up}"))
    })
}

fn named(counts: &[(&str, usize)]) -> BTreeMap<String, u64> {
    counts.iter().map(|(name, count)| ((*name).to_owned(), *count as u64)).collect()
}

fn a_tunnel_brings_every_frame_once_and_unchanged(mode: AttachMode) {
    let scene = Scene::new("tunnel", 9000);
    let Scene { far, node: Node { web, db, lab } } = &scene;
    let before = lab.network_state();
    let targets =
        ["--target", "v4=vxlan:10.9.0.5/vni=77/oversize=segment", "--target", "v6=vxlan:[fd09::5]/vni=78"];
    for (target, device, room) in [("v4", "vx4", 8964), ("v6", "vx6", 8944)] {
        let pods = scene.pods(target);
        let agent = Agent::run(lab, mode, &pods, &targets);
        lab.wait_mirrored(&[web]);
        let status = wait_target(lab, target, true);
        assert_eq!(status.target(target).device, DEVICE, "both share it");
        agent.wait_for_log(&["the target takes copies", &format!("\"room\":{room}")]);
        let link = lab.node().ip(&format!("link show {DEVICE}"));
        assert!(link.contains("NOARP") && link.contains("alias podmirror"), "{link}");
        let (inside, arrived) = (Inside::of(web), Capture::start(far, device));
        // What leaves the node is never copied again: a capture of the uplink shows other packets only.
        let uplink = Tail::start(lab, &["tail", "up0"]);
        web.ping(db.v4(), 20, 56);
        web.ping(db.v6(), 20, 1400);
        web.udp_echo(db, db.v4(), &[0, 1, 1472]);
        if target == "v4" {
            Conversation::open(web, db, db.v4()).exchange(300_000);
        }
        shows(&arrived, || inside.capture.frames());
        let (sent, received) = inside.stop();
        arrived.stop().same_as(&sent.and(&received)).unwrap();
        let status = lab.status();
        let tap = status.tap(web.veth_host());
        let copies = [("egress copied", sent.len()), ("ingress copied", received.len())];
        assert_eq!(tap.verdicts(), named(&copies));
        let tail = status.tap("up0").sessions[0].verdicts();
        assert_eq!(tail, named(&[("ingress loop", sent.len() + received.len())]), "copies and nothing else");
        uplink.stop();
        agent.stop();
        lab.cleanup();
    }
    lab.network_is_as(&before);
    assert_eq!(lab.pins(), Vec::<std::path::PathBuf>::new());
}

/// The frames of a pod are as long as the packets on the cable, so their copies do not fit. The pod's own packets do.
#[test]
fn a_copy_that_does_not_fit_is_treated_as_told() {
    let scene = Scene::new("tunnel-oversize", 1500);
    let Scene { far, node: Node { web, db, lab } } = &scene;
    // 1500 bytes less the headers of IPv4, UDP and VXLAN.
    let room = 1464;
    for (oversize, kept, verdict) in [
        ("truncate", room, "copied"),
        ("segment", room, "copied"),
        ("fragment", 1514, "copied"),
        ("drop", 0, "congested"),
    ] {
        let pods = scene.pods("far");
        let target = format!("far=vxlan:10.9.0.5/vni=77/oversize={oversize}");
        let agent = Agent::run(lab, any_mode(), &pods, &["--target", &target]);
        lab.wait_mirrored(&[web]);
        wait_target(lab, "far", true);
        let (inside, arrived) = (Inside::of(web), Capture::start(far, "vx4"));
        web.ping(db.v4(), 5, 1472);
        web.ping(db.v4(), 5, room - 42);
        let cut = || {
            let frames = inside.capture.frames();
            let fits = frames.only(|frame| frame.len() <= room);
            let long = frames.only(|frame| frame.len() > room);
            let kept = long.iter().map(|(frame, times)| (frame[..kept].to_vec(), times)).filter(|_| kept > 0);
            kept.fold(fits, |all, (frame, times)| all.with(&frame, times))
        };
        shows(&arrived, cut);
        let expected = cut();
        arrived.stop().same_as(&expected).unwrap();
        let (sent, received) = inside.stop();
        assert_eq!((sent.len(), received.len()), (10, 10));
        let status = lab.status();
        let tap = status.tap(web.veth_host());
        assert_eq!(tap.total(verdict), if oversize == "drop" { 10 } else { 20 }, "{oversize}: {tap:?}");
        assert_eq!(tap.total("copied") + tap.total("congested"), 20, "{oversize}: {tap:?}");
        agent.stop();
        lab.cleanup();
    }
}

/// A super-frame is cut as any long copy, if nothing else was asked for; a snap length that is shorter still holds.
#[test]
fn a_super_frame_is_cut_to_what_fits() {
    let scene = Scene::new("tunnel-super", 1500);
    let Scene { far, node: Node { web, db, lab } } = &scene;
    for snaplen in [None, Some(96)] {
        let pods = scene.pods("far");
        let words = ["--target", "far=vxlan:10.9.0.5/vni=77", "--snaplen", "96"];
        let _agent = Agent::run(lab, any_mode(), &pods, &words[..if snaplen.is_some() { 4 } else { 2 }]);
        lab.wait_mirrored(&[web]);
        wait_target(lab, "far", true);
        let most = snaplen.unwrap_or(1464);
        let (inside, arrived) = (Inside::of(web), Capture::start(far, "vx4"));
        Conversation::open(web, db, db.v4()).exchange(200_000);
        let lengths = |capture: &Capture, most: usize| {
            let mut lengths: Vec<_> = capture.in_order().iter().map(|frame| frame.length.min(most)).collect();
            lengths.sort_unstable();
            lengths
        };
        eventually(SOON, || {
            let (now, expected) = (lengths(&arrived, usize::MAX), lengths(&inside.capture, most));
            check(now == expected, || format!("{} of {} copies", now.len(), expected.len()))
        });
        assert!(
            inside.capture.frames().iter().any(|(frame, _)| frame.len() > 2000),
            "there are super-frames"
        );
    }
    lab.cleanup();
}

/// The cable fails and comes back. The pod never notices, and each packet is counted.
#[test]
fn copying_goes_on_when_the_way_is_back() {
    let scene = Scene::new("tunnel-down", 1500);
    let Scene { far, node: Node { web, db, lab } } = &scene;
    let pods = scene.pods("far");
    let agent = Agent::run(lab, any_mode(), &pods, &["--target", "far=vxlan:10.9.0.5/vni=77"]);
    lab.wait_mirrored(&[web]);
    wait_target(lab, "far", true);
    let flood = Flood::start(web, db);
    let arrives = || {
        let before = far.ip("-s -j link show vx4");
        flood.go_on(50);
        eventually(SOON, || check(far.ip("-s -j link show vx4") != before, || "no copies".into()));
    };
    arrives();
    lab.node().ip("link set up0 down");
    let status = wait_target(lab, "far", false);
    let notes = status.notes.clone().unwrap_or_default();
    assert!(notes["unreached_targets"].to_string().contains("no route to 10.9.0.5"), "{notes}");
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

/// On another node a mirrored pod may be the receiver. The packets that bring it copies are known by port and VNI, and are
/// copied to no target. Those of other tunnels are copied.
#[test]
fn packets_that_bring_copies_are_not_copied_again() {
    let scene = Scene::new("tunnel-loop", 1500);
    let Scene { node: Node { web, db, lab }, .. } = &scene;
    let web_spec = PodSpec::of(web).mirror("true");
    let pods = PodsFile::new(lab, &[web_spec]);
    let agent = Agent::run(lab, any_mode(), &pods, &["--target", "far=vxlan:10.9.0.5/vni=77"]);
    lab.wait_mirrored(&[web]);
    wait_target(lab, "far", true);
    for (vni, verdict) in [(VNI, "loop"), (VNI + 1, "copied")] {
        let header = [[8, 0, 0, 0], (vni << 8).to_be_bytes()].concat();
        db.netns().enter(|| {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
            socket.send_to(&[&header[..], &[7; 100]].concat(), (web.v4(), 4789)).unwrap();
        });
        lab.wait_status(|status| {
            let tap = status.tap(web.veth_host());
            check(tap.packets("ingress", verdict) == 1, || format!("not {verdict}: {tap:?}"))
        });
    }
    agent.stop();
    lab.cleanup();
}
