//! Root inside a pod attacks the relay device (`exit`) that the agent has created there.

use std::{cell::Cell, fs, time::Duration};

use mirror_tests::{
    Agent, AttachMode, Capture, Frame, Frames, Neighbour, PodNs, PodSpec, PodsFile, SOON, check, eventually,
};
use serde_json::Value;

use super::{
    EXIT, MACVLAN, Scene, copied_by_the_sender, has_exit, mirrored, shows, tap, wait_counted, wait_tapped,
};
use crate::{
    Inside, MIRROR, any_mode,
    coverage::{CLEAR, FEW_READINGS, reasons, wait_states},
};

/// The deadline for the report of a small bypass.
const BYPASS: Duration = Duration::from_secs(60);

in_both_modes!(
    no_mark_of_a_pod_hides_what_it_sends,
    a_pod_cannot_use_its_exit,
    pods_exchange_no_packets_for_one_of_them_by_the_hub,
    a_program_ahead_of_a_tap_inside_is_told_within_seconds,
    what_can_change_the_copies_at_the_exit_is_told,
    a_copy_that_goes_astray_does_not_count_as_copied,
);

/// Root inside a pod removes, replaces and uses the relay device. Each packet that is not copied is counted, no packet
/// of the pod reaches the mirror interface through the relay device, and the pod's own packets pass.
fn a_pod_cannot_use_its_exit(mode: AttachMode) {
    let (scene, pods, agent) = mirrored("macvlan-hostile", mode);
    let Scene { web, db, lab } = &scene;
    let mirror = Capture::start(lab.node(), MIRROR);
    let exit = web.netns().sender(EXIT);
    for number in 0..50 {
        let forged = Frame::new(Frame::BROADCAST, [2, 9, 9, 9, 9, 9]).filled(99, number).bytes();
        let refused = exit.send(&forged).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::ENOBUFS), "the hub drops it");
    }
    let inside = Inside::of(web);
    web.ping(db.v4(), 5, 56);
    shows(&mirror, || inside.capture.frames());

    // The relay device is down: the copies that it would have carried are counted, until the agent sets it up again in
    // its next round, which any event triggers.
    web.netns().ip(&format!("link set {EXIT} down"));
    web.ping(db.v4(), 5, 56);
    eventually(SOON, || {
        let verdicts = tap(&lab.status(), web).map(|tap| tap.verdicts()).unwrap_or_default();
        let of = |what: &str| verdicts.get(what).copied().unwrap_or_default();
        let (sent, received) = inside.frames();
        let shown = mirror.frames();
        let copied = [of("egress copied"), of("ingress copied")];
        let down = [of("egress target_down"), of("ingress target_down")];
        let all = [sent.len() as u64, received.len() as u64];
        let is_right = all == [copied[0] + down[0], copied[1] + down[1]]
            && shown.len() as u64 == copied[0] + copied[1]
            && shown.less(&sent.and(&received)).is_empty();
        check(is_right, || format!("{all:?} frames, {} shown, {verdicts:?}", shown.len()))
    });
    pods.write(&[PodSpec::of(web).mirror("true").annotated("podmirror.io/filter", "greater 1")]);
    let is_up = || {
        let link = web.netns().try_run(&format!("ip -o link show {EXIT}"));
        String::from_utf8_lossy(&link.stdout).contains(",UP")
    };
    eventually(SOON, || check(is_up(), || "the exit is not up".to_owned()));
    // The device is renamed. It is set down last, because that wakes the agent. An old kernel does not rename a device
    // that is up.
    let is_renamed = web.netns().try_run(&format!("ip link set {EXIT} name lo9")).status.success();
    web.netns().ip(&format!("link set {} down", if is_renamed { "lo9" } else { EXIT }));
    pods.write(&[PodSpec::of(web).mirror("true")]);
    eventually(SOON, || check(is_up(), || "no exit".to_owned()));
    let inside = Inside::of(web);
    let mirror = Capture::start(lab.node(), MIRROR);
    web.ping(db.v4(), 5, 56);
    shows(&mirror, || inside.capture.frames());

    agent.stop();
}

