//! Tests of taps inside pods, and of relay devices.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{collections::BTreeSet, sync::Arc};

use mirror_common::verdict::TapKind;
use proptest::{collection::vec, prelude::*, sample};

use super::{super::tests::mk_link, *};
use crate::{
    destination::Destination,
    exit::{self, HUB, IFINDEX, NAME},
    mirror_iface::is_half_made,
    model::{
        ALIAS, ActualTap, FIRST_IFINDEX, HookState, IfIndex, LinkChange, LinkSnapshot, NetnsId, Peer,
        PodLinks, TargetName,
    },
    networks::{Entry, Networks},
    select::{Filters, MIRROR, NICS, choose, select, tests::mk_pod},
};

const LOWER: Peer = Peer { ifindex: 2, nsid: Some(0) };

fn kind(name: &str) -> LinkKind {
    LinkKind::Other(name.into())
}

/// A node with one pod that has these devices.
fn node_of(pod: &Pod, devices: Vec<Link>) -> LinkSnapshot {
    let netns = NetnsId { dev: 4, ino: 77 };
    let inside = PodLinks { netns, is_host: false, nsid: Some(7), links: devices, stale: None };
    LinkSnapshot { pods: [(pod.id.uid.clone(), Ok(inside))].into(), ..LinkSnapshot::default() }
}

fn devices() -> Vec<Link> {
    vec![
        mk_link(2, "eth0", kind("macvlan"), Some(LOWER)),
        mk_link(3, "net1", kind("ipvlan"), Some(LOWER)),
        mk_link(4, "vf0", kind(""), None),
        mk_link(5, "eth0.5", kind("vlan"), Some(Peer { ifindex: 2, nsid: None })),
        mk_link(
            6,
            "wg0",
            Link { is_ethernet: false, ..mk_link(6, "wg0", kind("wireguard"), None) }.kind,
            None,
        ),
        mk_link(7, "lost", LinkKind::Veth, Some(Peer { ifindex: 9, nsid: Some(3) })),
        mk_link(8, "br0", kind("bridge"), None),
        mk_link(9, "net2", LinkKind::IpvlanL3s, Some(LOWER)),
    ]
}

/// Returns the taps and reasons for one pod with these annotations.
fn selected(
    annotations: &[(&str, &str)],
    links: &LinkSnapshot,
    policy: &Policy,
) -> (Vec<String>, Vec<String>) {
    selected_of(mk_pod("web", annotations), links, policy)
}

/// As [`selected`], for this pod.
fn selected_of(pod: Pod, links: &LinkSnapshot, policy: &Policy) -> (Vec<String>, Vec<String>) {
    let pods = [pod];
    let choice = choose(&pods, &[], &[], policy, &mut Filters::default());
    let selection = select(&choice.wanted, &[], links, policy);
    let taps = selection.taps.iter().map(|(device, tap)| {
        assert_eq!((tap.head.kind, device.is_on_node()), (TapKind::PodNic, false));
        assert_eq!(tap.head.owner.netns, NetnsId { dev: 4, ino: 77 });
        tap.head.owner.nic.clone()
    });
    let taps = taps.collect();
    let why = selection
        .skipped
        .iter()
        .map(|skipped| format!("{} {}", skipped.nic.as_deref().unwrap_or_default(), skipped.why.name()));
    (taps, why.collect())
}

#[test]
fn what_leads_out_is_tapped_and_the_rest_where_it_is_named() {
    let links = node_of(&mk_pod("web", &[]), devices());
    let policy = Policy::default();
    let (taps, why) = selected(&[(MIRROR, "true")], &links, &policy);
    assert_eq!(taps, ["eth0", "net1", "vf0", "net2"]);
    // The other devices send through these.
    assert_eq!(why, ["lost NoHostInterface"]);
    let (taps, why) = selected(&[(MIRROR, "true"), (NICS, "eth0.5,lost,br0")], &links, &policy);
    assert_eq!((taps, why), (vec!["eth0.5".to_owned(), "lost".to_owned(), "br0".to_owned()], vec![]));
}

