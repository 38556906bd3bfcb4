//! Example readings of a pod, and devices with arbitrary bytes in their texts on the real kernel.

#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::{io, path::Path};

use anyhow::anyhow;
use netlink_packet_core::DefaultNla;
use rtnetlink::{
    LinkUnspec, LinkVeth,
    packet_route::{RouteNetlinkMessage, link::LinkAttribute},
};
use tokio::time::timeout;

use super::*;
use crate::kernel::links::{
    LinkTable as _, NicPlace,
    netlink::Netlink,
    socket::{ask, connect, serve},
    tests::{DEADLINE, PodNs, add, add_nic, handle, on_a_node, snapshot_of},
};
use crate::model::LinkKind;

const IFLA_IFNAME: u16 = 3;
const IFLA_IFALIAS: u16 = 20;

/// Sets a text attribute of a device from inside a pod, to arbitrary bytes.
async fn set(pod: &PodNs, ifindex: u32, attribute: u16, text: &[u8]) {
    let inside = Netns::open(&pod.path).unwrap().inside(connect).await.unwrap();
    let done = serve(inside, async |handle| {
        let mut change = LinkUnspec::new_with_index(ifindex).build();
        change.attributes.push(LinkAttribute::Other(DefaultNla::new(attribute, text.to_vec())));
        Ok(handle.link().change(change).execute().await?)
    });
    done.await.unwrap();
}

fn link(ifindex: u32) -> Link {
    Link { mtu: 1500, ..Link::new(IfIndex(ifindex), "eth0", LinkKind::Veth, None) }
}

/// The kernel accepts any bytes for these texts.
#[test]
fn a_pod_cannot_hide_a_device_by_its_texts() {
    for attribute in [IFLA_IFALIAS, IFLA_IFNAME] {
        on_a_node(move || async move {
            let (mut netlink, handle, pod) = (Netlink::new().unwrap(), handle(), PodNs::new().await);
            add_nic(&handle, &pod, "veth1", "eth0").await;
            let (host, _) = snapshot_of(&mut netlink, Path::new("/proc/thread-self/ns/net")).await;
            let veth1 = host.iter().find(|link| link.name == "veth1").unwrap();
            let eth0 = veth1.peer.unwrap().ifindex;
            set(&pod, eth0, attribute, b"a\xff\0").await;
            let inside = snapshot_of(&mut netlink, &pod.path).await.1.unwrap();
            let read = inside.links.iter().find(|link| link.ifindex.0 == eth0).unwrap();
            let text = if attribute == IFLA_IFNAME { &read.name } else { read.alias.as_ref().unwrap() };
            assert_eq!((text.as_str(), &inside.stale), ("a?", &None));
            let place =
                NicPlace { nsid: inside.nsid.unwrap(), ifindex: IfIndex(eth0), end: Some(veth1.ifindex) };
            let read = timeout(DEADLINE, netlink.counters(&[place])).await.expect("it ends").unwrap();
            assert!(read[0].is_some(), "{read:?}");
        });
    }
}

/// This connection does not replace invalid bytes, so the decoder omits the reply.
#[test]
fn a_reply_that_is_left_out_is_not_waited_for() {
    on_a_node(|| async {
        let handle = handle();
        add(&handle, LinkVeth::new("a", "b").build()).await;
        let mut change = LinkUnspec::new_with_name("a").build();
        change.attributes.push(LinkAttribute::Other(DefaultNla::new(IFLA_IFALIAS, b"\xff\0".to_vec())));
        handle.link().change(change).execute().await.unwrap();
        let of = async |name: &str| {
            let question = RouteNetlinkMessage::GetLink(LinkUnspec::new_with_name(name).build());
            timeout(DEADLINE, ask(&handle, question, 0)).await.expect("it ends").unwrap().len()
        };
        assert_eq!([of("a").await, of("b").await], [0, 1]);
    });
}

#[test]
fn a_veth_that_has_gone_or_was_moved_meanwhile_is_no_error() {
    let (first, second) = ((IfIndex(10), 2, "veth1".to_owned()), (IfIndex(11), 3, "veth2".to_owned()));
    let both = vec![first.clone(), second.clone()];
    let read = |peers: &[u32]| peers.iter().map(|peer| (IfIndex(*peer), link(*peer))).collect();
    assert_eq!(unread(&read(&[1, 2, 3]), &both, &both), None);
    assert_eq!(unread(&read(&[1, 2]), &both, &both), Some("veth2"));
    assert_eq!(unread(&read(&[1, 2]), &both, &vec![first.clone()]), None, "gone");
    assert_eq!(
        unread(&read(&[1, 2]), &both, &vec![first.clone(), (IfIndex(11), 4, "veth2".into())]),
        None,
        "moved"
    );
    assert_eq!(unread(&read(&[1, 2]), &vec![first], &both), None, "not there yet when it was read");
}

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
    // A pod that keeps adding and removing devices must not block the others.
    assert!(!passes_by_itself(&io::Error::other("devices came or went").into()));
    assert!(!passes_by_itself(&anyhow!("the netlink socket failed")));
}
