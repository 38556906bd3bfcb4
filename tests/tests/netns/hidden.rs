//! Other programs and filters that come first at a hook and hide packets from the mirror: the agent reports them.

use mirror_tests::{Agent, AttachMode, Capture, Lab, Neighbour, PodNs, PodSpec, PodsFile, check};

use crate::{Inside, MIRROR, Node, shows};

/// The reasons of the kind `Hidden` for a pod: direction and text.
#[track_caller]
fn wait_for_hidden(lab: &Lab, pods: &PodsFile, specs: &[PodSpec], expected: &[(&str, &str)]) {
    lab.wait_status(|status| {
        // Not every change at a hook is an event: a list of pods wakes the agent before its next tick.
        pods.write_to_wake(specs);
        let notes = status.notes.as_ref().ok_or("no agent")?;
        let reasons: Vec<&str> = notes["not_mirrored"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|note| note["reason"] == "Hidden")
            .filter_map(|note| note["message"].as_str())
            .collect();
        let is_told = |(direction, words): &(&str, &str)| {
            reasons
                .iter()
                .any(|reason| reason.starts_with(&format!("{direction}: ")) && reason.contains(words))
        };
        check(reasons.len() == expected.len() && expected.iter().all(is_told), || {
            format!("{reasons:?} instead of {expected:?}")
        })
    });
}

/// Everything that the pod says and hears is mirrored.
#[track_caller]
fn is_mirrored(lab: &Lab, web: &PodNs, db: &PodNs) {
    let inside = Inside::of(web);
    let mirror = Capture::start(lab.node(), MIRROR);
    web.ping(db.v4(), 10, 56);
    shows(&mirror, || inside.capture.frames());
}

#[test]
fn filters_ahead_of_ours_are_told_by_direction() {
    let Node { web, db, lab } = &Node::bridged("bandwidth");
    let device = web.veth_host();
    // As the CNI plugin `bandwidth` does it, which redirects then.
    lab.node().tc(&format!("qdisc add dev {device} ingress"));
    lab.node().tc(&format!(
        "filter add dev {device} parent ffff: prio 1 protocol all u32 match u32 0 0 flowid 1:1"
    ));
    let specs = [PodSpec::of(web).mirror("true"), PodSpec::of(db)];
    let pods = PodsFile::new(lab, &specs);
    let agent = Agent::run(lab, AttachMode::Clsact, &pods, &[]);
    wait_for_hidden(
        lab,
        &pods,
        &specs,
        &[("egress", "u32 at priority 1) takes every packet"), ("ingress", "ingress qdisc")],
    );
    let status = lab.status();
    let attached = &status.tap(device).attached;
    assert_eq!((attached["ingress"].as_str(), attached["egress"].as_str()), ("clsact", "none"), "{status:?}");
    assert!(agent.log_with(&["\"ERROR\""]).is_empty(), "{:#?}", agent.log());
    // What is told is no longer so.
    lab.node().tc(&format!("qdisc delete dev {device} ingress"));
    wait_for_hidden(lab, &pods, &specs, &[]);
    lab.wait_mirrored(&[web]);
    is_mirrored(lab, web, db);
    agent.stop();
}

#[test]
fn a_filter_for_some_packets_is_told_and_one_behind_ours_is_not() {
    let Node { web, db, lab } = &Node::bridged("filters-ahead");
    let device = web.veth_host();
    lab.node().tc(&format!("qdisc add dev {device} clsact"));
    let filter = |hook: &str, words: &str| {
        lab.node().tc(&format!("filter add dev {device} {hook} {words}"));
    };
    // Behind ours, and ahead of it for some packets.
    filter("ingress", "pref 60000 protocol all u32 match u32 0 0 flowid 1:1");
    filter("egress", "pref 1 protocol ip u32 match ip dport 80 0xffff flowid 1:1");
    let specs = [PodSpec::of(web).mirror("true"), PodSpec::of(db)];
    let pods = PodsFile::new(lab, &specs);
    let agent = Agent::run(lab, AttachMode::Clsact, &pods, &[]);
    lab.wait_mirrored(&[web]);
    wait_for_hidden(lab, &pods, &specs, &[("ingress", "u32 at priority 1) is ahead")]);
    is_mirrored(lab, web, db);
    agent.stop();
    lab.cleanup();
    let left = ["ingress", "egress"].map(|hook| lab.node().tc(&format!("filter show dev {device} {hook}")));
    assert!(left.iter().all(|filters| filters.contains("u32")), "{left:?}");
}

/// A program ahead of ours ends the chain for every packet.
fn a_program_ahead_is_told(mode: AttachMode, story: &str) {
    if !AttachMode::Tcx.is_applicable() {
        return;
    }
    let Node { web, db, lab } = &Node::bridged(story);
    let specs = [PodSpec::of(web).mirror("true"), PodSpec::of(db)];
    let pods = PodsFile::new(lab, &specs);
    let agent = Agent::run(lab, mode, &pods, &[]);
    lab.wait_mirrored(&[web]);
    wait_for_hidden(lab, &pods, &specs, &[]);
    is_mirrored(lab, web, db);
    let neighbour = Neighbour::with_the_last_word(lab, web.veth_host());
    wait_for_hidden(lab, &pods, &specs, &[("egress", "\"last_word\""), ("ingress", "\"last_word\"")]);
    let mirror = Capture::start(lab.node(), MIRROR);
    web.ping(db.v4(), 10, 56);
    assert_eq!(mirror.stop().len(), 0, "that is so, and the place is not fought for");
    drop(neighbour);
    wait_for_hidden(lab, &pods, &specs, &[]);
    is_mirrored(lab, web, db);
    agent.stop();
}

#[test]
fn a_tcx_program_ahead_of_our_link_is_told() {
    a_program_ahead_is_told(AttachMode::Tcx, "ahead-of-link");
}

#[test]
fn a_tcx_program_ahead_of_our_filter_is_told() {
    a_program_ahead_is_told(AttachMode::Clsact, "ahead-of-filter");
}
