//! Veths whose pods receive packets from other software on the pod side: their ingress is then tapped at the pod's NIC.

use std::{collections::BTreeSet, time::Duration};

use mirror_tests::{
    Agent, AttachMode, Capture, Frames, Lab, Neighbour, PodNs, PodSpec, PodsFile, SOON, Status, check,
    eventually, while_pinging, while_talking,
};

use crate::{
    Inside, MIRROR, Node,
    coverage::{CLEAR, FEW_READINGS, reasons, wait_states},
    pod_side::{HUB, copied_by_the_sender, has_exit, talk, talk_in_frames, wait_counted},
    shows,
};

in_both_modes!(
    a_bypass_changes_the_side_and_its_end_changes_it_back,
    a_known_cni_is_recognised_before_the_first_packet,
    a_known_cni_that_comes_later_is_recognised_by_its_programs,
    both_sides_outlive_the_agent,
);

/// Slow enough for a story of half a minute, and several packets in each change.
pub(crate) const OFTEN: Duration = Duration::from_millis(5);

/// A change of side takes a reading of the counters and two rounds: some seconds, and more on a busy machine.
const CHANGE: Duration = Duration::from_secs(30);

/// Checks that exactly the taps of these pods see ingress inside the pod, or that all taps see it on the node side.
fn are_at(status: &Status, pods: &[&PodNs], inside: bool) -> Result<(), String> {
    let is_at = |pod: &&PodNs| {
        let tap = status.taps.iter().find(|tap| tap.device == pod.veth_host());
        tap.is_some_and(|tap| tap.is_attached() && tap.pod_side.is_some() == inside)
    };
    check(status.taps.len() == pods.len() && pods.iter().all(is_at), || format!("{:#?}", status.taps))
}

/// Waits until these taps are the only ones, and see their pods' ingress inside the pods.
#[track_caller]
fn wait_inside(lab: &Lab, pods: &[&PodNs]) {
    lab.wait_mirrored(pods);
    eventually(CHANGE, || are_at(&lab.status(), pods, true));
}

/// Waits until nothing of podmirror is left inside these pods, nor the relay hub on the node.
#[track_caller]
fn wait_left(lab: &Lab, pods: &[&PodNs]) {
    eventually(SOON, || {
        let exits = pods.iter().filter(|pod| has_exit(pod)).count();
        let has_hub = lab.devices().contains(&HUB.to_owned());
        check(exits == 0 && !has_hub, || format!("{exits} exits, {has_hub}"))
    });
}

/// The frames that a pod has sent or received.
fn of(pod: &PodNs, frames: &Frames) -> Frames {
    let mac = pod.eth0().mac;
    frames.only(|frame| frame[..6] == mac || frame[6..12] == mac)
}

/// The tap changes its side and back while packets flow in both directions. Packets that cross the node side are copied
/// once on either side; packets that bypass it are copied once from the change on.
fn a_bypass_changes_the_side_and_its_end_changes_it_back(mode: AttachMode) {
    let Node { web, db, lab } = &Node::bridged("two-sides");
    if mode == AttachMode::Clsact {
        // The kernel drops the pod's packets while its NIC gets its first clsact qdisc.
        web.netns().tc("qdisc add dev eth0 clsact");
    }
    let cache = &lab.pod("cache", "br0");
    let before = [lab.network_state(), web.netns().devices()];
    let agent = Agent::mirroring(lab, mode, &[PodSpec::of(web).mirror("true"), PodSpec::of(db)], &[], &[web]);
    are_at(&lab.status(), &[web], false).unwrap();
    assert!(!has_exit(web));
    let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), MIRROR));
    let neighbour = Neighbour::behind(lab, db.veth_host(), web.veth_host());
    while_pinging(OFTEN, cache, web, || {
        eventually(CHANGE, || {
            web.ping(db.v4(), 1, 56);
            are_at(&lab.status(), &[web], true)
        });
    });
    shows(&mirror, || {
        let all = inside.capture.frames();
        // The answers of `db` are missing until the change.
        let missing = of(db, &all).less(&of(db, &mirror.frames()));
        all.less(&missing)
    });
    assert_eq!(of(cache, &mirror.frames()).same_as(&of(cache, &inside.capture.frames())), Ok(()));
    agent.wait_for_log(&["packets to the pod are now tapped at its NIC", "bpf_redirect_peer"]);
    drop((inside, mirror));

    // Now nothing is missing: all kinds of packets, through the node side and around it.
    let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), MIRROR));
    talk(web, db);
    talk_in_frames(web);
    talk_in_frames(db);
    talk_in_frames(cache);
    cache.ping(web.v6(), 5, 1400);
    shows(&mirror, || inside.capture.frames());
    drop((inside, mirror));
    wait_states(lab, web, CHANGE, ["Covered", "Covered"], || web.ping(db.v4(), 5, 56));
    assert_eq!(reasons(lab), []);
    let words = lab.agent_exit(&["explain", "--pod", "default/web"]).stdout;
    assert!(words.contains("Packets have got to the pod around the node's end of the veth"), "{words}");
    let hooks = format!("  {0}/{0} in pod  ", mode.name());
    assert!(lab.agent_exit(&["status"]).stdout.contains(&hooks));

    // Ends the bypass.
    drop(neighbour);
    let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), MIRROR));
    while_pinging(OFTEN, cache, web, || {
        eventually(CLEAR, || {
            web.ping(db.v4(), 1, 56);
            are_at(&lab.status(), &[web], false)
        });
    });
    db.ping(web.v4(), 5, 56);
    shows(&mirror, || inside.capture.frames());
    wait_left(lab, &[web]);
    agent.stop();
    lab.cleanup();
    assert_eq!([lab.network_state(), web.netns().devices()], before);
}

