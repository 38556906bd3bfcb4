//! Two nodes mirror to each other: the receiver on each node is a pod, which is mirrored itself.

use mirror_tests::{Agent, Capture, PodNs, PodSpec, PodsFile, Tail, check};

use crate::{
    Inside, Node, any_mode,
    far::{cable, mirrored, named},
    shows,
};

/// A node of the cluster, with its receiver.
struct Half {
    ids: PodNs,
    node: Node,
}

impl Half {
    /// Each lab gives its pods the same addresses, so the receivers have different numbers.
    fn new(story: &str, is_first: bool) -> Self {
        let node = Node::routed(story);
        let [one, two] = ["ids", "ids2"].map(|name| node.lab.routed_pod(name));
        Self { ids: if is_first { one } else { two }, node }
    }

    /// Creates the receiver's device for the copies of the other node. A packet with a full frame is not fragmented on
    /// the path.
    fn receives(&self, vni: u32) {
        let (netns, address) = (self.ids.netns(), self.ids.v4());
        self.ids.set_mtu(&self.node.lab, 1600);
        netns.ip(&format!("link add vx0 type vxlan id {vni} dstport 4789 local {address} nolearning"));
        netns.sysctl("ipv6/conf/vx0/disable_ipv6", "1");
        netns.ip("link set vx0 mtu 9000");
        netns.ip("link set vx0 up");
    }
}

/// Each pod's frames reach the other node's receiver once. The packets that carry them pass the taps of the uplink and
/// of the receiver there, and are not copied back.
#[test]
fn two_nodes_that_mirror_to_each_other_copy_each_frame_once() {
    let halves = [Half::new("node-a", true), Half::new("node-b", false)];
    let [a, b] = &halves;
    let [near, other] = [a.node.lab.node(), b.node.lab.node()];
    cable((near, "up0"), (other, "up0"), 1600);
    for (netns, own, to, ids) in [(near, 1, 2, &b.ids), (other, 2, 1, &a.ids)] {
        netns.ip(&format!("address add 10.9.0.{own}/24 dev up0"));
        // The dropped pod with the same number may still have its route here: the kernel removes namespaces
        // asynchronously.
        netns.ip(&format!("route replace {} via 10.9.0.{to}", ids.v4()));
    }
    for (netns, ids) in [(near, &b.ids), (other, &a.ids)] {
        netns.run(&format!("ping -c 1 -W 5 {}", ids.v4()));
    }
    a.receives(77);
    b.receives(78);
    // The agents of a cluster have the same targets.
    let targets = [("a", a, 77), ("b", b, 78)]
        .map(|(name, half, vni)| format!("{name}=vxlan:{}:4789/vni={vni}/oversize=segment", half.ids.v4()));
    let words = ["--define-target", &targets[0], "--define-target", &targets[1]];
    let specs = [("b", a), ("a", b)].map(|(to, half)| {
        let specs: Vec<PodSpec> = [&half.node.web, &half.ids].map(|pod| mirrored(pod, to)).into();
        (to, half, PodsFile::new(&half.node.lab, &specs))
    });
    let agents = specs.each_ref().map(|(to, half, pods)| {
        let Half { ids, node: Node { web, lab, .. } } = half;
        let agent = Agent::run_until(lab, any_mode(), pods, &words, &[web, ids]);
        lab.wait_status(|status| check(status.target(to).up, || format!("target {to} is down")));
        agent
    });
    let uplinks = halves.each_ref().map(|half| Tail::start(&half.node.lab, &["tail", "up0"]));
    let inside = halves.each_ref().map(|half| Inside::of(&half.node.web));
    let copies = halves.each_ref().map(|half| Capture::start(half.ids.netns(), "vx0"));
    std::thread::scope(|scope| {
        for Half { node: Node { web, db, .. }, .. } in &halves {
            scope.spawn(|| {
                web.ping(db.v4(), 50, 56);
                web.ping(db.v6(), 20, 1400);
                web.udp_echo(db, db.v4(), &[0, 1, 1472]);
            });
        }
    });
    let [from_a, from_b] = &inside;
    for (at, from) in [(0, from_b), (1, from_a)] {
        shows(&copies[at], || from.capture.frames());
    }
    let sent = inside.map(|inside| inside.stop());
    let all = sent.each_ref().map(|(sent, received)| sent.and(received));
    for (copies, expected) in copies.into_iter().zip([&all[1], &all[0]]) {
        copies.stop().same_as(expected).unwrap();
    }
    for (at, half) in halves.iter().enumerate() {
        let status = half.node.lab.status();
        let (own, others) = (&sent[at], all[1 - at].len());
        let copied = named(&[("egress copied", own.0.len()), ("ingress copied", own.1.len())]);
        assert_eq!(status.tap(half.node.web.veth_host()).verdicts(), copied);
        let brought = named(&[("ingress loop", others)]);
        assert_eq!(
            status.tap(half.ids.veth_host()).verdicts(),
            brought,
            "what brings copies to the receiver"
        );
        // Outgoing packets with copies are recognised by their mark. A capture shows the arriving ones, because it
        // exists on this node only.
        let uplink = named(&[("ingress loop", all[at].len()), ("egress copied", others)]);
        assert_eq!(status.tap("up0").sessions[0].verdicts(), uplink);
    }
    uplinks.into_iter().for_each(|uplink| drop(uplink.stop()));
    agents.into_iter().for_each(Agent::stop);
    halves.iter().for_each(|half| half.node.lab.cleanup());
}
