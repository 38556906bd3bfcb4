//! Tests: which devices may be the mirror interface, and when the agent creates it.

use super::*;
use crate::model::{ALIAS, Offloads, Peer};

fn link(ifindex: u32, name: &str, kind: LinkKind) -> Link {
    Link { mtu: 1500, ..Link::new(IfIndex(ifindex), name, kind, None) }
}

fn dummy() -> Link {
    link(9, "mirror0", LinkKind::Dummy)
}

fn ours() -> Link {
    Link { alias: Some(ALIAS.into()), mtu: 65535, ..dummy() }
}

fn world(links: impl IntoIterator<Item = Link>) -> LinkSnapshot {
    let host = links.into_iter().map(|link| (link.ifindex, link)).collect();
    LinkSnapshot { host, ..LinkSnapshot::default() }
}

fn create(mtu: u32) -> LinkChange {
    LinkChange::CreateMirror { name: "mirror0".into(), mtu, offloads: true }
}

#[test]
fn a_missing_one_is_made_again_and_again() {
    let mut mirror = MirrorIface::new("mirror0", None);
    assert_eq!(mirror.changes(&world([])), [create(65535)]);
    assert_eq!(mirror.changes(&world([ours()])), []);
    assert_eq!(mirror.changes(&world([])), [create(65535)]);
}

/// An agent was killed while it made the device: no name of it is complete, and no other program has such an index.
#[test]
fn a_half_made_one_is_made_again() {
    for kind in [LinkKind::Dummy, LinkKind::Veth] {
        let half = Link { up: false, mtu: 1279, ..link(FIRST_IFINDEX.0 + 5, "mirror0", kind) };
        let mut mirror = MirrorIface::new("mirror0", None);
        assert_eq!(mirror.changes(&world([half.clone()])), [LinkChange::Delete(half.ifindex), create(65535)]);
        assert_eq!(mirror.changes(&world([])), [create(65535)], "until it is there");
        assert_eq!(ours_of(std::slice::from_ref(&half)), [half.ifindex]);
        let of_others = [Link { up: true, ..half.clone() }, Link { ifindex: IfIndex(9), ..half }];
        assert_eq!(ours_of(&of_others), []);
    }
}

/// The devices that `cleanup` deletes.
fn ours_of(links: &[Link]) -> Vec<IfIndex> {
    super::ours(&world(links.iter().cloned())).map(|link| link.ifindex).collect()
}

#[test]
fn one_of_ours_and_its_other_end_keep_no_address() {
    let veth = |ifindex, name, peer| Link {
        alias: Some(ALIAS.into()),
        peer: Some(Peer { ifindex: peer, nsid: None }),
        ..link(ifindex, name, LinkKind::Veth)
    };
    let addressed = |links: &[Link]| LinkSnapshot {
        addresses: links
            .iter()
            .map(|link| (link.ifindex, [std::net::Ipv4Addr::new(169, 254, 7, 7).into()].into()))
            .collect(),
        ..world(links.iter().cloned())
    };
    let changes = |links: &LinkSnapshot| MirrorIface::new("mirror0", None).changes(links);
    let remove = |ifindex| LinkChange::RemoveAddresses(IfIndex(ifindex));
    assert_eq!(changes(&addressed(&[ours()])), [remove(9)]);
    let pair = [veth(9, "mirror0", 10), veth(10, "mirror0p", 9)];
    assert_eq!(changes(&addressed(&pair)), [remove(9), remove(10)]);
    // Other software may need the address of its device, for example of a NIC or a bridge.
    assert_eq!(changes(&addressed(&[dummy()])), []);
}

#[test]
fn its_mtu_is_what_the_user_told() {
    let mut mirror = MirrorIface::new("mirror0", Some(9000));
    assert_eq!(mirror.changes(&world([])), [create(9000)]);

    let mut mirror = MirrorIface::new("mirror0", Some(9000));
    let told = Link { mtu: 9000, ..dummy() };
    for _ in 0..2 {
        let set = [LinkChange::SetMtu(IfIndex(9), 9000)];
        assert_eq!(mirror.changes(&world([dummy()])), set, "until the device has it");
    }
    assert_eq!(mirror.changes(&world([told])), []);
    assert_eq!(mirror.changes(&world([dummy()])), [], "somebody has changed it since");
}

