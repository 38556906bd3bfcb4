//! Namespaces in pods: a pod with its own user namespace, and a container with its own network inside a pod.
//!
//! The module `processes` tests how the agent finds a pod's namespace if its processes are in several.

use std::{
    io::{BufRead as _, BufReader},
    process::{Child, Command, Stdio},
};

use mirror_tests::{Agent, AttachMode, Capture, Lab, Netns, PodSpec, PodsFile, SOON, check, eventually};

use crate::{
    Inside, MIRROR, Node, any_mode,
    pod_side::{has_exit, talk, talk_in_frames},
    shows,
};

/// A process that is root of a user namespace and of a network namespace, as in a pod with `hostUsers: false`.
struct Root(Child);

impl Root {
    fn start() -> Self {
        let mut command = Command::new("unshare");
        // The process ends when this test process ends, however that happens.
        let script = "echo ready; exec tail --follow /dev/null --pid $PPID >/dev/null";
        command.args(["--user", "--map-root-user", "--net", "sh", "-c", script]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self(child)
    }

    /// Whether this command succeeds in the process's namespaces.
    fn can(&self, line: &str) -> bool {
        let pid = self.0.id().to_string();
        let mut command = Command::new("nsenter");
        command.args(["--target", &pid, "--user", "--net", "--"]).args(line.split(' '));
        command.output().unwrap().status.success()
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        let _ = self.0.kill().and_then(|()| self.0.wait());
    }
}

in_both_modes!(a_pod_with_a_user_namespace_is_mirrored);

/// Each packet is mirrored once. If root of the pod removes the relay device (`exit`) or the agent's filters, they are
/// restored. It cannot remove the agent's links.
fn a_pod_with_a_user_namespace_is_mirrored(mode: AttachMode) {
    if !AttachMode::Tcx.is_applicable() {
        eprintln!("not applicable: the guest of Linux 5.10 makes no user namespaces");
        return;
    }
    let root = Root::start();
    let lab = Lab::new("userns");
    lab.node().ip("link add up0 type veth peer name up1");
    lab.node().ip("link set up0 up");
    lab.node().ip("link set up1 up");
    let netns = Netns::at(format!("/proc/{}/ns/net", root.0.id()));
    netns.ip("link set lo up");
    let web = lab.pod_over_in("web", netns, "macvlan mode bridge", "up0");
    let db = lab.pod_over("db", "macvlan mode bridge", "up0");
    let pods = PodsFile::new(&lab, &[PodSpec::of(&web).mirror("true")]);
    let agent = Agent::run(&lab, mode, &pods, &[]);
    lab.wait_taps(&["eth0"]);
    let are_mirrored = || {
        let inside = Inside::of(&web);
        let mirror = Capture::start(lab.node(), MIRROR);
        talk(&web, &db);
        talk_in_frames(&web);
        talk_in_frames(&db);
        shows(&mirror, || inside.capture.frames());
    };
    are_mirrored();

    if mode == AttachMode::Clsact {
        assert!(root.can("tc qdisc delete dev eth0 clsact"));
        agent.wait_for_log(&["partly mirrored", "has removed podmirror's program"]);
        lab.wait_taps(&["eth0"]);
    } else {
        assert!(root.can("tc qdisc add dev eth0 clsact") && root.can("tc qdisc delete dev eth0 clsact"));
    }
    are_mirrored();
    // Each relay device has its own MAC address.
    let exit = || String::from_utf8(web.netns().try_run("ip -o link show podmirror").stdout).unwrap();
    let before = exit();
    assert!(root.can("ip link delete podmirror"));
    pods.write_to_wake(&[PodSpec::of(&web).mirror("true")]);
    eventually(SOON, || {
        let now = exit();
        check(now != before && now.contains(",UP"), || format!("it was {before}, it is {now}"))
    });
    lab.wait_taps(&["eth0"]);
    are_mirrored();
    assert_eq!(agent.log_with(&["\"ERROR\""]), Vec::<String>::new());
    agent.stop();
    lab.cleanup();
    assert!(!has_exit(&web) && lab.pins().is_empty(), "{:?}", lab.pins());
}

/// The packets of a container inside a pod pass the pod's NIC, and are mirrored there, once. The devices that connect
/// the container are not NICs of the pod.
#[test]
fn what_a_container_inside_a_pod_says_is_mirrored_once() {
    let Node { web, db, lab } = &Node::bridged("inner");
    let inner = Netns::new(&format!("{}-inner", lab.node().name()));
    inner.keep_quiet();
    web.netns().ip(&format!("link add inner0 type veth peer name eth0 netns {}", inner.name()));
    web.netns().ip("address add 172.16.0.1/24 dev inner0");
    web.netns().ip("link set inner0 up");
    web.netns().sysctl("ipv4/ip_forward", "1");
    inner.ip("address add 172.16.0.2/24 dev eth0");
    inner.ip("link set eth0 up");
    inner.ip("route add default via 172.16.0.1");
    db.netns().ip(&format!("route add 172.16.0.0/24 via {}", web.v4()));
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true"), PodSpec::of(db).mirror("true")]);
    let agent = Agent::run_until(lab, any_mode(), &pods, &[], &[web, db]);
    let [of_web, of_db] = [web, db].map(Inside::of);
    let mirror = Capture::start(lab.node(), MIRROR);
    inner.ping_every(std::time::Duration::from_millis(2), db.v4(), 10, 1000);
    db.ping("172.16.0.2".parse().unwrap(), 10, 56);
    shows(&mirror, || of_web.frames().0.and(&of_db.frames().0));
    assert!(of_web.frames().0.len() >= 20);
    lab.wait_mirrored(&[web, db]);
    assert_eq!(lab.status().notes.unwrap()["not_mirrored"], serde_json::json!([]));
    agent.stop();
}
