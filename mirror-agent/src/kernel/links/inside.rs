//! [`Inside`]: the devices inside the pods' network namespaces.
//!
//! Finds the namespace of a pod by its processes if the source of pods does not name it, and enters a namespace only if
//! necessary. `select` decides which of the devices are tapped. `netlink` calls this module for each snapshot.

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
    kernel::netns::{Namespaces, Netns, netns_id},
    model::{IfIndex, Link, NetnsId, PodLinks},
};

/// The maximum number of devices of a pod that are read. Root in the pod can create any number.
const MOST: usize = 512;
/// The maximum number of NICs that are read individually because a veth of the node leads to them, in a pod with more
/// devices than [`MOST`].
const MOST_VETHS: usize = 64;
/// The NIC of the pod's default network, as nearly all CNIs name it.
const FIRST: &str = "eth0";

/// The context of an error while listing processes.
const CANNOT_LIST: &str = "cannot list the processes";

/// The devices inside each pod, or the reason why they could not be read, by UID.
type Found = BTreeMap<String, Result<PodLinks, String>>;

/// Finds and reads the namespaces of pods.
pub(super) struct Inside {
    host: NetnsId,
    processes: Processes,
    cache: Cache,
    /// The namespace of each pod's processes, by UID.
    homes: HashMap<String, NetnsId>,
    /// The paths of the namespaces that were found.
    namespaces: Namespaces,
}

/// The data of the node's namespace for one snapshot.
struct Node<'a> {
    handle: &'a Handle,
    links: &'a BTreeMap<IfIndex, Link>,
    veths: HashMap<i32, Veths>,
}

impl Inside {
    /// Creates an `Inside` for a node whose own network namespace is `host`.
    pub(super) fn new(host: NetnsId) -> Self {
        Self {
            host,
            processes: Processes::default(),
            cache: Cache::default(),
            homes: HashMap::new(),
            namespaces: Namespaces::default(),
        }
    }

    /// The paths of the namespaces of the last snapshot.
    pub(super) fn namespaces(&self) -> Namespaces {
        self.namespaces.clone()
    }

    /// Forgets the reading of a namespace in which a device was created or deleted: the kernel sends no event for that.
    pub(super) fn forget(&mut self, netns: NetnsId) {
        self.cache.forget(netns);
    }

    /// Returns the UIDs of those pods that have processes.
    pub(super) fn running(&mut self, uids: BTreeSet<String>) -> anyhow::Result<BTreeSet<String>> {
        if uids.is_empty() {
            return Ok(uids);
        }
        self.processes.scan().context(CANNOT_LIST)?;
        Ok(uids.into_iter().filter(|uid| self.processes.is_running(uid)).collect())
    }

    /// Reads the devices inside `pods`, given those of the node, and a connection in the node's namespace.
    ///
    /// A problem of one pod is an error of that pod only. A problem of the agent or the node fails the whole snapshot.
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

    /// Reads the devices of the pod's namespace: the one that has processes of the pod and from which a veth leads to
    /// the node. If there is none, it is the namespace of the oldest process, or the reason why that cannot be read.
    /// `None` if no process of the pod runs.
    ///
    /// Some runtimes (CRI-O) keep no process between two runs of a container. So a pod without a process is considered
    /// to be in its last namespace, as long as one of its veths is unchanged: a sandbox is removed only together with
    /// its veths. For a new agent, `select::keep_installed` does this by the installed taps.
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
                // The process has ended since the scan, and another process may have its pid now.
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

    /// Reads the devices of the namespace whose file is at `path`. If they cannot be read, returns those of the last
    /// reading that still exist.
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
            // The device may have been deleted since the node's devices were listed.
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

    /// Returns an empty, stale reading if the error names the namespace that could not be read; otherwise the text of
    /// the error.
    fn unread(&self, error: &anyhow::Error) -> Result<PodLinks, String> {
        let why = format!("{error:#}");
        let Some(Place { netns, .. }) = error.downcast_ref() else { return Err(why) };
        let (netns, is_host) = (*netns, *netns == self.host);
        Ok(PodLinks { netns, is_host, nsid: None, links: Vec::new(), stale: Some(why) })
    }
}

/// The namespace that an error refers to.
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

/// Returns a veth of the node that led into a namespace before and after its `links` were read, but to none of these
/// links.
///
/// The decoder omits a message that it does not understand from a dump. Such a device must not be considered deleted.
fn unread<'a>(links: &BTreeMap<IfIndex, Link>, before: &'a Veths, after: &Veths) -> Option<&'a str> {
    let is_unread = |veth: &&_| {
        let (_, peer, _) = veth;
        after.contains(veth) && !links.contains_key(&IfIndex(*peer))
    };
    before.iter().find(is_unread).map(|(_, _, device)| device.as_str())
}

/// Returns the last reading, with the reason why the namespace could not be read again.
fn stale(last: PodLinks, error: &anyhow::Error) -> PodLinks {
    PodLinks { stale: Some(format!("{error:#}; existing mirrors continue")), ..last }
}

/// Whether the reason is transient.
fn passes_by_itself(error: &anyhow::Error) -> bool {
    error.chain().filter_map(|cause| cause.downcast_ref()).any(is_momentary)
}

#[cfg(test)]
mod tests;
