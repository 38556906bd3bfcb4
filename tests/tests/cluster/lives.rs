//! An agent that is killed.

use mirror_tests::{Cluster, PATIENCE, check, eventually};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::nothing_is_lost_during;

#[test]
fn the_agent_is_killed_and_the_next_one_takes_over() {
    let cluster = &Cluster::new("agent");
    let host = cluster.host();
    let [web, db] = &cluster.pods([("web", Some("true")), ("db", None)]);
    host.wait_taps(&[&web.device]);
    web.ping(db.ip, 5);
    let counted = || host.status().tap(&web.device).total("copied");
    let before = counted();
    assert!(before >= 10, "{before}");
    let pid = cluster.agent_pid().unwrap();
    let meanwhile = nothing_is_lost_during(cluster, [web, db], || {
        kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL).unwrap();
        eventually(PATIENCE, || {
            let now = cluster.agent_pid();
            check(now.is_some_and(|now| now != pid), || format!("{pid} was killed, and {now:?} runs"))
        });
        eventually(PATIENCE, || {
            check(host.request("GET", "/readyz")?.status == 200, || "the new agent is not ready".into())
        });
    });
    let after = counted();
    assert!(after >= before + meanwhile, "{before}, {meanwhile} and then {after}");
}
