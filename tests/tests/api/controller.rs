//! The controller: sums up the reports of several nodes in the status of a Mirror.
//!
//! One node is real, with an agent. The others are MirrorNodes that the story writes.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use mirror_tests::{Agent, Answer, SOON, check, eventually, lint_metrics, scaled};
use serde_json::{Value, json};

use crate::{
    Node,
    metrics::has_documented,
    resources::{Story, resource, wait_mirrors},
    targets::{namespaces, target},
};

/// A controller sees all Mirrors of the cluster, so only one story at a time runs controllers.
static CONTROLLERS: Mutex<()> = Mutex::new(());
/// Upper bound until a change is in the status: the agent writes its report within 10 s, and the controller its status
/// within another 10 s.
const WRITTEN: Duration = Duration::from_secs(25);
/// Duration of a Lease in seconds: the next controller waits this long for one that was killed.
const LEASE: u64 = 3;

/// A lock: as long as the story holds it, no other story runs controllers.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    CONTROLLERS.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn controller(story: &Story, name: &str, listen: &str) -> Agent {
    let Node { api, lab } = &story.node;
    let kubeconfig = api.kubeconfig();
    let (namespace, seconds) = (api.namespace(), LEASE.to_string());
    let words = [
        "controller",
        "--namespace",
        namespace,
        "--pod-name",
        name,
        "--lease-seconds",
        &seconds,
        "--listen",
        listen,
    ];
    Agent::with_environment(lab, &words, &[("KUBECONFIG", kubeconfig.to_str().unwrap())])
}

/// Writes the MirrorNode of another node, which reports on a Mirror. Returns its name.
fn report(story: &mut Story, node: &str, minutes_ago: i64, summary: &Value) -> String {
    let api = &story.node.api;
    let name = format!("{}-{node}", api.namespace());
    let mut object = json!({
        "apiVersion": "podmirror.io/v1alpha1", "kind": "MirrorNode", "metadata": { "name": name },
    });
    api.kubectl_with("apply --server-side -f -", &object.to_string());
    let reported = Timestamp::now() - SignedDuration::from_mins(minutes_ago);
    object["status"] = json!({
        "lastReportTime": reported.to_string(), "mirrorCount": 1, "refusedCount": 0, "pods": summary["pods"],
        "mirrors": [summary],
    });
    api.kubectl_with("apply --server-side --subresource=status -f -", &object.to_string());
    let of_cluster = format!("mirrornode {name}");
    if !story.of_cluster.contains(&of_cluster) {
        story.of_cluster.push(of_cluster);
    }
    name
}

/// A node's report on the Mirror `name` of the story's namespace.
fn summary(story: &Story, name: &str, selected: i64, covered: i64, copied: i64) -> Value {
    let api = &story.node.api;
    let uid = api.kubectl(&format!("get mirror {name} -o jsonpath={{.metadata.uid}}"));
    let missing = (covered..selected).map(|pod| {
        json!({
            "namespace": api.namespace(), "pod": format!("far-{pod}"), "reason": "NoRoom", "message": "the limit is reached",
        })
    });
    json!({
        "kind": "Mirror", "namespace": api.namespace(), "name": name, "uid": uid, "observedGeneration": 1,
        "pods": { "selected": selected, "covered": covered }, "packets": { "copied": copied, "lost": 2 },
        "nics": covered, "ended": 0, "uncovered": missing.collect::<Vec<_>>(),
    })
}

fn status(story: &Story, mirror: &str) -> Value {
    let object = story.node.api.kubectl(&format!("get mirror {mirror} -o json"));
    serde_json::from_str::<Value>(&object).unwrap()["status"].clone()
}

pub(crate) fn condition<'s>(status: &'s Value, type_: &str) -> &'s Value {
    let conditions = status["conditions"].as_array().into_iter().flatten();
    conditions.into_iter().find(|condition| condition["type"] == type_).unwrap_or(&Value::Null)
}

#[track_caller]
pub(crate) fn wait_status(story: &Story, mirror: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    eventually(WRITTEN, || {
        let status = status(story, mirror);
        if is_so(&status) { Ok(status) } else { Err(format!("{status:#}")) }
    })
}

