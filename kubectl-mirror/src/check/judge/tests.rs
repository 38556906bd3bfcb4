//! Tests of the checks that need no agent: each outcome of each.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use proptest::prelude::*;
use serde_json::{Value, from_value, json};

use super::*;

pub(super) fn node(name: &str, system: &str, architecture: &str, kernel: &str) -> Value {
    json!({
        "metadata": { "name": name },
        "status": { "nodeInfo": {
            "operatingSystem": system, "architecture": architecture, "kernelVersion": kernel,
            "bootID": "", "containerRuntimeVersion": "", "kubeProxyVersion": "", "kubeletVersion": "",
            "machineID": "", "osImage": "", "systemUUID": "",
        } },
    })
}

pub(super) fn objects<T: serde::de::DeserializeOwned>(objects: &[Value]) -> Read<Vec<T>> {
    Ok(objects.iter().map(|object| from_value(object.clone()).unwrap()).collect())
}

pub(super) fn refused<T>() -> Read<T> {
    Err("alice may not".to_owned())
}

/// A cluster of one node with Cilium, without podmirror, for a user with all rights.
pub(super) fn facts() -> Facts {
    let cilium = json!({
        "metadata": { "name": "cilium" },
        "spec": { "selector": {}, "template": { "spec": { "containers": [] } } },
    });
    Facts {
        plugin: "0.1.0",
        agents: "podmirror".to_owned(),
        now: "2026-01-01T12:00:00Z".parse().unwrap(),
        server: "v1.34.1".to_owned(),
        nodes: objects(&[node("a", "linux", "amd64", "6.12.0-1")]),
        daemon_sets: objects(&[cilium]),
        crds: Ok(Vec::new()),
        rights: rights("shop"),
        installed: Ok(Vec::new()),
        pods: Ok(Vec::new()),
        controllers: Ok(Vec::new()),
        reports: Ok(Vec::new()),
        targets: Ok(Vec::new()),
        packets: Ok(None),
    }
}

/// The findings of a check: levels and texts.
pub(super) fn of(facts: &Facts, check: &str) -> Vec<(Level, String)> {
    let findings = findings(facts).into_iter().filter(|finding| finding.check == check);
    findings.map(|finding| (finding.result, finding.found)).collect()
}

/// The only finding of a check.
#[track_caller]
pub(super) fn only(facts: &Facts, check: &str) -> (Level, String) {
    match &of(facts, check)[..] {
        [only] => only.clone(),
        findings => panic!("{findings:#?}"),
    }
}

#[test]
fn a_cluster_that_can_have_podmirror_has_nothing_to_look_at() {
    let findings = findings(&facts());
    let checks: Vec<_> = findings.iter().map(|finding| (finding.check, finding.result)).collect();
    let expected = ["server", "nodes", "kernel", "network", "resources", "rights", "agents"];
    assert_eq!(checks, expected.map(|check| (check, Level::Ok)));
    assert_eq!(findings[6].found, "podmirror is not installed in namespace podmirror");
}

#[test]
fn a_server_that_does_not_answer_is_a_failure() {
    let finding = unreachable("connection refused");
    assert_eq!((finding.check, finding.result), ("server", Level::Fail));
    assert!(finding.found.ends_with("connection refused"), "{finding:?}");
}

#[test]
fn the_server_needs_a_version() {
    for (version, result, word) in [
        ("v1.24.17", Level::Fail, "needs 1.25"),
        ("v1.25.0", Level::Warn, "no MirrorNodes"),
        ("v1.29.9-eks-1", Level::Warn, "no MirrorNodes"),
        ("v1.30.0+k3s1", Level::Ok, "1.30.0"),
        ("v2.0.0", Level::Ok, "2.0.0"),
        ("main", Level::Ok, "main"),
    ] {
        let (is, found) = only(&Facts { server: version.to_owned(), ..facts() }, "server");
        assert_eq!(is, result, "{version}");
        assert!(found.contains(word), "{found}");
    }
}

#[test]
fn nodes_of_other_systems_are_named() {
    let with = |nodes: &[Value]| Facts { nodes: objects(nodes), ..facts() };
    let (amd, arm) = (node("a", "linux", "amd64", "6.8.0"), node("b", "linux", "arm64", "6.8.0"));
    let (windows, risc) = (node("w", "windows", "amd64", "10.0"), node("r", "linux", "riscv64", "6.8.0"));
    let found = of(&with(&[amd.clone(), arm.clone(), windows.clone(), risc.clone()]), "nodes");
    let todo = &findings(&with(std::slice::from_ref(&arm)))[1].todo;
    assert!(todo.contains("image.architectures"), "{todo}");
    assert_eq!(findings(&with(std::slice::from_ref(&amd)))[1].todo, "");
    let expected = [
        (Level::Ok, "2 of 4 nodes with Linux on amd64 or arm64"),
        (Level::Warn, "no agent for w (windows/amd64), r (linux/riscv64)"),
    ];
    assert_eq!(found, expected.map(|(result, found)| (result, found.to_owned())));
    let found = of(&with(&[windows.clone(), risc]), "nodes");
    assert_eq!(found[0], (Level::Fail, "0 of 2 nodes with Linux on amd64 or arm64".to_owned()));
    assert_eq!(of(&with(&[windows]), "kernel"), []);
    assert_eq!(only(&Facts { nodes: refused(), ..facts() }, "nodes").0, Level::Warn);
}

