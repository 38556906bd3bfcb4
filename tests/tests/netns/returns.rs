//! The node sends a packet back to the pod that sent it, with the same addresses: it is the same packet, and appears on
//! the mirror interface once.

use mirror_tests::{Agent, Capture, Lab, MIRROR, PodNs, PodSpec, check};

use crate::{Inside, Node, any_mode, shows};

/// An address that the node routes to the pod itself, like a service whose only endpoint is the pod that calls it.
const SERVICE: &str = "203.0.113.1";
/// The node's own address, for stories in which the pod needs one.
const NODE: &str = "192.0.2.1";
const PINGS: usize = 20;

/// Sends from the pod to the service: the mirror interface shows what the pod sends, and nothing of what returns.
fn sends_to_itself(lab: &Lab, web: &PodNs) {
    let _agent = Agent::mirroring(lab, any_mode(), &[PodSpec::of(web).mirror("true")], &[], &[web]);
    let (inside, mirror) = (Inside::of(web), Capture::start(lab.node(), MIRROR));
    // There is no answer: the pod does not have the service's address.
    web.netns().try_run(&format!("ping -q -c {PINGS} -i 0.01 -W 1 {SERVICE}"));
    // The router has decremented the TTL of the returned packet.
    let is_ping = |frame: &[u8]| frame[12..14] == [8, 0] && frame[23] == 1 && frame[34] == 8;
    let is_back = |frame: &[u8]| is_ping(frame) && frame[22] == 63;
    shows(&mirror, || inside.capture.frames().only(|frame| !is_back(frame)));
    let pings = inside.capture.frames().only(is_ping);
    assert_eq!((pings.len(), pings.only(is_back).len()), (2 * PINGS, PINGS), "{pings}");
    lab.wait_status(|status| {
        let duplicates = status.tap(web.veth_host()).total("duplicate");
        check(duplicates == PINGS as u64, || format!("{duplicates} duplicates"))
    });
}

#[test]
fn what_is_routed_back_to_its_pod_is_mirrored_once() {
    let Node { web, lab, .. } = &Node::routed("routed-back");
    for device in ["all", web.veth_host()] {
        lab.node().sysctl(&format!("ipv4/conf/{device}/send_redirects"), "0");
    }
    lab.node().ip(&format!("route add {SERVICE} via {} dev {}", web.v4(), web.veth_host()));
    sends_to_itself(lab, web);
}

#[test]
fn what_goes_up_through_a_bridge_and_back_is_mirrored_once() {
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
    // A bridge does not forward a packet to the port where it arrived, but it does send the node's own packets there.
    sends_to_itself(lab, web);
}