fn holder(story: &Story) -> String {
    story.node.api.kubectl("get lease podmirror-controller -o jsonpath={.spec.holderIdentity}")
}

/// Reasons of the Events on a Mirror.
fn events(story: &Story, mirror: &str) -> Vec<String> {
    let words = format!(
        "get events --field-selector involvedObject.kind=Mirror,involvedObject.name={mirror} -o jsonpath={{.items[*].reason}}"
    );
    let mut reasons: Vec<_> = story.node.api.kubectl(&words).split_whitespace().map(str::to_owned).collect();
    reasons.sort();
    reasons
}

#[test]
fn what_the_nodes_report_is_summed_up_by_the_controller_that_holds_the_lease() {
    let _alone = alone();
    let story = &mut Story::new("controller");
    let [web, db] = story.node.pods(["web", "db"]);
    story.mirror("all", "web", &json!({ "limits": { "duration": "1h", "packets": "100k" } }));
    let _containers =
        [story.node.api.run(&story.node.lab, &web, &[]), story.node.api.run(&story.node.lab, &db, &[])];
    let mut of_far = summary(story, "all", 3, 2, 1000);
    // It ends later on this node.
    let early = Timestamp::now() + SignedDuration::from_mins(30);
    of_far["expirationTime"] = early.to_string().into();
    let far = report(story, "far", 0, &of_far);
    // The agent of this node is dead.
    let of_gone = summary(story, "all", 7, 7, 7);
    let gone = report(story, "gone", 20, &of_gone);

    let first = controller(story, "first", "127.0.0.1:10707");
    first.wait_for_log(&["holds the Lease"]);
    let agent = story.node.api.agent(&story.node.lab, &[]);
    wait_mirrors(&story.node.lab, &web, &["mirror/all"]);
    // An error in the Mirror itself is found without a node.
    story.mirror("broken", "nobody", &json!({ "filter": "tcp prot 443" }));
    let broken = wait_status(story, "broken", |status| !status.is_null());
    for type_ in ["Ready", "Accepted"] {
        let told = condition(&broken, type_);
        let (status, reason) = (&told["status"], &told["reason"]);
        assert_eq!((status, reason), (&json!("False"), &json!("InvalidFilter")), "{broken:#}");
    }
    let message = condition(&broken, "Accepted")["message"].as_str().unwrap();
    assert!(message.starts_with("spec.filter \"tcp prot 443\": "), "{message}");

    let expires = |status: &Value| -> Option<Timestamp> { status["expirationTime"].as_str()?.parse().ok() };
    let sum = wait_status(story, "all", |status| {
        status["pods"] == json!({ "selected": 11, "covered": 3 }) && expires(status) > Some(early)
    });
    assert_eq!((&sum["reportingNodes"], &sum["observedGeneration"]), (&json!(2), &json!(1)), "{sum:#}");
    assert!(expires(&sum) <= Some(Timestamp::now() + SignedDuration::from_mins(61)), "{sum:#}");
    let types = sum["conditions"].as_array().unwrap().iter().map(|of| &of["type"]).collect::<Vec<_>>();
    assert_eq!(types, ["Ready", "Accepted", "Covered", "Ended"]);
    assert!(sum["packets"]["copied"].as_i64().unwrap() >= 1000, "{sum:#}");
    assert_eq!(condition(&sum, "Accepted")["status"], "True");
    let covered = condition(&sum, "Covered").clone();
    assert_eq!(covered["status"], "False");
    assert_eq!(covered["message"], "8 of 11 pods are not covered: NoRoom, ReportStale");
    assert_eq!(sum["uncovered"][0]["node"], json!(far), "{sum:#}");
    let table = story.node.api.kubectl("get mirror all");
    let words: Vec<Vec<_>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    let columns =
        ["NAME", "READY", "REASON", "TARGET", "PODS", "COVERED", "COPIED", "LOST", "REPORTED", "AGE"];
    assert_eq!(words[0], columns, "{table}");
    assert_eq!(words[1][1..5], ["False", "NotCovered", "11", "3"], "{table}");
    eventually(SOON, || {
        let (all, broken) = (events(story, "all"), events(story, "broken"));
        check(all == ["NotCovered", "Started"] && broken == ["InvalidFilter"], || {
            format!("{all:?} {broken:?}")
        })
    });

    // A second controller waits, and takes over when the first one is killed.
    let second = controller(story, "second", "127.0.0.1:10708");
    let get = |port: u16, path: &str| {
        let address = ([127, 0, 0, 1], port).into();
        let connection = story
            .node
            .lab
            .node()
            .enter(move || std::net::TcpStream::connect::<std::net::SocketAddr>(address));
        let connection = connection.map_err(|error| error.to_string())?;
        Answer::to(&format!("GET {path} HTTP/1.0\r\n\r\n"), connection)
    };
    eventually(SOON, || check(get(10708, "/readyz")?.status == 200, || "not ready".into()));
    let leads = |port| {
        let metrics = get(port, "/metrics").unwrap().body;
        metrics.lines().any(|line| line == "podmirror_controller_is_leader 1")
    };
    assert_eq!((leads(10707), leads(10708), holder(story)), (true, false, "first".to_owned()));
    // The metrics of the controller that leads, and of the one that waits.
    for port in [10707, 10708] {
        lint_metrics(&get(port, "/metrics").unwrap().body);
    }
    let waiting = get(10708, "/metrics").unwrap().body;
    let zero = "podmirror_controller_write_failures_total{kind=\"MirrorTarget\"} 0\n";
    assert!(waiting.contains(zero), "{waiting}");
    let metrics = get(10707, "/metrics").unwrap().body;
    has_documented(&metrics, |name| name.starts_with("podmirror_controller_")).unwrap();
    let of_watch = "podmirror_controller_watch_restarts_total{watch=\"mirrornodes\"} ";
    assert!(metrics.contains(of_watch), "{metrics}");
    let value = |series: &str| {
        let of = metrics
            .lines()
            .find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse::<f64>().ok());
        of.unwrap_or(0.0)
    };
    assert!(value("podmirror_controller_writes_total{kind=\"Mirror\"}") >= 2.0, "{metrics}");
    let kinds = ["Mirror", "ClusterMirror", "MirrorTarget"].map(|kind| {
        ["writes", "write_failures"]
            .map(|of| value(&format!("podmirror_controller_{of}_total{{kind=\"{kind}\"}}")))
    });
    let reconciled = value("podmirror_controller_reconcile_duration_seconds_count");
    assert_eq!(kinds.concat().iter().sum::<f64>(), reconciled, "{metrics}");
    assert!(value("podmirror_controller_reconcile_duration_seconds_sum") > 0.0, "{metrics}");
    assert!(value("process_resident_memory_bytes") > 0.0, "{metrics}");
    first.kill();
    second.wait_for_log(&["holds the Lease"]);
    assert_eq!(holder(story), "second");
    // When the far node's report is deleted, its numbers disappear from the sum. The dead agent remains.
    story.node.api.kubectl(&format!("delete mirrornode {far}"));
    let sum = wait_status(story, "all", |status| status["pods"] == json!({ "selected": 8, "covered": 1 }));
    for type_ in ["Ready", "Covered"] {
        let told = condition(&sum, type_);
        assert_eq!((&told["status"], &told["reason"]), (&json!("Unknown"), &json!("ReportStale")), "{sum:#}");
        assert_eq!(told["message"], format!("1 node has no current report: {gone}"), "{sum:#}");
    }
    story.node.api.kubectl(&format!("delete mirrornode {gone}"));
    let sum = wait_status(story, "all", |status| status["pods"] == json!({ "selected": 1, "covered": 1 }));
    let now = condition(&sum, "Covered");
    assert_eq!((&now["status"], &sum["uncovered"]), (&json!("True"), &Value::Null), "{sum:#}");
    assert_eq!(condition(&sum, "Ready")["status"], "True", "{sum:#}");
    assert_ne!(now["lastTransitionTime"], covered["lastTransitionTime"]);
    let of_before = condition(&status(story, "all"), "Accepted").clone();
    // A new controller sends no Event again.
    assert_eq!(
        (events(story, "all"), events(story, "broken").len()),
        (vec!["NotCovered".into(), "Started".into()], 1)
    );
    // A controller that is stopped releases the Lease, and the statuses that it has written stay.
    second.stop();
    assert_eq!(holder(story), "");
    assert_eq!(condition(&status(story, "all"), "Accepted"), &of_before);
    agent.stop();
}

