//! Tests of the parser: examples and properties.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use mirror_core::networks::{Entry, Networks};
use proptest::{collection, prelude::*};
use serde_json::{Value, json};

use super::*;

fn mk_pod(namespace: &str, name: &str) -> Pod {
    let id =
        PodId { uid: format!("file:{namespace}/{name}"), namespace: namespace.into(), name: name.into() };
    Pod { id, ..Pod::default() }
}

#[test]
fn what_kubectl_prints_is_understood() {
    let text = r#"
apiVersion: v1
items:
- apiVersion: v1
  kind: Pod
  metadata:
    annotations:
      podmirror.io/mirror: "true"
      podmirror.io/netns: /run/netns/web
      k8s.v1.cni.cncf.io/network-status: |-
        [{
            "name": "shop/fast",
            "interface": "net1"
        }]
    creationTimestamp: "2026-01-01T00:00:00Z"
    deletionTimestamp: "2026-01-01T00:00:09Z"
    managedFields:
    - fieldsV1:
        f:metadata: {f:labels: {.: {}, f:app: {}}}
        f:spec: {'f:containers': {'k:{"name":"nginx"}': {.: {}, f:image: {}}}}
    name: web-0
    namespace: shop
    ownerReferences:
    - {kind: StatefulSet, name: web}
    uid: 8a2e5a94-6a73-4e0f-9f39-6f6a0a4f5b51
  spec:
    containers:
    - args: ["-c", "while :; do date; done"]
      name: nginx
    hostNetwork: true
  status:
    phase: Running
kind: List
metadata:
  resourceVersion: ""
"#;
    let annotations = [("podmirror.io/mirror", "true"), ("podmirror.io/netns", "/run/netns/web")];
    let expected = Pod {
        id: PodId {
            uid: "8a2e5a94-6a73-4e0f-9f39-6f6a0a4f5b51".into(),
            namespace: "shop".into(),
            name: "web-0".into(),
        },
        annotations: annotations.into_iter().map(|(key, value)| (key.into(), value.into())).collect(),
        networks: Networks::of([Entry { network: Some("shop/fast"), nic: Some("net1") }]),
        host_network: true,
        netns: Some("/run/netns/web".into()),
        ..Pod::default()
    };
    assert_eq!(parse(text).unwrap(), [expected]);
}

#[test]
fn a_pod_that_has_ended_is_left_out() {
    let pods = ["Pending", "Running", "Unknown", "Succeeded", "Failed"].map(|phase| {
        json!({ "kind": "Pod", "metadata": { "name": phase.to_lowercase() }, "status": { "phase": phase } })
    });
    let list = json!({ "kind": "List", "items": pods }).to_string();
    let expected = ["pending", "running", "unknown"].map(|name| mk_pod("default", name));
    assert_eq!(parse(&list).unwrap(), expected);
}

#[test]
fn documents_may_be_mixed_and_empty_and_say_little() {
    let text = "
# Two pods by hand, and a list.
---
kind: Pod
metadata: {name: a}
---
---
apiVersion: v1
kind: Pod
metadata: {name: a, namespace: other, annotations: }
spec:
---
kind: PodList
items:
- metadata: {name: b}
";
    let expected = [mk_pod("default", "a"), mk_pod("other", "a"), mk_pod("default", "b")];
    assert_eq!(parse(text).unwrap(), expected);
}

#[test]
fn no_pods_is_said_by_an_empty_list_alone() {
    assert_eq!(parse("{apiVersion: v1, kind: List, items: []}").unwrap(), []);
    for empty in ["", " \n\n", "# nothing\n", "---\n...\n", "null"] {
        assert!(matches!(parse(empty), Err(ParseError::Empty)), "{empty:?}");
    }
}

