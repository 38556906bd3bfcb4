//! Tunnels: targets whose copies leave the node inside packets of another protocol.
//!
//! Pure. [`Tunnel`] is what the administrator named, [`changes`] makes the device, [`target`] says whether copies can go
//! now. The device is one for all tunnels of a kind and port, because the kernel lets only one device of a kind listen at a
//! port in this mode. Where a copy goes is decided for each copy, by `deliver`. Called by `destination` and the reconcile
//! loop.

use core::net::{IpAddr, SocketAddr};
use std::{collections::BTreeSet, fmt};

use crate::{
    destination::Destination,
    model::{DeviceTarget, LinkChange, LinkSnapshot, Route},
};

/// A tunnel, as in `vxlan:10.9.0.5:4789/vni=77`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tunnel {
    /// The other end.
    pub remote: IpAddr,
    /// Its UDP port.
    pub port: u16,
    /// The number of the network (VNI), by which the receiver and other agents know our packets.
    pub vni: u32,
    /// What becomes of a copy that does not fit into a packet.
    pub oversize: Oversize,
}

/// What becomes of a copy that does not fit into one packet to the other end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Oversize {
    /// It is cut.
    #[default]
    Truncate,
    /// A super-frame is segmented, any other copy is cut.
    Segment,
    /// The kernel segments super-frames, and makes IP fragments of packets that are too long.
    Fragment,
    /// It is not sent, and counts as `congested`.
    Drop,
}

impl Oversize {
    /// All of them; the place is the number in the maps.
    pub const ALL: [Self; 4] = [Self::Truncate, Self::Segment, Self::Fragment, Self::Drop];

    /// The word of the option.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Truncate => "truncate",
            Self::Segment => "segment",
            Self::Fragment => "fragment",
            Self::Drop => "drop",
        }
    }
}

/// The word at the beginning of the text.
pub const KIND: &str = "vxlan";
/// The port that IANA gave to VXLAN.
const PORT: u16 = 4789;
/// The largest number of a network: 24 bits.
const MAX_VNI: u32 = 0xff_ffff;
/// Bytes of a UDP header and a VXLAN header.
const HEADERS: u32 = 16;
/// The least room for a copy: without it hardly a header fits.
const LEAST_ROOM: u32 = 128;

/// Why copies cannot go into a tunnel now.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Blocked {
    /// The tunnel's device does not exist.
    NoDevice(String),
    /// It is down.
    DeviceDown(String),
    /// The node has no route to the other end, and why.
    NoRoute(IpAddr, String),
    /// The other end is an address of this node.
    Itself(IpAddr),
    /// The device through which the packets leave is down or gone.
    UnderlayDown(String),
    /// No copy fits into a packet.
    NoRoom(u32),
}

impl fmt::Display for Blocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDevice(name) => write!(f, "the tunnel's device {name} does not exist"),
            Self::DeviceDown(name) => write!(f, "the tunnel's device {name} is down"),
            Self::NoRoute(remote, why) => write!(f, "this node has no route to {remote}: {why}"),
            Self::Itself(remote) => write!(f, "{remote} is an address of this node; name a device instead"),
            Self::UnderlayDown(device) => write!(f, "the device {device}, where the packets leave, is down"),
            Self::NoRoom(mtu) => write!(f, "the MTU on the way, {mtu}, leaves no room for copies"),
        }
    }
}

impl Tunnel {
    /// Name of the device, which all tunnels of this port share.
    pub fn device(&self) -> String {
        format!("pm-{KIND}{}", self.port)
    }

    /// The text behind `vxlan:`.
    ///
    /// # Errors
    ///
    /// A message for the user, with the part that is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut parts = text.split('/');
        let (remote, port) = address(parts.next().unwrap_or_default())?;
        let (mut vni, mut oversize) = (None, Oversize::default());
        for option in parts {
            match option.split_once('=') {
                Some(("vni", number)) => {
                    let number = number.parse().ok().filter(|number| (1..=MAX_VNI).contains(number));
                    vni = Some(
                        number.ok_or_else(|| format!("{option:?}: a VNI is a number from 1 to {MAX_VNI}"))?,
                    );
                }
                Some(("oversize", word)) => {
                    let found = Oversize::ALL.into_iter().find(|oversize| oversize.name() == word);
                    oversize = found.ok_or_else(|| {
                        format!("{option:?}: use {}", Oversize::ALL.map(Oversize::name).join(", "))
                    })?;
                }
                _ => return Err(format!("{option:?} is no option of a tunnel: use vni=N or oversize=WORD")),
            }
        }
        let vni = vni.ok_or_else(|| format!("{text:?} has no VNI: add one, as in {text}/vni=77"))?;
        Ok(Self { remote, port, vni, oversize })
    }
}

