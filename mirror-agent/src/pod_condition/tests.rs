//! Tests: what a pod is told, how often, and what the server's answers lead to.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, Ordering},
};

use mirror_core::coverage::Way;
use serde_json::Value;
use tokio::{sync::watch, time::sleep};

use super::*;
use crate::{
    model::{Device, Ended, IfIndex, MirrorId, TargetName},
    pods::kube::fake::{self, Reply},
    report::{Judged, Mirrors, NicCoverage},
    select::{Skipped, Unasked},
};

fn pod(name: &str) -> PodId {
    PodId { uid: format!("{name:-<36}"), namespace: "shop".into(), name: name.into() }
}

fn nic(of: &str, states: [State; 2]) -> NicCoverage {
    let judged = |state| Judged { state, since: Instant::now(), seen: 1, carried: 1 };
    NicCoverage {
        pod: pod(of),
        nic: "eth0".into(),
        device: "veth1".into(),
        directions: states.map(judged),
        inside: None,
    }
}

fn skipped(of: &str, why: Why) -> Skipped {
    Skipped { pod: Some(pod(of)), nic: Some("eth0".into()), mirror: None, why }
}

/// A report about pods that ask for a mirror, and their NICs.
fn report(pods: &[&str], nics: Vec<NicCoverage>, skipped: Vec<Skipped>) -> Report {
    Report {
        pods: Some(pods.iter().map(|name| (pod(name), None)).collect()),
        coverage: (1..).map(|index| Device::on_node(IfIndex(index))).zip(nics).collect(),
        skipped: skipped.into_iter().collect(),
        ..Report::default()
    }
}

#[test]
fn a_pod_is_told_the_worst_that_is_known() {
    const IDLE: State = State::Unknown(Doubt::Idle);
    const COVERED: State = State::Covered;
    let nics = vec![
        nic("covered", [COVERED, COVERED]),
        nic("idle", [COVERED, IDLE]),
        nic("unread", [COVERED, State::Unknown(Doubt::Unread)]),
        nic("bypassed", [State::Bypassed(Way::Peer), COVERED]),
        nic("two", [COVERED, COVERED]),
        nic("opted", [COVERED, COVERED]),
    ];
    let problems = vec![
        skipped("bypassed", Why::Bypassed(mirror_common::verdict::Direction::Ingress, Way::Peer)),
        skipped("two", Why::NoNic),
        skipped("two", Why::TapsInsideOff),
        skipped("opted", Why::OptedOut(crate::model::Place::Pod)),
    ];
    let names = ["covered", "idle", "unread", "bypassed", "two", "opted", "new"];
    let mut report = report(&names, nics, problems);
    report.pods.as_mut().unwrap().insert(pod("other"), Some(Unasked::NoRequest));
    let told = conditions(&report).unwrap();
    let of = |name| told[&pod(name)].as_ref().map(|told| (told.status, told.reason));
    assert_eq!(of("covered"), Some(("True", "Covered")));
    assert_eq!(of("idle"), Some(("True", "Tapped")));
    assert_eq!(of("unread"), Some(("Unknown", "NotProved")));
    assert_eq!(of("bypassed"), Some(("False", "Bypassed")));
    assert_eq!(of("two"), Some(("False", "TapsInsideOff")));
    assert!(told[&pod("two")].as_ref().unwrap().message.ends_with("(and 1 more)"), "{told:?}");
    assert_eq!(of("opted"), Some(("True", "Covered")));
    assert_eq!(of("new"), Some(("Unknown", "NotTapped")));
    assert_eq!(of("other"), None);
    assert_eq!(conditions(&Report { pods: None, ..report }), None);
}

/// The mirrors of pod `web`, each with its target and stage.
fn mirrors(of: &[(&str, &str, Stage)]) -> Mirrors {
    let mirror = |(name, target, stage): &(&str, &str, _)| {
        let target = TargetName(target.parse().unwrap());
        (MirrorId(name.parse().unwrap()), Mirrored { target, is_asked: true, stage: *stage })
    };
    [(pod("web"), of.iter().map(mirror).collect())].into()
}

