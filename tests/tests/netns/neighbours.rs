//! Other programs at the same hooks: they and podmirror's programs do not disturb each other.

use mirror_tests::{Agent, AttachMode, BpfObjects, Capture, Lab, Neighbour, PodSpec, PodsFile, check};

use crate::{Inside, MIRROR, Node, any_mode, shows};

in_both_modes!(other_filters_live_beside_ours);

const HOOKS: [&str; 2] = ["ingress", "egress"];

fn other_filters_live_beside_ours(mode: AttachMode) {
    let Node { web, db, lab } = &Node::bridged("filters");
    let device = web.veth_host();
    lab.node().tc(&format!("qdisc add dev {device} clsact"));
    // One before the agent's filter, and one after it that accepts everything.
    let neighbours = [1, 60000].map(|priority| Neighbour::attach_clsact(lab, device, priority));
    for hook in HOOKS {
        lab.node().tc(&format!(
            "filter add dev {device} {hook} pref 60001 protocol all u32 match u32 0 0 flowid 1:1"
        ));
    }
    let filters = |lab: &Lab| HOOKS.map(|hook| lab.node().tc(&format!("filter show dev {device} {hook}")));
    let (before, state) = (filters(lab), lab.network_state());
    let agent = Agent::mirroring(lab, mode, &[PodSpec::of(web).mirror("true")], &[], &[web]);
    let counts = |copied| [neighbours[0].seen(), copied, neighbours[1].seen()];
    let start = counts(lab.status().tap(device).total("copied"));
    web.ping(db.v4(), 10, 56);
    let end = counts(lab.status().tap(device).total("copied"));
    let all = end[0] - start[0];
    assert!(all >= 20, "{all}");
    assert_eq!([0, 1, 2].map(|index| end[index] - start[index]), [all; 3], "everybody sees every packet");
    agent.stop();
    lab.cleanup();
    assert_eq!(filters(lab), before);
    lab.network_is_as(&state);
    let start = counts(0);
    web.ping(db.v4(), 10, 56);
    assert_eq!([0, 2].map(|index| counts(0)[index] - start[index]), [20; 2]);
}

/// One was there before the agent's program, one comes after it in the chain, and one goes ahead of it.
#[test]
fn other_tcx_programs_live_beside_ours() {
    if !AttachMode::Tcx.is_applicable() {
        return;
    }
    let Node { web, db, lab } = &Node::bridged("tcx");
    let device = web.veth_host();
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let first = Neighbour::attach_tcx(lab, device);
    let agent = Agent::run_until(lab, AttachMode::Tcx, &pods, &[], &[web]);
    let later = Neighbour::attach_tcx(lab, device);
    let ahead = Neighbour::attach_tcx_first(lab, device);
    let seen = || [&first, &later, &ahead].map(Neighbour::seen);
    let (before, copied) = (seen(), lab.status().tap(device).total("copied"));
    web.ping(db.v4(), 10, 56);
    let (after, copied) = (seen(), lab.status().tap(device).total("copied") - copied);
    assert!(copied >= 20, "{copied}");
    assert_eq!(
        [0, 1, 2].map(|index| after[index] - before[index]),
        [copied; 3],
        "everybody sees every packet"
    );
    agent.stop();
    lab.cleanup();
    let before = seen();
    web.ping(db.v4(), 10, 56);
    let after = seen();
    assert_eq!([0, 1, 2].map(|index| after[index] - before[index]), [20; 3]);
}

#[test]
fn filters_that_somebody_removes_are_attached_again() {
    let Node { web, db, lab } = &Node::bridged("removed");
    let _agent = Agent::mirroring(lab, AttachMode::Clsact, &[PodSpec::of(web).mirror("true")], &[], &[web]);
    lab.node().tc(&format!("qdisc delete dev {} clsact", web.veth_host()));
    lab.wait_mirrored(&[web]);
    let copied = lab.status().tap(web.veth_host()).total("copied");
    web.ping(db.v4(), 10, 56);
    assert!(lab.status().tap(web.veth_host()).total("copied") >= copied + 20);
}

/// The kernel sends no event, and no packet passes that could be missing.
#[test]
fn links_that_somebody_detaches_are_attached_again() {
    if !AttachMode::Tcx.is_applicable() {
        return;
    }
    let Node { web, db, lab } = &Node::bridged("detached");
    let agent = Agent::mirroring(lab, AttachMode::Tcx, &[PodSpec::of(web).mirror("true")], &[], &[web]);
    let before = BpfObjects::of(lab).links;
    assert_eq!(BpfObjects::detach_links(lab), 2);
    lab.wait_status(|status| {
        let attached = &status.tap(web.veth_host()).attached;
        let stands = attached.values().all(|method| method == "tcx");
        check(stands && BpfObjects::of(lab).links.is_disjoint(&before), || format!("{attached:?}"))
    });
    let inside = Inside::of(web);
    let mirror = Capture::start(lab.node(), MIRROR);
    web.ping(db.v4(), 10, 56);
    shows(&mirror, || inside.capture.frames());
    let (sent, received) = inside.stop();
    mirror.stop().same_as(&sent.and(&received)).unwrap();
    agent.stop();
}

#[test]
fn a_qdisc_that_was_there_stays() {
    let Node { web, db: _db, lab } = &Node::bridged("qdisc");
    lab.node().tc(&format!("qdisc add dev {} clsact", web.veth_host()));
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    for mode in [AttachMode::Clsact, any_mode()] {
        let agent = Agent::run_until(lab, mode, &pods, &[], &[web]);
        agent.stop();
        lab.cleanup();
        assert!(lab.node().tc(&format!("qdisc show dev {}", web.veth_host())).contains("clsact"));
    }
}
