//! The commands `attach`, `status` and `cleanup`, and an agent that is killed or restarted.

use std::time::Duration;

use mirror_tests::{
    Agent, AttachMode, BpfObjects, Capture, Conversation, Flood, Lab, PodSpec, PodsFile, check, eventually,
};

use crate::{Inside, MIRROR, Node, any_mode, shows};

in_both_modes!(
    attach_mirrors_interfaces_until_ctrl_c,
    an_agent_that_was_killed_is_followed_without_a_gap,
    cleanup_leaves_nothing_of_ours,
);

/// The kernel frees an unused map after a grace period of RCU Tasks Trace, which waits for all tasks: on a busy machine
/// more than ten seconds.
const FREED: Duration = Duration::from_secs(60);

/// Waits until none of these objects exists.
#[track_caller]
fn wait_gone(objects: &BpfObjects) {
    assert!(!objects.maps.is_empty() && !objects.programs.is_empty(), "{objects:?}");
    eventually(FREED, || {
        let remaining = objects.remaining();
        check(remaining == BpfObjects::default(), || format!("still there: {remaining:?}"))
    });
}

fn attach_mirrors_interfaces_until_ctrl_c(mode: AttachMode) {
    let Node { web, db, lab } = &Node::bridged("attach");
    let before = lab.network_state();
    let agent = Agent::attach(lab, mode, &[web.veth_host(), db.veth_host(), "--direction", "ingress"]);
    let status = lab.wait_mirrored(&[web, db]);
    for pod in [web, db] {
        let tap = status.tap(pod.veth_host());
        assert_eq!((&tap.pod, tap.nic.as_str(), tap.direction.as_str()), (&None, pod.veth_host(), "ingress"));
        assert!(tap.attached.values().all(|attached| attached == mode.name()), "{tap:?}");
    }
    let inside = [web, db].map(Inside::of);
    let mirror = Capture::start(lab.node(), MIRROR);
    web.ping(db.v4(), 10, 56);
    Conversation::open(web, db, db.v6()).exchange(100_000);
    // What the node side receives is what the pod has sent.
    shows(&mirror, || inside[0].frames().0.and(&inside[1].frames().0));
    let [(from_web, to_web), (from_db, _)] = inside.map(Inside::stop);
    mirror.stop().same_as(&from_web.and(&from_db)).unwrap();
    let status = lab.status();
    let tap = status.tap(web.veth_host());
    assert_eq!(tap.packets("ingress", "copied"), from_web.len() as u64, "{tap:?}");
    assert_eq!(tap.packets("egress", "other_direction"), to_web.len() as u64, "{tap:?}");
    assert_eq!(tap.seen(), (from_web.len() + to_web.len()) as u64, "{tap:?}");

    let objects = BpfObjects::of(lab);
    agent.interrupt();
    wait_gone(&objects);
    lab.network_is_as(&before);
    assert_eq!(lab.pins(), Vec::<std::path::PathBuf>::new());
}

#[test]
fn attach_to_an_interface_that_does_not_exist_fails_and_leaves_nothing() {
    let Node { web, db: _db, lab } = &Node::bridged("no-interface");
    let before = lab.network_state();
    let exit = lab.agent_exit(&["attach", web.veth_host(), "not-here"]);
    assert_eq!(exit.code, Some(1), "{exit:?}");
    assert!(exit.stderr.contains("not-here"), "{exit:?}");
    lab.network_is_as(&before);
    assert_eq!(lab.pins(), Vec::<std::path::PathBuf>::new());
}

/// The number of podmirror's programs at the hooks of a device.
fn attachments(lab: &Lab, device: &str) -> usize {
    let filters = |hook| lab.node().tc(&format!("filter show dev {device} {hook}")).matches(" bpf ").count();
    let clsact: usize = ["ingress", "egress"]
        .into_iter()
        .filter_map(|hook| {
            let count = filters(hook);
            // `tc` prints a line for the chain and one for each filter.
            count.checked_sub(1)
        })
        .sum();
    clsact + BpfObjects::of(lab).links.len()
}