/// `kubectl wait` must not succeed for a pod of which nothing is copied, and dashboards must not show it as mirrored.
#[test]
fn true_is_told_only_while_each_mirror_copies() {
    const IDLE: State = State::Unknown(Doubt::Idle);
    const OVER: Stage = Stage::Ended(Ended::Packets);
    let told = |states: [State; 2], of: &[(&str, &str, Stage)]| {
        let down = [(TargetName("ids".parse().unwrap()), "the device ids0 is down".to_owned())].into();
        let report =
            Report { mirrors: mirrors(of), down, ..report(&["web"], vec![nic("web", states)], vec![]) };
        let Condition { status, reason, message } =
            conditions(&report).unwrap().remove(&pod("web")).unwrap().unwrap();
        (status, reason, message)
    };
    let short = |states, of: &[_]| {
        let (status, reason, _) = told(states, of);
        (status, reason)
    };
    let covered = || [State::Covered, State::Covered];
    let (all, ids) = (("all", "default", Stage::Stands), ("ids", "ids", Stage::Stands));
    assert_eq!(short(covered(), &[all]), ("True", "Covered"));
    assert_eq!(short([IDLE, IDLE], &[all]), ("True", "Tapped"));

    // No program runs: an attempt has failed, or the pod's turn has not come.
    for states in [[State::NoHook, State::NoHook], [State::Covered, State::NoHook], [IDLE, State::NoHook]] {
        assert_eq!(short(states.clone(), &[]), ("Unknown", "NotTapped"));
        assert_eq!(short(states, &[all]), ("Unknown", "NotTapped"));
    }
    // The program runs at the node's end, and that inside the pod cannot be attached.
    let around = [State::Bypassed(Way::Peer), State::Covered];
    let (status, reason, message) = told(around, &[("all", "default", Stage::Coming)]);
    assert_eq!((status, reason), ("Unknown", "NotTapped"));
    assert!(message.starts_with("all is not in place on all NICs of the pod yet"), "{message}");

    let (status, reason, message) = told(covered(), &[all, ids]);
    assert_eq!((status, reason), ("False", "TargetDown"));
    assert_eq!(message, "not mirrored by ids: the target ids takes no copies: the device ids0 is down");

    // What has ended wants no copies.
    assert_eq!(short(covered(), &[all, ("ids", "ids", OVER)]), ("True", "Covered"));
    let (status, reason, message) = told(covered(), &[("all", "default", OVER), ("ids", "ids", OVER)]);
    assert_eq!((status, reason), ("False", "Ended"));
    assert_eq!(message, "no mirror of the pod goes on: its limit of packets has ended all");
}

/// What was sent to the server: the pod, and the body.
type Sent = Arc<Mutex<Vec<(String, Value)>>>;

/// A server whose pods have this condition, if any, or that answers with an error.
fn server(sent: &Sent, answer: impl Fn(&str) -> Result<Value, u16> + Send + Sync + 'static) -> Client {
    let sent = Arc::clone(sent);
    fake::client_with_bodies(move |request, body| {
        let path = request.uri().path().to_owned();
        let name =
            path.trim_start_matches("/api/v1/namespaces/shop/pods/").trim_end_matches("/status").to_owned();
        let reply = answer(&name);
        sent.lock().unwrap().push((name, body.clone()));
        match reply {
            Ok(conditions) => Reply::Object(
                json!({"apiVersion": "v1", "kind": "Pod", "metadata": {}, "status": {"conditions": conditions}}),
            ),
            Err(code) => Reply::Status(code),
        }
    })
}

fn take(sent: &Sent) -> Vec<(String, Value)> {
    std::mem::take(&mut *sent.lock().unwrap())
}

async fn after(seconds: u64) {
    sleep(Duration::from_secs(seconds)).await;
}

#[tokio::test(start_paused = true)]
async fn a_change_is_written_once_and_the_condition_goes_with_the_request() {
    let sent = Sent::default();
    let (reports, reader) = watch::channel(Arc::<Report>::default());
    tokio::spawn(write(server(&sent, |_| Ok(json!([]))), reader));
    after(10).await;
    assert_eq!(take(&sent), [], "no list of pods yet");
    let covered = || report(&["web"], vec![nic("web", [State::Covered, State::Covered])], vec![]);
    reports.send_replace(covered().into());
    after(10).await;
    let written = take(&sent);
    // What stands there was asked for first.
    assert_eq!((written.len(), &written[0].1), (2, &json!({})), "{written:?}");
    let (name, body) = &written[1];
    let condition = &body["status"]["conditions"][0];
    assert_eq!((name.as_str(), &body["metadata"]["uid"]), ("web", &json!(pod("web").uid)));
    assert_eq!((&condition["type"], &condition["status"]), (&json!("podmirror.io/Mirrored"), &json!("True")));
    let since = condition["lastTransitionTime"].clone();
    for _ in 0..100 {
        reports.send_replace(covered().into());
        after(1).await;
    }
    assert_eq!(take(&sent), [], "nothing has changed");

    // Another reason is no transition.
    reports.send_replace(
        report(&["web"], vec![nic("web", [State::Covered, State::Unknown(Doubt::Idle)])], vec![]).into(),
    );
    after(10).await;
    let written = take(&sent);
    assert_eq!(written[0].1["status"]["conditions"][0]["lastTransitionTime"], since, "{written:?}");
    let asked_no_more =
        Report { pods: Some([(pod("web"), Some(Unasked::NoRequest))].into()), ..Report::default() };
    reports.send_replace(asked_no_more.into());
    after(10).await;
    let written = take(&sent);
    assert_eq!((written.len(), &written[0].1["status"]), (1, &json!({})));
}

