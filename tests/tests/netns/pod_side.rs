//! Taps inside pods, for NICs that have no peer on the node.
//!
//! The kernels of the guests have more kinds of NICs than others.

mod filters;
mod hostile;
mod nics;

use std::time::Duration;

use mirror_tests::{
    Agent, AttachMode, Capture, Conversation, Frame, Frames, Lab, Netns, Nic, PodNs, PodSpec, PodsFile, SOON,
    Status, Tail, TapStatus, check, eventually,
};

use crate::{Inside, MIRROR, any_mode};

in_both_modes!(
    a_macvlan_pod_is_mirrored,
    two_mirrored_macvlan_pods_are_mirrored_once,
    a_mirror_inside_a_pod_outlives_the_agent,
    taps_inside_pods_can_be_switched_off,
);

pub(crate) const HUB: &str = "podmirror-hub";
const EXIT: &str = "podmirror";
const MACVLAN: &str = "macvlan mode bridge";

/// Two pods whose NICs are over one device of the node.
struct Scene {
    web: PodNs,
    db: PodNs,
    lab: Lab,
}

impl Scene {
    fn new(story: &str, kind: &str) -> Self {
        let lab = Lab::new(story);
        up(&lab, "up0", "up1");
        Self::over(lab, kind, "up0")
    }

    fn over(lab: Lab, kind: &str, parent: &str) -> Self {
        Self { web: lab.pod_over("web", kind, parent), db: lab.pod_over("db", kind, parent), lab }
    }

    fn pods_file(&self, pods: &[&PodNs]) -> PodsFile {
        let specs: Vec<_> = pods.iter().map(|pod| PodSpec::of(pod).mirror("true")).collect();
        PodsFile::new(&self.lab, &specs)
    }

    /// Whether each pod has a relay device (`exit`).
    fn exits(&self) -> [bool; 2] {
        [&self.web, &self.db].map(has_exit)
    }
}

/// A mirrored macvlan pod, and its peer.
fn mirrored(story: &str, mode: AttachMode) -> (Scene, PodsFile, Agent) {
    let scene = Scene::new(story, MACVLAN);
    let pods = scene.pods_file(&[&scene.web]);
    let agent = Agent::run(&scene.lab, mode, &pods, &[]);
    wait_tapped(&scene.lab, &[&scene.web]);
    (scene, pods, agent)
}

/// Creates a device of the node over which pods can have NICs, and its peer.
pub(crate) fn up(lab: &Lab, device: &str, peer: &str) {
    lab.node().ip(&format!("link add {device} type veth peer name {peer}"));
    for end in [device, peer] {
        lab.node().sysctl(&format!("ipv6/conf/{end}/disable_ipv6"), "1");
        lab.node().ip(&format!("link set {end} up"));
    }
}

/// A namespace with a bridge: a switch outside the node.
pub(crate) fn switch(lab: &Lab) -> Netns {
    let switch = Netns::new(&format!("{}-switch", lab.node().name()));
    switch.keep_quiet();
    switch.ip("link add br0 type bridge mcast_snooping 0");
    switch.ip("link set br0 up");
    switch
}

/// The agent's filters at the NIC of a pod.
pub(crate) fn filters(pod: &PodNs) -> Vec<String> {
    let of = |hook: &str| {
        let shown = pod.netns().try_run(&format!("tc filter show dev eth0 {hook}")).stdout;
        String::from_utf8(shown).unwrap()
    };
    let shown = ["ingress", "egress"].map(of).concat();
    shown.lines().filter(|line| line.contains("tap_")).map(str::to_owned).collect()
}

pub(crate) fn has_exit(pod: &PodNs) -> bool {
    pod.netns().devices().iter().any(|device| device == EXIT)
}

/// The tap of a pod.
fn tap<'a>(status: &'a Status, pod: &PodNs) -> Option<&'a TapStatus> {
    status.taps.iter().find(|tap| tap.pod.as_ref().is_some_and(|of| of.name == pod.name()))
}

/// Waits until exactly these pods have a tap inside that is attached at both hooks.
#[track_caller]
fn wait_tapped(lab: &Lab, pods: &[&PodNs]) -> Status {
    lab.wait_status(|status| {
        let are_tapped = pods.iter().all(|pod| {
            tap(status, pod).is_some_and(|tap| {
                tap.attached.len() == 2 && tap.attached.values().all(|attached| attached != "none")
            })
        });
        check(are_tapped && status.taps.len() == pods.len(), || format!("{:?}", status.taps))
    })
}

