//! Tests of the kept part of the API's objects, and of the state of the source.

#![expect(clippy::unwrap_used, reason = "tests panic")]

pub(crate) mod fake;

use std::time::Duration;

use kube::{Resource as _, runtime::watcher::Event};
use mirror_core::networks::{Entry, Networks};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{kept::Keep as _, *};
use crate::model::PodId;

fn decode(object: Value) -> PodObject {
    serde_json::from_value(object).unwrap()
}

#[test]
fn of_a_pod_what_the_agent_needs_is_kept() {
    let object = decode(json!({
        "metadata": {
            "name": "web-0", "namespace": "shop", "uid": "8a2e", "resourceVersion": "77", "labels": {"app": "web"},
            "annotations": {
                "podmirror.io/mirror": "ingress", "podmirror.io/filter": "tcp", "ovn.kubernetes.io/mirror": "true",
                "podmirror.io/netns": "/run/netns/other", "kubectl.kubernetes.io/last-applied-configuration": "{}",
                "fast.shop.ovn.kubernetes.io/mirror": "true", "fast.shop.ovn.kubernetes.io/allocated": "true",
                "k8s.v1.cni.cncf.io/network-status": "[{\"name\":\"shop/fast\",\"interface\":\"net1\"}]",
            },
            "managedFields": [{"manager": "kubectl"}],
        },
        "spec": {"hostNetwork": true, "containers": [{"name": "c"}]},
        "status": {"phase": "Running"},
    }));
    let kept = [
        ("fast.shop.ovn.kubernetes.io/mirror", "true"),
        ("ovn.kubernetes.io/mirror", "true"),
        ("podmirror.io/filter", "tcp"),
        ("podmirror.io/mirror", "ingress"),
    ];
    let expected = Pod {
        id: PodId { uid: "8a2e".into(), namespace: "shop".into(), name: "web-0".into() },
        labels: [("app".to_owned(), "web".to_owned())].into(),
        annotations: kept.map(|(key, value)| (key.into(), value.into())).into(),
        networks: Networks::of([Entry { network: Some("shop/fast"), nic: Some("net1") }]),
        host_network: true,
        ..Pod::default()
    };
    assert_eq!((object.pod(), object.problem()), (Some(&expected), None));
    assert_eq!(object.meta().resource_version.as_deref(), Some("77"));
    assert_eq!(object.meta().managed_fields, None);
}

#[test]
fn a_static_pod_names_the_hash_of_its_cgroups() {
    const HASH: &str = "f1d2d2f924e986ac86fdf7b36c94bcdf";
    const OTHER: &str = "6f1b0a5e-7f1c-4f0e-8f8e-1c8f1d0c9a77";
    for (hash, mirror, expected) in [
        (Some(HASH), Some(HASH), Some(HASH)),
        (Some(HASH), None, None),
        (None, Some(HASH), None),
        // The author of a pod tries to have another pod mirrored.
        (Some(OTHER), Some(OTHER), None),
    ] {
        let annotations = json!({"kubernetes.io/config.hash": hash, "kubernetes.io/config.mirror": mirror});
        let mut metadata = json!({"name": "a", "namespace": "b", "uid": "8a2e"});
        metadata["annotations"] = annotations
            .as_object()
            .unwrap()
            .iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        let object = decode(json!({"metadata": metadata}));
        let named = object.hash().map(String::as_str);
        assert_eq!((named, object.pod().unwrap().id.uid.as_str()), (expected, "8a2e"), "{hash:?} {mirror:?}");
    }
}

#[test]
fn of_annotations_no_more_is_kept_than_can_be_right() {
    let long = "é".repeat(100_000);
    let annotations = json!({"podmirror.io/rate": long, "podmirror.io/netns": long, "other": long});
    let object =
        decode(json!({"metadata": {"name": "a", "namespace": "b", "uid": "1", "annotations": annotations}}));
    let annotations = &object.pod().unwrap().annotations;
    assert_eq!(
        annotations.iter().map(|(key, value)| (key.as_str(), value.len())).collect::<Vec<_>>(),
        [("podmirror.io/rate", 2048)]
    );
}

