//! Lists the devices of the calling thread's network namespace, or individual ones.
//!
//! A user who can create devices determines the length of a list, and root in a pod can. So a list is decoded message
//! by message, ends after a maximum number of devices, and is retried only a few times if devices are added or removed
//! meanwhile. A request never waits: the kernel replies during the system call. `netlink` and `inside` call this
//! module, and `create` and `exit` read the device that they have created.

use std::{
    collections::{BTreeMap, BTreeSet},
    io, iter,
};

use netlink_packet_core::{NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use rtnetlink::{
    packet_route::{
        RouteNetlinkMessage,
        link::{LinkAttribute, LinkExtentMask, LinkMessage},
    },
    sys::{Socket, protocols::NETLINK_ROUTE},
};

use super::{
    decode,
    text::{mend, split_first},
};
use crate::model::{IfIndex, Link};

/// The number of attempts to list devices while they change.
const ATTEMPTS: u32 = 3;
/// The size of the longest datagram in bytes, with reserve: a device has up to 64 KiB of alternative names.
const DATAGRAM: usize = 256 << 10;

/// The devices that were found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Listed {
    /// The devices by index.
    pub(super) links: BTreeMap<IfIndex, Link>,
    /// There are more devices than the maximum. Then `links` has only the named ones.
    pub(super) is_cut: bool,
}

/// A device that is read individually.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Named {
    Index(IfIndex),
    Name(String),
}

/// Lists all devices, if there are at most `most`; otherwise those of the `named` devices that exist.
///
/// If devices are added or removed during each attempt, the last list counts. Kernels before 6.10 can omit a device
/// then, and its tap would be removed. So each device that is `named`, or that another attempt has found, is read
/// individually.
pub(super) fn list(most: usize, named: &BTreeSet<Named>) -> io::Result<Listed> {
    let mut asked: BTreeSet<_> = named.clone();
    let mut last = BTreeMap::new();
    for _ in 0..ATTEMPTS {
        match attempt(most)? {
            Some((links, false)) => return Ok(Listed { links, is_cut: false }),
            None => {
                let links = named.iter().map(one).filter_map(Result::transpose);
                let links = links.map(|link| link.map(|link| (link.ifindex, link)));
                return Ok(Listed { links: links.collect::<io::Result<_>>()?, is_cut: true });
            }
            Some((links, true)) => {
                asked.extend(last.keys().copied().map(Named::Index));
                last = links;
            }
        }
    }
    let is_there = |of: &Named| match of {
        Named::Index(ifindex) => last.contains_key(ifindex),
        Named::Name(name) => last.values().any(|link| link.name == *name),
    };
    asked.retain(|of| !is_there(of));
    for of in &asked {
        last.extend(one(of)?.map(|link| (link.ifindex, link)));
    }
    Ok(Listed { links: last, is_cut: false })
}

/// Reads one device; `None` if it does not exist.
pub(super) fn one(of: &Named) -> io::Result<Option<Link>> {
    let mut question = LinkMessage::default();
    match of {
        Named::Index(ifindex) => question.header.index = ifindex.0,
        Named::Name(name) => question.attributes.push(LinkAttribute::IfName(name.clone())),
    }
    let mut found = None;
    let asked = ask(question, 0, |reply| {
        found = device(reply);
        false
    });
    match asked {
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
        asked => asked.map(|()| found),
    }
}

/// Returns the result of one dump, and whether devices have changed during it; `None` if there are more than `most`.
fn attempt(most: usize) -> io::Result<Option<(BTreeMap<IfIndex, Link>, bool)>> {
    let (mut links, mut is_interrupted) = (BTreeMap::new(), false);
    ask(LinkMessage::default(), NLM_F_DUMP, |reply| {
        is_interrupted |= reply.header.flags & NLM_F_DUMP_INTR != 0;
        links.extend(device(reply).map(|link| (link.ifindex, link)));
        links.len() <= most
    })?;
    Ok((links.len() <= most).then_some((links, is_interrupted)))
}

/// Returns the messages of a datagram of the kernel. Skips those that cannot be decoded.
pub fn messages(datagram: &mut [u8]) -> impl Iterator<Item = NetlinkMessage<RouteNetlinkMessage>> {
    mend(datagram);
    let mut rest = &*datagram;
    let decoded = iter::from_fn(move || {
        let (message, after) = split_first(rest)?;
        rest = after;
        Some(NetlinkMessage::deserialize(message))
    });
    decoded.flatten()
}