/// Root in two pods of a node creates devices over the relay hub that would let them talk, and bypass every
/// NetworkPolicy. If root changes the mode of the relay device, the agent creates it again. The hub drops packets from
/// one such device to the address of another. Broadcasts between them pass, which docs/security.md documents: they show
/// here that the path is open.
fn pods_exchange_no_packets_for_one_of_them_by_the_hub(mode: AttachMode) {
    let scene = Scene::new("macvlan-talk", MACVLAN);
    let Scene { web, db, lab } = &scene;
    let pods = scene.pods_file(&[web, db]);
    let agent = Agent::run(lab, mode, &pods, &[]);
    wait_tapped(lab, &[web, db]);
    eventually(SOON, || check(scene.exits() == [true; 2], || "no exit".into()));
    let pods_with_macs = || [(web, [2, 0, 0, 0, 7, 1]), (db, [2, 0, 0, 0, 7, 2])];
    for (pod, [.., last]) in pods_with_macs() {
        let netns = pod.netns();
        netns.ip(&format!("link add link {EXIT} name above type macvlan mode bridge"));
        netns.ip(&format!("link set above address 02:00:00:00:07:0{last} up"));
    }
    let arrived = Capture::start(db.netns(), "above");
    let [(_, from), (_, to)] = pods_with_macs();
    let sender = web.netns().sender("above");
    for (number, to) in [to; 50].into_iter().chain([Frame::BROADCAST]).enumerate() {
        let _ = sender.send(&Frame::new(to, from).filled(99, number).bytes());
    }
    let of_web = || arrived.frames().only(|frame| frame[6..12] == from);
    eventually(SOON, || check(!of_web().is_empty(), || "no broadcast has come".into()));
    assert!(of_web().only(|frame| frame[..6] == to).is_empty(), "{}", of_web());

    for (pod, _) in pods_with_macs() {
        pod.netns().ip("link delete above");
        pod.netns().ip(&format!("link set {EXIT} type macvlan mode bridge"));
    }
    eventually(2 * SOON, || {
        let shown = [web, db].map(|pod| pod.netns().try_run(&format!("ip -d -o link show {EXIT}")).stdout);
        let shown = shown.map(|link| String::from_utf8_lossy(&link).into_owned());
        pods.write_to_wake(&[web, db].map(|pod| PodSpec::of(pod).mirror("true")));
        check(shown.iter().all(|link| link.contains("macvlan mode private")), || format!("{shown:?}"))
    });
    wait_tapped(lab, &[web, db]);
    agent.stop();
    lab.cleanup();
    assert_eq!(scene.exits(), [false; 2]);
}

/// A pod has a device of its own with the name of the relay device. The agent does not change it, and reports it.
#[test]
fn a_device_of_the_pod_is_never_taken_for_an_exit() {
    let scene = Scene::new("macvlan-name", MACVLAN);
    let Scene { web, db, lab } = &scene;
    web.netns().ip(&format!("link add {EXIT} type veth peer name other"));
    let pods = scene.pods_file(&[web]);
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    agent.wait_for_log(&["not mirrored", "cannot create podmirror"]);
    wait_tapped(lab, &[web]);
    web.ping(db.v4(), 5, 56);
    lab.wait_status(|status| {
        let lost = tap(status, web).map_or(0, |tap| tap.total("target_down"));
        let notes = status.notes.as_ref().map(ToString::to_string).unwrap_or_default();
        check(lost >= 10 && notes.contains("NoRelayDevice"), || format!("{lost} {notes}"))
    });
    agent.stop();
    lab.cleanup();
    assert!(has_exit(web), "it is the pod's");
}

/// Root in a mirrored pod writes every mark on its packets that the agent could have written there: each is copied once
/// nevertheless, wherever its tap is. Nor does such a packet pass as a copy.
fn no_mark_of_a_pod_hides_what_it_sends(mode: AttachMode) {
    /// The agent's marks are in the upper byte, Cilium's flags in the lower one.
    const MARKS: std::ops::Range<usize> = 0..256;
    let numbers = || MARKS.map(|mark| mark << 8 | 0xa5);
    let scene = Scene::new("marks", MACVLAN);
    let Scene { web, db, lab } = &scene;
    lab.bridge("br0");
    let (veth, other) = (&lab.pod("veth", "br0"), &lab.pod("other", "br0"));
    let pods = PodsFile::new(lab, &[web, db, veth, other].map(|pod| PodSpec::of(pod).mirror("true")));
    let agent = Agent::run(lab, mode, &pods, &[]);
    let devices = [web, db, veth, other].map(PodNs::veth_host);
    lab.wait_taps(&devices);
    let inside = [web, db, veth, other].map(Inside::of);
    let mirror = Capture::start(lab.node(), MIRROR);
    let markers = [web, veth].map(|pod| Neighbour::that_marks(pod.netns(), "eth0"));
    for (from, to) in [(web, db), (veth, other)] {
        for number in numbers() {
            from.send_frame(&Frame::new(to.eth0().mac, from.eth0().mac).filled(200, number).bytes());
        }
        from.ping(to.v4(), 5, 56);
    }
    shows(&mirror, || inside.iter().fold(Frames::default(), |all, inside| all.and(&inside.frames().0)));
    for (pod, inside) in [web, db, veth, other].into_iter().zip(&inside) {
        let (sent, received) = inside.frames();
        assert!(sent.len().max(received.len()) >= MARKS.len());
        wait_counted(lab, pod, || copied_by_the_sender(inside));
    }

    // Marked packets through the relay device.
    let _at_exit = Neighbour::that_marks(web.netns(), EXIT);
    let exit = web.netns().sender(EXIT);
    for number in numbers() {
        let forged = Frame::new(Frame::BROADCAST, [2, 9, 9, 9, 9, 9]).filled(99, number).bytes();
        let refused = exit.send(&forged).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::ENOBUFS), "the hub drops it");
    }
    web.ping(db.v4(), 1, 57);
    shows(&mirror, || inside.iter().fold(Frames::default(), |all, inside| all.and(&inside.frames().0)));
    drop(markers);
    agent.stop();
    lab.cleanup();
}