/// The annotations of several mirrors.
fn several() -> Value {
    json!({
        "podmirror.io/mirror": "true", "podmirror.io/filter": "tcp", "podmirror.io/mirror.ids": "egress",
        "podmirror.io/filter.ids": "udp", "podmirror.io/target.ids": "ids0", "podmirror.io/later": "x",
        "ovn.kubernetes.io/mirror": "true", "fast.shop.ovn.kubernetes.io/mirror": "true",
    })
}

#[test]
fn every_annotation_of_ours_is_kept_whatever_mirror_it_is_of() {
    let object = |annotations: &Value| {
        let mut annotations = annotations.clone();
        annotations["podmirror.io/netns"] = "/run/netns/other".into();
        annotations["example.com/podmirror.io"] = "x".into();
        json!({"metadata": {"name": "a", "namespace": "b", "uid": "1", "annotations": annotations}})
    };
    let pod = decode(object(&several()));
    assert_eq!(serde_json::to_value(&pod.pod().unwrap().annotations).unwrap(), several());
    let mut namespace: PartialObjectMeta<Namespace> = serde_json::from_value(object(&several())).unwrap();
    namespace.trim();
    assert_eq!(serde_json::to_value(&namespace.metadata.annotations).unwrap(), several());
    // Only a change of one of these annotations matters.
    let (_, mut kept) = Kept::new();
    assert!(kept.take_in(Event::Apply(pod)));
    for key in several().as_object().unwrap().keys() {
        let mut changed = several();
        changed[key] = "other".into();
        assert!(kept.take_in(Event::Apply(decode(object(&changed)))), "{key}");
    }
}

#[test]
fn annotations_that_are_longer_than_can_be_right_are_not_read() {
    let object = |number: usize, bytes: usize| {
        let annotations: BTreeMap<_, _> =
            (0..number).map(|key| (format!("podmirror.io/filter.m{key}"), "x".repeat(bytes))).collect();
        json!({"metadata": {"name": "a", "namespace": "b", "uid": "1", "annotations": annotations}})
    };
    for (number, bytes, is_kept) in
        [(8, 1024, true), (29, 1024, true), (40, 1024, false), (128, 1, true), (129, 1, false)]
    {
        let pod = decode(object(number, bytes));
        let mut namespace: PartialObjectMeta<Namespace> =
            serde_json::from_value(object(number, bytes)).unwrap();
        namespace.trim();
        // The pod itself is known: an enforced mirror ignores its annotations.
        let own = pod.pod().unwrap();
        let why = "its annotations have more than 32 KiB or 128 keys of podmirror.io/";
        assert_eq!(own.unread.as_deref(), (!is_kept).then_some(why), "{number}");
        assert_eq!(own.annotations.len(), if is_kept { number } else { 0 }, "{number}");
        let namespace = (namespace.metadata.annotations.is_some(), namespace.problem().is_none());
        assert_eq!(namespace, (is_kept, is_kept), "{number}");
    }
}

#[test]
fn a_pod_that_has_ended_is_none() {
    for (phase, is_there) in
        [("Pending", true), ("Running", true), ("Unknown", true), ("Succeeded", false), ("Failed", false)]
    {
        let metadata = json!({"name": "a", "namespace": "b", "uid": "8a2e"});
        let object = decode(json!({"metadata": metadata, "status": {"phase": phase}}));
        assert_eq!((object.pod().is_some(), object.problem()), (is_there, None), "{phase}");
    }
}

#[test]
fn an_object_that_cannot_be_read_is_told_and_stored_under_its_name() {
    let metadata = json!({"name": "a", "namespace": "b", "uid": "8a2e", "annotations": ["no", "map"]});
    let object = decode(json!({"metadata": metadata}));
    assert_eq!((object.pod(), object.meta().name.as_deref()), (None, Some("a")));
    let problem = object.problem().unwrap();
    assert!(problem.starts_with("pod b/a: invalid type: sequence"), "{problem}");
}

