//! An agent takes over the objects of an agent of an older or newer version: without a gap and without a second copy.
//! Afterwards nothing of the other version is left.

use std::{fs, path::PathBuf};

use mirror_common::abi::ABI_VERSION;
use mirror_tests::{
    Agent, AttachMode, BpfObjects, Capture, EarlierAgent, Frames, Lab, PodSpec, PodsFile, SOON, check,
    eventually, while_talking,
};

use crate::{Inside, MIRROR, Node, any_mode, shows, with_qdisc};

in_both_modes!(
    a_mirror_of_version_3_is_taken_over,
    a_mirror_of_an_older_version_is_taken_over,
    a_mirror_of_a_newer_version_is_taken_over,
    copies_of_version_3_stay_cut_while_they_are_taken_over,
    cleanup_removes_what_version_3_has_left,
);

fn directory(lab: &Lab, version: u32) -> PathBuf {
    lab.bpffs().join(format!("podmirror/v{version}"))
}

/// Waits until there is no pin of another version than the agent's. A new list of the same pods wakes the agent, in
/// case it looked just before the kernel released the last program.
#[track_caller]
fn wait_for_own_pins_alone(lab: &Lab, pods: &PodsFile, specs: &[PodSpec]) {
    let own = directory(lab, ABI_VERSION);
    eventually(SOON, || {
        pods.write_to_wake(specs);
        let others: Vec<_> = lab.pins().into_iter().filter(|pin| !pin.starts_with(&own)).collect();
        check(others.is_empty(), || format!("still pinned: {others:?}"))?;
        // The directory goes a moment after the last pin in it.
        let versions: Vec<_> =
            fs::read_dir(own.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path()).collect();
        check(versions == [own.clone()], || format!("still there: {versions:?}"))
    });
}

fn a_mirror_of_version_3_is_taken_over(mode: AttachMode) {
    let Node { web, db, lab } = &Node::bridged("version-3");
    [web, db].iter().for_each(|pod| with_qdisc(lab, pod, mode));
    EarlierAgent::mirroring(lab, mode, &[web, db], None).end();
    let before = BpfObjects::of(lab);
    let inside = Inside::of(web);
    let mirror = Capture::start(lab.node(), MIRROR);
    let pods = PodsFile::new(lab, &[]);
    let specs = [PodSpec::of(web).mirror("true"), PodSpec::of(db)];
    let agent = while_talking(web, db, || {
        // Without a list of pods, all of it stays as it is.
        pods.write_in_place("]garbage: [");
        let agent = Agent::run(lab, mode, &pods, &[]);
        agent.wait_for_log(&["takes copies"]);
        web.ping(db.v4(), 20, 56);
        assert_eq!(before.remaining(), before, "nothing is changed before there is a list of pods");

        // One of the two pods is not mirrored any more, and what was its tap goes.
        pods.write(&specs);
        let status = lab.wait_mirrored(&[web]);
        assert!(status.tap(web.veth_host()).attached.values().all(|way| way == mode.name()), "{status:?}");
        wait_for_own_pins_alone(lab, &pods, &specs);
        agent
    });
    shows(&mirror, || inside.capture.frames());
    let (sent, received) = inside.stop();
    mirror.stop().same_as(&sent.and(&received)).unwrap();

    let (left, now) = (before.remaining(), BpfObjects::of(lab));
    assert!(left.maps.is_empty() && left.programs.is_empty(), "{left:?}");
    let links = if mode == AttachMode::Tcx { 2 } else { 0 };
    assert_eq!((left.links.len(), now.links.len()), (links, links), "the links are the same ones");

    // Who opts out is mirrored no more.
    pods.write(&[PodSpec::of(web), PodSpec::of(db)]);
    lab.wait_mirrored(&[]);
    let mirror = Capture::start(lab.node(), MIRROR);
    web.ping(db.v4(), 20, 56);
    assert_eq!(mirror.stop().len(), 0);
    agent.stop();
}

