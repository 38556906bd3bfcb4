//! Makes the devices of targets: the mirror interface, which is a dummy device, or a veth pair in its place; and the
//! device of a tunnel. And the hub, which is made as a mirror interface is. They carry only copies.
//!
//! This module does not choose the name or decide when (`mirror_iface` and `tunnel` do). `netlink` calls it.

use std::io;

use anyhow::Context;
use mirror_core::{
    exit,
    tunnel::{Family, TunnelDevice},
};
use rtnetlink::{
    Handle, LinkDummy, LinkMessageBuilder, LinkUnspec, LinkVeth,
    packet_route::link::{
        AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoGeneve, InfoGre, InfoGre6, InfoKind,
        InfoVeth, InfoVxlan, LinkAttribute, LinkMessage,
    },
};
use tracing::{info, warn};

use super::{
    list::{Named, one},
    offloads,
    procfs::since_boot,
    queue,
    sink::drop_received,
    socket::os_error,
};
use crate::model::{ALIAS, IfIndex};

/// Most bytes of a device name.
const NAME_MAX: usize = 15;

/// The largest MTU with which the kernel gives a device no IPv6 state (`IPV6_MIN_MTU` less one).
const MTU_WITHOUT_IPV6: u32 = 1279;

/// Makes the mirror interface `name`, and leaves nothing behind if it fails.
pub(super) async fn mirror(
    handle: &Handle,
    name: &str,
    mtu: u32,
    keeps_offloads: bool,
) -> anyhow::Result<()> {
    make(handle, name, mtu, keeps_offloads, false).await
}

/// Makes the hub, and leaves nothing behind if it fails. A macvlan in bridge mode hands packets for another one to their
/// lower device, as if they had arrived there: so it drops what it receives.
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
            // The device is still down: so every copy leaves it in the requested form.
            offloads::switch(name, false)?;
            let ifindex = index_of(name)?;
            queue::give(handle, ifindex).await.with_context(|| format!("cannot give {name} a queue"))?;
        }
        for device in [Some(name), peer.as_deref()].into_iter().flatten() {
            finish(handle, device, mtu)
                .await
                .with_context(|| format!("cannot set up the new device {device}"))?;
        }
        anyhow::Ok(())
    };
    if let Err(error) = made.await {
        if let Err(error) = delete(handle, name).await {
            warn!(mirror_iface = name, %error, "a half-made mirror interface could not be deleted: delete it by hand");
        }
        return Err(error);
    }
    match peer {
        None => {
            info!(device = name, kind = "dummy", mtu, offloads = keeps_offloads, "made a device for copies")
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
                "made a device for copies"
            );
        }
    }
    Ok(())
}

/// MTU in bytes of a tunnel's device: as much as all kinds take, so that it bounds no copy.
const TUNNEL_MTU: u32 = 65_000;

/// Makes the device of a tunnel, and leaves nothing behind if it fails. Each packet has an address of its own (collect
/// metadata), and what arrives is dropped.
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
        format!("cannot make the tunnel's device {name}: {hint}")
    };
    let mut link = silent(link, TUNNEL_MTU).build();
    link.header.index = new_index()?.0;
    add(handle, link).await.with_context(is_taken)?;
    let made = async {
        // First, so that an agent that comes later knows a half-made device for ours.
        change(handle, LinkUnspec::new_with_name(name).alias(ALIAS).build()).await.with_context(is_taken)?;
        let ifindex = index_of(name)?;
        // The address of a copy is one object for all copies of a CPU, so it must be read before the next copy is made.
        queue::none(handle, ifindex).await.with_context(|| format!("cannot take the queue of {name}"))?;
        drop_received(handle, ifindex.0)
            .await
            .with_context(|| format!("cannot make {name} drop what it receives"))?;
        finish(handle, name, TUNNEL_MTU).await.with_context(is_taken)
    };
    if let Err(error) = made.await {
        if let Err(error) = delete(handle, name).await {
            warn!(device = name, %error, "a half-made device could not be deleted: delete it by hand");
        }
        return Err(error);
    }
    info!(device = name, "made the tunnel's device");
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
    // If the kernel does not answer, it refuses a name that is taken.
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

/// An index for a device of ours that no device of the node has or has had a moment ago.
///
/// The kernel uses no index again soon. What still knows a device that was deleted must not take the next one for it.
fn new_index() -> io::Result<IfIndex> {
    /// As many milliseconds as there are indexes from the first one on: 37 hours.
    const INDEXES: u128 = 1 << 27;
    let place = u32::try_from(since_boot()?.as_millis() % INDEXES).map_err(io::Error::other)?;
    free_index(IfIndex(exit::FIRST_IFINDEX.0 + place))
}

/// The lowest index from `from` on that no device of the node has.
fn free_index(from: IfIndex) -> io::Result<IfIndex> {
    let mut free = from;
    while one(&Named::Index(free))?.is_some() {
        free.0 += 1;
    }
    Ok(free)
}

/// Makes a device drop what it receives, before anything can be received.
async fn swallow(handle: &Handle, name: &str) -> anyhow::Result<()> {
    let ifindex = index_of(name)?;
    Ok(drop_received(handle, ifindex.0).await?)
}

/// The index of a device that was just made.
fn index_of(name: &str) -> anyhow::Result<IfIndex> {
    let link = one(&Named::Name(name.to_owned()))?;
    link.map(|link| link.ifindex).with_context(|| format!("{name} has gone"))
}

/// No ARP, no multicast, and at first too small for IPv6.
///
/// A new device has multicast on. Where the node forwards IPv6, as nodes do, the kernel would then make the device join
/// the group of all routers and report that to the link, with any addresses. A device that is made without IPv6 gets
/// its IPv6 state when its MTU is raised. Multicast is off by then, and the device joins no group that is reported.
pub(super) fn silent<T>(device: LinkMessageBuilder<T>, mtu: u32) -> LinkMessageBuilder<T> {
    device.mtu(mtu.min(MTU_WITHOUT_IPV6)).arp(false).multicast(false)
}

/// Gives a new device its alias and MTU, keeps IPv6 from giving it an address, and brings it up, in this order.
pub(super) async fn finish(handle: &Handle, name: &str, mtu: u32) -> io::Result<()> {
    let device = || LinkUnspec::new_with_name(name);
    change(handle, device().alias(ALIAS).mtu(mtu).build()).await?;

    let no_address = vec![AfSpecUnspec::Inet6(vec![AfSpecInet6::AddrGenMode(In6AddrGenMode::None)])];
    let no_address = device().append_extra_attribute(LinkAttribute::AfSpecUnspec(no_address)).build();
    match change(handle, no_address).await {
        // The kernel has no IPv6, or the device is too small for it: there is nothing to switch off.
        Err(error) if error.raw_os_error() == Some(libc::EAFNOSUPPORT) => {}
        outcome => outcome?,
    }
    change(handle, device().up().build()).await
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

/// A free name for the other end: `name` and a "p", and a number if need be, shortened to what a name can hold.
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
