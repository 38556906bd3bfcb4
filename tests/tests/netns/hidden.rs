//! Other programs and filters that run first at a hook and hide packets from the mirror: the agent reports them.

use mirror_tests::{
    Agent, AttachMode, Capture, Lab, Neighbour, PodNs, PodSpec, PodsFile, SOON, check, eventually,
};

use crate::{
    Inside, MIRROR, Node,
    coverage::{FEW_READINGS, seen_ingress, wait_states},
    shows,
};

in_both_modes!(copies_that_pass_by_the_second_stage_are_not_made);

/// Waits until the pod has these reasons of the kind `Hidden`: direction and text.
#[track_caller]
fn wait_for_hidden(lab: &Lab, expected: &[(&str, &str)]) {
    lab.wait_status(|status| {
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

/// Waits until the pod's copies are reported as not cuttable, or no longer.
#[track_caller]
fn wait_for_uncut(lab: &Lab, expected: bool) {
    lab.wait_status(|status| {
        let notes = status.notes.as_ref().ok_or("no agent")?;
        let is_uncut = notes["not_mirrored"].as_array().is_some_and(|notes| {
            notes.iter().any(|note| {
                note["reason"] == "Uncut"
                    && note["message"].as_str().unwrap().contains("before podmirror's program")
            })
        });
        check(is_uncut == expected && notes["failures"] == serde_json::json!([]), || format!("{notes}"))
    });
}

/// The lengths of the copies of ten pings of 1000 bytes and their answers.
#[track_caller]
fn lengths_of_copies(lab: &Lab, web: &PodNs, db: &PodNs, expected: usize) -> Vec<usize> {
    let mirror = Capture::start(lab.node(), MIRROR);
    web.ping(db.v4(), 10, 1000);
    eventually(SOON, || {
        let copies = mirror.frames().len();
        check(copies >= expected, || format!("{copies} copies"))
    });
    mirror.stop().iter().map(|(frame, _)| frame.len()).collect()
}

/// The agent's filter has priority 1, and only a TCX program can run before it.
fn copies_that_pass_by_the_second_stage_are_not_made(mode: AttachMode) {
    if !AttachMode::Tcx.is_applicable() {
        return;
    }
    let Node { web, db, lab } = &Node::bridged("passed-by");
    let of_web = PodSpec::of(web).mirror("true").annotated("podmirror.io/filter", "icmp");
    let cut = [of_web.annotated("podmirror.io/snaplen", "96"), PodSpec::of(db)];
    let agent = Agent::mirroring(lab, mode, &cut, &[], &[web]);
    assert_eq!(lengths_of_copies(lab, web, db, 20), [96; 20]);

    let neighbour = Neighbour::with_the_last_word(lab, MIRROR);
    wait_for_uncut(lab, true);
    let uncut = || lab.status().tap(web.veth_host()).total("uncut");
    let before = uncut();
    assert_eq!(lengths_of_copies(lab, web, db, 0), [0; 0]);
    assert_eq!(uncut(), before + 20);
    drop(neighbour);
    wait_for_uncut(lab, false);
    assert_eq!(lengths_of_copies(lab, web, db, 20), [96; 20]);
    agent.stop();
}

/// A filter of other software was there first. The mirror of a second pod, whose copies are not cut, is not affected.
#[test]
fn a_second_stage_that_cannot_be_ahead_stops_only_what_it_would_cut() {
    let Node { web, db, lab } = &Node::bridged("not-first");
    let whole = [PodSpec::of(web).mirror("true"), PodSpec::of(db)];
    let pods = PodsFile::new(lab, &whole);
    let agent = Agent::run_until(lab, AttachMode::Clsact, &pods, &[], &[web]);
    lab.node().tc(&format!("qdisc add dev {MIRROR} clsact"));
    let filter = "egress pref 1 protocol all u32 match u32 0 0 flowid 1:1";
    lab.node().tc(&format!("filter add dev {MIRROR} {filter}"));
    let cut = PodSpec::of(web)
        .annotated("podmirror.io/mirror.cut", "true")
        .annotated("podmirror.io/snaplen.cut", "96");
    let both = [cut, PodSpec::of(db).mirror("true").annotated("podmirror.io/filter", "icmp")];
    pods.write(&both);
    lab.wait_mirrored(&[web, db]);
    agent.wait_for_log(&["cannot be truncated or addressed", "u32 at priority 1"]);
    let mirror = Capture::start(lab.node(), MIRROR);
    web.ping(db.v4(), 10, 1000);
    eventually(SOON, || {
        let copies = mirror.frames().len();
        check(copies >= 20, || format!("{copies} copies"))
    });
    let status = lab.status();
    let [of_web, of_db] = [web, db].map(|pod| status.tap(pod.veth_host()));
    assert!(of_web.sessions.iter().all(|session| session.total("copied") == 0), "{of_web:?}");
    assert_eq!(of_db.total("copied"), 20, "{of_db:?}");
    assert_eq!(mirror.stop().len(), 20);
    agent.stop();
}

/// Checks that everything that the pod sends and receives is mirrored.
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
    // As the CNI plugin `bandwidth` does, whose filter redirects.
    lab.node().tc(&format!("qdisc add dev {device} ingress"));
    lab.node().tc(&format!(
        "filter add dev {device} parent ffff: prio 1 protocol all u32 match u32 0 0 flowid 1:1"
    ));
    let specs = [PodSpec::of(web).mirror("true"), PodSpec::of(db)];
    let pods = PodsFile::new(lab, &specs);
    let agent = Agent::run(lab, AttachMode::Clsact, &pods, &[]);
    wait_for_hidden(
        lab,
        &[("egress", "u32 at priority 1) accepts every packet"), ("ingress", "ingress qdisc")],
    );
    let status = lab.status();
    let attached = &status.tap(device).attached;
    assert_eq!((attached["ingress"].as_str(), attached["egress"].as_str()), ("clsact", "none"), "{status:?}");
    wait_states(lab, web, FEW_READINGS, ["NoHook", "Hidden"], || {});
    assert!(agent.log_with(&["\"ERROR\""]).is_empty(), "{:#?}", agent.log());
    // The reason disappears with its cause.
    lab.node().tc(&format!("qdisc delete dev {device} ingress"));
    wait_for_hidden(lab, &[]);
    lab.wait_mirrored(&[web]);
    is_mirrored(lab, web, db);
    wait_states(lab, web, FEW_READINGS, [seen_ingress(), "Covered"], || web.ping(db.v4(), 5, 56));
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
    // One filter after the agent's, and one before it for some packets.
    filter("ingress", "pref 60000 protocol all u32 match u32 0 0 flowid 1:1");
    filter("egress", "pref 1 protocol ip u32 match ip dport 80 0xffff flowid 1:1");
    let specs = [PodSpec::of(web).mirror("true"), PodSpec::of(db)];
    let agent = Agent::mirroring(lab, AttachMode::Clsact, &specs, &[], &[web]);
    wait_for_hidden(lab, &[("ingress", "u32 at priority 1) runs before podmirror's program")]);
    is_mirrored(lab, web, db);
    agent.stop();
    lab.cleanup();
    let left = ["ingress", "egress"].map(|hook| lab.node().tc(&format!("filter show dev {device} {hook}")));
    assert!(left.iter().all(|filters| filters.contains("u32")), "{left:?}");
}

/// A program before the agent's ends the chain for every packet.
fn a_program_ahead_is_told(mode: AttachMode, story: &str) {
    if !AttachMode::Tcx.is_applicable() {
        return;
    }
    let Node { web, db, lab } = &Node::bridged(story);
    let specs = [PodSpec::of(web).mirror("true"), PodSpec::of(db)];
    let agent = Agent::mirroring(lab, mode, &specs, &[], &[web]);
    wait_for_hidden(lab, &[]);
    is_mirrored(lab, web, db);
    let neighbour = Neighbour::with_the_last_word(lab, web.veth_host());
    wait_for_hidden(lab, &[("egress", "\"last_word\""), ("ingress", "\"last_word\"")]);
    let mirror = Capture::start(lab.node(), MIRROR);
    web.ping(db.v4(), 10, 56);
    assert_eq!(mirror.stop().len(), 0, "that is so, and the place is not fought for");
    drop(neighbour);
    wait_for_hidden(lab, &[]);
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
