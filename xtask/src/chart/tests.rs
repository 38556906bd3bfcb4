//! The schema of the values has the keys of `values.yaml` and no others, and the checks of the manifests find each
//! mistake.
#![expect(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::BTreeSet, fs};

use anyhow::Result;
use serde_json::{Value, json};

use super::{openshift, prometheus};
use crate::workspace;

fn read(file: &str) -> String {
    fs::read_to_string(workspace::root().join(file)).unwrap()
}

/// The keys in a part of the schema and in the values for it, by their paths, where they differ.
fn differences(path: &str, schema: &Value, values: &Value, definitions: &Value) -> Vec<String> {
    let reference = schema["$ref"].as_str().and_then(|to| to.strip_prefix("#/definitions/"));
    let schema = reference.map_or(schema, |name| &definitions[name]);
    // A part without properties takes what Kubernetes takes there.
    let Some(properties) = schema["properties"].as_object() else { return Vec::new() };
    let values_there = values.as_object().unwrap_or_else(|| panic!("{path} is {values}"));
    let keys: BTreeSet<_> = properties.keys().chain(values_there.keys()).collect();
    let of_key = |key: &&String| match (properties.get(*key), values_there.get(*key)) {
        (Some(schema), Some(values)) => differences(&format!("{path}.{key}"), schema, values, definitions),
        (Some(_), None) => vec![format!("{path}.{key} is not in values.yaml")],
        _ => vec![format!("{path}.{key} is not in values.schema.json")],
    };
    keys.iter().flat_map(of_key).collect()
}

#[test]
fn the_schema_and_the_values_have_the_same_keys() {
    let values: Value = serde_saphyr::from_str(&read("deploy/chart/values.yaml")).unwrap();
    let schema: Value = serde_json::from_str(&read("deploy/chart/values.schema.json")).unwrap();
    // Helm has `global` for all charts. A probe can have another field.
    let allowed = ["values.global", "initialDelaySeconds"];
    let mut found = differences("values", &schema, &values, &schema["definitions"]);
    found.retain(|line| !allowed.iter().any(|key| line.contains(key)));
    assert_eq!(found, [""; 0]);
}

/// Runs a check on the objects of a fixture, as they are and with each of the mistakes.
fn finds_each_mistake(fixture: &str, check: impl Fn(&[Value]) -> Result<()>) {
    let fixture: Value = serde_saphyr::from_str(fixture).unwrap();
    check(fixture["objects"].as_array().unwrap()).unwrap();
    for mistake in fixture["mistakes"].as_array().unwrap() {
        let mut objects = fixture["objects"].clone();
        *objects.pointer_mut(mistake["at"].as_str().unwrap()).unwrap() = mistake["is"].clone();
        let error = format!("{:#}", check(objects.as_array().unwrap()).unwrap_err());
        assert!(error.contains(mistake["error"].as_str().unwrap()), "{mistake}: {error}");
    }
}

#[test]
fn constraints_allow_what_the_pods_of_the_agents_need_and_nothing_else() {
    finds_each_mistake(include_str!("../../chart/openshift.yaml"), openshift::fits);
}

#[test]
fn a_monitor_selects_labels_in_its_namespace_and_names_a_port_that_is_there() {
    finds_each_mistake(include_str!("../../chart/prometheus.yaml"), |objects| {
        let labels = prometheus::monitors(objects)?;
        assert!(labels.contains("node"));
        Ok(())
    });
    let path = format!("{:?} => Self::metrics", prometheus::METRICS_PATH);
    assert!(read("mirror-agent/src/report/admin.rs").contains(&path), "the agent has no {path}");
}

#[test]
fn an_alert_names_metrics_that_exist_and_labels_that_they_have() {
    let metrics = prometheus::documented(&read(prometheus::PAGE));
    let of_target: BTreeSet<String> = ["namespace", "node"].map(str::to_owned).into();
    let check = |expression: &str, text: &str| {
        let alert = json!({ "expr": expression, "annotations": { "summary": "", "description": text } });
        prometheus::check_names(&alert, &metrics, &of_target)
    };
    for expression in [
        "sum by (node, reason) (podmirror_pods_not_mirrored{reason!~\"OptedOut|(x)\"}) > 0.5e2",
        "kube_daemonset_status_number_unavailable{daemonset=\"podmirror\"} > 0 unless podmirror_taps",
        "sum by (node) (rate(podmirror_bytes_total{pod=\"$pod\"}[5m])) and on (node) podmirror_taps",
    ] {
        check(expression, "").unwrap();
    }
    check("max by (node) (podmirror_sessions / podmirror_sessions_max)", "on {{ $labels.node }}.").unwrap();
    for (expression, text, error) in [
        ("podmirror_sessions > podmirror_taps_wanted", "", "podmirror_taps_wanted is no metric"),
        ("sum(up) == 0", "", "up is no metric"),
        ("node > 0", "", "node is no metric"),
        ("podmirror_taps > 9 or max by (node) (namespace) > 0", "", "namespace is no metric"),
        ("podmirror_target_up{state=\"down\"} == 0", "", "state is no label"),
        ("podmirror_target_up{podmirror_taps=\"1\"} == 0", "", "podmirror_taps is no label"),
        ("min by (node, extent) (podmirror_target_up) == 0", "", "extent is no label"),
        ("podmirror_taps and on (instance) podmirror_taps_max", "", "instance is no label"),
        ("min by (node) (podmirror_target_up) == 0", "{{ $labels.target }}", "a text has the label target"),
    ] {
        let found = format!("{:#}", check(expression, text).unwrap_err());
        assert!(found.contains(error), "{expression}: {found}");
    }
}

#[test]
fn every_alert_is_tested_when_it_fires_and_when_it_does_not() {
    let rules: Value = serde_saphyr::from_str(&read("deploy/chart/files/alerts.yaml")).unwrap();
    let tests: Value = serde_saphyr::from_str(include_str!("../../chart/alerts.yaml")).unwrap();
    let tests =
        prometheus::items(&tests["tests"]).flat_map(|test| prometheus::items(&test["alert_rule_test"]));
    let tests: BTreeSet<_> =
        tests.map(|test| (test["alertname"].to_string(), test["exp_alerts"][0].is_object())).collect();
    let alerts = prometheus::items(&rules["groups"][0]["rules"]).map(|rule| rule["alert"].to_string());
    let both: BTreeSet<_> = alerts.flat_map(|alert| [(alert.clone(), false), (alert, true)]).collect();
    assert_eq!(tests, both);
}

#[test]
fn metrics_are_those_in_the_first_cells_of_the_page() {
    let page = "| metric | meaning |\n| `podmirror_a{x,y}`, `podmirror_b{…}` | `podmirror_no` |\n| `podmirror_c` | 1 |\n";
    let mut metrics = prometheus::documented(page);
    metrics.retain(|name, _| name.starts_with("podmirror_"));
    let expected = json!({ "podmirror_a": ["x", "y"], "podmirror_b": ["x", "y"], "podmirror_c": [] });
    assert_eq!(json!(metrics), expected);
}