fn an_agent_that_was_killed_is_followed_without_a_gap(mode: AttachMode) {
    let Node { web, db, lab } = &Node::bridged("killed");
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let agent = Agent::run_until(lab, mode, &pods, &[], &[web]);
    assert_eq!(attachments(lab, web.veth_host()), 2);
    let inside = Inside::of(web);
    let mirror = Capture::start(lab.node(), MIRROR);
    let ping = || web.ping(db.v4(), 20, 56);
    ping();
    agent.kill();
    ping();
    let status = lab.status();
    assert!(!status.agent_running && status.tap(web.veth_host()).total("copied") >= 80, "{status:?}");
    for round in 0..3 {
        let agent = Agent::run(lab, mode, &pods, &[]);
        // While the agent starts, and after it has started.
        ping();
        lab.wait_status(|status| check(status.agent_running, || "not running".into()));
        agent.wait_for_log(&["the mirror interface is up"]);
        lab.wait_mirrored(&[web]);
        ping();
        assert_eq!(attachments(lab, web.veth_host()), 2, "start {round}");
        if round == 1 {
            agent.stop()
        } else {
            agent.kill()
        }
        ping();
    }
    shows(&mirror, || inside.capture.frames());
    let (sent, received) = inside.stop();
    mirror.stop().same_as(&sent.and(&received)).unwrap();
    let status = lab.status();
    let tap = status.tap(web.veth_host());
    assert_eq!(tap.packets("egress", "copied"), sent.len() as u64, "{tap:?}");
    assert_eq!(tap.packets("ingress", "copied"), received.len() as u64, "{tap:?}");
    assert_eq!(tap.seen(), (sent.len() + received.len()) as u64, "{tap:?}");

    // The next agent removes the tap of a pod that was deleted while no agent ran.
    pods.write(&[PodSpec::of(db).mirror("true")]);
    let _agent = Agent::run_until(lab, mode, &pods, &[], &[db]);
    assert_eq!(attachments(lab, db.veth_host()), 2);
}

fn cleanup_leaves_nothing_of_ours(mode: AttachMode) {
    let Node { web, db, lab } = &Node::bridged("cleanup");
    // Devices and filters that look similar to podmirror's.
    lab.node().ip("link add other0 type veth peer name other1");
    lab.node().ip("link set other0 alias podmirrored");
    let before = lab.network_state();
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true"), PodSpec::of(db).mirror("egress")]);
    let agent = Agent::run_until(lab, mode, &pods, &[], &[web, db]);
    web.ping(db.v4(), 3, 56);

    // `cleanup` refuses to run beside a running agent.
    let exit = lab.agent_exit(&["cleanup"]);
    assert_eq!(exit.code, Some(1), "{exit:?}");
    assert!(exit.stderr.contains("another mirror-agent"), "{exit:?}");
    lab.wait_mirrored(&[web, db]);

    // The programs for taps inside pods end with the agent, because no such tap exists.
    let before_end = BpfObjects::of(lab);
    agent.stop();
    let objects = BpfObjects::of(lab);
    assert_eq!((&objects.maps, &objects.links), (&before_end.maps, &before_end.links), "the mirror stays");
    assert!(objects.programs.len() == 2 && objects.programs.is_subset(&before_end.programs), "{objects:?}");
    let flood = Flood::start(web, db);
    flood.go_on(50);
    lab.cleanup();
    flood.go_on(50);
    flood.stop();
    wait_gone(&objects);
    lab.network_is_as(&before);
    // Without anything to remove, `cleanup` succeeds too.
    lab.cleanup();
}

#[test]
fn status_tells_the_same_with_and_without_an_agent() {
    let Node { web, db, lab } = &Node::bridged("status");
    let exit = lab.agent_exit(&["status"]);
    assert_eq!(exit.code, Some(1), "{exit:?}");
    assert!(exit.stderr.contains("no podmirror state"), "{exit:?}");

    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true"), PodSpec::of(db).mirror("ingress")]);
    let agent = Agent::run_until(lab, any_mode(), &pods, &[], &[web, db]);
    web.ping(db.v4(), 10, 56);
    let running = lab.status();
    assert!(running.agent_running);
    agent.stop();
    let stopped = lab.status();
    assert_eq!((stopped.agent_running, stopped.notes), (false, None));
    assert!(running.notes.is_some());
    assert_eq!((&stopped.targets, &stopped.taps), (&running.targets, &running.taps));
    let table = lab.agent_exit(&["status"]).stdout;
    assert!(table.contains("not running"), "{table}");
}

#[test]
fn without_a_bpf_file_system_an_agent_says_how_to_mount_one() {
    let lab = &Lab::new("no-bpffs");
    let pods = PodsFile::new(lab, &[PodSpec::named("web")]);
    let before = lab.network_state();
    let directory = lab.files().to_str().unwrap();
    let exit = lab.agent_exit(&["run", "--pods-from", pods.path(), "--bpffs", directory]);
    assert_eq!(exit.code, Some(1), "{exit:?}");
    // For this directory, and for a pod of the chart.
    for path in [directory, "/sys/fs/bpf"] {
        assert!(exit.stderr.contains(&format!("mount -t bpf bpf {path}")), "{exit:?}");
    }
    assert!(!lab.files().join("podmirror").exists());
    lab.network_is_as(&before);
}
