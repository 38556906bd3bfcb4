//! Filters inside pods, where root of the pod can remove them or run its own filters before them. The agent must
//! notice, repair and report this.

use std::{collections::BTreeSet, fs};

use mirror_tests::{
    Agent, AttachMode, Capture, Lab, Netns, PodNs, PodSpec, SOON, check, eventually, while_pinging,
};

use super::{Scene, filters, has_exit, mirrored, shows, tap, wait_tapped};
use crate::{
    Inside, MIRROR,
    bypass::OFTEN,
    coverage::{CLEAR, reasons, wait_states},
};

/// The reported reasons, each once.
fn told(lab: &Lab) -> BTreeSet<String> {
    reasons(lab).into_iter().map(|(reason, _)| reason).collect()
}

/// Waits until exactly these reasons are reported.
#[track_caller]
fn wait_told(lab: &Lab, expected: &[&str]) {
    eventually(CLEAR, || {
        let told = told(lab);
        let is_so = told.iter().map(String::as_str).eq(expected.iter().copied());
        check(is_so, || format!("{told:?} instead of {expected:?}"))
    });
}

/// Checks that each packet is mirrored once.
#[track_caller]
fn is_mirrored(lab: &Lab, web: &PodNs, db: &PodNs) {
    let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), MIRROR));
    web.ping(db.v4(), 5, 56);
    db.ping(web.v6(), 5, 1400);
    shows(&mirror, || inside.capture.frames());
}

/// Removed filters are restored within seconds, and the missing packets are reported.
#[test]
fn a_filter_that_is_removed_comes_back_and_the_gap_is_told() {
    let (scene, _pods, agent) = mirrored("filters-removed", AttachMode::Clsact);
    let Scene { web, db, lab } = &scene;
    is_mirrored(lab, web, db);
    assert_eq!(told(lab), BTreeSet::new());
    // The report on the earlier removals stays when later ones are added.
    for (words, directions) in [
        ("tc filter delete dev eth0 ingress", [true, false]),
        ("tc filter delete dev eth0 egress pref 1", [true, true]),
        ("tc qdisc delete dev eth0 clsact", [true, true]),
    ] {
        web.netns().run(words);
        web.ping(db.v4(), 3, 56);
        eventually(SOON, || check(filters(web).len() == 2, || format!("{words}: {:?}", filters(web))));
        wait_told(lab, &["Removed"]);
        let words = lab.agent_exit(&["explain", "--pod", "default/web"]).stdout;
        let told = ["ingress", "egress"]
            .map(|direction| words.contains(&format!("{direction}: something in the pod has removed")));
        assert_eq!(told, directions, "{words}");
        is_mirrored(lab, web, db);
    }
    // The reason is reported for a while, and then it disappears.
    wait_told(lab, &[]);
    assert_eq!(agent.log_with(&["\"ERROR\""]), Vec::<String>::new());
    agent.stop();
    lab.cleanup();
    assert!(filters(web).is_empty() && lab.pins().is_empty(), "{:?} {:?}", filters(web), lab.pins());
}

/// The agent does not reorder filters. It reports the filter before its own, until that filter is removed.
#[test]
fn a_filter_ahead_inside_a_pod_is_told_within_seconds() {
    let (scene, _pods, agent) = mirrored("filters-ahead", AttachMode::Clsact);
    let Scene { web, db, lab } = &scene;
    let talk = || web.ping(db.v4(), 5, 56);
    // Without the pause the agent could add its own qdisc and filter before the pod's.
    agent.meanwhile_paused(|| {
        web.netns().tc("qdisc delete dev eth0 clsact");
        web.netns().tc("qdisc add dev eth0 clsact");
        web.netns().tc("filter add dev eth0 ingress pref 1 protocol all u32 match u32 0 0 flowid 1:1");
    });
    eventually(SOON, || check(filters(web).len() == 2, || format!("{:?}", filters(web))));
    let state = wait_states(lab, web, CLEAR, ["Hidden", "Covered"], talk);
    assert!(state["ingress"]["message"].as_str().unwrap().contains("accepts every packet before"), "{state}");
    wait_told(lab, &["Hidden"]);
    web.netns().tc("filter delete dev eth0 ingress pref 1");
    wait_told(lab, &[]);
    wait_states(lab, web, CLEAR, ["Covered", "Covered"], talk);
    is_mirrored(lab, web, db);

    // An ingress qdisc has no hook for the pod's egress.
    agent.meanwhile_paused(|| {
        web.netns().tc("qdisc delete dev eth0 clsact");
        web.netns().tc("qdisc add dev eth0 ingress");
    });
    wait_states(lab, web, CLEAR, ["Covered", "NoHook"], talk);
    web.netns().tc("qdisc delete dev eth0 ingress");
    wait_tapped(lab, &[web]);
    wait_told(lab, &[]);
    is_mirrored(lab, web, db);
    agent.stop();
}

