//! The devices of tunnels: podmirror's own, and other software's that the administrator configures.
//!
//! Pure: which device a tunnel needs, and whether a device of the node is suitable. The parent module decides which
//! devices to create and calls this one; the agent's `links` creates them.

use std::fmt;

use super::{Kind, Tunnel};
use crate::{
    mirror_iface::is_ours,
    model::{Link, LinkKind, LinkSnapshot},
};

/// The required device of a tunnel. All tunnels with the same requirement share the device that the agent creates.
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

/// The address family of a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// The name of the device that the agent creates.
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
    /// The kernel's name of the kind.
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

    /// The UDP port of the device. 0: it has none.
    const fn port(self) -> u16 {
        match self {
            Self::Vxlan(port) | Self::Geneve(port) => port,
            Self::Gre(_) | Self::Erspan(_) => 0,
        }
    }

    /// Whether this is such a device, created by podmirror, up and without a queue. A queued copy would get the tunnel
    /// address of a later one.
    pub(super) fn is(self, link: &Link) -> bool {
        is_ours(link) && self.unusable(link).is_none()
    }

    /// Why a device cannot be used for the tunnel, no matter who created it.
    fn unusable(self, link: &Link) -> Option<Unusable> {
        match (&link.kind, link.external) {
            (LinkKind::Other(kind), _) if kind != self.kind() => Some(Unusable::Kind(kind.clone())),
            (LinkKind::Other(_), None) => Some(Unusable::NotExternal),
            (LinkKind::Other(_), Some(port)) if port != self.port() => Some(Unusable::Port(port)),
            // For example VXLAN-GPE.
            (LinkKind::Other(_), _) if !link.is_ethernet => Some(Unusable::NoEthernet),
            (LinkKind::Other(_), _) if !link.up => Some(Unusable::Down),
            (LinkKind::Other(_), _) if !link.queueless => Some(Unusable::Queue),
            (LinkKind::Other(_), _) => None,
            (kind, _) => Some(Unusable::Kind(format!("{kind:?}").to_lowercase())),
        }
    }
}

/// Why other software's device does not accept copies of a tunnel.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Unusable {
    /// The device does not exist.
    Missing,
    /// Podmirror created it, for a target that configures no device.
    Ours,
    /// The device is of this other kind.
    Kind(String),
    /// All its packets go to the one address that it was created with.
    NotExternal,
    /// The device has this other UDP port.
    Port(u16),
    /// Its packets have no Ethernet header.
    NoEthernet,
    /// The device is down.
    Down,
    /// The device has a queue. A queued copy would get the tunnel address of a later one.
    Queue,
}

/// A device of other software that does not accept copies of a tunnel, and why.
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
                "the device {name} does not exist, and with device= the agent does not create it: create it, for example with \"ip link add \
                 {name} type {kind}{with_port} external\""
            ),
            Unusable::Ours => {
                write!(f, "the agent created the device {name} itself: remove device={name}")
            }
            Unusable::Kind(other) if other.is_empty() => {
                write!(f, "the device {name} is not a tunnel: name one of kind {kind}")
            }
            Unusable::Kind(other) => {
                write!(f, "the device {name} is of kind {other}: name one of kind {kind}")
            }
            Unusable::NotExternal => write!(
                f,
                "the device {name} is not in external mode (collect metadata), so it sends to one address only: \
                 create it with \"external\""
            ),
            Unusable::Port(other) => {
                write!(f, "the device {name} uses port {other}, and the target names port {port}")
            }
            Unusable::NoEthernet => write!(f, "the packets of the device {name} have no Ethernet header"),
            Unusable::Down => write!(f, "the device {name} is down: bring it up"),
            Unusable::Queue => write!(
                f,
                "the device {name} has a queue, where a copy could get the address of a later one: remove it, for example with \
                 \"tc qdisc replace dev {name} root noqueue\""
            ),
        }
    }
}

/// Returns other software's device of this name, if it is suitable for the tunnel.
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
    /// The required device.
    pub const fn device(&self) -> TunnelDevice {
        let family = if self.remote.is_ipv6() { Family::V6 } else { Family::V4 };
        match self.kind {
            Kind::Vxlan => TunnelDevice::Vxlan(self.port),
            Kind::Geneve => TunnelDevice::Geneve(self.port),
            Kind::Gre => TunnelDevice::Gre(family),
            Kind::Erspan => TunnelDevice::Erspan(family),
        }
    }

    /// The name of the device.
    pub fn device_name(&self) -> String {
        self.existing.clone().unwrap_or_else(|| self.device().to_string())
    }

    /// The device that the agent creates. `None`: the tunnel uses a device of other software.
    pub fn own_device(&self) -> Option<TunnelDevice> {
        self.existing.is_none().then(|| self.device())
    }
}