/// With `serde_json`'s features `raw_value` or `arbitrary_precision`, such a map would be an error or another value: one
/// pod could stop the list of its node, and a selector could differ from the one that admission policies saw.
#[test]
fn keys_that_serde_json_reserves_are_like_others() {
    for key in ["$serde_json::private::RawValue", "$serde_json::private::Number"] {
        let map = json!({ key: "{}" });
        let text = map.to_string();
        let decoded: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&decoded[key], decoded.to_string()), (&json!("{}"), text));
    }
}

#[test]
fn the_source_is_as_near_as_its_farther_watch() {
    use SourceState::{Away, Current, Starting};
    let early = Away { since: Instant::now() };
    let late = Away { since: Instant::now() + Duration::from_secs(1) };
    for (a, b, joined) in [
        (Starting, Current, Starting),
        (Starting, late, Starting),
        (Current, Current, Current),
        (Current, late, late),
        (early, late, early),
    ] {
        assert_eq!((join([a, b]), join([b, a])), (joined, joined));
    }
}

/// A pod as in an event of a watch.
fn web(change: impl FnOnce(&mut Value)) -> PodObject {
    let mut object = json!({
        "metadata": {
            "name": "web", "namespace": "shop", "uid": "1", "resourceVersion": "1",
            "annotations": {"podmirror.io/mirror": "true"},
        },
        "status": {"phase": "Running"},
    });
    change(&mut object);
    decode(object)
}

#[test]
fn of_a_pod_only_what_is_kept_wakes_the_loop() {
    let (store, mut kept) = Kept::new();
    assert!(!kept.take_in(Event::Init));
    assert!(!kept.take_in(Event::InitApply(web(|_| {}))));
    assert!(kept.take_in(Event::InitDone), "a whole list");
    for (field, value, wakes) in [
        ("/metadata/resourceVersion", json!("2"), false),
        ("/metadata/labels", json!({"color": "green"}), true),
        ("/metadata/managedFields", json!([{"manager": "kubelet"}]), false),
        ("/metadata/annotations/color", json!("green"), false),
        ("/status/podIP", json!("10.0.0.1"), false),
        ("/metadata/annotations/podmirror.io~1mirror", json!("false"), true),
        ("/metadata/annotations/podmirror.io~1rate", json!("10kpps"), true),
        ("/metadata/annotations/fast.shop.ovn.kubernetes.io~1mirror", json!("true"), true),
        ("/metadata/annotations/fast.shop.ovn.kubernetes.io~1allocated", json!("true"), false),
        ("/metadata/annotations", json!(["no", "map"]), true),
        ("/metadata/uid", json!("2"), true),
        ("/spec", json!({"hostNetwork": true}), true),
        ("/status/phase", json!("Succeeded"), true),
    ] {
        let changed = || {
            web(|object| {
                let (parent, key) = field.rsplit_once('/').unwrap();
                object.pointer_mut(parent).unwrap()[key.replace("~1", "/")] = value.clone();
            })
        };
        assert_eq!(kept.take_in(Event::Apply(changed())), wakes, "{field}");
        assert!(!kept.take_in(Event::Apply(changed())), "{field}, once more");
        assert_eq!(kept.take_in(Event::Apply(web(|_| {}))), wakes, "{field}, back");
    }
    assert_eq!(store.state().len(), 1);
    assert!(kept.take_in(Event::Delete(web(|_| {}))), "a deletion");
    assert!(kept.take_in(Event::Apply(web(|_| {}))), "a new pod");
    // A list without changes.
    assert!(!kept.take_in(Event::Init) && !kept.take_in(Event::InitApply(web(|_| {}))));
    assert!(kept.take_in(Event::InitDone));
}