#[test]
fn one_that_was_there_is_brought_up_once_and_its_return_is_waited_for() {
    let mut mirror = MirrorIface::new("mirror0", None);
    let down = Link { up: false, ..dummy() };
    for _ in 0..2 {
        let up = [LinkChange::SetUp(IfIndex(9))];
        assert_eq!(mirror.changes(&world([down.clone()])), up, "the change can fail, so until it is up");
    }
    assert_eq!(mirror.changes(&world([dummy()])), []);
    assert_eq!(mirror.changes(&world([down])), [], "who takes it down later wants it down");
    assert_eq!(mirror.changes(&world([])), [], "it is not ours to make");
}

/// A setting that fails does not affect the others: a user can change those that the device has had.
#[test]
fn each_setting_is_tried_until_the_device_has_it() {
    let mut mirror = MirrorIface::new("mirror0", Some(9000));
    let down = Link { up: false, ..dummy() };
    let (mtu, up) = (LinkChange::SetMtu(IfIndex(9), 9000), LinkChange::SetUp(IfIndex(9)));
    assert_eq!(mirror.changes(&world([down.clone()])), [mtu.clone(), up]);
    for link in [dummy(), down] {
        assert_eq!(mirror.changes(&world([link])), std::slice::from_ref(&mtu));
    }
    assert_eq!(mirror.changes(&world([Link { mtu: 9000, ..dummy() }])), []);
    assert_eq!(mirror.changes(&world([Link { up: false, ..dummy() }])), []);
}

#[test]
fn ours_is_deleted_when_it_was_renamed_or_is_not_wanted_any_more() {
    let renamed = Link { name: "other0".into(), ..ours() };
    let foreign = Link { alias: None, ..renamed.clone() };
    let delete = [LinkChange::Delete(IfIndex(9))];
    let names = BTreeSet::from(["mirror0"]);
    assert_eq!(left_behind(&names, &world([renamed.clone()])), delete);
    assert_eq!(left_behind(&names, &world([foreign])), [], "it is not ours");
    assert_eq!(left_behind(&names, &world([ours()])), []);
    assert_eq!(left_behind(&[].into(), &world([ours()])), delete, "no target has it any more");
    let names = BTreeSet::from(["mirror0", "other0"]);
    assert_eq!(left_behind(&names, &world([renamed])), [], "it is another target's now");
    assert_eq!(MirrorIface::new("mirror0", None).changes(&world([])), [create(65535)]);
}

#[test]
fn what_another_agent_has_made_is_deleted_but_no_end_of_a_mirror_interface() {
    let peer = |ifindex| Some(Peer { ifindex, nsid: None });
    let left = Link { ifindex: IfIndex(3), name: "old0".into(), ..ours() };
    let foreign = Link { ifindex: IfIndex(4), name: "other0".into(), alias: None, ..ours() };
    let ends = [
        Link { kind: LinkKind::Veth, peer: peer(10), ..ours() },
        Link { ifindex: IfIndex(10), name: "mirror0p".into(), kind: LinkKind::Veth, peer: peer(9), ..ours() },
    ];
    let links = world([left, foreign].into_iter().chain(ends));
    assert_eq!(left_behind(&["mirror0"].into(), &links), [LinkChange::Delete(IfIndex(3))]);
    assert_eq!(left_behind(&["mirror0", "old0"].into(), &links), []);
    let delete = [3, 9, 10].map(|ifindex| LinkChange::Delete(IfIndex(ifindex)));
    assert_eq!(
        left_behind(&[].into(), &links),
        delete,
        "an end that is deleted with the other one is no error"
    );
}

/// Root in a pod sets podmirror's alias on a NIC, and the NIC returns to the node when the pod ends. The kernel returns
/// physical NICs, some CNIs return others.
#[test]
fn a_device_of_others_is_not_ours_by_its_alias() {
    let nic = |ifindex, kind: &str| Link {
        ifindex: IfIndex(ifindex),
        name: format!("nic{ifindex}"),
        kind: LinkKind::Other(kind.into()),
        ..ours()
    };
    let kinds = ["", "macvlan", "vlan", "bridge", "vxlan"];
    let of_others = (20..).zip(kinds).map(|(ifindex, kind)| nic(ifindex, kind));
    // The peer of the first veth is in a pod. The peer of the second is a bridge port on the node.
    let veth = |ifindex, peer, nsid| Link {
        kind: LinkKind::Veth,
        peer: Some(Peer { ifindex: peer, nsid }),
        ..nic(ifindex, "")
    };
    let veths = [veth(30, 2, Some(4)), veth(31, 32, None), Link { alias: None, ..veth(32, 31, None) }];
    assert_eq!(left_behind(&[].into(), &world(of_others.chain(veths))), []);

    // Devices of an agent are still recognised. This agent was killed after it had set the alias on one end of a pair.
    let tunnel = Link { external: Some(4789), ..nic(40, "vxlan") };
    let pair = [veth(41, 42, None), Link { alias: None, up: false, ..veth(42, 41, None) }];
    let delete = [40, 41].map(|ifindex| LinkChange::Delete(IfIndex(ifindex)));
    assert_eq!(left_behind(&[].into(), &world([tunnel].into_iter().chain(pair))), delete);
}

