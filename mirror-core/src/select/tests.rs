//! Tests of the selected taps: examples for each rule, and properties over whole nodes.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;

use proptest::{collection::vec, option, prelude::*, sample};

use super::*;
use crate::{
    destination::Destination,
    model::{ActualTap, Directions, IfIndex, NetnsId, Peer, Place, Pod, PodLinks, TargetName},
    networks::{Entry, Networks},
    settings::Settings,
};

fn policy() -> Policy {
    Policy::default()
}

fn wanted(pod: &Pod, directions: Directions) -> Wanted<'_> {
    let session = Session {
        directions,
        settings: Settings::default(),
        target: TargetName::default(),
        origin: Origin::Annotation(Place::Pod),
        asked: 0,
        key: None,
    };
    Wanted { pod, mirrors: [(MirrorId::default(), session)].into(), nics: BTreeMap::new(), is_asked: true }
}

pub(super) fn mk_pod(name: &str, annotations: &[(&str, &str)]) -> Pod {
    Pod {
        id: PodId { uid: format!("uid-{name}"), namespace: "default".into(), name: name.into() },
        annotations: annotations.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect(),
        netns: Some(format!("/run/netns/{name}").into()),
        ..Pod::default()
    }
}

pub(super) fn mk_link(ifindex: u32, name: &str, kind: LinkKind, peer: Option<Peer>) -> Link {
    Link { mtu: 1500, ..Link::new(IfIndex(ifindex), name, kind, peer) }
}

/// A node with pods that have veth pairs: `(pod, index of the NIC inside, index of the device on the node)`.
pub(super) fn mk_node(nics: &[(&Pod, u32, u32)]) -> LinkSnapshot {
    let mut links = LinkSnapshot::default();
    for (pod, inside, outside) in nics {
        let nsid =
            links.pods.keys().position(|uid| *uid == pod.id.uid).unwrap_or(links.pods.len()) as i32 + 10;
        let entry = links.pods.entry(pod.id.uid.clone()).or_insert_with(|| {
            let lo = mk_link(1, "lo", LinkKind::Loopback, None);
            let netns = NetnsId { dev: 4, ino: nsid as u64 };
            Ok(PodLinks { netns, is_host: false, nsid: Some(nsid), links: vec![lo], stale: None })
        });
        let Ok(pod_links) = entry else { unreachable!() };
        let nsid = pod_links.nsid;
        let name = format!("eth{}", pod_links.links.len() - 1);
        let peer = Peer { ifindex: *outside, nsid: Some(0) };
        pod_links.links.push(mk_link(*inside, &name, LinkKind::Veth, Some(peer)));
        let back = Peer { ifindex: *inside, nsid };
        let device = mk_link(*outside, &format!("veth{outside}"), LinkKind::Veth, Some(back));
        links.host.insert(IfIndex(*outside), device);
    }
    links
}

/// The taps of a selection as installed.
fn installed(selection: &Selection) -> BTreeMap<Device, ActualTap> {
    let as_installed = |tap: &Tap| ActualTap { tap: Some(tap.clone()), ..ActualTap::default() };
    selection.taps.iter().map(|(device, tap)| (*device, as_installed(tap))).collect()
}

fn skips(selection: &Selection) -> Vec<(Option<&str>, &Why)> {
    selection.skipped.iter().map(|skipped| (skipped.nic.as_deref(), &skipped.why)).collect()
}

#[test]
fn a_tap_knows_the_bridge_of_its_device() {
    let web = mk_pod("web", &[]);
    let mut links = mk_node(&[(&web, 2, 7), (&web, 3, 8), (&web, 4, 9)]);
    for (at, kind) in [(5, "bridge"), (6, "vrf")] {
        links.host.insert(IfIndex(at), mk_link(at, &format!("dev{at}"), LinkKind::Other(kind.into()), None));
        links.host.get_mut(&IfIndex(at + 2)).unwrap().master = Some(IfIndex(at));
    }
    let selection = select(&[wanted(&web, Directions::Both)], &[], &links, &policy());
    let bridges: Vec<_> =
        selection.taps.iter().map(|(device, tap)| (device.ifindex.0, tap.head.bridge)).collect();
    assert_eq!(bridges, [(7, Some(IfIndex(5))), (8, None), (9, None)]);
}