/// After a disconnection, the next list shows that a pod was deleted.
#[test]
fn a_deleted_pod_is_kept_as_it_was_last_until_the_next_round() {
    let (_, mut kept) = Kept::new();
    let deleted: Deleted<PodObject> = kept.keep_deleted();
    let named = |name: &str, word: &str| {
        web(|object| {
            object["metadata"]["name"] = name.into();
            object["metadata"]["annotations"]["podmirror.io/mirror"] = word.into();
        })
    };
    let taken = || {
        let objects = deleted.take();
        let mut taken: Vec<_> = objects.iter().map(|object| object.pod().unwrap().clone()).collect();
        taken.sort_by(|a, b| a.id.cmp(&b.id));
        taken
            .into_iter()
            .map(|pod| (pod.id.name, pod.annotations["podmirror.io/mirror"].clone()))
            .collect::<Vec<_>>()
    };
    let is = |name: &str, word: &str| (name.to_owned(), word.to_owned());
    let none: Vec<(String, String)> = Vec::new();
    for event in [Event::Init, Event::InitApply(named("a", "true")), Event::InitApply(named("b", "true"))] {
        kept.take_in(event);
    }
    kept.take_in(Event::InitDone);
    assert_eq!(taken(), none);
    kept.take_in(Event::Delete(named("a", "false")));
    assert_eq!(taken(), [is("a", "false")], "with its last words");
    assert_eq!(taken(), none);
    kept.take_in(Event::Apply(named("c", "true")));
    for event in [Event::Init, Event::InitApply(named("c", "true")), Event::InitDone] {
        kept.take_in(event);
    }
    assert_eq!(taken(), [is("b", "true")]);
    // If they are not taken out, their number is limited.
    for number in 0..2000 {
        kept.take_in(Event::Delete(named(&format!("pod-{number}"), "true")));
    }
    assert_eq!(taken().len(), 1024);
}

#[test]
fn an_emptied_mirror_may_fit_only_while_others_have_given_back_room() {
    let mirror = |number: usize| -> ResourceObject<Mirror> {
        let metadata = json!({"name": format!("m{number}"), "namespace": "shop"});
        serde_json::from_value(json!({"metadata": metadata, "spec": {"podSelector": {}}})).unwrap()
    };
    let (store, mut kept) = Kept::<ResourceObject<Mirror>>::new();
    let refused = || {
        let mirrors = store.state();
        mirrors.iter().filter(|mirror| mirror.read().is_some_and(|read| read.request.is_err())).count()
    };
    kept.take_in(Event::Init);
    for number in 0..260 {
        kept.take_in(Event::InitApply(mirror(number)));
    }
    kept.take_in(Event::InitDone);
    assert_eq!((kept.may_fit(), refused()), (false, 4));
    for (event, may_fit, number) in [
        // As after a change of its status.
        (Event::Apply(mirror(0)), false, 4),
        (Event::Delete(mirror(259)), false, 3),
        (Event::Delete(mirror(0)), true, 3),
        (Event::Apply(mirror(300)), false, 3),
    ] {
        let told = format!("{event:?}");
        kept.take_in(event);
        assert_eq!((kept.may_fit(), refused()), (may_fit, number), "{told}");
    }
}

/// Multus writes the annotation after the pod was created, and may write it again.
#[test]
fn networks_that_come_later_wake_the_loop_and_their_addresses_do_not() {
    let (store, mut kept) = Kept::new();
    let mut takes_in = |status: &str| {
        let pod = web(|object| {
            object["metadata"]["annotations"]["k8s.v1.cni.cncf.io/network-status"] = status.into()
        });
        kept.take_in(Event::Apply(pod))
    };
    let fast = r#"[{"name": "shop/fast", "interface": "net1", "ips": ["10.0.0.1"]}]"#;
    assert!(takes_in(""), "a new pod");
    assert!(takes_in(fast));
    assert!(!takes_in(fast));
    assert!(!takes_in(&fast.replace("10.0.0.1", "10.0.0.2")));
    assert!(takes_in(&fast.replace("fast", "slow")), "another network");
    assert!(takes_in(&fast.replace("net1", "net2")), "another NIC");
    assert!(takes_in("[]"));
    assert!(takes_in("no list"));
    let pod = store.state()[0].pod().cloned().unwrap();
    assert_eq!(pod.networks.problem(), Some("it is not a JSON list (line 1, column 2)"));
    assert!(pod.annotations.keys().all(|key| key.starts_with("podmirror.io/")), "{:?}", pod.annotations);
}

