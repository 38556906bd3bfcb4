//! Pods with netkit devices (Linux 6.7 and newer). The pod's egress is tapped in the chain of its device, to which only
//! the node can attach: before a CNI's programs there can redirect packets.

use std::collections::BTreeMap;

use mirror_tests::{
    Agent, AttachMode, Capture, Comparison, Frame, Frames, Lab, PodNs, PodSpec, PodsFile, Shortcut, check,
    has_kind, while_pinging,
};
use serde_json::Value;

use crate::{
    Inside, MIRROR, Node,
    bypass::OFTEN,
    complete::{talk, talk_in_frames},
    coverage::{FEW_READINGS, no_alarm, reasons, wait_states},
    shows,
};

/// A node, if the kernel has netkit.
fn lab(story: &str) -> Option<Lab> {
    let lab = Lab::new(story);
    has_kind(&lab, "netkit").then_some(lab)
}

fn bridged(story: &str) -> Option<Node> {
    let lab = lab(story)?;
    lab.bridge("br0");
    Some(Node { web: lab.netkit_pod("web", "br0"), db: lab.netkit_pod("db", "br0"), lab })
}

fn routed(story: &str) -> Option<Node> {
    let lab = lab(story)?;
    Some(Node { web: lab.routed_netkit_pod("web"), db: lab.routed_netkit_pod("db"), lab })
}

/// One pod is mirrored: each packet once, unchanged, and each is counted. Returns what the pod has sent and received.
#[track_caller]
fn is_mirrored(node: &Node, talk: impl Fn(&PodNs, &PodNs)) -> [Frames; 2] {
    let Node { web, db, lab } = node;
    let before = lab.network_state();
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true"), PodSpec::of(db)]);
    let agent = Agent::run(lab, AttachMode::Tcx, &pods, &[]);
    let status = lab.wait_mirrored(&[web]);
    let attached =
        [("egress", "tcx"), ("ingress", "netkit")].map(|(hook, way)| (hook.to_owned(), way.to_owned()));
    assert_eq!(status.tap(web.veth_host()).attached, BTreeMap::from(attached));
    let inside = Inside::of(web);
    let mirror = Capture::start(lab.node(), MIRROR);
    talk(web, db);
    shows(&mirror, || inside.capture.frames());
    lab.wait_status(|status| {
        let tap = status.tap(web.veth_host());
        let (sent, received) = inside.frames();
        let copied = [tap.packets("egress", "copied"), tap.packets("ingress", "copied")];
        let expected = [sent.len() as u64, received.len() as u64];
        let all = expected.iter().sum::<u64>();
        // Where no device has a MAC address, a frame does not show its sender.
        let is_split = web.eth0().mac == db.eth0().mac || copied == expected;
        check(is_split && tap.total("copied") == all && tap.seen() == all, || {
            format!("{copied:?} instead of {expected:?}")
        })
    });
    let (sent, received) = inside.stop();
    mirror.stop().same_as(&sent.and(&received)).unwrap();
    agent.stop();
    lab.cleanup();
    assert_eq!(lab.network_state(), before);
    [sent, received]
}

#[test]
fn a_netkit_pod_on_a_bridge_is_mirrored_completely() {
    let Some(node) = bridged("netkit") else { return };
    let frames = is_mirrored(&node, |web, db| {
        talk(web, db);
        talk_in_frames(web, db);
        talk_in_frames(db, web);
    });
    for frames in frames {
        assert!(frames.iter().any(|(frame, _)| frame.len() > 1514), "TCP uses super-frames");
    }
}

#[test]
fn a_routed_netkit_pod_without_addresses_is_mirrored_completely() {
    let Some(node) = routed("netkit-l3") else { return };
    is_mirrored(&node, talk);
}

/// A packet socket can bypass the tc hook of a device, but not the chain of a netkit device.
#[test]
fn what_is_sent_around_the_hook_of_a_pod_is_mirrored() {
    const FRAMES: usize = 20;
    let Some(Node { web, db, lab }) = &bridged("netkit-around") else { return };
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true"), PodSpec::of(db)]);
    let _agent = Agent::run_until(lab, AttachMode::Tcx, &pods, &[], &[web]);
    let mirror = Capture::start(lab.node(), MIRROR);
    let socket = web.netns().sender("eth0").around_the_hook();
    let frame = Frame::new(db.eth0().mac, web.eth0().mac).filled(100, 7).bytes();
    for _ in 0..FRAMES {
        socket.send(&frame).unwrap();
    }
    shows(&mirror, || Frames::default().with(&frame, FRAMES));
    lab.wait_status(|status| {
        let copied = status.tap(web.veth_host()).packets("egress", "copied");
        check(copied == FRAMES as u64, || format!("{copied} copied"))
    });
}

/// A CNI redirects the pod's packets to another device, after the agent's program: the node side of the pod's NIC
/// counts none of them, and each is copied nevertheless.
#[test]
fn what_a_cni_sends_elsewhere_is_mirrored_and_no_bypass() {
    let Some(Node { web, db, lab }) = &bridged("netkit-elsewhere") else { return };
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true"), PodSpec::of(db)]);
    let agent = Agent::run_until(lab, AttachMode::Tcx, &pods, &[], &[web]);
    let _cni = Shortcut::attach(lab, web.veth_host(), db.veth_host());
    let received = || {
        let shown = lab.node().run(&format!("ip -json -stats link show {}", web.veth_host()));
        serde_json::from_str::<Value>(&shown).unwrap()[0]["stats64"]["rx"]["packets"].as_u64().unwrap()
    };
    let before = received();
    let comparison = Comparison::of(web.netns(), lab);
    let talk = || web.ping(db.v4(), 5, 56);
    wait_states(lab, web, FEW_READINGS, ["Covered", "Covered"], talk);
    no_alarm(lab, &[web], 3, talk);
    assert!(!comparison.is_equal().is_empty());
    assert_eq!(received(), before, "they go another way");
    assert_eq!(reasons(lab), []);
    assert!(agent.log_with(&["\"Bypassed\""]).is_empty(), "{:#?}", agent.log());
}

/// The next agent's program replaces the first one's in the same link: no packet is missed or copied twice.
#[test]
fn a_mirror_of_a_netkit_pod_outlives_the_agent() {
    let Some(Node { web, db, lab }) = &bridged("netkit-restart") else { return };
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true"), PodSpec::of(db)]);
    let agent = Agent::run_until(lab, AttachMode::Tcx, &pods, &[], &[web]);
    let comparison = Comparison::of(web.netns(), lab);
    while_pinging(OFTEN, db, web, || {
        agent.kill();
        let next = Agent::run(lab, AttachMode::Tcx, &pods, &[]);
        lab.wait_status(|status| check(status.notes.is_some(), || "the next one does not run yet".into()));
        lab.wait_mirrored(&[web]);
        next.stop();
    });
    assert!(!comparison.is_equal().is_empty());
    pods.write(&[PodSpec::of(web)]);
    let _last = Agent::run(lab, AttachMode::Tcx, &pods, &[]);
    lab.wait_taps(&[]);
}