impl fmt::Display for Tunnel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { remote, port, vni, oversize } = self;
        write!(f, "{KIND}:{}/vni={vni}", SocketAddr::new(*remote, *port))?;
        if *oversize != Oversize::default() { write!(f, "/oversize={}", oversize.name()) } else { Ok(()) }
    }
}

/// `10.9.0.5`, `10.9.0.5:4789`, `[fd00::5]` or `[fd00::5]:4789`.
fn address(text: &str) -> Result<(IpAddr, u16), String> {
    let bare = || text.trim_start_matches('[').trim_end_matches(']').parse().ok();
    let address = text.parse::<SocketAddr>().ok().or_else(|| Some(SocketAddr::new(bare()?, PORT)));
    let address = address.ok_or_else(|| {
        format!("{text:?} is no address: use one as in 10.9.0.5:{PORT} or [fd00::5]:{PORT}")
    })?;
    let (ip, port) = (address.ip(), address.port());
    if ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || port == 0 {
        return Err(format!("{text:?} is no address of another node"));
    }
    Ok((ip, port))
}

/// The devices that are missing.
pub fn changes<'a>(tunnels: impl Iterator<Item = &'a Tunnel>, links: &LinkSnapshot) -> Vec<LinkChange> {
    let devices: BTreeSet<_> = tunnels.map(|tunnel| (tunnel.device(), tunnel.port)).collect();
    let missing = devices.into_iter().filter(|(name, _)| links.by_name(name).is_none());
    missing.map(|(name, port)| LinkChange::CreateTunnel { name, port }).collect()
}

/// The target with its present state, and why nothing can be sent.
pub fn target(tunnel: &Tunnel, links: &LinkSnapshot) -> (DeviceTarget, Option<Blocked>) {
    let device = tunnel.device();
    let link = links.by_name(&device);
    let room = room(tunnel, links);
    let blocked = match (link, &room) {
        (None, _) => Some(Blocked::NoDevice(device.clone())),
        (Some(link), _) if !link.up => Some(Blocked::DeviceDown(device.clone())),
        (_, Err(blocked)) => Some(blocked.clone()),
        (_, Ok(_)) => None,
    };
    let target = DeviceTarget {
        destination: Destination::Tunnel(tunnel.clone()),
        device,
        ifindex: link.map(|link| link.ifindex),
        up: blocked.is_none(),
        queueless: link.is_some_and(|link| link.queueless),
        guarded: true,
        room: room.ok(),
        ..DeviceTarget::default()
    };
    (target, blocked)
}

/// The longest frame that fits into one packet.
fn room(tunnel: &Tunnel, links: &LinkSnapshot) -> Result<u32, Blocked> {
    let remote = tunnel.remote;
    let route = match links.routes.get(&remote) {
        Some(Ok(route)) => route,
        Some(Err(why)) => return Err(Blocked::NoRoute(remote, why.clone())),
        None => return Err(Blocked::NoRoute(remote, "it was not asked for".into())),
    };
    let Route { ifindex, mtu, is_local } = *route;
    if is_local {
        return Err(Blocked::Itself(remote));
    }
    let Some(link) = links.host.get(&ifindex).filter(|link| link.up && link.carrier) else {
        let name = links.host.get(&ifindex).map_or_else(|| ifindex.to_string(), |link| link.name.clone());
        return Err(Blocked::UnderlayDown(name));
    };
    let mtu = mtu.map_or(link.mtu, |mtu| mtu.min(link.mtu));
    let ip_header = if remote.is_ipv6() { 40 } else { 20 };
    let room = mtu.checked_sub(ip_header + HEADERS).filter(|room| *room >= LEAST_ROOM);
    room.ok_or(Blocked::NoRoom(mtu))
}

#[cfg(test)]
mod tests;