/// Waits until a tap has counted all frames of its pod, each with this verdict. Pods send some frames by themselves, so
/// the expected numbers are those of each moment.
#[track_caller]
pub(crate) fn wait_counted<const N: usize>(
    lab: &Lab,
    pod: &PodNs,
    expected: impl Fn() -> [(&'static str, &'static str, usize); N],
) {
    lab.wait_status(|status| {
        let verdicts = tap(status, pod).map(|tap| tap.verdicts()).unwrap_or_default();
        let expected = expected()
            .into_iter()
            .filter(|(.., count)| *count > 0)
            .map(|(direction, verdict, count)| (format!("{direction} {verdict}"), count as u64))
            .collect();
        check(verdicts == expected, || format!("{verdicts:?} instead of {expected:?}"))
    });
}

/// Sends traffic of many kinds and sizes, in both directions.
pub(crate) fn talk(web: &PodNs, db: &PodNs) {
    for (address, back) in [(db.v4(), web.v4()), (db.v6(), web.v6())] {
        web.ping(address, 5, 56);
        db.ping(back, 5, 1400);
        web.udp_echo(db, address, &[0, 1, 64, 1400, 1473, 9000, 65507]);
        Conversation::open(web, db, address).exchange(400_000);
        Conversation::open(db, web, back).exchange(50_000);
    }
}

/// The frames that a NIC has sent. All ipvlans over one device share one MAC address, so frames are distinguished by
/// the sender in ARP and IP.
pub(crate) fn sent(nic: &Nic, frames: &Frames) -> Frames {
    frames.only(|frame| {
        frame[6..12] == nic.mac
            && match frame[12..14] {
                [0x08, 0x00] => frame[26..30] == nic.v4.octets(),
                [0x08, 0x06] => frame[28..32] == nic.v4.octets(),
                _ => frame[22..38] == nic.v6.octets(),
            }
    })
}

/// Sends frames that are not IP unicast.
pub(crate) fn talk_in_frames(from: &PodNs) {
    let source = from.eth0();
    for frame in [
        Frame::new(Frame::BROADCAST, source.mac).filled(60, 6),
        Frame::new(Frame::BROADCAST, source.mac).filled(1514, 7),
        Frame::new(Frame::BROADCAST, source.mac).vlan(100).filled(64, 2),
        Frame::new([1, 0, 0x5e, 1, 2, 3], source.mac).filled(100, 7),
        Frame::new([0x33, 0x33, 0, 0, 1, 2], source.mac).filled(100, 8),
    ] {
        from.send_frame(&frame.bytes());
    }
}

/// Waits until the mirror interface shows exactly these frames.
#[track_caller]
fn shows(mirror: &Capture, expected: impl Fn() -> Frames) {
    eventually(Duration::from_secs(20), || mirror.frames().same_as(&expected()));
}

/// One pod is mirrored: each frame once, unchanged. At the end the node and the pods are as before.
fn a_pod_is_mirrored(scene: &Scene, mode: AttachMode, talk: impl Fn(&PodNs, &PodNs)) {
    let Scene { web, db, lab } = scene;
    let state = || [lab.network_state(), web.netns().devices(), filters(web)];
    let before = state();
    let pods = scene.pods_file(&[web]);
    let agent = Agent::run(lab, mode, &pods, &[]);
    let status = wait_tapped(lab, &[web]);
    let found = tap(&status, web).unwrap();
    assert_eq!((found.nic.as_str(), found.device.as_str(), found.inside), ("eth0", "eth0", true));
    let told = lab.agent_exit(&["explain", "--pod", "default/web"]).stdout;
    let way = format!("egress ({}) for what leaves", mode.name());
    assert!(told.contains("It is tapped inside the pod") && told.contains(&way), "{told}");
    assert!(lab.agent_exit(&["status"]).stdout.contains("  (in pod)  "));
    assert_eq!(scene.exits(), [true, false], "only a pod with a tap gets an exit");
    let exit = web.netns().ip(&format!("-d -o address show dev {EXIT}"));
    assert!(!exit.contains("inet"), "an exit has no address: {exit}");
    assert_eq!(web.netns().ip(&format!("-6 route show table local dev {EXIT}")), "", "multicast of the pod");
    let inside = Inside::of(web);
    let mirror = Capture::start(lab.node(), MIRROR);
    talk(web, db);
    shows(&mirror, || inside.capture.frames());
    if web.eth0().mac == db.eth0().mac {
        // A MAC address does not identify the sender.
        lab.wait_status(|status| {
            let (copied, seen) = tap(status, web).map_or((0, 0), |tap| (tap.total("copied"), tap.seen()));
            let all = inside.capture.frames().len() as u64;
            check((copied, seen) == (all, all), || format!("{copied} copied and {seen} seen of {all}"))
        });
    } else {
        wait_counted(lab, web, || {
            let (sent, received) = inside.frames();
            [("egress", "copied", sent.len()), ("ingress", "copied", received.len())]
        });
    }
    shows(&mirror, || inside.capture.frames());

    pods.write(&[PodSpec::of(web)]);
    lab.wait_status(|status| check(status.taps.is_empty(), || format!("{:?}", status.taps)));
    eventually(SOON, || check(scene.exits() == [false; 2], || "an exit is left".to_owned()));
    eventually(SOON, || check(!lab.devices().contains(&HUB.to_owned()), || format!("{:?}", lab.devices())));
    web.ping(db.v4(), 3, 56);
    agent.stop();
    lab.cleanup();
    assert_eq!(state(), before);
}

