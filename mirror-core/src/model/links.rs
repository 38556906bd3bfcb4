//! Network devices as types: of the node, and inside its pods.
//!
//! Data only, as the rest of [`model`](super).

use core::net::IpAddr;
use std::collections::{BTreeMap, BTreeSet};

use super::{IfIndex, MacAddress, NetnsId};
use crate::tunnel::TunnelDevice;

/// The special kind of a device (`IFLA_INFO_KIND`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum LinkKind {
    /// The loopback device.
    Loopback,
    /// An end of a pair of devices: a veth, or a netkit device.
    Veth,
    /// Drops the packets that are sent to it: made for captures.
    Dummy,
    /// Puts the packets that are sent to it back into their former path.
    Ifb,
    /// An ipvlan in mode l3s: what comes from outside the node does not pass the hooks of the NIC.
    IpvlanL3s,
    /// Anything else, by the kernel's word for it; empty for a physical device.
    Other(String),
}

/// The other end of a veth or netkit device (`IFLA_LINK`, `IFLA_LINK_NETNSID`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Peer {
    /// Index of the peer in its own network namespace.
    pub ifindex: u32,
    /// The peer's namespace by the id that the viewing namespace has for it; `None`: the same namespace.
    pub nsid: Option<i32>,
}

/// A network device, seen from the namespace that it is in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Index.
    pub ifindex: IfIndex,
    /// Name.
    pub name: String,
    /// Kind.
    pub kind: LinkKind,
    /// Administratively up (`IFF_UP`).
    pub up: bool,
    /// Has a carrier (`IFF_LOWER_UP`).
    pub carrier: bool,
    /// The bridge, bond or VRF that it is a port of.
    pub master: Option<IfIndex>,
    /// The other end, for a veth or netkit device; the lower device, for a VLAN and its like.
    pub peer: Option<Peer>,
    /// The device has no queue of its own (`IFLA_QDISC` is `noqueue`), so it cannot be congested.
    pub queueless: bool,
    /// Its frames begin with an Ethernet header (`ARPHRD_ETHER`, `ARPHRD_LOOPBACK`), and not with an IP header as those
    /// of tun devices.
    pub is_ethernet: bool,
    /// Its MAC address (`IFLA_ADDRESS`), for a device with an address of that length.
    pub address: Option<MacAddress>,
    /// MTU in bytes.
    pub mtu: u32,
    /// `IFLA_IFALIAS`.
    pub alias: Option<String>,
    /// It is a tunnel's device in external mode (collect metadata): each packet brings its own address. The UDP port at
    /// which it listens, or 0 for a kind without ports.
    pub external: Option<u16>,
    /// It is a macvlan in private mode: it exchanges no packets with others over the same lower device.
    pub is_private: bool,
    /// The work that the device takes over from the kernel when it sends; `None`: not requested, or unknown.
    pub offloads: Option<Offloads>,
}

/// The offloads with which the kernel hands a device super-frames and unfinished checksums, by their ethtool names.
/// Offloads that are off and must stay off are not included.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Offloads {
    /// On, and can be switched off.
    pub on: BTreeSet<String>,
    /// Off, and can be switched on.
    pub off: BTreeSet<String>,
    /// On, and cannot be switched off.
    pub fixed: BTreeSet<String>,
}

/// The devices inside one pod's network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodLinks {
    /// The namespace.
    pub netns: NetnsId,
    /// It is the node's own namespace.
    pub is_host: bool,
    /// The id that the node's namespace has for this namespace (`RTM_GETNSID`); `None`: none yet, so no device of it
    /// has its peer on the node.
    pub nsid: Option<i32>,
    /// Its devices, loopback included; none, if they could not be read.
    pub links: Vec<Link>,
    /// Why not all devices are in `links`: the namespace could not be read now, and `links` holds those of the last reading
    /// that still exist, or it has too many devices.
    pub stale: Option<String>,
}