#[test]
fn frames_without_an_ethernet_header_have_no_way_out() {
    let nic = Link { is_ethernet: false, ..mk_link(2, "eth0", kind("wireguard"), Some(LOWER)) };
    let links = node_of(&mk_pod("web", &[]), vec![nic]);
    let (taps, why) = selected(&[(MIRROR, "true")], &links, &Policy::default());
    assert_eq!((taps, why), (vec![], vec!["eth0 NotEthernet".to_owned()]));
}

#[test]
fn the_agent_and_the_pod_can_refuse_taps_inside() {
    let links = node_of(&mk_pod("web", &[]), devices()[..1].to_vec());
    let of = |said: &str, taps_inside| {
        let annotations = [(MIRROR, "true"), (POD_SIDE_TAPS, said)];
        selected(&annotations, &links, &Policy { taps_inside, ..Policy::default() })
    };
    let tapped = (vec!["eth0".to_owned()], vec![]);
    let refused = |why: &str| (vec![], vec![format!("eth0 {why}")]);
    assert_eq!(of("auto", true), tapped);
    assert_eq!(of("off", true), refused("TapsInsideOff"));
    assert_eq!(of("auto", false), refused("TapsInsideOff"));
    // An unknown value is reported and ignored. It also does not hide the value of the namespace.
    assert_eq!(of("of", true), tapped);
    for (of_pod, of_namespace, expected) in
        [("Off", "off", refused("TapsInsideOff")), ("auto", "off", tapped.clone()), ("Off", "of", tapped)]
    {
        let mut pod = mk_pod("web", &[(MIRROR, "true"), (POD_SIDE_TAPS, of_pod)]);
        pod.inherited = Arc::new([(POD_SIDE_TAPS.to_owned(), of_namespace.to_owned())].into());
        assert_eq!(selected_of(pod, &links, &Policy::default()), expected, "{of_pod} {of_namespace}");
    }
    let pods = [mk_pod("web", &[(MIRROR, "true"), (POD_SIDE_TAPS, "of")])];
    let choice = choose(&pods, &[], &[], &Policy::default(), &mut Filters::default());
    let bad: Vec<_> = choice.bad.iter().map(ToString::to_string).collect();
    assert_eq!(bad, ["annotation podmirror.io/pod-side-taps: \"of\" is not auto or off; it is ignored"]);
}

#[test]
fn a_pod_with_many_devices_does_not_take_the_places_of_others() {
    let many = (2..40).map(|index| mk_link(index, &format!("net{index}"), kind("macvlan"), Some(LOWER)));
    let links = node_of(&mk_pod("web", &[]), many.collect());
    let (taps, why) = selected(&[(MIRROR, "true")], &links, &Policy::default());
    let first: Vec<_> = (2..18).map(|index| format!("net{index}")).collect();
    assert_eq!((taps, why), (first, vec![" TooManyNics".to_owned()]));
    // NICs that are named come first.
    let (taps, why) = selected(
        &[(MIRROR, "true"), ("podmirror.io/mirror.two", "true"), ("podmirror.io/nics.two", "net39")],
        &links,
        &Policy::default(),
    );
    assert!(
        taps.len() == 16 && taps.contains(&"net39".to_owned()) && !taps.contains(&"net17".to_owned()),
        "{taps:?} {why:?}"
    );
}