#[test]
fn a_device_that_does_not_point_back_is_not_tapped() {
    let (web, db) = (mk_pod("web", &[]), mk_pod("db", &[]));
    let mut links = mk_node(&[(&web, 2, 7), (&db, 2, 8)]);
    // web's NIC now names index 8, as if that index had been reused. The device there is db's.
    let Some(Ok(inside)) = links.pods.get_mut("uid-web") else { unreachable!() };
    inside.links[1].peer = Some(Peer { ifindex: 8, nsid: Some(0) });
    let selection = select(&[wanted(&web, Directions::Both)], &[], &links, &policy());
    assert_eq!(selection.taps, BTreeMap::new());
    assert_eq!(skips(&selection), [(Some("eth0"), &Why::NoHostInterface("veth".into()))]);
}

#[test]
fn pods_that_cannot_be_tapped_are_told_with_a_reason() {
    let mut host_network = mk_pod("a", &[]);
    host_network.host_network = true;
    let (unknown, unreadable, empty, on_host, vlan) =
        (mk_pod("b", &[]), mk_pod("c", &[]), mk_pod("d", &[]), mk_pod("e", &[]), mk_pod("f", &[]));
    let mut links = LinkSnapshot::default();
    let inside = |is_host, link| PodLinks {
        netns: NetnsId::default(),
        is_host,
        nsid: None,
        links: vec![link],
        stale: None,
    };
    let lo = || mk_link(1, "lo", LinkKind::Loopback, None);
    let mut tunnel = mk_link(2, "tunl0", LinkKind::Other("ipip".into()), None);
    tunnel.up = false;
    let macvlan =
        mk_link(2, "eth0", LinkKind::Other("macvlan".into()), Some(Peer { ifindex: 2, nsid: Some(0) }));
    links.pods.insert("uid-c".into(), Err("no such file".into()));
    links.pods.insert("uid-d".into(), Ok(PodLinks { links: vec![lo(), tunnel], ..inside(false, lo()) }));
    links.pods.insert("uid-e".into(), Ok(inside(true, lo())));
    links.pods.insert("uid-f".into(), Ok(inside(false, macvlan)));

    let pods = [&host_network, &unknown, &unreadable, &empty, &on_host, &vlan];
    let selection = select(&pods.map(|pod| wanted(pod, Directions::Both)), &[], &links, &policy());
    assert_eq!(selection.taps.len(), 1, "the macvlan's, inside its pod");
    let expected = [
        (None, &Why::HostNetwork { is_asked: true }),
        (None, &Why::NoNetns),
        (None, &Why::NetnsUnreadable("no such file".into())),
        (None, &Why::NoNic),
        (None, &Why::HostNetwork { is_asked: true }),
    ];
    assert_eq!(skips(&selection), expected);
}

#[test]
fn devices_of_containers_inside_a_pod_are_told_of_only_where_no_nic_leads_to_the_node() {
    let (web, lost) = (mk_pod("web", &[]), mk_pod("lost", &[]));
    let mut links = mk_node(&[(&web, 2, 7), (&lost, 2, 8)]);
    links.host.remove(&IfIndex(8));
    let other = |kind: &str| LinkKind::Other(kind.into());
    for uid in ["uid-web", "uid-lost"] {
        let Some(Ok(inside)) = links.pods.get_mut(uid) else { unreachable!() };
        inside.links.extend([
            mk_link(3, "docker0", other("bridge"), None),
            mk_link(4, "veth1a2b3c", LinkKind::Veth, Some(Peer { ifindex: 2, nsid: Some(1) })),
            mk_link(5, "net1", other("macvlan"), Some(Peer { ifindex: 3, nsid: Some(0) })),
        ]);
    }
    let both = [&web, &lost].map(|pod| wanted(pod, Directions::Both));
    let selection = select(&both, &[], &links, &policy());
    let on_node: Vec<_> = selection.taps.keys().filter(|device| device.is_on_node()).collect();
    assert_eq!(on_node, [&Device::on_node(IfIndex(7))]);
    let inside: Vec<_> = selection.taps.keys().filter(|device| !device.is_on_node()).collect();
    assert_eq!(inside.len(), 2, "a macvlan is tapped inside its pod");
    let none = |kind: &str| Why::NoHostInterface(kind.into());
    let expected = [(Some("eth0"), &none("veth")), (Some("veth1a2b3c"), &none("veth"))];
    assert_eq!(skips(&selection), expected);
}

