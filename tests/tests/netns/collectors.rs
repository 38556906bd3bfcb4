//! A pod as the target: it gets the copies at its own NIC, and its own traffic is not disturbed.

mod bridges;

use std::{collections::BTreeMap, fs};

use mirror_tests::{
    Agent, AttachMode, Capture, Conversation, Flood, Lab, MIRROR, PodNs, PodSpec, PodsFile, SOON, Status,
    check, eventually, while_talking,
};

use crate::{Inside, Node, any_mode, shows};

in_both_modes!(a_collector_with_a_tap_of_its_own_gets_cut_copies);

/// A mirrored pod, its partner, and the collector.
struct Scene {
    ids: PodNs,
    node: Node,
}

const TARGET: [&str; 2] = ["--define-target", "ids=pod:default/ids"];

impl Scene {
    fn new(node: Node, make: impl Fn(&Lab) -> PodNs) -> Self {
        Self { ids: make(&node.lab), node }
    }

    fn bridged(story: &str) -> Self {
        let scene = Self::new(Node::bridged(story), |lab| lab.pod("ids", "br0"));
        // All pods learn each other's addresses. Until then, the bridge floods originals to the collector too.
        let Node { web, db, .. } = &scene.node;
        for (pod, other) in [(web, db), (&scene.ids, web), (&scene.ids, db)] {
            pod.ping(other.v4(), 2, 56);
            pod.ping(other.v6(), 2, 56);
        }
        scene
    }

    fn routed(story: &str) -> Self {
        Self::new(Node::routed(story), |lab| lab.routed_pod("ids"))
    }

    fn web(&self) -> PodSpec {
        PodSpec::of(&self.node.web).mirror("true").annotated("podmirror.io/target", "ids")
    }

    fn ids(&self) -> PodSpec {
        PodSpec::of(&self.ids).mirror("false")
    }
}

/// Waits until the target is up or down.
fn wait_target(lab: &Lab, is_up: bool) -> Status {
    lab.wait_status(|status| {
        check(status.target("ids").up == is_up, || format!("the target is up: not {is_up}"))
    })
}

/// The reasons why targets cannot be reached.
fn unreached(status: &Status) -> Vec<String> {
    let notes = status.notes.clone().unwrap_or_default();
    let unreached = notes["unreached_targets"].as_array().cloned().unwrap_or_default();
    unreached.iter().map(|of| format!("{}: {}", of["target"], of["message"]).replace('"', "")).collect()
}

fn verdicts(status: &Status, pod: &PodNs, mirror: &str) -> BTreeMap<String, u64> {
    status.tap(pod.veth_host()).session(mirror).verdicts()
}

fn named(counts: &[(&str, usize)]) -> BTreeMap<String, u64> {
    counts.iter().map(|(name, count)| ((*name).to_owned(), *count as u64)).collect()
}

#[test]
fn a_collector_gets_every_frame_once_and_unchanged() {
    for scene in [Scene::bridged("collector"), Scene::routed("collector")] {
        let Scene { ids, node: Node { web, db, lab } } = &scene;
        let before = lab.network_state();
        let features =
            ids.netns().run("ethtool -k eth0") + &lab.node().run(&format!("ethtool -k {}", ids.veth_host()));
        let pods = PodsFile::new(lab, &[scene.web(), scene.ids()]);
        let agent = Agent::run(lab, any_mode(), &pods, &[&TARGET[..], &["--mirror-offloads=false"]].concat());
        lab.wait_mirrored(&[web]);
        let target = wait_target(lab, true).target("ids");
        assert_eq!(
            (target.destination.as_str(), target.device.as_str()),
            ("pod:default/ids", ids.veth_host())
        );
        assert_eq!(target.ifindex, Some(lab.ifindex(ids.veth_host())));
        let (inside, collector) = (Inside::of(web), Capture::start(ids.netns(), "eth0"));
        web.ping(db.v4(), 20, 56);
        web.ping(db.v6(), 20, 1400);
        web.udp_echo(db, db.v4(), &[0, 1, 1472, 1473, 65507]);
        Conversation::open(web, db, db.v4()).exchange(500_000);
        shows(&collector, || inside.capture.frames());
        let (sent, received) = inside.stop();
        collector.stop().same_as(&sent.and(&received)).unwrap();
        assert!(sent.iter().any(|(frame, _)| frame.len() > 1514), "super-frames are copied as such");
        let copied = named(&[("egress copied", sent.len()), ("ingress copied", received.len())]);
        assert_eq!(verdicts(&lab.status(), web, "default"), copied);
        agent.stop();
        lab.cleanup();
        lab.network_is_as(&before);
        let now =
            ids.netns().run("ethtool -k eth0") + &lab.node().run(&format!("ethtool -k {}", ids.veth_host()));
        assert_eq!(now, features, "its offloads are its own");
    }
}

