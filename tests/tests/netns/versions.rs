//! An agent of another version leaves its mirror on the node: programs, pins and mirror interface. The maps of another
//! version have another layout, so the next agent ends that mirror and begins its own.
//!
//! This story simulates the other version by moving the pins to another version's directory.

use std::{fs, path::PathBuf};

use mirror_common::abi::ABI_VERSION;
use mirror_tests::{
    Agent, AttachMode, BpfObjects, Capture, Frames, Lab, PodSpec, PodsFile, SOON, TapStatus, check,
    eventually, while_pinging,
};

use crate::{Inside, MIRROR, Node, bypass::OFTEN, shows, with_qdisc};

in_both_modes!(
    the_next_agent_begins_anew,
    pins_of_another_version_end_no_mirror_of_this_one,
    cleanup_ends_the_mirror_of_another_version,
);

const OTHER: u32 = ABI_VERSION + 1;
/// Bytes of a copy. A snap length makes the second stage part of the mirror.
const SNAPLEN: usize = 96;

fn directory(lab: &Lab, version: u32) -> PathBuf {
    lab.bpffs().join(format!("podmirror/v{version}"))
}

/// Leaves a mirror of another version on the node. Returns its objects.
fn left_by_another_version(lab: &Lab, mode: AttachMode, pods: &PodsFile) -> BpfObjects {
    let agent = Agent::run(lab, mode, pods, &[]);
    lab.wait_status(|status| {
        let is_mirrored = status.taps.iter().any(TapStatus::is_attached) && status.mirror().up;
        check(is_mirrored, || format!("{status:?}"))
    });
    agent.stop();
    let objects = BpfObjects::of(lab);
    fs::rename(directory(lab, ABI_VERSION), directory(lab, OTHER)).unwrap();
    objects
}

fn mirrored(node: &Node) -> [PodSpec; 2] {
    let snaplen = SNAPLEN.to_string();
    let web = PodSpec::of(&node.web).mirror("true").annotated("podmirror.io/snaplen", &snaplen);
    [web, PodSpec::of(&node.db)]
}

#[track_caller]
fn all_are_gone(objects: &BpfObjects) {
    eventually(SOON, || {
        let left = objects.remaining();
        check(left == BpfObjects::default(), || format!("still there: {left:?}"))
    });
}

fn the_next_agent_begins_anew(mode: AttachMode) {
    let node = &Node::bridged("other-version");
    let Node { web, db, lab } = node;
    with_qdisc(lab, web, mode);
    let specs = mirrored(node);
    let pods = PodsFile::new(lab, &specs);
    let before = left_by_another_version(lab, mode, &pods);
    for command in [&["status"][..], &["attach", "--attach", mode.name(), web.veth_host()]] {
        let refused = lab.agent_exit(command);
        assert!(refused.code == Some(1) && refused.stderr.contains("another version"), "{refused:?}");
    }
    assert_eq!(before.remaining(), before, "nothing is changed yet");

    let agent = Agent::run(lab, mode, &pods, &[]);
    agent.wait_for_log(&["ended the mirror of another version"]);
    lab.wait_mirrored(&[web]);
    all_are_gone(&before);
    assert!(!directory(lab, OTHER).exists());
    let inside = Inside::of(web);
    let mirror = Capture::start(lab.node(), MIRROR);
    web.ping(db.v4(), 20, 500);
    let cut = || {
        let cut =
            |kept: Frames, (frame, times): (&[u8], _)| kept.with(&frame[..frame.len().min(SNAPLEN)], times);
        inside.capture.frames().iter().fold(Frames::default(), cut)
    };
    shows(&mirror, cut);
    mirror.stop();

    pods.write(&[PodSpec::of(web), PodSpec::of(db)]);
    lab.wait_mirrored(&[]);
    let mirror = Capture::start(lab.node(), MIRROR);
    web.ping(db.v4(), 20, 56);
    assert_eq!(mirror.stop().len(), 0, "a pod that opts out is not mirrored");
    agent.stop();
}

/// If a pod cannot be cleaned, the pins of another version stay, and each start of the agent ends that version's mirror
/// again. This must not detach the filters of this version: they have the same handle and names.
fn pins_of_another_version_end_no_mirror_of_this_one(mode: AttachMode) {
    let node = &Node::bridged("other-version-pins");
    let Node { web, db, lab } = node;
    with_qdisc(lab, web, mode);
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true"), PodSpec::of(db)]);
    Agent::run_until(lab, mode, &pods, &[], &[web]).stop();
    fs::create_dir(directory(lab, OTHER)).unwrap();
    let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), MIRROR));
    let agent = while_pinging(OFTEN, web, db, || {
        let agent = Agent::run(lab, mode, &pods, &[]);
        agent.wait_for_log(&["ended the mirror of another version"]);
        lab.wait_status(|status| {
            let is_mirrored = status.agent_running && status.taps.iter().any(TapStatus::is_attached);
            check(is_mirrored, || format!("{status:?}"))
        });
        agent
    });
    shows(&mirror, || inside.capture.frames());
    assert!(!directory(lab, OTHER).exists());
    agent.stop();
}

fn cleanup_ends_the_mirror_of_another_version(mode: AttachMode) {
    let node = &Node::bridged("other-version-cleanup");
    let Node { web, lab, .. } = node;
    with_qdisc(lab, web, mode);
    let network = lab.network_state();
    let specs = mirrored(node);
    let objects = left_by_another_version(lab, mode, &PodsFile::new(lab, &specs));
    lab.cleanup();
    all_are_gone(&objects);
    lab.network_is_as(&network);
}
