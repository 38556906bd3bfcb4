//! The node sends a packet back to the pod that sent it: the copy at egress and the copy at ingress are both on the
//! mirror interface.

use mirror_tests::{Agent, AttachMode, Comparison, Lab, PodNs, PodSpec, PodsFile};

use crate::Node;

in_both_modes!(
    what_is_routed_back_to_its_pod_is_mirrored_both_ways,
    what_goes_up_through_a_bridge_and_back_is_mirrored_both_ways,
);

/// An address that the node routes to the pod itself, like a service whose only endpoint is the pod that calls it.
const SERVICE: &str = "203.0.113.1";
/// The node's own address, for stories in which the pod needs one.
const NODE: &str = "192.0.2.1";
const PINGS: usize = 20;

/// Sends from the pod to the service, and compares the packets of the pod with the mirrored packets.
fn sends_to_itself(lab: &Lab, web: &PodNs, mode: AttachMode) {
    let pods = PodsFile::new(lab, &[PodSpec::of(web).mirror("true")]);
    let _agent = Agent::run(lab, mode, &pods, &[]);
    lab.wait_mirrored(&[web]);
    let comparison = Comparison::of(web.netns(), lab);
    // Nobody answers: the pod is not the service.
    web.netns().try_run(&format!("ping -q -c {PINGS} -i 0.01 -W 1 {SERVICE}"));
    let frames = comparison.is_equal();
    // With one hop less to live where it comes back.
    let pings = frames.only(|frame| frame[23] == 1 && frame[34] == 8);
    assert_eq!(pings.len(), 2 * PINGS, "{frames}");
    assert_eq!(pings.only(|frame| frame[22] == 63).len(), PINGS, "{pings}");
    let tap = lab.status().tap(web.veth_host()).clone();
    assert_eq!(tap.total("duplicate"), 0);
}

fn what_is_routed_back_to_its_pod_is_mirrored_both_ways(mode: AttachMode) {
    let Node { web, lab, .. } = &Node::routed("routed-back");
    for device in ["all", web.veth_host()] {
        lab.node().sysctl(&format!("ipv4/conf/{device}/send_redirects"), "0");
    }
    lab.node().ip(&format!("route add {SERVICE} via {} dev {}", web.v4(), web.veth_host()));
    sends_to_itself(lab, web, mode);
}

fn what_goes_up_through_a_bridge_and_back_is_mirrored_both_ways(mode: AttachMode) {
    let Node { web, lab, .. } = &Node::bridged("bridged-back");
    let node = lab.node();
    node.sysctl("ipv4/ip_forward", "1");
    for device in ["all", "br0"] {
        node.sysctl(&format!("ipv4/conf/{device}/send_redirects"), "0");
    }
    node.ip(&format!("addr add {NODE}/32 dev br0"));
    node.ip(&format!("route add {} dev br0", web.v4()));
    node.ip(&format!("route add {SERVICE} via {} dev br0", web.v4()));
    web.netns().ip(&format!("route add {NODE} dev eth0"));
    web.netns().ip(&format!("route add {SERVICE} via {NODE}"));
    // A bridge sends nothing back through the port that it came from, but what it sends itself is none of that.
    sends_to_itself(lab, web, mode);
}
