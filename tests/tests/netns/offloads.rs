//! `--mirror-offloads`: the copies are as on a wire, and the pods' own packets are unchanged.

use std::collections::BTreeMap;

use mirror_tests::{
    Agent, Capture, Conversation, Frames, Lab, PodNs, PodSpec, PodsFile, SOON, check, eventually,
};

use crate::{
    Inside, MIRROR, Node, any_mode,
    choice::{Verdicts, count, wait_counted},
    order::queue,
    shows, split,
};

const OFF: &str = "--mirror-offloads=false";
/// Bytes of a frame on a wire with an MTU of 1500.
const WIRE: usize = 1514;

/// The features of a device of the node, as `ethtool -k` lists them: "off", "on [fixed]", ...
fn features(lab: &Lab, device: &str) -> BTreeMap<String, String> {
    let list = lab.node().run(&format!("ethtool -k {device}"));
    let lines = list.lines().filter_map(|line| line.trim().split_once(": "));
    lines.map(|(name, state)| (name.to_owned(), state.to_owned())).collect()
}

/// Checks that a device has no segmentation and checksum offloads, or with `on`, that it has those of TCP.
fn offloads_are(lab: &Lab, device: &str, on: bool) -> Result<(), String> {
    let features = features(lab, device);
    let named = |name: &str| features[name].starts_with("on");
    let takes_any = features.iter().any(|(name, state)| {
        let offload = name.starts_with("tx-checksum-")
            || name.starts_with("tx-") && name.ends_with("-segmentation")
            || name == "tcp-segmentation-offload";
        offload && state.starts_with("on")
    });
    let takes_tcp =
        ["tx-checksum-ip-generic", "tx-tcp-segmentation", "tx-tcp6-segmentation"].into_iter().all(named);
    let right = if on { takes_tcp } else { !takes_any };
    check(right, || format!("{device} has these offloads: {features:#?}"))
}

/// Bulk transfers, datagrams with and without fragments, and pings.
fn talk(web: &PodNs, db: &PodNs) {
    for address in [db.v4(), db.v6()] {
        // `exchange` compares the arriving bytes with the sent ones.
        Conversation::open(web, db, address).exchange(1_000_000);
        web.udp_echo(db, address, &[0, 1, 1400, 9000]);
        web.ping(address, 5, 1400);
    }
}

/// Makes two pods talk while the first is mirrored, and checks the copies. `expected` computes them from the frames of
/// the pod. Returns the frames that the pod has sent, and those that it has received.
#[track_caller]
fn shown(node: &Node, mirror: Capture, expected: impl Fn(&Frames) -> Frames) -> (Frames, Frames) {
    let Node { web, db, .. } = node;
    let (inside, at_db) = (Inside::of(web), Inside::of(db));
    talk(web, db);
    shows(&mirror, || expected(&inside.capture.frames()));
    let (sent, received) = inside.stop();
    mirror.stop().same_as(&expected(&sent.and(&received))).unwrap();
    // The pods' own packets are super-frames, the same on both sides.
    for frames in [&sent, &received] {
        assert!(frames.iter().any(|(frame, _)| frame.len() > WIRE), "TCP uses super-frames");
    }
    let from = |frames: &Frames, pod: &PodNs| split(pod.eth0().mac, frames).0;
    let (sent_by_db, received_by_db) = at_db.stop();
    from(&received_by_db, web).same_as(&sent).unwrap();
    from(&received, db).same_as(&sent_by_db).unwrap();
    (sent, received)
}

#[track_caller]
fn shown_as_they_are(node: &Node, mirror: &str) -> (Frames, Frames) {
    shown(node, Capture::start(node.lab.node(), mirror), Frames::clone)
}

#[track_caller]
fn shown_as_on_a_wire(node: &Node, mirror: &str) -> (Frames, Frames) {
    let frames = shown(node, Capture::of_wire(node.lab.node(), mirror), Frames::on_a_wire);
    let wire = frames.0.and(&frames.1).on_a_wire();
    assert!(wire.iter().all(|(frame, _)| frame.len() <= WIRE), "{wire}");
    frames
}

#[test]
fn without_offloads_copies_are_as_on_a_wire() {
    let node = &Node::bridged("wire");
    let Node { web, lab, .. } = node;
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let agent = Agent::run_until(lab, any_mode(), &pods, &[OFF], &[web]);
    offloads_are(lab, MIRROR, false).unwrap();
    let frames = shown_as_on_a_wire(node, MIRROR);
    let mut expected = Verdicts::new();
    count(&mut expected, &frames, |_| "copied");
    wait_counted(lab, web, &expected);
    agent.stop();

    // The next agent runs without the flag: it resets its own device to the default offloads, so copies can be
    // super-frames.
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    agent.wait_for_log(&["the mirror interface is up"]);
    offloads_are(lab, MIRROR, true).unwrap();
    let frames = shown_as_they_are(node, MIRROR);
    count(&mut expected, &frames, |_| "copied");
    wait_counted(lab, web, &expected);
}