/// The kernel does not announce such a program, so the agent checks every second.
fn a_program_ahead_of_a_tap_inside_is_told_within_seconds(mode: AttachMode) {
    if !AttachMode::Tcx.is_applicable() {
        eprintln!("not applicable: the program is attached by TCX; `filters` has a filter ahead");
        return;
    }
    let (scene, _pods, agent) = mirrored("macvlan-ahead", mode);
    let Scene { web, db, lab } = &scene;
    let talk = || web.ping(db.v4(), 5, 56);
    wait_states(lab, web, CLEAR, ["Covered", "Covered"], talk);
    let ahead = Neighbour::inside(web.netns(), "eth0", "last_word").unwrap();
    // Without traffic, no packet is missing.
    let told = wait_states(lab, web, SOON, ["Hidden", "Hidden"], || {});
    assert!(told["ingress"]["message"].as_str().unwrap().contains("\"last_word\""), "{told}");
    let reasons_of = || reasons(lab).into_iter().map(|(reason, _)| reason).collect::<Vec<_>>();
    assert_eq!(reasons_of(), ["Hidden", "Hidden"]);
    drop(ahead);
    eventually(SOON, || check(reasons_of().is_empty(), || format!("{:?}", reasons_of())));
    wait_states(lab, web, CLEAR, ["Covered", "Covered"], talk);
    agent.stop();
}

/// A filter or a queue of the pod at the relay device could rewrite the copies. No counter shows that, so the agent
/// reports it. The agent removes the queue at the next event.
fn what_can_change_the_copies_at_the_exit_is_told(mode: AttachMode) {
    let (scene, pods, agent) = mirrored("exit-filter", mode);
    let Scene { web, db, lab } = &scene;
    let talk = || web.ping(db.v4(), 5, 56);
    wait_states(lab, web, CLEAR, ["Covered", "Covered"], talk);
    let mirror = Capture::start(lab.node(), MIRROR);
    let inside = Inside::of(web);
    web.netns().tc(&format!("qdisc add dev {EXIT} clsact"));
    web.netns().tc(&format!("filter add dev {EXIT} egress pref 7 protocol all u32 match u32 0 0 flowid 1:1"));
    let told = wait_states(lab, web, SOON, ["Hidden", "Hidden"], || {});
    let message = told["ingress"]["message"].as_str().unwrap();
    assert!(message.contains("a filter (u32 at priority 7)") && message.contains("leave the pod"), "{told}");
    let reasons_of = || reasons(lab).into_iter().map(|(reason, _)| reason).collect::<Vec<_>>();
    assert_eq!(reasons_of(), ["Hidden", "Hidden"]);
    web.netns().tc(&format!("qdisc delete dev {EXIT} clsact"));
    eventually(SOON, || check(reasons_of().is_empty(), || format!("{:?}", reasons_of())));
    wait_states(lab, web, CLEAR, ["Covered", "Covered"], talk);
    shows(&mirror, || inside.capture.frames());

    web.netns().tc(&format!("qdisc replace dev {EXIT} root pfifo limit 10"));
    let told = wait_states(lab, web, SOON, ["Hidden", "Hidden"], || {});
    assert!(told["egress"]["message"].as_str().unwrap().contains("a queue (pfifo)"), "{told}");
    pods.write(&[PodSpec::of(web).mirror("true").annotated("podmirror.io/filter", "greater 1")]);
    eventually(SOON, || {
        let root = web.netns().tc(&format!("qdisc show dev {EXIT} root"));
        check(root.contains("noqueue"), || root)
    });
    wait_tapped(lab, &[web]);
    let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), MIRROR));
    talk();
    shows(&mirror, || inside.capture.frames());

    wait_states(lab, web, CLEAR, ["Covered", "Covered"], talk);
    // Behind that many queues elsewhere, one at the relay device would not be seen. A link needs no list of filters.
    if mode == AttachMode::Tcx {
        let leaf = |number| {
            format!(
                "class add dev eth0 parent 1: classid 1:{number:x} htb rate 1gbit\n\
                 qdisc add dev eth0 parent 1:{number:x} pfifo\n"
            )
        };
        let lines: String = (1..=1001).map(leaf).collect();
        let file = lab.files().join("queues");
        fs::write(&file, format!("qdisc add dev eth0 root handle 1: htb\n{lines}")).unwrap();
        web.netns().tc(&format!("-batch {}", file.display()));
        let told = wait_states(lab, web, SOON, ["Hidden", "Hidden"], || {});
        assert!(told["egress"]["message"].as_str().unwrap().contains("one of more than 1000"), "{told}");
    }
    agent.stop();
}

