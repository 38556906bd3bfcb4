//! The rtnetlink sockets: connections, requests and events.
//!
//! This module is independent of the contents of requests: `create`, `queue` and `sink` compose them.

use std::{
    io,
    os::fd::{AsFd, AsRawFd},
    sync::Arc,
    time::Duration,
};

use anyhow::anyhow;
use futures_util::StreamExt;
use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use rtnetlink::{
    Error, Handle, MulticastGroup,
    packet_route::{
        RouteNetlinkMessage,
        nsid::{NsidAttribute, NsidMessage},
    },
    proto::Connection,
};
use tokio::sync::Notify;
use tracing::error;

use super::text::Mended;
use crate::kernel::netns::Netns;

/// The event groups for devices, tc filters and qdiscs, ids of namespaces, and addresses.
const EVENTS: [MulticastGroup; 5] = [
    MulticastGroup::Link,
    MulticastGroup::Tc,
    MulticastGroup::Nsid,
    MulticastGroup::Ipv4Ifaddr,
    MulticastGroup::Ipv6Ifaddr,
];

/// The delay before an event socket that could not be opened is tried again.
const REOPEN_AFTER: Duration = Duration::from_secs(1);

/// A connection that works while it is polled, and the handle for requests.
type Connected = (Connection<RouteNetlinkMessage, Mended>, Handle);

/// Opens a socket in the calling thread's namespace.
pub(super) fn connect() -> io::Result<Connected> {
    let (mut connection, handle, _) = rtnetlink::new_connection_with_socket::<Mended>()?;
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
/// which counts as an event too.
pub(super) fn listen(changed: Arc<Notify>) -> io::Result<impl Future<Output = ()> + Send + use<>> {
    let (connection, _, events) = rtnetlink::new_multicast_connection_with_socket::<Mended>(&EVENTS)?;
    Ok(async move {
        let wake = events.for_each(|_| {
            changed.notify_one();
            std::future::ready(())
        });
        tokio::join!(connection, wake);
    })
}

/// Listens forever, and reopens a failed socket.
pub(super) async fn watch(first: impl Future<Output = ()>, changed: Arc<Notify>) {
    first.await;
    loop {
        error!("the socket for changes of network devices failed; opening it again");
        match listen(Arc::clone(&changed)) {
            Ok(listening) => {
                // Changes before this moment sent no event.
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

/// Returns the id of another namespace in the handle's namespace.
pub(super) async fn nsid(handle: &Handle, netns: &Netns) -> io::Result<Option<i32>> {
    let mut question = NsidMessage::default();
    question.attributes.push(NsidAttribute::Fd(netns.as_fd().as_raw_fd().cast_unsigned()));
    let replies = ask(handle, RouteNetlinkMessage::GetNsId(question), 0).await?;
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

/// Assigns another namespace an id in the handle's, if it has none because no device leads there. The id is removed
/// with the namespace. Without it, devices there cannot be read from here.
pub(super) async fn give_nsid(handle: &Handle, netns: &Netns) -> io::Result<Option<i32>> {
    const ANY: i32 = -1;
    let mut request = NsidMessage::default();
    request.attributes.push(NsidAttribute::Fd(netns.as_fd().as_raw_fd().cast_unsigned()));
    request.attributes.push(NsidAttribute::Id(ANY));
    // If the namespace has got an id in the meantime, that one is returned. If the kernel refuses, only the coverage of
    // its NICs is unknown.
    let _ = ask(handle, RouteNetlinkMessage::NewNsId(request), 0).await;
    nsid(handle, netns).await
}

/// Returns all replies to one request, or the kernel's error, also an error that ends a dump half-way. `flags` are
/// those that the request needs besides `NLM_F_REQUEST`.
///
/// A reply that cannot be decoded is skipped. (Pods could cause that by text that is not UTF-8, see [`Mended`].) So the
/// end of the replies must be a separate message, or the agent would wait forever: a dump has one, other requests ask
/// for one.
pub(super) async fn ask(
    handle: &Handle,
    question: RouteNetlinkMessage,
    flags: u16,
) -> io::Result<Vec<NetlinkMessage<RouteNetlinkMessage>>> {
    let mut message = NetlinkMessage::from(question);
    let end = if flags & NLM_F_DUMP == NLM_F_DUMP { 0 } else { NLM_F_ACK };
    message.header.flags = NLM_F_REQUEST | flags | end;
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

/// Returns the kernel's error, if it is one.
pub(super) fn os_error(error: Error) -> io::Error {
    match error {
        Error::NetlinkError(message) => message.to_io(),
        other => io::Error::other(other),
    }
}
