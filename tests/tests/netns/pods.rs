//! Pods appear, change and disappear, and the file with the pods is broken and repaired.

use std::{fs, thread, time::Duration};

use mirror_tests::{
    Agent, AttachMode, BpfObjects, Capture, Conversation, Flood, PodSpec, PodsFile, Status, TapStatus, check,
};

use crate::{Inside, MIRROR, Node, any_mode, shows, with_qdisc};

in_both_modes!(unselected_pods_carry_no_program);

#[test]
fn pods_appear_change_and_disappear() {
    let Node { web, db, lab } = &Node::bridged("life");
    let pods = PodsFile::new(lab, &[]);
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    let status = lab.wait_taps(&[]);
    assert!(status.agent_running);

    pods.write(&[PodSpec::of(web).mirror("true")]);
    let status = lab.wait_mirrored(&[web]);
    let tap = status.tap(web.veth_host());
    let pod = tap.pod.as_ref().unwrap();
    assert_eq!([&pod.uid, &pod.namespace, &pod.name], ["web-1", "default", "web"]);
    assert_eq!((tap.ifindex, tap.nic.as_str()), (lab.ifindex(web.veth_host()), "eth0"));
    assert_eq!(tap.counters, []);

    // The change is made in place: the counters continue.
    web.ping(db.v4(), 5, 56);
    let before = lab.status().tap(web.veth_host()).verdicts();
    pods.write(&[PodSpec::of(web).mirror("egress"), PodSpec::of(db)]);
    let status = lab.wait_status(|status| {
        check(status.tap(web.veth_host()).direction == "egress", || "the change has not been seen".into())
    });
    assert_eq!(status.tap(web.veth_host()).verdicts(), before);

    pods.write(&[PodSpec::of(web).mirror("egress"), PodSpec::of(db).mirror("true")]);
    lab.wait_mirrored(&[web, db]);
    pods.write(&[PodSpec::of(web), PodSpec::of(db).mirror("true")]);
    lab.wait_mirrored(&[db]);
    // The device is deleted, as when a pod is deleted, but the pod's entry in the file stays.
    lab.node().ip(&format!("link delete {}", db.veth_host()));
    lab.wait_taps(&[]);
    pods.write(&[]);
    lab.wait_taps(&[]);
    agent.stop();
}

#[test]
fn a_pod_comes_back_under_its_name_in_another_namespace() {
    let Node { web, db, lab } = Node::bridged("again");
    let pods = PodsFile::new(&lab, &[PodSpec::of(&web).mirror("true")]);
    let agent = Agent::run_until(&lab, any_mode(), &pods, &[], &[&web]);
    db.ping(web.v4(), 3, 56);
    let old = lab.status();
    assert!(old.tap(web.veth_host()).seen() > 0);

    let again = lab.pod("web", "br0");
    pods.write(&[PodSpec::of(&again).uid("web-2").mirror("true")]);
    let status = lab.wait_mirrored(&[&again]);
    let tap = status.tap(again.veth_host());
    assert_eq!(tap.pod.as_ref().unwrap().uid, "web-2");
    assert_eq!(tap.counters, [], "a new pod begins at zero");

    // The same pod in a new sandbox: same UID, other namespace.
    drop(web);
    let sandbox = lab.pod("web", "br0");
    pods.write(&[PodSpec::of(&sandbox).uid("web-2").mirror("true")]);
    lab.wait_mirrored(&[&sandbox]);
    let inside = Inside::of(&sandbox);
    let mirror = Capture::start(lab.node(), MIRROR);
    // The former namespace is no longer mirrored.
    db.ping(again.v4(), 3, 56);
    db.ping(sandbox.v4(), 3, 56);
    shows(&mirror, || inside.capture.frames());
    let (sent, received) = inside.stop();
    mirror.stop().same_as(&sent.and(&received)).unwrap();
    assert_eq!(lab.status().tap(sandbox.veth_host()).total("copied"), sent.and(&received).len() as u64);
    agent.stop();
}

