//! Network devices of the node and inside its pods.
//!
//! Data only, as the rest of [`model`](super).

use core::net::IpAddr;
use std::collections::{BTreeMap, BTreeSet};

use super::{IfIndex, MacAddress, NetnsId};
use crate::tunnel::TunnelDevice;

/// The kind of a device (`IFLA_INFO_KIND`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum LinkKind {
    /// The loopback device.
    Loopback,
    /// One device of a pair: veth or netkit.
    Veth,
    /// A dummy device. It drops the packets that are sent to it.
    Dummy,
    /// An ifb device. It puts packets that are sent to it back into the path that they came from.
    Ifb,
    /// An ipvlan in mode l3s. Packets from outside the node do not pass the hooks of the NIC.
    IpvlanL3s,
    /// Any other kind, by the kernel's name for it. Empty for a physical device.
    Other(String),
}

/// The other end of a veth or netkit device (`IFLA_LINK`, `IFLA_LINK_NETNSID`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Peer {
    /// Index of the peer in its own network namespace.
    pub ifindex: u32,
    /// Id of the peer's namespace, as seen from the namespace of this device. `None`: the same namespace.
    pub nsid: Option<i32>,
}

/// A network device, seen from its own namespace.
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
    /// The bridge, bond or VRF that the device is a port of.
    pub master: Option<IfIndex>,
    /// The peer of a veth or netkit device; the lower device of a VLAN, macvlan and the like.
    pub peer: Option<Peer>,
    /// The device has no queue of its own (`IFLA_QDISC` is `noqueue`), so it cannot be congested.
    pub queueless: bool,
    /// The frames of the device begin with an Ethernet header (`ARPHRD_ETHER`, `ARPHRD_LOOPBACK`), not with an IP
    /// header as on tun devices.
    pub is_ethernet: bool,
    /// MAC address (`IFLA_ADDRESS`), if the address has the length of a MAC address.
    pub address: Option<MacAddress>,
    /// MTU in bytes.
    pub mtu: u32,
    /// `IFLA_IFALIAS`.
    pub alias: Option<String>,
    /// UDP port of a tunnel device in external mode (collect metadata), where each packet carries its own tunnel
    /// address. 0 for a kind of tunnel without ports.
    pub external: Option<u16>,
    /// The device is a macvlan in private mode: it exchanges no packets with other macvlans on the same lower device.
    pub is_private: bool,
    /// The transmit offloads of the device. `None`: not requested, or unknown.
    pub offloads: Option<Offloads>,
}

impl Link {
    /// A device that is up and has no queue. Nothing else of it is known.
    pub fn new(ifindex: IfIndex, name: &str, kind: LinkKind, peer: Option<Peer>) -> Self {
        Self {
            ifindex,
            name: name.to_owned(),
            kind,
            up: true,
            carrier: true,
            master: None,
            peer,
            queueless: true,
            is_ethernet: true,
            address: None,
            mtu: 0,
            alias: None,
            external: None,
            is_private: false,
            offloads: None,
        }
    }
}

/// The offloads with which the kernel passes super-frames and unfinished checksums to a device, by their ethtool names.
/// Offloads that are off and cannot be switched on are not included.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Offloads {
    /// On, and can be switched off.
    pub on: BTreeSet<String>,
    /// Off, and can be switched on.
    pub off: BTreeSet<String>,
    /// On, and cannot be switched off.
    pub fixed: BTreeSet<String>,
}

/// The devices inside the network namespace of one pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodLinks {
    /// The namespace.
    pub netns: NetnsId,
    /// The namespace is the node's own.
    pub is_host: bool,
    /// The id of this namespace in the node's namespace (`RTM_GETNSID`). `None`: it has no id yet, so no device of it
    /// has a peer on the node.
    pub nsid: Option<i32>,
    /// The devices, loopback included. Empty if they could not be read.
    pub links: Vec<Link>,
    /// Why `links` is not the complete current list. Either the namespace could not be read or found, and `links` holds
    /// those devices of the last reading or of installed taps that still exist; or the namespace has too many devices.
    pub stale: Option<String>,
}

impl PodLinks {
    /// The node side of a veth of this pod. Both directions are checked: the NIC names the device, and the device names
    /// the NIC and the pod's namespace. An ifindex alone proves nothing, because each namespace has its own numbering.
    pub fn host_end<'a>(&self, nic: &Link, host: &'a BTreeMap<IfIndex, Link>) -> Option<&'a Link> {
        let peer = nic.peer.filter(|_| nic.kind == LinkKind::Veth)?;
        let link = host.get(&IfIndex(peer.ifindex))?;
        let back = link.peer.filter(|_| link.kind == LinkKind::Veth)?;
        let same_pair = back.ifindex == nic.ifindex.0 && back.nsid.is_some() && back.nsid == self.nsid;
        same_pair.then_some(link)
    }
}

