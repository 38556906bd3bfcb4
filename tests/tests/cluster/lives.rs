//! Pods that end, come back under their names, or lose their sandbox.

use mirror_tests::{Cluster, Comparison, PATIENCE, check, eventually, pod_object};
use serde_json::json;

#[test]
fn a_pod_with_a_new_sandbox_is_mirrored_again() {
    let cluster = &Cluster::new("sandbox");
    let host = cluster.host();
    let [web, db] = cluster.pods([("web", Some("true")), ("db", None)]);
    host.wait_taps(&[&web.device]);
    let (uid, sandbox) = (web.uid.clone(), web.sandbox);
    cluster.kill_task(&web, "sandbox");
    // Nobody but the kernel holds its namespace any more.
    drop(web);
    let web = cluster.with_new_sandbox("web", &uid, sandbox);
    host.wait_taps(&[&web.device]);
    let comparison = Comparison::of(&web.netns, host);
    web.ping(db.ip, 5);
    assert_eq!(comparison.is_equal().len(), 10);
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
