//! [`Inside`]: the devices inside the pods' network namespaces.
//!
//! This module finds the namespace of a pod by its processes where the source of pods does not name it, and enters a
//! namespace only if it must. It does not decide which of the devices is tapped (`select` does). `netlink` calls it for
//! each snapshot.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
};

use anyhow::{Context, bail};
use rtnetlink::Handle;

use super::{
    PodNetns,
    cache::{Cache, Veths, veths},
    is_momentary,
    procfs::Processes,
    socket::{connect, dump, give_nsid, nsid, serve},
};
use crate::{
    model::{IfIndex, Link, NetnsId, PodLinks},
    netns::{Namespaces, Netns, netns_id},
};

/// The devices inside each pod, by UID, or why they could not be read.
type Found = BTreeMap<String, Result<PodLinks, String>>;

/// Finds and reads the namespaces of pods.
pub(super) struct Inside {
    host: NetnsId,
    processes: Processes,
    cache: Cache,
    /// Where the processes of each pod were, by UID.
    homes: HashMap<String, NetnsId>,
    /// Where the namespaces that were found can be opened.
    namespaces: Namespaces,
}

/// The node's namespace, as one snapshot needs it.
struct Node<'a> {
    handle: &'a Handle,
    links: &'a BTreeMap<IfIndex, Link>,
    veths: HashMap<i32, Veths>,
}

impl Inside {
    /// For a node whose own network namespace is `host`.
    pub(super) fn new(host: NetnsId) -> Self {
        Self {
            host,
            processes: Processes::default(),
            cache: Cache::default(),
            homes: HashMap::new(),
            namespaces: Namespaces::default(),
        }
    }

    /// Where the namespaces of the last snapshot can be opened.
    pub(super) fn namespaces(&self) -> Namespaces {
        self.namespaces.clone()
    }

    /// Forgets the reading of a namespace in which a device was made or deleted: no event tells of that.
    pub(super) fn forget(&mut self, netns: NetnsId) {
        self.cache.forget(netns);
    }

    /// The devices inside `pods`, given those of the node, and a way to ask in the node's namespace.
    ///
    /// A problem of one pod is an error of that pod alone. A problem of the agent or the node fails the whole snapshot.
    pub(super) async fn read(
        &mut self,
        handle: &Handle,
        links: &BTreeMap<IfIndex, Link>,
        pods: &[PodNetns],
    ) -> anyhow::Result<Found> {
        if pods.iter().any(|pod| pod.path.is_none()) {
            self.processes.scan().context("cannot list the processes")?;
        }
        let node = Node { handle, links, veths: veths(links) };
        let mut found = Found::new();
        for pod in pods {
            let inside = match &pod.path {
                Some(path) => self.at(&node, path).await.map(Some),
                None => self.by_process(&node, &pod.uid).await,
            };
            match inside.transpose() {
                Some(Err(error)) if passes_by_itself(&error) => return Err(error),
                Some(inside) => {
                    found.insert(pod.uid.clone(), inside.map_err(|error| format!("{error:#}")));
                }
                None => {}
            }
        }
        self.cache.forget_unwanted();
        let read = found.values().filter_map(|inside| inside.as_ref().ok());
        self.namespaces.keep(&read.map(|inside| inside.netns.ino).collect());
        self.homes.retain(|uid, _| found.contains_key(uid));
        Ok(found)
    }

