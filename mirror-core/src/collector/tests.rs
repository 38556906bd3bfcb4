//! Tests: which device leads to a collector, and the reason if there is none.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use super::*;
use crate::{
    destination::Destination,
    model::{IfIndex, NetnsId, Peer, PodId, PodLinks},
};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

fn nic(text: &str) -> PodNic {
    text.parse::<Destination>().unwrap().pod().unwrap().clone()
}

fn pod(uid: &str) -> Pod {
    let id = PodId { uid: uid.into(), namespace: "security".into(), name: "ids".into() };
    Pod { id, ..Pod::default() }
}

fn link(ifindex: u32, name: &str, kind: LinkKind, peer: Option<Peer>) -> Link {
    Link { address: Some(MAC), mtu: 1500, ..Link::new(IfIndex(ifindex), name, kind, peer) }
}

/// A pod with loopback, a macvlan, and two veths with the peers 11 and 12 on the node.
fn node(uid: &str) -> LinkSnapshot {
    let veth = |at: u32| {
        let peer = Peer { ifindex: 10 + at, nsid: Some(0) };
        link(1 + at, &format!("eth{}", at - 1), LinkKind::Veth, Some(peer))
    };
    let macvlan = link(9, "net9", LinkKind::Other("macvlan".into()), None);
    let inside = vec![link(1, "lo", LinkKind::Loopback, None), macvlan, veth(1), veth(2)];
    let netns = NetnsId { dev: 4, ino: 7 };
    let inside = PodLinks { netns, is_host: false, nsid: Some(5), links: inside, stale: None };
    let outside = |at: u32| {
        let peer = Peer { ifindex: 1 + at, nsid: Some(5) };
        link(10 + at, &format!("veth{at}"), LinkKind::Veth, Some(peer))
    };
    let host = [1, 2].map(|at| (IfIndex(10 + at), outside(at))).into();
    LinkSnapshot { host, pods: [(uid.to_owned(), Ok(inside))].into(), ..LinkSnapshot::default() }
}

fn found(text: &str, ifindex: u32) -> DeviceTarget {
    DeviceTarget {
        destination: text.parse().unwrap(),
        device: format!("veth{}", ifindex - 10),
        ifindex: Some(IfIndex(ifindex)),
        up: true,
        queueless: true,
        cuts: false,
        guarded: true,
        collector: Some(MAC),
        room: None,
        ..DeviceTarget::default()
    }
}

#[test]
fn copies_go_to_the_nodes_end_of_the_nic() {
    let (pods, links) = ([pod("1")], node("1"));
    for (text, ifindex) in
        [("pod:security/ids", 11), ("pod:security/ids/eth0", 11), ("pod:security/ids/eth1", 12)]
    {
        assert_eq!(target(&nic(text), &pods, &links), (found(text, ifindex), None), "{text}");
    }
}

#[test]
fn there_is_a_reason_where_no_copy_can_go() {
    let (pods, links) = ([pod("1")], node("1"));
    let why = |text: &str, pods: &[Pod], links: &LinkSnapshot| {
        let (target, why) = target(&nic(text), pods, links);
        assert_eq!((target.ifindex, target.up), (None, false));
        assert_eq!(target.destination.to_string(), text);
        why.unwrap()
    };
    let ids = "pod:security/ids";
    let (lasting, passing) = (|why: &str| (why.to_owned(), false), |why: &str| (why.to_owned(), true));
    let (no_pod, host_network) = (lasting("no such pod is on this node"), lasting(HOST_NETWORK));
    assert_eq!(why("pod:security/other", &pods, &links), no_pod);
    assert_eq!(why("pod:other/ids", &pods, &links), no_pod);
    assert_eq!(why(ids, &[], &links), no_pod);
    assert_eq!(why(ids, &[Pod { host_network: true, ..pod("1") }], &links), host_network);
    let no_process = passing("no process of the pod runs on this node yet");
    assert_eq!(why(ids, &pods, &LinkSnapshot::default()), no_process);
    assert_eq!(why("pod:security/ids/net1", &pods, &links), lasting("the pod has no interface \"net1\""));
    let no_veth = lasting("the pod's interface \"net9\" has no veth peer on the node");
    assert_eq!(why("pod:security/ids/net9", &pods, &links), no_veth);
    let mut changed = links.clone();
    changed.pods.insert("1".into(), Err("no".into()));
    assert_eq!(why(ids, &pods, &changed), lasting("the pod's network namespace cannot be read: no"));
    let mut changed = links.clone();
    changed.pods.get_mut("1").unwrap().as_mut().unwrap().links.truncate(1);
    assert_eq!(why(ids, &pods, &changed), passing("the pod has no interface but loopback yet"));
    let mut changed = links;
    changed.pods.get_mut("1").unwrap().as_mut().unwrap().is_host = true;
    assert_eq!(why(ids, &pods, &changed), host_network);
}

