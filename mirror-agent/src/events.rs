//! Kubernetes Events on the pods that are not mirrored, or not as they ask.
//!
//! This module reads the loop's reports and nothing else, and decides nothing about pods. An Event that cannot be
//! posted delays nothing else. An Event is refreshed, as a series, as long as it holds: API servers forget Events after
//! an hour by default. `kube::runtime::events` is not used: its Recorder names an Event by the time, so that each agent
//! would post its own, and it forgets a series after six minutes. Called by `cmd::run`.

mod outbox;

use std::{
    collections::{BTreeMap, BTreeSet},
    future::pending,
    sync::Arc,
    time::Duration,
};

use k8s_openapi::{
    api::{
        core::v1::ObjectReference,
        events::v1::{Event, EventSeries},
    },
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{ObjectMeta, Patch, PatchParams, PostParams},
    core::Status,
};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::debug;

use self::outbox::{Outbox, Outcome, Post};
use crate::{
    model::PodId,
    report::{Report, Reports},
    select::{Attachment, Skipped, Why},
};

/// `reportingController` of our Events.
const CONTROLLER: &str = "podmirror.io/mirror-agent";
/// How long to wait for the API server.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most Events on a pod at a time.
const MOST: usize = 8;
/// Most bytes of a note that the API takes.
const NOTE_MAX: usize = 1024;

/// A fact that the author of a pod should know.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Fact {
    pod: PodId,
    reason: &'static str,
    note: String,
}

impl Fact {
    /// The same for the same text, with every version of the agent and of its compiler.
    fn digest(&self) -> u64 {
        let Self { pod: PodId { uid, namespace, name }, reason, note } = self;
        let mut hasher = Sha256::new();
        for text in [uid, namespace, name, *reason, note.as_str()] {
            hasher.update(text.len().to_be_bytes());
            hasher.update(text);
        }
        let digest: [u8; 32] = hasher.finalize().into();
        let [a, b, c, d, e, f, g, h, ..] = digest;
        u64::from_be_bytes([a, b, c, d, e, f, g, h])
    }

    /// The name of its Event. An agent that has been restarted finds the Event of the agent before it.
    fn name(&self) -> String {
        format!("podmirror-{:016x}", self.digest())
    }
}

/// Posts an Event for each problem in a report, and refreshes the Event as long as the report holds the problem. Never
/// ends. `node` is the name by which this agent is known among others.
///
/// An Event that could not be posted is tried again at growing intervals, as long as the report holds its problem.
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
                outbox.set(tellable(&report), Instant::now());
            }
            (fact, post) = due(outbox.next()) => {
                let answer = post_one(&client, &fact, post, &node).await;
                outbox.note(&fact, answer, Instant::now());
            }
        }
    }
}

/// Waits until the next Event is due.
async fn due(next: Option<(Fact, Post, Option<Instant>)>) -> (Fact, Post) {
    let Some((fact, post, at)) = next else { return pending().await };
    if let Some(at) = at {
        sleep_until(at).await;
    }
    (fact, post)
}

async fn post_one(client: &Client, fact: &Fact, post: Post, node: &str) -> Outcome {
    let api = Api::<Event>::namespaced(client.clone(), &fact.pod.namespace);
    let posted = async {
        match post {
            Post::Create => api.create(&PostParams::default(), &event(fact, node)).await.map(|_| 1),
            Post::Refresh { count } => refresh(&api, &fact.name(), count).await,
        }
    };
    let error = match timeout(PATIENCE, posted).await {
        Ok(Ok(count)) => return Outcome::Stands { count },
        Ok(Err(error)) => error,
        Err(_) => return Outcome::Away,
    };
    let answer = answer(&error, post);
    debug!(pod = %fact.pod, reason = fact.reason, %error, ?answer, "cannot post an Event");
    answer
}

/// Raises the count in the series of an existing Event, which makes the server keep the Event. Returns the new count.
async fn refresh(api: &Api<Event>, name: &str, count: Option<i32>) -> kube::Result<i32> {
    let patch = async |change| api.patch(name, &PatchParams::default(), &Patch::Merge(change)).await;
    let before = match count {
        Some(count) => count,
        // An earlier agent has posted it. An empty patch changes nothing, and answers with the Event as it stands: so
        // the agent needs no right to read Events.
        None => patch(json!({})).await?.series.map_or(1, |series| series.count),
    };
    let count = before.saturating_add(1).max(2);
    let series = EventSeries { count, last_observed_time: MicroTime(Timestamp::now()) };
    patch(json!({ "series": series })).await.map(|_| count)
}

