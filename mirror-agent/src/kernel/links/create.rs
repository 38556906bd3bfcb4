//! Creates the devices of targets: mirror interfaces (a dummy device, or a veth pair instead) and the devices of
//! tunnels. Also creates the relay hub, in the same way as a mirror interface. These devices carry only copies.
//!
//! `mirror_iface` and `tunnel` decide the name and when. `netlink` calls this module.

use std::{fs, io, net::Ipv6Addr, time::Duration};

use anyhow::Context;
use mirror_core::{
    exit,
    tunnel::{Family, TunnelDevice},
};
use rtnetlink::{
    Handle, LinkDummy, LinkMessageBuilder, LinkUnspec, LinkVeth, RouteMessageBuilder,
    packet_route::{
        link::{
            AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoGeneve, InfoGre, InfoGre6, InfoKind,
            InfoVeth, InfoVxlan, LinkAttribute, LinkMessage,
        },
        route::{RouteProtocol, RouteType},
    },
};
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use super::{
    list::{Named, one},
    offloads,
    procfs::since_boot,
    queue,
    sink::drop_received,
    socket::os_error,
};
use crate::model::{ALIAS, FIRST_IFINDEX, IfIndex};

/// The maximum length of a device name in bytes.
const NAME_MAX: usize = 15;

/// The largest MTU with which the kernel gives a device no IPv6 state (`IPV6_MIN_MTU` less one).
const MTU_WITHOUT_IPV6: u32 = 1279;

/// How long a device with a new carrier can take to get its route for multicast (the kernel handles most changes of
/// carriers once a second), and the interval between two looks for it.
const PATIENCE: Duration = Duration::from_secs(3);
const LOOK: Duration = Duration::from_millis(10);

/// Creates the mirror interface `name`. Deletes it again after a failure.
pub(super) async fn mirror(
    handle: &Handle,
    name: &str,
    mtu: u32,
    keeps_offloads: bool,
) -> anyhow::Result<()> {
    make(handle, name, mtu, keeps_offloads, false).await
}

/// Creates the relay hub. Deletes it again after a failure. A macvlan in bridge mode passes packets for another macvlan
/// to their lower device, as if they had arrived there. So the hub drops everything that it receives.
pub(super) async fn hub(handle: &Handle) -> anyhow::Result<()> {
    make(handle, exit::HUB, exit::MTU, true, true).await
}

async fn make(
    handle: &Handle,
    name: &str,
    mtu: u32,
    keeps_offloads: bool,
    drops_received: bool,
) -> anyhow::Result<()> {
    let mut dummy = silent(LinkMessageBuilder::<LinkDummy>::new(name), mtu).build();
    dummy.header.index = new_index()?.0;
    let peer = match add(handle, dummy).await {
        Ok(()) => None,
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Some(veth(handle, name, mtu).await?),
        Err(error) => return Err(error).with_context(|| format!("cannot create the dummy device {name}")),
    };

    let made = async {
        for device in peer.as_deref().into_iter().chain(drops_received.then_some(name)) {
            swallow(handle, device)
                .await
                .with_context(|| format!("cannot make {device} drop what it receives"))?;
        }
        if !keeps_offloads {
            // The device is still down, so every copy will leave it in the requested form.
            offloads::switch(name, false)?;
            let ifindex = index_of(name)?;
            queue::give(handle, ifindex).await.with_context(|| format!("cannot add a queue to {name}"))?;
        }
        // The other end first: if the agent is killed in between, the named end has no alias, so it is half-made.
        let mut with_route = Vec::new();
        for device in [peer.as_deref(), Some(name)].into_iter().flatten() {
            let ifindex = index_of(device)?;
            let finished = finish(handle, device, ifindex, mtu).await;
            let removed = finished.with_context(|| format!("cannot set up the new device {device}"))?;
            with_route.extend((!removed && has_ipv6(device)).then_some(ifindex));
        }
        // The ends of a veth pair get their carrier, and then the route, when both are up.
        let end = Instant::now() + PATIENCE;
        while !with_route.is_empty() && Instant::now() < end {
            sleep(LOOK).await;
            let mut left = Vec::new();
            for ifindex in with_route {
                left.extend((!remove_multicast_route(handle, ifindex).await?).then_some(ifindex));
            }
            with_route = left;
        }
        anyhow::Ok(())
    };
    if let Err(error) = made.await {
        if let Err(error) = delete(handle, name).await {
            warn!(mirror_iface = name, %error, "an incomplete mirror interface could not be deleted: delete it manually");
        }
        return Err(error);
    }
    match peer {
        None => {
            info!(
                device = name,
                kind = "dummy",
                mtu,
                offloads = keeps_offloads,
                "created a device for copies"
            )
        }
        Some(peer) => {
            let reason = "the kernel has no dummy driver";
            info!(
                device = name,
                kind = "veth",
                peer,
                mtu,
                offloads = keeps_offloads,
                reason,
                "created a device for copies"
            );
        }
    }
    Ok(())
}