/// The device is known but down: the reason names the NIC.
#[test]
fn a_device_that_is_down_has_a_reason_too() {
    let mut links = node("1");
    links.host.get_mut(&IfIndex(11)).unwrap().carrier = false;
    let expected = DeviceTarget { up: false, ..found("pod:security/ids", 11) };
    let why = "the pod's interface \"eth0\" or the node side of its veth is down".to_owned();
    let expected = (expected, Some((why, false)));
    assert_eq!(target(&nic("pod:security/ids"), &[pod("1")], &links), expected);
}

/// Only a bridge forwards frames by their MAC addresses.
#[test]
fn the_bridge_of_a_collector_is_known_and_no_other_master() {
    for (kind, expected) in [("bridge", Some(IfIndex(3))), ("openvswitch", Some(IfIndex(3))), ("vrf", None)] {
        let mut links = node("1");
        links.host.insert(IfIndex(3), link(3, "master", LinkKind::Other(kind.into()), None));
        links.host.get_mut(&IfIndex(11)).unwrap().master = Some(IfIndex(3));
        let expected = DeviceTarget { bridge: expected, ..found("pod:security/ids", 11) };
        let before = found("pod:security/ids", 11);
        for found in [
            target(&nic("pod:security/ids"), &[pod("1")], &links),
            until_listed(&nic("pod:security/ids"), Some(&before), &links),
        ] {
            assert_eq!(found, (expected.clone(), None), "{kind}");
        }
    }
}

/// While a pod is replaced, a file can contain both pods. The reachable one is used, whatever the order.
#[test]
fn of_two_pods_of_one_name_the_one_that_can_be_reached_counts() {
    let links = node("1");
    for pods in [[pod("1"), pod("2")], [pod("2"), pod("1")]] {
        let expected = (found("pod:security/ids", 11), None);
        assert_eq!(target(&nic("pod:security/ids"), &pods, &links), expected);
    }
}

/// The node side of another pod's veth, with the same NIC index, is not taken for this pod's.
#[test]
fn a_veth_that_does_not_point_back_is_not_the_pods() {
    let mut links = node("1");
    links.host.get_mut(&IfIndex(11)).unwrap().peer = Some(Peer { ifindex: 2, nsid: Some(6) });
    let expected = (found("pod:security/ids", 12), None);
    assert_eq!(target(&nic("pod:security/ids"), &[pod("1")], &links), expected, "the second NIC leads there");
}

#[test]
fn until_there_is_a_list_the_last_target_holds() {
    let (links, text) = (node("1"), "pod:security/ids");
    let before = DeviceTarget { cuts: true, up: false, ..found(text, 11) };
    let now = DeviceTarget { cuts: true, ..found(text, 11) };
    assert_eq!(until_listed(&nic(text), Some(&before), &links), (now, None));

    let nothing = DeviceTarget { destination: text.parse().unwrap(), ..DeviceTarget::default() };
    let nothing = (nothing, Some(("the pods of this node are not known yet".to_owned(), true)));
    assert_eq!(until_listed(&nic(text), None, &links), nothing);
    let other = DeviceTarget { destination: "pod:security/other".parse().unwrap(), ..before.clone() };
    assert_eq!(until_listed(&nic(text), Some(&other), &links), nothing, "another pod's");
    let renamed = DeviceTarget { device: "veth9".into(), ..before.clone() };
    assert_eq!(
        until_listed(&nic(text), Some(&renamed), &links),
        nothing,
        "the index may have been used again"
    );
    assert_eq!(until_listed(&nic(text), Some(&before), &LinkSnapshot::default()), nothing, "it is gone");
}
