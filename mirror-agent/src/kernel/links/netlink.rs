//! [`Netlink`]: the devices as the kernel lists them over rtnetlink.
//!
//! It keeps no copy of the node's devices: a snapshot is a fresh dump, and an event only wakes the loop. `inside` reads
//! the pods. The reconcile loop calls this module.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    sync::Arc,
};

use anyhow::Context;
use mirror_common::verdict::Direction;
use mirror_core::{coverage::Carried, destination::Destination};
use rtnetlink::LinkUnspec;
use tokio::{sync::Notify, task::JoinSet};

use super::{
    LinkTable, NicPlace, PodNetns, addresses, counters, create, exit,
    inside::Inside,
    list::{Named, list, one},
    offloads, queue, route,
    socket::{connect, listen, os_error, serve, watch},
};
use crate::{
    kernel::netns::{Namespaces, Netns},
    model::{ALIAS, IfIndex, LinkChange, LinkSnapshot, TargetName},
};

/// The devices of the network namespace in which it was created.
pub struct Netlink {
    inside: Inside,
    /// The devices of the last snapshot.
    known: BTreeSet<Named>,
    /// The devices whose offloads a snapshot includes.
    mirrors: BTreeSet<String>,
    /// The addresses to which a snapshot includes the routes.
    remotes: BTreeSet<IpAddr>,
    shows_redirects: Option<bool>,
    changed: Arc<Notify>,
    /// The task that waits for events; it ends with this value.
    _events: JoinSet<()>,
}

impl Netlink {
    /// Starts to listen for changes in the calling thread's network namespace. Must be called in a tokio runtime, by a
    /// thread that stays in that namespace. The same applies to all later calls.
    pub fn new() -> anyhow::Result<Self> {
        let host = Netns::current().context("cannot open the node's network namespace")?.id();
        let changed = Arc::new(Notify::new());
        let first = listen(Arc::clone(&changed)).context("cannot listen for changes of network devices")?;
        let mut events = JoinSet::new();
        events.spawn(watch(first, Arc::clone(&changed)));
        Ok(Self {
            inside: Inside::new(host),
            known: BTreeSet::new(),
            mirrors: BTreeSet::new(),
            remotes: BTreeSet::new(),
            shows_redirects: None,
            changed,
            _events: events,
        })
    }

    /// The paths of the namespaces of the last snapshot's pods.
    pub fn namespaces(&self) -> Namespaces {
        self.inside.namespaces()
    }
}

impl LinkTable for Netlink {
    fn follow(&mut self, targets: &BTreeMap<TargetName, Destination>) {
        self.mirrors = targets.values().filter_map(Destination::device).map(str::to_owned).collect();
        self.remotes = targets.values().filter_map(|to| Some(to.tunnel()?.remote)).collect();
    }

    async fn snapshot(&mut self, pods: &[PodNetns]) -> anyhow::Result<LinkSnapshot> {
        serve(connect()?, async |handle| {
            // First, because the kernel assigns an id to a pod's namespace when it describes the node side of its veth.
            let mut host = list(usize::MAX, &self.known)?.links;
            self.known = host.keys().copied().map(Named::Index).collect();
            host.retain(|_, link| {
                if !self.mirrors.contains(&link.name) {
                    return true;
                }
                let offloads = offloads::read(&link.name);
                // It was deleted after it was listed.
                let is_gone = offloads.as_ref().is_err_and(is_gone);
                link.offloads = offloads.ok();
                !is_gone
            });
            let pods = self.inside.read(handle, &host, pods).await?;
            let mut routes = BTreeMap::new();
            for remote in &self.remotes {
                routes.insert(*remote, route::to(handle, *remote).await?);
            }
            let mirrors = host.values().filter(|link| self.mirrors.contains(&link.name));
            let ends = mirrors.flat_map(|link| [Some(link.ifindex.0), link.peer.map(|peer| peer.ifindex)]);
            let ends: BTreeSet<_> = ends.flatten().map(IfIndex).collect();
            let addresses = addresses::read(handle, &ends).await?;
            Ok(LinkSnapshot { host, pods, addresses, routes })
        })
        .await
        .context("cannot read the network devices")
    }

