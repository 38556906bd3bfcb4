//! Pods without an annotation for their network namespace: the agent finds it by the cgroups of their processes.

use std::time::{Duration, Instant};

use mirror_tests::{Agent, Capture, PodNs, PodSpec, PodsFile, Status, check, eventually, scaled};

use crate::{Inside, MIRROR, Node, any_mode, shows};

/// The longest time that a pod has a process and no tap on a busy machine. Without a look at the processes it would be a minute,
/// until the next round.
const AT_ONCE: Duration = Duration::from_secs(5);

/// A UID that no other test of this machine and no pod has: it begins with the pid of this process.
fn uid(number: u8) -> String {
    format!("{:08x}-0000-4000-8000-0000000000{number:02x}", std::process::id())
}

/// The cgroup of a container, as the kubelet names it for the cgroupfs driver.
fn cgroupfs(uid: &str, container: &str) -> String {
    format!("kubepods/burstable/pod{uid}/{container}")
}

/// The cgroup of a container, as the kubelet names it for the systemd driver.
fn systemd(uid: &str, container: &str) -> String {
    let uid = uid.replace('-', "_");
    format!("kubepods.slice/kubepods-pod{uid}.slice/cri-containerd-{container}.scope")
}

/// Checks that the mirror interface shows all packets of a pod, and no others.
#[track_caller]
fn is_mirrored(node: &Node, pod: &PodNs) {
    let Node { db, lab, .. } = node;
    let inside = Inside::of(pod);
    let mirror = Capture::start(lab.node(), MIRROR);
    db.ping(pod.v4(), 5, 56);
    shows(&mirror, || inside.capture.frames());
    let (sent, received) = inside.stop();
    assert!(sent.len() >= 5 && received.len() >= 5);
    mirror.stop().same_as(&sent.and(&received)).unwrap();
}

#[test]
fn a_pod_is_found_by_the_cgroup_of_its_process_and_followed_into_a_new_sandbox() {
    let node = Node::bridged("process");
    let Node { web, db, lab } = &node;
    let (web_uid, db_uid) = (uid(1), uid(2));
    let _other = lab.container(db.netns(), &systemd(&db_uid, "1"));
    let spec = PodSpec::named("web").uid(&web_uid).mirror("true");
    let pods = PodsFile::new(lab, &[spec.clone(), PodSpec::named("db").uid(&db_uid)]);
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    agent.wait_for_log(&[
        "not mirrored",
        "\"default/web\"",
        "\"NoNetns\"",
        "no process of the pod runs on this node",
    ]);
    lab.wait_taps(&[]);

    let start = Instant::now();
    let sandbox = lab.container(web.netns(), &cgroupfs(&web_uid, "1"));
    let status = lab.wait_mirrored(&[web]);
    let took = start.elapsed();
    assert!(took < scaled(AT_ONCE), "{took:?}");
    assert_eq!(status.tap(web.veth_host()).pod.as_ref().unwrap().uid, web_uid);
    is_mirrored(&node, web);

    // Between two runs of a container there may be no process except the sandbox's.
    drop(sandbox);
    let before = lab.status().tap(web.veth_host()).clone();
    pods.write(&[spec.clone(), PodSpec::named("db").uid(&db_uid).mirror("true")]);
    lab.wait_mirrored(&[web, db]);
    assert_eq!(lab.status().tap(web.veth_host()), &before);
    let sandbox = lab.container(web.netns(), &cgroupfs(&web_uid, "2"));
    pods.write(&[spec.clone(), PodSpec::named("db").uid(&db_uid)]);
    lab.wait_mirrored(&[web]);

    // The next agent finds it at once.
    agent.stop();
    lab.cleanup();
    let agent = Agent::run_until(lab, any_mode(), &pods, &[], &[web]);
    assert_eq!(agent.log_with(&["not mirrored"]), Vec::<String>::new());

    // A new sandbox of the same pod in another namespace; the old one still exists for a while.
    let again = lab.pod("again", "br0");
    let _sandbox = lab.container(again.netns(), &cgroupfs(&web_uid, "3"));
    pods.write(&[spec, PodSpec::named("db").uid(&db_uid).mirror("true")]);
    lab.wait_mirrored(&[web, db]);
    lab.node().ip(&format!("link delete {}", web.veth_host()));
    drop(sandbox);
    let status = lab.wait_mirrored(&[&again, db]);
    assert_eq!(status.tap(again.veth_host()).pod.as_ref().unwrap().uid, web_uid);
    pods.write(&[PodSpec::named("web").uid(&web_uid).mirror("true")]);
    lab.wait_mirrored(&[&again]);
    is_mirrored(&node, &again);
    agent.stop();
}