/// Writes the MirrorNode of another node, which refuses a MirrorTarget. Returns its name.
fn refuse(story: &mut Story, node: &str, minutes_ago: i64, target: &str) -> String {
    let api = &story.node.api;
    let name = format!("{}-{node}", api.namespace());
    let uid = api.kubectl(&format!("get mirrortarget {target} -o jsonpath={{.metadata.uid}}"));
    let mut object = json!({
        "apiVersion": "podmirror.io/v1alpha1", "kind": "MirrorNode", "metadata": { "name": name },
    });
    api.kubectl_with("apply --server-side -f -", &object.to_string());
    let reported = Timestamp::now() - SignedDuration::from_mins(minutes_ago);
    let refused = json!({ "name": target, "uid": uid, "observedGeneration": 1, "refused": "it is taken" });
    object["status"] = json!({
        "lastReportTime": reported.to_string(), "mirrorCount": 0, "refusedCount": 0,
        "pods": { "selected": 0, "covered": 0 }, "mirrors": [], "targets": [refused],
    });
    api.kubectl_with("apply --server-side --subresource=status -f -", &object.to_string());
    story.of_cluster.push(format!("mirrornode {name}"));
    name
}

/// Agents of other stories see the MirrorTarget as well, and report that their nodes have no such pod.
#[test]
fn the_status_of_a_mirror_target_says_which_nodes_can_copy_to_it() {
    let _alone = alone();
    let story = &mut Story::new("controller-targets");
    let namespace = story.node.api.namespace().to_owned();
    let pod = json!({ "namespace": namespace, "name": "ids" });
    let name = &story.mirror_target(&json!({ "pod": pod, "allowedNamespaces": namespaces(&namespace) }));
    story.mirror("all", "web", &json!({ "targetRef": { "name": name } }));
    let far = &refuse(story, "far", 0, name);
    // The agent of this node is dead.
    let gone = &refuse(story, "gone", 20, name);
    let [ids, web] = story.node.pods(["ids", "web"]);
    let Node { api, lab } = &story.node;
    let _containers = [api.run(lab, &ids, &[]), api.run(lab, &web, &[])];
    let controller = controller(story, "one", "");
    let agent = api.agent(lab, &[]);
    // The agent and the controller have just started, and several changes of each may be waiting for their writes.
    let wait = |is_so: &dyn Fn(&Value) -> bool| {
        eventually(2 * WRITTEN, || {
            let object = api.kubectl(&format!("get mirrortarget {name} -o json"));
            let status = serde_json::from_str::<Value>(&object).unwrap()["status"].clone();
            if is_so(&status) { Ok(status) } else { Err(format!("{status:#}")) }
        })
    };
    // The reason of a node that is not ready.
    let reason = |status: &Value, node: &str| {
        let not_ready = status["notReady"].as_array().cloned().unwrap_or_default();
        let of = not_ready.into_iter().find(|of| of["node"] == node);
        of.map(|of| (of["reason"].as_str().unwrap().to_owned(), of["message"].as_str().unwrap().to_owned()))
    };
    let (own, ready) = (lab.node().name(), |status: &Value| status["nodes"]["ready"].as_i64().unwrap_or(0));
    let refused = Some(("TargetRefused".to_owned(), "it is taken".to_owned()));
    let stale = Some(("ReportStale".to_owned(), "its last report is too old or from the future".to_owned()));

    let status =
        wait(&|status| ready(status) == 1 && reason(status, far) == refused && reason(status, own).is_none());
    assert_eq!((reason(&status, gone), &status["observedGeneration"]), (stale, &json!(1)), "{status:#}");
    let not_ready = status["notReady"].as_array().unwrap().len();
    assert_eq!(status["nodes"]["desired"], json!(1 + not_ready), "{status:#}");
    assert_eq!(status["readyNodes"], format!("1/{}", 1 + not_ready), "{status:#}");
    let accepted = condition(&status, "Accepted");
    assert_eq!((&accepted["status"], &accepted["reason"]), (&json!("False"), &json!("TargetRefused")));
    let message = accepted["message"].as_str().unwrap();
    assert!(
        message.starts_with("it is taken (on 1 of ") && message.ends_with(&format!("for example {far})")),
        "{message}"
    );
    let ready_now = condition(&status, "Ready");
    assert_eq!((&ready_now["status"], &ready_now["reason"]), (&json!("False"), &json!("NotReady")));
    let table = api.kubectl(&format!("get mirrortarget {name}"));
    let words: Vec<Vec<_>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(words[0], ["NAME", "TYPE", "DESTINATION", "READY", "REPORTED", "AGE"], "{table}");
    assert_eq!(words[1][1..3], ["Pod", &format!("{namespace}/ids")], "{table}");

    let of_mirror = wait_status(story, "all", |status| condition(status, "Ready")["status"] == "True");
    assert_eq!(of_mirror["uncovered"], Value::Null, "{of_mirror:#}");

    // Deletes the node that refuses the target, and the pod.
    api.kubectl(&format!("delete mirrornode {far}"));
    let status = wait(&|status| condition(status, "Accepted")["status"] == "True");
    assert_eq!((ready(&status), reason(&status, far)), (1, None), "{status:#}");
    api.kubectl("delete pod ids --grace-period=0 --force");
    let status = wait(&|status| ready(status) == 0);
    let (word, message) = reason(&status, own).unwrap();
    assert_eq!((word.as_str(), message.as_str()), ("TargetDown", "no such pod is on this node"));
    let of_mirror = wait_status(story, "all", |status| condition(status, "Ready")["status"] == "False");
    let told = condition(&of_mirror, "Ready");
    assert_eq!(told["message"], "1 of 1 pod is not covered: TargetDown", "{of_mirror:#}");
    let first = &of_mirror["uncovered"][0];
    let expected = format!("nothing is copied to the target {name} now: no such pod is on this node");
    assert_eq!(
        (&first["reason"], &first["message"]),
        (&json!("TargetDown"), &json!(expected)),
        "{of_mirror:#}"
    );

    // An error in the MirrorTarget itself is found without a node.
    let to_itself = json!({ "vxlan": { "remoteIP": "127.0.0.1", "destinationPort": 14789, "vni": 7 } });
    api.apply(&target(name, &to_itself));
    let status = wait(&|status| condition(status, "Accepted")["reason"] == "InvalidSpec");
    let message = condition(&status, "Accepted")["message"].as_str().unwrap();
    assert!(message.ends_with("is not an address of another node"), "{message}");
    wait(&|status| reason(status, own).is_some_and(|(word, _)| word == "TargetRefused"));
    controller.stop();
    agent.stop();
}

