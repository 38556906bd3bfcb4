//! Requests the status of the nodes: `mirror-agent status --output json` on each node.
//!
//! A node that does not answer has a reason instead of a status. Only a missing right of the user, which would be the
//! same at each node, ends the command.

use std::{collections::BTreeSet, fmt};

use anyhow::{Context as _, bail};
use futures_util::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use mirror_core::status::{NodeStatus, printable};
use serde::Serialize;
use tokio::time::Instant;

use crate::{
    agents,
    cluster::{Cluster, lacks_right},
    exec, tell,
};

/// Maximum number of concurrent requests.
const AT_A_TIME: usize = 8;

#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) node: String,
    pub(crate) at: Instant,
    /// Its status, or the reason why there is none.
    pub(crate) status: Result<NodeStatus, String>,
}

/// Asks the nodes with pods of this namespace, or all nodes with agents (`None`). The answers are ordered by node.
///
/// # Errors
///
/// No node could be asked.
pub(crate) async fn ask(cluster: &Cluster, scope: Option<&str>) -> anyhow::Result<Vec<Answer>> {
    let mut agents = agents::of_all(cluster).await.map_err(|error| with_right(error, cluster))?;
    if agents.is_empty() {
        bail!("no podmirror agents found in namespace {}; set the namespace with --agents", cluster.agents);
    }
    let nodes = match scope {
        Some(namespace) => nodes_of(cluster, namespace).await?,
        None => agents.keys().cloned().collect(),
    };
    let asked = stream::iter(nodes).map(|node| {
        let agent = agents.remove(&node).flatten();
        ask_one(cluster, node, agent)
    });
    let answers: Vec<_> = asked.buffered(AT_A_TIME).collect().await;
    answers.into_iter().collect::<anyhow::Result<_>>().map_err(|error| with_right(error, cluster))
}

/// The error, with the missing right if that is the cause.
fn with_right(error: anyhow::Error, cluster: &Cluster) -> anyhow::Error {
    match lacks_right(&error) {
        true => error.context(format!("this requires {}", exec::right(&cluster.agents))),
        false => error,
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Unanswered {
    pub(crate) node: String,
    pub(crate) why: String,
}

impl fmt::Display for Unanswered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}: {}", self.node, printable(&self.why))
    }
}

/// Prints which of the `asked` nodes have not answered.
///
/// # Errors
///
/// None of them has answered.
pub(crate) fn tell_unanswered(unanswered: &[Unanswered], asked: usize) -> anyhow::Result<()> {
    unanswered.iter().for_each(|node| tell(&node.to_string()));
    match asked > 0 && unanswered.len() == asked {
        true => bail!("no node answered"),
        false => Ok(()),
    }
}

/// Whether the namespace is in the scope of the command.
pub(crate) fn is_within(scope: Option<&str>, namespace: &str) -> bool {
    scope.is_none_or(|scope| scope == namespace)
}

/// The nodes of the pods of a namespace.
async fn nodes_of(cluster: &Cluster, namespace: &str) -> anyhow::Result<BTreeSet<String>> {
    let pods = cluster.own::<Pod>().list(&ListParams::default()).await;
    let pods = pods.with_context(|| format!("cannot list the pods of namespace {namespace}"))?;
    Ok(pods.items.into_iter().filter_map(|pod| pod.spec?.node_name).collect())
}

/// Asks a node.
///
/// # Errors
///
/// The user lacks the right.
async fn ask_one(cluster: &Cluster, node: String, agent: Option<String>) -> anyhow::Result<Answer> {
    let status = match agent {
        None => Err(agents::missing(&cluster.agents)),
        Some(agent) => match status(cluster, &agent).await {
            Err(error) if lacks_right(&error) => return Err(error),
            status => status.map_err(|error| mirror_client::in_words(error.as_ref())),
        },
    };
    Ok(Answer { node, at: Instant::now(), status })
}

async fn status(cluster: &Cluster, agent: &str) -> anyhow::Result<NodeStatus> {
    let ended = exec::run(cluster, agent, &["status", "--output", "json"]).await?;
    if ended.code != 0 {
        bail!("{}", ended.why());
    }
    serde_json::from_slice(&ended.stdout)
        .context("cannot read its status, perhaps because it has another version than this plugin")
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn only_the_silence_of_all_nodes_is_a_failure() {
        let silent = Unanswered { node: "a".into(), why: "no agent".into() };
        tell_unanswered(&[], 0).unwrap();
        tell_unanswered(std::slice::from_ref(&silent), 2).unwrap();
        tell_unanswered(&[silent], 1).unwrap_err();
    }
}
