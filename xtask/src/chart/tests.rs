//! The schema of the values has the keys of `values.yaml`, and no others.
#![expect(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::BTreeSet, fs};

use serde_json::Value;

use crate::workspace;

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
    let read = |file: &str| fs::read_to_string(workspace::root().join("deploy/chart").join(file)).unwrap();
    let values: Value = serde_saphyr::from_str(&read("values.yaml")).unwrap();
    let schema: Value = serde_json::from_str(&read("values.schema.json")).unwrap();
    // Helm has `global` for all charts. A probe can have another field.
    let allowed = ["values.global", "initialDelaySeconds"];
    let mut found = differences("values", &schema, &values, &schema["definitions"]);
    found.retain(|line| !allowed.iter().any(|key| line.contains(key)));
    assert_eq!(found, [""; 0]);
}
