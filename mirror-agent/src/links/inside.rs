//! [`Inside`]: the devices inside the pods' network namespaces.
//!
//! It finds the namespace of a pod by its processes where nobody names it, and enters one only if it must. Which of
//! the devices is tapped it does not decide (`select` does). `netlink` calls it for each snapshot.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
};

use anyhow::Context;
use rtnetlink::Handle;

use super::{
    PodNetns,
    cache::{Cache, Veths, veths},
    is_momentary,
    netlink::{connect, dump, nsid, serve},
    netns::{Netns, netns_id},
    procfs::Processes,
};
use crate::{
    model::{IfIndex, Link, NetnsId, PodLinks},
    select::host_end,
};

/// What was found inside each pod, by UID; or why it could not be read.
type Found = BTreeMap<String, Result<PodLinks, String>>;

/// Finds and reads the namespaces of pods.
pub(super) struct Inside {
    host: NetnsId,
    processes: Processes,
    cache: Cache,
    /// Where the processes of each pod were, by UID.
    homes: HashMap<String, NetnsId>,
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
        Self { host, processes: Processes::default(), cache: Cache::default(), homes: HashMap::new() }
    }

    /// The devices inside `pods`, given those of the node, and a way to ask in the node's namespace.
    ///
    /// What is wrong with one pod is an error of that pod alone; what is wrong with us or the node, of all.
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
        self.homes.retain(|uid, _| found.contains_key(uid));
        Ok(found)
    }

    /// The devices of the namespace in which processes of the pod are and from which a veth leads to the node; if
    /// from none, of that with the oldest process. `None` if no process of the pod runs.
    ///
    /// Some runtimes (CRI-O) keep no process between two runs of a container. So before that the pod is where it was,
    /// while its veths are as they were: a sandbox is not removed without them.
    async fn by_process(&mut self, node: &Node<'_>, uid: &str) -> anyhow::Result<Option<PodLinks>> {
        let mut oldest = None;
        for candidate in self.processes.namespaces(uid, self.host)? {
            let inside = self.at(node, &candidate.path()).await;
            // It may have ended since the scan, and its pid may be another process's now.
            if !Processes::is_of(candidate.pid, uid)? {
                continue;
            }
            let inside = inside?;
            if inside.links.iter().any(|nic| host_end(nic, &inside, node.links).is_some()) {
                self.homes.insert(uid.to_owned(), inside.netns);
                return Ok(Some(inside));
            }
            oldest.get_or_insert(inside);
        }
        let home = self.homes.get(uid).and_then(|home| self.cache.last(*home, &node.veths));
        Ok(home.cloned().or(oldest))
    }

    /// The devices of the namespace whose file is at `path`.
    async fn at(&mut self, node: &Node<'_>, path: &Path) -> anyhow::Result<PodLinks> {
        let of = || format!("network namespace {}", path.display());
        if let Some(links) = self.cache.get(netns_id(path).with_context(of)?, &node.veths) {
            return Ok(links.clone());
        }
        let netns = Netns::open(path).with_context(of)?;
        let links = self.enter(node, &netns).await.with_context(of)?;
        self.cache.put(&links, &node.veths);
        Ok(links)
    }

    async fn enter(&self, node: &Node<'_>, netns: &Netns) -> anyhow::Result<PodLinks> {
        let links = serve(netns.inside(connect).await?, async |handle| Ok(dump(handle).await?)).await?;
        Ok(PodLinks {
            netns: netns.id(),
            is_host: netns.id() == self.host,
            nsid: nsid(node.handle, netns).await?,
            links: links.into_values().collect(),
        })
    }
}

/// Whether the reason is a momentary one.
fn passes_by_itself(error: &anyhow::Error) -> bool {
    error.chain().filter_map(|cause| cause.downcast_ref()).any(is_momentary)
}

#[cfg(test)]
mod tests {
    use std::io;

    use anyhow::anyhow;

    use super::*;

    #[test]
    fn want_of_resources_is_not_blamed_on_a_pod() {
        let with = |code| {
            let error = anyhow::Error::from(io::Error::from_raw_os_error(code));
            passes_by_itself(&error.context("network namespace /run/netns/web"))
        };
        for code in [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::ENOBUFS, libc::EINTR, libc::EAGAIN] {
            assert!(with(code), "{code}");
        }
        for code in [libc::ENOENT, libc::ESRCH, libc::EACCES, libc::EPERM, libc::EINVAL] {
            assert!(!with(code), "{code}");
        }
        // A pod that keeps adding and removing devices must not stop the others.
        assert!(!passes_by_itself(&io::Error::other("devices came or went").into()));
        assert!(!passes_by_itself(&anyhow!("the netlink socket failed")));
    }
}