/// Returns the device that a message describes.
pub fn device(reply: NetlinkMessage<RouteNetlinkMessage>) -> Option<Link> {
    match reply.payload {
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewLink(message)) => Some(decode::link(message)),
        _ => None,
    }
}

/// Passes each reply to `take`, until there are no more or `take` returns false.
fn ask(
    mut question: LinkMessage,
    flags: u16,
    mut take: impl FnMut(NetlinkMessage<RouteNetlinkMessage>) -> bool,
) -> io::Result<()> {
    question.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
    let mut request = NetlinkMessage::from(RouteNetlinkMessage::GetLink(question));
    request.header.flags = NLM_F_REQUEST | flags;
    request.finalize();
    let mut bytes = vec![0; request.buffer_len()];
    request.serialize(&mut bytes);

    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    socket.send(&bytes, 0)?;
    let mut received = Vec::with_capacity(DATAGRAM);
    loop {
        received.clear();
        let length = socket.recv(&mut received, libc::MSG_TRUNC)?;
        if length > received.len() {
            return Err(io::Error::other(format!(
                "the kernel's answer has {length} bytes, more than {DATAGRAM}"
            )));
        }
        for reply in messages(&mut received) {
            let is_last = match &reply.payload {
                NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
                NetlinkPayload::Done(done) if done.code < 0 => {
                    return Err(io::Error::from_raw_os_error(-done.code));
                }
                NetlinkPayload::Done(_) => true,
                _ => false,
            };
            if !take(reply) || is_last {
                return Ok(());
            }
        }
        if flags & NLM_F_DUMP == 0 {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::{
        sync::atomic::{AtomicBool, Ordering},
        thread,
    };

    use rtnetlink::{LinkUnspec, LinkVeth};

    use super::*;
    use crate::kernel::links::tests::{add, handle, on_a_node};

    fn names(listed: &Listed) -> Vec<&str> {
        listed.links.values().map(|link| link.name.as_str()).collect()
    }

    #[test]
    fn of_too_many_devices_those_are_found_that_are_named() {
        on_a_node(|| async {
            let handle = handle();
            for n in 0..4 {
                add(&handle, LinkVeth::new(&format!("a{n}"), &format!("b{n}")).build()).await;
            }
            let all = list(9, &BTreeSet::new()).unwrap();
            assert_eq!((all.links.len(), all.is_cut), (9, false), "with loopback");
            let a1 = all.links.values().find(|link| link.name == "a1").unwrap();
            let named = [Named::Index(a1.ifindex), Named::Name("b3".into()), Named::Name("lo".into())];
            let absent = [Named::Index(IfIndex(999)), Named::Name("eth0".into())];
            let cut = list(8, &named.into_iter().chain(absent).collect()).unwrap();
            let mut found = names(&cut);
            found.sort_unstable();
            assert_eq!((found, cut.is_cut), (vec!["a1", "b3", "lo"], true));
            assert_eq!(cut.links.get(&a1.ifindex), Some(a1), "as in the list");
        });
    }

    /// The devices do not fit into one datagram.
    #[test]
    fn devices_that_come_and_go_keep_nobody_from_a_list() {
        on_a_node(|| async {
            let adding = handle();
            for n in 0..60 {
                add(&adding, LinkVeth::new(&format!("a{n}"), &format!("b{n}")).build()).await;
            }
            let before = list(usize::MAX, &BTreeSet::new()).unwrap().links;
            let named = before.keys().copied().map(Named::Index).collect();
            let stop = AtomicBool::new(false);
            thread::scope(|scope| {
                scope.spawn(|| {
                    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                    runtime.block_on(async {
                        let handle = handle();
                        while !stop.load(Ordering::Relaxed) {
                            add(&handle, LinkVeth::new("c", "d").build()).await;
                            let c = LinkUnspec::new_with_name("c").build();
                            handle.link().del_with_message(c).execute().await.unwrap();
                        }
                    });
                });
                let lists: Vec<_> = (0..100).map(|_| list(usize::MAX, &named)).collect();
                stop.store(true, Ordering::Relaxed);
                for listed in lists {
                    let listed = listed.unwrap();
                    let mut rest = listed.links.clone();
                    rest.retain(|ifindex, _| !before.contains_key(ifindex));
                    assert!(rest.len() <= 4, "{rest:?}");
                    assert_eq!((listed.links.len() - rest.len(), listed.is_cut), (before.len(), false));
                }
            });
        });
    }
}