/// The CNI plugin `host-device` moved one end of a veth into the pod, and its peer is elsewhere.
#[test]
fn a_nic_in_a_network_that_leads_past_the_node_is_told_of() {
    let entry = Entry { network: Some("shop/past"), nic: Some("net1") };
    let web = Pod { networks: Networks::of([entry]), ..mk_pod("web", &[]) };
    let mut links = mk_node(&[(&web, 2, 7)]);
    let Some(Ok(inside)) = links.pods.get_mut("uid-web") else { unreachable!() };
    let past = |ifindex, name| mk_link(ifindex, name, LinkKind::Veth, Some(Peer { ifindex: 2, nsid: None }));
    inside.links.extend([past(3, "net1"), past(4, "veth1a2b3c")]);
    let selection = select(&[wanted(&web, Directions::Both)], &[], &links, &policy());
    assert_eq!(selection.taps.len(), 1, "eth0 alone");
    assert_eq!(skips(&selection), [(Some("net1"), &Why::NoHostInterface("veth".into()))]);
}

#[test]
fn a_pod_that_cannot_be_read_again_stays_tapped_and_is_told_of() {
    let web = mk_pod("web", &[]);
    let mut links = mk_node(&[(&web, 2, 7)]);
    let before = select(&[wanted(&web, Directions::Both)], &[], &links, &policy());
    let Some(Ok(inside)) = links.pods.get_mut("uid-web") else { unreachable!() };
    inside.stale = Some("no such alias".into());
    let selection = select(&[wanted(&web, Directions::Both)], &[], &links, &policy());
    assert_eq!(selection.taps, before.taps);
    let [(None, Why::NetnsUnreadable(why))] = &skips(&selection)[..] else { unreachable!("{selection:?}") };
    assert_eq!(why, "no such alias");
}

#[test]
fn named_interfaces_are_tapped_as_themselves() {
    let mut links = LinkSnapshot::default();
    links.host.insert(IfIndex(4), mk_link(4, "eth0", LinkKind::Other(String::new()), None));
    let interfaces = vec!["eth0".into(), "eth0".into(), "eth9".into()];
    let target = TargetName("live".parse().unwrap());
    let selection = select(&[], &[], &links, &Policy { interfaces, target: target.clone(), ..policy() });
    assert_eq!(selection.taps.len(), 1);
    let tap = &selection.taps[&Device::on_node(IfIndex(4))];
    assert_eq!((tap.head.kind, &tap.sessions[&MirrorId::default()].target), (TapKind::Interface, &target));
    assert_eq!(skips(&selection), [(Some("eth9"), &Why::NoSuchInterface)]);
}

#[test]
fn an_interface_without_an_ethernet_header_is_refused() {
    let mut links = LinkSnapshot::default();
    let tun = mk_link(4, "wg0", LinkKind::Other("wireguard".into()), None);
    links.host.insert(IfIndex(4), Link { is_ethernet: false, ..tun });
    for destination in [Destination::Device("mirror0".into()), Destination::Stream] {
        let targets = [(TargetName::default(), destination)].into();
        let selection =
            select(&[], &[], &links, &Policy { interfaces: vec!["wg0".into()], targets, ..policy() });
        assert_eq!(
            (selection.taps.len(), &skips(&selection)[..]),
            (0, &[(Some("wg0"), &Why::NotEthernet)][..])
        );
    }
}

#[test]
fn the_mirror_interface_is_never_tapped() {
    let web = mk_pod("web", &[]);
    let links = mk_node(&[(&web, 2, 7)]);
    let policy = Policy {
        targets: [("default", "mirror0"), ("ids", "veth7")]
            .map(|(name, device)| (TargetName(name.parse().unwrap()), device.parse().unwrap()))
            .into(),
        ..policy()
    };
    let selection = select(&[wanted(&web, Directions::Both)], &[], &links, &policy);
    assert_eq!(selection.taps, BTreeMap::new());
    assert_eq!(
        skips(&selection),
        [(Some("eth0"), &Why::MirrorInterface("veth7 is the mirror interface itself".into()))]
    );
}

/// A pod of a random node: its annotation, whether it uses the host network, and its number of NICs.
fn any_pod() -> impl Strategy<Value = (Option<&'static str>, bool, usize)> {
    let values = vec!["true", "false", "both", "ingress", "egress", "maybe"];
    (option::of(sample::select(values)), prop::bool::weighted(0.1), 0..4usize)
}

/// A bridge, or a veth whose peer is not on the node, inside a pod: index, state and peer.
fn any_inner() -> impl Strategy<Value = Link> {
    let peer =
        option::of((95..120u32, option::of(0..3i32)).prop_map(|(ifindex, nsid)| Peer { ifindex, nsid }));
    (50..90u32, any::<bool>(), any::<bool>(), peer).prop_map(|(ifindex, is_veth, up, peer)| {
        let kind = if is_veth { LinkKind::Veth } else { LinkKind::Other("bridge".into()) };
        Link { up, ..mk_link(ifindex, &format!("inner{ifindex}"), kind, peer) }
    })
}