/// The collector is mirrored too: to `mirror0`, and by mistake to itself. Its own tap and the second stage of the
/// target are at the same hook. The collector gets the beginnings of web's packets, and no packet of its own twice.
fn a_collector_with_a_tap_of_its_own_gets_cut_copies(mode: AttachMode) {
    let scene = &Scene::bridged("collector-tapped");
    let Scene { ids, node: Node { web, db, lab } } = scene;
    let pods = PodsFile::new(
        lab,
        &[
            scene.web().annotated("podmirror.io/snaplen", "96"),
            scene
                .ids()
                .annotated("podmirror.io/mirror.out", "true")
                .annotated("podmirror.io/mirror.self", "true")
                .annotated("podmirror.io/target.self", "ids"),
        ],
    );
    let agent = Agent::run_until(lab, mode, &pods, &TARGET, &[web, ids]);
    wait_target(lab, true);
    let (of_web, of_ids) = (Inside::of(web), Capture::start(ids.netns(), "eth0"));
    let mirror = Capture::start(lab.node(), MIRROR);
    web.ping(db.v4(), 10, 1000);
    ids.ping(db.v4(), 7, 900);

    // Frames of ids and db pass only the tap of ids, and go to `mirror0` whole.
    eventually(SOON, || check(mirror.frames().len() == 14, || format!("{} of 14", mirror.frames().len())));
    let own = mirror.stop();
    assert!(own.iter().all(|(frame, times)| frame.len() == 14 + 20 + 8 + 900 && times == 1));
    let cut = || {
        let frames = of_web.capture.frames();
        frames
            .iter()
            .map(|(frame, times)| (frame[..96].to_vec(), times))
            .fold(own.clone(), |all, (frame, times)| all.with(&frame, times))
    };
    shows(&of_ids, cut);
    let (sent, received) = of_web.stop();
    of_ids.stop();

    let status = lab.status();
    let copies = sent.len() + received.len();
    let of_web = named(&[("egress copied", sent.len()), ("ingress copied", received.len())]);
    assert_eq!(verdicts(&status, web, "default"), of_web);
    // A copy that passes the collector's own tap is never copied again.
    let out = named(&[("egress copied", 7), ("ingress copied", 7), ("ingress loop", copies)]);
    assert_eq!(verdicts(&status, ids, "out"), out);
    assert_eq!(verdicts(&status, ids, "self"), named(&[("egress loop", 7), ("ingress loop", 7 + copies)]));
    let notes = status.notes.as_ref().unwrap();
    assert_eq!(
        notes["not_mirrored"].as_array().unwrap().len(),
        0,
        "no podmirror program hides a packet: {notes}"
    );
    agent.stop();
    lab.cleanup();
}

/// A TCP counter of the kernel in a pod's namespace.
fn tcp_statistic(pod: &PodNs, name: &str) -> u64 {
    let text = pod.netns().enter(|| fs::read_to_string("/proc/thread-self/net/netstat")).unwrap();
    let lines: Vec<&str> = text.lines().filter(|line| line.starts_with("TcpExt:")).collect();
    let at = lines[0].split(' ').position(|word| word == name).unwrap();
    lines[1].split(' ').nth(at).unwrap().parse().unwrap()
}

