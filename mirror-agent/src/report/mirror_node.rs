//! The node's `MirrorNode`: the state of the Mirrors, ClusterMirrors and MirrorTargets on this node.
//!
//! This module reads the loop's reports and the counters, and changes nothing on the node. The loop does not wait
//! for it. A change is written at once on a quiet node, and after at most [`PACE`] on any other. If only counters
//! have changed, the object is written once in [`COUNTS_PACE`]: a cluster of 5000 nodes with busy mirrors writes 83
//! objects a second. An unchanged report on a Mirror or MirrorTarget is written again once in [`REPEAT`], so that
//! the controller can distinguish it from the report of a node without an agent. The object is deleted with its
//! Node, and written again if the Node is created again.

mod summary;

use std::{sync::Arc, time::Duration};

use k8s_openapi::{
    api::authentication::v1::SelfSubjectReview, apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp,
};
use kube::{
    Api, Client, Resource as _,
    api::{GetParams, Patch, PatchParams, PostParams},
};
use mirror_api::{MirrorNode, MirrorNodeStatus};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::debug;

use self::summary::{Counts, summary};
use crate::{
    kernel::dataplane::readout::Reader,
    report::Reports,
    util::{backoff::Backoff, pace::Pace},
};

/// The average time between two writes under constant changes.
const PACE: Duration = Duration::from_secs(10);
/// The number of changes that are written at once after a quiet time.
const BURST: u32 = 4;
/// The shortest time between two writes: changes seldom come alone.
const SETTLE: Duration = Duration::from_secs(1);
/// The shortest time between two writes if only counters have changed.
const COUNTS_PACE: Duration = Duration::from_secs(60);
/// After this time without a write, a report on a Mirror or MirrorTarget is written again: a third of the time after
/// which it is stale.
const REPEAT: Duration = Duration::from_secs(300);
/// Interval for checking that the object still exists. The server answers from its cache.
const LOOK: Duration = Duration::from_secs(30);
/// The pauses after failed writes.
const BACKOFF: Backoff = Backoff::new(PACE, Duration::from_secs(300));
/// Timeout for the API server.
const PATIENCE: Duration = Duration::from_secs(10);
/// The field manager of server-side apply.
const MANAGER: &str = "mirror-agent";
/// The prefix of the token's claims about the node of its pod.
const NODE_CLAIM: &str = "authentication.kubernetes.io/node-";

/// The state in the API server.
struct Written {
    /// When counters were last compared with it.
    at: Instant,
    /// When it was sent.
    sent: Instant,
    status: MirrorNodeStatus,
    /// The same status without counters.
    bare: MirrorNodeStatus,
}

/// Writes the MirrorNode of `node` when it has changed. Returns when the loop ends.
pub async fn write(client: Client, node: String, reports: Reports, mut reader: Reader) {
    let counts = move || summary::counts(&mut reader);
    write_with(client, node, reports, counts).await;
}

async fn write_with(
    client: Client,
    node: String,
    mut reports: Reports,
    mut counts: impl FnMut() -> anyhow::Result<Counts>,
) {
    let (mut written, mut backoff, mut has_failed) = (None::<Written>, BACKOFF, false);
    let (mut next, mut pace) = (Instant::now(), Pace::new(PACE, BURST));
    let (mut looked, mut owner) = (Instant::now(), None);
    loop {
        tokio::select! {
            changed = reports.changed(), if !has_failed => if changed.is_err() { return },
            () = sleep_until(if has_failed { next } else { looked + LOOK }) => {}
        }
        sleep_until(next).await;
        let now = Instant::now();
        if now >= looked + LOOK {
            looked = now;
            let is_worth_it = written.as_ref().is_some_and(|written| !is_empty(&written.status));
            if is_worth_it && is_missing(&client, &node).await {
                written = None;
            }
        }
        let report = Arc::clone(&reports.borrow_and_update());
        if !report.is_listed {
            continue;
        }
        let bare = summary(&report, &Counts::default());
        let is_news = written.as_ref().is_none_or(|written| written.bare != bare);
        if !is_news && written.as_ref().is_some_and(|written| now < written.at + COUNTS_PACE) {
            continue;
        }
        // Without counters, the rest is still written.
        let status = summary(&report, &counts().unwrap_or_default());
        let is_told = |written: &Written| {
            written.status == status && (is_empty(&status) || now < written.sent + REPEAT)
        };
        if let Some(written) = written.as_mut().filter(|written| is_told(written)) {
            written.at = now;
            continue;
        }
        let answer = timeout(PATIENCE, put(&client, &node, &status, &mut owner)).await;
        has_failed = !matches!(answer, Ok(Ok(())));
        next = Instant::now() + SETTLE;
        match answer {
            Ok(Ok(())) => {
                written = Some(Written { at: now, sent: now, status, bare });
                backoff = BACKOFF;
                if is_news {
                    pace.take(now);
                }
                next = pace.next().map_or(next, |turn| turn.max(next));
            }
            // The cluster may lack the CRD, or the agent the right: both are logged by the reader of Mirrors.
            Ok(Err(error)) => {
                debug!(node, error = mirror_client::in_words(&error), "cannot write the MirrorNode");
            }
            Err(_) => debug!(node, "cannot write the MirrorNode: no answer"),
        }
        if has_failed {
            // The server may have applied the write nevertheless.
            written = None;
            next = Instant::now() + backoff.pause();
        }
    }
}

