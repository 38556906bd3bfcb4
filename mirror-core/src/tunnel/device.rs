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
    fn unusable(self, link: &Link) -> Option<String> {
        let (name, kind, port) = (&link.name, self.kind(), self.port());
        let other = match &link.kind {
            LinkKind::Other(other) => other.clone(),
            other => format!("{other:?}").to_lowercase(),
        };
        Some(match link.external {
            _ if other.is_empty() => format!("the device {name} is not a tunnel: name one of kind {kind}"),
            _ if other != kind => format!("the device {name} is of kind {other}: name one of kind {kind}"),
            None => format!(
                "the device {name} is not in external mode (collect metadata), so it sends to one address only: \
                 create it with \"external\""
            ),
            Some(other) if other != port => {
                format!("the device {name} uses port {other}, and the target names port {port}")
            }
            // For example VXLAN-GPE.
            _ if !link.is_ethernet => format!("the packets of the device {name} have no Ethernet header"),
            _ if !link.up => format!("the device {name} is down: bring it up"),
            _ if !link.queueless => format!(
                "the device {name} has a queue, where a copy could get the address of a later one: remove it, for example with \
                 \"tc qdisc replace dev {name} root noqueue\""
            ),
            Some(_) => return None,
        })
    }
}

/// Returns other software's device of this name, if it is suitable for the tunnel; otherwise why it is not.
pub(super) fn of_others<'a>(
    name: &str,
    needed: TunnelDevice,
    links: &'a LinkSnapshot,
) -> Result<&'a Link, String> {
    let Some(link) = links.by_name(name) else {
        let with_port =
            if needed.port() == 0 { String::new() } else { format!(" dstport {}", needed.port()) };
        return Err(format!(
            "the device {name} does not exist, and with device= the agent does not create it: create it, for example with \"ip link add \
             {name} type {}{with_port} external\"",
            needed.kind()
        ));
    };
    if is_ours(link) {
        return Err(format!("the agent created the device {name} itself: remove device={name}"));
    }
    needed.unusable(link).map_or(Ok(link), Err)
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