/// A CNI attaches its program after the tap, or its mode changes. There is no traffic, so the counters show nothing.
fn a_known_cni_that_comes_later_is_recognised_by_its_programs(mode: AttachMode) {
    let Node { web, db, lab } = &Node::bridged("later-cni");
    let agent = Agent::mirroring(lab, mode, &[PodSpec::of(web).mirror("true"), PodSpec::of(db)], &[], &[web]);
    are_at(&lab.status(), &[web], false).unwrap();
    let _cilium = Neighbour::of_cilium(lab, mode, web.veth_host(), db.veth_host());
    wait_inside(lab, &[web]);
    agent.wait_for_log(&["packets to the pod are now tapped at its NIC", "Cilium"]);
}

/// Two mirrored pods of a known CNI: no packet is missed, and a packet between them is copied once. Both sides share
/// one budget.
fn a_known_cni_is_recognised_before_the_first_packet(mode: AttachMode) {
    let Node { web, db, lab } = &Node::bridged("known-cni");
    let before = [lab.network_state(), web.netns().devices()];
    // TCX programs would run before the agent's filters.
    let cilium = [(web, db), (db, web)]
        .map(|(from, to)| Neighbour::of_cilium(lab, mode, from.veth_host(), to.veth_host()));
    let both = [PodSpec::of(web).mirror("true"), PodSpec::of(db).mirror("true")];
    let pods = PodsFile::new(lab, &both);
    let agent = Agent::run(lab, mode, &pods, &[]);
    wait_inside(lab, &[web, db]);
    let (of_web, of_db) = (Inside::of(web), Inside::of(db));
    let mirror = Capture::start(lab.node(), MIRROR);
    talk(web, db);
    shows(&mirror, || of_web.frames().0.and(&of_db.frames().0));
    for (pod, inside) in [(web, of_web), (db, of_db)] {
        wait_counted(lab, pod, || copied_by_the_sender(&inside));
    }
    let words = lab.agent_exit(&["explain", "--pod", "default/web"]).stdout;
    assert!(words.contains("Programs of Cilium are at the node side of the veth"), "{words}");
    drop(mirror);

    pods.write(&[PodSpec::of(web), PodSpec::of(db)]);
    lab.wait_taps(&[]);
    wait_left(lab, &[web, db]);
    pods.write(&[PodSpec::of(web).mirror("true").annotated("podmirror.io/packets", "7"), PodSpec::of(db)]);
    wait_inside(lab, &[web]);
    let mirror = Capture::start(lab.node(), MIRROR);
    web.ping(db.v4(), 10, 56);
    lab.wait_status(|status| {
        let tap = status.tap(web.veth_host());
        let copied = ["egress", "ingress"].map(|direction| tap.packets(direction, "copied"));
        let is_one = copied[0] + copied[1] == 7 && copied.iter().all(|copied| *copied > 0);
        check(is_one && tap.ended.as_deref() == Some("packets"), || format!("{tap:#?}"))
    });
    eventually(SOON, || check(mirror.frames().len() == 7, || format!("{} frames", mirror.frames().len())));

    // `cleanup` finds everything that a killed agent leaves.
    agent.kill();
    lab.cleanup();
    wait_left(lab, &[web]);
    web.ping(db.v4(), 3, 56);
    drop((cilium, mirror));
    assert_eq!([lab.network_state(), web.netns().devices()], before);
}