/// Root in the pod removes the mark from its copies at the relay device, and sends them out of the NIC, where the tap
/// sees them while it waits for the result of the first copy. Neither counts as copied.
fn a_copy_that_goes_astray_does_not_count_as_copied(mode: AttachMode) {
    const FRAMES: usize = 20;
    if !AttachMode::Tcx.is_applicable() {
        eprintln!("not applicable: the program is attached by TCX");
        return;
    }
    let (scene, _pods, agent) = mirrored("exit-astray", mode);
    let Scene { web, db, lab } = &scene;
    let mirror = Capture::start(lab.node(), MIRROR);
    web.netns().tc(&format!("qdisc add dev {EXIT} clsact"));
    web.netns().tc(&format!(
        "filter add dev {EXIT} egress protocol 0x88b5 u32 match u16 1 0xffff at 6 \
         action mirred egress mirror dev eth0"
    ));
    let unmarker = Neighbour::inside(web.netns(), EXIT, "unmarker").unwrap();
    for _ in 0..FRAMES {
        web.send_frame(&Frame::new(db.eth0().mac, web.eth0().mac).filled(200, 0).bytes());
    }
    drop(unmarker);
    web.netns().tc(&format!("qdisc delete dev {EXIT} clsact"));
    wait_counted(lab, web, || [("egress", "target_down", 2 * FRAMES)]);
    let inside = Inside::of(web);
    web.ping(db.v4(), 1, 57);
    shows(&mirror, || inside.capture.frames());
    agent.stop();
}

/// A process with CAP_NET_RAW sends one packet in ten around the tap (PACKET_QDISC_BYPASS). These packets have no copy,
/// and the pod's NIC is reported.
#[test]
fn packets_around_the_hook_of_a_macvlan_are_told() {
    let (scene, _pods, agent) = mirrored("macvlan-around", any_mode());
    let Scene { web, db, lab } = &scene;
    let talk = || web.ping(db.v4(), 45, 56);
    wait_states(lab, web, FEW_READINGS, ["Covered", "Covered"], talk);
    assert_eq!(reasons(lab), []);
    let mirror = Capture::start(lab.node(), MIRROR);
    let socket = web.netns().sender("eth0").around_the_hook();
    let around = Frame::new(db.eth0().mac, web.eth0().mac).filled(100, 7).bytes();
    let sent = Cell::new(0);
    let bypassed = wait_states(lab, web, BYPASS, ["Covered", "Bypassed"], || {
        talk();
        for _ in 0..5 {
            socket.send(&around).unwrap();
            sent.set(sent.get() + 1);
        }
    });
    let gap = |of: &Value| of["egress"]["carried"].as_u64().unwrap() - of["egress"]["seen"].as_u64().unwrap();
    let told = gap(&bypassed);
    eprintln!("around: {told} of {} packets are in the report: {bypassed}", sent.get());
    assert!((1..=sent.get()).contains(&told), "{bypassed}");
    assert_eq!(mirror.frames().count(&around), 0);
    eventually(FEW_READINGS, || {
        let reasons = reasons(lab);
        check(matches!(&reasons[..], [(reason, _)] if reason == "Bypassed"), || format!("{reasons:?}"))
    });
    agent.wait_for_log(&["partly mirrored", "\"Bypassed\"", "egress: "]);
    agent.stop();
}
