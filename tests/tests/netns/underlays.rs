//! The path to the receiver has a router, and an MTU of 1500 like the pods. So a full frame does not fit into a packet.

use std::collections::BTreeMap;

use mirror_tests::{
    Agent, Capture, Conversation, Frames, Netns, OneCpu, PodNs, PodsFile, SOON, check, eventually,
    kernel_is_at_least,
};

use crate::{
    Inside, Node, any_mode,
    far::{Scene, mirrored_into, named, wait_target_of},
};

/// A tunnel: its target, the room for a frame in a packet of 1500 bytes, and the receiver.
pub(crate) struct Way {
    name: &'static str,
    target: &'static str,
    room: usize,
    receiver: &'static str,
}

const fn way(name: &'static str, target: &'static str, room: usize, receiver: &'static str) -> Way {
    Way { name, target, room, receiver }
}

/// The tunnel types of every kernel of these tests.
const VXLAN: [Way; 2] = [
    way("v4", "vxlan:10.9.0.5:4789/vni=78", 1464, "vxlan id 78 dstport 4789 local 10.9.0.5 nolearning"),
    way("v6", "vxlan:[fd09::5]:4789/vni=79", 1444, "vxlan id 79 dstport 4789 local fd09::5 nolearning"),
];

/// The other types, for the stories of `kinds`.
pub(crate) const OTHERS: [Way; 6] = [
    way("n4", "geneve:10.9.0.5:6081/vni=77/identity=true", 1452, "geneve id 77 remote 10.9.0.1 dstport 6081"),
    way("n6", "geneve:[fd09::5]:6081/vni=78", 1444, "geneve id 78 remote fd09::1 dstport 6081"),
    way("g4", "gre:10.9.0.5/key=7", 1472, "gretap local 10.9.0.5 remote 10.9.0.1 key 7"),
    way("g6", "gre:fd09::5/key=7", 1452, "ip6gretap local fd09::5 remote fd09::1 key 7"),
    way(
        "e4",
        "erspan:10.9.0.5/session=7",
        1464,
        "erspan seq key 7 local 10.9.0.5 remote 10.9.0.1 erspan_ver 1",
    ),
    way(
        "e6",
        "erspan:fd09::5/session=6",
        1444,
        "ip6erspan seq key 6 local fd09::5 remote fd09::1 erspan_ver 1",
    ),
];

impl Way {
    fn is_v6(&self) -> bool {
        self.name.ends_with('6')
    }

    /// The room when the node has learned that the path has an MTU of 1400. Over IPv4 it does not learn this.
    fn narrow_room(&self) -> usize {
        self.room - if self.is_v6() { 100 } else { 0 }
    }

    /// Whether the kernel sends the pod no ICMP error for a copy that exceeds an MTU which the agent has not read yet.
    /// From Linux 5.12 on, `deliver` prevents the error.
    fn is_silent(&self) -> bool {
        !["g6", "e6"].contains(&self.name) || kernel_is_at_least(5, 12)
    }

    /// Whether the type supports this `oversize`.
    fn takes(&self, oversize: &str) -> bool {
        match oversize {
            "fragment" => !self.is_v6(),
            "segment" => self.name != "e6",
            _ => true,
        }
    }
}

/// A pod that is mirrored into each of these tunnels, and its agent.
struct Mirrored<'a> {
    _in_order: OneCpu,
    scene: Scene,
    ways: Vec<&'a Way>,
    agent: Agent,
}

impl<'a> Mirrored<'a> {
    fn new(story: &str, ways: Vec<&'a Way>, oversize: &str) -> Self {
        let in_order = OneCpu::of_this_thread();
        let scene = Scene::routed(story);
        let Node { web, lab, .. } = &scene.node;
        let mut words = Vec::new();
        for Way { name, target, receiver, .. } in &ways {
            scene.receiver(name, receiver);
            words.extend(["--define-target".to_owned(), format!("{name}={target}/oversize={oversize}")]);
        }
        let pods = PodsFile::new(lab, &[mirrored_into(web, ways.iter().map(|way| way.name))]);
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        let agent = Agent::run_until(lab, any_mode(), &pods, &words, &[web]);
        ways.iter().for_each(|way| drop(wait_target_of(lab, way.name, true, 1)));
        Self { _in_order: in_order, scene, ways, agent }
    }

    /// Captures at all receivers.
    fn receivers(&self, capture: fn(&Netns, &str) -> Capture) -> BTreeMap<&'static str, Capture> {
        self.ways.iter().map(|way| (way.name, capture(&self.scene.far, way.name))).collect()
    }

    /// Waits until exactly these frames arrive through a tunnel.
    fn brings(&self, way: &Way, arrived: &BTreeMap<&str, Capture>, expected: impl Fn() -> Frames) {
        eventually(SOON, || {
            let same = arrived[way.name].frames().same_as(&expected());
            let losses = || self.scene.far.ip(&format!("-s -s link show dev {}", way.name));
            same.map_err(|why| format!("{}: {why}{}", way.name, losses()))
        });
    }

    fn end(self) {
        let Self { scene, agent, .. } = self;
        agent.stop();
        scene.node.lab.cleanup();
    }
}