/// The MTU of a tunnel's device in bytes: the largest that all kinds accept, so that it limits no copy.
const TUNNEL_MTU: u32 = 65_000;

/// Creates the device of a tunnel. Deletes it again after a failure. The tunnel's address is set for each packet
/// (collect metadata), and received packets are dropped.
pub(super) async fn tunnel(handle: &Handle, device: TunnelDevice) -> anyhow::Result<()> {
    let name = &device.to_string();
    let (kind, info) = tunnel_info(device);
    let link =
        LinkMessageBuilder::<LinkUnspec>::new_with_info_kind(kind).name(name.clone()).set_info_data(info);
    let is_taken = || {
        let hint = match device {
            TunnelDevice::Vxlan(port) | TunnelDevice::Geneve(port) => {
                format!("another device of this kind may use port {port}: name another port in the target")
            }
            TunnelDevice::Gre(_) | TunnelDevice::Erspan(_) => {
                "the node may have another device of this kind that takes all packets (external), or its kernel none \
                 of this kind"
                    .into()
            }
        };
        format!("cannot create the tunnel's device {name}: {hint}")
    };
    let mut link = silent(link, TUNNEL_MTU).build();
    link.header.index = new_index()?.0;
    add(handle, link).await.with_context(is_taken)?;
    let made = async {
        // First, so that a later agent recognises a half-configured device as podmirror's.
        change(handle, LinkUnspec::new_with_name(name).alias(ALIAS).build()).await.with_context(is_taken)?;
        let ifindex = index_of(name)?;
        // All copies of a CPU share one object for the address, so each must be sent before the next copy is made: no
        // queue.
        queue::none(handle, ifindex).await.with_context(|| format!("cannot remove the queue of {name}"))?;
        drop_received(handle, ifindex.0)
            .await
            .with_context(|| format!("cannot make {name} drop what it receives"))?;
        finish(handle, name, ifindex, TUNNEL_MTU).await.map(drop).with_context(is_taken)
    };
    if let Err(error) = made.await {
        if let Err(error) = delete(handle, name).await {
            warn!(device = name, %error, "an incomplete device could not be deleted: delete it manually");
        }
        return Err(error);
    }
    info!(device = name, "created the tunnel's device");
    Ok(())
}

fn tunnel_info(device: TunnelDevice) -> (InfoKind, InfoData) {
    let (v4, v6) = (|| vec![InfoGre::CollectMetadata], || vec![InfoGre6::CollectMetadata]);
    match device {
        TunnelDevice::Vxlan(port) => {
            let info = [InfoVxlan::CollectMetadata(true), InfoVxlan::Learning(false), InfoVxlan::Port(port)];
            (InfoKind::Vxlan, InfoData::Vxlan(info.into()))
        }
        TunnelDevice::Geneve(port) => {
            (InfoKind::Geneve, InfoData::Geneve(vec![InfoGeneve::CollectMetadata, InfoGeneve::Port(port)]))
        }
        TunnelDevice::Gre(Family::V4) => (InfoKind::GreTap, InfoData::GreTap(v4())),
        TunnelDevice::Gre(Family::V6) => (InfoKind::GreTap6, InfoData::GreTap6(v6())),
        TunnelDevice::Erspan(Family::V4) => (InfoKind::ErSpan, InfoData::ErSpan(v4())),
        TunnelDevice::Erspan(Family::V6) => (InfoKind::Ip6ErSpan, InfoData::Ip6ErSpan(v6())),
    }
}

