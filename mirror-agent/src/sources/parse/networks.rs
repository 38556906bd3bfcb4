//! Reads the annotation in which Multus lists the network of each NIC of a pod.
//!
//! Pure; [`parse`](super) calls it. The annotation is a JSON list with an object for each NIC (Kubernetes Network
//! Custom Resource Definition De-facto Standard, section 5). The agent reads `name` and `interface` of each object.
//! [`Networks`] evaluates them.

use mirror_core::networks::{Entry, Networks};
use serde_json::Value;

/// The maximum size of the annotation in bytes: what Kubernetes allows for all annotations of an object.
const MOST_BYTES: usize = 256 << 10;

/// Returns the networks in the annotation. For an invalid text, returns none, and a problem.
pub(super) fn read(text: &str) -> Networks {
    if text.trim().is_empty() {
        // Calico writes an empty annotation first.
        return Networks::default();
    }
    if text.len() > MOST_BYTES {
        return Networks::unreadable(format!("it has {} bytes, more than {MOST_BYTES}", text.len()));
    }
    match serde_json::from_str::<Vec<Value>>(text) {
        Ok(entries) => Networks::of(entries.iter().map(entry)),
        Err(error) => {
            let (line, column) = (error.line(), error.column());
            Networks::unreadable(format!("it is not a JSON list (line {line}, column {column})"))
        }
    }
}

fn entry(object: &Value) -> Entry<'_> {
    Entry { network: object["name"].as_str(), nic: object["interface"].as_str() }
}

#[cfg(test)]
mod tests {
    use proptest::{
        collection::{btree_map, vec},
        prelude::*,
    };
    use serde_json::json;

    use super::*;

    #[test]
    fn what_multus_writes_is_read() {
        let networks = read(
            r#"[{
                "name": "kube-ovn",
                "interface": "eth0",
                "ips": ["10.16.0.8"],
                "mac": "00:00:00:53:6b:bb",
                "default": true,
                "dns": {}
            },{
                "name": "shop/fast",
                "interface": "net1",
                "ips": ["172.17.0.3"],
                "mac": "00:00:00:53:6b:bc",
                "dns": {},
                "device-info": {"type": "pci", "version": "1.1.0", "pci": {"pci-address": "0000:18:02.5"}}
            }]"#,
        );
        assert_eq!(networks.iter().collect::<Vec<_>>(), [("eth0", "kube-ovn"), ("net1", "shop/fast")]);
        assert_eq!((networks.is_told(), networks.problem()), (true, None));
    }

    #[test]
    fn an_annotation_that_is_empty_says_nothing_yet() {
        for text in ["", " \n"] {
            assert_eq!(read(text), Networks::default());
        }
        let none = read("[]");
        assert_eq!((none.iter().count(), none.is_told(), none.problem()), (0, true, None));
    }

    #[test]
    fn an_annotation_that_is_none_is_told() {
        let long = json!(["x".repeat(MOST_BYTES)]).to_string();
        let deep = "[".repeat(100_000);
        for (text, problem) in [
            ("eth0", "it is not a JSON list (line 1, column 1)"),
            ("{\"name\": \"a\", \"interface\": \"net1\"}", "it is not a JSON list"),
            ("null", "it is not a JSON list"),
            ("[{\"name\": \"a\",", "it is not a JSON list (line 1, column 14)"),
            (&long, "bytes, more than 262144"),
            (&deep, "it is not a JSON list"),
        ] {
            let networks = read(text);
            assert_eq!(networks.iter().count(), 0);
            let told = networks.problem().unwrap_or_default();
            assert!(told.contains(problem), "{told}");
        }
    }

    #[test]
    fn of_a_list_the_entries_that_can_be_are_read() {
        let list = json!([
            1, null, "net1", [], {}, {"interface": ""}, {"interface": 7, "name": "a"}, {"name": "a"},
            {"interface": "net3", "name": 7},
            {"interface": "net1", "name": "shop/fast"},
        ]);
        let networks = read(&list.to_string());
        assert_eq!(networks.iter().collect::<Vec<_>>(), [("net1", "shop/fast")]);
        assert_eq!(networks.problem(), Some("the entry of the NIC \"net3\" names no network"));
    }

    /// Arbitrary JSON, with the field names that are read.
    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "[a-z/]{0,6}|.{0,40}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 64, 8, |inner| {
            let key = prop_oneof!["name|interface|default", ".{0,4}"];
            prop_oneof![
                vec(inner.clone(), 0..8).prop_map(Value::from),
                btree_map(key, inner, 0..4).prop_map(|map| map.into_iter().collect::<Value>()),
            ]
        })
    }

    proptest! {
        #[test]
        fn no_json_makes_it_panic_and_nothing_is_invented(list in vec(any_json(), 0..8), cut in any::<prop::sample::Index>()) {
            let text = Value::from(list.clone()).to_string();
            let networks = read(&text);
            for (nic, network) in networks.iter() {
                prop_assert!(list.iter().any(|entry| entry["interface"] == nic && entry["name"] == network));
            }
            let end = text.floor_char_boundary(cut.index(text.len()));
            prop_assert_eq!(read(&text[..end]).iter().count(), 0, "what is cut off is no list");
        }

        #[test]
        fn no_text_makes_it_panic(text in prop_oneof![any::<String>(), "[\\[\\]{}\":,a-z0-9 ]{0,40}"]) {
            read(&text);
        }
    }
}
