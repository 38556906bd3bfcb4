//! An interface of a node, for pods that use the node's network.

use std::time::Duration;

use mirror_tests::{Capture, PacketFile, SOON, check, eventually};
use serde_json::json;

use super::Packets;
use crate::{Node, aggregation::GROUP};

/// The node's address on the bridge, and the length of its prefix.
const ADDRESS: &str = "10.0.0.254/24";
/// Number of pings at a time.
const PINGS: usize = 10;

/// The node pings a machine that is no pod, as a pod with the node's network would.
#[test]
fn an_interface_of_a_node_is_read_on_after_its_agent_was_killed() {
    let node @ Node { api, lab } = &Node::new("packets-node");
    let [other] = &node.pods(["other"]);
    let (name, interface) = (lab.node().name(), other.veth_host());
    lab.node().ip(&format!("address add {ADDRESS} dev br0"));
    let packets = Packets::start(api, 1, &[]);
    packets.connect(lab);
    let agent = packets.agent(lab, &[]);
    packets.wait_connected(&[lab]);
    let rules = json!([{ "apiGroups": [GROUP], "resources": ["nodepackets"], "verbs": ["watch"] }]);
    let alice = &packets.grant("alice", true, &rules);
    let uri = |interface: &str| {
        let of = format!("fieldSelector=metadata.name%3D{name}&interface={interface}");
        format!("/apis/{GROUP}/v1alpha1/nodepackets?{of}&filter=icmp&watch=true")
    };
    // The API server learns of the role after some moments.
    eventually(SOON, || {
        let refused = packets.get(alice, &uri("nosuch0")).unwrap_err();
        check(refused.contains("(Conflict)"), || refused)
    });

    let stream = packets.stream(alice, &uri(interface));
    stream.wait_begun();
    lab.wait_taps(&[interface]);
    let capture = Capture::start(other.netns(), "eth0");
    let ping = || lab.node().ping_every(Duration::from_millis(2), other.v4(), PINGS, 56);
    let read = || {
        let file = PacketFile::parse(&stream.bytes());
        let pings = capture.frames().only(|frame| frame[12..14] == [8, 0] && frame[23] == 1);
        file.all_frames().same_as(&pings).map(|()| file)
    };
    let outage = format!("podmirror: {name}: ");
    let wait_told = |text: &str| {
        eventually(SOON, || {
            let comments = PacketFile::parse(&stream.bytes()).comments;
            let is_told = comments.iter().any(|comment| comment.starts_with(&format!("{outage}{text}")));
            check(is_told, || format!("not {text:?}: {comments:#?}"))
        });
    };
    ping();
    let file = eventually(SOON, read);
    assert_eq!(file.packets.len(), 2 * PINGS);
    assert!(!file.comments.iter().any(|comment| comment.starts_with(&outage)), "{:#?}", file.comments);

    agent.kill();
    wait_told("");
    let agent = packets.agent(lab, &[]);
    wait_told("its packets are read");
    lab.wait_taps(&[interface]);
    ping();
    let file = eventually(SOON, read);
    assert_eq!((file.packets.len(), file.interfaces), (4 * PINGS, vec![interface.to_owned(); 2]));
    assert_eq!(file.hardware, [name; 2]);
    assert!(file.statistics.iter().all(|(_, lost)| *lost == 0), "{:?}", file.statistics);
    drop(stream);
    lab.wait_taps(&[]);
    agent.stop();
}