/// The devices of pods with a VPN, VMs (Kata, KubeVirt), VRRP, a tunnel and a shaper.
#[test]
fn what_sends_through_another_nic_of_the_pod_is_not_told_of() {
    let over_eth0 = Some(Peer { ifindex: 2, nsid: None });
    let inner = [
        ("tun0", "tun", None),
        ("tap0", "tun", None),
        ("tap0_kata", "tun", None),
        ("vrrp.51", "macvlan", over_eth0),
        ("vxlan7", "vxlan", over_eth0),
        ("br0", "bridge", None),
    ];
    let mut devices: Vec<_> = inner
        .iter()
        .zip(10..)
        .map(|((name, of, lower), index)| Link {
            is_ethernet: *name != "tun0",
            ..mk_link(index, name, kind(of), *lower)
        })
        .collect();
    devices.push(mk_link(20, "ifb0", LinkKind::Ifb, None));
    devices.push(mk_link(21, "k6t-eth0", LinkKind::Dummy, None));
    let eth0 = mk_link(2, "eth0", kind("macvlan"), Some(LOWER));
    let web = mk_pod("web", &[]);
    let with_nic = node_of(&web, [vec![eth0], devices.clone()].concat());
    assert_eq!(
        selected(&[(MIRROR, "true")], &with_nic, &Policy::default()),
        (vec!["eth0".to_owned()], vec![])
    );
    // A pod without any device that leads out is reported.
    let (taps, why) = selected(&[(MIRROR, "true")], &node_of(&web, devices), &Policy::default());
    assert_eq!((taps, why.len()), (vec![], 8), "{why:?}");
}

/// A KubeVirt pod with the bridge binding: each NIC is renamed, and a dummy device has its original name.
#[test]
fn a_nic_is_found_by_the_name_that_kubevirt_has_taken_from_it() {
    let real = |index, name| mk_link(index, name, kind("macvlan"), Some(LOWER));
    let left = |index, name| mk_link(index, name, LinkKind::Dummy, None);
    let devices = vec![
        real(2, "eth0-nic"),
        left(3, "eth0"),
        mk_link(4, "k6t-eth0", kind("bridge"), None),
        mk_link(5, "tap0", kind("tun"), None),
        left(6, "pod37a8eec1ce1"),
        real(7, "37a8eec1ce1-nic"),
    ];
    let entries = ["eth0", "pod37a8eec1ce1"].map(|nic| Entry { network: Some("shop/fast"), nic: Some(nic) });
    let networks = Networks::of(entries);
    let both = ["eth0-nic", "37a8eec1ce1-nic"];
    for (nics, expected) in [
        (None, &both[..]),
        (Some("eth0"), &both[..1]),
        (Some("eth0-nic"), &both[..1]),
        (Some("eth0,pod37a8eec1ce1"), &both[..]),
        (Some("pod37a8eec1ce1"), &both[1..]),
    ] {
        let annotations: Vec<_> = [(MIRROR, "true")].into_iter().chain(nics.map(|of| (NICS, of))).collect();
        let web = Pod { networks: networks.clone(), ..mk_pod("web", &annotations) };
        let links = node_of(&web, devices.clone());
        let (taps, why) = selected_of(web.clone(), &links, &Policy::default());
        assert_eq!((taps.iter().map(String::as_str).collect::<Vec<_>>(), why), (expected.to_vec(), vec![]));
        let pods = [web];
        let choice = choose(&pods, &[], &[], &Policy::default(), &mut Filters::default());
        let selection = select(&choice.wanted, &[], &links, &Policy::default());
        let networks: Vec<_> = selection.taps.values().map(|tap| tap.head.owner.network.as_deref()).collect();
        assert_eq!(networks, vec![Some("shop/fast"); expected.len()], "{nics:?}");
    }
    // A dummy device whose name no NIC has had is an ordinary device.
    let alone = node_of(&mk_pod("web", &[]), vec![real(2, "net1"), left(3, "eth0")]);
    let named = selected(&[(MIRROR, "true"), (NICS, "eth0")], &alone, &Policy::default());
    assert_eq!(named, (vec!["eth0".to_owned()], vec![]));
}

