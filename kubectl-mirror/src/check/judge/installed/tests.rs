//! Tests of the checks of an installed podmirror: each outcome of each check.

use mirror_api::crds;
use serde_json::{Value, json};

use super::*;
use crate::check::judge::tests::{facts as before, node, objects, of, only, refused};

fn pod(node: &str, ready: bool, image: &str) -> Value {
    let agent = json!({ "name": "agent", "ready": ready, "restartCount": 0, "image": image, "imageID": "" });
    json!({
        "metadata": { "name": format!("agent-{node}") },
        "spec": { "containers": [{ "name": "agent", "image": image }], "nodeName": node },
        "status": { "containerStatuses": [agent] },
    })
}

fn daemon_set(desired: i32) -> Value {
    json!({
        "metadata": { "name": "podmirror" },
        "status": {
            "desiredNumberScheduled": desired, "currentNumberScheduled": 0, "numberMisscheduled": 0, "numberReady": 0,
        },
    })
}

fn report(name: &str, last_report_time: &str, refused: i64, mirrors: &[&str]) -> Value {
    let pods = json!({ "selected": 0, "covered": 0 });
    let mirror = |name: &&str| {
        json!({
            "kind": "Mirror", "name": name, "uid": "1", "observedGeneration": 1, "pods": pods,
            "packets": { "copied": 0, "lost": 0 }, "ended": 0,
        })
    };
    json!({
        "apiVersion": "podmirror.io/v1alpha1", "kind": "MirrorNode", "metadata": { "name": name },
        "status": {
            "lastReportTime": last_report_time, "mirrorCount": 1, "refusedCount": refused, "pods": pods,
            "mirrors": mirrors.iter().map(mirror).collect::<Vec<_>>(),
        },
    })
}

const IMAGE: &str = "registry.example:5000/mirror-agent:0.1.0";
const NOW: &str = "2026-01-01T11:59:00Z";

/// Two nodes, each with a ready agent.
fn facts() -> Facts {
    let controller = json!({ "metadata": { "name": "c" }, "status": { "availableReplicas": 1 } });
    Facts {
        nodes: objects(&["a", "b"].map(|name| node(name, "linux", "amd64", "6.12.0"))),
        crds: Ok(crds()),
        installed: objects(&[daemon_set(2)]),
        pods: objects(&["a", "b"].map(|node| pod(node, true, IMAGE))),
        controllers: objects(&[controller]),
        reports: objects(&["a", "b"].map(|node| report(node, NOW, 0, &["m"]))),
        packets: api("True"),
        ..before()
    }
}

/// The API of packets, with this status of its condition.
fn api(status: &str) -> Result<Option<APIService>, String> {
    let conditions = json!([
        { "type": "Other", "status": "Unknown" },
        { "type": "Available", "status": status, "reason": "FailedDiscoveryCheck", "message": "no answer" },
    ]);
    let api = json!({ "metadata": {}, "status": { "conditions": conditions } });
    objects(&[api]).map(|mut all| all.pop())
}

fn told(result: Level, found: &str) -> (Level, String) {
    (result, found.to_owned())
}

#[test]
fn a_podmirror_that_works_has_nothing_to_look_at() {
    let facts = facts();
    let findings = crate::check::judge::findings(&facts);
    assert!(findings.iter().all(|finding| finding.result == Level::Ok), "{findings:#?}");
    assert_eq!(only(&facts, "agents").1, "2 agents ready on 2 nodes");
    assert_eq!(only(&facts, "versions").1, "all agents have 0.1.0, this plugin has 0.1.0");
    assert_eq!(only(&facts, "reports").1, "of 2 nodes, none too old");
    assert_eq!(only(&facts, "packets").1, "the API of packets is available");
}

