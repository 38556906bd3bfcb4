//! Kubernetes Events on pods: a pod is not mirrored, or not as requested; a mirror has begun or ended.
//!
//! This module reads the loop's reports and nothing else, and decides nothing about pods. An Event that cannot be
//! posted delays nothing else. The Event of a problem is refreshed, as a series, as long as the problem persists: API
//! servers delete Events after an hour by default. `kube::runtime::events` is not used: its Recorder names an Event by
//! the time, so that each agent would post its own, and it drops a series after six minutes. [`message`] is shared with
//! `controller`.

pub(crate) mod message;
mod news;
mod outbox;

use std::{
    collections::{BTreeMap, BTreeSet},
    future::pending,
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::{core::v1::ObjectReference, events::v1::Event};
use kube::{Api, Client, api::PostParams, core::Status};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::debug;

use self::{
    message::{Message, digest, refresh},
    news::News,
    outbox::{Outbox, Outcome, Post},
};
use crate::{
    model::PodId,
    report::{Report, Reports},
    select::{BadAnnotation, Skipped, Why},
};

/// `reportingController` of the agent's Events.
const CONTROLLER: &str = "podmirror.io/mirror-agent";
/// Timeout for the API server.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum number of Events on a pod at a time.
const MOST: usize = 8;

/// A fact for the author of a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Fact {
    pod: PodId,
    /// It is posted once. Otherwise it is a problem: a warning, refreshed as long as the fact holds.
    is_news: bool,
    reason: &'static str,
    note: String,
}

impl Fact {
    /// A digest that is stable across versions of the agent and of its compiler.
    fn digest(&self) -> u64 {
        let Self { pod: PodId { uid, namespace, name }, is_news: _, reason, note } = self;
        digest([uid, namespace, name, reason, note])
    }

    fn message(&self) -> Message {
        let Self { pod: PodId { uid, namespace, name }, is_news, reason, note } = self;
        Message {
            about: ObjectReference {
                api_version: Some("v1".into()),
                kind: Some("Pod".into()),
                namespace: Some(namespace.clone()),
                name: Some(name.clone()),
                uid: Some(uid.clone()),
                ..ObjectReference::default()
            },
            is_warning: !is_news,
            reason: (*reason).to_owned(),
            note: note.clone(),
        }
    }
}

/// Posts an Event for each problem in a report, and refreshes the Event as long as the report contains the problem.
/// Posts another one when mirrors of a pod have begun or ended. Never returns. `node` is the name of this agent's node.
///
/// An Event that could not be posted is retried at growing intervals, as long as the reports contain its fact.
pub async fn post(client: Client, node: String, mut reports: Reports) {
    let (mut outbox, mut news) = (Outbox::default(), News::default());
    let mut problems = BTreeSet::new();
    loop {
        tokio::select! {
            biased;
            changed = reports.changed() => {
                if changed.is_err() {
                    return;
                }
                let report = Arc::clone(&reports.borrow_and_update());
                problems = tellable(&report);
                news.set(&report, Instant::now());
            }
            () = until(news.next()) => {}
            (fact, post) = due(outbox.next()) => {
                let answer = post_one(&client, &fact, post, &node).await;
                outbox.note(&fact, answer, Instant::now());
                if !(fact.is_news && answer.ends_news()) {
                    continue;
                }
                news.note(&fact);
            }
        }
        let now = Instant::now();
        outbox.set(problems.iter().cloned().chain(news.settled(now)).collect(), now);
    }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => pending().await,
    }
}

/// Waits until the next Event is due.
async fn due(next: Option<(Fact, Post, Option<Instant>)>) -> (Fact, Post) {
    let Some((fact, post, at)) = next else { return pending().await };
    if at.is_some() {
        until(at).await;
    }
    (fact, post)
}

async fn post_one(client: &Client, fact: &Fact, post: Post, node: &str) -> Outcome {
    let api = Api::<Event>::namespaced(client.clone(), &fact.pod.namespace);
    let message = fact.message();
    let posted = async {
        match post {
            Post::Create => {
                api.create(&PostParams::default(), &message.event(CONTROLLER, node)).await.map(|_| 1)
            }
            Post::Refresh { count } => refresh(&api, &message.name(), count).await,
        }
    };
    let error = match timeout(PATIENCE, posted).await {
        Ok(Ok(count)) => return Outcome::Written { count },
        Ok(Err(error)) => error,
        Err(_) => return Outcome::Away,
    };
    let answer = answer(&error, post);
    let error = mirror_client::in_words(&error);
    debug!(pod = %fact.pod, reason = fact.reason, error, ?answer, "cannot post an Event");
    answer
}

