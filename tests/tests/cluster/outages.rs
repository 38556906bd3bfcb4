//! What fails around the agent, and the agent itself. Mirroring goes on meanwhile.

use std::time::{Duration, Instant};

use mirror_tests::{AGENT, Cluster, Comparison, KubePod, PATIENCE, Pinging, check, eventually};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// How long the API server is away.
const OUTAGE: Duration = Duration::from_secs(30);

/// Pings from one pod to another all the while that `outage` takes. Each ping and each answer must be on the mirror
/// interface, once; how many they are.
#[track_caller]
fn nothing_is_lost_during(cluster: &Cluster, [from, to]: [&KubePod; 2], outage: impl FnOnce()) -> u64 {
    let comparison = Comparison::of(&from.netns, cluster.host());
    let pinging = Pinging::start(&from.netns, to.ip);
    outage();
    let sent = pinging.stop();
    let frames = comparison.is_equal();
    assert_eq!(frames.len(), 2 * sent, "{frames}");
    frames.len() as u64
}

#[test]
fn the_api_server_goes_and_comes_back() {
    let cluster = &Cluster::new("api-server");
    let host = cluster.host();
    let [web, db, late, lost] =
        cluster.pods([("web", Some("true")), ("db", None), ("late", None), ("lost", Some("true"))]);
    host.wait_taps(&[&web.device, &lost.device]);
    let (uid, sandbox) = (lost.uid.clone(), lost.sandbox);
    nothing_is_lost_during(cluster, [&web, &db], || {
        cluster.stop("kube-apiserver");
        let stopped = Instant::now();
        host.wait_metrics(|metrics| {
            metrics
                .get("podmirror_watch_restarts_total{watch=\"pods\"}")
                .is_some_and(|restarts| *restarts > 0.0)
        });
        // Kubelet makes a new sandbox without asking anybody, and the agent follows.
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
    cluster.wait_agent_log(PATIENCE, &["the Kubernetes API is back", "pods"]);
    cluster.kubectl("delete pod lost");
    cluster.kubectl("annotate pod late podmirror.io/mirror=true");
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
fn rights_are_taken_away_and_given_back() {
    let cluster = &Cluster::new("rights");
    let host = cluster.host();
    let [web, db, late] = &cluster.pods([("web", Some("true")), ("db", None), ("late", None)]);
    host.wait_taps(&[&web.device]);
    nothing_is_lost_during(cluster, [web, db], || {
        cluster.kubectl(&format!("delete clusterrolebinding {AGENT}"));
        // The API server asks for rights when a watch begins, and ends one after a minute; or with itself.
        cluster.stop("kube-apiserver");
        cluster.bring_back();
        cluster.wait_agent_log(Duration::from_secs(30), &["is away", "forbidden"]);
        host.wait_taps(&[&web.device]);
        cluster.install();
        for watch in ["pods", "namespaces"] {
            cluster.wait_agent_log(PATIENCE, &["the Kubernetes API is back", watch]);
        }
        cluster.kubectl("annotate pod late podmirror.io/mirror=true");
        host.wait_taps(&[&web.device, &late.device]);
    });
}
