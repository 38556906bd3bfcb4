//! Pods with devices that the agent cannot read completely, by accident or because the pod causes it.

use std::{ffi::OsStr, os::unix::ffi::OsStrExt as _};

use mirror_tests::{Agent, Capture, Lab, PodNs, PodSpec, PodsFile, Status, check};

use crate::{Inside, MIRROR, Node, any_mode, shows};

/// Sets the alias of `eth0` from inside the pod. The kernel accepts any bytes.
#[track_caller]
fn set_alias(pod: &PodNs, alias: &[u8]) {
    let mut ip = pod.netns().command("ip");
    let done = ip.args(["link", "set", "dev", "eth0", "alias"]).arg(OsStr::from_bytes(alias)).status();
    assert!(done.unwrap().success());
}

/// The pods that are not mirrored, by the status: reasons and messages.
fn not_mirrored(status: &Status) -> Vec<(String, String)> {
    let text = |note: &serde_json::Value, key: &str| note[key].as_str().unwrap().to_owned();
    let notes = status.notes.as_ref().unwrap()["not_mirrored"].as_array().unwrap();
    notes.iter().map(|note| (text(note, "reason"), text(note, "message"))).collect()
}

/// Waits until the status reports no pod as not mirrored.
#[track_caller]
fn all_is_mirrored(lab: &Lab) {
    lab.wait_status(|status| check(not_mirrored(status).is_empty(), || "it is still told".into()));
}

#[test]
fn a_pod_cannot_hide_behind_an_alias_that_cannot_be_decoded() {
    let Node { mut web, db, lab } = Node::bridged("alias");
    let spec = PodSpec::of(&web).mirror("true");
    let pods = PodsFile::new(&lab, std::slice::from_ref(&spec));
    let agent = Agent::run(&lab, any_mode(), &pods, &[]);
    let before = lab.wait_mirrored(&[&web]);

    set_alias(&web, b"\xff");
    // A new NIC is why the agent looks at once, and not within a minute.
    lab.bridge("br1");
    web.add_nic(&lab, "br1");
    let status =
        lab.wait_status(|status| check(!not_mirrored(status).is_empty(), || "nothing is told of it".into()));
    let told = not_mirrored(&status);
    assert_eq!(told.len(), 1, "{told:?}");
    let (reason, message) = &told[0];
    assert_eq!(reason, "NetnsUnreadable");
    assert!(message.contains(&format!("the other end of {} cannot be read", web.veth_host())), "{message}");
    let tap = lab.wait_mirrored(&[&web]).tap(web.veth_host()).clone();
    let old = before.tap(web.veth_host());
    assert_eq!((&tap.pod, &tap.nic, &tap.settings), (&old.pod, &old.nic, &old.settings));
    lab.wait_metrics(|metrics| metrics["podmirror_skipped_pods{reason=\"NetnsUnreadable\"}"] == 1.0);

    let inside = Inside::of(&web);
    let mirror = Capture::start(lab.node(), MIRROR);
    db.ping(web.v4(), 5, 56);
    shows(&mirror, || inside.capture.frames());
    let (sent, received) = inside.stop();
    assert!(sent.len() >= 5 && received.len() >= 5);
    mirror.stop().same_as(&sent.and(&received)).unwrap();

    // Told once, whatever wakes the agent.
    pods.write(&[spec.clone(), PodSpec::of(&db).mirror("true")]);
    lab.wait_mirrored(&[&web, &db]);
    let log = agent.log_with(&["not mirrored"]);
    assert_eq!(log.len(), 1, "{log:#?}");
    assert_eq!(agent.log_with(&["\"ERROR\""]), Vec::<String>::new());

    set_alias(&web, b"web");
    pods.write(&[spec]);
    lab.wait_taps(&[web.veth_host(), &web.nics()[1].host]);
    all_is_mirrored(&lab);
    lab.wait_metrics(|metrics| !metrics.contains_key("podmirror_skipped_pods{reason=\"NetnsUnreadable\"}"));
    agent.stop();
}

#[test]
fn a_namespace_that_cannot_be_read_does_not_hide_the_pods_own() {
    let Node { web, db: _db, lab } = &Node::bridged("hidden");
    let uid = format!("{:08x}-0000-4000-8000-0000000000a1", std::process::id());
    let other = lab.pod("other", "br0");
    set_alias(&other, b"\xff");
    let _older = lab.container(other.netns(), &format!("kubepods/pod{uid}/1"));
    let spec = PodSpec::named("web").uid(&uid).mirror("true");
    let pods = PodsFile::new(lab, std::slice::from_ref(&spec));
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    agent.wait_for_log(&["not mirrored", "\"default/web\"", "\"NetnsUnreadable\"", other.veth_host()]);
    lab.wait_taps(&[]);
    let _sandbox = lab.container(web.netns(), &format!("kubepods/pod{uid}/2"));
    pods.write(&[spec.annotated("example.org/changed", "true")]);
    lab.wait_mirrored(&[web]);
    all_is_mirrored(lab);
    agent.stop();
}
