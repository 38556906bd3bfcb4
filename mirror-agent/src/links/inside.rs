//! [`Inside`]: the devices inside the pods' network namespaces.
//!
//! This module finds the namespace of a pod by its processes where the source of pods does not name it, and enters a
//! namespace only if it must. It does not decide which of the devices is tapped (`select` does). `netlink` calls it for
//! each snapshot.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use mirror_core::exit;
use rtnetlink::Handle;

use super::{
    PodNetns,
    cache::{Cache, Veths, veths},
    is_momentary,
    list::{Listed, Named, list},
    procfs::Processes,
    socket::{give_nsid, nsid},
};
use crate::{
    model::{IfIndex, Link, NetnsId, PodLinks},
    netns::{Namespaces, Netns, netns_id},
};

/// Most devices of a pod that are looked at. Root in the pod can make any number.
const MOST: usize = 512;
/// Most NICs of a pod that are asked for because a veth of the node leads to them, where it has more devices.
const MOST_VETHS: usize = 64;
/// The NIC of the pod's first network, as nearly all CNIs name it.
const FIRST: &str = "eth0";

/// Why a look at the processes failed.
const CANNOT_LIST: &str = "cannot list the processes";

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

    /// Those of these pods that have processes, by UID.
    pub(super) fn running(&mut self, uids: BTreeSet<String>) -> anyhow::Result<BTreeSet<String>> {
        if uids.is_empty() {
            return Ok(uids);
        }
        self.processes.scan().context(CANNOT_LIST)?;
        Ok(uids.into_iter().filter(|uid| self.processes.is_running(uid)).collect())
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
            self.processes.scan().context(CANNOT_LIST)?;
        }
        let node = Node { handle, links, veths: veths(links) };
        let mut found = Found::new();
        for pod in pods {
            let inside = match &pod.path {
                Some(path) => self.at(&node, path, pod).await.map(Some),
                None => self.by_process(&node, pod).await,
            };
            match inside.transpose() {
                Some(Err(error)) if passes_by_itself(&error) => return Err(error),
                Some(inside) => {
                    found.insert(pod.uid.clone(), inside.or_else(|error| self.unread(&error)));
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
    async fn by_process(&mut self, node: &Node<'_>, pod: &PodNetns) -> anyhow::Result<Option<PodLinks>> {
        let uid = pod.uid.as_str();
        let (candidates, mut oldest) = match self.processes.namespaces(uid, self.host) {
            Ok(candidates) => (candidates, None),
            Err(error) => (Vec::new(), Some(Err(error))),
        };
        for candidate in candidates {
            let inside = self.at(node, &candidate.path(), pod).await;
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
    async fn at(&mut self, node: &Node<'_>, path: &Path, pod: &PodNetns) -> anyhow::Result<PodLinks> {
        let netns = netns_id(path).with_context(|| format!("network namespace {}", path.display()))?;
        self.namespaces.note(netns, path);
        if let Some(links) = self.cache.get(netns, &node.veths, &pod.nics) {
            return Ok(links.clone());
        }
        match self.enter(node, path, pod).await.context(Place { netns, path: path.to_owned() }) {
            Ok(links) => {
                self.cache.put(&links, &node.veths, &pod.nics);
                Ok(links)
            }
            Err(error) if passes_by_itself(&error) => Err(error),
            Err(error) => match self.cache.last(netns, &node.veths) {
                Some(last) => Ok(stale(last, &error)),
                None => Err(error),
            },
        }
    }

    async fn enter(&self, node: &Node<'_>, path: &Path, pod: &PodNetns) -> anyhow::Result<PodLinks> {
        let netns = Netns::open(path)?;
        let nsid = match nsid(node.handle, &netns).await? {
            None if netns.id() != self.host => give_nsid(node.handle, &netns).await?,
            nsid => nsid,
        };
        let lead_here = |veths: &HashMap<i32, Veths>| {
            let veths = nsid.and_then(|nsid| veths.get(&nsid)).into_iter().flatten();
            veths.take(MOST_VETHS).cloned().collect::<Veths>()
        };
        let before = lead_here(&node.veths);
        let indexes = before.iter().map(|(_, peer, _)| IfIndex(*peer)).chain([exit::IFINDEX]);
        let names = pod.nics.iter().map(String::as_str).chain([FIRST]);
        let names = names.map(|name| Named::Name(name.to_owned()));
        let named = indexes.map(Named::Index).chain(names).collect();
        let is_host = netns.id() == self.host;
        let most = if is_host { usize::MAX } else { MOST };
        let Listed { links, is_cut } = netns.inside(move || list(most, &named)).await?;
        if unread(&links, &before, &before).is_some() {
            // It may have gone since the node's devices were listed.
            let now = lead_here(&veths(&list(usize::MAX, &Default::default())?.links));
            if let Some(device) = unread(&links, &before, &now) {
                bail!(
                    "the interface at the other end of {device} cannot be read: what the kernel says of it is not understood"
                );
            }
        }
        let too_many = format!(
            "the pod has more than {MOST} interfaces, so only {FIRST}, those that annotations name, and the first {MOST_VETHS} \
             with a veth on the node are looked at"
        );
        Ok(PodLinks {
            netns: netns.id(),
            is_host,
            nsid,
            links: links.into_values().collect(),
            stale: is_cut.then_some(too_many),
        })
    }

    /// A namespace that is known, and cannot be read; or else the reason.
    fn unread(&self, error: &anyhow::Error) -> Result<PodLinks, String> {
        let why = format!("{error:#}");
        let Some(Place { netns, .. }) = error.downcast_ref() else { return Err(why) };
        let (netns, is_host) = (*netns, *netns == self.host);
        Ok(PodLinks { netns, is_host, nsid: None, links: Vec::new(), stale: Some(why) })
    }
}

/// The namespace that an error is about.
#[derive(Debug)]
struct Place {
    netns: NetnsId,
    path: PathBuf,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "network namespace {}", self.path.display())
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
    PodLinks { stale: Some(format!("{error:#}; what was mirrored before stays mirrored")), ..last }
}

/// Whether the reason is a momentary one.
fn passes_by_itself(error: &anyhow::Error) -> bool {
    error.chain().filter_map(|cause| cause.downcast_ref()).any(is_momentary)
}

#[cfg(test)]
mod tests;