/// On a bridge the copies have addresses of the collector's own network. The collector itself talks to the mirrored
/// pod, under load: its TCP sees no segment twice, its neighbour entries stay, and it can configure a new IPv6 address.
#[test]
fn a_collectors_own_traffic_is_not_disturbed() {
    let scene = &Scene::bridged("collector-quiet");
    let Scene { ids, node: Node { web, db, lab } } = scene;
    let _agent = Agent::mirroring(lab, any_mode(), &[scene.web(), scene.ids()], &TARGET, &[web]);
    wait_target(lab, true);
    // Without RFC 7527 the kernel would take a copy of its own neighbour solicitation for that of another node.
    for (key, value) in [("enhanced_dad", "0"), ("accept_dad", "1"), ("dad_transmits", "3")] {
        for device in ["all", "eth0"] {
            ids.netns().sysctl(&format!("ipv6/conf/{device}/{key}"), value);
        }
    }
    let neighbours = || {
        let text = ids.netns().ip("neighbour show");
        let mut lines: Vec<_> =
            text.lines().map(|line| line.rsplit_once(' ').unwrap().0.to_owned()).collect();
        lines.sort();
        lines
    };
    let (before, duplicates) =
        (neighbours(), || ["TCPDSACKRecv", "TCPDSACKOldSent"].map(|name| tcp_statistic(ids, name)));
    assert_eq!(duplicates(), [0; 2]);
    let flood = Flood::start(web, db);
    let conversation = Conversation::open(ids, web, web.v4());
    for _ in 0..10 {
        conversation.exchange(2_000_000);
        flood.go_on(50);
    }
    drop(conversation);
    flood.stop();
    let questions = Capture::of_headers(web.netns(), "eth0");
    ids.netns().ip("address add fd00::77/64 dev eth0");
    let address = eventually(SOON, || {
        let address = ids.netns().ip("-6 address show dev eth0 to fd00::77");
        let is_decided = address.contains("fd00::77") && !address.contains("tentative");
        if is_decided || address.contains("dadfailed") { Ok(address) } else { Err(address) }
    });
    assert!(!address.contains("dadfailed"), "{address}");
    let questions = questions.text("icmp6 and src host ::");
    assert_eq!(questions.lines().count(), 3, "its questions pass the tap of web: {questions}");
    while_talking(ids, db, || web.ping(db.v4(), 20, 56));
    // A busy machine retransmits a segment now and then. With copies there would be one for each of 600 super-frames.
    assert!(duplicates().iter().all(|count| *count < 50), "segments came twice: {:?}", duplicates());
    assert_eq!(neighbours(), before);
    let status = lab.status();
    let tap = status.tap(web.veth_host());
    assert!(tap.total("loop") > 100, "its own packets are known by the addresses: {tap:?}");
    assert_eq!(tap.total("copied") + tap.total("loop") + tap.total("congested"), tap.seen(), "{tap:?}");
}