/// Bytes of the pods' longest frame on a wire.
const FULL: usize = 1514;

/// Sends packets of all kinds and of the usual lengths. At its end all have passed: the last packets of a closed
/// connection can wait in the queue of the CPU, and the pings follow them.
fn talk(web: &PodNs, db: &PodNs) {
    for address in [db.v4(), db.v6()] {
        Conversation::open(web, db, address).exchange(100_000);
    }
    web.udp_echo(db, db.v4(), &[0, 1, 1400, 1472]);
    web.udp_echo(db, db.v6(), &[0, 1, 1380, 1452]);
    web.ping(db.v4(), 5, 56);
    web.ping(db.v4(), 5, 1472);
    web.ping(db.v6(), 5, 56);
    web.ping(db.v6(), 5, 1452);
}

/// Checks that no ICMP error has reached the pods, and that they have learned no other MTU.
fn is_unharmed(web: &PodNs, db: &PodNs, frames: &Frames) {
    let errors = frames.only(|frame| {
        let is_v4 = frame[12..14] == [0x08, 0x00] && frame[23] == 1 && ![0, 8].contains(&frame[34]);
        // ICMPv6 types below 128 are errors.
        is_v4 || frame[12..14] == [0x86, 0xdd] && frame[20] == 58 && frame[54] < 128
    });
    assert!(errors.is_empty(), "ICMP errors: {errors}");
    for (pod, other) in [(web, db), (db, web)] {
        for to in [other.v4(), other.v6()] {
            let route = pod.netns().ip(&format!("route get {to}"));
            assert!(!route.contains("mtu"), "{route}");
        }
    }
}

/// The frames with the long ones cut to `kept` bytes, or without the long ones.
fn with_long(frames: &Frames, room: usize, kept: Option<usize>) -> Frames {
    let fits = frames.only(|frame| frame.len() <= room);
    let long = frames.only(|frame| frame.len() > room);
    let long = long.iter().filter_map(|(frame, times)| Some((&frame[..kept?.min(frame.len())], times)));
    long.fold(fits, |all, (frame, times)| all.with(frame, times))
}

/// The values of `oversize`. With the first two, the kernel changes the copies.
const OVERSIZES: [&str; 4] = ["truncate", "fragment", "segment", "drop"];

/// TCP, UDP and ping frames in wire format: with complete checksums, and no super-frames.
fn frames_are_treated_as_told(story: &str, ways: &[&Way], oversizes: &[&str]) {
    for &oversize in oversizes {
        let ways = ways.iter().copied().filter(|way| way.takes(oversize)).collect();
        let mirrored = Mirrored::new(story, ways, oversize);
        let Node { web, db, lab } = &mirrored.scene.node;
        for pod in [web, db] {
            pod.netns().run("ethtool -K eth0 tx off");
        }
        let (inside, arrived) = (Inside::of(web), mirrored.receivers(Capture::start));
        talk(web, db);
        let expected = |way: &Way, frames: &Frames| match oversize {
            "fragment" => frames.clone(),
            "drop" => with_long(frames, way.room, None),
            _ => with_long(frames, way.room, Some(way.room)),
        };
        for way in &mirrored.ways {
            mirrored.brings(way, &arrived, || expected(way, &inside.capture.frames()));
        }
        let (sent, received) = inside.stop();
        let all = sent.and(&received);
        assert!(all.iter().any(|(frame, _)| frame.len() == FULL) && all.iter().all(|(f, _)| f.len() <= FULL));
        is_unharmed(web, db, &all);
        let status = lab.status();
        for way in &mirrored.ways {
            let lost = |frames: &Frames| match oversize {
                "drop" => frames.len() - with_long(frames, way.room, None).len(),
                _ => 0,
            };
            let counts = [("egress", &sent), ("ingress", &received)].map(|(direction, frames)| {
                let lost = lost(frames);
                [
                    (format!("{direction} copied"), frames.len() - lost),
                    (format!("{direction} congested"), lost),
                ]
            });
            let counts = counts.as_flattened().iter().filter(|(_, count)| *count > 0);
            let counts: Vec<_> = counts.map(|(name, count)| (name.as_str(), *count)).collect();
            let verdicts = status.tap(web.veth_host()).session(way.name).verdicts();
            assert_eq!(verdicts, named(&counts), "{oversize} {}", way.name);
        }
        for (name, capture) in arrived {
            let way = mirrored.ways.iter().find(|way| way.name == name).unwrap();
            capture.stop().same_as(&expected(way, &all)).unwrap();
        }
        mirrored.end();
    }
}