#[test]
fn super_frames_that_are_cut_stay_one_copy_without_offloads() {
    const SNAPLEN: usize = 96;
    let Node { web, db, lab } = &Node::bridged("cut-wire");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true").annotated("podmirror.io/snaplen", "96")]);
    let _agent = Agent::run_until(lab, any_mode(), &pods, &[OFF], &[web]);
    // Ignores the TCP checksum, which the kernel computes over the remaining bytes.
    let cut = |frames: &Frames| {
        frames.iter().fold(Frames::default(), |cut, (frame, times)| {
            let mut kept = frame[..frame.len().min(SNAPLEN)].to_vec();
            if let Some(checksum) = kept.get_mut(50..52).filter(|_| frame[12..14] == [8, 0]) {
                checksum.fill(0);
            }
            cut.with(&kept, times)
        })
    };
    let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), MIRROR));
    Conversation::open(web, db, db.v4()).exchange(1_000_000);
    // The end of the connection may be mirrored after a first comparison, so nothing is compared after a successful
    // one.
    web.ping(db.v4(), 1, 56);
    eventually(SOON, || cut(&mirror.frames()).same_as(&cut(&inside.capture.frames())));
    let (sent, _) = inside.stop();
    assert!(sent.iter().any(|(frame, _)| frame.len() > WIRE), "TCP uses super-frames");
}

#[test]
fn the_mirror_interface_has_no_offloads_after_it_was_deleted_or_given_them() {
    let node = &Node::bridged("again");
    let Node { web, lab, .. } = node;
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let arguments = ["run", "--pods-from", pods.path(), "--attach", any_mode().name()];
    let agent = Agent::with_environment(lab, &arguments, &[("PODMIRROR_MIRROR_OFFLOADS", "false")]);
    let ifindex = lab.wait_mirrored(&[web]).mirror().ifindex;
    lab.node().ip(&format!("link delete {MIRROR}"));
    let status = lab.wait_status(|status| {
        let again = status.mirror().up && status.mirror().ifindex.is_some_and(|now| Some(now) != ifindex);
        check(again, || "the mirror interface is not made again".into())
    });
    // Without waiting: the new device has no offloads from its first moment.
    offloads_are(lab, MIRROR, false).unwrap();
    shown_as_on_a_wire(node, MIRROR);

    lab.node().run(&format!("ethtool -K {MIRROR} tx on tso on"));
    eventually(SOON, || offloads_are(lab, MIRROR, false));
    shown_as_on_a_wire(node, MIRROR);
    assert_eq!(lab.status().mirror().ifindex, status.mirror().ifindex);
    // A concurrent round may have found no mirror interface; there must be no other warning.
    let unwelcome = ["WARN", "ERROR"].map(|level| agent.log_with(&[level])).concat();
    let unwelcome: Vec<_> = unwelcome.iter().filter(|line| !line.contains("no longer exists")).collect();
    assert!(unwelcome.is_empty(), "{unwelcome:#?}");
}

#[test]
fn a_device_that_exists_loses_its_offloads_only_when_that_was_told() {
    let node = &Node::bridged("found-wire");
    let Node { web, lab, .. } = node;
    lab.node().ip("link add cap0 type veth peer name cap1");
    lab.node().ip("link set cap1 up");
    lab.node().ip("link set cap0 up");
    let (before, queue_before) = (features(lab, "cap0"), queue(lab, "cap0"));
    offloads_are(lab, "cap0", true).unwrap();
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let iface = ["--mirror-iface", "cap0"];
    for (arguments, stays) in
        [(&iface[..], true), (&["--mirror-iface", "cap0", OFF], false), (&iface[..], false)]
    {
        let agent = Agent::run(lab, any_mode(), &pods, arguments);
        agent.wait_for_log(&["the mirror interface is up"]);
        lab.wait_mirrored(&[web]);
        if stays {
            assert_eq!(features(lab, "cap0"), before);
            assert_eq!(agent.log_with(&["overtake"]).len(), 0);
            shown_as_they_are(node, "cap0");
        } else {
            // They stay off without the flag, because the agent does not know which were on before.
            offloads_are(lab, "cap0", false).unwrap();
            shown_as_on_a_wire(node, "cap0");
        }
        // The device is not the agent's, so it gets no queue; the consequence is reported once.
        assert_eq!(queue(lab, "cap0"), queue_before);
        let told = agent.log_with(&["WARN", "can be reordered", "qdisc add dev cap0"]).len();
        assert_eq!(told, usize::from(arguments.contains(&OFF)), "{:#?}", agent.log());
        agent.stop();
    }
    let after = features(lab, "cap0");
    lab.cleanup();
    assert_eq!(features(lab, "cap0"), after, "it is left as it is");
    lab.node().run("ethtool -K cap0 tx on tso on");
    offloads_are(lab, "cap0", true).unwrap();
}

#[test]
fn offloads_that_cannot_be_switched_off_are_named_once() {
    let node = &Node::bridged("fixed");
    let Node { web, lab, .. } = node;
    lab.node().ip("link add cap0 type veth peer name cap1");
    lab.node().ip("link set cap1 up");
    lab.node().ip("link set cap0 up");
    // A macvlan leaves all offloads to its lower device.
    lab.node().ip("link add stiff link cap0 type macvlan");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let agent = Agent::run_until(lab, any_mode(), &pods, &["--mirror-iface", "stiff", OFF], &[web]);
    let line = agent.wait_for_log(&["cannot disable these offloads"]);
    for part in ["WARN", "stiff", "tx-checksum-ip-generic", "tx-tcp-segmentation"] {
        assert!(line.contains(part), "no {part:?} in {line}");
    }
    shown_as_they_are(node, "stiff");
    assert_eq!(agent.log_with(&["offloads"]).len(), 1, "{:#?}", agent.log());
}
