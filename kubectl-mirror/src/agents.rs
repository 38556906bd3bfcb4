//! Finds the agents: the pod of the ready agent of each node, according to the API server. Sends nothing to an agent.

use std::collections::BTreeMap;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;

use crate::{cluster::Cluster, exec::AGENT};

/// The label of the agents' pods.
pub(crate) const AGENTS: &str = "app.kubernetes.io/component=agent";

/// The agents' pods by node; `None`: no agent is ready there.
pub(crate) type Agents = BTreeMap<String, Option<String>>;

pub(crate) async fn of_node(cluster: &Cluster, node: &str) -> anyhow::Result<String> {
    let of_node = ListParams::default().fields(&format!("spec.nodeName={node}"));
    let agent = of(cluster, of_node).await?.remove(node).flatten();
    agent.with_context(|| missing(&cluster.agents))
}

pub(crate) async fn of_all(cluster: &Cluster) -> anyhow::Result<Agents> {
    of(cluster, ListParams::default()).await
}

async fn of(cluster: &Cluster, params: ListParams) -> anyhow::Result<Agents> {
    let pods = cluster.of_agents().list(&params.labels(AGENTS)).await;
    let pods = pods.with_context(|| format!("cannot list the agents in namespace {}", cluster.agents))?;
    Ok(by_node(&pods.items))
}

/// The message for a node without a ready agent.
pub(crate) fn missing(namespace: &str) -> String {
    format!("no ready podmirror agent there (namespace {namespace}; set another one with --agents)")
}

pub(crate) fn by_node(pods: &[Pod]) -> Agents {
    let mut agents = Agents::new();
    for pod in pods {
        let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()) else { continue };
        let agent = agents.entry(node).or_default();
        if is_ready(pod) {
            agent.clone_from(&pod.metadata.name);
        }
    }
    agents
}

/// Whether the agent's container is ready. The pod need not be: it can also have a recorder container, which may fail
/// on its own. An agent that is being deleted may be ready for a while.
fn is_ready(pod: &Pod) -> bool {
    let containers = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    let mut ready = containers.filter(|of| of.name == AGENT && of.ready);
    pod.metadata.deletion_timestamp.is_none() && ready.next().is_some()
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use serde_json::{Value, from_value, json};

    use super::*;

    fn container(name: &str, ready: bool) -> Value {
        json!({ "name": name, "ready": ready, "restartCount": 0, "image": "", "imageID": "" })
    }

    fn pod(name: &str, node: Option<&str>, ready: bool, deleted: Option<&str>) -> Pod {
        from_value(json!({
            "metadata": { "name": name, "deletionTimestamp": deleted },
            "spec": { "containers": [], "nodeName": node },
            "status": { "containerStatuses": [container("agent", ready)] },
        }))
        .unwrap()
    }

    #[test]
    fn a_node_has_the_agent_that_is_ready_and_stays() {
        let gone = Some("2026-01-01T00:00:00Z");
        let agents = by_node(&[
            pod("new", Some("a"), true, None),
            pod("old", Some("a"), true, gone),
            pod("starting", Some("b"), false, None),
            pod("pending", None, false, None),
        ]);
        assert_eq!(agents, [("a".to_owned(), Some("new".to_owned())), ("b".to_owned(), None)].into());
    }

    #[test]
    fn an_agent_is_ready_also_beside_a_recorder_that_fails() {
        let with_recorder = |agent, recorder| {
            let mut pod = pod("pod", Some("a"), agent, None);
            // The pod is ready if all of its containers are.
            pod.status = from_value(json!({
                "conditions": [{ "type": "Ready", "status": if agent && recorder { "True" } else { "False" } }],
                "containerStatuses": [container("recorder", recorder), container("agent", agent)],
            }))
            .unwrap();
            by_node(&[pod]).remove("a").unwrap()
        };
        assert_eq!(with_recorder(true, false).as_deref(), Some("pod"));
        assert_eq!(with_recorder(false, true), None);
    }
}
