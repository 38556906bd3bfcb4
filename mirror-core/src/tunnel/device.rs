//! The devices of tunnels: those that we make, and those of other software that the administrator names.
//!
//! Pure: which device a tunnel needs, and whether one of the node's is such a device. The parent module decides what is
//! made and calls this; the agent's `links` makes the devices.

use std::fmt;

use super::{Kind, Tunnel};
use crate::{
    mirror_iface::is_ours,
    model::{Link, LinkKind, LinkSnapshot},
};

/// What the device of a tunnel has to be. All tunnels with the same one share the device that we make.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TunnelDevice {
    /// A VXLAN device that listens at this UDP port.
    Vxlan(u16),
    /// A GENEVE device that listens at this UDP port.
    Geneve(u16),
    /// A device for Ethernet in GRE, over IPv4 or IPv6.
    Gre(Family),
    /// A device for ERSPAN, over IPv4 or IPv6.
    Erspan(Family),
}

/// The family of the addresses of a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// The name of the device that we make.
impl fmt::Display for TunnelDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let family = |family| if family == Family::V4 { 4 } else { 6 };
        match *self {
            Self::Vxlan(port) => write!(f, "pm-vxlan{port}"),
            Self::Geneve(port) => write!(f, "pm-geneve{port}"),
            Self::Gre(of) => write!(f, "pm-gre{}", family(of)),
            Self::Erspan(of) => write!(f, "pm-erspan{}", family(of)),
        }
    }
}

impl TunnelDevice {
    /// The kernel's word for such a device.
    const fn kind(self) -> &'static str {
        match self {
            Self::Vxlan(_) => "vxlan",
            Self::Geneve(_) => "geneve",
            Self::Gre(Family::V4) => "gretap",
            Self::Gre(Family::V6) => "ip6gretap",
            Self::Erspan(Family::V4) => "erspan",
            Self::Erspan(Family::V6) => "ip6erspan",
        }
    }

    /// The UDP port at which it listens; 0: it has none.
    const fn port(self) -> u16 {
        match self {
            Self::Vxlan(port) | Self::Geneve(port) => port,
            Self::Gre(_) | Self::Erspan(_) => 0,
        }
    }

    /// Whether this is such a device, made by us, up and without a queue: a copy that waits would get the address of a later
    /// one.
    pub(super) fn is(self, link: &Link) -> bool {
        is_ours(link) && self.unusable(link).is_none()
    }

    /// Why a device cannot be used for the tunnel as it is, whoever has made it.
    fn unusable(self, link: &Link) -> Option<Unusable> {
        match (&link.kind, link.external) {
            (LinkKind::Other(kind), _) if kind != self.kind() => Some(Unusable::Kind(kind.clone())),
            (LinkKind::Other(_), None) => Some(Unusable::NotExternal),
            (LinkKind::Other(_), Some(port)) if port != self.port() => Some(Unusable::Port(port)),
            // Such as VXLAN-GPE.
            (LinkKind::Other(_), _) if !link.is_ethernet => Some(Unusable::NoEthernet),
            (LinkKind::Other(_), _) if !link.up => Some(Unusable::Down),
            (LinkKind::Other(_), _) if !link.queueless => Some(Unusable::Queue),
            (LinkKind::Other(_), _) => None,
            (kind, _) => Some(Unusable::Kind(format!("{kind:?}").to_lowercase())),
        }
    }
}

/// Why a device of other software takes no copies of a tunnel.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Unusable {
    /// It does not exist.
    Missing,
    /// We have made it, for a target that names no device.
    Ours,
    /// It is of this kind.
    Kind(String),
    /// All its packets go to the one address that it was made with.
    NotExternal,
    /// It has this UDP port.
    Port(u16),
    /// Its packets have no Ethernet header.
    NoEthernet,
    /// It is down.
    Down,
    /// It has a queue. A copy that waits would get the address of a later one.
    Queue,
}

/// A device of other software that takes no copies of a tunnel, and why.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Unfit {
    name: String,
    needed: TunnelDevice,
    why: Unusable,
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, needed, why } = self;
        let (kind, port) = (needed.kind(), needed.port());
        let with_port = if port == 0 { String::new() } else { format!(" dstport {port}") };
        match why {
            Unusable::Missing => write!(
                f,
                "the device {name} does not exist, and with device= the agent makes none: make it, as with \"ip link add \
                 {name} type {kind}{with_port} external\""
            ),
            Unusable::Ours => {
                write!(f, "the agent has made the device {name} itself: leave out device={name}")
            }
            Unusable::Kind(other) if other.is_empty() => {
                write!(f, "the device {name} is no tunnel's: name one of the kind {kind}")
            }
            Unusable::Kind(other) => {
                write!(f, "the device {name} is of the kind {other}: name one of the kind {kind}")
            }
            Unusable::NotExternal => write!(
                f,
                "the device {name} is not in external mode (collect metadata), so its packets go to one address only: \
                 make it with \"external\""
            ),
            Unusable::Port(other) => {
                write!(f, "the device {name} uses port {other}, and the target names port {port}")
            }
            Unusable::NoEthernet => write!(f, "the packets of the device {name} have no Ethernet header"),
            Unusable::Down => write!(f, "the device {name} is down: bring it up"),
            Unusable::Queue => write!(
                f,
                "the device {name} has a queue, where a copy could get the address of a later one: take it away, as with \
                 \"tc qdisc replace dev {name} root noqueue\""
            ),
        }
    }
}

/// The device of other software with this name, for a tunnel that needs such a device.
pub(super) fn of_others<'a>(
    name: &str,
    needed: TunnelDevice,
    links: &'a LinkSnapshot,
) -> Result<&'a Link, Unfit> {
    let found = links.by_name(name).ok_or(Unusable::Missing).and_then(|link| {
        let why = if is_ours(link) { Some(Unusable::Ours) } else { needed.unusable(link) };
        why.map_or(Ok(link), Err)
    });
    found.map_err(|why| Unfit { name: name.to_owned(), needed, why })
}

impl Tunnel {
    /// What its device has to be.
    pub const fn device(&self) -> TunnelDevice {
        let family = if self.remote.is_ipv6() { Family::V6 } else { Family::V4 };
        match self.kind {
            Kind::Vxlan => TunnelDevice::Vxlan(self.port),
            Kind::Geneve => TunnelDevice::Geneve(self.port),
            Kind::Gre => TunnelDevice::Gre(family),
            Kind::Erspan2 | Kind::Erspan3 => TunnelDevice::Erspan(family),
        }
    }

    /// The name of its device.
    pub fn device_name(&self) -> String {
        self.existing.clone().unwrap_or_else(|| self.device().to_string())
    }

    /// The device that we make for it; `None`: it uses one of other software.
    pub fn own_device(&self) -> Option<TunnelDevice> {
        self.existing.is_none().then(|| self.device())
    }
}