/// Creates a veth pair and returns the name of the other end.
async fn veth(handle: &Handle, name: &str, mtu: u32) -> anyhow::Result<String> {
    // If the lookup fails, the name counts as free: the kernel refuses a name that is taken.
    let is_taken = |peer: &str| one(&Named::Name(peer.to_owned())).is_ok_and(|link| link.is_some());
    let peer = peer_name(name, is_taken);
    let ifindex = new_index()?;
    let mut other_end = silent(LinkUnspec::new_with_name(&peer), mtu).build();
    other_end.header.index = free_index(IfIndex(ifindex.0 + 1))?.0;
    let mut pair = silent(LinkMessageBuilder::<LinkVeth>::new(name, &peer), mtu)
        .set_info_data(InfoData::Veth(InfoVeth::Peer(other_end)))
        .build();
    pair.header.index = ifindex.0;
    add(handle, pair).await.with_context(|| {
        format!("the kernel has no dummy driver, and the veth pair {name} and {peer} cannot be created")
    })?;
    Ok(peer)
}

/// Returns an index for a new device that no device of the node has or has had recently.
///
/// The kernel does not reuse an index soon, and neither may the agent: a program that still has the index of a deleted
/// device must not mistake the new one for it.
fn new_index() -> io::Result<IfIndex> {
    /// The number of indexes to choose from: one for each millisecond of 37 hours.
    const INDEXES: u128 = 1 << 27;
    let place = u32::try_from(since_boot()?.as_millis() % INDEXES).map_err(io::Error::other)?;
    free_index(IfIndex(FIRST_IFINDEX.0 + place))
}

/// Returns the lowest index from `from` on that no device of the node has.
fn free_index(from: IfIndex) -> io::Result<IfIndex> {
    let mut free = from;
    while one(&Named::Index(free))?.is_some() {
        free.0 += 1;
    }
    Ok(free)
}

/// Makes a new device drop everything that it receives, before it can receive anything.
async fn swallow(handle: &Handle, name: &str) -> anyhow::Result<()> {
    let ifindex = index_of(name)?;
    Ok(drop_received(handle, ifindex.0).await?)
}

/// Returns the index of a device that was just created.
fn index_of(name: &str) -> anyhow::Result<IfIndex> {
    let link = one(&Named::Name(name.to_owned()))?;
    link.map(|link| link.ifindex).with_context(|| format!("{name} no longer exists"))
}

/// Disables ARP and multicast, and starts with an MTU that is too small for IPv6.
///
/// A new device has multicast on. If the node forwards IPv6, as nodes do, the kernel would make the device join the
/// all-routers group and report that to the link, with any addresses. A device that is created without IPv6 gets its
/// IPv6 state when its MTU is raised. Multicast is off by then, so the device joins no group that is reported.
pub(super) fn silent<T>(device: LinkMessageBuilder<T>, mtu: u32) -> LinkMessageBuilder<T> {
    device.mtu(mtu.min(MTU_WITHOUT_IPV6)).arp(false).multicast(false)
}

