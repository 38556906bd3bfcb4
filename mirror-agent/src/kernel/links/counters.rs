//! The counters of pods' NICs, read from the node's namespace.
//!
//! `RTM_GETLINK` can specify the device's namespace by its id in the node's namespace (`IFLA_TARGET_NETNSID`, Linux
//! 4.15), for an agent with CAP_NET_ADMIN there. So no thread enters a pod's namespace, and a reading takes up to three
//! short requests for each NIC. `netlink` calls it; `mirror_core::coverage` evaluates the counters.

use std::fs;

use memchr::memmem;
use mirror_common::verdict::Direction;
use mirror_core::coverage::{Carried, Count};
use netlink_packet_core::NetlinkPayload;
use rtnetlink::{
    Handle,
    packet_route::{
        RouteNetlinkMessage,
        link::{InfoKind, LinkAttribute, LinkInfo, LinkMessage, Stats64},
    },
};

use super::{NicPlace, socket::ask};
use crate::model::IfIndex;

/// A reading of one device.
#[derive(Default)]
struct Counters {
    stats: Stats64,
    /// `IFLA_LINK`: for a veth, the index of its other end.
    link: Option<u32>,
    is_netkit: bool,
}

/// Returns the counters of each NIC, by direction; `None` if the NIC cannot be read, or another device has its place.
pub(super) async fn read(handle: &Handle, nics: &[NicPlace]) -> Vec<Option<[Carried; Direction::COUNT]>> {
    let mut carried = Vec::with_capacity(nics.len());
    for nic in nics {
        carried.push(read_one(handle, *nic).await);
    }
    carried
}

async fn read_one(handle: &Handle, nic: NicPlace) -> Option<[Carried; Direction::COUNT]> {
    let NicPlace { nsid, ifindex, end } = nic;
    let before = match end {
        Some(end) => Some(get(handle, end, None).await?.stats),
        None => None,
    };
    let Counters { stats, link, is_netkit } = get(handle, ifindex, Some(nsid)).await?;
    let after = match end {
        Some(end) => Some(get(handle, end, None).await?.stats),
        None => None,
    };
    // Another namespace may have the id now.
    if end.is_some_and(|end| link != Some(end.0)) {
        return None;
    }
    let both = |packets: fn(&Stats64) -> u64| Some([packets(&before?), packets(&after?)]);
    let ingress = Count { packets: stats.rx_packets, bytes: stats.rx_bytes };
    let egress = Count { packets: stats.tx_packets, bytes: stats.tx_bytes };
    // The NIC counts packets that a program in the chain of a netkit device redirects, and the node side does not. They
    // do not bypass the tap, which is in that chain.
    let end_received = if is_netkit { None } else { both(|end| end.rx_packets) };
    // The node side sends what the NIC receives.
    Some([
        Carried { nic: ingress, end: both(|end| end.tx_packets) },
        Carried { nic: egress, end: end_received },
    ])
}

/// Returns the counters of a device of the node, or of the namespace with this id. `None` if there is no such device,
/// or it cannot be read.
async fn get(handle: &Handle, ifindex: IfIndex, nsid: Option<i32>) -> Option<Counters> {
    let mut question = LinkMessage::default();
    question.header.index = ifindex.0;
    question.attributes.extend(nsid.map(LinkAttribute::IfNetnsId));
    let replies = ask(handle, RouteNetlinkMessage::GetLink(question), 0).await.ok()?;
    replies.into_iter().find_map(|reply| match reply.payload {
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewLink(message)) => counters(message),
        _ => None,
    })
}

fn counters(message: LinkMessage) -> Option<Counters> {
    let (mut stats, mut link, mut is_netkit) = (None, None, false);
    for attribute in message.attributes {
        match attribute {
            LinkAttribute::Stats64(of) => stats = Some(of),
            LinkAttribute::Link(of) => link = Some(of),
            LinkAttribute::LinkInfo(infos) => is_netkit = infos.contains(&LinkInfo::Kind(InfoKind::Netkit)),
            _ => {}
        }
    }
    Some(Counters { stats: stats?, link, is_netkit })
}

/// Whether the kernel counts packets from `bpf_redirect_peer` in a pod's NIC.
///
/// It does so from 6.7 on, and distributions have backported the change. The same change added a name to the kernel's
/// types, which this function searches for in the strings of the BTF. Without BTF the result is false.
pub(super) fn show_redirects() -> bool {
    fs::read("/sys/kernel/btf/vmlinux")
        .is_ok_and(|btf| memmem::find(&btf, b"\0NETDEV_PCPU_STAT_TSTATS\0").is_some())
}