#[test]
fn a_nic_that_is_down_or_absent_or_loopback_is_told_of_as_what_it_is() {
    let down = Link { up: false, ..mk_link(3, "net1", kind("macvlan"), Some(LOWER)) };
    let mut devices =
        vec![mk_link(1, "lo", LinkKind::Loopback, None), mk_link(2, "eth0", kind("macvlan"), Some(LOWER))];
    devices.push(down);
    let links = node_of(&mk_pod("web", &[]), devices);
    let (taps, why) = selected(&[(MIRROR, "true"), (NICS, "lo,eth0,net1,net2")], &links, &Policy::default());
    assert_eq!(taps, ["eth0", "net1"]);
    assert_eq!(why, ["lo Loopback", "net2 NoSuchNic"]);
    // The annotation of Multus names the NICs.
    let entries = ["net1", "net2"].map(|nic| Entry { network: Some("shop/fast"), nic: Some(nic) });
    let of_multus = |nics: &[(&str, &str)]| {
        let annotations = [&[(MIRROR, "true")], nics].concat();
        selected_of(
            Pod { networks: Networks::of(entries), ..mk_pod("web", &annotations) },
            &links,
            &Policy::default(),
        )
    };
    let two = vec!["eth0".to_owned(), "net1".to_owned()];
    assert_eq!(of_multus(&[]), (two, vec!["net2 NoSuchNic".to_owned()]));
    assert_eq!(of_multus(&[(NICS, "eth0")]), (vec!["eth0".to_owned()], vec![]), "it is for another NIC");
}

/// Applies a change to the devices as the kernel does.
fn carry_out(change: &LinkChange, links: &mut LinkSnapshot) {
    let of = |netns: NetnsId, links: &mut LinkSnapshot, change: &dyn Fn(&mut Vec<Link>)| {
        for pod in
            links.pods.values_mut().filter_map(|pod| pod.as_mut().ok()).filter(|pod| pod.netns == netns)
        {
            change(&mut pod.links);
        }
    };
    match change {
        LinkChange::CreateHub => {
            let hub = Link { alias: Some(ALIAS.into()), ..mk_link(90, HUB, LinkKind::Dummy, None) };
            links.host.insert(hub.ifindex, hub);
        }
        LinkChange::SetUp(ifindex) => links.host.get_mut(ifindex).unwrap().up = true,
        LinkChange::CreateExit(netns, hub) => {
            let lower = Peer { ifindex: hub.0, nsid: Some(0) };
            let exit = Link {
                mtu: exit::MTU,
                is_private: true,
                ..mk_link(IFINDEX.0, NAME, kind("macvlan"), Some(lower))
            };
            of(*netns, links, &|links| links.push(exit.clone()));
        }
        LinkChange::DeleteExit(netns) => {
            of(*netns, links, &|links| links.retain(|link| !exit::is_exit(link)))
        }
        LinkChange::Delete(ifindex) => drop(links.host.remove(ifindex)),
        other => unreachable!("{other:?}"),
    }
}

/// An agent was killed between two requests: the device that it created is created again, and a foreign device of that
/// name is kept.
#[test]
fn a_hub_that_was_half_made_is_made_anew() {
    let half = Link { up: false, mtu: 1279, ..mk_link(FIRST_IFINDEX.0, HUB, LinkKind::Dummy, None) };
    let needed = [NetnsId { dev: 4, ino: 7 }].into();
    let mut links = LinkSnapshot { host: [(half.ifindex, half.clone())].into(), ..LinkSnapshot::default() };
    let again = [LinkChange::Delete(half.ifindex), LinkChange::CreateHub];
    assert_eq!(exit::changes(&needed, &links), again);
    assert_eq!(exit::changes(&BTreeSet::new(), &links), again[..1]);
    carry_out(&LinkChange::Delete(half.ifindex), &mut links);
    let made = exit::changes(&needed, &links);
    assert_eq!(made, [LinkChange::CreateHub]);
    let of_others = [
        Link { up: true, ..half.clone() },
        Link { alias: Some("mine".to_owned()), ..half.clone() },
        Link { ifindex: IfIndex(80), ..half.clone() },
        Link { kind: kind("bridge"), ..half },
    ];
    assert!(!of_others.iter().any(is_half_made));
}

