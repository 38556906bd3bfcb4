//! The pods whose packets are saved, and the nodes that may have them.
//!
//! A recorder knows pods by name, and has packets of deleted pods. So a pod given by name need not exist. A workload is
//! replaced by its present pods. A recorder does not know the workload of a deleted pod.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, anyhow};
use k8s_openapi::{api::core::v1::Pod, apimachinery::pkg::apis::meta::v1::LabelSelector};
use kube::{Api, api::ListParams, core::Selector};

use crate::{
    cli::SaveArgs,
    cluster::Cluster,
    tell,
    workload::{Kind, Selection},
};

/// Matches all pods of the namespace.
const ALL: &str = "*";

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Pods {
    /// The pods that are on a node, with the node.
    placed: BTreeMap<String, String>,
    /// The pods that can have been on any node.
    anywhere: BTreeSet<String>,
}

impl Pods {
    /// Finds the pods. A workload must exist; a pod need not.
    pub(super) async fn find(args: &SaveArgs, cluster: &Cluster) -> anyhow::Result<Self> {
        let mut pods = Self::default();
        let SaveArgs { workloads, selector, all_nodes, .. } = args;
        for workload in workloads {
            if workload.kind == Kind::Pod {
                let only = ListParams::default().fields(&format!("metadata.name={}", workload.name));
                let node = list(cluster, &only).await?.into_iter().find_map(|(_, node)| node);
                pods.add(workload.name.clone(), node, true);
            } else {
                let Selection { labels, .. } = workload.resolve(cluster).await?;
                pods.add_selected(&workload.to_string(), labels, cluster).await?;
            }
        }
        if let Some(labels) = selector {
            pods.add_selected("these labels", labels.0.clone(), cluster).await?;
        }
        if workloads.is_empty() && selector.is_none() {
            pods.anywhere.insert(ALL.to_owned());
        }
        if *all_nodes {
            pods.anywhere.extend(std::mem::take(&mut pods.placed).into_keys());
        }
        Ok(pods)
    }

    async fn add_selected(
        &mut self,
        workload: &str,
        labels: LabelSelector,
        cluster: &Cluster,
    ) -> anyhow::Result<()> {
        let labels = Selector::try_from(labels).map_err(|error| anyhow!("{workload}: {error}"))?;
        let selected = list(cluster, &ListParams::default().labels_from(&labels)).await?;
        tell(&format!(
            "{workload}: {} pods that exist now; name others, as in pod/NAME, or name none, for all of the namespace",
            selected.len()
        ));
        for (name, node) in selected {
            self.add(name, node, false);
        }
        Ok(())
    }

    /// Adds a pod. If it is on no node now and was given by name, it can have been on any.
    pub(super) fn add(&mut self, name: String, node: Option<String>, is_named: bool) {
        match node {
            Some(node) => drop(self.placed.insert(name, node)),
            None if is_named => drop(self.anywhere.insert(name)),
            None => {}
        }
    }

    /// The request for each node. `nodes` are those with agents.
    pub(super) fn by_node<'n>(
        &self,
        nodes: impl Iterator<Item = &'n String>,
    ) -> BTreeMap<String, BTreeSet<&str>> {
        let mut asked = BTreeMap::<_, BTreeSet<_>>::new();
        for (pod, node) in &self.placed {
            asked.entry(node.clone()).or_default().insert(pod.as_str());
        }
        if !self.anywhere.is_empty() {
            for node in nodes {
                asked.entry(node.clone()).or_default().extend(self.anywhere.iter().map(String::as_str));
            }
        }
        asked
    }

    /// The node of the pod, if no other node is asked for its packets.
    pub(super) fn only_node(&self, pod: &str) -> Option<&str> {
        self.placed.get(pod).map(String::as_str)
    }

    /// The names of the pods, without the placeholder for all pods.
    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        self.placed.keys().chain(self.anywhere.iter().filter(|pod| *pod != ALL))
    }
}

/// Lists the names of pods, and their nodes.
async fn list(cluster: &Cluster, params: &ListParams) -> anyhow::Result<Vec<(String, Option<String>)>> {
    let api = Api::<Pod>::namespaced(cluster.client.clone(), &cluster.namespace);
    let pods = api.list(params).await;
    let pods = pods.with_context(|| format!("cannot list the pods of namespace {}", cluster.namespace))?;
    let named = |pod: Pod| Some((pod.metadata.name?, pod.spec.and_then(|spec| spec.node_name)));
    Ok(pods.items.into_iter().filter_map(named).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_node_is_asked_for_what_it_can_have() {
        let of = |text: &str| text.to_owned();
        let nodes = [of("a"), of("b")];
        let mut pods = Pods::default();
        pods.add(of("web"), Some(of("a")), true);
        pods.add(of("pending"), None, false);
        // Its node has no agent.
        pods.add(of("lone"), Some(of("c")), false);
        let asked = |pods: &Pods| {
            let asked = pods.by_node(nodes.iter()).into_iter();
            asked
                .map(|(node, pods)| format!("{node}: {}", Vec::from_iter(pods).join(" ")))
                .collect::<Vec<_>>()
        };
        assert_eq!(asked(&pods), ["a: web", "c: lone"]);
        pods.add(of("gone"), None, true);
        assert_eq!(asked(&pods), ["a: gone web", "b: gone", "c: lone"]);
        assert_eq!(Vec::from_iter(pods.names()), ["lone", "web", "gone"]);
        assert_eq!(["web", "gone", "pending"].map(|pod| pods.only_node(pod)), [Some("a"), None, None]);
        let all = Pods { anywhere: [of(ALL)].into(), ..Pods::default() };
        assert_eq!((asked(&all), all.names().count()), (vec![of("a: *"), of("b: *")], 0));
    }
}