/// A budget is used up: the Mirror says so soon, and covers its pod no more. A new Mirror of its name copies again.
#[test]
fn the_end_of_a_mirror_is_in_its_status_soon() {
    /// As in docs/resources.md.
    const TOLD: Duration = Duration::from_secs(20);
    let _alone = alone();
    let story = &mut Story::new("ended");
    let [web, db] = story.node.pods(["web", "db"]);
    let Node { api, lab } = &story.node;
    let _container = api.run(lab, &web, &[]);
    let controller = controller(story, "one", "");
    let agent = api.agent(lab, &[]);
    story.mirror("short", "web", &json!({ "limits": { "packets": 40 } }));
    let covered = json!({ "selected": 1, "covered": 1 });
    let begun = wait_status(story, "short", |status| {
        status["pods"] == covered && condition(status, "Ended")["reason"] == "NotEnded"
    });
    assert_eq!(condition(&begun, "Covered")["status"], "True", "{begun:#}");
    // The agent and the controller have just written, so both wait before they write again.
    db.ping(web.v4(), 20, 56);
    lab.wait_status(|status| {
        let ended = status.tap(web.veth_host()).session("mirror/short").ended.clone();
        check(ended.as_deref() == Some("packets"), || format!("{ended:?}"))
    });
    let began = Instant::now();
    story.wait_told("short", |of| of["ended"] == 1);
    let by_node = began.elapsed();
    let ended = wait_status(story, "short", |status| condition(status, "Ended")["status"] == "True");
    let took = began.elapsed();
    eprintln!("ended: {by_node:.1?} later in the MirrorNode, {took:.1?} later in the Mirror's status");
    assert!(took < scaled(TOLD), "{took:?}");
    let of = |type_: &str| [&condition(&ended, type_)["status"], &condition(&ended, type_)["reason"]];
    assert_eq!(of("Ended"), ["True", "LimitReached"], "{ended:#}");
    assert_eq!(of("Covered")[0], "False", "{ended:#}");
    assert_eq!(ended["uncovered"][0]["reason"], "Ended", "{ended:#}");
    assert_eq!(ended["packets"]["copied"], 40, "{ended:#}");

    let selector = json!({ "matchLabels": { "app": "web" } });
    let again = resource("Mirror", "short", &selector, &json!({ "limits": { "packets": 40 } }));
    api.kubectl_with("replace --force -f -", &again.to_string());
    lab.wait_status(|status| {
        let sessions: Vec<_> = status.taps.iter().flat_map(|tap| &tap.sessions).collect();
        check(sessions.len() == 1 && sessions[0].ended.is_none(), || format!("{sessions:?}"))
    });
    lab.wait_mirrored(&[&web]);
    db.ping(web.v4(), 20, 56);
    lab.wait_status(|status| {
        let session = status.tap(web.veth_host()).session("mirror/short");
        let is_used_up = session.ended.as_deref() == Some("packets");
        // The counters continue if the agent has not seen a moment without the Mirror.
        check(is_used_up && [40, 80].contains(&session.total("copied")), || format!("{session:#?}"))
    });
    controller.stop();
    agent.stop();
}