/// A pod can create any number of filters. The agent reads a limited number of them, and reports if it does not find
/// its own among these. At its end it removes its own filters, and no others.
#[test]
fn a_flood_of_filters_costs_the_agent_little_and_keeps_none_of_ours() {
    const MANY: usize = 1200;
    let (scene, _pods, agent) = mirrored("filters-flood", AttachMode::Clsact);
    let Scene { web, db, lab } = &scene;
    let flood = |filter: &str| {
        let file = lab.files().join("flood");
        fs::write(&file, format!("filter add dev eth0 ingress {filter}\n").repeat(MANY)).unwrap();
        web.netns().run(&format!("tc -batch {}", file.display()));
    };
    // After the agent's filter.
    flood("pref 100 protocol all bpf bytecode \"1,6 0 0 0\"");
    is_mirrored(lab, web, db);
    assert_eq!(told(lab), BTreeSet::new());
    // Before the agent's filter. They match no packet.
    flood("pref 1 protocol all bpf bytecode \"1,6 0 0 0\"");
    lab.wait_status(|status| {
        let tap = tap(status, web).ok_or("no tap")?;
        check(tap.attached["ingress"] == "unknown", || format!("{:?}", tap.attached))
    });
    agent.wait_for_log(&["there are more than 1000 tc filters"]);
    is_mirrored(lab, web, db);
    agent.stop();
    lab.cleanup();
    assert!(filters(web).is_empty() && lab.pins().is_empty(), "{:?} {:?}", filters(web), lab.pins());
    let left = web.netns().try_run("tc filter show dev eth0 ingress").stdout;
    let left = String::from_utf8(left).unwrap().lines().filter(|line| line.contains(" handle 0x")).count();
    assert_eq!(left, 2 * MANY);
}

/// The kernel drops the filters of a moved NIC, so its packets elsewhere are not mirrored. When it is back, it is
/// mirrored again. When the pod is deleted, nothing of it is left on the node.
#[test]
fn a_nic_that_is_moved_takes_no_filter_along() {
    let (scene, pods, agent) = mirrored("filters-moved", AttachMode::Clsact);
    let Scene { web, db, lab } = &scene;
    let cell = Netns::new(&format!("{}-cell", lab.node().name()));
    cell.keep_quiet();
    web.netns().ip(&format!("link set eth0 netns {}", cell.name()));
    assert!(!cell.tc("filter show dev eth0 ingress").contains("tap_"));
    pods.write_to_wake(&[PodSpec::of(web).mirror("true")]);
    lab.wait_taps(&[]);
    let traces = || lab.pins().into_iter().filter(|pin| pin.to_string_lossy().contains("/filters/")).count();
    eventually(SOON, || check(traces() == 0, || format!("{:?}", lab.pins())));
    cell.ip(&format!("link set eth0 netns {}", web.netns().name()));
    web.netns().ip(&format!("address add {}/24 dev eth0", web.v4()));
    web.netns().ip(&format!("address add {}/64 dev eth0 nodad", web.v6()));
    web.netns().ip("link set eth0 up");
    pods.write_to_wake(&[PodSpec::of(web).mirror("true")]);
    wait_tapped(lab, &[web]);
    assert_eq!(traces(), 2);
    // The tap uses the new relay device from the next round on; until then the target is down.
    eventually(SOON, || {
        web.ping(db.v4(), 1, 56);
        let copied = tap(&lab.status(), web).map(|tap| tap.total("copied"));
        check(copied > Some(0), || format!("{copied:?}"))
    });
    is_mirrored(lab, web, db);
    agent.stop();
}

/// The program of the other way is detached first: for a moment nothing is copied, and never is a packet copied twice.
#[test]
fn another_way_to_attach_inside_a_pod_copies_no_packet_twice() {
    if !AttachMode::Tcx.is_applicable() {
        return;
    }
    let (scene, pods, agent) = mirrored("filters-way", AttachMode::Clsact);
    let Scene { web, db, lab } = &scene;
    agent.kill();
    for mode in [AttachMode::Tcx, AttachMode::Clsact, AttachMode::Clsact] {
        let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), MIRROR));
        let agent = while_pinging(OFTEN, web, db, || {
            let agent = Agent::run(lab, mode, &pods, &[]);
            lab.wait_status(|status| {
                let attached = tap(status, web).map(|tap| &tap.attached);
                let is_so = attached.is_some_and(|attached| attached.values().all(|way| way == mode.name()));
                let answers = status.agent_running && status.notes.is_some();
                check(is_so && answers, || format!("not by {}: {attached:?}", mode.name()))
            });
            let expected = if mode == AttachMode::Tcx { 0 } else { 2 };
            eventually(SOON, || check(filters(web).len() == expected, || format!("{:?}", filters(web))));
            agent
        });
        let copies = mirror.stop();
        let (sent, received) = inside.stop();
        let twice = copies.less(&sent.and(&received));
        assert!(twice.is_empty(), "{twice}");

        let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), MIRROR));
        web.ping(db.v4(), 20, 56);
        shows(&mirror, || inside.capture.frames());
        agent.stop();
    }
    lab.cleanup();
    assert!(filters(web).is_empty() && lab.pins().is_empty() && !has_exit(web), "{:?}", lab.pins());
}
