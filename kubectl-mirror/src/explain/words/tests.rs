#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::prelude::*;
use serde_json::{Value, from_value, json};

use super::*;

fn pod(labels: Value, annotations: Value) -> Pod {
    from_value(json!({
        "metadata": { "namespace": "shop", "name": "web", "labels": labels, "annotations": annotations },
        "spec": { "containers": [], "nodeName": "a" },
    }))
    .unwrap()
}

fn mirror(name: &str, spec: Value) -> Mirror {
    let condition = json!({
        "type": "Accepted", "status": "True", "reason": "Accepted", "message": "all nodes accept it",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    });
    from_value(json!({
        "apiVersion": "podmirror.io/v1alpha1", "kind": "Mirror",
        "metadata": { "namespace": "shop", "name": name, "uid": format!("uid-{name}") }, "spec": spec,
        "status": {
            "observedGeneration": 1, "conditions": [condition], "reportingNodes": 1, "pods": { "selected": 1, "covered": 0 },
            "packets": { "copied": 0, "lost": 0 },
        },
    }))
    .unwrap()
}

fn of_cluster(namespace_selector: Value) -> ClusterMirror {
    from_value(json!({
        "apiVersion": "podmirror.io/v1alpha1", "kind": "ClusterMirror", "metadata": { "name": "all", "uid": "uid-all" },
        "spec": { "namespaceSelector": namespace_selector, "podSelector": {}, "targetRef": { "name": "ids" } },
    }))
    .unwrap()
}

fn node(mirrors: Value) -> MirrorNode {
    from_value(json!({
        "apiVersion": "podmirror.io/v1alpha1", "kind": "MirrorNode", "metadata": { "name": "a" },
        "status": {
            "lastReportTime": "2026-01-01T00:00:00Z", "mirrorCount": 1, "refusedCount": 0,
            "pods": { "selected": 1, "covered": 0 }, "mirrors": mirrors,
        },
    }))
    .unwrap()
}

fn summary(name: &str) -> Value {
    json!({
        "kind": "Mirror", "namespace": "shop", "name": name, "uid": format!("uid-{name}"), "observedGeneration": 1,
        "pods": { "selected": 1, "covered": 0 }, "packets": { "copied": 0, "lost": 0 }, "ended": 0,
    })
}

fn facts(pod: Pod) -> Facts {
    Facts { pod, namespace: None, mirrors: Vec::new(), of_cluster: Vec::new(), node: None }
}

#[test]
fn a_pod_has_its_mirrors_with_what_all_say_of_them() {
    let annotations = json!({ "podmirror.io/rate": "1kpps", "other.io/x": "y" });
    let mut of_node = summary("mine");
    of_node["uncovered"] = json!([
        { "namespace": "shop", "pod": "web", "nic": "eth0", "reason": "Hidden", "message": "another program" },
        { "namespace": "shop", "pod": "db", "reason": "NoNic", "message": "it has no NIC" },
    ]);
    let namespace = json!({
        "metadata": { "name": "shop", "labels": { "team": "red" }, "annotations": { "podmirror.io/mirror": "true" } },
    });
    let facts = Facts {
        namespace: from_value(namespace).unwrap(),
        mirrors: vec![
            mirror(
                "mine",
                json!({
                    "podSelector": { "matchLabels": { "app": "web" } }, "filter": "tcp port 443",
                    "limits": { "duration": "15m" },
                }),
            ),
            mirror("other", json!({ "podSelector": { "matchLabels": { "app": "db" } } })),
        ],
        of_cluster: vec![of_cluster(json!({ "matchLabels": { "team": "red" } }))],
        node: Some(node(json!([of_node]))),
        ..facts(pod(json!({ "app": "web" }), annotations))
    };
    assert_eq!(
        words(&facts),
        "shop/web is on node a. This is what the API server knows of it.\n\
         Annotation of the pod: podmirror.io/rate is \"1kpps\".\n\
         Annotation of the namespace: podmirror.io/mirror is \"true\".\n\
         \n\
         ClusterMirror all selects it. Target: ids\n  \
           Node a has not reported on it.\n  \
           Node a reported at 2026-01-01T00:00:00Z.\n\
         \n\
         Mirror shop/mine selects it. Target: default, the mirror interface of the node\n  \
           filter: \"tcp port 443\"\n  \
           limits: {\"duration\":\"15m\"}\n  \
           Accepted: True (Accepted) all nodes accept it\n  \
           Node a does not cover it, NIC eth0: Hidden: another program\n  \
           Node a reported at 2026-01-01T00:00:00Z.\n"
    );
}

#[test]
fn a_pod_that_nobody_selects_is_told_so() {
    let mut facts = facts(pod(json!({}), json!({})));
    // A ClusterMirror counts only if the labels of the namespace are known.
    facts.of_cluster = vec![of_cluster(json!({}))];
    assert_eq!(
        words(&facts),
        "shop/web is on node a. This is what the API server knows of it.\n\
         \n\
         No Mirror and no ClusterMirror that you may read selects it.\n"
    );
    let spec = facts.pod.spec.as_mut().unwrap();
    (spec.node_name, spec.host_network) = (None, Some(true));
    let text = words(&facts);
    assert!(text.starts_with("shop/web is not assigned to a node yet, "), "{text}");
    assert!(text.contains("hostNetwork"), "{text}");
}

#[test]
fn a_node_that_names_no_reason_says_what_it_leaves_out() {
    let said = |summary: Value| {
        let mut facts = facts(pod(json!({}), json!({})));
        facts.mirrors = vec![mirror("mine", json!({ "podSelector": {} }))];
        facts.node = Some(node(json!([summary])));
        words(&facts).lines().rev().nth(1).unwrap().trim().to_owned()
    };
    assert_eq!(said(summary("mine")), "Node a reports no problem with this pod.");
    let mut full = summary("mine");
    full["moreUncovered"] = json!(7);
    let text = said(full);
    assert!(text.ends_with("7 problems are not listed."), "{text}");
    let mut refused = summary("mine");
    refused["refused"] = json!({ "reason": "InvalidFilter", "message": "no such word" });
    assert_eq!(said(refused), "Node a refuses it: InvalidFilter: no such word");
    // A report on an earlier Mirror of this name.
    let mut earlier = summary("mine");
    earlier["uid"] = json!("uid-earlier");
    assert_eq!(said(earlier), "Node a has not reported on it.");
}

#[test]
fn a_stream_selects_the_pods_that_it_names() {
    let selected = |names: &[&str]| {
        let stream = json!({ "keySha256": "0".repeat(64), "pods": names });
        let mut facts = facts(pod(json!({}), json!({})));
        facts.mirrors = vec![mirror("tail-1", json!({ "podSelector": {}, "stream": stream }))];
        words(&facts).contains("Mirror shop/tail-1 selects it. Target: a program that has its key")
    };
    assert_eq!([selected(&["web"]), selected(&["db"])], [true, false]);
}

proptest! {
    #[test]
    fn what_users_write_is_bounded_and_has_no_control_characters(
        value in prop_oneof![any::<String>(), Just("x".repeat(2 * MOST))],
    ) {
        let pod = pod(json!({}), json!({ "podmirror.io/filter": value }));
        let text = words(&facts(pod));
        // The pod, its annotation, an empty line, and the line that nothing selects it.
        prop_assert_eq!(text.lines().count(), 4, "{}", text);
        prop_assert!(text.chars().all(|char| char == '\n' || !char.is_control()), "{:?}", text);
        // An escape sequence has at most 10 characters.
        prop_assert!(text.lines().all(|line| line.chars().count() <= 10 * MOST + 4));
    }
}