fn features(on: &[&str], off: &[&str], fixed: &[&str]) -> Option<Offloads> {
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    Some(Offloads { on: set(on), off: set(off), fixed: set(fixed) })
}

#[test]
fn offloads_that_are_not_wanted_are_switched_off_whenever_they_are_on() {
    let mut mirror = MirrorIface::new("mirror0", None).offloads(false);
    let made = LinkChange::CreateMirror { name: "mirror0".into(), mtu: 65535, offloads: false };
    assert_eq!(mirror.changes(&world([])), [made]);

    let on = Link { offloads: features(&["tx-checksum-ipv4"], &["tx-tcp-segmentation"], &[]), ..dummy() };
    let off = Link { offloads: features(&[], &["tx-checksum-ipv4"], &["tx-gso-list"]), ..dummy() };
    let unknown = Link { offloads: None, ..dummy() };
    let switch_off = [LinkChange::SetOffloads(IfIndex(9), false)];
    for _ in 0..2 {
        // The user configured it, so it applies to the agent's device and to others. If offloads are unreadable, the
        // change is tried, so that the error is reported.
        assert_eq!(mirror.changes(&world([on.clone()])), switch_off);
        assert_eq!(mirror.changes(&world([off.clone()])), []);
        assert_eq!(mirror.changes(&world([unknown.clone()])), switch_off);
    }
    assert_eq!(mirror.fixed_offloads(&world([on.clone()])), None);
    let fixed = mirror.fixed_offloads(&world([off.clone()])).cloned();
    assert_eq!(fixed, Some(["tx-gso-list".to_owned()].into()));
    let mirror = mirror.offloads(true);
    assert_eq!(mirror.fixed_offloads(&world([off])), None, "nobody wants them off");
}

#[test]
fn offloads_come_back_on_a_device_of_ours_when_the_agent_starts() {
    let off = |link: Link| Link { offloads: features(&[], &["tx-checksum-ipv4"], &[]), ..link };
    let mut mirror = MirrorIface::new("mirror0", None);
    for _ in 0..2 {
        let on = [LinkChange::SetOffloads(IfIndex(9), true)];
        assert_eq!(mirror.changes(&world([off(ours())])), on, "until they are on");
    }
    assert_eq!(mirror.changes(&world([ours()])), []);
    assert_eq!(mirror.changes(&world([off(ours())])), [], "somebody has switched them off since");
    let mut mirror = MirrorIface::new("mirror0", None);
    assert_eq!(mirror.changes(&world([ours()])), []);
    let mut mirror = MirrorIface::new("mirror0", None);
    assert_eq!(mirror.changes(&world([off(dummy())])), [], "it is not ours");
}

#[test]
fn a_device_of_ours_has_a_queue_while_the_kernel_segments_for_it() {
    let segmented = |link: Link| Link { offloads: features(&[], &["tx-checksum-ipv4"], &[]), ..link };
    let queued = |link: Link| Link { queueless: false, ..link };
    let mut mirror = MirrorIface::new("mirror0", None).offloads(false);
    for _ in 0..2 {
        let bare = world([segmented(ours())]);
        assert_eq!(mirror.changes(&bare), [LinkChange::SetQueue(IfIndex(9), true)]);
        assert!(!mirror.loses_order(&bare), "it will have one");
        assert_eq!(mirror.changes(&world([queued(segmented(ours()))])), []);
    }
    let mut mirror = MirrorIface::new("mirror0", None).offloads(false);
    let theirs = world([segmented(dummy())]);
    assert_eq!(mirror.changes(&theirs), [], "it is not ours");
    assert!(mirror.loses_order(&theirs));
    assert!(!mirror.loses_order(&world([queued(segmented(dummy()))])));
    assert!(!mirror.loses_order(&world([])));

    // An earlier agent added this queue. Its handle shows whether it is podmirror's.
    let mut mirror = MirrorIface::new("mirror0", None);
    let left = world([queued(ours())]);
    assert_eq!(mirror.changes(&left), [LinkChange::SetQueue(IfIndex(9), false)]);
    assert_eq!(mirror.changes(&left), [], "tried once: other software's queue stays");
    assert!(!mirror.loses_order(&theirs), "the kernel segments nothing");
}