    fn running(&mut self, uids: BTreeSet<String>) -> anyhow::Result<BTreeSet<String>> {
        self.inside.running(uids)
    }

    async fn counters(
        &mut self,
        nics: &[NicPlace],
    ) -> anyhow::Result<Vec<Option<[Carried; Direction::COUNT]>>> {
        serve(connect()?, async |handle| Ok(counters::read(handle, nics).await)).await
    }

    fn shows_redirects(&mut self) -> bool {
        *self.shows_redirects.get_or_insert_with(counters::show_redirects)
    }

    async fn apply(&mut self, change: &LinkChange) -> anyhow::Result<()> {
        let done = serve(connect()?, async |handle| match change {
            LinkChange::CreateMirror { name, mtu, offloads } => {
                create::mirror(handle, name, *mtu, *offloads).await
            }
            LinkChange::CreateHub => create::hub(handle).await,
            LinkChange::CreateTunnel(device) => create::tunnel(handle, *device).await,
            LinkChange::SetUp(ifindex) => {
                let up = LinkUnspec::new_with_index(ifindex.0).up().build();
                let done = handle.link().change(up).execute().await.map_err(os_error);
                if done.is_ok()
                    && one(&Named::Index(*ifindex))?.is_some_and(|link| link.alias.as_deref() == Some(ALIAS))
                {
                    create::remove_multicast_route(handle, *ifindex).await?;
                }
                done.with_context(|| format!("cannot bring up the device with index {ifindex}"))
            }
            LinkChange::SetMtu(ifindex, mtu) => {
                let mtu_of = LinkUnspec::new_with_index(ifindex.0).mtu(*mtu).build();
                let done = handle.link().change(mtu_of).execute().await.map_err(os_error);
                done.with_context(|| {
                    format!("cannot set the MTU of the device with index {ifindex} to {mtu}")
                })
            }
            LinkChange::RemoveAddresses(ifindex) => addresses::remove(handle, *ifindex).await,
            LinkChange::SetOffloads(ifindex, on) => match one(&Named::Index(*ifindex))? {
                Some(link) => offloads::switch(&link.name, *on),
                None => Ok(()),
            },
            LinkChange::SetQueue(ifindex, true) => {
                let given = queue::give(handle, *ifindex).await;
                given.with_context(|| format!("cannot add a queue to the device with index {ifindex}"))
            }
            LinkChange::SetQueue(ifindex, false) => {
                let taken = queue::take(handle, *ifindex).await;
                taken.with_context(|| format!("cannot remove the queue of the device with index {ifindex}"))
            }
            LinkChange::CreateExit(netns, hub) => {
                let made = exit::make(handle, &self.inside.namespaces(), *netns, *hub).await;
                made.context("cannot create the relay device of a pod")
            }
            LinkChange::DeleteExit(netns) => {
                let deleted = exit::delete(&self.inside.namespaces(), *netns).await;
                deleted.context("cannot delete the relay device of a pod")
            }
            LinkChange::Delete(ifindex) => {
                let done = handle.link().del(ifindex.0).execute().await.map_err(os_error);
                done.with_context(|| format!("cannot delete the device with index {ifindex}"))
            }
        })
        .await;
        if let LinkChange::CreateExit(netns, _) | LinkChange::DeleteExit(netns) = change {
            self.inside.forget(*netns);
        }
        let is_made = matches!(
            change,
            LinkChange::CreateMirror { .. } | LinkChange::CreateHub | LinkChange::CreateTunnel(_)
        );
        match done {
            Err(error) if !is_made && error.downcast_ref().is_some_and(is_gone) => Ok(()),
            done => done,
        }
    }

    async fn changed(&mut self) {
        // A `Notify` keeps one wake-up for a late caller, and takes it back from a cancelled one.
        self.changed.notified().await;
    }
}

/// Whether the device does not exist, or no longer does.
fn is_gone(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENODEV)
}
