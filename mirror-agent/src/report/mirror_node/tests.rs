//! Tests: the contents, the rate and the size of the writes, and the reactions to the server's answers.

#![expect(clippy::unwrap_used, clippy::panic, reason = "tests panic")]

mod owner;

use std::sync::Mutex;

use mirror_api::{MirrorSummary, Packets};
use mirror_core::model::{Selector, TargetName, TargetResource};
use tokio::{
    sync::watch,
    time::{advance, sleep},
};

use super::*;
use crate::{
    model::{MirrorId, Name, PodId, ResourceId},
    report::Report,
    select::{Coverage, NotCovered, Selected},
    sources::kube::tests::fake::{self, Reply},
};

fn pod(name: &str) -> PodId {
    PodId { uid: format!("uid-{name}"), namespace: "shop".into(), name: name.into() }
}

/// A Mirror that selects `pods` pods and covers none of them.
fn mirror(name: &str, pods: usize) -> Coverage {
    let pods: Vec<_> = (0..pods).map(|number| pod(&format!("web-{number}"))).collect();
    let reason =
        |pod: &PodId| NotCovered { pod: pod.clone(), nic: None, reason: "NoNic", message: "é".repeat(1000) };
    Coverage {
        not_covered: pods.iter().map(reason).collect(),
        of: Selected {
            id: ResourceId { namespace: Some("shop".into()), name: name.parse().unwrap() },
            uid: "1".into(),
            generation: 2,
            mirror: MirrorId(Name::of_mirror(&name.parse().unwrap())),
            refused: None,
            target: TargetName::default(),
            nics: Default::default(),
            pods: pods.into_iter().collect(),
        },
        covered: Default::default(),
    }
}

fn target(name: &str, refused: Option<&str>) -> TargetResource {
    TargetResource {
        name: TargetName(name.parse().unwrap()),
        uid: "2".into(),
        generation: 4,
        created: 0,
        destination: refused.map_or_else(|| "ids0".parse(), |why| Err(why.to_owned())),
        namespaces: Selector::default(),
        max_rate: None,
    }
}

fn report(resources: Vec<Coverage>) -> Arc<Report> {
    Arc::new(Report { is_listed: true, resources, ..Report::default() })
}

#[test]
fn a_pod_is_covered_if_all_its_mirrors_cover_it() {
    let (web, db) = (pod("web"), pod("db"));
    let with = |name: &str, covered: &[&PodId]| Coverage {
        of: Selected { pods: [web.clone(), db.clone()].into(), ..mirror(name, 0).of },
        covered: covered.iter().map(|pod| (*pod).clone()).collect(),
        not_covered: Default::default(),
    };
    let refused = Coverage {
        of: Selected { refused: Some(("InvalidFilter", "spec.filter".into())), ..mirror("c", 0).of },
        ..mirror("c", 3)
    };
    let report = report(vec![with("a", &[&web, &db]), with("b", &[&web]), refused]);
    let packets = Packets { copied: 7, lost: 1 };
    let of_a = (Some("shop".to_owned()), report.resources[0].of.id.mirror());
    let expiration_time = Timestamp::from_second(77).ok().map(Time);
    let of_a_counted =
        MirrorSummary { packets, nics: 2, ended: 1, expiration_time, ..MirrorSummary::default() };
    let status = summary(&report, &Counts::from([(of_a, of_a_counted)]));
    assert_eq!((status.mirror_count, status.refused_count, status.more_mirrors), (3, 1, None));
    assert_eq!((status.pods.selected, status.pods.covered), (2, 1));
    let [a, b, c] = &status.mirrors[..] else { panic!("{status:?}") };
    assert_eq!((a.packets, a.nics, a.ended, a.pods.covered, a.observed_generation), (packets, 2, 1, 2, 2));
    assert_eq!(a.expiration_time.as_ref().unwrap().0.as_second(), 77);
    assert_eq!((b.packets, b.pods.covered, &b.expiration_time), (Packets::default(), 1, &None));
    assert_eq!((c.refused.as_ref().unwrap().reason.as_str(), c.uncovered.len()), ("InvalidFilter", 0));
}

#[test]
fn a_mirror_target_is_told_with_its_state() {
    let targets = vec![target("bad", Some("it has no address")), target("down", None), target("up", None)];
    // The node has its own target with the first name.
    let down = targets[..2].iter().map(|of| (of.name.clone(), "é".repeat(1000))).collect();
    let report = Report { targets, down, ..Report::default() };
    let status = summary(&report, &Counts::default());
    let [bad, down, up] = &status.targets[..] else { panic!("{status:?}") };
    assert_eq!((bad.refused.as_deref(), bad.down.as_deref()), (Some("it has no address"), None));
    assert_eq!((down.refused.as_deref(), down.down.as_ref().map(String::len)), (None, Some(512)));
    assert_eq!((up.name.as_str(), up.uid.as_str(), up.observed_generation), ("up", "2", 4));
    assert_eq!((&up.refused, &up.down, status.more_targets), (&None, &None, None));
}

