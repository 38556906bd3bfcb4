//! Programs are attached to a hook, replaced by those of the other attach mode, and detached.

use mirror_tests::{Agent, AttachMode, BpfObjects, Capture, PodSpec, PodsFile, check, while_talking};

use crate::{Inside, MIRROR, Node, shows, with_qdisc};

/// The program of the old mode is detached first: for a moment nothing is copied, and no packet is ever copied twice.
#[test]
fn another_way_to_attach_copies_no_packet_twice() {
    if !AttachMode::Tcx.is_applicable() {
        return;
    }
    let Node { web, db, lab } = &Node::bridged("another-way");
    [web, db].iter().for_each(|pod| with_qdisc(lab, pod, AttachMode::Clsact));
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true"), PodSpec::of(db)]);
    let run = |mode: AttachMode| {
        let agent = Agent::run(lab, mode, &pods, &[]);
        lab.wait_status(|status| {
            let attached = status.taps.first().map(|tap| &tap.attached);
            let is_so = attached.is_some_and(|attached| attached.values().all(|way| way == mode.name()));
            check(is_so && status.mirror().up, || format!("not by {}", mode.name()))
        });
        agent
    };
    run(AttachMode::Clsact).stop();
    for mode in [AttachMode::Tcx, AttachMode::Clsact] {
        let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), MIRROR));
        let agent = while_talking(web, db, || run(mode));
        let copies = mirror.stop();
        let (sent, received) = inside.stop();
        let twice = copies.less(&sent.and(&received));
        assert!(twice.is_empty(), "{twice}");

        let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), MIRROR));
        web.ping(db.v4(), 20, 56);
        shows(&mirror, || inside.capture.frames());
        agent.stop();
    }
}

#[test]
fn a_link_that_somebody_holds_is_detached_all_the_same() {
    if !AttachMode::Tcx.is_applicable() {
        return;
    }
    let Node { web, db, lab } = &Node::bridged("held");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true"), PodSpec::of(db)]);
    let agent = Agent::run_until(lab, AttachMode::Tcx, &pods, &[], &[web]);
    let held = BpfObjects::hold_links(lab);
    assert_eq!(held.len(), 2);
    pods.write(&[PodSpec::of(web), PodSpec::of(db)]);
    lab.wait_mirrored(&[]);
    // No program has an entry now. That no second program runs shows only with an entry.
    pods.write(&[PodSpec::of(web).mirror("true"), PodSpec::of(db)]);
    lab.wait_mirrored(&[web]);
    let inside = Inside::of(web);
    let mirror = Capture::start(lab.node(), MIRROR);
    web.ping(db.v4(), 20, 56);
    shows(&mirror, || inside.capture.frames());
    let failures = agent.log_with(&["\"ERROR\""]);
    assert!(failures.is_empty(), "{failures:#?}");
    assert_eq!(BpfObjects::of(lab).links.len(), 2);
    agent.stop();
    lab.cleanup();
    drop(held);
}