/// The pod is deleted, a new one is created, and its device is renamed and goes down. Copies follow it, and web's
/// traffic is not affected.
#[test]
fn a_collector_goes_and_comes_back() {
    let scene = Scene::bridged("collector-gone");
    let (web_spec, first) = (scene.web(), scene.ids());
    let Scene { ids, node } = scene;
    let Node { web, db, lab } = &node;
    let pods = PodsFile::new(lab, &[web_spec.clone(), first]);
    let agent = Agent::run_until(lab, any_mode(), &pods, &TARGET, &[web]);
    wait_target(lab, true);
    let flood = Flood::start(web, db);
    flood.go_on(100);

    drop(ids);
    let status = wait_target(lab, false);
    assert_eq!(status.target("ids").destination, "pod:default/ids");
    agent.wait_for_log(&["nothing is copied to the target"]);
    pods.write(std::slice::from_ref(&web_spec));
    lab.wait_status(|status| {
        let expected = "ids: no such pod is on this node";
        check(unreached(status) == [expected], || format!("not {expected}"))
    });
    flood.go_on(200);

    // A new pod with the same name.
    let ids = lab.pod("ids", "br0");
    pods.write(&[web_spec, PodSpec::of(&ids).uid("ids-2").mirror("false")]);
    lab.wait_status(|status| {
        let (target, why) = (status.target("ids"), unreached(status));
        check(target.up && target.device == ids.veth_host() && why.is_empty(), || {
            format!("{target:?}, {why:?}")
        })
    });
    let takes_copies = || {
        let before = ids.netns().ip("-s -j link show eth0");
        flood.go_on(50);
        eventually(SOON, || check(ids.netns().ip("-s -j link show eth0") != before, || "no copies".into()));
    };
    takes_copies();

    lab.node().ip(&format!("link set {} down", ids.veth_host()));
    lab.wait_status(|status| {
        let why = unreached(status);
        check(!status.target("ids").up && why.len() == 1, || format!("{why:?}"))
    });
    lab.node().ip(&format!("link set {} name ids-end", ids.veth_host()));
    flood.go_on(100);
    lab.node().ip("link set ids-end up");
    let status = wait_target(lab, true);
    assert_eq!(status.target("ids").device, "ids-end");
    takes_copies();

    // Without an agent copying continues. A new agent without a list of pods keeps the target.
    agent.kill();
    takes_copies();
    pods.remove();
    let agent = Agent::run(lab, any_mode(), &pods, &TARGET);
    agent.wait_for_log(&["the target is up"]);
    takes_copies();

    let rounds = flood.stop();
    let status = lab.status();
    let tap = status.tap(web.veth_host());
    assert!(tap.seen() >= 2 * rounds as u64 && tap.total("target_down") >= 600, "{rounds} rounds: {tap:?}");
    // The bridge floods the new collector's own announcements, which count as `loop`.
    let explained = ["copied", "target_down", "congested", "loop"].map(|verdict| tap.total(verdict));
    assert_eq!(explained.iter().sum::<u64>(), tap.seen(), "{tap:?}");
    agent.stop();
    lab.cleanup();
    assert!(lab.devices().contains(&"ids-end".to_owned()), "the pod's device is the pod's");
}

/// A collector selected by a label, like a DaemonSet's pods: while the old pod and the new one exist, the first that
/// can be reached gets the copies.
#[test]
fn a_collector_with_a_label_is_followed_by_the_next_one() {
    let scene = Scene::bridged("collector-label");
    let label = ("app.kubernetes.io/name", "ids");
    let (web_spec, first) = (scene.web(), scene.ids().labelled(label.0, label.1));
    let Scene { ids, node } = scene;
    let Node { web, db, lab } = &node;
    let next = lab.pod("ids-next", "br0");
    let next_spec = PodSpec::of(&next).mirror("false").labelled(label.0, label.1);
    let other = PodSpec::of(db).mirror("false").labelled(label.0, "another");
    let pods = PodsFile::new(lab, &[web_spec.clone(), other.clone(), first.clone()]);
    let agent = Agent::run(
        lab,
        any_mode(),
        &pods,
        &["--define-target", "ids=pod:default/app.kubernetes.io/name=ids"],
    );
    lab.wait_mirrored(&[web]);
    assert_eq!(wait_target(lab, true).target("ids").device, ids.veth_host());
    let gets = |pod: &PodNs| {
        let (inside, collector) = (Inside::of(web), Capture::start(pod.netns(), "eth0"));
        web.ping(db.v4(), 10, 56);
        shows(&collector, || inside.capture.frames());
        inside.stop();
        collector.stop();
    };
    // The bridge floods frames to unknown addresses, which would reach all pods.
    ids.ping(web.v4(), 1, 56);
    next.ping(web.v4(), 1, 56);
    gets(&ids);
    pods.write(&[web_spec.clone(), other.clone(), first, next_spec]);
    drop(ids);
    lab.wait_status(|status| {
        let target = status.target("ids");
        check(target.up && target.device == next.veth_host(), || format!("{target:?}"))
    });
    gets(&next);
    pods.write(&[web_spec, other]);
    wait_target(lab, false);
    agent.stop();
    lab.cleanup();
}
