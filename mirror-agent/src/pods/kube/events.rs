//! Kubernetes Events on the pods that are not mirrored, or not as they ask: once a change.
//!
//! Reads the loop's reports and nothing else, decides nothing about pods, and an Event that cannot be posted holds up
//! nobody. Called by `cmd::run`.

mod outbox;

use std::{
    collections::{BTreeMap, BTreeSet},
    future::pending,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
    core::Status,
};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::debug;

use self::outbox::{Answer, Outbox};
use crate::{
    model::PodId,
    report::{Report, Reports},
    select::{Skipped, Why},
};

/// `reportingController` of our Events.
const CONTROLLER: &str = "podmirror.io/mirror-agent";
/// How long to wait for the API server.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most Events on a pod at a time.
const MOST: usize = 8;
/// Most bytes of a note that the API takes.
const NOTE_MAX: usize = 1024;

/// Something that the author of a pod should know.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Told {
    pod: PodId,
    reason: &'static str,
    note: String,
}

/// Posts an Event for whatever is new in a report, for ever. `node` names this agent among others.
///
/// What could not be posted is tried again at growing intervals, as long as it is to be told.
pub async fn post(client: Client, node: String, mut reports: Reports) {
    let mut outbox = Outbox::default();
    loop {
        tokio::select! {
            biased;
            changed = reports.changed() => {
                if changed.is_err() {
                    return;
                }
                let report = Arc::clone(&reports.borrow_and_update());
                outbox.set(tellable(&report));
            }
            told = due(outbox.next()) => {
                let answer = post_one(&client, &told, &node).await;
                outbox.note(&told, answer, Instant::now());
            }
        }
    }
}

/// Waits until it is time for what is next.
async fn due(next: Option<(Told, Option<Instant>)>) -> Told {
    match next {
        None => pending().await,
        Some((told, None)) => told,
        Some((told, Some(at))) => {
            sleep_until(at).await;
            told
        }
    }
}

async fn post_one(client: &Client, told: &Told, node: &str) -> Answer {
    let api = Api::<Event>::namespaced(client.clone(), &told.pod.namespace);
    let error = match timeout(PATIENCE, api.create(&PostParams::default(), &event(told, node))).await {
        Ok(Ok(_)) => return Answer::Done,
        Ok(Err(error)) => error,
        Err(_) => return Answer::Away,
    };
    let answer = answer(&error);
    debug!(pod = %told.pod, reason = told.reason, %error, ?answer, "cannot post an Event");
    answer
}

/// What an error says of the Event.
fn answer(error: &kube::Error) -> Answer {
    let kube::Error::Api(status) = error else { return Answer::Away };
    match status.code {
        // 409: it is there; 404: the namespace has gone; 400, 422: not what the server takes.
        400 | 404 | 409 | 422 => Answer::Done,
        403 if is_terminating(status) => Answer::Done,
        // 401 is about this agent, the others about the server.
        401 | 429 | 500.. => Answer::Away,
        _ => Answer::Refused,
    }
}

/// The namespace is being deleted, and takes nothing new.
fn is_terminating(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    causes.into_iter().any(|cause| cause.reason == "NamespaceTerminating")
}

/// What of a report the authors of pods should know. What passes by itself, as a pod starts, they need not, nor that
/// the default does not hold for a pod on the node's network.
fn tellable(report: &Report) -> BTreeSet<Told> {
    let skipped = report.skipped.iter().filter_map(|Skipped { pod, nic, mirror, why }| match why {
        Why::NoNetns | Why::NetnsUnreadable(_) | Why::NoNic | Why::NoSuchInterface => None,
        // Every node has some, and nobody expects them to be mirrored.
        Why::HostNetwork { is_asked: false } => None,
        Why::HostNetwork { is_asked: true }
        | Why::NoHostInterface(_)
        | Why::TappedFor(_)
        | Why::MirrorInterface(_)
        | Why::BadSetting(..)
        | Why::NamespaceExcluded
        | Why::NamespaceNotAllowed
        | Why::NoSuchTarget(_)
        | Why::TooManyMirrors
        | Why::NoRoom(_)
        | Why::Hidden(..) => {
            // Of a kind of NIC once: a pod can give each as many names as it likes.
            let nic = nic.as_ref().filter(|_| !matches!(why, Why::NoHostInterface(_)));
            let nic = nic.map_or_else(String::new, |nic| format!(" on {nic}"));
            let by = mirror.as_ref().map_or_else(String::new, |mirror| format!(" by {mirror}"));
            Some(Told {
                pod: pod.clone()?,
                reason: why.name(),
                note: format!("Not mirrored{by}{nic}: {why}"),
            })
        }
    });
    let bad = report.bad.iter().map(|bad| Told {
        pod: bad.pod.clone(),
        reason: "BadAnnotation",
        note: bad.to_string(),
    });
    let mut told: BTreeSet<_> = skipped.chain(bad).collect();
    // A pod can give itself thousands of devices.
    let mut of_pod = BTreeMap::<_, usize>::new();
    told.retain(|told| {
        let number = of_pod.entry(told.pod.clone()).or_default();
        *number += 1;
        *number <= MOST
    });
    told
}