/// Readers can be found at the agent's dummy device, and at both ends of the veth pair that replaces one. Any other
/// device gets all copies.
#[test]
fn copies_wait_for_readers_where_readers_can_be_found() {
    let mirror = |when_read| MirrorIface::new("mirror0", None).when_read(when_read);
    let readable = |links: &LinkSnapshot| mirror(true).target(links).readable();
    let [device, other_end] = [IfIndex(9), IfIndex(10)];
    assert_eq!(readable(&world([ours()])), Some(Readable { device, other_end: None }));
    assert_eq!(mirror(false).target(&world([ours()])).readable(), None);
    assert_eq!(readable(&world([])), None);
    assert_eq!(readable(&world([dummy()])), None, "it is not ours");
    assert_eq!(
        readable(&world([Link { kind: LinkKind::Other("bridge".into()), ..ours() }])),
        None,
        "it sends copies on"
    );

    let peer_at = |nsid| Some(Peer { ifindex: 10, nsid });
    let end = |nsid| Link { kind: LinkKind::Veth, peer: peer_at(nsid), ..ours() };
    let other = Link { alias: Some(ALIAS.into()), ..link(10, "mirror0p", LinkKind::Veth) };
    assert_eq!(
        readable(&world([end(None), other.clone()])),
        Some(Readable { device, other_end: Some(other_end) })
    );
    assert_eq!(readable(&world([end(None), Link { master: Some(IfIndex(3)), ..other.clone() }])), None);
    assert_eq!(readable(&world([end(None), Link { alias: None, ..other.clone() }])), None);
    assert_eq!(readable(&world([end(None)])), None, "nobody knows where it is");
    assert_eq!(
        readable(&world([end(Some(1)), other])),
        None,
        "in a container, and another device has its number"
    );
}

#[test]
fn loopback_and_ifb_are_refused() {
    assert!(refusal(&link(1, "lo", LinkKind::Loopback)).is_some());
    let ifb = link(9, "mirror0", LinkKind::Ifb);
    assert!(refusal(&ifb).is_some());
    assert!(refusal(&dummy()).is_none());

    // The device took the name later: nothing is sent to it.
    let mirror = MirrorIface::new("mirror0", None);
    assert_eq!(mirror.target(&world([ifb])).ifindex, None);
}

#[test]
fn a_target_without_carrier_is_down() {
    let mirror = MirrorIface::new("mirror0", None);
    assert!(mirror.target(&world([dummy()])).up);
    assert!(!mirror.target(&world([Link { carrier: false, ..dummy() }])).up);
    assert!(!mirror.target(&world([Link { up: false, ..dummy() }])).up);
}

#[test]
fn devices_that_would_see_the_copies_again_are_in_conflict() {
    let here = |ifindex| Some(Peer { ifindex, nsid: None });
    let bridge = link(3, "br0", LinkKind::Other("bridge".into()));
    let tapped = Link { master: Some(IfIndex(3)), peer: here(5), ..link(4, "veth4", LinkKind::Veth) };
    let other_end = Link { peer: here(4), ..link(5, "veth5", LinkKind::Veth) };
    let into_bridge = Link { peer: here(7), ..link(6, "veth6", LinkKind::Veth) };
    let port = Link { master: Some(IfIndex(3)), peer: here(6), ..link(7, "veth7", LinkKind::Veth) };
    let links = world([
        bridge.clone(),
        tapped.clone(),
        other_end.clone(),
        into_bridge.clone(),
        port.clone(),
        dummy(),
    ]);

    for (mirror, expected) in [
        (&tapped, "veth4 is the mirror interface itself"),
        (&bridge, "veth4 is a port of the mirror interface"),
        (&other_end, "the mirror interface is the other end of veth4's veth"),
        (&into_bridge, "copies on the mirror interface would come back through the bridge of veth4"),
    ] {
        assert_eq!(conflict(mirror, &tapped, &links).as_deref(), Some(expected));
    }
    assert_eq!(conflict(&dummy(), &tapped, &links), None);
    assert_eq!(conflict(&port, &tapped, &links), None, "another port of the bridge leads out of it");

    // Its peer is in another namespace, where index 4 is another device.
    let elsewhere = Link { peer: Some(Peer { ifindex: 4, nsid: Some(0) }), ..other_end };
    assert_eq!(conflict(&elsewhere, &tapped, &links), None);
}
