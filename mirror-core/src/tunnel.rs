//! Tunnels: targets whose copies leave the node inside packets of another protocol.
//!
//! Pure. [`Tunnel`] is the administrator's configuration (`text` parses it), [`changes`] creates the device
//! (`device` selects which), and [`target`] returns whether copies can be sent now. All tunnels of a kind and port
//! share one device in external mode (collect metadata), because the kernel lets only one such device listen at a
//! port. `deliver` sets the destination of each copy.

mod device;
mod text;

use core::net::IpAddr;
use std::collections::BTreeSet;

use mirror_common::packet::MAX_SNAPLEN;

pub use self::device::{Family, TunnelDevice};
use crate::{
    destination::Destination,
    mirror_iface::{is_half_made, is_ours},
    model::{DeviceTarget, Link, LinkChange, LinkSnapshot, Route, TargetName},
};

/// A tunnel, as in `vxlan:10.9.0.5:4789/vni=77`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tunnel {
    /// The protocol.
    pub kind: Kind,
    /// The remote address.
    pub remote: IpAddr,
    /// The remote UDP port. 0 for a protocol without ports.
    pub port: u16,
    /// The keys by which the receiver and other agents recognise podmirror's packets.
    pub keys: Keys,
    /// The treatment of a copy that does not fit into a packet.
    pub oversize: Oversize,
    /// Whether packets carry the session and the direction of the copy in a GENEVE option.
    pub identity: bool,
    /// Name of other software's device that sends the packets. The agent neither creates nor changes it. `None`: the
    /// agent creates a device.
    pub existing: Option<String>,
}

/// The protocol of a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// RFC 7348. The key is the VNI.
    Vxlan,
    /// RFC 8926. The key is the VNI.
    Geneve,
    /// Ethernet in GRE (RFC 2784), with the key of RFC 2890.
    Gre,
    /// Type II of draft-foschiano-erspan, with version 1 in its header. The key is the session ID.
    Erspan,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Vxlan, Self::Geneve, Self::Gre, Self::Erspan];

    /// The keyword at the beginning of the text.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vxlan => "vxlan",
            Self::Geneve => "geneve",
            Self::Gre => "gre",
            Self::Erspan => "erspan",
        }
    }

    /// The keyword for the key, and the largest key.
    pub const fn key(self) -> (&'static str, u32) {
        match self {
            Self::Vxlan | Self::Geneve => ("vni", 0xff_ffff),
            Self::Gre => ("key", u32::MAX),
            Self::Erspan => ("session", 0x3ff),
        }
    }

    /// The UDP port that IANA assigned. `None`: the protocol has no ports.
    pub const fn usual_port(self) -> Option<u16> {
        match self {
            Self::Vxlan => Some(4789),
            Self::Geneve => Some(6081),
            Self::Gre | Self::Erspan => None,
        }
    }

    /// Header bytes between the IP header and the copy.
    const fn headers(self) -> u32 {
        match self {
            Self::Vxlan | Self::Geneve | Self::Erspan => 16,
            Self::Gre => 8,
        }
    }
}

/// The keys of a tunnel: a single key for all copies, or a range with a key of its own for each tap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Keys {
    /// The first key, at least 1.
    pub first: u32,
    /// The last key. Equal to the first: all copies have this key.
    pub last: u32,
}

impl Keys {
    /// Whether each tap gets a key of its own.
    pub const fn is_range(self) -> bool {
        self.first != self.last
    }

    /// Whether the range contains a key.
    pub const fn has(self, key: u32) -> bool {
        self.first <= key && key <= self.last
    }

    /// Number of keys.
    pub const fn count(self) -> usize {
        (self.last - self.first) as usize + 1
    }
}

/// The treatment of a copy that does not fit into one packet to the remote address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Oversize {
    /// The copy is cut. A super-frame is cut to one frame.
    Truncate,
    /// A super-frame is segmented. Any other copy is cut.
    Segment,
    /// The kernel segments super-frames, and fragments IP packets that are too long.
    Fragment,
    /// The copy is not sent, and counts as `congested`.
    Drop,
}

impl Oversize {
    /// All values. The position is the number in the maps.
    pub const ALL: [Self; 4] = [Self::Truncate, Self::Segment, Self::Fragment, Self::Drop];

    /// The value of the option.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Truncate => "truncate",
            Self::Segment => "segment",
            Self::Fragment => "fragment",
            Self::Drop => "drop",
        }
    }
}

/// Bytes of the GENEVE option that carries the identity.
const IDENTITY: u32 = 12;
/// Bytes of an Ethernet header, which a device's MTU does not include.
const ETHERNET: u32 = 14;
/// Minimum bytes for a copy. Less hardly holds the headers.
const LEAST_ROOM: u32 = 128;

impl Tunnel {
    /// Whether a receiver could not distinguish the copies of two tunnels.
    pub fn meets(&self, other: &Self) -> bool {
        (self.kind, self.remote, self.port) == (other.kind, other.remote, other.port)
            && self.keys.first <= other.keys.last
            && other.keys.first <= self.keys.last
    }