#[test]
fn each_kernel_is_told_with_what_it_lacks() {
    let with = |nodes: &[(&str, &str, &str)]| {
        let nodes: Vec<_> = nodes
            .iter()
            .map(|(name, architecture, kernel)| node(name, "linux", architecture, kernel))
            .collect();
        of(&Facts { nodes: objects(&nodes), ..facts() }, "kernel")
    };
    let ok = [(Level::Ok, "all of these nodes have Linux 6.6 or newer".to_owned())];
    assert_eq!(with(&[("a", "amd64", "6.12.1"), ("b", "arm64", "6.6.0-x")]), ok);
    let all_old = with(&[("a", "amd64", "5.9.16"), ("b", "amd64", "4.18.0")]);
    assert_eq!(all_old.iter().map(|(result, _)| *result).collect::<Vec<_>>(), [Level::Fail]);
    assert!(all_old[0].1.ends_with("a (5.9.16), b (4.18.0)"), "{all_old:?}");
    let mixed = with(&[
        ("a", "amd64", "5.4.0"),
        ("b", "arm64", "5.15.0"),
        ("c", "amd64", "6.5.0"),
        ("d", "amd64", "?"),
    ]);
    let expected = [
        "older than 5.10, or unknown, so no agent works there: a (5.4.0), d (?)",
        "older than 6.0 on arm64, so mirrors with a filter are refused there: b (5.15.0)",
        "older than 6.6, so when a pod is mirrored for the first time, one of its packets can be lost, and root in a pod \
         can remove a tap inside the pod: b (5.15.0), c (6.5.0)",
    ];
    assert_eq!(mixed, expected.map(|found| (Level::Warn, found.to_owned())));
}

#[test]
fn the_network_is_told_with_what_is_known_of_it() {
    let with = |name: &str| {
        let set = json!({
            "metadata": { "name": name },
            "spec": { "selector": {}, "template": { "spec": { "containers": [] } } },
        });
        only(&Facts { daemon_sets: objects(&[set]), ..facts() }, "network")
    };
    let (result, found) = with("kube-flannel-ds");
    assert_eq!(result, Level::Ok);
    assert!(found.starts_with("flannel: packets from and to pods are seen"), "{found}");
    assert_eq!(with("aws-node").0, Level::Warn);
    assert_eq!(only(&Facts { daemon_sets: refused(), ..facts() }, "network").0, Level::Warn);
}

#[test]
fn the_crds_are_compared_with_those_of_the_plugin() {
    let with = |crds| Facts { crds: Ok(crds), ..facts() };
    assert_eq!(only(&with(crds()), "resources"), (Level::Ok, "4 CRDs of this version".to_owned()));
    let mut some = crds();
    some.remove(1);
    let missing = "these CRDs are missing: clustermirrors.podmirror.io".to_owned();
    assert_eq!(only(&with(some), "resources"), (Level::Warn, missing));
    let mut other = crds();
    let schema = other[0].spec.versions[0].schema.as_mut().unwrap().open_api_v3_schema.as_mut().unwrap();
    schema.properties.as_mut().unwrap().remove("spec");
    let (result, found) = only(&with(other), "resources");
    assert_eq!(result, Level::Warn);
    assert!(found.ends_with("(0.1.0): mirrors.podmirror.io"), "{found}");
    assert_eq!(only(&Facts { crds: refused(), ..facts() }, "resources").0, Level::Warn);
    // CRDs stay after an uninstall.
    let (result, found) = only(&with(crds()), "agents");
    assert_eq!((result, found.as_str()), (Level::Warn, "podmirror is not installed in namespace podmirror"));
}

#[test]
fn a_right_that_is_missing_is_told_with_who_gives_it() {
    let mut facts = facts();
    facts.rights[0].is_granted = Ok(false);
    facts.rights[3].is_granted = Ok(false);
    facts.rights[6].is_granted = Err("no answer".to_owned());
    let findings: Vec<_> = findings(&facts).into_iter().filter(|of| of.check == "rights").collect();
    let [mirrors, packets, nodes] = &findings[..] else { panic!("{findings:#?}") };
    assert!(findings.iter().all(|finding| finding.result == Level::Warn));
    assert_eq!(mirrors.found, "you may not create mirrors in namespace shop (for on)");
    assert!(mirrors.todo.contains("ClusterRole edit"), "{mirrors:?}");
    assert_eq!(packets.found, "you may not watch packets in namespace shop (for tail)");
    assert!(packets.todo.contains("ClusterRole podmirror-packets"), "{packets:?}");
    assert!(nodes.found.contains("mirrornodes in the cluster: no answer"), "{nodes:?}");
}

#[test]
fn many_names_are_cut() {
    let names: Vec<_> = (0..13).map(|number| format!("n{number}")).collect();
    let text = named(&names, MOST_NAMED);
    assert_eq!(text, "n0, n1, n2, n3, n4, n5, n6, n7, n8, n9 and 3 more");
    assert_eq!(named(["a"], MOST_NAMED), "a");
}

proptest! {
    /// Whatever a server and its nodes report, each check has an outcome, and a finding that is not OK has a remedy.
    #[test]
    fn each_finding_says_what_to_do(version in "v?[0-9]{0,3}[.][0-9]{0,3}.{0,4}", kernel in "\\PC{0,9}", system in "linux|w") {
        let nodes = objects(&[node("a", &system, "amd64", &kernel), node("b", "linux", "arm64", "5.4")]);
        let findings = findings(&Facts { server: version, nodes, ..facts() });
        for check in ["server", "nodes", "kernel", "network", "resources", "rights", "agents"] {
            prop_assert!(findings.iter().any(|finding| finding.check == check), "{}", check);
        }
        for finding in findings {
            prop_assert!(finding.result == Level::Ok || !finding.todo.is_empty(), "{:?}", finding);
        }
    }
}