/// The meaning of an error for the Event.
fn answer(error: &kube::Error, post: Post) -> Outcome {
    let kube::Error::Api(status) = error else { return Outcome::Away };
    match (status.code, post) {
        (409, Post::Create) => Outcome::Exists,
        (404, Post::Refresh { .. }) => Outcome::Forgotten,
        // 404: the namespace has gone. 400, 422: the server does not accept the object. 409: another client changed the
        // Event first.
        (400 | 404 | 409 | 422, _) => Outcome::NotNow,
        (403, _) if is_terminating(status) => Outcome::NotNow,
        // The agent may have only the right to create them.
        (403, Post::Refresh { .. }) => Outcome::NotNow,
        // 401 is about this agent, the others about the server.
        (401 | 429 | 500.., _) => Outcome::Away,
        _ => Outcome::Refused,
    }
}

/// The namespace is being deleted, and takes nothing new.
fn is_terminating(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    causes.into_iter().any(|cause| cause.reason == "NamespaceTerminating")
}

/// The entries of a report that concern the authors of pods. A state that passes by itself while a pod starts is left
/// out, like the fact that the default does not hold for a pod on the node's network.
fn tellable(report: &Report) -> BTreeSet<Fact> {
    let skipped = report.skipped.iter().filter(|skipped| !skipped.is_of_capture());
    let skipped = skipped.filter_map(|Skipped { pod, nic, mirror, why }| match why {
        Why::NoNetns
        | Why::NetnsUnreadable(_)
        | Why::NoNic
        | Why::NoSuchInterface
        | Why::NoSuchPod(_)
        | Why::NotEthernet
        | Why::TunnelInTunnel(_) => None,
        // Every node has such pods, and users do not expect them to be mirrored.
        Why::HostNetwork { is_asked: false } => None,
        // Multus has not written the networks of the pod yet.
        Why::NoSuchNetwork(Attachment { is_told: false, .. }) => None,
        Why::HostNetwork { is_asked: true }
        | Why::NoSuchNetwork(Attachment { is_told: true, .. })
        | Why::NoHostInterface(_)
        | Why::TappedFor(_)
        | Why::MirrorInterface(_)
        | Why::BadSetting(..)
        | Why::NamespaceExcluded
        | Why::NamespaceNotAllowed
        | Why::NoSuchTarget(_)
        | Why::NoSuchNic
        | Why::TooManyMirrors
        | Why::NoRoom(_)
        | Why::FilterRefused(_)
        | Why::Hidden(..)
        | Why::Uncut(..) => {
            // Once for each kind of NIC, without the NIC's name: a pod can choose any number of names.
            let nic = nic.as_ref().filter(|_| !matches!(why, Why::NoHostInterface(_)));
            let nic = nic.map_or_else(String::new, |nic| format!(" on {nic}"));
            let by = mirror.as_ref().map_or_else(String::new, |mirror| format!(" by {mirror}"));
            Some(Fact {
                pod: pod.clone()?,
                reason: why.name(),
                note: capitalized(&format!("{}{by}{nic}: {why}", why.effect())),
            })
        }
    });
    let bad = report.bad.iter().map(|bad| Fact {
        pod: bad.pod.clone(),
        reason: "BadAnnotation",
        note: bad.to_string(),
    });
    let mut facts: BTreeSet<_> = skipped.chain(bad).collect();
    // A pod can give itself thousands of devices.
    let mut of_pod = BTreeMap::<_, usize>::new();
    facts.retain(|fact| {
        let number = of_pod.entry(fact.pod.clone()).or_default();
        *number += 1;
        *number <= MOST
    });
    facts
}

/// The text with a capital letter at its beginning.
fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

fn event(fact: &Fact, node: &str) -> Event {
    let Fact { pod: PodId { uid, namespace, name }, reason, note } = fact;
    Event {
        metadata: ObjectMeta {
            name: Some(fact.name()),
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

/// The note, cut to what the API takes.
fn cut(note: &str) -> String {
    note[..note.floor_char_boundary(NOTE_MAX)].to_owned()
}

#[cfg(test)]
mod tests;
