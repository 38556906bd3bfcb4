//! Pods that end or are created again under the same name, and an agent that is killed.

use mirror_tests::{Cluster, PATIENCE, check, eventually, pod_object};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

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

#[test]
fn a_pod_of_a_stateful_set_comes_back_under_its_name() {
    let cluster = &Cluster::new("stateful");
    let host = cluster.host();
    let mut template = pod_object("web", "exec sleep 3600");
    template["metadata"]["annotations"]["podmirror.io/mirror"] = "true".into();
    cluster.apply(&json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": { "name": "web" },
        "spec": {
            "serviceName": "web", "replicas": 1, "selector": { "matchLabels": { "app": "web" } },
            "template": { "metadata": template["metadata"], "spec": template["spec"] },
        },
    }));
    eventually(PATIENCE, || cluster.try_kubectl("get pod web-0").map(drop));
    let first = cluster.running("web-0");
    host.wait_taps(&[&first.device]);
    cluster.kubectl("delete pod web-0");
    eventually(PATIENCE, || {
        let uid = cluster.try_kubectl("get pod web-0 -o jsonpath={.metadata.uid}")?;
        check(uid != first.uid, || "it is the former one".into())
    });
    let second = cluster.running("web-0");
    let status = host.wait_taps(&[&second.device]);
    assert_eq!(status.tap(&second.device).pod.as_ref().unwrap().uid, second.uid);
}

#[test]
fn a_job_that_has_ended_leaves_no_tap() {
    let cluster = &Cluster::new("job");
    let host = cluster.host();
    let mut template = pod_object("job", "until [ -e /done ]; do sleep 0.1; done");
    template["metadata"]["annotations"]["podmirror.io/mirror"] = "true".into();
    template["spec"]["restartPolicy"] = "Never".into();
    cluster.apply(&json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": { "name": "job" },
        "spec": { "template": { "metadata": template["metadata"], "spec": template["spec"] } },
    }));
    let name = eventually(PATIENCE, || {
        let name = cluster.kubectl("get pods -o name");
        check(!name.is_empty(), || "the job has no pod".into()).map(|()| name)
    });
    let pod = cluster.running(name.trim().trim_start_matches("pod/"));
    host.wait_taps(&[&pod.device]);
    cluster.kubectl(&format!("exec {} -- touch /done", pod.name));
    host.wait_taps(&[]);
    cluster.kubectl("wait job job --for=condition=Complete --timeout=60s");
    host.wait_taps(&[]);
}