/// Sets the alias and the MTU of a new device, keeps IPv6 from assigning an address, and brings it up, in this order.
/// Returns whether it had a route for multicast, which is removed.
pub(super) async fn finish(handle: &Handle, name: &str, ifindex: IfIndex, mtu: u32) -> io::Result<bool> {
    let device = || LinkUnspec::new_with_name(name);
    change(handle, device().alias(ALIAS).mtu(mtu).build()).await?;

    let no_address = vec![AfSpecUnspec::Inet6(vec![AfSpecInet6::AddrGenMode(In6AddrGenMode::None)])];
    let no_address = device().append_extra_attribute(LinkAttribute::AfSpecUnspec(no_address)).build();
    match change(handle, no_address).await {
        // The kernel has no IPv6, or the MTU of the device is too small for it: there is nothing to disable.
        Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => {}
        outcome => outcome?,
    }
    change(handle, device().up().build()).await?;
    remove_multicast_route(handle, ifindex).await
}

/// Removes the route for IPv6 multicast that the kernel adds when a device comes up (`addrconf_add_mroute()`). If the
/// node's NIC went down and up, its route would come behind this one, and multicast packets of the node, or of the pod,
/// would leave by the device for copies. Returns whether there was one.
pub(super) async fn remove_multicast_route(handle: &Handle, ifindex: IfIndex) -> io::Result<bool> {
    let route = RouteMessageBuilder::<Ipv6Addr>::new()
        .destination_prefix(Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0), 8)
        .table_id(libc::RT_TABLE_LOCAL.into())
        // Its protocol is `boot` before Linux 5.11 (a826b04303a4), and `kernel` since then.
        .protocol(RouteProtocol::Unspec)
        .kind(RouteType::Multicast)
        .output_interface(ifindex.0)
        .build();
    match handle.route().del(route).execute().await.map_err(os_error) {
        Ok(()) => Ok(true),
        // The device has no such route, or the kernel no IPv6.
        Err(error)
            if matches!(error.raw_os_error(), Some(libc::ESRCH | libc::EAFNOSUPPORT | libc::EOPNOTSUPP)) =>
        {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Whether a device of the node has IPv6 state, and IPv6 is not disabled there.
fn has_ipv6(device: &str) -> bool {
    let disabled = fs::read_to_string(format!("/proc/sys/net/ipv6/conf/{device}/disable_ipv6"));
    disabled.is_ok_and(|disabled| disabled.trim() == "0")
}

async fn add(handle: &Handle, device: LinkMessage) -> io::Result<()> {
    handle.link().add(device).execute().await.map_err(os_error)
}

async fn change(handle: &Handle, device: LinkMessage) -> io::Result<()> {
    handle.link().change(device).execute().await.map_err(os_error)
}

async fn delete(handle: &Handle, name: &str) -> io::Result<()> {
    let device = LinkUnspec::new_with_name(name).build();
    handle.link().del_with_message(device).execute().await.map_err(os_error)
}

/// Returns a free name for the other end: `name` and a "p", and a number if necessary, truncated to the maximum length.
fn peer_name(name: &str, is_taken: impl Fn(&str) -> bool) -> String {
    let with = |suffix: String| {
        let end = name.floor_char_boundary(NAME_MAX - suffix.len());
        format!("{}{suffix}", &name[..end])
    };
    let numbered = (1..).map(|n: u32| with(format!("p{n}")));
    let free = |peer: &String| peer != name && !is_taken(peer);
    std::iter::once(with("p".into())).chain(numbered).find(free).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peer_has_a_free_name_that_fits() {
        let taken = |names: &'static [&str]| |name: &str| names.contains(&name);
        assert_eq!(peer_name("mirror0", taken(&[])), "mirror0p");
        assert_eq!(peer_name("mirror0", taken(&["mirror0p"])), "mirror0p1");
        assert_eq!(peer_name("mirror0", taken(&["mirror0p", "mirror0p1"])), "mirror0p2");
        assert_eq!(peer_name("fifteen-bytes-x", taken(&[])), "fifteen-bytes-p");
        assert_eq!(peer_name("fifteen-bytes-p", taken(&[])), "fifteen-bytesp1");
        assert_eq!(peer_name("mirror-spiegelä", taken(&[])).len(), 15);
        assert_eq!(peer_name("aaaaaaaaaaaaaää", taken(&[])), "aaaaaaaaaaaaap");
    }
}
