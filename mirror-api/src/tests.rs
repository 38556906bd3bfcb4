//! Tests of the schemas: the checks of the API server.

#![expect(clippy::unwrap_used, clippy::panic, reason = "tests panic")]

use serde_json::{Value, json};

use super::*;

/// The schema of a CRD, and the CRD.
fn schema(crd: &CustomResourceDefinition) -> Value {
    let [version] = &crd.spec.versions[..] else { panic!("{crd:?}") };
    serde_json::to_value(version.schema.as_ref().unwrap().open_api_v3_schema.as_ref().unwrap()).unwrap()
}

#[test]
fn every_field_is_explained_in_words_of_its_own() {
    fn check(path: &str, schema: &Value) {
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            let path = format!("{path}.{name}");
            // What Kubernetes itself explains.
            if path.ends_with("metadata") {
                continue;
            }
            assert!(field["description"].as_str().is_some_and(|text| text.ends_with('.')), "{path}: {field}");
            check(&path, field);
            check(&path, &field["items"]);
        }
    }
    for crd in crds() {
        let schema = schema(&crd);
        let spec = schema["properties"]["spec"].clone();
        check(&format!("{}.spec", crd.spec.names.kind), &spec);
        let status = schema["properties"]["status"].clone();
        check(&format!("{}.status", crd.spec.names.kind), &status);
    }
}

#[test]
fn a_cluster_mirror_has_all_fields_of_a_mirror() {
    let spec = |crd| schema(&crd)["properties"]["spec"].clone();
    let (mirror, cluster) = (spec(Mirror::crd()), spec(ClusterMirror::crd()));
    for (name, field) in mirror["properties"].as_object().unwrap() {
        assert_eq!(cluster["properties"][name], *field, "{name}");
    }
    assert_eq!(mirror["required"], json!(["podSelector"]));
    assert_eq!(cluster["required"], json!(["namespaceSelector", "podSelector"]));
    // As each reference of Kubernetes: appliers own it as a whole.
    assert_eq!(mirror["properties"]["targetRef"]["x-kubernetes-map-type"], "atomic");
}

/// The API server checks numbers with units, so that people learn of a mistake at once.
#[test]
fn texts_with_a_form_have_a_pattern() {
    let spec = schema(&crds()[0])["properties"]["spec"]["properties"].clone();
    let [limits, rate] = ["limits", "rateLimit"].map(|name| &spec[name]["properties"]);
    let quantities =
        [&limits["packets"], &limits["bytes"], &rate["packetsPerSecond"], &rate["bitsPerSecond"]];
    for field in [&spec["targetRef"]["properties"]["name"], &limits["duration"], &rate["burst"]] {
        assert!(field["pattern"].is_string(), "{field}");
    }
    for field in quantities {
        assert!(field["pattern"].is_string() && field["x-kubernetes-int-or-string"] == true, "{field}");
        assert_eq!(field["minimum"], 1.0, "{field}");
    }
    for (of, rule) in [(&spec["limits"], "duration('8760h')"), (&spec["rateLimit"], "duration('10s')")] {
        assert!(of["x-kubernetes-validations"].to_string().contains(rule), "{of}");
    }
}

/// Each entry of the tables belongs to a field: the schema has its pattern or its words there.
#[test]
fn names_addresses_and_words_have_their_form() {
    fn texts(path: &str, schema: &Value, found: &mut Vec<(String, Value)>) {
        let inner = [&schema["items"], &schema["additionalProperties"]];
        inner.into_iter().filter(|of| of.is_object()).for_each(|of| texts(path, of, found));
        if schema["type"] == "string" {
            found.push((path.to_owned(), schema.clone()));
        }
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            texts(&format!("{path}.{name}"), field, found);
        }
    }
    let mut found = Vec::new();
    for crd in crds() {
        let schema = schema(&crd);
        texts("spec", &schema["properties"]["spec"], &mut found);
        texts("status", &schema["properties"]["status"], &mut found);
    }
    let at = |end: &str| {
        let end = format!(".{end}");
        let fields: Vec<_> = found.iter().filter(|(path, _)| path.ends_with(&end)).collect();
        assert!(!fields.is_empty(), "no field {end}");
        fields
    };
    for (end, least, most, pattern) in TEXTS {
        for (path, field) in at(end) {
            let lengths = [field["minLength"].as_i64().unwrap_or(0), field["maxLength"].as_i64().unwrap()];
            let told = field["pattern"].as_str().unwrap_or_default();
            assert_eq!((lengths, told), ([least, most], pattern), "{path}");
        }
    }
    for (end, words) in WORDS {
        for (path, field) in at(end) {
            assert_eq!(field["enum"], json!(words), "{path}");
        }
    }
}

