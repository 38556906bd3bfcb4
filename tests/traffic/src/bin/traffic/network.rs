//! The network of a contestant: its node, the pods, and the other node where a scenario needs it.
//!
//! ```text
//!             node                                   other node
//!  pod ───┐                                          ┌─── far
//!  peer ──┼─────── up0 ──────── cable ─────── up0 ───┤
//!  other ─┘        vx0 ──── VXLAN over up0 ── vx0    └─── overlay
//! ```
//!
//! `pod` is the mirrored one. If a scenario needs it, `pod` and `peer` have a second NIC, a macvlan over `mv0`. Both
//! nodes translate addresses with nftables, as kube-proxy does, so that both track connections.

use std::net::{Ipv4Addr, SocketAddr};

use mirror_test_traffic::plan::{Scenario, Way};
use mirror_tests::{Lab, Netns, PodNs};

use crate::{http, load::LATENCY_PORT, stage::IPERF3_PORT};

/// An address of the node that is neither the cable's nor a pod's.
const NODE: Ipv4Addr = Ipv4Addr::new(10, 9, 9, 9);
const CLUSTER_IP: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
/// Addresses of the nodes on their cable, and on the VXLAN over it.
const CABLE: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 9, 0, 1), Ipv4Addr::new(10, 9, 0, 2)];
const VXLAN: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 8, 0, 1), Ipv4Addr::new(10, 8, 0, 2)];
/// The lower device of the macvlan NICs, and its peer.
const LOWER: [&str; 2] = ["mv0", "mv1"];
/// A port of a pod, and the node port that leads to it.
const NODE_PORTS: [(u16, u16); 3] = [(LATENCY_PORT, 30700), (IPERF3_PORT, 30201), (http::PORT, 30080)];

/// The node of a contestant, and what it is connected to. The node is dropped after the pods on it.
pub(crate) struct Network {
    /// The mirrored pod.
    pub(crate) pod: PodNs,
    /// The pod on the same node with which it communicates.
    peer: PodNs,
    /// A silent pod.
    pub(crate) other: PodNs,
    pub(crate) lab: Lab,
    far: Option<Far>,
}

/// The other node, and its pods. Both nodes number their pods from 1, so a pod there has the same address as the
/// mirrored pod.
struct Far {
    /// The pod that is reached by the cable.
    direct: PodNs,
    /// The pod that is reached by the VXLAN.
    overlay: PodNs,
    _others: Vec<PodNs>,
    lab: Lab,
}

impl Network {
    /// Creates the network, with the other node if a scenario crosses to it.
    pub(crate) fn new(name: &str, scenarios: &[Scenario]) -> Self {
        let lab = Lab::new(name);
        let [mut pod, mut peer, other] = ["pod", "peer", "other"].map(|name| lab.routed_pod(name));
        if scenarios.iter().any(|scenario| scenario.way == Way::SameNodeMacvlan) {
            let [lower, end] = LOWER;
            lab.node().ip(&format!("link add {lower} type veth peer name {end}"));
            lab.node().ip(&format!("link set {lower} up"));
            lab.node().ip(&format!("link set {end} up"));
            for pod in [&mut pod, &mut peer] {
                pod.add_nic_over(&lab, "macvlan mode bridge", lower);
            }
        }
        lab.node().ip(&format!("address add {NODE}/32 dev lo"));
        translate(lab.node(), NODE, &pod);
        lab.node().run(&format!(
            "nft add chain ip services prerouting {{ type nat hook prerouting priority dstnat ; }} ; \
             add rule ip services prerouting ip daddr {CLUSTER_IP} dnat to {}",
            peer.v4()
        ));
        let crosses = scenarios.iter().any(|scenario| scenario.way.crosses());
        let far = crosses.then(|| Far::new(&lab, &pod, name));
        Self { pod, peer, other, lab, far }
    }

    pub(crate) fn client(&self, way: Way) -> &Netns {
        match way {
            Way::NodePortLocal => self.lab.node(),
            Way::NodePortRemote => self.far().lab.node(),
            _ => self.pod.netns(),
        }
    }