/// Super-frames arrive segmented, with correct checksums. A segment that does not fit is sent in IP fragments over
/// IPv4, and is lost over IPv6.
pub(crate) fn super_frames_are_segmented(story: &str, ways: &[&Way]) {
    let ways = ways.iter().copied().filter(|way| way.takes("segment")).collect();
    let mirrored = Mirrored::new(story, ways, "segment");
    let Node { web, db, lab } = &mirrored.scene.node;
    // Makes this node's kernel segment the frames, not the next machine.
    lab.node().run("ethtool -K up0 tx off tso off gso off");
    let (inside, arrived) = (Inside::of(web), mirrored.receivers(Capture::of_wire));
    talk(web, db);
    let is_super = |frame: &[u8]| frame.len() > FULL;
    let expected = |way: &Way, frames: &Frames| {
        let fits = frames.only(|frame| frame.len() <= way.room).on_a_wire();
        let segments = frames.only(is_super).on_a_wire();
        fits.and(&segments.only(|segment| !way.is_v6() || segment.len() <= way.room))
    };
    // A long frame that is not a super-frame is cut. Then its checksum cannot be completed.
    let whole = |way: &Way, frames: &Frames| frames.only(|frame| frame.len() != way.room);
    for way in &mirrored.ways {
        eventually(SOON * 2, || {
            let frames = inside.capture.frames();
            let now = arrived[way.name].frames();
            whole(way, &now).same_as(&whole(way, &expected(way, &frames)))?;
            let long = frames.only(|frame| frame.len() > way.room && !is_super(frame)).len();
            let of_room = |frames: &Frames| frames.only(|frame| frame.len() == way.room).len();
            let (cut, expected) = (of_room(&now), long + of_room(&expected(way, &frames)));
            check(cut == expected, || format!("{}: {cut} of {expected} are cut", way.name))
        });
    }
    let (sent, received) = inside.stop();
    let all = sent.and(&received);
    assert!(all.iter().any(|(frame, _)| is_super(frame)), "there are super-frames");
    is_unharmed(web, db, &all);
    let status = lab.status();
    for way in &mirrored.ways {
        let copied = named(&[("egress copied", sent.len()), ("ingress copied", received.len())]);
        assert_eq!(status.tap(web.veth_host()).session(way.name).verdicts(), copied, "{}", way.name);
    }
    mirrored.end();
}

/// A later router has a smaller MTU. Over IPv4 it fragments. Over IPv6 it reports the MTU to the node, and the agent
/// cuts to it as soon as it reads the route again. The pods get no ICMP error.
pub(crate) fn a_narrow_way_is_learned(story: &str, ways: &[&Way]) {
    let ways = ways.iter().copied().filter(|way| way.is_silent()).collect();
    let mirrored = Mirrored::new(story, ways, "truncate");
    let Scene { far, router, node: Node { web, db, lab } } = &mirrored.scene;
    let router = router.as_ref().unwrap();
    router.ip("link set r1 mtu 1400");
    far.ip("link set up1 mtu 1400");
    let inside = Inside::of(web);
    for pod in [web, db] {
        pod.netns().run("ethtool -K eth0 tx off");
    }
    talk(web, db);
    let learned = || lab.node().ip("route get fd09::5").contains("mtu 1400");
    eventually(SOON, || check(learned(), || "the router has told nothing".into()));
    // The agent has not read the new MTU yet.
    talk(web, db);
    is_unharmed(web, db, &inside.stop().1);

    lab.node().ip("link add wake type bridge");
    lab.node().ip("link delete wake");
    let arrived = mirrored.receivers(Capture::start);
    for way in &mirrored.ways {
        eventually(SOON, || {
            web.ping(db.v4(), 1, 1472);
            let copies = arrived[way.name].frames();
            let is_cut = copies.iter().any(|(frame, _)| frame.len() == way.narrow_room());
            check(is_cut, || format!("{}: {copies}", way.name))
        });
    }
    drop(arrived);
    let (inside, arrived) = (Inside::of(web), mirrored.receivers(Capture::start));
    talk(web, db);
    for way in &mirrored.ways {
        let room = way.narrow_room();
        mirrored.brings(way, &arrived, || with_long(&inside.capture.frames(), room, Some(room)));
    }
    let (sent, received) = inside.stop();
    is_unharmed(web, db, &sent.and(&received));
    mirrored.end();
}

/// With the values of `oversize` whose outcome can depend on the type of the tunnel.
pub(crate) fn frames_are_cut_and_fragmented(story: &str, ways: &[&Way]) {
    frames_are_treated_as_told(story, ways, &OVERSIZES[..2]);
}

fn vxlan() -> Vec<&'static Way> {
    VXLAN.iter().collect()
}

#[test]
fn vxlan_frames_are_treated_as_told() {
    frames_are_treated_as_told("underlay", &vxlan(), &OVERSIZES);
}

#[test]
fn vxlan_super_frames_are_segmented() {
    super_frames_are_segmented("underlay-super", &vxlan());
}

#[test]
fn vxlan_learns_a_narrow_way() {
    a_narrow_way_is_learned("underlay-narrow", &vxlan());
}