/// The devices of the node and of the requested pods, at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LinkSnapshot {
    /// Devices of the node's network namespace, by index.
    pub host: BTreeMap<IfIndex, Link>,
    /// The devices inside each pod, by pod UID; or why they could not be read.
    pub pods: BTreeMap<String, Result<PodLinks, String>>,
    /// The IP addresses of the devices of targets and of their veth peers. Devices without an address are not included.
    pub addresses: BTreeMap<IfIndex, BTreeSet<IpAddr>>,
    /// The routes to the remote addresses of tunnels, or why there is no route.
    pub routes: BTreeMap<IpAddr, Result<Route, String>>,
}

/// A route of the node to an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// The device through which packets leave.
    pub ifindex: IfIndex,
    /// MTU of the route in bytes, if the route sets one.
    pub mtu: Option<u32>,
    /// The address belongs to the node itself.
    pub is_local: bool,
}

impl LinkSnapshot {
    /// The node's device of this name.
    pub fn by_name(&self, name: &str) -> Option<&Link> {
        self.host.values().find(|link| link.name == name)
    }

    /// The bridge that a device of the node is a port of. `None` for a port of a VRF or a bond, which forwards no frame
    /// by its MAC address. All bridges of Open vSwitch are one device here.
    pub fn bridge_of(&self, port: &Link) -> Option<IfIndex> {
        const KINDS: [&str; 2] = ["bridge", "openvswitch"];
        let is_bridge =
            |link: &Link| matches!(&link.kind, LinkKind::Other(kind) if KINDS.contains(&kind.as_str()));
        port.master.filter(|master| self.host.get(master).is_some_and(is_bridge))
    }
}

/// Alias (`IFLA_IFALIAS`) of the devices that podmirror creates. The agent deletes only devices with this alias, and
/// those that it has not completed.
pub const ALIAS: &str = "podmirror";
/// Lowest index of the devices that podmirror creates on the node. No device inside a pod has such a high index.
/// With a lower one, if a tapped device is moved into a pod while no agent runs, its programs could clone packets
/// to a device of the pod.
pub const FIRST_IFINDEX: IfIndex = IfIndex(0x706d_0001);

/// A change of a mirror interface, a tunnel device or a relay device, decided by [`mirror_iface`](crate::mirror_iface),
/// [`tunnel`](crate::tunnel) and [`exit`](crate::exit).
///
/// A change of a device that no longer exists is not an error: the next snapshot shows that the device is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LinkChange {
    /// Creates a dummy device, or a veth pair if the kernel has no dummy driver. The device has no ARP, no multicast,
    /// no IPv6 address and podmirror's alias, and is up. Returns an error if the name is taken.
    CreateMirror {
        /// Name of the new device.
        name: String,
        /// MTU of the new device in bytes.
        mtu: u32,
        /// Whether the device keeps its offloads. Otherwise they are switched off and it also gets a queue.
        offloads: bool,
    },
    /// Creates the relay hub: a device as for [`Self::CreateMirror`] that also drops all ingress packets. Otherwise a
    /// macvlan that root in a pod creates on it could pass packets to another macvlan.
    CreateHub,
    /// Creates a tunnel device in external mode, where each packet carries its own tunnel address. As for
    /// [`Self::CreateMirror`], but the device also drops all ingress packets. Returns an error if the name or the port
    /// is taken, or if the kernel does not support such devices.
    CreateTunnel(TunnelDevice),
    /// Sets a device up.
    SetUp(IfIndex),
    /// Changes the MTU of a device, in bytes.
    SetMtu(IfIndex, u32),
    /// Removes all IP addresses from a device.
    RemoveAddresses(IfIndex),
    /// Switches all changeable offloads of a device (see [`Offloads`]) on or off. Returns an error if one of them does
    /// not change.
    SetOffloads(IfIndex, bool),
    /// Adds podmirror's queue to a device without a queue, so that copies that the kernel segments keep their order; or
    /// removes that queue. A queue that other software has set is never replaced: the op returns an error if it would
    /// have to be, and otherwise changes nothing.
    SetQueue(IfIndex, bool),
    /// Deletes a device. The peer of a veth is deleted with it.
    Delete(IfIndex),
    /// Creates the relay device of the pod with this namespace, on the relay hub with this index (see
    /// [`exit`](crate::exit)). The device has no ARP, no multicast and no IPv6 address, and is up. Returns an error if
    /// its name or index is taken inside the pod.
    CreateExit(NetnsId, IfIndex),
    /// Deletes the relay device of the pod with this namespace. Other devices there are kept.
    DeleteExit(NetnsId),
}