#[test]
fn of_a_namespace_only_what_is_kept_wakes_the_loop() {
    let namespace = |metadata: Value| -> PartialObjectMeta<Namespace> {
        let mut all = json!({"name": "shop", "resourceVersion": "1", "uid": "1"});
        all.as_object_mut().unwrap().extend(metadata.as_object().unwrap().clone());
        serde_json::from_value(json!({"metadata": all})).unwrap()
    };
    let (_, mut kept) = Kept::new();
    for (metadata, wakes) in [
        (json!({}), true),
        (json!({"resourceVersion": "2", "generateName": "x"}), false),
        (json!({"labels": {"color": "green"}}), true),
        (json!({}), true),
        (json!({"annotations": {"color": "green"}}), false),
        (json!({"annotations": {"podmirror.io/mirror": "true"}}), true),
        (json!({"annotations": {"podmirror.io/mirror": "true", "color": "red"}}), false),
        (json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}), true),
    ] {
        assert_eq!(kept.take_in(Event::Apply(namespace(metadata.clone()))), wakes, "{metadata}");
    }
}

#[test]
fn an_object_without_a_name_is_left_out_alone() {
    let (store, mut kept) = Kept::new();
    let nameless = || web(|object| object["metadata"]["name"] = json!(null));
    for event in [
        Event::Init,
        Event::InitApply(nameless()),
        Event::InitApply(web(|_| {})),
        Event::InitDone,
        Event::Apply(nameless()),
        Event::Delete(nameless()),
    ] {
        let is_done = matches!(event, Event::InitDone);
        assert_eq!(kept.take_in(event), is_done);
    }
    assert_eq!(store.state().len(), 1);
    let (store, mut kept) = Kept::<PartialObjectMeta<Namespace>>::new();
    assert!(!kept.take_in(Event::Apply(PartialObjectMeta::default())));
    assert_eq!(store.state().len(), 0);
}

#[test]
fn agents_watch_for_times_that_are_spread_and_stay() {
    let timeout = |node: usize| watch_seconds(&format!("node-{node}"));
    let timeouts: Vec<_> = (0..1000).map(timeout).collect();
    assert_eq!((0..1000).map(timeout).collect::<Vec<_>>(), timeouts);
    for second in WATCH_TIMEOUT {
        let agents = timeouts.iter().filter(|timeout| **timeout == second).count();
        assert!(agents < 30, "{agents} of {second} s");
    }
    let early = timeouts.iter().filter(|timeout| **timeout < 480).count();
    assert!((400..600).contains(&early), "{early} of 1000");
}

proptest! {
    /// Any object can be stored, and is either a pod, or ended, or reported.
    #[test]
    fn nothing_keeps_the_others_from_being_read(
        field in proptest::sample::select(vec!["metadata", "spec", "status", "kind", "items"]),
        value in proptest::sample::select(vec![json!(null), json!(1), json!([]), json!({}), json!("text"), json!([{}])]),
    ) {
        let mut object = json!({"metadata": {"name": "a", "namespace": "b", "uid": "8a2e"}});
        object[field] = value;
        let object = decode(object);
        let is_known = object.pod().is_some();
        prop_assert!(!is_known || object.problem().is_none());
        let has_name = object.meta().name.is_some();
        let (store, mut kept) = Kept::new();
        for event in [
            Event::Init,
            Event::InitApply(web(|_| {})),
            Event::InitApply(object.clone()),
            Event::InitDone,
            Event::Apply(object),
        ] {
            kept.take_in(event);
        }
        prop_assert_eq!(store.state().len(), 1 + usize::from(has_name));
        let pods = store.state().iter().filter(|object| object.pod().is_some()).count();
        prop_assert_eq!(pods, 1 + usize::from(is_known));
    }
}
