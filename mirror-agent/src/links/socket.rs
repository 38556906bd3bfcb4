//! The rtnetlink sockets: connections, requests and events.
//!
//! Knows how to ask and to listen, and nothing of what is asked for: `create`, `queue` and `sink` change them.

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
use crate::netns::Netns;

/// Devices, tc filters and qdiscs, ids of namespaces, and addresses.
const EVENTS: [MulticastGroup; 5] = [
    MulticastGroup::Link,
    MulticastGroup::Tc,
    MulticastGroup::Nsid,
    MulticastGroup::Ipv4Ifaddr,
    MulticastGroup::Ipv6Ifaddr,
];

/// How long to wait before an event socket that could not be opened is tried again.
const REOPEN_AFTER: Duration = Duration::from_secs(1);

/// A connection that does the work while it is polled, and the handle to ask through.
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
/// which is an event too.
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

/// Listens for ever.
pub(super) async fn watch(first: impl Future<Output = ()>, changed: Arc<Notify>) {
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

/// The id that the handle's namespace has for another one.
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

/// Gives another namespace an id in the handle's, where it has none: where no device leads from here to there. The id goes
/// with the namespace. Without it, devices there cannot be read from here.
pub(super) async fn give_nsid(handle: &Handle, netns: &Netns) -> io::Result<Option<i32>> {
    const ANY: i32 = -1;
    let mut request = NsidMessage::default();
    request.attributes.push(NsidAttribute::Fd(netns.as_fd().as_raw_fd().cast_unsigned()));
    request.attributes.push(NsidAttribute::Id(ANY));
    // If it has got one meanwhile, that one is the answer. If the kernel refuses, the coverage of its NICs is not known, and
    // nothing else depends on it.
    let _ = ask(handle, RouteNetlinkMessage::NewNsId(request), 0).await;
    nsid(handle, netns).await
}

/// All replies to one request, or the kernel's error, also an error that ends a dump half-way. `flags` are those that
/// the request needs besides `NLM_F_REQUEST`.
///
/// A reply that cannot be decoded is left out. (Pods could cause that by text that is not UTF-8, see [`Mended`].) So the end
/// of the replies must be a message of its own, or the agent would wait for ever: a dump has one, other requests ask for one.
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

/// The kernel's error, where it is one.
pub(super) fn os_error(error: Error) -> io::Error {
    match error {
        Error::NetlinkError(message) => message.to_io(),
        other => io::Error::other(other),
    }
}
