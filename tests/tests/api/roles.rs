//! The roles that the chart defines for people: what they allow, and what they do not.

use std::collections::{BTreeMap, BTreeSet};

use mirror_tests::{Api, SOON, check, eventually, list};
use serde_json::{Value, json};

use crate::{
    mirror_nodes::renamed,
    resources::{Story, resource},
};

const VERBS: [&str; 8] = ["get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"];
const READ: [&str; 3] = ["get", "list", "watch"];
/// A namespace that is not the story's.
const OTHER: &str = "default";

/// A right in the terms of Kubernetes: a verb, a resource of a group, and a namespace. Without a namespace, it is for
/// all.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Right {
    verb: String,
    group: String,
    resource: String,
    namespace: String,
}

impl Right {
    /// `resource` can name a subresource, as in `pods/log`.
    fn new(verb: &str, group: &str, resource: &str, namespace: &str) -> Self {
        let [verb, group, resource, namespace] = [verb, group, resource, namespace].map(str::to_owned);
        Self { verb, group, resource, namespace }
    }

    fn review(&self, user: &str) -> Value {
        let (resource, subresource) = self.resource.split_once('/').unwrap_or((&self.resource, ""));
        json!({
            "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
            "metadata": {}, "spec": { "user": user, "groups": ["system:authenticated"], "resourceAttributes": {
                "verb": self.verb, "group": self.group, "namespace": self.namespace,
                "resource": resource, "subresource": subresource,
            } },
        })
    }
}

/// Returns those of the rights that the user has.
fn allowed(api: &Api, user: &str, rights: &[Right]) -> BTreeSet<Right> {
    let reviews: Vec<_> = rights.iter().map(|right| right.review(user)).collect();
    let told = api.kubectl_with("create -o json -f -", &list(&reviews).to_string());
    let answers = serde_json::Deserializer::from_str(&told).into_iter::<Value>().map(Result::unwrap);
    let answers: Vec<_> = answers.map(|review| review["status"]["allowed"] == true).collect();
    assert_eq!(answers.len(), rights.len(), "{told}");
    rights.iter().zip(answers).filter(|(_, allowed)| *allowed).map(|(right, _)| right.clone()).collect()
}

/// Waits until the user has exactly these of the rights.
#[track_caller]
fn wait_allowed(api: &Api, user: &str, rights: &[Right], expected: &BTreeSet<Right>) {
    assert!(expected.iter().all(|right| rights.contains(right)), "a right that is not asked for");
    eventually(SOON, || {
        let allowed = allowed(api, user, rights);
        let (missing, more) = (expected.difference(&allowed), allowed.difference(expected));
        let (missing, more): (Vec<_>, Vec<_>) = (missing.collect(), more.collect());
        check(missing.is_empty() && more.is_empty(), || {
            format!("{user} may not {missing:#?}, and may {more:#?}")
        })
    });
}

/// A ClusterRole and the ClusterRoles that it aggregates by their labels, recursively. Kubernetes' controller would
/// join them; it does not run here.
fn aggregated(api: &Api, role: &str) -> BTreeSet<String> {
    let roles: Value = serde_json::from_str(&api.kubectl("get clusterroles -o json")).unwrap();
    let named = |role: &Value| (role["metadata"]["name"].as_str().unwrap().to_owned(), role.clone());
    let roles: BTreeMap<_, _> = roles["items"].as_array().unwrap().iter().map(named).collect();
    let (mut found, mut next) = (BTreeSet::new(), vec![role.to_owned()]);
    while let Some(name) = next.pop() {
        let selectors = roles[&name]["aggregationRule"]["clusterRoleSelectors"].as_array();
        for selector in selectors.into_iter().flatten() {
            let wanted = selector["matchLabels"].as_object().unwrap();
            let has =
                |role: &Value| wanted.iter().all(|(key, value)| &role["metadata"]["labels"][key] == value);
            next.extend(roles.iter().filter(|(_, role)| has(role)).map(|(name, _)| name.clone()));
        }
        next.retain(|name| !found.contains(name));
        found.insert(name);
    }
    found
}

/// Binds a user to ClusterRoles, in the story's namespace or everywhere.
fn bind(story: &mut Story, user: &str, roles: &BTreeSet<String>, everywhere: bool) {
    let binding = |(number, role): (usize, &String)| {
        let kind = if everywhere { "ClusterRoleBinding" } else { "RoleBinding" };
        let name = format!("{user}-{number}");
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": { "name": name },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role },
            "subjects": [{ "apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user }],
        })
    };
    let bindings: Vec<_> = roles.iter().enumerate().map(binding).collect();
    if everywhere {
        let names = bindings.iter().map(|of| of["metadata"]["name"].as_str().unwrap());
        story.of_cluster.extend(names.map(|name| format!("clusterrolebinding {name}")));
    }
    story.node.api.apply(&list(&bindings));
}

