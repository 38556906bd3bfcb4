//! Answers of nodes as documents of the API.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use mirror_api::packets::PodReportList;
use mirror_core::status::{Finding, MirrorReport, PodMetadata};
use serde_json::from_str;

use super::*;

/// An answer about `shop/web` on node `a`, `shop/db` on `b`, and `shop/new` on no node yet.
fn answer(is_table: bool) -> Answer {
    let pods = [("web", Some("a")), ("db", Some("b")), ("new", None)];
    let pods = pods.map(|(name, node)| (("shop".to_owned(), name.to_owned()), node.map(str::to_owned)));
    Answer { pods: pods.into(), is_table, bytes: 0, parts: BTreeMap::new() }
}

fn report(name: &str, nics: &[NicReport], not_mirrored: &[Finding]) -> PodReport {
    let metadata = PodMetadata { namespace: "shop".into(), name: name.into() };
    PodReport { metadata, nics: nics.to_vec(), not_mirrored: not_mirrored.to_vec(), ..PodReport::default() }
}

fn not_mirrored(nic: Option<&str>, reason: &str) -> Finding {
    let [message, remedy] = ["the reason", "The remedy."].map(str::to_owned);
    let (nic, reason) = (nic.map(str::to_owned), reason.to_owned());
    Finding { nic, reason, message, remedy, ..Finding::default() }
}

fn mirror(name: &str, copied: u64, lost: u64) -> MirrorReport {
    MirrorReport { name: name.into(), target: "default".into(), copied, lost }
}

fn direction(state: &str, seconds: u64) -> Option<DirectionCoverage> {
    let (state, message) = (state.to_owned(), format!("is {state}"));
    Some(DirectionCoverage { state, message, seconds, seen: 1, carried: 2 })
}

/// A NIC with these mirrors. Ingress is covered for an hour, and egress bypassed for two minutes.
fn nic(name: &str, mirrors: &[MirrorReport]) -> NicReport {
    NicReport {
        name: name.into(),
        device: format!("veth-{name}"),
        ingress: direction(COVERED, 3600),
        egress: direction("Bypassed", 120),
        mirrors: mirrors.to_vec(),
        ..NicReport::default()
    }
}

#[test]
fn a_report_counts_only_from_the_node_of_its_pod() {
    let mut answer = answer(false);
    for (node, name) in [("a", "web"), ("a", "db"), ("a", "new"), ("a", "unknown"), ("b", "web")] {
        let mut report = report(name, &[nic(&format!("eth-{node}"), &[])], &[]);
        // The agent's word for it does not count.
        report.node = "c".into();
        answer.add(node, report).unwrap();
    }
    let list: PodReportList = from_str(&answer.text(None).unwrap()).unwrap();
    let expected = PodReport { node: "a".into(), ..report("web", &[nic("eth-a", &[])], &[]) };
    assert_eq!(list.items, [expected]);
    let kind = (list.types.kind, list.types.api_version);
    assert_eq!(kind, ("PodReportList".to_owned(), format!("{GROUP}/{VERSION}")));
}

#[test]
fn one_report_is_an_object_or_is_not_found_for_a_reason() {
    let mut one = answer(false);
    one.add("a", report("web", &[], &[not_mirrored(None, "NoRequest")])).unwrap();
    let object: Value = from_str(&one.text(Some("web")).unwrap()).unwrap();
    let expected = json!({
        "apiVersion": "packets.podmirror.io/v1alpha1", "kind": "PodReport",
        "metadata": { "namespace": "shop", "name": "web" }, "node": "a", "nics": [],
        "notMirrored": [{ "reason": "NoRequest", "message": "the reason", "remedy": "The remedy." }],
    });
    assert_eq!(object, expected);
    for (pod, why) in [(None, "no such pod"), (Some("new"), "it is not assigned to a node yet")] {
        let mut none = answer(true);
        none.pods.retain(|(_, name), _| Some(name.as_str()) == pod);
        let expected = format!("podreports.packets.podmirror.io \"web\" not found: {why}");
        assert_eq!(none.text(Some("web")), Err(Refusal::new(404, "NotFound", expected)));
    }
}