proptest! {
    /// Devices that a pod creates inside its namespace change nothing, as long as the pod has a NIC.
    #[test]
    fn devices_inside_a_pod_change_nothing(counts in vec(1..4u32, 1..5), inner in vec(any_inner(), 0..20)) {
        let pods: Vec<_> = (0..counts.len()).map(|number| mk_pod(&format!("pod{number}"), &[])).collect();
        let nics = pods.iter().zip(&counts).flat_map(|(pod, count)| (0..*count).map(move |nic| (pod, nic + 2)));
        let nics: Vec<_> = nics.zip(100..).map(|((pod, inside), outside)| (pod, inside, outside)).collect();
        let mut links = mk_node(&nics);
        let chosen: Vec<_> = pods.iter().map(|pod| wanted(pod, Directions::Both)).collect();
        let before = select(&chosen, &[], &links, &policy());
        prop_assert_eq!(before.taps.len(), nics.len());
        for (number, link) in inner.into_iter().enumerate() {
            let uid = &pods[number % pods.len()].id.uid;
            let Some(Ok(inside)) = links.pods.get_mut(uid) else { unreachable!() };
            inside.links.insert(0, link);
        }
        prop_assert_eq!(select(&chosen, &[], &links, &policy()), before);
    }

    /// Each tap belongs to a selected pod, whose NIC is its veth peer. Each selected pod is tapped on all its NICs, or
    /// reported with a reason.
    #[test]
    fn taps_match_the_truth(
        shapes in vec(any_pod(), 0..8), enable_mirror: bool, rotation: u32,
    ) {
        let pods: Vec<_> = shapes.iter().enumerate().map(|(number, (value, host_network, _))| {
            let annotations: Vec<_> = value.iter().map(|value| (MIRROR, *value)).collect();
            Pod { host_network: *host_network, ..mk_pod(&format!("pod{number}"), &annotations) }
        }).collect();
        // Indexes inside start at 2 in every pod, so they occur in several pods. The indexes on the node are rotated.
        let total: u32 = shapes.iter().map(|(_, _, nics)| *nics as u32).sum();
        let outside = |number: u32| (number + rotation % total) % total + 100;
        let mut nics = Vec::new();
        for (pod, (_, _, count)) in pods.iter().zip(&shapes) {
            nics.extend((0..*count as u32).map(|nic| (pod, nic + 2, 0)));
        }
        for (number, nic) in nics.iter_mut().enumerate() {
            nic.2 = outside(number as u32);
        }
        let links = mk_node(&nics);
        let policy = Policy { enable_mirror, ..policy() };
        let chosen = choose(&pods, &[], &[], &policy, &mut Filters::default()).wanted;
        let selection = select(&chosen, &[], &links, &policy);

        for (device, tap) in &selection.taps {
            let owner = tap.head.owner.pod.as_ref().map(|pod| &pod.uid);
            let truth = nics.iter().find(|(_, _, outside)| *outside == device.ifindex.0).map(|(pod, ..)| &pod.id.uid);
            prop_assert_eq!(owner, truth);
            let choice = chosen.iter().find(|wanted| Some(&wanted.pod.id.uid) == owner);
            prop_assert_eq!(choice.map(|wanted| &wanted.mirrors), Some(&tap.sessions));
        }
        for Wanted { pod, .. } in &chosen {
            let tapped = selection.taps.values().filter(|tap| tap.head.owner.pod.as_ref() == Some(&pod.id)).count();
            let nics = nics.iter().filter(|(of, ..)| of.id == pod.id).count();
            let skipped = selection.skipped.iter().any(|skipped| skipped.pod.as_ref() == Some(&pod.id));
            let expected = if skipped { 0 } else { nics.max(1) };
            prop_assert_eq!(tapped, expected);
        }
    }
}

#[test]
fn a_pod_with_many_veths_does_not_take_the_places_of_others() {
    let (web, db) = (mk_pod("web", &[]), mk_pod("db", &[]));
    let nics: Vec<_> = (2..200).map(|index| (&web, index, 100 + index)).chain([(&db, 2, 7)]).collect();
    let links = mk_node(&nics);
    let both = [&web, &db].map(|pod| wanted(pod, Directions::Both));
    let selection = select(&both, &[], &links, &policy());
    let devices: Vec<_> = selection.taps.keys().map(|device| device.ifindex.0).collect();
    assert_eq!(devices, [7].into_iter().chain(102..118).collect::<Vec<_>>());
    assert_eq!(skips(&selection), [(None, &Why::TooManyNics)]);
}