/// The API server accepts objects of at most 1.5 MiB.
#[test]
fn a_status_has_a_bounded_size() {
    let resources = (0..300).map(|number| mirror(&format!("{number}{}", "m".repeat(40)), 250)).collect();
    let targets: Vec<_> =
        (0..100).map(|number| target(&format!("{number}{}", "t".repeat(40)), None)).collect();
    let down = targets.iter().map(|of| (of.name.clone(), "é".repeat(1000))).collect();
    let report = Report { targets, down, ..Report::clone(&report(resources)) };
    let status = summary(&report, &Counts::default());
    assert_eq!((status.targets.len(), status.more_targets), (64, Some(36)));
    assert_eq!((status.mirror_count, status.mirrors.len(), status.more_mirrors), (300, 200, Some(100)));
    assert_eq!((status.mirrors[0].uncovered.len(), status.mirrors[0].more_uncovered), (20, Some(230)));
    assert_eq!((status.mirrors[199].uncovered.len(), status.mirrors[199].more_uncovered), (0, Some(250)));
    let bytes = serde_json::to_vec(&status).unwrap().len();
    assert!(bytes < 340 << 10, "{bytes}");
}

/// A namespace with very many Mirrors gets no more room in the status than the other namespaces leave.
#[test]
fn namespaces_share_the_room_of_a_status() {
    let of = |namespace: Option<&str>, name: &str| {
        let mut of = mirror(name, 30);
        of.of.id.namespace = namespace.map(str::to_owned);
        of
    };
    let many =
        |namespace, count: usize| (0..count).map(move |number| of(namespace, &format!("m{number:03}")));
    let resources = many(None, 3)
        .chain(many(Some("aaa"), 300))
        .chain(many(Some("bank"), 2))
        .chain(many(Some("shop"), 40));
    let status = summary(&report(resources.collect()), &Counts::default());
    let told = |namespace: Option<&str>| {
        let of = status.mirrors.iter().filter(|mirror| mirror.namespace.as_deref() == namespace);
        let reasons = of.clone().map(|mirror| mirror.uncovered.len()).sum::<usize>();
        (of.count(), reasons)
    };
    assert_eq!((told(None), told(Some("bank"))), ((3, 60), (2, 40)));
    assert_eq!((told(Some("shop")), told(Some("aaa"))), ((40, 50), (155, 50)));
    assert_eq!((status.mirror_count, status.more_mirrors), (345, Some(145)));
    assert!(status.mirrors.is_sorted_by_key(|mirror| (mirror.namespace.clone(), mirror.name.clone())));
}

/// The requests sent to the server: method, path and body.
type Sent = Arc<Mutex<Vec<(String, String, Value)>>>;

/// A server that replies to a path with `answer`; `None` stands for an existing MirrorNode.
fn server(sent: &Sent, answer: impl Fn(&str) -> Option<Reply> + Send + Sync + 'static) -> Client {
    let sent = Arc::clone(sent);
    fake::client_with_bodies(move |request, body| {
        let path = request.uri().path().to_owned();
        let reply = answer(&path);
        sent.lock().unwrap().push((request.method().to_string(), path, body.clone()));
        let object =
            json!({"apiVersion": "podmirror.io/v1alpha1", "kind": "MirrorNode", "metadata": {"name": "one"}});
        reply.unwrap_or(Reply::Object(object))
    })
}

/// The paths of the writes.
fn paths(sent: &Sent) -> Vec<String> {
    let mut sent = std::mem::take(&mut *sent.lock().unwrap());
    sent.retain(|(method, ..)| method == "PATCH");
    let short = |path: String| path.trim_start_matches("/apis/podmirror.io/v1alpha1/").to_owned();
    sent.into_iter().map(|(method, path, _)| format!("{method} {}", short(path))).collect()
}