/// Classifies an error for the Event.
fn answer(error: &kube::Error, post: Post) -> Outcome {
    let kube::Error::Api(status) = error else { return Outcome::Away };
    match (status.code, post) {
        (409, Post::Create) => Outcome::Exists,
        (404, Post::Refresh { .. }) => Outcome::Forgotten,
        // 404: the namespace no longer exists. 400, 422: the server rejects the object. 409: another client changed the
        // Event first.
        (400 | 404 | 409 | 422, _) => Outcome::NotNow,
        (403, _) if is_terminating(status) => Outcome::NotNow,
        // The agent may lack the right to update Events, and have only the right to create them.
        (403, Post::Refresh { .. }) => Outcome::NotNow,
        // 401 concerns this agent, the others concern the server.
        (401 | 429 | 500.., _) => Outcome::Away,
        _ => Outcome::Refused,
    }
}

/// Whether the namespace is being deleted, so that nothing can be created in it.
fn is_terminating(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    causes.into_iter().any(|cause| cause.reason == "NamespaceTerminating")
}

/// The facts of a report that concern the authors of pods. Left out: transient states while a pod starts, the fact that
/// the default does not apply to a pod on the host network, and the problems of ClusterMirrors, which concern the
/// administrator.
fn tellable(report: &Report) -> BTreeSet<Fact> {
    let skipped = report.skipped.iter();
    let skipped = skipped.filter(|skipped| !skipped.is_of_capture() && !skipped.is_of_cluster_mirror());
    let skipped = skipped.filter_map(|Skipped { pod, nic, mirror, why }| match why {
        Why::NoNetns
        | Why::NetnsUnreadable(_)
        | Why::NoNic
        | Why::NoSuchInterface
        | Why::NoSuchPod(_)
        | Why::TunnelInTunnel(_) => None,
        // The author has opted out, or has requested nothing.
        Why::OptedOut(_) | Why::NoRequest => None,
        // Every node has such pods, and users do not expect them to be mirrored.
        Why::HostNetwork { is_asked: false } => None,
        // Multus has not written the networks of the pod yet.
        Why::NoSuchNetwork { is_told: false, .. } => None,
        Why::HostNetwork { is_asked: true }
        | Why::NoSuchNetwork { is_told: true, .. }
        | Why::NoHostInterface(_)
        | Why::TapsInsideOff
        | Why::TooManyNics
        | Why::NoRelayDevice(_)
        | Why::TappedFor(_)
        | Why::MirrorInterface(_)
        | Why::BadSetting(..)
        | Why::Refused { .. }
        | Why::AnnotationsUnread(_)
        | Why::NamespaceExcluded
        | Why::NamespaceNotAllowed
        | Why::NoSuchTarget(_)
        | Why::TargetRefused(..)
        | Why::TargetNotAllowed(_)
        | Why::NoSuchNic
        | Why::Loopback
        | Why::NotEthernet
        | Why::TooManyMirrors
        | Why::NoRoom(_)
        | Why::FilterRefused(_)
        | Why::Hidden(..)
        | Why::Bypassed(..)
        | Why::Removed(_)
        | Why::Uncut(..) => {
            // One Event for each kind of NIC, without the NIC's name: a pod can choose any number of names.
            let is_of_kind = |why: &Why| {
                matches!(
                    why,
                    Why::NoHostInterface(_) | Why::TapsInsideOff | Why::TooManyNics | Why::NotEthernet
                )
            };
            let nic = nic.as_ref().filter(|_| !is_of_kind(why));
            let nic = nic.map_or_else(String::new, |nic| format!(" on {nic}"));
            let by = mirror.as_ref().map_or_else(String::new, |mirror| format!(" by {mirror}"));
            Some(Fact {
                pod: pod.clone()?,
                is_news: false,
                reason: why.name(),
                note: capitalized(&format!("{}{by}{nic}: {why}", why.effect())),
            })
        }
    });
    let bad = report.bad.iter().map(|bad| Fact {
        pod: bad.pod.clone(),
        is_news: false,
        reason: BadAnnotation::REASON,
        note: bad.to_string(),
    });
    let mut facts: BTreeSet<_> = skipped.chain(bad).collect();
    // A pod can create thousands of devices.
    let mut of_pod = BTreeMap::<_, usize>::new();
    facts.retain(|fact| {
        let number = of_pod.entry(fact.pod.clone()).or_default();
        *number += 1;
        *number <= MOST
    });
    facts
}

/// Capitalizes the first letter of a text.
fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

#[cfg(test)]
mod tests;
