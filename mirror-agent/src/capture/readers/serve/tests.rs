//! Tests: the bounds of a request, and the notes of a reader.

#![expect(clippy::unwrap_used, clippy::panic, reason = "tests panic")]

use serde_json::{from_str, from_value, json};
use tokio::sync::watch;

use super::*;
use crate::{
    model::{Directions, Name, ResourceId, TargetName},
    select::{Nics, NotCovered, Selected},
};

/// A request for the pods of a namespace with these settings.
fn request(settings: serde_json::Value) -> ReadRequest {
    let labels = json!({ "matchExpressions": [{ "key": "app", "operator": "In", "values": ["web"] }] });
    let pods = json!({ "namespace": "shop", "name": null, "labels": labels, "nics": ["eth0"] });
    from_value(json!({
        "of": { "pods": pods }, "direction": "Ingress", "settings": settings, "superFrames": false,
        "sinceSeconds": 60, "follow": false, "reader": "alice",
    }))
    .unwrap()
}

#[test]
fn a_request_reaches_the_loop_whole_and_within_the_longest_time() {
    let (_, reports) = watch::channel(Arc::new(Report::default()));
    let node = Node::new(reports, PathBuf::from("/bpf"), Duration::from_secs(3600));
    for (limits, duration) in [
        (json!(null), "1h"),
        (json!({ "duration": "2h" }), "1h"),
        (json!({ "duration": "5m", "packets": 10 }), "5m"),
    ] {
        let settings = json!({
            "filter": "tcp", "snapLength": 96, "rateLimit": { "bitsPerSecond": "100M" }, "limits": limits,
        });
        let tail::Subject { request, bpffs, since, .. } = node.subject(&request(settings)).unwrap();
        let Subject::Reader { of: ReadOf::Pods { namespace, name, labels, nics }, direction, settings } =
            request.of
        else {
            panic!("another subject");
        };
        assert_eq!((namespace.as_deref(), name), (Some("shop"), None));
        assert_eq!(labels.match_expressions.map(|all| all.len()), Some(1));
        assert_eq!((nics.unwrap(), direction), (vec!["eth0".to_owned()], Directions::Ingress));
        let texts = control::read(&settings).unwrap().texts();
        assert_eq!((texts["filter"].as_str(), texts["duration"].as_str()), ("tcp", duration));
        assert_eq!((texts["snaplen"].as_str(), texts["rate"].as_str()), ("96", "100Mbit"));
        assert_eq!(texts.contains_key("packets"), duration == "5m");
        let since = since.unwrap();
        assert_eq!((since.time, since.is_all, bpffs), (Duration::from_secs(60), true, PathBuf::from("/bpf")));
    }
    for wrong in [json!({ "filter": "tcp port" }), json!({ "snapLength": 1 })] {
        node.subject(&request(wrong)).unwrap_err();
    }
}

/// The report of a round in which a reader selects these pods. Those with a reason are not covered.
fn report(pods: &[(&str, Option<&'static str>)]) -> Arc<Report> {
    let id = |name: &str| PodId { uid: name.into(), namespace: "shop".into(), name: name.into() };
    let covered = pods.iter().filter(|(_, reason)| reason.is_none()).map(|(name, _)| id(name)).collect();
    let not_covered = pods.iter().filter_map(|(name, reason)| {
        Some(NotCovered {
            pod: id(name),
            nic: Some("eth0".into()),
            reason: (*reason)?,
            message: "why".into(),
        })
    });
    let of = Selected {
        id: ResourceId { namespace: Some("shop".into()), name: Name::default() },
        uid: String::new(),
        generation: 0,
        mirror: MirrorId::default(),
        refused: None,
        target: TargetName::default(),
        nics: Nics::default(),
        pods: pods.iter().map(|(name, _)| id(name)).collect(),
    };
    let coverage = Coverage { of, covered, not_covered: not_covered.collect() };
    Arc::new(Report { readers: [(RingId(4), coverage)].into(), ..Report::default() })
}

#[tokio::test(start_paused = true)]
async fn each_change_of_a_pod_is_told_once() {
    let (reports, watched) = watch::channel(report(&[("web", None), ("db", Some("OptedOut"))]));
    let (asks, mut asked) = mpsc::channel(1);
    let telling = tokio::spawn(tell(RingId(4), None, watched, asks));
    let mut next = async || match asked.recv().await.unwrap() {
        Ask::Notes(notes) => {
            let words = |note: &String| {
                let Finding { pod, nic, reason, .. } = from_str(note).unwrap();
                [pod.unwrap_or_default(), nic.unwrap_or_default(), reason].join(" ")
            };
            notes.iter().map(words).collect::<Vec<_>>()
        }
        Ask::Count => vec!["count".to_owned()],
        _ => panic!("another request"),
    };
    // The last one says that there are no more pods for now.
    assert_eq!(next().await, ["shop/db eth0 OptedOut", "shop/web  ", "  "]);
    reports.send_replace(report(&[("web", None), ("db", Some("OptedOut"))]));
    assert_eq!(next().await, ["count"]);
    reports.send_replace(report(&[("web", Some("Ended")), ("db", Some("OptedOut")), ("api", None)]));
    assert_eq!(next().await, ["shop/api  ", "shop/web eth0 Ended"]);
    reports.send_replace(report(&[("web", None)]));
    assert_eq!(next().await, ["shop/web  "]);
    assert_eq!(next().await, ["count"]);
    drop(asked);
    telling.await.unwrap();
}

/// Another reader has no place for its interface, either.
#[tokio::test(start_paused = true)]
async fn a_reader_of_an_interface_is_told_each_change_of_its_place() {
    let report = |numbers: &[u32]| {
        let skipped = numbers.iter().map(|number| Skipped {
            pod: None,
            nic: Some("eth0".into()),
            mirror: Some(MirrorId(Name::of_capture(*number))),
            why: Why::TooManyMirrors,
        });
        Arc::new(Report { skipped: skipped.collect(), ..Report::default() })
    };
    let (reports, watched) = watch::channel(report(&[3]));
    let (asks, mut asked) = mpsc::channel(1);
    let telling = tokio::spawn(tell(RingId(4), Some("eth0".to_owned()), watched, asks));
    let mut next = async || loop {
        if let Ask::Notes(notes) = asked.recv().await.unwrap() {
            break notes;
        }
    };
    for (numbers, reason) in [(&[3][..], ""), (&[3, 4], "TooManyMirrors"), (&[], "")] {
        reports.send_replace(report(numbers));
        let note: Finding = from_str(&next().await[0]).unwrap();
        assert_eq!((note.pod, note.nic.as_deref(), note.reason.as_str()), (None, Some("eth0"), reason));
    }
    drop(asked);
    telling.await.unwrap();
}
