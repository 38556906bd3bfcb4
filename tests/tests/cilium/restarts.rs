//! Restarts of the agent and of Cilium's agent, while packets flow to and from a pod on three paths.

use mirror_tests::{AGENT, Cluster, PATIENCE, Pinging, Settings, check, eventually};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::Scene;

/// Checks that each ping is answered while `outage` runs, and each packet is copied once.
#[track_caller]
fn nothing_is_lost_during(scene: &Scene<'_>, what: &str, outage: impl FnOnce()) {
    let mut sent = 0;
    let frames = scene.copied_during(|| {
        let pings = [
            Pinging::start(&scene.web.netns, scene.db.ip),
            Pinging::start(&scene.db.netns, scene.web.ip),
            Pinging::start(scene.cluster.host().node(), scene.web.ip),
            Pinging::start(&scene.outside, scene.web.ip),
        ];
        outage();
        sent = pings.map(Pinging::stop).iter().sum();
    });
    assert_eq!(frames.len(), 2 * sent, "{what}: {frames}");
}

/// Kills the agent, and waits for the next one.
#[track_caller]
fn kill_agent(cluster: &Cluster) {
    let pid = cluster.agent_pid().unwrap();
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL).unwrap();
    eventually(PATIENCE, || {
        let now = cluster.agent_pid();
        check(now.is_some_and(|now| now != pid), || format!("{pid} was killed, and {now:?} runs"))
    });
    eventually(PATIENCE, || {
        let answer = cluster.host().request("GET", "/readyz")?;
        check(answer.status == 200, || "the new agent is not ready".into())
    });
}

#[track_caller]
fn either_side_is_restarted(story: &str, settings: Settings) {
    let cluster = &Cluster::new(story);
    let scene = &Scene::new(cluster, settings);
    nothing_is_lost_during(scene, "our agent is replaced", || {
        cluster.kubectl(&format!("-n {AGENT} rollout restart daemonset/{AGENT}"));
        cluster.wait_rolled_out();
    });
    nothing_is_lost_during(scene, "our agent is killed", || kill_agent(cluster));
    nothing_is_lost_during(scene, "Cilium loads its programs again", || cluster.regenerate());
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        nothing_is_lost_during(scene, &format!("Cilium ends by {signal}"), || cluster.restart_cilium(signal));
    }
    scene.is_covered();
    let status = cluster.host().wait_taps(&[&scene.web.device]);
    let tap = status.tap(&scene.web.device);
    assert_eq!(tap.seen(), tap.total("copied"), "{tap:#?}");
}

#[test]
fn with_ebpf_host_routing_nothing_is_lost_when_either_side_is_restarted() {
    either_side_is_restarted("restarts", Settings::default());
}

#[test]
fn with_ciliums_filters_nothing_is_lost_when_either_side_is_restarted() {
    either_side_is_restarted("restarts-filters", Settings { tcx: false, ..Settings::default() });
}