    pub(crate) fn server(&self, way: Way) -> &Netns {
        match way {
            Way::SameNode | Way::SameNodeMacvlan | Way::ClusterIp => self.peer.netns(),
            Way::TwoNodes => self.far().direct.netns(),
            Way::TwoNodesVxlan => self.far().overlay.netns(),
            Way::OwnNode => self.lab.node(),
            Way::OtherNode => self.far().lab.node(),
            Way::NodePortLocal | Way::NodePortRemote => self.pod.netns(),
        }
    }

    /// Where the client finds the server that listens on this port.
    pub(crate) fn address(&self, way: Way, port: u16) -> SocketAddr {
        let to = match way {
            Way::SameNode => self.peer.v4(),
            Way::SameNodeMacvlan => self.peer.nics()[1].v4.into(),
            Way::TwoNodes => self.far().direct.v4(),
            Way::TwoNodesVxlan => self.far().overlay.v4(),
            Way::OwnNode => NODE.into(),
            Way::OtherNode => CABLE[1].into(),
            Way::ClusterIp => CLUSTER_IP.into(),
            Way::NodePortLocal => return node_port(NODE, port),
            Way::NodePortRemote => return node_port(CABLE[1], port),
        };
        SocketAddr::new(to, port)
    }

    /// The NIC of the mirrored pod that the traffic uses.
    pub(crate) fn nic(&self, way: Way) -> &str {
        &self.pod.nics()[usize::from(way == Way::SameNodeMacvlan)].name
    }

    fn far(&self) -> &Far {
        self.far.as_ref().unwrap()
    }
}

/// The node port of a node that leads to a port of the pod.
fn node_port(node: Ipv4Addr, port: u16) -> SocketAddr {
    let (_, node_port) = NODE_PORTS.into_iter().find(|(of_pod, _)| *of_pod == port).unwrap();
    SocketAddr::new(node.into(), node_port)
}

/// Translates the node ports of a node for the node's own packets.
fn translate(node: &Netns, address: Ipv4Addr, pod: &PodNs) {
    let mut rules = "nft add table ip services ; \
                     add chain ip services output { type nat hook output priority -100 ; }"
        .to_owned();
    for (port, node_port) in NODE_PORTS {
        for protocol in ["tcp", "udp"] {
            rules += &format!(
                " ; add rule ip services output ip daddr {address} {protocol} dport {node_port} dnat to {}:{port}",
                pod.v4()
            );
        }
    }
    node.run(&rules);
}

impl Far {
    /// Creates a second node with its pods, a cable between the nodes with a VXLAN on it, and routes.
    fn new(lab: &Lab, pod: &PodNs, name: &str) -> Self {
        let far = Lab::new(&format!("{name}-far"));
        let others: Vec<_> = ["one", "two", "three"].map(|name| far.routed_pod(name)).into();
        let [direct, overlay] = ["direct", "overlay"].map(|name| far.routed_pod(name));
        lab.node().ip(&format!("link add up0 type veth peer name up0 netns {}", far.node().name()));
        for (node, own, to) in [(lab.node(), 0, 1), (far.node(), 1, 0)] {
            // The cable's MTU includes the header of VXLAN, so that packets of pods have the same size on both ways.
            node.ip("link set up0 mtu 1550 up");
            node.ip(&format!("address add {}/24 dev up0", CABLE[own]));
            node.ip(&format!(
                "link add vx0 type vxlan id 1 dev up0 local {} remote {} dstport 4789",
                CABLE[own], CABLE[to]
            ));
            node.ip("link set vx0 mtu 1500 up");
            node.ip(&format!("address add {}/24 dev vx0", VXLAN[own]));
        }
        lab.node().ip(&format!("route replace {} via {}", direct.v4(), CABLE[1]));
        lab.node().ip(&format!("route replace {} via {}", overlay.v4(), VXLAN[1]));
        // This node has a pod with the same address.
        far.node().ip(&format!("route replace {} via {}", pod.v4(), CABLE[0]));
        // Packets from the VXLAN's pod return through the VXLAN.
        far.node().ip(&format!("rule add from {} table 1", overlay.v4()));
        far.node().ip(&format!("route add {} via {} table 1", pod.v4(), VXLAN[0]));
        let back = far.node().ip(&format!(
            "route get {} from {} iif {}",
            pod.v4(),
            overlay.v4(),
            overlay.veth_host()
        ));
        assert!(back.contains("dev vx0"), "both directions use the VXLAN: {back}");
        translate(far.node(), CABLE[1], pod);
        Self { direct, overlay, _others: others, lab: far }
    }
}