#[test]
fn a_table_has_a_row_for_each_nic_and_each_pod() {
    let eth0 = nic("eth0", &[mirror("default", 7, 1), mirror("mirror/ids", 3, 2)]);
    let net1 = NicReport { name: "net1".into(), ..NicReport::default() };
    let problems = [not_mirrored(Some("eth0"), "Hidden"), not_mirrored(Some("net2"), "NoPeer")];
    let mut answer = answer(true);
    answer.add("b", report("db", &[], &[not_mirrored(None, "NoRequest")])).unwrap();
    answer.add("a", report("web", &[eth0, net1], &problems)).unwrap();
    let table: Value = from_str(&answer.text(None).unwrap()).unwrap();
    let names = |priority: u8| {
        let columns = table["columnDefinitions"].as_array().unwrap().iter();
        let columns = columns.filter(|column| column["priority"] == priority);
        columns.map(|column| column["name"].as_str().unwrap().to_uppercase()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!((&table["kind"], &table["apiVersion"]), (&json!("Table"), &json!("meta.k8s.io/v1")));
    assert_eq!(names(0), "NAME NIC NODE MIRRORS INGRESS EGRESS COPIED LOST");
    assert_eq!(names(1), "DEVICE FOR MESSAGE");
    let of_web = "egress Bypassed: is Bypassed; Hidden: the reason; NoPeer: the reason";
    let (none, unknown) = ("<none>", "<unknown>");
    let rows = [
        json!(["db", none, "b", none, unknown, unknown, 0, 0, none, none, "NoRequest: the reason"]),
        json!([
            "web",
            "eth0",
            "a",
            "default,mirror/ids",
            COVERED,
            "Bypassed",
            10,
            3,
            "veth-eth0",
            "2m",
            of_web
        ]),
        json!(["web", "net1", "a", none, unknown, unknown, 0, 0, none, none, "NoPeer: the reason"]),
    ];
    let object = |name: &str| {
        let metadata = json!({ "namespace": "shop", "name": name });
        json!({ "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata })
    };
    let rows = rows.map(|cells| json!({ "object": object(cells[0].as_str().unwrap()), "cells": cells }));
    assert_eq!(table["rows"], json!(rows));
}

#[test]
fn an_answer_is_bounded() {
    for is_table in [false, true] {
        let mut answer = answer(is_table);
        answer.add("a", report("web", &[], &[])).unwrap();
        // The reports about many other pods.
        answer.bytes = MOST_BYTES;
        assert_eq!(answer.add("b", report("db", &[], &[])).unwrap_err().code, 413);
    }
}

/// A stranger can speak for a node. Other nodes' reports still have room in the answer.
#[test]
fn the_report_of_a_node_is_bounded() {
    let long = "é".repeat(1 << 19);
    let mut nics = vec![nic("eth0", &vec![mirror("default", 7, 1); 100]); 100];
    nics[0].egress.as_mut().unwrap().message.clone_from(&long);
    // The NIC has no row, so all rows have the reason.
    let mut problems = vec![not_mirrored(Some("net1"), "NoPeer"); 1000];
    problems[0].message.clone_from(&long);
    let hostile = PodReport { explanation: Some(long), ..report("web", &nics, &problems) };
    for is_table in [false, true] {
        let mut answer = answer(is_table);
        for _ in 0..3 {
            answer.add("a", hostile.clone()).unwrap();
        }
        let parts: usize = answer.parts.values().map(String::len).sum();
        assert_eq!(answer.bytes, parts, "the first counts");
        assert!(parts < 1 << 20, "{parts}");
        let text = answer.text(None).unwrap();
        if is_table {
            let table: Value = from_str(&text).unwrap();
            assert_eq!(table["rows"].as_array().unwrap().len(), MOST_NICS);
            assert!(table["rows"][0]["cells"][10].as_str().unwrap().ends_with('…'));
        } else {
            let report = from_str::<PodReportList>(&text).unwrap().items.remove(0);
            let lengths = (report.nics.len(), report.nics[0].mirrors.len(), report.not_mirrored.len());
            assert_eq!(lengths, (MOST_NICS, MAX_SESSIONS_PER_TAP, MOST_PROBLEMS));
            let cut = |bytes: usize| "é".repeat(bytes / 2) + "…";
            assert_eq!(report.nics[0].egress.as_ref().unwrap().message, cut(MOST_TEXT));
            assert_eq!(report.not_mirrored[0].message, cut(MOST_TEXT));
            assert_eq!(report.explanation, Some(cut(MOST_EXPLANATION)));
        }
    }
    let decoded = |problem: &str, count: usize| {
        let mut report = json!([report("web", &[], &[])]).to_string();
        let at = report.find("\"notMirrored\":[").unwrap() + "\"notMirrored\":[".len();
        report.insert_str(at, &vec![problem; count].join(","));
        decode(report.as_bytes()).map(|reports| reports[0].not_mirrored.len()).map_err(|refusal| refusal.code)
    };
    for problem in ["{}", "[]"] {
        assert_eq!((decoded(problem, 1000), decoded(problem, MOST_STRUCTURES)), (Ok(1000), Err(503)));
    }
    let brackets = json!({ "message": "\"{[\\".repeat(MOST_STRUCTURES) }).to_string();
    assert_eq!(decoded(&brackets, 1), Ok(1), "a text of a pod's author");
}

#[test]
fn answers_to_slow_clients_have_a_bound_together() {
    static ROOM: Semaphore = Semaphore::const_new(10);
    let answer = |length: usize| unsent("x".repeat(length), &ROOM);
    let is_refused = |length: usize| {
        let refusal = answer(length).unwrap_err();
        assert_eq!((refusal.code, refusal.retry), (429, Some(5)));
    };
    let (first, second) = (answer(7).unwrap(), answer(3).unwrap());
    is_refused(1);
    // One byte of the first answer is left to be sent.
    let rest = first.slice(6..);
    drop((first, second));
    assert_eq!((answer(3).unwrap().len(), &rest[..]), (3, &b"x"[..]));
    is_refused(4);
    drop(rest);
    assert_eq!(answer(10).unwrap().len(), 10);
}

#[test]
fn kubectl_shows_the_nodes_without_an_answer() {
    let refusal = |message: &str| Refusal::new(503, "ServiceUnavailable", message);
    let mut silent: BTreeMap<_, _> =
        (1..22).map(|node| (format!("n{node:02}"), refusal("no agent"))).collect();
    silent.insert("a".to_owned(), refusal("an \"é\"\n"));
    let warnings = warnings(&silent);
    let warnings: Vec<_> = warnings.iter().map(|text| text.to_str().unwrap()).collect();
    assert_eq!(warnings.len(), MOST_WARNINGS + 1);
    assert_eq!(warnings[..2], [r#"299 - "node a: an \"\u{e9}\"\n""#, r#"299 - "node n01: no agent""#]);
    assert_eq!(warnings[MOST_WARNINGS], r#"299 - "2 more nodes have not answered""#);
}
