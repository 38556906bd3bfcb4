//! Events: what the API server stores for the authors of pods.

use std::collections::BTreeMap;

use mirror_tests::{Api, PodNs, SOON, Tail, check, eventually};
use serde_json::{Value, json};

use crate::{
    Node,
    resources::{Story, wait_mirrors},
};

const OPT: &str = "podmirror.io/mirror";

/// The count of each Event on a pod, by the pod and its text.
type Told = BTreeMap<String, u64>;

/// All Events on pods of the story's namespace.
fn told(api: &Api) -> Told {
    let events: Value = serde_json::from_str(&api.kubectl("get events.v1.events.k8s.io -o json")).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let of_event = |event: &Value| {
        let [kind, reason, note] = ["type", "reason", "note"].map(|key| text(&event[key]));
        let pod = text(&event["regarding"]["name"]);
        (format!("{pod}: {kind} {reason}: {note}"), event["series"]["count"].as_u64().unwrap_or(1))
    };
    // The controller of another story creates Events on Mirrors.
    let of_pods =
        events["items"].as_array().unwrap().iter().filter(|event| event["regarding"]["kind"] == "Pod");
    of_pods.map(of_event).collect()
}

/// Waits until the Events are exactly those before, plus one of each of these texts.
#[track_caller]
fn wait_told(api: &Api, before: &Told, more: &[&str]) -> Told {
    let mut expected = before.clone();
    for text in more {
        *expected.entry((*text).to_owned()).or_default() += 1;
    }
    eventually(SOON, || {
        let told = told(api);
        check(told == expected, || format!("{told:#?}, and not {expected:#?}"))
    });
    expected
}

/// A node that mirrors every pod. Events are sent only for what is requested, once for all mirrors of a pod together;
/// not again for what the agent finds when it starts, and not for a capture.
#[test]
fn a_pod_is_told_once_when_its_mirrors_begin_and_end() {
    let story = &Story::new("begins");
    let node @ Node { api, lab } = &story.node;
    let [web, db, idle] = &node.pods(["web", "db", "idle"]);
    let start = |pod: &PodNs, annotations: &[(&str, &str)]| api.run(lab, pod, annotations);
    let _containers = [start(web, &[(OPT, "true")]), start(idle, &[])];
    let of_db = start(db, &[("podmirror.io/mirror.own", "true")]);
    story.mirror("all", "web", &json!({ "targetRef": { "name": "ids" } }));
    story.mirror("few", "db", &json!({ "targetRef": { "name": "ids" }, "limits": { "packets": 10 } }));
    let run = || api.agent(lab, &["--enable-mirror", "--define-target", "ids=ids0"]);
    let agent = run();
    let begun = [
        "web: Normal MirrorStarted: Mirrored by default (target default), mirror/all (target ids)",
        "db: Normal MirrorStarted: Mirrored by mirror/few (target ids), own (target default)",
    ];
    let events = wait_told(api, &Told::new(), &begun);
    wait_mirrors(lab, idle, &["default"]);

    // A limit ends one mirror, while a program reads the packets of another pod.
    let tail = Tail::start(lab, &["tail", "--pod", &format!("{}/idle", api.namespace())]);
    db.ping(web.v4(), 20, 56);
    let over = "db: Normal MirrorEnded: No longer mirrored by mirror/few: its limit of packets is reached";
    let events = wait_told(api, &events, &[over]);
    tail.stop();

    // The next agent finds all mirrors installed. A Mirror was deleted meanwhile, and only that causes an Event.
    agent.stop();
    api.kubectl("annotate pod web podmirror.io/mirror-");
    api.kubectl("delete mirror all");
    let agent = run();
    let gone = "web: Normal MirrorEnded: No longer mirrored by mirror/all: no longer requested";
    let events = wait_told(api, &events, &[gone]);
    wait_mirrors(lab, web, &["default"]);

    // The mirror begins again: its Event becomes a series.
    story.mirror("all", "web", &json!({ "targetRef": { "name": "ids" } }));
    let again = "web: Normal MirrorStarted: Mirrored by mirror/all (target ids)";
    let events = wait_told(api, &events, &[again]);
    api.kubectl("annotate pod web podmirror.io/mirror=false");
    let out = "web: Normal MirrorEnded: No longer mirrored by default, mirror/all: the pod opts out: an annotation on it is \"false\"";
    let events = wait_told(api, &events, &[out]);
    api.kubectl("annotate pod web podmirror.io/mirror-");
    let events = wait_told(api, &events, &[again]);
    api.kubectl("delete mirror all");
    let events = wait_told(api, &events, &[gone]);
    assert_eq!((events[again], events[gone]), (2, 2));

    // A deleted pod gets no Event. The last Event shows that all earlier ones were posted.
    drop(of_db);
    api.kubectl("delete pod db --grace-period=0 --force");
    lab.wait_mirrored(&[web, idle]);
    story.mirror("late", "idle", &json!({}));
    let late = "idle: Normal MirrorStarted: Mirrored by mirror/late (target default)";
    wait_told(api, &events, &[late]);
    agent.stop();
}