impl PodLinks {
    /// The node's end of a veth of this pod, checked in both directions: the NIC names the device, and the device names
    /// the NIC and the pod's namespace. An index alone proves nothing, because each namespace counts its own.
    pub fn host_end<'a>(&self, nic: &Link, host: &'a BTreeMap<IfIndex, Link>) -> Option<&'a Link> {
        let peer = nic.peer.filter(|_| nic.kind == LinkKind::Veth)?;
        let link = host.get(&IfIndex(peer.ifindex))?;
        let back = link.peer.filter(|_| link.kind == LinkKind::Veth)?;
        let same_pair = back.ifindex == nic.ifindex.0 && back.nsid.is_some() && back.nsid == self.nsid;
        same_pair.then_some(link)
    }
}

/// The devices of the node, and of the pods in the request, at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LinkSnapshot {
    /// Devices of the node's network namespace.
    pub host: BTreeMap<IfIndex, Link>,
    /// By pod UID: the devices inside, or why they could not be read.
    pub pods: BTreeMap<String, Result<PodLinks, String>>,
    /// The IP addresses of the devices of targets, and of the other ends of their veths, where they have any.
    pub addresses: BTreeMap<IfIndex, BTreeSet<IpAddr>>,
    /// The routes to the other ends of tunnels, or why there is none.
    pub routes: BTreeMap<IpAddr, Result<Route, String>>,
}

/// A route of the node to an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// The device through which packets leave.
    pub ifindex: IfIndex,
    /// The MTU of the route in bytes, where it has one of its own.
    pub mtu: Option<u32>,
    /// The address is the node's own.
    pub is_local: bool,
}

impl LinkSnapshot {
    /// The node's device of this name.
    pub fn by_name(&self, name: &str) -> Option<&Link> {
        self.host.values().find(|link| link.name == name)
    }
}

/// Alias (`IFLA_IFALIAS`) of the devices that we make: only devices with this alias may be deleted.
pub const ALIAS: &str = "podmirror";

/// A change of a mirror interface, of a tunnel's device, or of the exits of pods, decided by
/// [`mirror_iface`](crate::mirror_iface), [`tunnel`](crate::tunnel) and [`exit`](crate::exit).
///
/// To change a device that has gone is not an error: the next snapshot shows that it has gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinkChange {
    /// Makes a dummy device, or a veth pair where the kernel has no dummy driver: no ARP, no multicast, no IPv6
    /// address, our alias, up. An error if the name is taken.
    CreateMirror {
        /// Name of the device to be.
        name: String,
        /// Its MTU in bytes.
        mtu: u32,
        /// Whether it keeps its offloads; if not, it gets a queue too.
        offloads: bool,
    },
    /// Makes the hub of the exits: as above, and it drops what arrives, because a macvlan that root in a pod has made over it
    /// would hand packets to another one by this way.
    CreateHub,
    /// Makes the device of a tunnel, whose packets each have an address of their own: as above, and it drops what
    /// arrives. An error if the name or the port is taken, or if the kernel has no such devices.
    CreateTunnel(TunnelDevice),
    /// Brings a device up.
    SetUp(IfIndex),
    /// Changes the MTU of a device, in bytes.
    SetMtu(IfIndex, u32),
    /// Takes all IP addresses from a device.
    RemoveAddresses(IfIndex),
    /// Switches all of a device's changeable offloads (see [`Offloads`]) on or off. An error if one of them does not
    /// follow.
    SetOffloads(IfIndex, bool),
    /// Gives a device without a queue our queue, in which the copies that the kernel segments keep their order; or
    /// removes our queue. A queue that other software has set is never replaced: an error if it would have to be, and
    /// no change otherwise.
    SetQueue(IfIndex, bool),
    /// Deletes a device, and with it the other end of a veth pair.
    Delete(IfIndex),
    /// Makes the exit of the pod with this namespace over the hub with this index (see [`exit`](crate::exit)): no ARP, no
    /// multicast, no IPv6 address, up. An error if its name or index is taken inside the pod.
    CreateExit(NetnsId, IfIndex),
    /// Deletes the exit of the pod with this namespace. Any other device there stays.
    DeleteExit(NetnsId),
}
