//! Tests: the posted Events, their names, their rates, and the evaluation of the server's answers.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use kube::core::Status;
use serde_json::{Value, json};
use tokio::{sync::watch, time::sleep};

use super::*;
use crate::{
    model::{Place, ResourceId},
    select::{BadAnnotation, MIRROR, Problem},
    settings::SettingError,
    sources::kube::tests::fake::{self, Reply},
};

fn pod_id(name: &str) -> PodId {
    PodId { uid: format!("uid-{name}"), namespace: "shop".into(), name: name.into() }
}

#[test]
fn what_stays_wrong_is_told_and_what_passes_is_not() {
    let skip = |name, nic: Option<&str>, why| Skipped {
        pod: Some(pod_id(name)),
        nic: nic.map(Into::into),
        mirror: None,
        why,
    };
    // The author of a pod can change a Mirror of the namespace, but no ClusterMirror.
    let of_resource = |name, namespace: Option<&str>, why| {
        let namespace = namespace.map(str::to_owned);
        let mirror = ResourceId { namespace, name: "all".parse().unwrap() }.mirror();
        Skipped { mirror: Some(mirror), ..skip(name, None, why) }
    };
    let network = |is_told| Why::NoSuchNetwork { key: "fast.shop.ovn".into(), is_told };
    let error = SettingError { key: "rate", value: "fast".into(), reason: "a number is missing".into() };
    let skipped = [
        skip("a", None, Why::HostNetwork { is_asked: true }),
        skip("system", None, Why::HostNetwork { is_asked: false }),
        skip("b", Some("net1"), Why::NoHostInterface("macvlan".into())),
        skip("c", None, Why::NoNetns),
        skip("d", None, Why::NoNic),
        skip("e", None, Why::BadSetting(Place::Pod, error)),
        skip("g", None, network(true)),
        skip("h", None, network(false)),
        Skipped { pod: None, nic: Some("eth9".into()), mirror: None, why: Why::NoSuchInterface },
        of_resource("i", Some("shop"), Why::TooManyMirrors),
        of_resource("j", Some("shop"), Why::OptedOut(Place::Pod)),
        of_resource("k", None, Why::TooManyMirrors),
    ];
    let bad = BadAnnotation {
        pod: pod_id("f"),
        place: Place::Pod,
        key: MIRROR.into(),
        value: "yes".into(),
        problem: Problem::Value,
    };
    let report = Report { skipped: skipped.into(), bad: [bad].into(), ..Report::default() };
    let facts = tellable(&report);
    let facts: Vec<_> = facts.iter().map(|fact| (fact.pod.name.as_str(), fact.reason)).collect();
    assert_eq!(
        facts,
        [
            ("a", "HostNetwork"),
            ("b", "NoHostInterface"),
            ("e", "BadSetting"),
            ("f", "BadAnnotation"),
            ("g", "NoSuchNetwork"),
            ("i", "TooManyMirrors"),
        ]
    );
}

#[test]
fn a_pod_with_many_devices_is_told_of_some() {
    let notes = |why: fn(u32) -> Why| {
        let skip = |nic| Skipped {
            pod: Some(pod_id("a")),
            nic: Some(format!("eth{nic}")),
            mirror: None,
            why: why(nic),
        };
        let report = Report { skipped: (0..1000).map(skip).collect(), ..Report::default() };
        tellable(&report).into_iter().map(|fact| fact.note).collect::<Vec<_>>()
    };
    let note = "Not mirrored: an interface of kind \"macvlan\" has no veth peer on the node to tap";
    assert_eq!(notes(|_| Why::NoHostInterface("macvlan".into())), [note]);
    assert_eq!(notes(|_| Why::TappedFor(pod_id("b"))).len(), MOST);
    assert_eq!(notes(|nic| Why::NoHostInterface(format!("kind{nic}"))).len(), MOST);
}

#[test]
fn the_same_is_told_under_the_same_name_by_every_version_of_the_agent() {
    let fact = |pod: &str, note: &str| Fact {
        pod: pod_id(pod),
        is_news: false,
        reason: "BadSetting",
        note: note.into(),
    };
    let name = |pod, note| fact(pod, note).message().name();
    assert_eq!(name("a", "x"), "podmirror-80cdda601a520562");
    assert_ne!(name("a", "x"), name("a", "y"));
    // Texts that differ, but are equal when they are concatenated.
    assert_ne!(name("a", "bx"), name("ab", "x"));
}

#[test]
fn a_long_note_is_cut_between_characters() {
    let cut = |note: String| {
        let fact = Fact { pod: pod_id("a"), is_news: false, reason: "BadSetting", note };
        fact.message().event(CONTROLLER, "one").note.unwrap()
    };
    assert_eq!(cut(format!("{}é", "x".repeat(1023))), "x".repeat(1023));
    assert_eq!(cut("short".into()), "short");
}