/// An agent is replaced while it cannot read a namespace.
#[test]
fn taps_stay_where_a_namespace_cannot_be_read_and_nothing_has_changed() {
    let web = mk_pod("web", &[]);
    let mut links = mk_node(&[(&web, 2, 7), (&web, 3, 8)]);
    let Some(Ok(inside)) = links.pods.get_mut("uid-web") else { unreachable!() };
    let lower = Peer { ifindex: 9, nsid: Some(0) };
    inside.links.push(mk_link(4, "net1", LinkKind::Other("macvlan".into()), Some(lower)));
    let netns = inside.netns;
    let before = select(&[wanted(&web, Directions::Both)], &[], &links, &policy());
    let installed = installed(&before);
    let unread =
        |netns| PodLinks { netns, is_host: false, nsid: None, links: vec![], stale: Some("denied".into()) };
    let again = |links: &LinkSnapshot, inside: PodLinks, pod: &Pod| {
        let mut links = links.clone();
        links.pods = [(pod.id.uid.clone(), Ok(inside))].into();
        keep_installed(&mut links, &installed);
        select(&[wanted(pod, Directions::Both)], &[], &links, &policy())
    };
    assert_eq!(before.taps.len(), 3);
    let after = again(&links, unread(netns), &web);
    assert_eq!(after.taps, before.taps);
    let why = Why::NetnsUnreadable("denied; existing mirrors continue".into());
    assert_eq!(skips(&after), [(None, &why)]);

    let taps =
        |selection: Selection| selection.taps.keys().map(|device| device.ifindex.0).collect::<Vec<_>>();
    assert_eq!(taps(again(&links, unread(NetnsId { dev: 4, ino: 99 }), &web)), [], "another namespace");
    assert_eq!(taps(again(&links, unread(netns), &mk_pod("db", &[]))), [], "another pod");
    let mut changed = links.clone();
    changed.host.remove(&IfIndex(7));
    changed.host.get_mut(&IfIndex(8)).unwrap().name = "veth9".into();
    assert_eq!(taps(again(&changed, unread(netns), &web)), [4], "other veths");
}

/// An agent is replaced while pods have no process, as with CRI-O between two runs of a container.
#[test]
fn taps_stay_where_a_pod_has_no_process_while_a_veth_of_it_is_left() {
    let (web, db) = (mk_pod("web", &[]), mk_pod("db", &[]));
    let mut links = mk_node(&[(&web, 2, 7), (&web, 3, 8), (&db, 2, 9)]);
    let Some(Ok(inside)) = links.pods.get_mut("uid-web") else { unreachable!() };
    let lower = Peer { ifindex: 9, nsid: Some(0) };
    inside.links.push(mk_link(4, "net1", LinkKind::Other("macvlan".into()), Some(lower)));
    let both = [&web, &db].map(|pod| wanted(pod, Directions::Both));
    let before = select(&both, &[], &links, &policy());
    let installed = installed(&before);
    let again = |change: fn(&mut LinkSnapshot)| {
        let mut links = links.clone();
        links.pods.clear();
        change(&mut links);
        keep_installed(&mut links, &installed);
        select(&both, &[], &links, &policy())
    };
    let after = again(|_| {});
    assert_eq!(after.taps, before.taps);
    assert_eq!(skips(&after), [(None, &Why::NoNetns), (None, &Why::NoNetns)]);

    let taps = |change: fn(&mut LinkSnapshot)| {
        again(change).taps.keys().map(|device| device.ifindex.0).collect::<Vec<_>>()
    };
    assert_eq!(taps(|_| {}), [7, 8, 9, 4]);
    let changed = taps(|links| {
        links.host.remove(&IfIndex(7));
        links.host.get_mut(&IfIndex(9)).unwrap().name = "veth10".into();
    });
    assert_eq!(changed, [8, 4]);
    let no_veth_of_web = taps(|links| links.host.retain(|ifindex, _| *ifindex == IfIndex(9)));
    assert_eq!(no_veth_of_web, [9]);
    let unknown = taps(|links| drop(links.pods.insert("uid-web".into(), Err("no such file".into()))));
    assert_eq!(unknown, [9], "its namespace may be another one");
}