/// A pod's devices: a NIC, and possibly a relay device in some state.
fn any_inside() -> impl Strategy<Value = Vec<Link>> {
    (0..6u32).prop_map(|state| {
        let nic = mk_link(2, "eth0", kind("macvlan"), Some(LOWER));
        let exit = |hub, up, mtu| {
            let lower = Peer { ifindex: hub, nsid: Some(0) };
            Link { up, mtu, is_private: true, ..mk_link(IFINDEX.0, NAME, kind("macvlan"), Some(lower)) }
        };
        match state {
            0 => vec![nic],
            1 => vec![nic, exit(90, true, exit::MTU)],
            2 => vec![nic, exit(90, false, exit::MTU)],
            3 => vec![nic, exit(90, true, 100)],
            // A relay device that is not private could exchange packets with other relay devices.
            4 => vec![nic, Link { is_private: false, ..exit(90, true, exit::MTU) }],
            _ => vec![nic, exit(91, true, exit::MTU)],
        }
    })
}

proptest! {
    /// From any state of the relay hub and devices, a few rounds lead to a relay device in each pod that needs one and
    /// in no other pod. After that there is nothing to change.
    #[test]
    fn exits_come_to_be_where_they_are_needed(
        pods in vec((any_inside(), any::<bool>()), 0..4),
        hub in sample::select(vec![None, Some(false), Some(true)]),
    ) {
        let mut links = LinkSnapshot::default();
        if let Some(up) = hub {
            carry_out(&LinkChange::CreateHub, &mut links);
            links.host.get_mut(&IfIndex(90)).unwrap().up = up;
        }
        let mut needed = BTreeSet::new();
        for (number, (devices, needs)) in pods.into_iter().enumerate() {
            let netns = NetnsId { dev: 4, ino: 100 + number as u64 };
            let inside = PodLinks { netns, is_host: false, nsid: Some(1), links: devices, stale: None };
            links.pods.insert(format!("uid-{number}"), Ok(inside));
            needed.extend(needs.then_some(netns));
        }
        for _ in 0..3 {
            for change in exit::changes(&needed, &links) {
                carry_out(&change, &mut links);
            }
        }
        prop_assert_eq!(exit::changes(&needed, &links), vec![]);
        for inside in links.pods.values().flatten() {
            let expected = needed.contains(&inside.netns).then_some(IFINDEX);
            prop_assert_eq!(exit::of(inside, &links), expected);
            prop_assert!(inside.links.iter().any(|link| link.name == "eth0"), "a NIC is never touched");
        }
    }
}

/// A pod's own macvlan over its own NIC, with the index of a relay device, is not a relay device: it would be deleted.
#[test]
fn a_macvlan_of_the_pod_is_no_exit() {
    let own = mk_link(IFINDEX.0, NAME, kind("macvlan"), Some(Peer { ifindex: 2, nsid: None }));
    let links = node_of(&mk_pod("web", &[]), vec![own.clone()]);
    assert!(!exit::is_exit(&own) && exit::changes(&BTreeSet::new(), &links).is_empty());
}