    /// The devices of the pod's namespace. It is the one that has processes of the pod and from which a veth leads to
    /// the node. If there is none, it is the namespace of the oldest process, or the reason why that cannot be read.
    /// `None` if no process of the pod runs.
    ///
    /// Some runtimes (CRI-O) keep no process between two runs of a container. So without a process the pod is still in
    /// its last namespace, as long as one of its veths is unchanged: a sandbox is not removed without its veths.
    async fn by_process(&mut self, node: &Node<'_>, uid: &str) -> anyhow::Result<Option<PodLinks>> {
        let (candidates, mut oldest) = match self.processes.namespaces(uid, self.host) {
            Ok(candidates) => (candidates, None),
            Err(error) => (Vec::new(), Some(Err(error))),
        };
        for candidate in candidates {
            let inside = self.at(node, &candidate.path()).await;
            let inside = match Processes::is_of(candidate.pid, uid) {
                Ok(true) => inside,
                // It has ended since the scan, and its pid may be another process's now.
                Ok(false) => continue,
                Err(error) => Err(error.into()),
            };
            match inside {
                Err(error) if passes_by_itself(&error) => return Err(error),
                Ok(inside) if inside.links.iter().any(|nic| inside.host_end(nic, node.links).is_some()) => {
                    self.homes.insert(uid.to_owned(), inside.netns);
                    return Ok(Some(inside));
                }
                inside => {
                    oldest.get_or_insert(inside);
                }
            }
        }
        let home = self.homes.get(uid).and_then(|home| self.cache.last(*home, &node.veths));
        match (home, oldest) {
            (Some(home), None | Some(Ok(_))) => Ok(Some(home)),
            (Some(home), Some(Err(error))) if !passes_by_itself(&error) => Ok(Some(stale(home, &error))),
            (_, oldest) => oldest.transpose(),
        }
    }

    /// The devices of the namespace whose file is at `path`. If they cannot be read: those of the last reading that
    /// still exist.
    async fn at(&mut self, node: &Node<'_>, path: &Path) -> anyhow::Result<PodLinks> {
        let of = || format!("network namespace {}", path.display());
        let id = netns_id(path).with_context(of)?;
        self.namespaces.note(id, path);
        if let Some(links) = self.cache.get(id, &node.veths) {
            return Ok(links.clone());
        }
        match self.enter(node, path).await.with_context(of) {
            Ok(links) => {
                self.cache.put(&links, &node.veths);
                Ok(links)
            }
            Err(error) if passes_by_itself(&error) => Err(error),
            Err(error) => match self.cache.last(id, &node.veths) {
                Some(last) => Ok(stale(last, &error)),
                None => Err(error),
            },
        }
    }

    async fn enter(&self, node: &Node<'_>, path: &Path) -> anyhow::Result<PodLinks> {
        let netns = Netns::open(path)?;
        let links = serve(netns.inside(connect).await?, async |handle| Ok(dump(handle).await?)).await?;
        let nsid = match nsid(node.handle, &netns).await? {
            None if netns.id() != self.host => give_nsid(node.handle, &netns).await?,
            nsid => nsid,
        };
        let lead_here =
            |veths: &HashMap<i32, Veths>| nsid.and_then(|nsid| veths.get(&nsid)).cloned().unwrap_or_default();
        let before = lead_here(&node.veths);
        if unread(&links, &before, &before).is_some() {
            // It may have gone since the node's devices were listed.
            let now = lead_here(&veths(&dump(node.handle).await?));
            if let Some(device) = unread(&links, &before, &now) {
                bail!(
                    "the interface at the other end of {device} cannot be read: what the kernel says of it is not understood"
                );
            }
        }
        Ok(PodLinks {
            netns: netns.id(),
            is_host: netns.id() == self.host,
            nsid,
            links: links.into_values().collect(),
            stale: None,
        })
    }
}

/// A veth of the node that led into a namespace before and after its `links` were read, but to none of these links.
///
/// A message that the decoder does not understand is left out of a dump. Such a device must not be taken for a device that
/// has gone.
fn unread<'a>(links: &BTreeMap<IfIndex, Link>, before: &'a Veths, after: &Veths) -> Option<&'a str> {
    let is_unread = |veth: &&_| {
        let (_, peer, _) = veth;
        after.contains(veth) && !links.contains_key(&IfIndex(*peer))
    };
    before.iter().find(is_unread).map(|(_, _, device)| device.as_str())
}

/// The last reading, with the reason why the namespace could not be read again.
fn stale(last: PodLinks, error: &anyhow::Error) -> PodLinks {
    PodLinks { stale: Some(format!("{error:#}")), ..last }
}

/// Whether the reason is a momentary one.
fn passes_by_itself(error: &anyhow::Error) -> bool {
    error.chain().filter_map(|cause| cause.downcast_ref()).any(is_momentary)
}

#[cfg(test)]
mod tests;
