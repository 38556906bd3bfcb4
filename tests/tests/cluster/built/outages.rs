//! Outages of the components around the agent. Mirroring goes on meanwhile.

use std::time::{Duration, Instant};

use mirror_tests::{AGENT, Cluster, PATIENCE, check, eventually};

use crate::nothing_is_lost_during;

/// Duration of the API server's outage.
const OUTAGE: Duration = Duration::from_secs(30);

#[test]
fn the_api_server_goes_and_comes_back() {
    let cluster = &Cluster::new("api-server");
    let host = cluster.host();
    let [web, db, late, lost] =
        cluster.pods([("web", Some("true")), ("db", None), ("late", None), ("lost", Some("true"))]);
    host.wait_taps(&[&web.device, &lost.device]);
    let (uid, sandbox) = (lost.uid.clone(), cluster.task(&lost.uid, "sandbox").unwrap());
    nothing_is_lost_during(cluster, [&web, &db], || {
        cluster.stop("kube-apiserver");
        let stopped = Instant::now();
        host.wait_metrics(|metrics| {
            metrics
                .get("podmirror_watch_restarts_total{watch=\"pods\"}")
                .is_some_and(|restarts| *restarts > 0.0)
        });
        // Kubelet creates a new sandbox without the API server, and the agent follows.
        cluster.kill_task(&lost, "sandbox");
        drop(lost);
        let lost = cluster.with_new_sandbox("lost", &uid, sandbox);
        host.wait_taps(&[&web.device, &lost.device]);
        assert_eq!(host.get("/readyz").status, 200);
        assert_eq!(host.get("/healthz").status, 200);
        eventually(PATIENCE, || check(stopped.elapsed() > OUTAGE, || "it has not lasted long".into()));
        host.wait_taps(&[&web.device, &lost.device]);
        cluster.bring_back();
    });
    cluster.wait_agent_log(PATIENCE, &["the Kubernetes API is available again", "pods"]);
    cluster.kubectl("delete pod lost");
    cluster.kubectl("annotate pod late podmirror.io/mirror=true");
    // Kubelet also returns to the API server after a pause. Until then the pod's processes run, and its tap stays.
    eventually(PATIENCE, || {
        check(cluster.task(&uid, "sandbox").is_none(), || "kubelet has not ended it".into())
    });
    host.wait_taps(&[&web.device, &late.device]);
}

#[test]
fn kubelet_and_containerd_are_started_anew() {
    let cluster = &Cluster::new("node");
    let host = cluster.host();
    let [web, db] = &cluster.pods([("web", Some("true")), ("db", None)]);
    host.wait_taps(&[&web.device]);
    nothing_is_lost_during(cluster, [web, db], || {
        cluster.stop("kubelet");
        cluster.stop("containerd");
        cluster.bring_back();
    });
    host.wait_taps(&[&web.device]);
}

#[test]
fn rights_are_taken_away_and_given_back() {
    let cluster = &Cluster::new("rights");
    let host = cluster.host();
    let [web, db, late] = &cluster.pods([("web", Some("true")), ("db", None), ("late", None)]);
    host.wait_taps(&[&web.device]);
    nothing_is_lost_during(cluster, [web, db], || {
        cluster.kubectl(&format!("delete clusterrolebinding {AGENT}"));
        // The API server checks rights when a watch begins, and ends a watch after a minute, or when it stops itself.
        cluster.stop("kube-apiserver");
        cluster.bring_back();
        cluster.wait_agent_log(Duration::from_secs(30), &["is unavailable", "forbidden"]);
        host.wait_taps(&[&web.device]);
        cluster.install();
        for watch in ["pods", "namespaces"] {
            cluster.wait_agent_log(PATIENCE, &["the Kubernetes API is available again", watch]);
        }
        cluster.kubectl("annotate pod late podmirror.io/mirror=true");
        host.wait_taps(&[&web.device, &late.device]);
    });
}
