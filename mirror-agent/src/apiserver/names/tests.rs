#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::net::Ipv4Addr;

use serde_json::{Value, from_value, json, to_value};

use super::*;

fn objects(name: Option<&str>, labels: &[(&str, &str)]) -> Objects {
    let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let labels = LabelSelector { match_labels: Some(labels), ..LabelSelector::default() };
    let (namespace, name) = (Some("shop".to_owned()), name.map(str::to_owned));
    Objects::new(&ReadOf::Pods { namespace, name, labels, nics: None }).unwrap()
}

/// An event of a pod of the namespace `shop`, labelled with its name.
fn pod(name: &str, node: Option<&str>, address: &str) -> Seen {
    pod_with(name, node, address, &json!({}))
}

/// The same, with other fields.
fn pod_with(name: &str, node: Option<&str>, address: &str, fields: &Value) -> Seen {
    let mut object = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": name, "namespace": "shop", "uid": format!("uid-{name}"), "labels": { "app": name } },
        "spec": { "nodeName": node, "containers": [] }, "status": { "podIPs": [{ "ip": address }] },
    });
    for (path, value) in fields.as_object().unwrap() {
        *object.pointer_mut(path).unwrap() = value.clone();
    }
    (true, Event::Apply(from_value(object).unwrap()))
}

fn service(name: &str, addresses: &Value) -> Seen {
    let metadata = json!({ "name": name, "namespace": "shop" });
    // As in a list, without a kind.
    let object = json!({ "metadata": metadata, "spec": { "clusterIPs": addresses }, "status": {} });
    (false, Event::InitApply(from_value(object).unwrap()))
}

fn deleted((are_pods, event): Seen) -> Seen {
    let Event::Apply(object) = event else { unreachable!() };
    (are_pods, Event::Delete(object))
}

fn listed((are_pods, event): Seen) -> Seen {
    let Event::Apply(object) = event else { unreachable!() };
    (are_pods, Event::InitApply(object))
}

#[test]
fn only_the_needed_metadata_is_kept() {
    let metadata = json!({
        "name": "web", "namespace": "shop", "uid": "1", "resourceVersion": "7", "labels": { "app": "web" },
    });
    let mut object = json!({ "metadata": metadata, "spec": { "containers": [] } });
    object["metadata"]["annotations"] = json!({ "example.org/large": "x".repeat(1000) });
    object["metadata"]["managedFields"] = json!([{ "manager": "kubectl", "fieldsV1": { "f:spec": {} } }]);
    let object: Object = from_value(object).unwrap();
    assert_eq!(to_value(&object.metadata).unwrap(), metadata);
}

#[test]
fn a_node_answers_for_the_pods_that_it_has_and_for_those_that_are_gone() {
    let mut all = objects(None, &[]);
    all.take((true, Event::Init));
    assert!(all.take(listed(pod("web", Some("a"), "10.0.0.1"))) && !all.is_listed);
    assert!(all.take((true, Event::InitDone)) && all.is_listed);
    assert_eq!(all.nodes(), ["a".to_owned()].into());
    assert!(!all.take(pod("web", Some("a"), "10.0.0.2")), "it is where it was");
    for (node, pod, had, is_own) in [
        ("a", "shop/web", false, true),
        ("b", "shop/web", false, false),
        ("b", "shop/web", true, false),
        ("b", "shop/gone", false, true),
        ("b", "other/gone", false, false),
        ("b", "web", false, false),
    ] {
        assert_eq!(all.is_own(node, pod, had), is_own, "{node} {pod} {had}");
    }
    // It moves: first it is gone, then without a node, then elsewhere.
    assert!(all.take(deleted(pod("web", Some("a"), ""))));
    assert!(all.is_own("a", "shop/web", false) && all.is_own("b", "shop/web", false));
    assert!(all.take(pod("web", None, "")));
    assert!(!all.is_own("a", "shop/web", true) && all.nodes().is_empty());
    assert!(all.take(pod("web", Some("b"), "")));
    assert!(all.is_own("b", "shop/web", false) && !all.is_own("a", "shop/web", true));
    assert!(all.take(pod_with("web", Some("b"), "", &json!({ "/status": { "phase": "Succeeded" } }))));
    assert!(all.nodes().is_empty());
    // A list without it.
    all.take((true, Event::Init));
    assert_eq!(all.uid("shop/web").as_deref(), Some("uid-web"));
    all.take((true, Event::InitDone));
    assert_eq!(all.uid("shop/web"), None);
}

