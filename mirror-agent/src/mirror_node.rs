//! The node's `MirrorNode`: what came of the Mirrors, ClusterMirrors and MirrorTargets on this node.
//!
//! This module reads the loop's reports and the counters, and changes nothing on the node. The loop does not wait for it.
//! A change is written after at most [`PACE`], and counters alone once in [`COUNTS_PACE`]: so a cluster of 5000 nodes with
//! busy mirrors writes 83 objects a second. A report on a Mirror or MirrorTarget is written again once in [`REPEAT`] without
//! news, so that the controller can tell it from the report of a node whose agent is gone. Called by `cmd::run`.

mod summary;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use k8s_openapi::{
    api::authentication::v1::SelfSubjectReview, apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp,
};
use kube::{
    Api, Client, Resource as _,
    api::{Patch, PatchParams, PostParams},
};
use mirror_api::{MirrorNode, MirrorNodeStatus};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::debug;

use self::summary::{Counts, summary};
use crate::{dataplane::readout::Reader, report::Reports};

/// The shortest time between two writes, and the first pause after a write that has failed.
const PACE: Duration = Duration::from_secs(10);
/// The shortest time between two writes if only counters have changed.
const COUNTS_PACE: Duration = Duration::from_secs(60);
/// After so long without a write, a report on a Mirror or MirrorTarget is written again. A third of the time after which
/// the controller does not count it any more.
const REPEAT: Duration = Duration::from_secs(300);
/// The longest pause after a write that has failed.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// How long to wait for the API server.
const PATIENCE: Duration = Duration::from_secs(10);
/// The field manager of server-side apply.
const MANAGER: &str = "mirror-agent";
/// Where a token says which node its pod runs on.
const NODE_CLAIM: &str = "authentication.kubernetes.io/node-";

/// The last state that was written.
struct Written {
    /// When counters were compared with it last.
    at: Instant,
    /// When it was sent.
    sent: Instant,
    status: MirrorNodeStatus,
    /// The same without counts.
    bare: MirrorNodeStatus,
}

/// Writes the MirrorNode of `node` when it has changed. Ends with the loop.
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
    let (mut written, mut pause, mut has_failed) = (None::<Written>, PACE, false);
    let mut next = Instant::now();
    loop {
        tokio::select! {
            changed = reports.changed(), if !has_failed => if changed.is_err() { return },
            () = sleep_until(if has_failed { next } else { Instant::now() + COUNTS_PACE }) => {}
        }
        sleep_until(next).await;
        let report = Arc::clone(&reports.borrow_and_update());
        if !report.is_listed {
            continue;
        }
        let bare = summary(&report, &BTreeMap::new());
        let now = Instant::now();
        let is_news = written.as_ref().is_none_or(|written| written.bare != bare);
        if !is_news && written.as_ref().is_some_and(|written| now < written.at + COUNTS_PACE) {
            continue;
        }
        // Without counters the rest is still worth telling.
        let status = summary(&report, &counts().unwrap_or_default());
        let is_empty = status.mirrors.is_empty() && status.targets.is_empty();
        let is_told =
            |written: &Written| written.status == status && (is_empty || now < written.sent + REPEAT);
        if let Some(written) = written.as_mut().filter(|written| is_told(written)) {
            written.at = now;
            continue;
        }
        let answer = timeout(PATIENCE, put(&client, &node, &status)).await;
        has_failed = !matches!(answer, Ok(Ok(())));
        match answer {
            Ok(Ok(())) => {
                written = Some(Written { at: now, sent: now, status, bare });
                pause = PACE;
            }
            // The cluster may lack the CRD, or the agent the right: both are logged where Mirrors are read.
            Ok(Err(error)) => {
                debug!(node, error = mirror_client::in_words(&error), "cannot write the MirrorNode");
            }
            Err(_) => debug!(node, "cannot write the MirrorNode: no answer"),
        }
        next = Instant::now() + pause;
        if has_failed {
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

/// Writes the status with the time, and makes the object first if there is none.
async fn put(client: &Client, node: &str, status: &MirrorNodeStatus) -> kube::Result<()> {
    let api = Api::<MirrorNode>::all(client.clone());
    let apply = PatchParams::apply(MANAGER).force();
    let object = |metadata: Value| {
        json!({
            "apiVersion": MirrorNode::api_version(&()), "kind": MirrorNode::kind(&()), "metadata": metadata,
        })
    };
    let mut with_status = object(json!({ "name": node }));
    with_status["status"] = json!(status);
    with_status["status"]["reported"] = json!(Time(Timestamp::now()));
    let with_status = Patch::Apply(with_status);
    match api.patch_status(node, &apply, &with_status).await {
        Err(kube::Error::Api(error)) if error.code == 404 => {}
        answer => return answer.map(drop),
    }
    let metadata = json!({ "name": node, "ownerReferences": owner(client, node).await });
    api.patch(node, &apply, &Patch::Apply(object(metadata))).await?;
    api.patch_status(node, &apply, &with_status).await.map(drop)
}

/// The node, as the owner of the object: so the object goes when the node goes. The token of the agent's pod says the
/// UID of the node. An agent with another way to prove itself writes an object without an owner.
async fn owner(client: &Client, node: &str) -> Vec<Value> {
    let api = Api::<SelfSubjectReview>::all(client.clone());
    let review = api.create(&PostParams::default(), &SelfSubjectReview::default()).await;
    let extra = review.ok().and_then(|review| review.status?.user_info?.extra).unwrap_or_default();
    let claim = |word: &str| extra.get(&format!("{NODE_CLAIM}{word}"))?.first().cloned();
    match (claim("name"), claim("uid")) {
        (Some(name), Some(uid)) if name == node => {
            vec![json!({"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid})]
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests;