/// A stream needs no relay device. An installed tap keeps its relay device until the tap is removed.
#[test]
fn an_exit_is_needed_for_devices_and_while_a_tap_uses_it() {
    let mut links = node_of(&mk_pod("web", &[]), devices()[..1].to_vec());
    let netns = NetnsId { dev: 4, ino: 77 };
    let pods = [mk_pod("web", &[(MIRROR, "true")])];
    for (destination, expected) in [(Destination::Stream, vec![]), ("mirror0".parse().unwrap(), vec![netns])]
    {
        let policy = Policy { targets: [(TargetName::default(), destination)].into(), ..Policy::default() };
        let choice = choose(&pods, &[], &[], &policy, &mut Filters::default());
        let taps = select(&choice.wanted, &[], &links, &policy).taps;
        let needed = exit::needed(&taps, &Default::default(), &policy);
        assert_eq!(needed.iter().copied().collect::<Vec<_>>(), expected);
        for _ in 0..2 {
            exit::changes(&needed, &links).iter().for_each(|change| carry_out(change, &mut links));
        }
        let taps = select(&choice.wanted, &[], &links, &policy).taps;
        let exits: Vec<_> = taps.values().map(|tap| tap.head.exit).collect();
        assert_eq!(exits, [(!expected.is_empty()).then_some(IFINDEX)]);
        if expected.is_empty() {
            continue;
        }
        let hooks = HookState::Current;
        let installed = taps.into_iter().map(|(device, tap)| {
            (device, ActualTap { tap: Some(tap), ingress: hooks, egress: hooks, ..ActualTap::default() })
        });
        let installed = installed.collect();
        assert_eq!(exit::needed(&Default::default(), &installed, &policy), [netns].into());

        // The target becomes a stream: the tap continues without the relay device, which is deleted afterwards.
        let targets = [(TargetName::default(), Destination::Stream)].into();
        let taps = select(&choice.wanted, &[], &links, &Policy { targets, ..Policy::default() }).taps;
        assert_eq!(taps.values().map(|tap| tap.head.exit).collect::<Vec<_>>(), [None]);
    }
}

/// A node with a pod whose NIC `eth0` (index 2) has the veth peer `veth100` on the node.
fn veth_node(pod: &Pod) -> LinkSnapshot {
    let nic = mk_link(2, "eth0", LinkKind::Veth, Some(Peer { ifindex: 100, nsid: Some(0) }));
    let end = mk_link(100, "veth100", LinkKind::Veth, Some(Peer { ifindex: 2, nsid: Some(7) }));
    let mut links = node_of(pod, vec![nic]);
    links.host.insert(end.ifindex, end);
    links
}

/// The number of taps that can have two sides, and the pod side of the tap when it sees inside.
fn sides(annotations: &[(&str, &str)], policy: &Policy) -> (usize, Option<IfIndex>) {
    let pod = mk_pod("web", annotations);
    let links = veth_node(&pod);
    let pods = [pod];
    let choice = choose(&pods, &[], &[], policy, &mut Filters::default());
    let mut selection = select(&choice.wanted, &[], &links, policy);
    assert!(selection.taps.values().all(|tap| tap.head.pod_side.is_none()));
    let candidates = with_two_sides(&selection, &choice.wanted, &links, policy);
    let count = candidates.len();
    see_inside(candidates, &mut selection, &links, policy);
    (count, selection.taps.values().find_map(|tap| tap.head.pod_side.map(|side| side.nic)))
}

/// A veth can be seen on both sides if a mirror copies ingress and both the agent and the pod allow taps inside.
#[test]
fn a_veth_has_two_sides_where_a_tap_may_be_inside() {
    let inside = (1, Some(IfIndex(2)));
    let policy = |taps_inside| Policy { taps_inside, ..Policy::default() };
    assert_eq!(sides(&[(MIRROR, "true")], &Policy::default()), inside);
    assert_eq!(sides(&[(MIRROR, "ingress")], &Policy::default()), inside);
    assert_eq!(sides(&[(MIRROR, "egress")], &Policy::default()), (0, None));
    assert_eq!(sides(&[(MIRROR, "true"), (POD_SIDE_TAPS, "off")], &Policy::default()), (0, None));
    assert_eq!(sides(&[(MIRROR, "true")], &policy(false)), (0, None));
    // The copies go to this pod, or to another one.
    let collector = |of: &str| {
        let ids = TargetName("ids".parse().unwrap());
        let mut policy = Policy::default();
        policy.targets.insert(ids, of.parse().unwrap());
        sides(&[(MIRROR, "true")], &policy)
    };
    assert_eq!(collector("pod:default/web"), (0, None));
    assert_eq!(collector("pod:default/web/eth0"), (0, None));
    assert_eq!(collector("pod:default/web/net1"), inside);
    assert_eq!(collector("pod:default/other"), inside);
}