/// All verbs on podmirror's kinds.
fn of_our_kinds(namespace: &str) -> Vec<Right> {
    let mut rights = Vec::new();
    for verb in VERBS {
        for part in ["", "/status"] {
            for place in [namespace, OTHER, ""] {
                rights.push(Right::new(verb, "podmirror.io", &format!("mirrors{part}"), place));
            }
            for kind in ["clustermirrors", "mirrortargets", "mirrornodes"] {
                rights.push(Right::new(verb, "podmirror.io", &format!("{kind}{part}"), ""));
            }
        }
    }
    rights
}

/// The rights of a role according to docs/resources.md.
fn of_documents(role: &str, namespace: &str, everywhere: bool) -> BTreeSet<Right> {
    let places = if everywhere { vec![namespace, OTHER, ""] } else { vec![namespace] };
    let verbs = if role == "view" { &READ[..] } else { &VERBS };
    let right = |verb: &str, kind: &str, place: &str| Right::new(verb, "podmirror.io", kind, place);
    let mut rights = BTreeSet::new();
    for verb in verbs {
        rights.extend(places.iter().map(|place| right(verb, "mirrors", place)));
    }
    if everywhere {
        for kind in ["clustermirrors", "mirrortargets", "mirrornodes"] {
            rights.extend(READ.map(|verb| right(verb, kind, "")));
        }
    }
    rights
}

#[test]
fn the_roles_view_edit_and_admin_have_the_rights_of_the_documents() {
    let mut story = Story::new("roles");
    let namespace = story.node.api.namespace().to_owned();
    let shipped: Vec<_> = ["view", "edit", "admin"]
        .map(|role| renamed("ClusterRole", &format!("podmirror-{role}"), &format!("{namespace}-{role}")))
        .into();
    story.of_cluster.extend(["view", "edit", "admin"].map(|role| format!("clusterrole {namespace}-{role}")));
    story.node.api.apply(&list(&shipped));
    let rights = of_our_kinds(&namespace);
    for role in ["view", "edit", "admin"] {
        let roles = aggregated(&story.node.api, role);
        assert!(roles.contains(&format!("{namespace}-{role}")), "{roles:?}");
        for everywhere in [false, true] {
            let user = format!("{namespace}-{role}-{}", if everywhere { "everywhere" } else { "here" });
            bind(&mut story, &user, &roles, everywhere);
            let user = &user;
            wait_allowed(&story.node.api, user, &rights, &of_documents(role, &namespace, everywhere));
        }
    }
    wait_allowed(&story.node.api, "mallory", &rights, &BTreeSet::new());

    // The rights that the bindings result in.
    let api = &story.node.api;
    let create = |user: &str, kind: &str| {
        let mut object = resource(kind, &namespace, &json!({}), &json!({}));
        if kind == "ClusterMirror" {
            object["spec"]["namespaceSelector"] = json!({ "matchLabels": { "nobody": "has-this" } });
        }
        api.try_kubectl_with(&format!("create --as={namespace}-{user} -f -"), &object.to_string())
    };
    assert!(create("edit-here", "Mirror").is_ok_and(|told| told.contains("created")));
    api.kubectl(&format!("get mirror --as={namespace}-view-here {namespace}"));
    for (user, kind) in [("view-everywhere", "Mirror"), ("admin-everywhere", "ClusterMirror")] {
        let refused = create(user, kind).unwrap_err();
        assert!(refused.contains("(Forbidden)") && refused.contains(user), "{refused}");
    }
}

#[test]
fn the_roles_for_packets_read_packets_and_no_more() {
    const GROUP: &str = "packets.podmirror.io";
    let mut story = Story::new("packets-roles");
    let own = story.node.api.namespace().to_owned();
    let namespace = own.as_str();
    let mut rights = of_our_kinds(namespace);
    let others = [
        (GROUP, "packets"),
        (GROUP, "nodepackets"),
        (GROUP, "podreports"),
        ("", "pods"),
        ("", "pods/exec"),
        ("", "pods/log"),
        ("", "pods/portforward"),
        ("", "pods/proxy"),
        ("", "secrets"),
        ("", "services"),
        ("", "nodes/proxy"),
    ];
    for verb in VERBS {
        for place in [namespace, OTHER, ""] {
            rights.extend(others.map(|(group, resource)| Right::new(verb, group, resource, place)));
        }
    }
    let of_pods = [("watch", "packets"), ("get", "podreports"), ("list", "podreports")];
    for (role, expected) in [("packets", &of_pods[..]), ("nodepackets", &[("watch", "nodepackets")])] {
        let name = format!("{namespace}-{role}");
        story.of_cluster.push(format!("clusterrole {name}"));
        story.node.api.apply(&renamed("ClusterRole", &format!("podmirror-{role}"), &name));
        for everywhere in [false, true] {
            let user = format!("{name}-{}", if everywhere { "everywhere" } else { "here" });
            bind(&mut story, &user, &[name.clone()].into(), everywhere);
            let places = if everywhere { vec![namespace, OTHER, ""] } else { vec![namespace] };
            let expected = expected.iter().flat_map(|(verb, resource)| {
                places.iter().map(move |place| Right::new(verb, GROUP, resource, place))
            });
            wait_allowed(&story.node.api, &user, &rights, &expected.collect());
        }
    }
}