/// Ingress is attached before egress, so the answer to a copied packet is copied, too. With a known CNI the program
/// inside the pod takes longer to load and to attach.
#[test]
fn the_answer_to_the_first_copied_packet_is_copied() {
    let mode = AttachMode::Tcx;
    if !mode.is_applicable() {
        return;
    }
    let Node { web, db, lab } = &Node::bridged("answers");
    let of_cilium =
        |(from, to): (&PodNs, &PodNs)| Neighbour::of_cilium(lab, mode, from.veth_host(), to.veth_host());
    let _cilium = [(web, db), (db, web)].map(of_cilium);
    let pods = PodsFile::new(lab, &[PodSpec::of(web), PodSpec::of(db)]);
    let _agent = Agent::run(lab, mode, &pods, &[]);
    lab.wait_taps(&[]);
    let mirror = Capture::start(lab.node(), MIRROR);
    while_talking(web, db, || {
        pods.write(&[PodSpec::of(web).mirror("true"), PodSpec::of(db)]);
        wait_inside(lab, &[web]);
    });
    let echo_request = 8;
    eventually(SOON, || {
        let (requests, answers): (Vec<_>, Vec<_>) = mirror
            .frames()
            .ipv4()
            .iter()
            .map(|(frame, _)| (frame[34], frame[38..42].to_vec()))
            .partition(|(kind, _)| *kind == echo_request);
        let answered: BTreeSet<_> = answers.into_iter().map(|(_, ping)| ping).collect();
        let unanswered = requests.iter().filter(|(_, ping)| !answered.contains(ping)).count();
        check(!requests.is_empty() && unanswered == 0, || {
            format!("of {} requests, {unanswered} have no answer", requests.len())
        })
    });
}

/// The side is pinned: it outlives the agent, and the next agent continues there without a gap, unless its flags forbid
/// taps inside pods.
fn both_sides_outlive_the_agent(mode: AttachMode) {
    let Node { web, db, lab } = &Node::bridged("sides-restart");
    let neighbour = Neighbour::behind(lab, db.veth_host(), web.veth_host());
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true"), PodSpec::of(db)]);
    let agent = Agent::run_until(lab, mode, &pods, &[], &[web]);
    eventually(CHANGE, || {
        web.ping(db.v4(), 1, 56);
        are_at(&lab.status(), &[web], true)
    });
    let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), MIRROR));
    web.ping(db.v4(), 3, 56);
    agent.kill();
    web.ping(db.v4(), 3, 57);
    let agent = while_pinging(OFTEN, web, db, || {
        let agent = Agent::run(lab, mode, &pods, &[]);
        wait_states(lab, web, CHANGE, ["Covered", "Covered"], || {});
        agent
    });
    are_at(&lab.status(), &[web], true).unwrap();
    shows(&mirror, || inside.capture.frames());
    drop((inside, mirror));

    // An agent whose flags forbid taps inside pods detaches it, and reports what is missing now.
    agent.kill();
    let agent = Agent::run(lab, mode, &pods, &["--pod-side-taps=off"]);
    lab.wait_status(|status| are_at(status, &[web], false));
    wait_left(lab, &[web]);
    wait_states(lab, web, CHANGE, ["Bypassed", "Covered"], || web.ping(db.v4(), 5, 56));
    eventually(FEW_READINGS, || {
        let reasons = reasons(lab);
        let is_told = matches!(&reasons[..], [(reason, remedy)] if reason == "Bypassed" && remedy.contains("--pod-side-taps=auto"));
        check(is_told, || format!("{reasons:?}"))
    });
    agent.stop();
    drop(neighbour);
}