#[test]
fn what_an_error_says_of_an_event() {
    use Outcome::{Away, Exists, Forgotten, NotNow, Refused};
    const REFRESH: Post = Post::Refresh { count: Some(3) };
    let error = |code: u16, details: Value| {
        let status = json!({"status": "Failure", "message": "no", "code": code, "details": details});
        kube::Error::Api(Box::new(serde_json::from_value::<Status>(status).unwrap()))
    };
    let cause = |reason: &str| json!({"name": "shop", "causes": [{"reason": reason, "message": "no"}]});
    for (code, created, refreshed) in [
        (400, NotNow, NotNow),
        (404, NotNow, Forgotten),
        (409, Exists, NotNow),
        (422, NotNow, NotNow),
        // For example, a quota is exhausted. The agent may have the right to create Events but not the right to change
        // them.
        (403, Refused, NotNow),
        (401, Away, Away),
        (429, Away, Away),
        (500, Away, Away),
        (503, Away, Away),
        (504, Away, Away),
    ] {
        let error = error(code, Value::Null);
        assert_eq!((answer(&error, Post::Create), answer(&error, REFRESH)), (created, refreshed), "{code}");
    }
    assert_eq!(answer(&error(403, cause("NamespaceTerminating")), Post::Create), NotNow);
    for details in [json!({"kind": "events"}), cause("Other")] {
        assert_eq!(answer(&error(403, details), Post::Create), Refused);
    }
    assert_eq!(answer(&kube::Error::LinesCodecMaxLineLengthExceeded, Post::Create), Away);
}

/// Pods that are not mirrored as requested, each in a namespace of its name.
fn report(names: &[&str]) -> Arc<Report> {
    let skipped = |name: &&str| Skipped {
        pod: Some(PodId { namespace: (*name).into(), ..pod_id(name) }),
        nic: None,
        mirror: None,
        why: Why::HostNetwork { is_asked: true },
    };
    Arc::new(Report { skipped: names.iter().map(skipped).collect(), ..Report::default() })
}

/// The Events of a server that deletes an Event an hour after its last change, by name: the time of that change, and
/// the Event.
#[derive(Default)]
struct Events(BTreeMap<String, (Instant, Value)>);

impl Events {
    fn answer(&mut self, method: &str, name: String, body: &Value) -> Reply {
        const TTL: Duration = Duration::from_secs(3600);
        self.0.retain(|_, (changed, _)| changed.elapsed() < TTL);
        let stands = self.0.get_mut(&name);
        let (changed, event) = match (method, stands) {
            ("POST", None) => self.0.entry(name).or_insert((Instant::now(), body.clone())),
            ("POST", Some(_)) => return Reply::Status(409),
            ("PATCH", Some(event)) => event,
            _ => return Reply::Status(404),
        };
        // A patch without changes is not written.
        if method == "PATCH" && *body != json!({}) {
            event["series"] = body["series"].clone();
            *changed = Instant::now();
        }
        Reply::Object(event.clone())
    }
}

/// A server's Events, and the method and the reason of each request.
type Server = Arc<std::sync::Mutex<(Events, Vec<String>)>>;

fn client(server: &Server) -> Client {
    let server = Arc::clone(server);
    fake::client_with_bodies(move |request, body| {
        let (events, posts) = &mut *server.lock().unwrap();
        let path = request.uri().path();
        let name = path.split('/').nth(7).or(body["metadata"]["name"].as_str()).unwrap().to_owned();
        posts.push(format!("{} {}", request.method(), body["reason"].as_str().unwrap_or("-")));
        events.answer(request.method().as_str(), name, body)
    })
}

#[tokio::test(start_paused = true)]
async fn an_event_is_there_as_long_as_it_holds_and_over_a_restart_of_the_agent() {
    let server = Server::default();
    let counts = || {
        let events = &server.lock().unwrap().0.0;
        let count = |(changed, event): &(Instant, Value)| {
            assert!(changed.elapsed() < Duration::from_secs(41 * 60));
            event["series"]["count"].as_i64().unwrap_or(1)
        };
        events.values().map(count).collect::<Vec<_>>()
    };
    let (reports, reader) = watch::channel(report(&["shop"]));
    let agent = tokio::spawn(post(client(&server), "node".into(), reader.clone()));
    reports.send(report(&["shop"])).unwrap();
    let mut last = 0;
    for minute in 1..24 * 60 {
        sleep(Duration::from_secs(60)).await;
        // Another round of the loop changes nothing.
        reports.send(report(&["shop"])).unwrap();
        let counts = counts();
        assert!(matches!(counts[..], [count] if count >= last), "minute {minute}: {counts:?} after {last}");
        last = counts[0];
    }
    assert!((36..=48).contains(&last), "{last} in a day");

    // The next agent continues the same Event, at once.
    drop(reports);
    agent.await.unwrap();
    server.lock().unwrap().1.clear();
    let (reports, reader) = watch::channel(report(&[]));
    let agent = tokio::spawn(post(client(&server), "node".into(), reader));
    reports.send(report(&["shop"])).unwrap();
    sleep(Duration::from_secs(1)).await;
    assert_eq!(counts(), [last + 1]);
    assert_eq!(server.lock().unwrap().1, ["POST HostNetwork", "PATCH -", "PATCH -"]);

    // An Event whose problem has passed expires.
    reports.send(report(&[])).unwrap();
    sleep(Duration::from_secs(3700)).await;
    assert_eq!(server.lock().unwrap().1.len(), 3);
    drop(reports);
    agent.await.unwrap();
}