fn a_macvlan_pod_is_mirrored(mode: AttachMode) {
    a_pod_is_mirrored(&Scene::new("macvlan", MACVLAN), mode, nics::talk_in_all_ways);
}

/// A packet between two mirrored pods is copied once.
fn two_mirrored_macvlan_pods_are_mirrored_once(mode: AttachMode) {
    two_pods_are_mirrored_once(&Scene::new("macvlans", MACVLAN), mode);
}

/// The counts of a mirrored pod whose peer is mirrored too.
pub(crate) fn copied_by_the_sender(inside: &Inside) -> [(&'static str, &'static str, usize); 2] {
    let (sent, received) = inside.frames();
    [("egress", "copied", sent.len()), ("ingress", "duplicate", received.len())]
}

fn two_pods_are_mirrored_once(scene: &Scene, mode: AttachMode) {
    let Scene { web, db, lab } = scene;
    let pods = scene.pods_file(&[web, db]);
    let _agent = Agent::run(lab, mode, &pods, &[]);
    wait_tapped(lab, &[web, db]);
    assert_eq!(scene.exits(), [true; 2]);
    let (of_web, of_db) = (Inside::of(web), Inside::of(db));
    let mirror = Capture::start(lab.node(), MIRROR);
    talk(web, db);
    shows(&mirror, || of_web.frames().0.and(&of_db.frames().0));
    for (pod, inside) in [(web, of_web), (db, of_db)] {
        wait_counted(lab, pod, || copied_by_the_sender(&inside));
    }
}

/// Two mirrors of one pod: each has its own form and target, and the relay device is removed when no copy leaves the
/// pod through it.
#[test]
fn each_mirror_of_a_macvlan_pod_gets_its_own_packets() {
    let scene = Scene::new("macvlan-two", MACVLAN);
    let Scene { web, db, lab } = &scene;
    let spec = || PodSpec::of(web).mirror("true");
    let ids = |spec: PodSpec| {
        spec.annotated("podmirror.io/mirror.ids", "egress")
            .annotated("podmirror.io/target.ids", "ids")
            .annotated("podmirror.io/filter.ids", "icmp")
            .annotated("podmirror.io/snaplen.ids", "96")
    };
    let pods = PodsFile::new(lab, &[ids(spec())]);
    let _agent = Agent::run(lab, any_mode(), &pods, &["--define-target", "ids=ids0,live=stream"]);
    wait_tapped(lab, &[web]);
    let inside = Inside::of(web);
    let (whole, cut) = (Capture::start(lab.node(), MIRROR), Capture::start(lab.node(), "ids0"));
    web.ping(db.v4(), 10, 400);
    web.ping(db.v6(), 5, 400);
    shows(&whole, || inside.capture.frames());
    let requests = || inside.frames().0.only(|frame| frame[12..14] == [8, 0] && frame[23] == 1);
    eventually(SOON, || {
        let (shown, requests) = (cut.frames(), requests());
        let is_start = |frame: &[u8]| requests.iter().any(|(request, _)| request[..96] == *frame);
        let are_right = shown.len() == requests.len() && shown.iter().all(|(frame, _)| is_start(frame));
        check(are_right, || format!("{} cut of {}", shown.len(), requests.len()))
    });

    lab.wait_status(|status| {
        let session = tap(status, web).map(|tap| tap.session("ids").verdicts()).unwrap_or_default();
        let copied = session.get("egress copied").copied().unwrap_or_default();
        check(copied == requests().len() as u64, || format!("{session:?}"))
    });
    pods.write(&[spec().annotated("podmirror.io/target", "live")]);
    eventually(SOON, || check(!has_exit(web), || "the exit is left".to_owned()));
    wait_tapped(lab, &[web]);
    web.ping(db.v4(), 3, 56);
}

