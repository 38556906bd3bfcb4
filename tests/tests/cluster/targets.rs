//! The copies of a pod go to another pod, to a program that runs through `kubectl exec`, and to another machine.

use std::{fs::File, process};

use mirror_tests::{
    AGENT, Capture, Cluster, Netns, PATIENCE, SOON, SessionStatus, Tail, check, eventually, pod_object,
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// The program's command in the agent's container.
const COMMAND: [&str; 5] = ["tail", "--target", "program", "-w", "-"];

/// Another machine, at the other end of a veth pair of the node, which is deleted with it.
fn another_machine(cluster: &Cluster) -> Netns {
    // By this name, the next tests remove it if this one is killed.
    let (node, far) = (cluster.host().node(), Netns::new(&format!("pm-{}-far", process::id())));
    far.keep_quiet();
    node.ip(&format!("link add pmtest0 mtu 9000 type veth peer name up0 mtu 9000 netns {}", far.name()));
    node.ip("address add 10.9.0.1/24 dev pmtest0");
    node.ip("link set pmtest0 up");
    far.ip("address add 10.9.0.5/24 dev up0");
    far.ip("link set up0 up");
    far.ip("link add vx0 type vxlan id 77 dstport 14789 local 10.9.0.5 nolearning");
    far.sysctl("ipv6/conf/vx0/disable_ipv6", "1");
    far.ip("link set vx0 mtu 8900 up");
    far
}

#[test]
fn a_pod_a_program_and_another_machine_get_every_packet() {
    let cluster = &Cluster::new("targets");
    let host = cluster.host();
    let far = another_machine(cluster);
    let [db, ids] = &cluster.pods([("db", None), ("ids", None)]);
    let mut web = pod_object("web", "exec sleep 3600");
    for target in ["pod", "program", "machine"] {
        web["metadata"]["annotations"][format!("podmirror.io/mirror.{target}")] = "true".into();
        web["metadata"]["annotations"][format!("podmirror.io/target.{target}")] = target.into();
    }
    cluster.apply(&web);
    let web = &cluster.running("web");
    // The bridge learns the ports of the pods. Until then, it floods.
    web.ping(db.ip, 1);

    cluster.uninstall();
    let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/chart");
    let all = format!("--namespace {AGENT} --wait --timeout {}s", PATIENCE.as_secs());
    cluster.helm(&format!(
        "install {AGENT} {chart} {all} --create-namespace --set targets.pod=pod:{}/ids --set targets.program=stream \
         --set targets.machine=vxlan:10.9.0.5:14789/vni=77",
        cluster.namespace()
    ));
    // helm does not wait for the only agent of a cluster with one node, because an update may leave one node without an
    // agent.
    cluster.wait_rolled_out();
    let file = host.files().join("live.pcapng");
    let mut kubectl =
        cluster.command(&format!("-n {AGENT} exec daemonset/{AGENT} -- /mirror-agent {}", COMMAND.join(" ")));
    let mut tail = Tail::of(kubectl.stdout(File::create(&file).unwrap()), file);
    tail.wait_until_it_reads(host);
    let before = host.wait_status(|status| {
        let up = status.targets.iter().filter(|target| target.up).count();
        check(up == 4 && status.taps.len() == 1, || format!("not all of the targets are up: {status:#?}"))
    });

    let [inside, pod, machine] = [(&web.netns, "eth0"), (&ids.netns, "eth0"), (&far, "vx0")]
        .map(|(netns, device)| Capture::start(netns, device));
    web.ping(db.ip, 10);
    db.ping(web.ip, 10);
    let frames = eventually(SOON, || {
        let frames = inside.frames().ipv4();
        check(frames.len() >= 40, || format!("{frames}"))?;
        pod.frames().ipv4().same_as(&frames)?;
        machine.frames().ipv4().same_as(&frames)?;
        tail.file().all_frames().ipv4().same_as(&frames)?;
        Ok(frames)
    });
    let after = host.status();
    for mirror in ["pod", "program", "machine"] {
        let [before, after] = [&before, &after].map(|status| status.tap(&web.device).session(mirror));
        assert!(after.total("copied") >= frames.len() as u64, "{after:#?}");
        let others =
            |session: &SessionStatus| session.seen() - session.total("copied") - session.total("duplicate");
        assert_eq!(others(after), others(before), "{after:#?}");
    }

    let pid = cluster.pid_of(&COMMAND).unwrap();
    kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGTERM).unwrap();
    tail.wait();
    host.wait_status(|status| check(!status.target("program").up, || "the target is still up".into()));
    cluster.helm(&format!("uninstall {AGENT} {all}"));
    cluster.has_left_nothing();
    let devices = host.devices();
    assert!(!devices.iter().any(|device| device.starts_with("pm-")), "{devices:?}");
}
