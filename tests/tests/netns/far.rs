//! The scene of the stories about tunnels: a node, and the receiver's machine.

use std::collections::BTreeMap;

use mirror_tests::{Capture, Conversation, Lab, Netns, PodNs, PodSpec, PodsFile, Status, Tail, check};

use crate::{Inside, Node, shows};

pub(crate) const VNI: u32 = 77;
/// The device that the agent makes.
pub(crate) const DEVICE: &str = "pm-vxlan4789";
/// A tunnel to the other machine.
pub(crate) const FAR: &str = "far=vxlan:10.9.0.5:4789/vni=77";

/// A node that is connected with another machine, directly or through a router.
pub(crate) struct Scene {
    pub(crate) far: Netns,
    pub(crate) router: Option<Netns>,
    pub(crate) node: Node,
}

impl Scene {
    /// A direct connection with this MTU. The pods are ports of a bridge.
    pub(crate) fn new(story: &str, mtu: u32) -> Self {
        let node = Node::bridged(story);
        let near = node.lab.node();
        let far = machine(&format!("{}-far", near.name()));
        cable((near, "up0"), (&far, "up1"), mtu);
        for (netns, device, number) in [(near, "up0", 1), (&far, "up1", 5)] {
            netns.ip(&format!("address add 10.9.0.{number}/24 dev {device}"));
            netns.ip(&format!("address add fd09::{number}/64 dev {device} nodad"));
        }
        Self { far, router: None, node }.met()
    }

    /// With a router, and an MTU of 1500 on both sides of it. The node has routes to the pods, so that an ICMP error of
    /// the node would reach them.
    pub(crate) fn routed(story: &str) -> Self {
        let node = Node::routed(story);
        let near = node.lab.node();
        let [far, router] = ["far", "router"].map(|name| machine(&format!("{}-{name}", near.name())));
        router.sysctl("ipv4/ip_forward", "1");
        router.sysctl("ipv6/conf/all/forwarding", "1");
        cable((near, "up0"), (&router, "r0"), 1500);
        cable((&far, "up1"), (&router, "r1"), 1500);
        for (netns, device, own, side, to) in [(near, "up0", 1, "r0", 5), (&far, "up1", 5, "r1", 1)] {
            let way = if side == "r0" { 254 } else { 253 };
            // A router solicits a neighbour from a link-local address.
            router.ip(&format!("address add fe80::{way}/64 dev {side} nodad"));
            // Without `nodad`, an address can be tentative for seconds while other stories hold the kernel's lock of all
            // devices. The first ping then has another source.
            for (own, to, way, bits, nodad) in [
                (format!("10.9.0.{own}"), format!("10.9.0.{to}"), format!("10.9.0.{way}"), 32, ""),
                (format!("fd09::{own}"), format!("fd09::{to}"), format!("fd09::{way}"), 128, "nodad"),
            ] {
                netns.ip(&format!("address add {own}/{bits} dev {device} {nodad}"));
                netns.ip(&format!("route add {way}/{bits} dev {device}"));
                netns.ip(&format!("route add {to}/{bits} via {way}"));
                router.ip(&format!("address add {way}/{bits} dev {side} {nodad}"));
                router.ip(&format!("route add {own}/{bits} dev {side}"));
            }
        }
        Self { far, router: Some(router), node }.met()
    }

    /// All machines learn each other's addresses, so that there is no other traffic later.
    fn met(self) -> Self {
        let Node { web, db, lab } = &self.node;
        for address in ["10.9.0.5", "fd09::5"] {
            lab.node().run(&format!("ping -c 1 -W 5 {address}"));
        }
        web.ping(db.v4(), 2, 56);
        web.ping(db.v6(), 2, 56);
        self.receiver("vx4", &format!("vxlan id {VNI} dstport 4789 local 10.9.0.5 nolearning"));
        self
    }

    /// Creates a device that receives the packets of a tunnel.
    pub(crate) fn receiver(&self, name: &str, kind: &str) {
        self.far.ip(&format!("link add {name} type {kind}"));
        self.far.sysctl(&format!("ipv6/conf/{name}/disable_ipv6"), "1");
        self.far.ip(&format!("link set {name} mtu 9000"));
        // Otherwise the device merges consecutive segments again (`gro_cells_receive`).
        self.far.run(&format!("ethtool -K {name} gro off"));
        self.far.ip(&format!("link set {name} up"));
    }