/// A stream needs no relay device, so a capture leaves no device in the pod.
#[test]
fn a_capture_needs_no_exit() {
    let scene = Scene::new("macvlan-tail", MACVLAN);
    let Scene { web, db, lab } = &scene;
    let pods = PodsFile::new(lab, &[PodSpec::of(web)]);
    let _agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_taps(&[]);
    let mut tail = Tail::start(lab, &["tail", "--pod", "default/web"]);
    tail.wait_until_it_reads(lab);
    wait_tapped(lab, &[web]);
    let inside = Inside::of(web);
    // The file has complete checksums. Those of ICMP are already complete inside the pod.
    web.ping(db.v4(), 9, 56);
    db.ping(web.v6(), 9, 1400);
    eventually(SOON, || tail.file().all_frames().same_as(&inside.capture.frames()));
    assert_eq!(scene.exits(), [false; 2]);
    let (sent, received) = inside.stop();
    let file = tail.stop();
    file.frames("egress").same_as(&sent).unwrap();
    file.frames("ingress").same_as(&received).unwrap();
    lab.wait_status(|status| check(status.taps.is_empty(), || format!("{:?}", status.taps)));
}

/// The mirror outlives the agent, and the next agent takes it over without a loss.
fn a_mirror_inside_a_pod_outlives_the_agent(mode: AttachMode) {
    let scene = Scene::new("macvlan-restart", MACVLAN);
    let Scene { web, db, lab } = &scene;
    let pods = scene.pods_file(&[web, db]);
    let agent = Agent::run(lab, mode, &pods, &[]);
    wait_tapped(lab, &[web, db]);
    let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), MIRROR));
    web.ping(db.v4(), 3, 56);
    agent.kill();
    web.ping(db.v4(), 3, 57);
    let agent = Agent::run(lab, mode, &pods, &[]);
    web.ping(db.v4(), 3, 58);
    lab.wait_status(|status| check(status.agent_running && status.notes.is_some(), || "not running".into()));
    wait_tapped(lab, &[web, db]);
    web.ping(db.v4(), 3, 58);
    shows(&mirror, || inside.capture.frames());

    // One pod loses its mirror while no agent runs.
    agent.kill();
    pods.write(&[PodSpec::of(web).mirror("true"), PodSpec::of(db)]);
    let agent = Agent::run(lab, mode, &pods, &[]);
    wait_tapped(lab, &[web]);
    eventually(SOON, || check(scene.exits() == [true, false], || format!("{:?}", scene.exits())));
    // A slow round ends before it detaches, and the next one deletes the relay device first.
    eventually(SOON, || check(filters(db).is_empty(), || format!("{:?}", filters(db))));
    // After this, only `cleanup` can remove it.
    agent.kill();
    lab.cleanup();
    assert_eq!(scene.exits(), [false; 2], "the exits went with the hub");
    assert_eq!([web, db].map(filters), [const { Vec::<String>::new() }; 2]);
    assert!(lab.pins().is_empty() && !lab.devices().contains(&HUB.to_owned()), "{:?}", lab.pins());
    web.ping(db.v4(), 3, 59);
}

/// The administrator forbids podmirror's programs in pods.
fn taps_inside_pods_can_be_switched_off(mode: AttachMode) {
    let scene = Scene::new("macvlan-off", MACVLAN);
    let Scene { web, lab, .. } = &scene;
    let pods = scene.pods_file(&[web]);
    let agent = Agent::run(lab, mode, &pods, &[]);
    wait_tapped(lab, &[web]);
    agent.stop();
    let agent = Agent::run(lab, mode, &pods, &["--pod-side-taps=off"]);
    agent.wait_for_log(&["not mirrored", "--pod-side-taps"]);
    lab.wait_taps(&[]);
    eventually(SOON, || check(scene.exits() == [false; 2], || "an exit is left".to_owned()));
    assert_eq!(filters(web), Vec::<String>::new());
    agent.stop();
}