fn is_empty(status: &MirrorNodeStatus) -> bool {
    status.mirrors.is_empty() && status.targets.is_empty()
}

/// Whether the object was deleted. If the server does not answer, the next write will show it.
async fn is_missing(client: &Client, node: &str) -> bool {
    let api = Api::<MirrorNode>::all(client.clone());
    let answer = timeout(PATIENCE, api.get_metadata_with(node, &GetParams::any())).await;
    matches!(answer, Ok(Err(kube::Error::Api(error))) if error.code == 404)
}

/// Writes the status with the time. An object that does not exist is created first, with the Node as its owner, so that
/// it is deleted with the Node.
///
/// `owner` is the UID of the Node that owned the object that this agent created last. That object may have been deleted
/// with its Node, which has another UID when it is created again. The agent's token has the old UID until it is renewed,
/// and Kubernetes deletes an object with such an owner at once. So the next object has no owner.
async fn put(
    client: &Client,
    node: &str,
    status: &MirrorNodeStatus,
    owner: &mut Option<String>,
) -> kube::Result<()> {
    let api = Api::<MirrorNode>::all(client.clone());
    let apply = PatchParams::apply(MANAGER).force();
    let object = |metadata: Value| {
        json!({
            "apiVersion": MirrorNode::api_version(&()), "kind": MirrorNode::kind(&()), "metadata": metadata,
        })
    };
    let mut with_status = object(json!({ "name": node }));
    with_status["status"] = json!(status);
    with_status["status"]["lastReportTime"] = json!(Time(Timestamp::now()));
    let with_status = Patch::Apply(with_status);
    match api.patch_status(node, &apply, &with_status).await {
        Err(kube::Error::Api(error)) if error.code == 404 => {}
        answer => return answer.map(drop),
    }
    let uid = node_uid(client, node).await?.filter(|uid| owner.as_ref() != Some(uid));
    let reference = |uid: &String| json!({"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid});
    let owners: Vec<_> = uid.iter().map(reference).collect();
    let metadata = json!({ "name": node, "ownerReferences": owners });
    api.patch(node, &apply, &Patch::Apply(object(metadata))).await?;
    if uid.is_some() {
        *owner = uid;
    }
    api.patch_status(node, &apply, &with_status).await.map(drop)
}

/// The UID of the Node, from the token of the agent's pod. With other credentials, or without the right or
/// the API for a review, the object has no owner.
async fn node_uid(client: &Client, node: &str) -> kube::Result<Option<String>> {
    let api = Api::<SelfSubjectReview>::all(client.clone());
    let review = match api.create(&PostParams::default(), &SelfSubjectReview::default()).await {
        Err(kube::Error::Api(error)) if (403..=405).contains(&error.code) => return Ok(None),
        review => review?,
    };
    let extra = review.status.and_then(|status| status.user_info?.extra).unwrap_or_default();
    let claim = |word: &str| extra.get(&format!("{NODE_CLAIM}{word}"))?.first().cloned();
    Ok(claim("uid").filter(|_| claim("name").is_some_and(|name| name == node)))
}

#[cfg(test)]
mod tests;
