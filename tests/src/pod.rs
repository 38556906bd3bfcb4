//! Pods as their node sees them: a network namespace and NICs, on a bridge or routed.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use crate::{Lab, Mac, Netns, SOON, check, eventually, netkit};

/// The wiring of pods.
#[derive(Debug)]
pub(crate) enum Topology<'a> {
    /// Ports of this bridge.
    Bridge(&'a str),
    /// Netkit devices with Ethernet frames, whose node sides are ports of this bridge.
    Netkit(&'a str),
    /// Netkit devices without Ethernet addresses. The node routes to each pod's address.
    RoutedNetkit,
    /// The node routes to each pod's address and answers ARP for all others.
    Routed,
    /// Devices of this kind (for example `macvlan mode bridge`) over this device of the node.
    Over(&'a str, &'a str),
    /// Ports of this bridge in another namespace; the NIC has no peer on the node.
    Elsewhere(&'a Netns, &'a str),
}

/// A network interface of a pod.
#[derive(Debug, Clone)]
pub struct Nic {
    /// Its name in the pod.
    pub name: String,
    /// The name of its peer on the node, or of the NIC itself if it has no peer there.
    pub host: String,
    /// Its MAC address.
    pub mac: Mac,
    /// Its IPv4 address.
    pub v4: Ipv4Addr,
    /// Its IPv6 address.
    pub v6: Ipv6Addr,
}

/// A pod's network namespace, with `eth0` and the other NICs of the test. The namespace and its veths are removed on
/// drop.
#[derive(Debug)]
pub struct PodNs {
    name: String,
    netns: Netns,
    nics: Vec<Nic>,
}

impl PodNs {
    pub(crate) fn new(lab: &Lab, name: &str, number: u8, topology: &Topology<'_>) -> Self {
        let netns = Netns::new(&format!("{}-{name}{number}", lab.node().name()));
        Self::of_netns(lab, name, number, netns, topology)
    }

    pub(crate) fn of_netns(lab: &Lab, name: &str, number: u8, netns: Netns, topology: &Topology<'_>) -> Self {
        netns.keep_quiet();
        let mut pod = Self { name: name.to_owned(), netns, nics: Vec::new() };
        pod.add_nic_at(lab, number, topology);
        pod
    }

    /// Adds a NIC (`eth1`, …) on a bridge, and returns its index among [`PodNs::nics`].
    #[track_caller]
    pub fn add_nic(&mut self, lab: &Lab, bridge: &str) -> usize {
        self.add_nic_at(lab, lab.next_number(), &Topology::Bridge(bridge));
        self.nics.len() - 1
    }

    /// Adds a NIC of this kind over a device of the node, and returns its index among [`PodNs::nics`].
    #[track_caller]
    pub fn add_nic_over(&mut self, lab: &Lab, kind: &str, parent: &str) -> usize {
        self.add_nic_at(lab, lab.next_number(), &Topology::Over(kind, parent));
        self.nics.len() - 1
    }

    /// Adds a netkit device, whose node side is a port of this bridge, and returns its index among [`PodNs::nics`].
    #[track_caller]
    pub fn add_netkit_nic(&mut self, lab: &Lab, bridge: &str) -> usize {
        self.add_nic_at(lab, lab.next_number(), &Topology::Netkit(bridge));
        self.nics.len() - 1
    }

    /// Adds a NIC that bypasses the node and leads to a bridge in this namespace, and returns its index among
    /// [`PodNs::nics`].
    #[track_caller]
    pub fn add_nic_elsewhere(&mut self, lab: &Lab, other: &Netns, bridge: &str) -> usize {
        self.add_nic_at(lab, lab.next_number(), &Topology::Elsewhere(other, bridge));
        self.nics.len() - 1
    }

    fn add_nic_at(&mut self, lab: &Lab, number: u8, topology: &Topology<'_>) {
        let (node, pod) = (lab.node(), &self.netns);
        let subnet = matches!(topology, Topology::Routed | Topology::RoutedNetkit) as u8;
        let name = format!("eth{}", self.nics.len());
        let mut nic = Nic {
            host: match topology {
                Topology::Bridge(_) | Topology::Routed => format!("veth{number}"),
                Topology::Netkit(_) | Topology::RoutedNetkit => format!("nk{number}"),
                Topology::Over(..) | Topology::Elsewhere(..) => name.clone(),
            },
            name,
            mac: [2, 0, 0, 0, 0, number],
            v4: Ipv4Addr::new(10, subnet, self.nics.len() as u8, number),
            v6: Ipv6Addr::new(0xfd00, subnet.into(), self.nics.len() as u16, 0, 0, 0, 0, number.into()),
        };
        let Nic { name, host, v4, v6, .. } = &nic;
        match topology {
            Topology::Bridge(_) | Topology::Routed => {
                node.ip(&format!(
                    "link add {host} address 02:00:00:00:01:{number:02x} type veth \
                     peer name {name} address 02:00:00:00:00:{number:02x} netns {}",
                    pod.name()
                ));
                node.keep_neighbours(host);
            }
            Topology::Netkit(_) | Topology::RoutedNetkit => {
                let l3 = matches!(topology, Topology::RoutedNetkit);
                netkit::pair(node, host, "has-no-name", l3);
                node.ip(&format!("link set has-no-name netns {} name {name}", pod.name()));
                if !l3 {
                    pod.ip(&format!("link set {name} address 02:00:00:00:00:{number:02x}"));
                }
                node.keep_neighbours(host);
            }
            Topology::Over(kind, parent) => {
                node.ip(&format!("link add link {parent} name {name} netns {} type {kind}", pod.name()));
                // An ipvlan has the address of its parent.
                pod.try_run(&format!("ip link set {name} address 02:00:00:00:00:{number:02x}"));
            }
            Topology::Elsewhere(other, _) => {
                other.ip(&format!(
                    "link add port{number} type veth peer name {name} address 02:00:00:00:00:{number:02x} netns {}",
                    pod.name()
                ));
            }
        }
        pod.keep_neighbours(name);
        match topology {
            Topology::Over(..) | Topology::Elsewhere(..) => {
                if let Topology::Elsewhere(other, bridge) = topology {
                    other.ip(&format!("link set port{number} master {bridge} up"));
                }
                pod.ip(&format!("link set {name} up"));
                pod.ip(&format!("address add {v4}/24 dev {name}"));
                pod.ip(&format!("address add {v6}/64 dev {name} nodad"));
            }
            Topology::Bridge(bridge) | Topology::Netkit(bridge) => {
                node.sysctl(&format!("ipv6/conf/{host}/disable_ipv6"), "1");
                node.ip(&format!("link set {host} master {bridge} up"));
                pod.ip(&format!("link set {name} up"));
                pod.ip(&format!("address add {v4}/24 dev {name}"));
                pod.ip(&format!("address add {v6}/64 dev {name} nodad"));
            }
            Topology::RoutedNetkit => {
                node.sysctl("ipv4/ip_forward", "1");
                node.sysctl("ipv6/conf/all/forwarding", "1");
                node.ip(&format!("link set {host} up"));
                pod.ip(&format!("link set {name} up"));
                for (version, address, prefix) in [(4, IpAddr::V4(*v4), 32), (6, IpAddr::V6(*v6), 128)] {
                    node.ip(&format!("-{version} route add {address} dev {host}"));
                    let nodad = if version == 6 { "nodad" } else { "" };
                    pod.ip(&format!("address add {address}/{prefix} dev {name} {nodad}"));
                    pod.ip(&format!("-{version} route add default dev {name}"));
                }
            }
            Topology::Routed => {
                node.sysctl("ipv4/ip_forward", "1");
                node.sysctl("ipv6/conf/all/forwarding", "1");
                node.sysctl(&format!("ipv4/conf/{host}/proxy_arp"), "1");
                node.sysctl(&format!("ipv4/neigh/{host}/proxy_delay"), "0");
                node.ip(&format!("link set {host} up"));
                pod.ip(&format!("link set {name} up"));
                // The kernel answers ARP for the gateway only if its route to the gateway leads out of another device.
                node.ip("route replace 169.254.1.1 dev lo");
                node.ip(&format!("address add fe80::1/64 dev {host} nodad"));
                node.ip(&format!("route add {v4} dev {host}"));
                node.ip(&format!("route add {v6} dev {host}"));
                pod.ip(&format!("address add {v4}/32 dev {name}"));
                pod.ip(&format!("address add {v6}/128 dev {name} nodad"));
                pod.ip(&format!("route add 169.254.1.1 dev {name} scope link"));
                pod.ip(&format!("route add default via 169.254.1.1 dev {name}"));
                pod.ip(&format!("-6 route add default via fe80::1 dev {name}"));
            }
        }
        // The kernel notices the carrier some time later (up to a second on a busy machine). Only then it lets the
        // bridge forward, and announces the multicast groups: twice.
        let announces = if matches!(topology, Topology::Routed) { 2 } else { 0 };
        let pod_announces = if matches!(topology, Topology::RoutedNetkit) { 0 } else { 2 };
        let has_end = !matches!(topology, Topology::Over(..) | Topology::Elsewhere(..));
        let on_node = has_end.then_some((node, host, announces));
        for (netns, device, announces) in on_node.into_iter().chain([(pod, name, pod_announces)]) {
            eventually(SOON, || {
                let link = netns.ip(&format!("-o link show dev {device}"));
                let sent = multicast_reports(netns, device);
                // An ipvlan in the modes l3 and l3s sends no multicast.
                let reports = if link.contains("NOARP") { 0 } else { announces };
                check(
                    (link.contains("state UP") || link.contains("state UNKNOWN")) && sent >= reports,
                    || format!("{sent} reports, {link}"),
                )
            });
        }
        nic.mac = mac_of(pod, &nic.name);
        self.nics.push(nic);
    }

    /// Its name, as in `metadata.name`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its network namespace.
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// Its NICs, `eth0` first.
    pub fn nics(&self) -> &[Nic] {
        &self.nics
    }

    /// `eth0`.
    pub fn eth0(&self) -> &Nic {
        &self.nics[0]
    }

    /// Name of the node side of `eth0`.
    pub fn veth_host(&self) -> &str {
        &self.eth0().host
    }

    /// IPv4 address of `eth0`.
    pub fn v4(&self) -> IpAddr {
        self.eth0().v4.into()
    }

    /// IPv6 address of `eth0`.
    pub fn v6(&self) -> IpAddr {
        self.eth0().v6.into()
    }

    /// Sets the MTU of both ends of `eth0`, in bytes.
    pub fn set_mtu(&self, lab: &Lab, mtu: u32) {
        lab.node().ip(&format!("link set {} mtu {mtu}", self.veth_host()));
        self.netns.ip(&format!("link set eth0 mtu {mtu}"));
    }

    /// Sends a frame from `eth0` unchanged.
    #[track_caller]
    pub fn send_frame(&self, frame: &[u8]) {
        self.netns.send_frame("eth0", frame);
    }
}

fn mac_of(netns: &Netns, device: &str) -> Mac {
    let link = netns.ip(&format!("-o link show dev {device}"));
    let text =
        link.split_once("link/ether ").map_or("", |(_, rest)| rest.split(' ').next().unwrap_or_default());
    let bytes: Vec<u8> = text.split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    bytes.try_into().unwrap()
}

/// The number of multicast listener reports that a device has sent.
fn multicast_reports(netns: &Netns, device: &str) -> u64 {
    // Without IPv6 there is no such file.
    let statistics = netns.enter(|| fs::read_to_string(format!("/proc/thread-self/net/dev_snmp6/{device}")));
    let statistics = statistics.unwrap_or_default();
    let reports = statistics.lines().find_map(|line| line.strip_prefix("Icmp6OutMLDv2Reports"));
    reports.map_or(0, |count| count.trim().parse().unwrap())
}