#[test]
fn agents_that_are_missing_are_named() {
    let with = |desired, pods: &[Value]| {
        of(&Facts { installed: objects(&[daemon_set(desired)]), pods: objects(pods), ..facts() }, "agents")
    };
    let (ready, unready) = (pod("a", true, IMAGE), pod("b", false, IMAGE));
    let without = told(Level::Warn, "these nodes have no agent: b");
    assert_eq!(with(2, &[ready.clone(), unready]), [told(Level::Warn, "no agent is ready on b")]);
    let fewer = told(Level::Warn, "1 agent ready on 1 node, and the DaemonSet wants 2");
    assert_eq!(with(2, std::slice::from_ref(&ready)), [fewer, without.clone()]);
    let ok = told(Level::Ok, "1 agent ready on 1 node");
    assert_eq!(with(1, &[ready]), [ok.clone(), without.clone()]);
    let none = told(Level::Fail, "no agent of 2 is ready: a");
    assert_eq!(with(2, &[pod("a", false, IMAGE)]), [none.clone(), without.clone()]);
    // One that is being deleted may be ready, and another one has its node already.
    let mut old = pod("a", true, IMAGE);
    old["metadata"]["deletionTimestamp"] = NOW.into();
    assert_eq!(with(2, std::slice::from_ref(&old)), [none, without.clone()]);
    for pods in [[pod("a", true, IMAGE), old.clone()], [old, pod("a", true, IMAGE)]] {
        assert_eq!(with(1, &pods), [ok.clone(), without.clone()]);
    }
    let found = with(3, &[]);
    assert_eq!(found[0], told(Level::Fail, "no agent of 3 is ready: no node has one"));
    for unread in [Facts { installed: refused(), ..facts() }, Facts { pods: refused(), ..facts() }] {
        assert_eq!(only(&unread, "agents").0, Level::Warn);
    }
}

#[test]
fn a_recorder_that_fails_is_told_and_its_agent_is_ready() {
    let with = |is_ready: bool| {
        let mut both = pod("b", true, IMAGE);
        both["spec"]["containers"] = json!([both["spec"]["containers"][0], { "name": "recorder" }]);
        let recorder = json!({
            "name": "recorder", "ready": is_ready, "restartCount": 0, "image": IMAGE, "imageID": "",
        });
        both["status"]["containerStatuses"] = json!([both["status"]["containerStatuses"][0], recorder]);
        of(&Facts { pods: objects(&[pod("a", true, IMAGE), both]), ..facts() }, "agents")
    };
    let ready = told(Level::Ok, "2 agents ready on 2 nodes");
    assert_eq!(with(true), std::slice::from_ref(&ready));
    assert_eq!(with(false), [ready, told(Level::Warn, "the recorder does not run on b")]);
}

#[test]
fn agents_of_several_versions_are_told() {
    let with = |images: [&str; 2]| {
        let [one, two] = images;
        only(&Facts { pods: objects(&[pod("a", true, one), pod("b", true, two)]), ..facts() }, "versions")
    };
    assert_eq!(
        with([IMAGE, "mirror-agent:0.2.0"]),
        told(Level::Warn, "the agents differ: 0.1.0 on a, 0.2.0 on b")
    );
    let newer = ["x/mirror-agent:0.2.0"; 2];
    assert_eq!(with(newer), told(Level::Warn, "the agents have 0.2.0, this plugin has 0.1.0"));
    let unknown = told(Level::Ok, "all agents have main, this plugin has 0.1.0");
    assert_eq!(with(["mirror-agent:main@sha256:0"; 2]), unknown);
    assert_eq!(with(["r:5000/a:0.1.0@sha256:0", IMAGE]).0, Level::Ok);
    assert_eq!(of(&Facts { pods: objects(&[pod("a", true, "r:5000/a")]), ..facts() }, "versions"), []);
}

#[test]
fn reports_that_are_missing_or_old_are_told() {
    let with = |reports: &[Value]| of(&Facts { reports: objects(reports), ..facts() }, "reports");
    let fresh = report("a", NOW, 0, &["m"]);
    let old = "2026-01-01T11:44:59Z";
    assert_eq!(with(std::slice::from_ref(&fresh)), [told(Level::Warn, "no MirrorNode of b")]);
    let stale = told(Level::Warn, "the reports of these nodes are too old, or from the future: b");
    assert_eq!(with(&[fresh.clone(), report("b", old, 0, &["m"])]), [stale]);
    assert_eq!(
        with(&[fresh.clone(), report("b", old, 0, &[])])[0].0,
        Level::Ok,
        "there is nothing to repeat"
    );
    // Two nodes without an agent.
    let (dead, idle) = (report("c", old, 0, &["m"]), report("d", old, 0, &[]));
    let told_dead = told(Level::Warn, "these nodes have a stale report and no agent: c");
    assert_eq!(with(&[fresh.clone(), report("b", NOW, 0, &["m"]), dead, idle]), [told_dead]);
    assert_eq!(with(&[fresh, report("b", NOW, 2, &["m"])]), [told(Level::Warn, "Mirrors are refused on b")]);
    assert_eq!(only(&Facts { reports: refused(), ..facts() }, "reports").0, Level::Warn);
    // An older server has no reports and no controller.
    let old = Facts {
        server: "v1.29.0".to_owned(),
        reports: Ok(Vec::new()),
        controllers: Ok(Vec::new()),
        ..facts()
    };
    assert_eq!((of(&old, "reports"), of(&old, "controller")), (Vec::new(), Vec::new()));
}