/// An agent is killed between two runs of a container (CRI-O keeps no process of the pod then).
#[test]
fn a_pod_without_a_process_keeps_its_tap_and_its_ended_budget_with_the_next_agent() {
    let node = Node::bridged("between-runs");
    let Node { web, db, lab } = &node;
    let uid = uid(6);
    let spec = PodSpec::named("web").uid(&uid).mirror("true").annotated("podmirror.io/packets", "5");
    let pods = PodsFile::new(lab, &[spec]);
    let container = lab.container(web.netns(), &cgroupfs(&uid, "1"));
    let agent = Agent::run_until(lab, any_mode(), &pods, &[], &[web]);
    web.ping(db.v4(), 10, 56);
    let is_ended = |status: &Status| {
        let tap = status.tap(web.veth_host());
        check(tap.ended.as_deref() == Some("packets"), || "the mirror has not ended".to_owned())
    };
    let before = lab.wait_status(is_ended);
    let before = before.tap(web.veth_host());
    drop(container);
    agent.kill();

    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    agent.wait_for_log(&["not mirrored", "\"default/web\"", "\"NoNetns\""]);
    let is_same = |status: &Status| {
        let tap = status.tap(web.veth_host());
        assert_eq!(
            (tap.serial, tap.total("copied"), tap.ended.as_deref()),
            (before.serial, 5, Some("packets"))
        );
        assert!(tap.seen() >= before.seen(), "{tap:?}");
    };
    is_same(&lab.wait_mirrored(&[web]));

    // The agent finds the next process soon.
    let _container = lab.container(web.netns(), &cgroupfs(&uid, "2"));
    lab.wait_status(|status| {
        let told = status.notes.as_ref().map(|notes| notes["not_mirrored"].to_string());
        check(told.as_deref() == Some("[]"), || format!("{told:?}"))
    });
    web.ping(db.v4(), 10, 56);
    let status = lab.wait_mirrored(&[web]);
    is_same(&status);
    assert!(status.tap(web.veth_host()).seen() >= before.seen() + 20, "{status:?}");
    agent.stop();
}

#[test]
fn of_the_namespaces_of_a_pod_the_one_with_a_veth_to_the_node_counts() {
    let node = Node::bridged("nested");
    let Node { web, lab, .. } = &node;
    let uid = uid(3);
    // A container inside a container, with its own namespace, and older than everything else in the pod.
    let inner = mirror_tests::Netns::new(&format!("{}-inner", lab.node().name()));
    let _inner = lab.container(&inner, &format!("{}/docker/1", systemd(&uid, "1")));
    let pods = PodsFile::new(lab, &[PodSpec::named("web").uid(&uid).mirror("true")]);
    let agent = Agent::run(lab, any_mode(), &pods, &[]);
    agent.wait_for_log(&["not mirrored", "\"default/web\"", "\"NoNic\""]);
    let start = Instant::now();
    let _sandbox = lab.container(web.netns(), &systemd(&uid, "2"));
    lab.wait_mirrored(&[web]);
    let took = start.elapsed();
    assert!(took < scaled(AT_ONCE), "{took:?}");
    is_mirrored(&node, web);
    agent.stop();
}

#[test]
fn a_pod_whose_processes_are_all_in_the_nodes_namespace_is_not_mirrored() {
    let Node { web, lab, .. } = &Node::bridged("in-host");
    let (web_uid, host_uid) = (uid(4), uid(5));
    let _process = lab.container(lab.node(), &cgroupfs(&host_uid, "1"));
    // A process that has not been moved into its namespace yet, beside one that has.
    let _processes = [lab.node(), web.netns()].map(|netns| lab.container(netns, &cgroupfs(&web_uid, "1")));
    let [web_spec, host_spec] = [("web", &web_uid), ("host", &host_uid)]
        .map(|(name, uid)| PodSpec::named(name).uid(uid).mirror("true"));
    let agent = Agent::mirroring(lab, any_mode(), &[web_spec, host_spec], &[], &[web]);
    // The agent reports the pod only when the runtime has had time to move the process.
    agent.wait_for_log(&["not mirrored", "\"default/host\"", "\"HostNetwork\""]);
    eventually(AT_ONCE, || {
        let told = agent.log_with(&["not mirrored", "\"default/web\""]);
        check(told.is_empty(), || format!("{told:?}"))
    });
    lab.wait_mirrored(&[web]);
    agent.stop();
}
