//! The session slots of a pod: which mirrors get one, which wait, and the status of their Mirrors.

use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use mirror_tests::{PodNs, SOON, check, eventually, list};
use serde_json::{Value, json};

use crate::{
    Node,
    controller::{alone, condition, controller, wait_status},
    resources::{Story, mirrors, resource},
};

const PLACES: usize = 8;

/// Waits until the pod has these mirrors, in any order.
#[track_caller]
fn wait_places(story: &Story, pod: &PodNs, expected: &[&str]) {
    let mut expected = expected.to_vec();
    expected.sort_unstable();
    story.node.lab.wait_status(|status| {
        let mut mirrors = mirrors(status, pod);
        mirrors.sort();
        check(mirrors == expected, || format!("{mirrors:?}, and not {expected:?}"))
    });
}

/// Waits until the API server's time is later than the object's creation, which is in whole seconds.
fn wait_until_younger(story: &Story, object: &str) {
    let made = story.node.api.kubectl(&format!("get {object} -o jsonpath={{.metadata.creationTimestamp}}"));
    let made: Timestamp = made.parse().unwrap();
    eventually(SOON, || {
        let age = Timestamp::now().duration_since(made).as_secs();
        check(age >= 1, || format!("{object} is as old as the next one would be"))
    });
}

/// Waits until the Mirror reports its only pod as covered, or as waiting for a slot, with the reason.
#[track_caller]
fn wait_covered(story: &Story, mirror: &str, covered: bool) {
    let (value, reason, message) = match covered {
        true => ("True", "AllCovered", "1 of 1 pod is covered"),
        false => ("False", "NotCovered", "1 of 1 pod is not covered: TooManyMirrors"),
    };
    let says = |status: &Value| {
        let covered = condition(status, "Covered");
        covered["status"] == value && covered["reason"] == reason
    };
    let status = wait_status(story, mirror, says);
    assert_eq!(condition(&status, "Covered")["message"], message, "{status:#}");
    assert_eq!(status["pods"], json!({ "selected": 1, "covered": u8::from(covered) }));
    let uncovered = &status["uncovered"][0];
    if covered {
        assert_eq!(uncovered, &Value::Null, "{status:#}");
    } else {
        assert_eq!((&uncovered["pod"], &uncovered["reason"]), (&json!("web"), &json!("TooManyMirrors")));
        assert_eq!(uncovered["message"], "a pod has at most 8 mirrors, and others take precedence");
        let told = story.wait_told(mirror, |of| !of["uncovered"].is_null());
        assert_eq!(told["uncovered"][0]["reason"], "TooManyMirrors", "{told:#}");
    }
}

/// Among Mirrors only the age decides: the names are in the opposite order.
#[test]
fn the_oldest_mirrors_have_the_places_of_a_pod_and_an_enforced_one_always() {
    let _alone = alone();
    let mut story = Story::new("places");
    let [web] = story.node.pods(["web"]);
    let _container = story.node.api.run(&story.node.lab, &web, &[]);
    let old: Vec<_> = (0..PLACES).map(|number| format!("old{number}")).collect();
    let to_web = json!({ "matchLabels": { "app": "web" } });
    let objects: Vec<_> = old.iter().map(|name| resource("Mirror", name, &to_web, &json!({}))).collect();
    story.node.api.kubectl_with("create -f -", &list(&objects).to_string());
    let controller = controller(&story, "one", "");
    let agent = story.node.api.agent(&story.node.lab, &[]);
    let old: Vec<_> = old.iter().map(|name| format!("mirror/{name}")).collect();
    let old: Vec<&str> = old.iter().map(String::as_str).collect();
    wait_places(&story, &web, &old);

    wait_until_younger(&story, "mirror old7");
    story.mirror("middle", "web", &json!({}));
    wait_covered(&story, "middle", false);
    wait_until_younger(&story, "mirror middle");
    story.mirror("late", "web", &json!({}));
    wait_covered(&story, "late", false);
    wait_places(&story, &web, &old);

    // The oldest waiting mirror gets the free slot.
    story.node.api.kubectl("delete mirror old3");
    let begun = Instant::now();
    let with_middle = [&old[..3], &old[4..], &["mirror/middle"]].concat();
    wait_places(&story, &web, &with_middle);
    let waited = begun.elapsed();
    assert!(waited < Duration::from_secs(5), "{waited:?} until the place was taken");
    wait_covered(&story, "middle", true);
    wait_covered(&story, "late", false);

    // An enforced mirror, which cannot be narrowed, replaces the youngest.
    let ids = story.cluster_mirror(&json!({ "enforced": true }));
    let Node { api, lab } = &story.node;
    let enforced = format!("clustermirror/{ids}");
    let with_ids = [&old[..3], &old[4..], &[enforced.as_str()]].concat();
    wait_places(&story, &web, &with_ids);
    let origin = lab.status().tap(web.veth_host()).session(&enforced).origin.clone();
    assert_eq!(origin, "enforced-cluster-mirror");
    wait_covered(&story, "middle", false);
    api.kubectl(&format!("delete clustermirror {ids}"));
    wait_places(&story, &web, &with_middle);
    wait_covered(&story, "middle", true);

    // The author of the pod reads the same.
    let read = |reason: &str| {
        let words = format!("get events --field-selector involvedObject.kind=Pod,reason={reason} -o json");
        serde_json::from_str::<Value>(&api.kubectl(&words)).unwrap().to_string()
    };
    let not_mirrored = "Not mirrored by mirror/late: a pod has at most 8 mirrors, and others take precedence";
    eventually(SOON, || {
        let (waiting, begun) = (read("TooManyMirrors"), read("MirrorStarted"));
        let is_so = waiting.contains(not_mirrored) && begun.contains("mirror/middle (target default)");
        check(is_so, || format!("{waiting}\n{begun}"))
    });
    agent.stop();
    controller.stop();
}