#[test]
fn names_have_room_in_the_maps() {
    let most = format!("{MAX_NAME} ");
    for crd in [Mirror::crd(), ClusterMirror::crd()] {
        let rules = schema(&crd)["x-kubernetes-validations"].clone();
        assert!(rules[0]["rule"].as_str().unwrap().contains(&most), "{rules}");
    }
}

/// The type says how server-side apply merges a list.
#[test]
fn every_list_of_a_spec_and_a_status_has_a_type() {
    fn check(path: &str, schema: &Value) -> u32 {
        let (mut lists, items) = (0, &schema["items"]);
        if schema["type"] == "array" {
            let keys = schema["x-kubernetes-list-map-keys"].as_array();
            match schema["x-kubernetes-list-type"].as_str() {
                Some("atomic") => assert_eq!(keys, None, "{path}: {schema}"),
                Some("set") => assert!(keys.is_none() && items["type"] == "string", "{path}: {schema}"),
                Some("map") => {
                    let keys = keys.unwrap();
                    let is_required = |key| items["required"].as_array().unwrap().contains(key);
                    assert!(!keys.is_empty() && keys.iter().all(is_required), "{path}: {schema}");
                }
                other => panic!("{path}: {other:?}"),
            }
            lists += 1;
        }
        for (name, of) in [("[]", items), (".*", &schema["additionalProperties"])] {
            lists += if of.is_object() { check(&format!("{path}{name}"), of) } else { 0 };
        }
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            lists += check(&format!("{path}.{name}"), field);
        }
        lists
    }
    for crd in crds() {
        let (kind, schema) = (&crd.spec.names.kind, schema(&crd));
        let [spec, status] =
            ["spec", "status"].map(|part| check(&format!("{kind}.{part}"), &schema["properties"][part]));
        assert!(status >= 2 && (spec >= 2 || kind == "MirrorNode"), "{kind}: {spec} {status}");
    }
}

/// The agents of all nodes keep what the authors of resources write.
#[test]
fn every_text_list_and_map_of_a_spec_has_a_bound() {
    fn check(path: &str, schema: &Value) -> u32 {
        let has = |bound: &str| assert!(schema[bound].is_u64(), "{path} has no {bound}: {schema}");
        let is_text = schema["type"] == "string" && schema["enum"].is_null();
        if is_text || schema["x-kubernetes-int-or-string"] == true {
            has("maxLength");
        }
        if schema["type"] == "array" {
            has("maxItems");
        }
        assert!(schema["nullable"].is_null(), "{path}: an absent field is left out");
        let mut checked = 1;
        if schema["additionalProperties"].is_object() {
            has("maxProperties");
            checked += check(&format!("{path}.*"), &schema["additionalProperties"]);
        }
        if schema["items"].is_object() {
            checked += check(&format!("{path}[]"), &schema["items"]);
        }
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            checked += check(&format!("{path}.{name}"), field);
        }
        checked
    }
    for crd in ["Mirror", "ClusterMirror", "MirrorTarget"] {
        let crd = crds().into_iter().find(|of| of.spec.names.kind == crd).unwrap();
        assert!(check(&crd.spec.names.kind, &schema(&crd)["properties"]["spec"]) > 20);
    }
    let selector =
        schema(&crds()[0])["properties"]["spec"]["properties"]["podSelector"]["properties"].clone();
    let (labels, requirements) = (&selector["matchLabels"], &selector["matchExpressions"]);
    assert_eq!(
        (&labels["maxProperties"], &labels["additionalProperties"]["maxLength"]),
        (&json!(16), &json!(63))
    );
    let values = &requirements["items"]["properties"]["values"];
    assert_eq!((&requirements["maxItems"], &values["maxItems"]), (&json!(8), &json!(64)));
    assert_eq!(values["items"]["maxLength"], 63);
}