/// The controller has exactly the rights that the chart grants.
#[test]
fn the_rights_of_the_chart_are_enough_for_the_controller() {
    let _alone = alone();
    let mut story = Story::new("controller-rights");
    let namespace = story.node.api.namespace().to_owned();
    for kind in ["clusterrole", "clusterrolebinding"] {
        story.of_cluster.push(format!("{kind} {namespace}"));
    }
    let object = resource(
        "ClusterMirror",
        &namespace,
        &json!({}),
        &json!({ "filter": "tcp", "namespaceSelector": {
        "matchLabels": { "kubernetes.io/metadata.name": namespace },
    } }),
    );
    story.of_cluster.push(format!("clustermirror {namespace}"));
    story.node.api.apply(&object);
    let name = story.mirror_target(&json!({ "pod": { "namespace": namespace, "name": "ids" } }));
    let kubeconfig = crate::mirror_nodes::kubeconfig_with_rights(&story, "podmirror-controller");
    let Node { api, lab } = &story.node;
    let words = ["controller", "--namespace", &namespace, "--pod-name", "one", "--listen", ""];
    let controller = Agent::with_environment(lab, &words, &[("KUBECONFIG", &kubeconfig)]);
    eventually(WRITTEN, || {
        let words = format!(
            "get clustermirror {namespace} -o jsonpath={{.status.conditions[?(@.type==\"Covered\")].reason}}"
        );
        let reason = api.try_kubectl(&words)?;
        check(reason == "NoPods", || reason)
    });
    eventually(WRITTEN, || {
        let conditions =
            api.try_kubectl(&format!("get mirrortarget {name} -o jsonpath={{.status.conditions}}"))?;
        check(conditions.contains("Ready"), || conditions)
    });
    let refused = controller.log_with(&["orbidden"]);
    assert!(refused.is_empty(), "{refused:#?}");
    controller.stop();
    let config = format!("--kubeconfig {kubeconfig} auth can-i");
    for forbidden in
        ["patch mirrors.podmirror.io", "get secrets", "patch mirrornodes.podmirror.io --subresource=status"]
    {
        let told = api.try_kubectl(&format!("{config} {forbidden}")).unwrap_err();
        assert!(told.contains("no"), "{told}");
    }
}