#[test]
fn existing_connections_are_mirrored_from_the_annotation_on() {
    let Node { web, db, lab } = &Node::bridged("existing");
    let pods = PodsFile::new(lab, &[PodSpec::of(web), PodSpec::of(db)]);
    let _agent = Agent::run(lab, any_mode(), &pods, &[]);
    lab.wait_taps(&[]);
    with_qdisc(lab, web, any_mode());
    let conversation = Conversation::open(web, db, db.v4());
    conversation.exchange(10_000);
    let flood = Flood::start(db, web);
    flood.go_on(100);
    pods.write(&[PodSpec::of(web).mirror("true"), PodSpec::of(db)]);
    lab.wait_mirrored(&[web]);
    flood.go_on(100);
    flood.stop();
    let counted = lab.status().tap(web.veth_host()).total("copied");
    assert!(counted >= 200, "{counted}");

    let inside = Inside::of(web);
    let mirror = Capture::start(lab.node(), MIRROR);
    conversation.exchange(200_000);
    shows(&mirror, || inside.capture.frames());
    let (sent, received) = inside.stop();
    assert!(!sent.is_empty() && !received.is_empty());
    mirror.stop().same_as(&sent.and(&received)).unwrap();

    // The annotation is removed: nothing more is copied, and the connection continues.
    pods.write(&[PodSpec::of(web), PodSpec::of(db)]);
    lab.wait_taps(&[]);
    let mirror = Capture::start(lab.node(), MIRROR);
    conversation.exchange(200_000);
    let copied = mirror.stop();
    assert!(copied.is_empty(), "{copied}");
}

fn unselected_pods_carry_no_program(mode: AttachMode) {
    let Node { web, db, lab } = &Node::bridged("unselected");
    let other = lab.pod("other", "br0");
    let before = lab.network_state();
    let chosen = PodSpec::of(&other).mirror("true");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("false"), PodSpec::of(db), chosen]);
    let _agent = Agent::run_until(lab, mode, &pods, &[], &[&other]);
    let links = if mode == AttachMode::Tcx { 2 } else { 0 };
    assert_eq!(BpfObjects::of(lab).links.len(), links, "those of the chosen pod");
    let after = lab.network_state();
    for pod in [web, db] {
        let of_pod = |state: &[String]| -> Vec<String> {
            state.iter().filter(|line| line.contains(pod.veth_host())).cloned().collect()
        };
        assert_eq!(of_pod(&after), of_pod(&before));
        let qdiscs = lab.node().tc(&format!("qdisc show dev {}", pod.veth_host()));
        assert!(!qdiscs.contains("clsact"), "{qdiscs}");
    }
}

#[test]
fn want_of_file_descriptors_costs_no_pod_its_tap() {
    let Node { mut web, db, lab } = Node::bridged("descriptors");
    let web_host = &web.veth_host().to_owned();
    let agent = Agent::mirroring(&lab, any_mode(), &[PodSpec::of(&web).mirror("true")], &[], &[&web]);
    db.ping(web.v4(), 3, 56);
    let tap = |status: &Status| status.tap(web_host).clone();
    let before = tap(&lab.status());
    // The announcements of a NIC reach the other ports of the bridge, so counters can grow meanwhile, but never shrink.
    let is_kept = |tap: TapStatus| {
        assert_eq!((&tap.pod, tap.ifindex, &tap.attached), (&before.pod, before.ifindex, &before.attached));
        assert!(tap.seen() >= before.seen(), "{tap:?} was removed since {before:?}");
    };

    agent.wait_until_loaded();
    // Leaves the agent one free descriptor: too few to read the pod's devices.
    let pid = agent.pid();
    let is_free = |number: &u32| !fs::exists(format!("/proc/{pid}/fd/{number}")).unwrap();
    // Between two rounds; during a round more descriptors are open.
    let look = |_| {
        thread::sleep(Duration::from_millis(5));
        (0..).find(is_free).unwrap()
    };
    let first_free = (0..100).map(look).min().unwrap();
    lab.node().run(&format!("prlimit --pid {pid} --nofile={}:", first_free + 1));
    web.add_nic(&lab, "br0");
    agent.wait_for_log(&["ERROR", "Too many open files"]);
    is_kept(tap(&lab.status()));

    lab.node().run(&format!("prlimit --pid {pid} --nofile=1024:"));
    let [first, second] = [0, 1].map(|nic| web.nics()[nic].host.as_str());
    is_kept(tap(&lab.wait_taps(&[first, second])));
    agent.stop();
}
