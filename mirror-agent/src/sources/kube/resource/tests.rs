//! Tests of the parts of a Mirror or ClusterMirror that are kept, and of those that are refused.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use std::collections::{BTreeMap, BTreeSet};

use kube::core::{Expression, Selector as KubeSelector, SelectorExt as _};
use mirror_api::SettingsSpec;
use mirror_core::settings::{SETTINGS, Settings};
use proptest::{collection::btree_map, collection::btree_set, collection::vec, prelude::*, sample};
use serde_json::json;

use super::*;
use crate::model::Operator;

fn mirror(spec: &Value) -> Resource {
    let metadata = json!({
        "name": "checkout", "namespace": "shop", "uid": "1", "generation": 3, "resourceVersion": "9",
        "creationTimestamp": "2026-11-22T00:00:01Z",
    });
    let object: ResourceObject<Mirror> =
        serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap();
    object.read().unwrap().clone()
}

fn cluster_mirror(spec: &Value) -> Resource {
    let object: ResourceObject<ClusterMirror> =
        serde_json::from_value(json!({"metadata": {"name": "ids"}, "spec": spec})).unwrap();
    object.read().unwrap().clone()
}

#[test]
fn every_field_reaches_the_request() {
    let mut all = Settings::default();
    SETTINGS.iter().for_each(|setting| all.set(setting.key, setting.example).unwrap());
    let mut spec = serde_json::to_value(SettingsSpec::of(&all).unwrap()).unwrap();
    spec["podSelector"] = json!({"matchLabels": {"app": "checkout"}});
    spec["nics"] = json!(["eth0", "net1"]);
    spec["direction"] = json!("Ingress");
    spec["targetRef"] = json!({"name": "ids"});
    let Resource { id, generation, created, is_enforced, request, .. } = mirror(&spec);
    assert_eq!((id.to_string().as_str(), generation, is_enforced), ("Mirror shop/checkout", 3, false));
    assert_eq!(created, 1_795_305_601);
    let Request { nics, directions, settings, filter, target } = request.unwrap();
    assert_eq!(nics.unwrap(), ["eth0", "net1"]);
    assert_eq!((directions, target.as_deref()), (Directions::Ingress, Some("ids")));
    assert_eq!(filter, all.filter.take().map(|filter| filter.text));
    assert_eq!(settings, all);
    let spec = json!({"namespaceSelector": {}, "podSelector": {}, "enforced": true});
    let Resource { id, is_enforced, request, .. } = cluster_mirror(&spec);
    assert_eq!(
        (id.to_string().as_str(), is_enforced, request),
        ("ClusterMirror ids", true, Ok(Request::default()))
    );
}

