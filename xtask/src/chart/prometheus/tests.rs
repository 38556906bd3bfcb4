//! Each mistake in a monitor or an alert is found.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use serde_json::json;

use super::{
    alerts::{check_names, documented, metrics},
    *,
};

/// Both kinds of monitors, a Service, and two workloads.
fn objects() -> Value {
    let named = |labels: &Value| json!({ "name": "podmirror", "namespace": "podmirror", "labels": labels });
    let pods = json!({ "app": "podmirror" });
    let service = json!({ "app": "podmirror", "component": "metrics" });
    let endpoint = json!({
        "port": "metrics", "path": "/metrics", "honorLabels": true, "relabelings": [{ "targetLabel": "node" }],
    });
    let workload = |kind: &str| {
        let ports = json!([{ "name": "metrics", "containerPort": 9000 }]);
        let template =
            json!({ "metadata": { "labels": pods }, "spec": { "containers": [{ "ports": ports }] } });
        json!({ "kind": kind, "metadata": named(&pods), "spec": { "template": template } })
    };
    json!([
        {
            "kind": "ServiceMonitor", "metadata": named(&pods),
            "spec": { "namespaceSelector": null, "selector": { "matchLabels": service }, "endpoints": [endpoint] },
        },
        {
            "kind": "PodMonitor", "metadata": named(&pods),
            "spec": { "selector": { "matchLabels": pods }, "podMetricsEndpoints": [endpoint] },
        },
        {
            "kind": "Service", "metadata": named(&service),
            "spec": { "selector": pods, "ports": [{ "name": "metrics", "port": 9000, "targetPort": "metrics" }] },
        },
        workload("DaemonSet"),
        workload("Deployment"),
    ])
}

fn reached(objects: &Value) -> Result<Labels> {
    monitors(objects.as_array().unwrap(), "/metrics")
}

#[test]
fn a_monitor_selects_labels_in_its_namespace_and_names_a_port_that_is_there() {
    assert!(reached(&objects()).unwrap().contains("node"));
    for (place, wrong, told) in [
        ("/0/spec/namespaceSelector", json!({ "any": true }), "ServiceMonitor podmirror also selects by"),
        (
            "/0/spec/selector/matchLabels/component",
            json!("agent"),
            "ServiceMonitor podmirror selects nothing",
        ),
        ("/0/metadata/namespace", json!("monitoring"), "ServiceMonitor podmirror selects nothing"),
        ("/0/spec/endpoints/0/port", json!("http"), "Service podmirror has no port \"http\""),
        ("/0/spec/endpoints/0/path", json!("/healthz"), "scrapes \"/healthz\", and not /metrics"),
        ("/0/spec/endpoints/0/honorLabels", json!(false), "does not honor labels"),
        ("/1/spec/selector/matchLabels/app", json!("other"), "PodMonitor podmirror selects nothing"),
        ("/1/spec/selector/matchLabels", json!({}), "PodMonitor podmirror selects no labels"),
        ("/1/spec/podMetricsEndpoints/0/port", json!("http"), "DaemonSet podmirror has no port \"http\""),
        ("/1/spec/podMetricsEndpoints/0/port", json!(null), "PodMonitor podmirror names no port"),
        ("/2/spec/selector/app", json!("other"), "Service podmirror selects nothing"),
        ("/2/spec/ports/0/targetPort", json!(9001), "has no port 9001, which Service podmirror names"),
        ("/4/spec/template/metadata/labels/app", json!("other"), "no monitor reaches Deployment podmirror"),
    ] {
        let mut objects = objects();
        *objects.pointer_mut(place).unwrap() = wrong;
        let error = format!("{:#}", reached(&objects).unwrap_err());
        assert!(error.contains(told), "{place}: {error}");
    }
}

#[test]
fn an_alert_names_metrics_that_exist_and_labels_that_they_have() {
    let metrics = metrics().unwrap();
    let of_target: Labels = ["namespace", "node"].map(str::to_owned).into();
    let check = |expression: &str, text: &str| {
        let alert = json!({ "expr": expression, "annotations": { "summary": "", "description": text } });
        check_names(&alert, &metrics, &of_target)
    };
    for expression in [
        "sum by (node, reason) (podmirror_pods_not_mirrored{reason!~\"OptedOut|(x)\"}) > 0.5e2 or vector(1)",
        "rate(podmirror_packets_total{result='lost'}[5m:1m] offset 5m) * on (pod) group_left (network) podmirror_nic_info",
        "kube_daemonset_status_number_unavailable{daemonset=\"podmirror\"} > 0 unless podmirror_taps",
    ] {
        check(expression, "").unwrap();
    }
    check("max by (node) (podmirror_sessions / podmirror_sessions_max)", "on {{ $labels.node }}.").unwrap();
    for (expression, text, told) in [
        ("podmirror_taps_wanted > 0", "", "no podmirror_taps_wanted"),
        ("podmirror_sessions > podmirror_taps_wanted", "", "no podmirror_taps_wanted"),
        ("sum(up) == 0", "", "no up"),
        ("podmirror_target_up{state=\"down\"} == 0", "", "the label state"),
        ("min by (node, extent) (podmirror_target_up) == 0", "", "the label extent"),
        ("min(podmirror_target_up) by (pod) == 0", "", "the label pod"),
        ("min by (node) (podmirror_target_up) == 0", "{{ $labels.target }}", "a text has the label target"),
    ] {
        let error = format!("{:#}", check(expression, text).unwrap_err());
        assert!(error.contains(told), "{expression}: {error}");
    }
}

#[test]
fn metrics_are_those_of_the_page_that_the_sources_register() {
    let page = "| metric | meaning |\n| `podmirror_a{x,y}`, `podmirror_b{…}` | `podmirror_no` |\n| `podmirror_c` | 1 |\n";
    let labels = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Labels>();
    let expected = [("a", labels(&["x", "y"])), ("b", labels(&["x", "y"])), ("c", labels(&[]))];
    let expected = expected.map(|(name, labels)| (format!("podmirror_{name}"), labels));
    assert_eq!(documented(page), BTreeMap::from(expected));
    let metrics = metrics().unwrap();
    assert_eq!(metrics["podmirror_target_up"], labels(&["target", "destination", "type"]));
    assert_eq!(metrics["podmirror_controller_stale_nodes"], labels(&[]));
    assert_eq!(metrics_path().unwrap(), "/metrics");
}