/// The agent before this one has written conditions. They are not written again, and go where nobody asks any more.
#[tokio::test(start_paused = true)]
async fn what_an_earlier_agent_has_written_is_carried_on() {
    let sent = Sent::default();
    let since = "2026-01-02T03:04:05Z";
    let stands = json!([{"type": "podmirror.io/Mirrored", "status": "True", "lastTransitionTime": since}]);
    let mut report = report(&["web"], vec![nic("web", [State::Covered, State::Covered])], vec![]);
    let pods = report.pods.as_mut().unwrap();
    pods.extend(["left", "never"].map(|name| (pod(name), Some(Unasked::NoRequest))));
    report.told = [pod("web"), pod("left")].into();
    let (_reports, reader) = watch::channel(Arc::new(report));
    tokio::spawn(write(server(&sent, move |_| Ok(stands.clone())), reader));
    after(60).await;
    let written = take(&sent);
    let of =
        |name: &str| written.iter().filter(|(of, _)| of == name).map(|(_, body)| body).collect::<Vec<_>>();
    assert_eq!(of("web")[1]["status"]["conditions"][0]["lastTransitionTime"], since);
    assert_eq!((of("left").len(), &of("left")[0]["status"]), (1, &json!({})));
    assert_eq!(of("never").len(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_cannot_be_written_does_not_hold_up_the_others() {
    let sent = Sent::default();
    let nics = ["bad", "gone", "web"].map(|name| nic(name, [State::Covered, State::Covered]));
    let (_reports, reader) = watch::channel(Arc::new(report(&["bad", "gone", "web"], nics.into(), vec![])));
    let client = server(&sent, |name| match name {
        "bad" => Err(422),
        "gone" => Err(404),
        _ => Ok(json!([])),
    });
    tokio::spawn(write(client, reader));
    after(3600).await;
    let written = take(&sent);
    let tries = |name: &str| written.iter().filter(|(of, _)| of == name).count();
    assert_eq!((tries("gone"), tries("web")), (1, 2));
    assert!((8..=20).contains(&tries("bad")), "{} tries in an hour", tries("bad"));
}

/// The first answer does not come, and then there is no right for ever: the administrator is told, once.
#[tokio::test(start_paused = true)]
async fn a_missing_right_is_told_once_whatever_failed_before() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let writer = Arc::new(log.reopen().unwrap());
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(writer).finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    let is_first = AtomicBool::new(true);
    let client = fake::client(move |_| match is_first.swap(false, Ordering::Relaxed) {
        true => Reply::Never,
        false => Reply::Status(403),
    });
    let covered = report(&["web"], vec![nic("web", [State::Covered, State::Covered])], vec![]);
    let (_reports, reader) = watch::channel(Arc::new(covered));
    tokio::spawn(write(client, reader));
    after(3600).await;
    let log = std::fs::read_to_string(log.path()).unwrap();
    let warnings: Vec<_> = log.lines().filter(|line| line.contains("WARN")).collect();
    assert!(matches!(warnings[..], [told] if told.contains("`patch` of `pods/status`")), "{log}");
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_changes_all_the_time_is_written_now_and_then() {
    let sent = Sent::default();
    let (reports, reader) = watch::channel(Arc::<Report>::default());
    tokio::spawn(write(server(&sent, |_| Ok(json!([]))), reader));
    for second in 0..100 {
        let state = if second % 2 == 0 { State::Covered } else { State::Unknown(Doubt::Unread) };
        reports.send_replace(report(&["web"], vec![nic("web", [State::Covered, state])], vec![]).into());
        after(1).await;
    }
    let writes = take(&sent).len();
    assert!((10..=22).contains(&writes), "{writes} in 100 s");
}
