//! Asks the agents of the nodes what they mirror: `mirror-agent status --output json` on each node.
//!
//! A node that does not answer has a reason in the place of its status. Only a right that the user lacks, which would be
//! the same at each node, is an end of all. `coverage` and `top` call it;
//! `save`, which asks the recorders, asks as many at a time.

use std::collections::BTreeSet;

use anyhow::{Context as _, bail};
use futures_util::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, api::ListParams};
use mirror_core::status::{NodeStatus, printable};
use serde::Serialize;
use tokio::time::Instant;

use crate::{
    agents::{self, Agents},
    cluster::{Cluster, lacks_right},
    exec, tell,
};

/// How many nodes are asked at a time.
pub(crate) const AT_A_TIME: usize = 8;

/// What a node has answered.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    /// The node.
    pub(crate) node: String,
    /// When.
    pub(crate) at: Instant,
    /// Its status, or why there is none.
    pub(crate) status: Result<NodeStatus, String>,
}

/// Asks the nodes with pods of this namespace, or all nodes with agents (`None`). The answers have the order of the nodes.
///
/// # Errors
///
/// Nobody could be asked.
pub(crate) async fn ask(cluster: &Cluster, scope: Option<&str>) -> anyhow::Result<Vec<Answer>> {
    let agents = agents::of_all(cluster).await.map_err(|error| with_right(error, cluster))?;
    if agents.is_empty() {
        bail!("there is no agent of podmirror in namespace {}; --agents names another one", cluster.agents);
    }
    let nodes = match scope {
        Some(namespace) => nodes_of(cluster, namespace).await?,
        None => agents.keys().cloned().collect(),
    };
    let asked = stream::iter(pairs(nodes, agents)).map(|(node, agent)| ask_one(cluster, node, agent));
    let answers: Vec<_> = asked.buffered(AT_A_TIME).collect().await;
    answers.into_iter().collect::<anyhow::Result<_>>().map_err(|error| with_right(error, cluster))
}

/// The error, with the right that the user lacks, if that is the reason.
pub(crate) fn with_right(error: anyhow::Error, cluster: &Cluster) -> anyhow::Error {
    match lacks_right(&error) {
        true => error.context(format!("this needs {}", exec::right(&cluster.agents))),
        false => error,
    }
}

/// A node that has not answered.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Unanswered {
    /// The node.
    pub(crate) node: String,
    /// Why not.
    pub(crate) why: String,
}

/// Tells which of the nodes that were asked have not answered.
///
/// # Errors
///
/// None of them has answered.
pub(crate) fn tell_unanswered(unanswered: &[Unanswered], asked: usize) -> anyhow::Result<()> {
    for Unanswered { node, why } in unanswered {
        tell(&format!("node {node}: {}", printable(why)));
    }
    match asked > 0 && unanswered.len() == asked {
        true => bail!("no node has answered"),
        false => Ok(()),
    }
}

/// Whether the pod is in the namespace, or there is no such limit.
pub(crate) fn is_within(scope: Option<&str>, namespace: &str) -> bool {
    scope.is_none_or(|scope| scope == namespace)
}

/// The nodes of the pods of a namespace.
async fn nodes_of(cluster: &Cluster, namespace: &str) -> anyhow::Result<BTreeSet<String>> {
    let api = Api::<Pod>::namespaced(cluster.client.clone(), namespace);
    let pods = api.list(&ListParams::default()).await;
    let pods = pods.with_context(|| format!("cannot list the pods of namespace {namespace}"))?;
    Ok(pods.items.into_iter().filter_map(|pod| pod.spec?.node_name).collect())
}

/// The nodes that are asked, with their agents.
fn pairs(nodes: BTreeSet<String>, mut agents: Agents) -> Vec<(String, Option<String>)> {
    let pair = |node: String| {
        let agent = agents.remove(&node).flatten();
        (node, agent)
    };
    nodes.into_iter().map(pair).collect()
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
    let ended = exec::run(&cluster.agent_pods(), agent, &["status", "--output", "json"]).await?;
    if ended.code != 0 {
        bail!("{}", ended.why());
    }
    serde_json::from_slice(&ended.stdout).context("its status cannot be read; its version may be another one")
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn the_nodes_of_the_pods_are_asked_also_those_without_an_agent() {
        let of = |text: &str| text.to_owned();
        let agents = [(of("a"), Some(of("agent-a"))), (of("b"), None), (of("c"), Some(of("agent-c")))];
        let nodes = ["a", "b", "d"].map(of);
        let asked = [(of("a"), Some(of("agent-a"))), (of("b"), None), (of("d"), None)];
        assert_eq!(pairs(nodes.into(), agents.into()), asked);
    }

    #[test]
    fn only_the_silence_of_all_nodes_is_a_failure() {
        let silent = Unanswered { node: "a".into(), why: "no agent".into() };
        tell_unanswered(&[], 0).unwrap();
        tell_unanswered(std::slice::from_ref(&silent), 2).unwrap();
        tell_unanswered(&[silent], 1).unwrap_err();
    }
}