/// Its name says what is told: so it is not told again by an agent that has been restarted.
fn event(told: &Told, node: &str) -> Event {
    let Told { pod: PodId { uid, namespace, name }, reason, note } = told;
    Event {
        metadata: ObjectMeta {
            name: Some(format!("podmirror-{:016x}", hash(told))),
            namespace: Some(namespace.clone()),
            ..ObjectMeta::default()
        },
        event_time: Some(MicroTime(Timestamp::now())),
        type_: Some("Warning".into()),
        reason: Some((*reason).into()),
        action: Some("Mirror".into()),
        note: Some(cut(note)),
        regarding: Some(ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Pod".into()),
            namespace: Some(namespace.clone()),
            name: Some(name.clone()),
            uid: Some(uid.clone()),
            ..ObjectReference::default()
        }),
        reporting_controller: Some(CONTROLLER.into()),
        reporting_instance: Some(node.into()),
        ..Event::default()
    }
}

fn hash(told: &Told) -> u64 {
    let mut hasher = DefaultHasher::new();
    told.hash(&mut hasher);
    hasher.finish()
}

/// The note, cut to what the API takes.
fn cut(note: &str) -> String {
    note[..note.floor_char_boundary(NOTE_MAX)].to_owned()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests panic")]

    use kube::core::Status;
    use serde_json::{Value, json};
    use tokio::{sync::watch, time::sleep};

    use super::{
        super::fake::{self, Reply},
        *,
    };
    use crate::{
        model::Place,
        select::{BadAnnotation, MIRROR, Problem},
        settings::SettingError,
    };

    fn pod(name: &str) -> PodId {
        PodId { uid: format!("uid-{name}"), namespace: "shop".into(), name: name.into() }
    }

    #[test]
    fn what_stays_wrong_is_told_and_what_passes_is_not() {
        let skip = |name, nic: Option<&str>, why| Skipped {
            pod: Some(pod(name)),
            nic: nic.map(Into::into),
            mirror: None,
            why,
        };
        let error = SettingError { key: "rate", value: "fast".into(), reason: "a number is missing".into() };
        let skipped = [
            skip("a", None, Why::HostNetwork { is_asked: true }),
            skip("system", None, Why::HostNetwork { is_asked: false }),
            skip("b", Some("net1"), Why::NoHostInterface("macvlan".into())),
            skip("c", None, Why::NoNetns),
            skip("d", None, Why::NoNic),
            skip("e", None, Why::BadSetting(Place::Pod, error)),
            Skipped { pod: None, nic: Some("eth9".into()), mirror: None, why: Why::NoSuchInterface },
        ];
        let bad = BadAnnotation {
            pod: pod("f"),
            place: Place::Pod,
            key: MIRROR.into(),
            value: "yes".into(),
            problem: Problem::Value,
        };
        let report = Report { skipped: skipped.into(), bad: [bad].into(), ..Report::default() };
        let told = tellable(&report);
        let told: Vec<_> = told.iter().map(|told| (told.pod.name.as_str(), told.reason)).collect();
        assert_eq!(
            told,
            [("a", "HostNetwork"), ("b", "NoHostInterface"), ("e", "BadSetting"), ("f", "BadAnnotation")]
        );
    }

    #[test]
    fn a_pod_with_many_devices_is_told_of_some() {
        let told = |why: fn(u32) -> Why| {
            let skip = |nic| Skipped {
                pod: Some(pod("a")),
                nic: Some(format!("eth{nic}")),
                mirror: None,
                why: why(nic),
            };
            let report = Report { skipped: (0..1000).map(skip).collect(), ..Report::default() };
            tellable(&report).into_iter().map(|told| told.note).collect::<Vec<_>>()
        };
        let note = "Not mirrored: an interface of kind \"macvlan\" has no veth end on the node to tap";
        assert_eq!(told(|_| Why::NoHostInterface("macvlan".into())), [note]);
        assert_eq!(told(|_| Why::TappedFor(pod("b"))).len(), MOST);
        assert_eq!(told(|nic| Why::NoHostInterface(format!("kind{nic}"))).len(), MOST);
    }

    #[test]
    fn the_same_is_told_under_the_same_name() {
        let told = |note: &str| Told { pod: pod("a"), reason: "BadSetting", note: note.into() };
        let name = |note| event(&told(note), "node").metadata.name.unwrap();
        assert_eq!(name("x"), name("x"));
        assert_ne!(name("x"), name("y"));
    }

    #[test]
    fn a_long_note_is_cut_between_characters() {
        let note = format!("{}é", "x".repeat(NOTE_MAX - 1));
        assert_eq!(cut(&note), "x".repeat(NOTE_MAX - 1));
        assert_eq!(cut("short"), "short");
    }

    #[test]
    fn what_will_never_be_taken_is_done_with_and_the_rest_is_told_apart() {
        let error = |code: u16, details: Value| {
            let status = json!({"status": "Failure", "message": "no", "code": code, "details": details});
            kube::Error::Api(Box::new(serde_json::from_value::<Status>(status).unwrap()))
        };
        let cause = |reason: &str| json!({"name": "shop", "causes": [{"reason": reason, "message": "no"}]});
        for code in [400, 404, 409, 422] {
            assert_eq!(answer(&error(code, Value::Null)), Answer::Done, "{code}");
        }
        assert_eq!(answer(&error(403, cause("NamespaceTerminating"))), Answer::Done);
        // A quota that is used up has no cause.
        for details in [Value::Null, json!({"kind": "events"}), cause("Other")] {
            assert_eq!(answer(&error(403, details)), Answer::Refused);
        }
        for code in [401, 429, 500, 503, 504] {
            assert_eq!(answer(&error(code, Value::Null)), Answer::Away, "{code}");
        }
        assert_eq!(answer(&kube::Error::LinesCodecMaxLineLengthExceeded), Answer::Away);
    }

    /// Pods that do not get what they ask for, each in a namespace of its name.
    fn report(names: &[&str]) -> Arc<Report> {
        let skipped = |name: &&str| Skipped {
            pod: Some(PodId { namespace: (*name).into(), ..pod(name) }),
            nic: None,
            mirror: None,
            why: Why::HostNetwork { is_asked: true },
        };
        Arc::new(Report { skipped: names.iter().map(skipped).collect(), ..Report::default() })
    }

    #[tokio::test(start_paused = true)]
    async fn events_are_posted_once_the_server_takes_them_with_or_without_news() {
        let start = Instant::now();
        let (posted, mut posts) = tokio::sync::mpsc::unbounded_channel();
        let client = fake::client(move |request| {
            let namespace = request.uri().path().split('/').nth(5).unwrap().to_owned();
            let second = start.elapsed().as_secs();
            posted.send((second, namespace.clone())).unwrap();
            match (second, namespace.as_str()) {
                (0..60, _) => Reply::Status(503),
                (60..200, "full") => Reply::Status(403),
                _ => Reply::Object(json!({"kind": "Event", "metadata": {"name": "it"}})),
            }
        });
        let (reports, reader) = watch::channel(report(&[]));
        let agent = tokio::spawn(post(client, "node".into(), reader));
        // Others come meanwhile, and one goes.
        for names in [&["gone"][..], &["gone", "full"], &["full", "shop"]] {
            reports.send(report(names)).unwrap();
            sleep(Duration::from_millis(400)).await;
        }
        sleep(Duration::from_secs(3600)).await;
        drop(reports);
        agent.await.unwrap();
        let mut seen = Vec::new();
        while let Ok((second, namespace)) = posts.try_recv() {
            seen.push(format!("{second} {namespace}"));
        }
        let while_away = ["0 gone", "1 full", "3 shop", "7 full", "15 shop", "31 full"];
        let afterwards = ["63 shop", "63 full", "71 full", "87 full", "119 full", "183 full", "311 full"];
        assert_eq!(seen, [&while_away[..], &afterwards].concat());
    }
}