#[test]
fn a_controller_that_is_missing_is_told() {
    let with =
        |controllers: &[Value]| only(&Facts { controllers: objects(controllers), ..facts() }, "controller");
    let controller =
        |available| json!({ "metadata": { "name": "c" }, "status": { "availableReplicas": available } });
    assert_eq!(with(&[controller(2)]), told(Level::Ok, "2 available"));
    assert_eq!(with(&[controller(0)]).0, Level::Warn);
    assert_eq!(with(&[]).0, Level::Warn);
    assert_eq!(only(&Facts { controllers: refused(), ..facts() }, "controller").0, Level::Warn);
}

#[test]
fn a_target_is_told_with_its_status() {
    let target = |name: &str, conditions: &[(&str, &str, &str)]| {
        let condition = |(type_, status, message): &(&str, &str, &str)| {
            json!({
                "type": type_, "status": status, "reason": "Reason", "message": message,
                "lastTransitionTime": NOW,
            })
        };
        let conditions: Vec<_> = conditions.iter().map(condition).collect();
        let nodes = json!({ "ready": 0, "desired": 2 });
        let status = json!({ "observedGeneration": 1, "conditions": conditions, "nodes": nodes });
        json!({
            "apiVersion": "podmirror.io/v1alpha1", "kind": "MirrorTarget", "metadata": { "name": name },
            "spec": {}, "status": (!conditions.is_empty()).then_some(status),
        })
    };
    let is_ready = [("Accepted", "True", "fine"), ("Ready", "True", "2 of 2 nodes can copy to it")];
    let targets = [
        target("fine", &is_ready),
        target("bad", &[("Accepted", "False", "no address"), ("Ready", "False", "none")]),
        target("down", &[("Accepted", "True", "fine"), ("Ready", "False", "1 of 2 nodes")]),
        target("unknown", &[("Accepted", "Unknown", "none"), ("Ready", "Unknown", "no node reports on it")]),
        target("half", &[("Accepted", "True", "fine")]),
        target("new", &[]),
    ];
    let found = of(&Facts { targets: objects(&targets), ..facts() }, "targets");
    let expected = [
        told(Level::Ok, "fine: 2 of 2 nodes can copy to it"),
        told(Level::Warn, "bad: Reason: no address"),
        told(Level::Warn, "down: Reason: 1 of 2 nodes"),
        told(Level::Warn, "unknown: Reason: no node reports on it"),
        told(Level::Warn, "half has no condition Ready, which the controller writes"),
        told(Level::Warn, "new has no condition Ready, which the controller writes"),
    ];
    assert_eq!(found, expected);
    assert_eq!(only(&Facts { targets: refused(), ..facts() }, "targets").0, Level::Warn);
}

#[test]
fn an_api_that_is_missing_or_not_available_is_told() {
    let with = |packets| only(&Facts { packets, ..facts() }, "packets");
    let none = "there is no API of packets, so tail, explain, coverage and top do not work";
    assert_eq!(with(Ok(None)), told(Level::Warn, none));
    let why = "the API of packets is not available: FailedDiscoveryCheck: no answer";
    for status in ["False", "Unknown"] {
        assert_eq!(with(api(status)), told(Level::Warn, why));
    }
    let new = Ok(Some(APIService::default()));
    assert_eq!(with(new), told(Level::Warn, "the API of packets is not available"));
    assert_eq!(with(refused()).0, Level::Warn);
}