#[tokio::test(start_paused = true)]
async fn what_changes_is_written_and_not_too_often() {
    let sent = Sent::default();
    let client = server(&sent, |_| None);
    let (reports, reader) = watch::channel(Arc::<Report>::default());
    let copied = Arc::new(Mutex::new(0));
    let counted = Arc::clone(&copied);
    let counts = move || {
        let packets = Packets { copied: *counted.lock().unwrap(), lost: 0 };
        let of = (Some("shop".to_owned()), mirror("a", 0).of.id.mirror());
        Ok(Counts::from([(of, MirrorSummary { packets, nics: 1, ..MirrorSummary::default() })]))
    };
    tokio::spawn(write_with(client, "one".into(), reader, counts));
    let writes = async |seconds| {
        sleep(Duration::from_secs(seconds)).await;
        paths(&sent).len()
    };
    assert_eq!(writes(100).await, 0, "there is no list of pods yet");
    reports.send_replace(report(vec![]));
    assert_eq!(writes(1).await, 1, "at once");
    for number in 0..50 {
        reports.send_replace(report(vec![mirror("a", number % 2)]));
        sleep(Duration::from_secs(1)).await;
    }
    let many = paths(&sent).len();
    assert!((7..=9).contains(&many), "{many} in 50 s, including three that were saved up");
    assert!(writes(20).await <= 1);
    let many = writes(3600).await;
    assert!((10..=12).contains(&many), "{many} in an hour without news");
    // Only counters change.
    let mut many = 0;
    for _ in 0..600 {
        *copied.lock().unwrap() += 1;
        reports.send_replace(report(vec![mirror("a", 1)]));
        many += writes(1).await;
    }
    assert!((9..=11).contains(&many), "{many} in 10 minutes");
    reports.send_replace(report(vec![]));
    writes(20).await;
    assert_eq!(writes(3600).await, 0, "there is no Mirror");
    let targets = vec![target("up", None)];
    reports.send_replace(Arc::new(Report { targets, ..Report::clone(&report(vec![])) }));
    let many = writes(3600).await;
    assert!((10..=13).contains(&many), "{many} in an hour with a MirrorTarget");
}

/// A Mirror is created, and another one a second later.
#[tokio::test(start_paused = true)]
async fn the_first_changes_of_a_quiet_node_are_written_within_two_seconds() {
    let sent = Sent::default();
    let client = server(&sent, |_| None);
    let (reports, reader) = watch::channel(report(vec![]));
    reports.send_replace(report(vec![mirror("a", 1)]));
    tokio::spawn(write_with(client, "one".into(), reader, || Ok(Counts::default())));
    for mirrors in [2, 3, 4] {
        sleep(Duration::from_secs(2)).await;
        assert_eq!(paths(&sent).len(), 1, "{mirrors}");
        let all = (0..mirrors).map(|number| mirror(&format!("m{number}"), 1)).collect();
        reports.send_replace(report(all));
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_takes_nothing_is_asked_less_and_less() {
    let sent = Sent::default();
    let client = server(&sent, |_| Some(Reply::Status(403)));
    let (reports, reader) = watch::channel(report(vec![mirror("a", 1)]));
    reports.send_replace(report(vec![mirror("a", 2)]));
    tokio::spawn(write_with(client, "one".into(), reader, || Ok(Counts::default())));
    sleep(Duration::from_secs(3600)).await;
    let tries = paths(&sent).len();
    assert!((10..=20).contains(&tries), "{tries} in an hour");
}

/// A write fails, or the server applies it and its answer is lost. Before the agent retries, the old state returns.
#[tokio::test(start_paused = true)]
async fn a_state_that_returns_after_a_failed_write_is_written_again() {
    for failure in [Reply::Status(403), Reply::Never] {
        for pods in [0, 1] {
            let sent = Sent::default();
            let reply = Arc::new(Mutex::new(None::<Reply>));
            let of_server = Arc::clone(&reply);
            let client = server(&sent, move |_| of_server.lock().unwrap().clone());
            let (reports, reader) = watch::channel(Arc::<Report>::default());
            let state = |pods: usize| report(vec![mirror("a", pods); pods.min(1)]);
            reports.send_replace(state(pods));
            tokio::spawn(write_with(client, "one".into(), reader, || Ok(Counts::default())));
            sleep(Duration::from_secs(5)).await;
            *reply.lock().unwrap() = Some(failure.clone());
            reports.send_replace(state(2));
            sleep(Duration::from_secs(5)).await;
            *reply.lock().unwrap() = None;
            reports.send_replace(state(pods));
            // Beside a task that never rests, a sleep would not end.
            for _ in 0..30 {
                advance(Duration::from_secs(1)).await;
            }
            let selected: Vec<_> = {
                let mut sent = sent.lock().unwrap();
                let sent = sent.drain(..).filter(|(method, ..)| method == "PATCH");
                sent.map(|(.., body)| body["status"]["pods"]["selected"].as_u64()).collect()
            };
            assert_eq!(selected, [pods, 2, pods].map(|pods| Some(pods as u64)), "{failure:?}");
            sleep(Duration::from_secs(3600)).await;
            let many = paths(&sent).len();
            let expected = if pods == 0 { 0..=0 } else { 10..=13 };
            assert!(expected.contains(&many), "{many} in an hour after {failure:?}");
        }
    }
}
