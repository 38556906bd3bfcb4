//! Pods whose devices have names or aliases that are not UTF-8, by accident or because the pod wants to hide them: they
//! are mirrored like all others.

use std::{ffi::OsStr, os::unix::ffi::OsStrExt as _};

use mirror_tests::{Agent, AttachMode, Capture, Lab, PodNs, PodSpec, PodsFile, check};

use crate::{Inside, MIRROR, Node, any_mode, shows};

/// Sets an alias and an alternative name of `eth0` from inside the pod. The kernel accepts any bytes.
#[track_caller]
fn spoil(pod: &PodNs) {
    for words in [["link", "set", "eth0", "alias"], ["link", "property", "add", "dev"]] {
        let more: &[&[u8]] = if words[1] == "set" { &[b"\xff"] } else { &[b"eth0", b"altname", b"a\xfe"] };
        let mut ip = pod.netns().command("ip");
        let done = ip.args(words).args(more.iter().map(|word| OsStr::from_bytes(word))).status();
        assert!(done.unwrap().success(), "{words:?}");
    }
}

/// Checks that no problem of the pod is reported, and that everything that it sends and receives is mirrored.
#[track_caller]
fn is_mirrored(lab: &Lab, agent: &Agent, web: &PodNs, db: &PodNs) {
    let inside = Inside::of(web);
    let mirror = Capture::start(lab.node(), MIRROR);
    db.ping(web.v4(), 5, 56);
    shows(&mirror, || inside.capture.frames());
    let (sent, received) = inside.stop();
    assert!(sent.len() >= 5 && received.len() >= 5);
    mirror.stop().same_as(&sent.and(&received)).unwrap();
    let notes = lab.status().notes.unwrap();
    assert_eq!(notes["not_mirrored"], serde_json::json!([]));
    for told in ["not mirrored", "\"ERROR\""] {
        assert_eq!(agent.log_with(&[told]), Vec::<String>::new());
    }
}

#[test]
fn a_pod_cannot_hide_behind_texts_that_are_not_utf_8() {
    let Node { mut web, db, lab } = Node::bridged("alias");
    let pods = PodsFile::new(&lab, &[PodSpec::of(&web).mirror("true")]);
    let agent = Agent::run(&lab, any_mode(), &pods, &[]);
    let before = lab.wait_mirrored(&[&web]);
    spoil(&web);
    // A new NIC makes the agent read the devices at once, and not within a minute.
    lab.bridge("br1");
    web.add_nic(&lab, "br1");
    let status = lab.wait_taps(&[web.veth_host(), &web.nics()[1].host]);
    let [old, new] = [&before, &status].map(|status| status.tap(web.veth_host()));
    assert_eq!((&new.pod, &new.nic, new.serial), (&old.pod, &old.nic, old.serial));
    is_mirrored(&lab, &agent, &web, &db);
    agent.stop();

    // A new agent finds the NICs, too.
    let agent = Agent::run(&lab, any_mode(), &pods, &[]);
    lab.wait_status(|status| check(status.notes.is_some(), || "no agent answers".to_owned()));
    lab.wait_taps(&[web.veth_host(), &web.nics()[1].host]);
    is_mirrored(&lab, &agent, &web, &db);
    agent.stop();
}

in_both_modes!(a_nic_that_is_tapped_inside_cannot_hide_either);

/// No veth of the node leads to the NIC, so only the list of devices inside the pod shows it.
fn a_nic_that_is_tapped_inside_cannot_hide_either(mode: AttachMode) {
    let lab = Lab::new("alias-inside");
    lab.node().ip("link add up0 type veth peer name up1");
    lab.node().ip("link set up0 up");
    lab.node().ip("link set up1 up");
    let [web, db] = ["web", "db"].map(|name| lab.pod_over(name, "macvlan mode bridge", "up0"));
    spoil(&web);
    let pods = PodsFile::new(&lab, &[PodSpec::of(&web).mirror("true")]);
    let agent = Agent::run(&lab, mode, &pods, &[]);
    lab.wait_taps(&["eth0"]);
    is_mirrored(&lab, &agent, &web, &db);
    agent.stop();
}