/// Renames the pins of an agent of this version to those of `version`, and starts another agent.
fn a_mirror_of(version: u32, mode: AttachMode, story: &str) {
    let Node { web, db, lab } = &Node::bridged(story);
    [web, db].iter().for_each(|pod| with_qdisc(lab, pod, mode));
    let specs = [PodSpec::of(web).mirror("true"), PodSpec::of(db)];
    let pods = PodsFile::new(lab, &specs);
    let agent = Agent::run(lab, mode, &pods, &[]);
    lab.wait_mirrored(&[web]);
    let inside = Inside::of(web);
    let mirror = Capture::start(lab.node(), MIRROR);
    let (before, agent) = while_talking(web, db, || {
        agent.stop();
        let before = BpfObjects::of(lab);
        fs::rename(directory(lab, ABI_VERSION), directory(lab, version)).unwrap();
        let told = lab.agent_exit(&["status"]);
        assert!(told.code == Some(1) && told.stderr.contains("another version"), "{told:?}");
        let agent = Agent::run(lab, mode, &pods, &[]);
        lab.wait_mirrored(&[web]);
        wait_for_own_pins_alone(lab, &pods, &specs);
        (before, agent)
    });
    shows(&mirror, || inside.capture.frames());
    inside.stop();
    mirror.stop();
    assert_eq!(before.remaining().programs.len(), 0);

    pods.write(&[PodSpec::of(web), PodSpec::of(db)]);
    lab.wait_mirrored(&[]);
    let mirror = Capture::start(lab.node(), MIRROR);
    web.ping(db.v4(), 20, 56);
    assert_eq!(mirror.stop().len(), 0, "a pod that opts out is not mirrored");
    agent.stop();
}

fn a_mirror_of_an_older_version_is_taken_over(mode: AttachMode) {
    a_mirror_of(2, mode, "older");
}

fn a_mirror_of_a_newer_version_is_taken_over(mode: AttachMode) {
    a_mirror_of(ABI_VERSION + 1, mode, "newer");
}

fn copies_of_version_3_stay_cut_while_they_are_taken_over(mode: AttachMode) {
    let Node { web, db, lab } = &Node::bridged("version-3-cut");
    with_qdisc(lab, web, mode);
    let (kept, sent) = (96, 500);
    EarlierAgent::mirroring(lab, mode, &[web], Some(kept)).end();
    let inside = Inside::of(web);
    let mirror = Capture::start(lab.node(), MIRROR);
    web.ping(db.v4(), 10, sent);
    let specs = [PodSpec::of(web).mirror("true").annotated("podmirror.io/snaplen", &kept.to_string())];
    let pods = PodsFile::new(lab, &specs);
    let agent = while_talking(web, db, || {
        let agent = Agent::run(lab, mode, &pods, &[]);
        lab.wait_mirrored(&[web]);
        wait_for_own_pins_alone(lab, &pods, &specs);
        agent
    });
    web.ping(db.v4(), 10, sent);
    let cut = || {
        let mut cut = Frames::default();
        for (frame, times) in inside.capture.frames().iter() {
            cut = cut.with(&frame[..frame.len().min(kept as usize)], times);
        }
        cut
    };
    shows(&mirror, cut);
    mirror.stop();
    agent.stop();
}

fn cleanup_removes_what_version_3_has_left(mode: AttachMode) {
    let Node { web, db, lab } = &Node::bridged("version-3-cleanup");
    let before = lab.network_state();
    EarlierAgent::mirroring(lab, mode, &[web, db], Some(64)).end();
    let objects = BpfObjects::of(lab);
    let refused = lab.agent_exit(&["attach", "--attach", mode.name(), web.veth_host()]);
    assert!(refused.code == Some(1) && refused.stderr.contains("another version"), "{refused:?}");
    assert_eq!(objects.remaining(), objects);
    lab.cleanup();
    eventually(SOON, || {
        let remaining = objects.remaining();
        check(remaining == BpfObjects::default(), || format!("still there: {remaining:?}"))
    });
    assert_eq!(lab.pins(), Vec::<PathBuf>::new());
    lab.network_is_as(&before);
}

#[test]
fn a_mirror_interface_of_another_version_goes_when_nothing_copies_to_it() {
    let Node { web, db, lab } = &Node::bridged("version-3-target");
    EarlierAgent::mirroring(lab, any_mode(), &[web], None).end();
    let specs = [PodSpec::of(web).mirror("true"), PodSpec::of(db)];
    let pods = PodsFile::new(lab, &specs);
    let agent = Agent::run(lab, any_mode(), &pods, &["--mirror-iface", "copies"]);
    lab.wait_mirrored(&[web]);
    wait_for_own_pins_alone(lab, &pods, &specs);
    eventually(SOON, || {
        pods.write_to_wake(&specs);
        let devices = lab.devices();
        check(!devices.contains(&MIRROR.to_owned()), || format!("{devices:?}"))
    });
    let inside = Inside::of(web);
    let mirror = Capture::start(lab.node(), "copies");
    web.ping(db.v4(), 10, 56);
    shows(&mirror, || inside.capture.frames());
    agent.stop();
}