    pub(crate) fn pods(&self, target: &str) -> PodsFile {
        PodsFile::new(&self.node.lab, &[mirrored(&self.node.web, target)])
    }

    /// Checks that the copies of everything that web sends and receives arrive at each receiver, once and unchanged.
    /// Returns how many frames web has sent, and how many it has received.
    pub(crate) fn brings_every_frame(&self, receivers: &[&str], super_frames: bool) -> (usize, usize) {
        let Self { far, node: Node { web, db, lab }, .. } = self;
        let inside = Inside::of(web);
        let arrived: Vec<_> = receivers.iter().map(|receiver| Capture::start(far, receiver)).collect();
        // Packets that leave the node are never copied again: a capture of the uplink shows no copies.
        let uplink = Tail::start(lab, &["tail", "up0"]);
        if super_frames {
            Conversation::open(web, db, db.v4()).exchange(300_000);
        }
        web.udp_echo(db, db.v4(), &[0, 1, 1472]);
        // The last packets of a connection arrive after it was closed. The pings follow them.
        web.ping(db.v4(), 20, 56);
        web.ping(db.v6(), 20, 1400);
        arrived.iter().for_each(|arrived| shows(arrived, || inside.capture.frames()));
        let (sent, received) = inside.stop();
        let all = sent.and(&received);
        arrived.into_iter().for_each(|arrived| arrived.stop().same_as(&all).unwrap());
        let status = lab.status();
        let copies = named(&[("egress copied", sent.len()), ("ingress copied", received.len())]);
        let sessions = &status.tap(web.veth_host()).sessions;
        assert_eq!(sessions.len(), receivers.len());
        sessions.iter().for_each(|session| assert_eq!(session.verdicts(), copies, "{session:?}"));
        let tail = status.tap("up0").sessions[0].verdicts();
        assert_eq!(tail, named(&[("ingress loop", receivers.len() * all.len())]), "copies and nothing else");
        uplink.stop();
        (sent.len(), received.len())
    }
}

/// A pod that is mirrored to this target.
pub(crate) fn mirrored(pod: &PodNs, target: &str) -> PodSpec {
    PodSpec::of(pod).mirror("true").annotated("podmirror.io/target", target)
}

/// A pod with a mirror for each of these targets, named as the target.
pub(crate) fn mirrored_into<'a>(pod: &PodNs, targets: impl Iterator<Item = &'a str>) -> PodSpec {
    targets.fold(PodSpec::of(pod), |spec, name| {
        spec.annotated(&format!("podmirror.io/mirror.{name}"), "true")
            .annotated(&format!("podmirror.io/target.{name}"), name)
    })
}

/// The reasons why targets cannot be reached.
pub(crate) fn unreached(status: &Status) -> String {
    status.notes.clone().unwrap_or_default()["unreached_targets"].to_string()
}

/// Waits until the target is up or down.
pub(crate) fn wait_target(lab: &Lab, name: &str, is_up: bool) -> Status {
    wait_target_of(lab, name, is_up, 1)
}

/// The same with this many taps.
pub(crate) fn wait_target_of(lab: &Lab, name: &str, is_up: bool, taps: usize) -> Status {
    lab.wait_status(|status| {
        let up = status.target(name).up;
        check(up == is_up && status.taps.len() == taps, || format!("target {name} is up: {up}"))
    })
}

/// The counters that are not zero, in the form of [`mirror_tests::SessionStatus::verdicts`].
pub(crate) fn named(counts: &[(&str, usize)]) -> BTreeMap<String, u64> {
    counts.iter().map(|(name, count)| ((*name).to_owned(), *count as u64)).collect()
}

/// A machine that sends nothing by itself.
fn machine(name: &str) -> Netns {
    let netns = Netns::new(name);
    netns.keep_quiet();
    netns
}

/// Connects two machines.
pub(crate) fn cable((netns, device): (&Netns, &str), (other, end): (&Netns, &str), mtu: u32) {
    netns.ip(&format!(
        "link add {device} mtu {mtu} type veth peer name {end} mtu {mtu} netns {}",
        other.name()
    ));
    for (netns, device) in [(netns, device), (other, end)] {
        netns.keep_neighbours(device);
        netns.ip(&format!("link set {device} up"));
    }
}