#[test]
fn labels_and_names_select_pods() {
    let mut labelled = objects(None, &[("app", "web")]);
    assert!(!labelled.take(pod("db", Some("a"), "")));
    assert!(labelled.take(pod("web", Some("a"), "")));
    assert!(labelled.is_own("a", "shop/web", false));
    assert!(!labelled.is_own("a", "shop/db", false), "it exists with other labels");
    assert!(labelled.take(pod_with("web", Some("a"), "", &json!({ "/metadata/labels": {} }))));
    assert!(!labelled.is_own("a", "shop/web", false) && labelled.is_own("a", "shop/web", true));

    let mut named = objects(Some("web"), &[]);
    assert_eq!(named.missing(), None, "there is no list yet");
    named.take((true, Event::Init));
    named.take((true, Event::InitDone));
    assert_eq!(named.missing(), Some("web"));
    assert!(!named.take(pod("db", Some("a"), "")));
    assert!(named.take(pod("web", Some("a"), "")));
    assert_eq!(named.missing(), None);
    assert!(!named.is_own("a", "shop/db", false));
}

#[test]
fn each_address_has_the_newest_name_once() {
    let mut all = objects(None, &[]);
    all.take(pod("web", Some("a"), "10.0.0.1"));
    all.take(pod_with("host", Some("a"), "10.0.0.9", &json!({ "/spec": { "hostNetwork": true } })));
    let done = json!({ "/status": { "phase": "Failed", "podIPs": [{ "ip": "10.0.0.1" }] } });
    all.take(pod_with("done", Some("a"), "", &done));
    all.take(service("checkout", &json!(["10.96.0.1", "fd00::1"])));
    all.take(service("headless", &json!(["None"])));
    let named = |address: &str, name: &str| (address.parse::<IpAddr>().unwrap(), name.to_owned());
    let checkout = "checkout.shop.svc";
    let expected = [named("10.0.0.1", "web.shop"), named("10.96.0.1", checkout), named("fd00::1", checkout)];
    assert_eq!(all.new_names(), expected);
    all.take(pod("web", Some("a"), "10.0.0.1"));
    all.take(deleted(pod("web", Some("a"), "10.0.0.1")));
    assert_eq!(all.new_names(), []);
    all.take(pod("db", Some("a"), "10.0.0.1"));
    assert_eq!(all.new_names(), [named("10.0.0.1", "db.shop")]);
}

#[test]
fn pods_and_names_have_a_bound() {
    let mut all = objects(None, &[]);
    for number in 0..u32::try_from(MAX_OBJECTS).unwrap() + 10 {
        assert_eq!(all.is_full(), number as usize >= MAX_OBJECTS);
        all.take(pod(&format!("pod-{number}"), Some("a"), &Ipv4Addr::from(0x0a00_0000 + number).to_string()));
    }
    assert_eq!((all.names.len(), all.pods.len()), (MAX_OBJECTS, MAX_OBJECTS));
    // Each once.
    let about = ["addresses have names", "pods, and others are left out"];
    assert!(all.messages.iter().zip(about).all(|(text, about)| text.contains(about)), "{:?}", all.messages);
    assert_eq!(all.messages.len(), about.len());
    let blocks: Vec<_> =
        std::iter::from_fn(|| Some(all.new_names().len()).filter(|names| *names > 0)).collect();
    assert_eq!(blocks.iter().sum::<usize>(), MAX_OBJECTS);
    assert!(blocks.iter().all(|names| *names <= MAX_NAMES));
    // An address that changes hands has no wrong name.
    all.take(pod("new", Some("a"), "10.0.0.0"));
    assert_eq!(all.new_names(), [(IpAddr::from([10, 0, 0, 0]), "new.shop".to_owned())]);
    assert_eq!((all.names.len(), all.messages.len()), (MAX_OBJECTS, about.len()));
}