    /// Bytes of a packet before the copy.
    pub fn headers(&self) -> u32 {
        let ip = if self.remote.is_ipv6() { 40 } else { 20 };
        ip + self.kind.headers() + if self.identity { IDENTITY } else { 0 }
    }
}

/// Creates the devices that are missing. A device of podmirror that is down or of another kind is created again,
/// because its agent could have been killed before it was complete. No device is created for a tunnel whose remote
/// address is on this node, because the receiver there could need the port.
pub fn changes<'a>(
    tunnels: impl Iterator<Item = (&'a TargetName, &'a Tunnel)>,
    links: &LinkSnapshot,
) -> Vec<LinkChange> {
    let ends_here =
        |tunnel: &Tunnel| matches!(links.routes.get(&tunnel.remote), Some(Ok(route)) if route.is_local);
    let devices: BTreeSet<_> = tunnels
        .filter(|(_, tunnel)| !ends_here(tunnel))
        .filter_map(|(_, tunnel)| tunnel.own_device())
        .collect();
    let changes = devices.into_iter().flat_map(|device| match links.by_name(&device.to_string()) {
        None => vec![LinkChange::CreateTunnel(device)],
        Some(link) if is_half_made(link) || is_ours(link) && !device.is(link) => {
            vec![LinkChange::Delete(link.ifindex), LinkChange::CreateTunnel(device)]
        }
        Some(_) => vec![],
    });
    changes.collect()
}

/// Returns the target with its current state, and why nothing can be sent. `failure`: why the agent could not create
/// the device.
pub fn target(
    tunnel: &Tunnel,
    links: &LinkSnapshot,
    failure: Option<&String>,
) -> (DeviceTarget, Option<String>) {
    let link = link(tunnel, links, failure);
    let room = room(tunnel, link.as_ref().ok().copied(), links);
    let blocked = room.as_ref().err().or(link.as_ref().err()).cloned();
    let target = DeviceTarget {
        destination: Destination::Tunnel(tunnel.clone()),
        device: tunnel.device_name(),
        ifindex: link.as_ref().ok().map(|link| link.ifindex),
        up: blocked.is_none(),
        queueless: link.is_ok(),
        guarded: true,
        room: room.ok(),
        ..DeviceTarget::default()
    };
    (target, blocked)
}

/// Returns the device, if it accepts copies now.
fn link<'a>(tunnel: &Tunnel, links: &'a LinkSnapshot, failure: Option<&String>) -> Result<&'a Link, String> {
    if let Some(name) = &tunnel.existing {
        return device::of_others(name, tunnel.device(), links);
    }
    let name = tunnel.device_name();
    match links.by_name(&name) {
        Some(link) if tunnel.device().is(link) => Ok(link),
        Some(link) if !is_ours(link) && !is_half_made(link) => {
            Err(format!("the agent did not create the device {name}: rename or delete it"))
        }
        _ => Err(failure.cloned().unwrap_or_else(|| format!("the tunnel's device {name} does not exist"))),
    }
}

/// The longest frame that fits into one packet.
///
/// The MTU of other software's device is included, for GRE and ERSPAN: the kernel cuts longer packets, or answers the
/// sender of the inner packet with an ICMP error. Podmirror's devices have the largest MTU.
fn room(tunnel: &Tunnel, link: Option<&Link>, links: &LinkSnapshot) -> Result<u32, String> {
    let remote = tunnel.remote;
    let route = links.routes.get(&remote).cloned().unwrap_or_else(|| Err("it was not asked for".into()));
    let Route { ifindex, mtu, is_local } =
        route.map_err(|why| format!("this node has no route to {remote}: {why}"))?;
    if is_local {
        return Err(format!("{remote} is an address of this node; name a device instead"));
    }
    let Some(underlay) = links.host.get(&ifindex).filter(|link| link.up && link.carrier) else {
        let name = links.host.get(&ifindex).map_or_else(|| ifindex.to_string(), |link| link.name.clone());
        return Err(format!("the device {name}, where the packets leave, is down"));
    };
    let mtu = mtu.map_or(underlay.mtu, |mtu| mtu.min(underlay.mtu));
    let is_bound = tunnel.existing.is_some() && tunnel.kind.usual_port().is_none();
    let of_device = link.filter(|_| is_bound).map_or(u32::MAX, |link| link.mtu);
    let of_way = mtu.saturating_sub(tunnel.headers());
    let room = of_way.min(of_device.saturating_add(ETHERNET));
    match room >= LEAST_ROOM {
        // The second stage cannot cut to a larger size.
        true => Ok(room.min(MAX_SNAPLEN)),
        false => Err(format!("the MTU on the way, {}, leaves no room for copies", mtu.min(of_device))),
    }
}

#[cfg(test)]
mod tests;