#[test]
fn errors_say_where_and_why() {
    for (text, expected) in [
        ("kind: Pod\nmetadata:\n  name: [a]\n", "expected string scalar at line 3, column 9"),
        ("kind: Pod\nspec: {hostNetwork: maybe}\n", "invalid boolean at line 2, column 21"),
        ("just a text", "expected mapping start at line 1, column 1"),
        ("kind: Pod\nmetadata: {name: a", "unclosed bracket '{' at line 2, column 11"),
        ("metadata: {name: a}", "line 1, column 1: the object has no kind"),
        ("kind: Pod", "line 1, column 1: the pod has no metadata"),
        ("kind: Pod\nmetadata: {uid: x}", "line 1, column 1: the pod has no metadata.name"),
        ("kind: Pod\nmetadata: {name: ''}", "line 1, column 1: metadata.name is empty"),
        ("kind: List\nitems:", "line 1, column 1: the list has no items"),
        (
            "kind: Pod\nmetadata: {name: a}\n---\n\napiVersion: apps/v1\nkind: Deployment\n",
            "line 5, column 1: \"apps/v1 Deployment\" is not a Pod or a List of pods",
        ),
        (
            "kind: List\nitems:\n- kind: Service\n",
            "line 3, column 3: \"Service\" is not a Pod or a List of pods",
        ),
        (
            "kind: PodList\nitems:\n- metadata: {name: a}\n- metadata: {name: a}\n",
            "line 4, column 3: there is a second pod default/a",
        ),
        (
            "kind: PodList\nitems:\n- metadata: {name: a, uid: x}\n- metadata: {name: b, uid: x}\n",
            "line 4, column 3: pod default/b has the UID of another pod: x",
        ),
        (
            "kind: Pod\nmetadata: {name: \"a\\0b\"}",
            "line 1, column 1: metadata.name \"a\\0b\" has a control character",
        ),
    ] {
        assert_eq!(parse(text).unwrap_err().to_string(), expected, "{text}");
    }
}

#[test]
fn what_is_longer_than_the_maps_hold_is_refused() {
    let pod = |namespace: usize, name: usize, uid: usize| {
        let (namespace, name, uid) = ("s".repeat(namespace), "n".repeat(name), "u".repeat(uid));
        let uid = if uid.is_empty() { Value::Null } else { uid.into() };
        let pod = json!({"kind": "Pod", "metadata": {"namespace": namespace, "name": name, "uid": uid}});
        parse(&pod.to_string()).map(|pods| pods.len()).map_err(|error| error.to_string())
    };
    assert_eq!(pod(63, 253, 64), Ok(1));
    assert!(pod(64, 1, 1).unwrap_err().ends_with("metadata.namespace has 64 bytes; 63 is the most"));
    assert!(pod(1, 254, 1).unwrap_err().ends_with("metadata.name has 254 bytes; 253 is the most"));
    assert!(pod(1, 1, 65).unwrap_err().ends_with("metadata.uid has 65 bytes; 64 is the most"));
    assert_eq!(pod(8, 50, 0), Ok(1));
    assert!(pod(8, 51, 0).unwrap_err().ends_with("needs a metadata.uid, because its name is long"));
}

#[test]
fn what_is_nested_or_repeated_without_end_is_an_error() {
    let deep = format!("kind: Pod\nx: {}{}\n", "[".repeat(100_000), "]".repeat(100_000));
    assert!(matches!(parse(&deep), Err(ParseError::Yaml(_))));
    let mut bomb = String::from("a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n");
    for n in 1..12 {
        let last = n - 1;
        bomb += &format!(
            "a{n}: &a{n} [*a{last},*a{last},*a{last},*a{last},*a{last},*a{last},*a{last},*a{last}]\n"
        );
    }
    assert!(matches!(parse(&bomb), Err(ParseError::Yaml(_))));
}

#[test]
fn more_pods_than_a_node_can_run_fit() {
    let names: Vec<_> = (0..2000).map(|n| format!("pod-{n}")).collect();
    let pods: Vec<_> = names.iter().map(|name| mk_pod("default", name)).collect();
    assert_eq!(parse(&documents(&pods)).unwrap(), pods);
}

fn any_texts() -> impl Strategy<Value = BTreeMap<String, String>> {
    let key = prop_oneof![Just(NETNS_ANNOTATION.to_owned()), "[a-z./]{1,20}", any::<String>()];
    let value = prop_oneof!["true|no|~|null|0x1f|1e3|- a|a: b|#|\"|'|&a|\\*a|!!str|\n|%|", any::<String>()];
    collection::btree_map(key, value, 0..4)
}

