//! The schema of the values has the keys of `values.yaml` and no others, and the checks of the manifests find each
//! mistake.
#![expect(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::BTreeSet, fs};

use anyhow::Result;
use serde_json::Value;

use super::{monitors, openshift};
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
    finds_each_mistake(include_str!("../../chart/monitors.yaml"), monitors::check);
    let path = format!("{:?} => Self::metrics", monitors::METRICS_PATH);
    assert!(read("mirror-agent/src/report/admin.rs").contains(&path), "the agent has no {path}");
}

#[test]
fn every_alert_is_tested_when_it_fires_and_when_it_does_not() {
    let rules: Value = serde_saphyr::from_str(&read("deploy/chart/files/alerts.yaml")).unwrap();
    let tests: Value = serde_saphyr::from_str(include_str!("../../chart/alerts.yaml")).unwrap();
    let tests = monitors::items(&tests["tests"]).flat_map(|test| monitors::items(&test["alert_rule_test"]));
    let tests: BTreeSet<_> =
        tests.map(|test| (test["alertname"].to_string(), test["exp_alerts"][0].is_object())).collect();
    let alerts = monitors::items(&rules["groups"][0]["rules"]).map(|rule| rule["alert"].to_string());
    let both: BTreeSet<_> = alerts.flat_map(|alert| [(alert.clone(), false), (alert, true)]).collect();
    assert_eq!(tests, both);
}