#[test]
fn what_is_too_large_selects_nothing_and_says_why() {
    let values: Vec<_> = (0..5000).map(|number| number.to_string()).collect();
    let selector = json!({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": values}]});
    let Resource { id, uid, generation, pods, request, .. } = mirror(&json!({"podSelector": selector}));
    assert_eq!((id.to_string().as_str(), uid.as_str(), generation), ("Mirror shop/checkout", "1", 3));
    assert_eq!((pods, request), (Selector::nothing(), Err(TOO_LARGE.to_owned())));
    let of_cluster = json!({"namespaceSelector": selector, "podSelector": {}, "enforced": true});
    let Resource { namespaces, request, .. } = cluster_mirror(&of_cluster);
    assert_eq!((namespaces, request), (Selector::nothing(), Err(TOO_LARGE.to_owned())));
}

/// The agent accepts every Mirror that the API server accepts.
#[test]
fn what_the_crd_allows_is_not_too_large() {
    let text = |bytes: usize, number: usize| format!("{number:0bytes$}");
    let values = |key: usize| json!({"key": text(317, key), "operator": "In", "values": (0..64).map(|number| text(63, number)).collect::<Vec<_>>()});
    let labels: BTreeMap<_, _> = (0..16).map(|number| (text(317, number), text(63, number))).collect();
    let selector = json!({"matchLabels": labels, "matchExpressions": (0..8).map(values).collect::<Vec<_>>()});
    let nics: Vec<_> = (0..32).map(|number| text(15, number)).collect();
    let filter = format!("tcp{}", " ".repeat(1021));
    mirror(&json!({"podSelector": selector, "nics": nics, "filter": filter})).request.unwrap();
    let both =
        json!({"podSelector": selector, "namespaceSelector": selector, "nics": nics, "filter": filter});
    cluster_mirror(&both).request.unwrap();
}

#[test]
fn what_is_not_understood_whole_is_refused_whole() {
    let refused = |spec: Value| {
        let resource = mirror(&spec);
        (resource.request.unwrap_err(), resource.pods)
    };
    for (spec, sentence) in [
        (json!({"podSelector": {}, "target": "x"}), "spec.target: this version"),
        (json!({"podSelector": {}, "targetRef": {"kind": "x"}}), "spec: missing field `name`"),
        (
            json!({"podSelector": {}, "targetRef": {"name": "x", "kind": "x"}}),
            "spec.targetRef.kind: this version",
        ),
        (json!({"podSelector": {}, "limits": {"idle": "3s"}}), "spec.limits.idle: this version"),
        (json!({"podSelector": {}, "sample": "1/2"}), "spec.sample: this version"),
        (json!({"podSelector": {}, "limits": {"bytes": "much"}}), "spec.limits.bytes \"much\": use"),
        (json!({"podSelector": {}, "direction": "Sideways"}), "spec: unknown variant `Sideways`"),
        (json!({"podSelector": {}, "nics": "eth0"}), "spec: invalid type"),
    ] {
        let (problem, pods) = refused(spec);
        assert!(problem.starts_with(sentence), "{problem}");
        assert_eq!(pods, Selector::default(), "its pods are known, and can be told");
    }
    for (spec, sentence) in [
        (json!({}), "spec.podSelector: "),
        (
            json!({"podSelector": {"matchExpressions": [{"key": "a", "operator": "Has"}]}}),
            "spec.podSelector: unknown variant `Has`, expected one of `In`, `NotIn`, `Exists`, `DoesNotExist`",
        ),
    ] {
        let (problem, pods) = refused(spec);
        assert!(problem.starts_with(sentence), "{problem}");
        assert!(!pods.matches(&BTreeMap::new()), "nothing is selected");
    }
}

#[test]
fn an_object_of_any_form_can_be_stored() {
    for object in
        [json!({"metadata": {"name": "a.b"}}), json!({"metadata": {"name": "x"}, "spec": 7}), json!({})]
    {
        let decoded: ResourceObject<ClusterMirror> = serde_json::from_value(object.clone()).unwrap();
        assert!(decoded.problem().is_some(), "{object}");
    }
}

fn any_labels() -> impl Strategy<Value = BTreeMap<String, String>> {
    btree_map("[ab]", "[xy]", 0..3)
}

proptest! {
    /// The selector selects the same pods as kube's own.
    #[test]
    fn a_selector_selects_what_another_implementation_selects(
        must in any_labels(),
        requirements in vec((
            "[ab]",
            sample::select(vec![Operator::In, Operator::NotIn, Operator::Exists, Operator::DoesNotExist]),
            btree_set("[xy]", 1..3),
        ), 0..3),
        labels in any_labels(),
    ) {
        let expressions: Vec<_> = requirements
            .iter()
            .map(|(key, operator, values)| json!({"key": key, "operator": operator, "values": values}))
            .collect();
        let ours = json!({"matchLabels": must, "matchExpressions": expressions});
        let ours = selector(LabelSelector::deserialize(ours).unwrap()).unwrap();
        let theirs = must.iter().map(|(key, value)| Expression::Equal(key.clone(), value.clone())).chain(
            requirements.into_iter().map(|(key, operator, values): (_, _, BTreeSet<String>)| match operator {
                Operator::In => Expression::In(key, values),
                Operator::NotIn => Expression::NotIn(key, values),
                Operator::Exists => Expression::Exists(key),
                Operator::DoesNotExist => Expression::DoesNotExist(key),
            }),
        );
        let theirs: KubeSelector = theirs.collect();
        prop_assert_eq!(ours.matches(&labels), theirs.matches(&labels));
    }
}
