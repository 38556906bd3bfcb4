//! The IP addresses of the devices of targets. `netlink` calls it; `mirror_iface` decides which addresses to remove.
//!
//! The agent assigns no addresses to its devices, but programs that manage the node's network assign one to each device
//! that they find.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
};

use anyhow::Context as _;
use netlink_packet_core::{NLM_F_DUMP, NetlinkPayload};
use rtnetlink::{
    Handle,
    packet_route::{
        RouteNetlinkMessage,
        address::{AddressAttribute, AddressMessage},
    },
};
use tracing::warn;

use super::socket::ask;
use crate::model::IfIndex;

/// Returns the addresses of those devices that have any.
pub(super) async fn read(
    handle: &Handle,
    devices: &BTreeSet<IfIndex>,
) -> io::Result<BTreeMap<IfIndex, BTreeSet<IpAddr>>> {
    let mut addresses = BTreeMap::<_, BTreeSet<_>>::new();
    if devices.is_empty() {
        return Ok(addresses);
    }
    for message in dump(handle).await? {
        let ifindex = IfIndex(message.header.index);
        if let (true, Some(address)) = (devices.contains(&ifindex), address(&message)) {
            addresses.entry(ifindex).or_default().insert(address);
        }
    }
    Ok(addresses)
}

/// Removes all addresses from a device.
pub(super) async fn remove(handle: &Handle, device: IfIndex) -> anyhow::Result<()> {
    for message in dump(handle).await?.into_iter().filter(|message| message.header.index == device.0) {
        let Some(address) = address(&message) else { continue };
        match ask(handle, RouteNetlinkMessage::DelAddress(message), 0).await {
            Ok(_) => warn!(
                ifindex = device.0,
                %address,
                "removed an address that another program had added to a device for copies, because packets of the node itself \
                 would look like copies; exclude the device from that program (docs/mirror-interface.md)"
            ),
            // It was removed together with another one, or with the device.
            Err(error) if error.raw_os_error() == Some(libc::EADDRNOTAVAIL) => {}
            Err(error) => {
                return Err(error)
                    .with_context(|| format!("cannot remove {address} from the device with index {device}"));
            }
        }
    }
    Ok(())
}

async fn dump(handle: &Handle) -> io::Result<Vec<AddressMessage>> {
    let question = RouteNetlinkMessage::GetAddress(AddressMessage::default());
    let replies = ask(handle, question, NLM_F_DUMP).await?;
    let messages = replies.into_iter().filter_map(|reply| match reply.payload {
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewAddress(message)) => Some(message),
        _ => None,
    });
    Ok(messages.collect())
}

/// Returns the device's own address. On a point-to-point device, `Address` is that of the other end.
fn address(message: &AddressMessage) -> Option<IpAddr> {
    let of = |local: bool| {
        message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Local(address) if local => Some(*address),
            AddressAttribute::Address(address) if !local => Some(*address),
            _ => None,
        })
    };
    of(true).or_else(|| of(false))
}
