//! [`Netlink`]: the devices as the kernel lists them over rtnetlink.
//!
//! It keeps no copy of the node's devices: a snapshot is a fresh dump, an event only wakes. `inside` reads the pods.
//! The reconcile loop calls it.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    os::fd::{AsFd, AsRawFd},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, anyhow};
use futures_util::StreamExt;
use netlink_packet_core::{NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use rtnetlink::{
    Error, Handle, LinkUnspec, MulticastGroup,
    packet_route::{
        RouteNetlinkMessage,
        link::{LinkAttribute, LinkExtentMask, LinkMessage},
        nsid::{NsidAttribute, NsidMessage},
    },
    proto::Connection,
};
use tokio::{sync::Notify, task::JoinSet};
use tracing::error;

use super::{LinkTable, PodNetns, create, decode, inside::Inside, netns::Netns, offloads, queue};
use crate::model::{IfIndex, Link, LinkChange, LinkSnapshot};

/// Devices, tc filters and qdiscs, and ids of namespaces.
const EVENTS: [MulticastGroup; 3] = [MulticastGroup::Link, MulticastGroup::Tc, MulticastGroup::Nsid];

/// How long to wait before an event socket that could not be opened is tried again.
const REOPEN_AFTER: Duration = Duration::from_secs(1);

/// How often a dump is tried, when devices change while it runs.
const DUMP_ATTEMPTS: u32 = 16;

/// The devices of the network namespace that it was made in.
pub struct Netlink {
    inside: Inside,
    /// The devices whose offloads a snapshot includes.
    mirrors: BTreeSet<String>,
    changed: Arc<Notify>,
    /// The task that waits for events; it ends with this value.
    _events: JoinSet<()>,
}

impl Netlink {
    /// Starts to listen for changes in the calling thread's network namespace. Must be called in a tokio runtime, by
    /// a thread that stays in that namespace, as all later calls must be.
    pub fn new() -> anyhow::Result<Self> {
        let host = Netns::current().context("cannot open the node's network namespace")?.id();
        let changed = Arc::new(Notify::new());
        let first = listen(Arc::clone(&changed)).context("cannot listen for changes of network devices")?;
        let mut events = JoinSet::new();
        events.spawn(watch(first, Arc::clone(&changed)));
        Ok(Self { inside: Inside::new(host), mirrors: BTreeSet::new(), changed, _events: events })
    }

    /// Makes snapshots include the offloads of this device of the node. Can be called for several devices.
    #[must_use]
    pub fn with_offloads_of(mut self, mirror: &str) -> Self {
        self.mirrors.insert(mirror.to_owned());
        self
    }
}

impl LinkTable for Netlink {
    async fn snapshot(&mut self, pods: &[PodNetns]) -> anyhow::Result<LinkSnapshot> {
        serve(connect()?, async |handle| {
            // First, because the kernel gives a pod's namespace its id when it describes the host end of its veth.
            let mut host = dump(handle).await?;
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
            Ok(LinkSnapshot { host, pods })
        })
        .await
        .context("cannot read the network devices")
    }

    async fn apply(&mut self, change: &LinkChange) -> anyhow::Result<()> {
        let done = serve(connect()?, async |handle| match change {
            LinkChange::CreateMirror { name, mtu, offloads } => {
                create::mirror(handle, name, *mtu, *offloads).await
            }
            LinkChange::SetUp(ifindex) => {
                let up = LinkUnspec::new_with_index(ifindex.0).up().build();
                let done = handle.link().change(up).execute().await.map_err(os_error);
                done.with_context(|| format!("cannot bring up the device with index {ifindex}"))
            }
            LinkChange::SetMtu(ifindex, mtu) => {
                let mtu_of = LinkUnspec::new_with_index(ifindex.0).mtu(*mtu).build();
                let done = handle.link().change(mtu_of).execute().await.map_err(os_error);
                done.with_context(|| {
                    format!("cannot set the MTU of the device with index {ifindex} to {mtu}")
                })
            }
            LinkChange::SetOffloads(ifindex, on) => match dump(handle).await?.get(ifindex) {
                Some(link) => offloads::switch(&link.name, *on),
                None => Ok(()),
            },
            LinkChange::SetQueue(ifindex, true) => {
                let given = queue::give(handle, *ifindex).await;
                given.with_context(|| format!("cannot give a queue to the device with index {ifindex}"))
            }
            LinkChange::SetQueue(ifindex, false) => {
                let taken = queue::take(handle, *ifindex).await;
                taken.with_context(|| format!("cannot take the queue of the device with index {ifindex}"))
            }
            LinkChange::Delete(ifindex) => {
                let done = handle.link().del(ifindex.0).execute().await.map_err(os_error);
                done.with_context(|| format!("cannot delete the device with index {ifindex}"))
            }
        })
        .await;
        let is_made = matches!(change, LinkChange::CreateMirror { .. });
        match done {
            Err(error) if !is_made && error.downcast_ref().is_some_and(is_gone) => Ok(()),
            done => done,
        }
    }

    async fn changed(&mut self) {
        // A `Notify` keeps one wake-up for a caller that comes late, and takes it back from a caller that is cancelled.
        self.changed.notified().await;
    }
}

/// Whether there is no such device, or not any more.
fn is_gone(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ENODEV)
}