fn any_pods() -> impl Strategy<Value = Vec<Pod>> {
    let word = || prop_oneof!["[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?", Just("null".to_owned())];
    let pod = (any_texts(), any_texts(), any::<bool>(), proptest::option::of("[0-9a-f][-0-9a-f]{0,50}"));
    collection::btree_map((word(), word()), pod, 0..5).prop_map(|pods| {
        let with_index = pods.into_iter().enumerate();
        let mk =
            with_index.map(|(index, ((namespace, name), (labels, annotations, host_network, uid)))| Pod {
                netns: annotations.get(NETNS_ANNOTATION).map(Into::into),
                labels,
                annotations,
                host_network,
                id: match uid {
                    Some(uid) => PodId { uid: format!("{index}-{uid}"), namespace, name },
                    None => mk_pod(&namespace, &name).id,
                },
                ..Pod::default()
            });
        mk.collect()
    })
}

fn object(pod: &Pod) -> Value {
    let PodId { uid, namespace, name } = &pod.id;
    let uid = if uid.starts_with("file:") { Value::Null } else { uid.clone().into() };
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "annotations": pod.annotations, "labels": pod.labels, "name": name, "namespace": namespace, "uid": uid,
        },
        "spec": {"containers": [{"name": "c", "command": ["sh", "-c"]}], "hostNetwork": pod.host_network},
        "status": {"phase": "Running"},
    })
}

fn list(pods: &[Pod]) -> Value {
    json!({"apiVersion": "v1", "items": pods.iter().map(object).collect::<Vec<_>>(), "kind": "List"})
}

fn documents(pods: &[Pod]) -> String {
    pods.iter().map(|pod| format!("---\n{}", serde_saphyr::to_string(&object(pod)).unwrap())).collect()
}

proptest! {
    #[test]
    fn pods_that_are_written_are_read_again(pods in any_pods()) {
        prop_assert_eq!(&parse(&serde_saphyr::to_string(&list(&pods)).unwrap()).unwrap(), &pods);
        prop_assert_eq!(&parse(&list(&pods).to_string()).unwrap(), &pods);
        prop_assert_eq!(&parse(&serde_json::to_string_pretty(&list(&pods)).unwrap()).unwrap(), &pods);
        if !pods.is_empty() {
            prop_assert_eq!(&parse(&documents(&pods)).unwrap(), &pods);
        }
    }

    #[test]
    fn no_text_makes_it_panic(text in prop_oneof![any::<String>(), "([a-z]{1,4}|[-:?,\\[\\]{}#&*!|>'\"%@` \n\t~])*"]) {
        let _ = parse(&text);
        let _ = parse(&format!("kind: Pod\nmetadata:\n  name: {text}"));
    }

    #[test]
    fn documents_that_are_cut_off_give_the_first_pods_or_an_error(pods in any_pods(), at in any::<prop::sample::Index>()) {
        let text = documents(&pods);
        let end = text.floor_char_boundary(at.index(text.len() + 1));
        if let Ok(cut) = parse(&text[..end]) {
            prop_assert!(cut.len() <= pods.len());
            let whole = cut.len() - 1;
            prop_assert_eq!(&cut[..whole], &pods[..whole]);
        }
    }

    #[test]
    fn a_list_that_is_cut_off_before_its_kind_is_an_error(pods in any_pods(), at in any::<prop::sample::Index>()) {
        // The kind is at the end, as `kubectl` prints it.
        let text = serde_saphyr::to_string(&list(&pods)).unwrap();
        let kind = text.rfind("\nkind:").unwrap() + "\nkind: Lis".len();
        let end = text.floor_char_boundary(at.index(kind + 1));
        prop_assert!(parse(&text[..end]).is_err());
    }

    #[test]
    fn json_that_is_cut_off_is_an_error(pods in any_pods(), at in any::<prop::sample::Index>()) {
        let text = list(&pods).to_string();
        let end = text.floor_char_boundary(at.index(text.len()));
        prop_assert!(parse(&text[..end]).is_err());
    }
}
