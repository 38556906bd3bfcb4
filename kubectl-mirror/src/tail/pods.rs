//! Watches the selected pods and their nodes.

use std::{
    collections::{BTreeMap, BTreeSet},
    pin::Pin,
};

use anyhow::{Context as _, bail};
use futures_util::{Stream, StreamExt as _};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    core::Selector,
    runtime::{
        WatchStreamExt as _,
        watcher::{self, Event, watcher},
    },
};

use crate::{
    cluster::{Cluster, is_refusal},
    tell,
    workload::Selection,
};

/// The selected pods at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Seen {
    /// The pods that are assigned to a node, by UID: name and node.
    pods: BTreeMap<String, Placed>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Placed {
    name: String,
    node: String,
    /// The pod uses the host network, so it has no NIC of its own.
    is_of_host: bool,
}

impl Seen {
    /// The nodes of the pods that can be read.
    pub(super) fn nodes(&self) -> BTreeSet<String> {
        let pods = self.pods.values().filter(|pod| !pod.is_of_host);
        pods.map(|pod| pod.node.clone()).collect()
    }

    /// The changes since `before`, one line each.
    pub(super) fn news_since(&self, before: &Self) -> Vec<String> {
        let come = self.pods.iter().filter(|(uid, _)| !before.pods.contains_key(*uid)).map(|(_, pod)| {
            let why = if pod.is_of_host {
                "; it uses the network of its node, so its packets are not read"
            } else {
                ""
            };
            format!("pod {} is on node {}{why}", pod.name, pod.node)
        });
        let gone = before.pods.iter().filter(|(uid, _)| !self.pods.contains_key(*uid));
        come.chain(gone.map(|(_, pod)| format!("pod {} is gone", pod.name))).collect()
    }

    fn add(&mut self, pod: Pod, only: Option<&Vec<String>>) {
        let (Some(uid), Some(name)) = (pod.metadata.uid, pod.metadata.name) else { return };
        let phase = pod.status.and_then(|status| status.phase);
        let has_ended = phase.is_some_and(|phase| ["Succeeded", "Failed"].contains(&phase.as_str()));
        let spec = pod.spec.unwrap_or_default();
        match spec.node_name {
            Some(node) if !has_ended && only.is_none_or(|only| only.contains(&name)) => {
                let is_of_host = spec.host_network.unwrap_or(false);
                self.pods.insert(uid, Placed { name, node, is_of_host });
            }
            _ => drop(self.pods.remove(&uid)),
        }
    }
}

pub(super) struct Pods {
    events: Pin<Box<dyn Stream<Item = watcher::Result<Event<Pod>>> + Send>>,
    only: Option<Vec<String>>,
    seen: Seen,
    /// A list that is not complete yet.
    coming: Seen,
    /// The last failure that was printed.
    told: Option<String>,
}

impl Pods {
    pub(super) fn watch(selection: &Selection, cluster: &Cluster) -> anyhow::Result<Self> {
        let labels = Selector::try_from(selection.labels.clone());
        let labels =
            labels.map_err(|error| anyhow::anyhow!("{error}")).context("the selector of the workload")?;
        let mut config = watcher::Config::default().labels_from(&labels);
        if let Some([name]) = selection.pods.as_deref() {
            config = config.fields(&format!("metadata.name={name}"));
        }
        Ok(Self {
            events: watcher(cluster.own(), config).default_backoff().boxed(),
            only: selection.pods.clone(),
            seen: Seen::default(),
            coming: Seen::default(),
            told: None,
        })
    }

    /// Returns the pods when they have changed. Cancel safe.
    ///
    /// # Errors
    ///
    /// The user lacks the right to list the pods. Other failures are transient: they are printed, and the watch
    /// continues.
    pub(super) async fn next(&mut self) -> anyhow::Result<Seen> {
        loop {
            let before = self.seen.clone();
            match self.events.next().await {
                Some(Ok(event)) => self.note(event),
                Some(Err(watcher::Error::InitialListFailed(error))) if is_refusal(&error) => {
                    return Err(error).context("cannot list the pods");
                }
                Some(Err(error)) => {
                    let error =
                        format!("cannot follow the pods: {}; retrying", mirror_client::in_words(&error));
                    if self.told.as_ref() != Some(&error) {
                        tell(&error);
                        self.told = Some(error);
                    }
                }
                None => bail!("the watch of the pods has ended"),
            }
            if self.seen != before {
                return Ok(self.seen.clone());
            }
        }
    }

    fn note(&mut self, event: Event<Pod>) {
        let only = self.only.as_ref();
        match event {
            Event::Apply(pod) => self.seen.add(pod, only),
            Event::Delete(pod) => drop(pod.metadata.uid.and_then(|uid| self.seen.pods.remove(&uid))),
            Event::Init => self.coming = Seen::default(),
            Event::InitApply(pod) => self.coming.add(pod, only),
            Event::InitDone => {
                self.seen = std::mem::take(&mut self.coming);
                self.told = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(uid: &str, name: &str, node: Option<&str>, phase: &str) -> Pod {
        let mut pod = Pod::default();
        pod.metadata.uid = Some(uid.into());
        pod.metadata.name = Some(name.into());
        pod.spec.get_or_insert_default().node_name = node.map(str::to_owned);
        pod.status.get_or_insert_default().phase = Some(phase.into());
        pod
    }

    fn seen(pods: &[Pod]) -> Seen {
        let mut seen = Seen::default();
        pods.iter().for_each(|pod| seen.add(pod.clone(), None));
        seen
    }

    #[test]
    fn a_pod_that_is_made_anew_is_another_pod() {
        let before = seen(&[pod("1", "web", Some("a"), "Running"), pod("2", "db", None, "Pending")]);
        assert_eq!(before.nodes(), ["a".to_owned()].into());
        let after = seen(&[pod("3", "web", Some("b"), "Pending")]);
        assert_eq!(after.news_since(&before), ["pod web is on node b", "pod web is gone"]);
        assert_eq!(after.news_since(&after), Vec::<String>::new());
    }

    #[test]
    fn pods_without_packets_need_no_agent() {
        let mut host = pod("1", "host", Some("a"), "Running");
        host.spec.get_or_insert_default().host_network = Some(true);
        let seen = seen(&[host, pod("2", "done", Some("b"), "Succeeded"), pod("3", "new", None, "Pending")]);
        assert!(seen.nodes().is_empty());
        assert_eq!(
            seen.news_since(&Seen::default()),
            ["pod host is on node a; it uses the network of its node, so its packets are not read"]
        );
    }
}