/// A connection that does the work while it is polled, and the handle to ask through.
type Connected = (Connection<RouteNetlinkMessage>, Handle);

/// Opens a socket in the calling thread's namespace.
pub(super) fn connect() -> io::Result<Connected> {
    let (mut connection, handle, _) = rtnetlink::new_connection()?;
    // The end of a dump says whether the dump failed half-way.
    connection.set_forward_done(true);
    Ok((connection, handle))
}

/// Runs `work` over a connection that lives no longer than `work`. So no socket keeps a pod's namespace alive, and a
/// failed socket is not used again.
pub(super) async fn serve<T>(
    (connection, handle): Connected,
    work: impl AsyncFnOnce(&Handle) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    tokio::select! {
        outcome = work(&handle) => outcome,
        () = connection => Err(anyhow!("the netlink socket failed")),
    }
}

/// Opens an event socket. The future wakes on every event, and ends when the socket fails.
///
/// The contents of the events are ignored: a snapshot gives better information, also after an overrun of the socket,
/// which is an event too.
fn listen(changed: Arc<Notify>) -> io::Result<impl Future<Output = ()> + Send + use<>> {
    let (connection, _, events) = rtnetlink::new_multicast_connection(&EVENTS)?;
    Ok(async move {
        let wake = events.for_each(|_| {
            changed.notify_one();
            std::future::ready(())
        });
        tokio::join!(connection, wake);
    })
}

/// Listens for ever.
async fn watch(first: impl Future<Output = ()>, changed: Arc<Notify>) {
    first.await;
    loop {
        error!("the socket for changes of network devices failed; opening it again");
        match listen(Arc::clone(&changed)) {
            Ok(listening) => {
                // Changes before this moment were not heard.
                changed.notify_one();
                listening.await;
            }
            Err(error) => {
                error!(%error, "cannot listen for changes of network devices; trying again soon");
                tokio::time::sleep(REOPEN_AFTER).await;
            }
        }
    }
}

/// All devices of the handle's namespace.
pub(super) async fn dump(handle: &Handle) -> io::Result<BTreeMap<IfIndex, Link>> {
    let mut question = LinkMessage::default();
    question.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
    for _ in 0..DUMP_ATTEMPTS {
        let question = RouteNetlinkMessage::GetLink(question.clone());
        let replies = ask(handle, question, NLM_F_REQUEST | NLM_F_DUMP).await?;
        // Kernels before 6.10 can leave out a device when others come or go while they list them. A tap would be
        // removed for it.
        if replies.iter().any(|reply| reply.header.flags & NLM_F_DUMP_INTR != 0) {
            continue;
        }
        return Ok(replies
            .into_iter()
            .filter_map(|reply| match reply.payload {
                NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewLink(message)) => {
                    Some(decode::link(message))
                }
                _ => None,
            })
            .map(|link| (link.ifindex, link))
            .collect());
    }
    Err(io::Error::other(format!(
        "devices came or went during each of {DUMP_ATTEMPTS} attempts to list them"
    )))
}

/// The id that the handle's namespace has for another one.
pub(super) async fn nsid(handle: &Handle, netns: &Netns) -> io::Result<Option<i32>> {
    let mut question = NsidMessage::default();
    question.attributes.push(NsidAttribute::Fd(netns.as_fd().as_raw_fd().cast_unsigned()));
    let replies = ask(handle, RouteNetlinkMessage::GetNsId(question), NLM_F_REQUEST).await?;
    let id = replies.into_iter().find_map(|reply| match reply.payload {
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewNsId(answer)) => {
            answer.attributes.into_iter().find_map(|attribute| match attribute {
                NsidAttribute::Id(id) => Some(id),
                _ => None,
            })
        }
        _ => None,
    });
    Ok(id.filter(|id| *id >= 0))
}

/// All replies to one request, or the kernel's error, also an error that ends a dump half-way.
pub(super) async fn ask(
    handle: &Handle,
    question: RouteNetlinkMessage,
    flags: u16,
) -> io::Result<Vec<NetlinkMessage<RouteNetlinkMessage>>> {
    let mut message = NetlinkMessage::from(question);
    message.header.flags = flags;
    let replies: Vec<_> = handle.clone().request(message).map_err(os_error)?.collect().await;
    for reply in &replies {
        match &reply.payload {
            NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
            NetlinkPayload::Done(done) if done.code < 0 => {
                return Err(io::Error::from_raw_os_error(-done.code));
            }
            _ => {}
        }
    }
    Ok(replies)
}

/// The kernel's error, where it is one.
pub(super) fn os_error(error: Error) -> io::Error {
    match error {
        Error::NetlinkError(message) => message.to_io(),
        other => io::Error::other(other),
    }
}
