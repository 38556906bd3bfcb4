//! Tests: a device of other software, as in `vxlan:10.9.0.5:4789/vni=77/device=cni0`.

use super::*;

/// A tunnel for each kind of device, with the kernel's name of the kind, and the port.
const DEVICES: [(&str, &str, u16); 6] = [
    ("vxlan:10.9.0.5:4789/vni=7/device=cni0", "vxlan", 4789),
    ("geneve:10.9.0.5:6081/vni=7/device=cni0", "geneve", 6081),
    ("gre:10.9.0.5/key=7/device=cni0", "gretap", 0),
    ("gre:fd00::5/key=7/device=cni0", "ip6gretap", 0),
    ("erspan:10.9.0.5/session=7/device=cni0", "erspan", 0),
    ("erspan:fd00::5/session=7/device=cni0", "ip6erspan", 0),
];

/// A node on which other software has this device, and the tunnel through it.
fn with_device(text: &str, device: Link) -> (Tunnel, LinkSnapshot) {
    let tunnel = parse(text).unwrap();
    let mut links = node();
    links.host.remove(&IfIndex(9));
    let route = Route { ifindex: IfIndex(2), mtu: None, is_local: false };
    links.routes = [(tunnel.remote, Ok(route))].into();
    links.host.insert(device.ifindex, device);
    (tunnel, links)
}

/// A device of other software, with this kind and port.
fn cni(kind: &str, port: u16) -> Link {
    let kind = LinkKind::Other(kind.to_owned());
    Link { kind, external: Some(port), alias: None, ..link(8, "cni0", 1450) }
}

fn nothing_changes(tunnel: &Tunnel, links: &LinkSnapshot) {
    assert_eq!(changes([(&TargetName::default(), tunnel)].into_iter(), links), []);
}

#[test]
fn a_device_of_each_kind_is_used_as_it_is() {
    for (text, kind, port) in DEVICES {
        let (tunnel, links) = with_device(text, cni(kind, port));
        let (found, blocked) = target(&tunnel, &links);
        assert_eq!((found.up, found.ifindex, blocked), (true, Some(IfIndex(8)), None), "{text}");
        assert_eq!(found.device, "cni0");
        nothing_changes(&tunnel, &links);
    }
}

/// The kernel ignores the MTU of VXLAN and GENEVE devices.
#[test]
fn the_mtu_of_a_gre_device_bounds_the_copies() {
    for (text, kind, port) in DEVICES {
        let room = |mtu| {
            let (tunnel, links) = with_device(text, Link { mtu, ..cni(kind, port) });
            target(&tunnel, &links).0.room
        };
        let expected = if port == 0 { Some(1314) } else { room(9000) };
        assert_eq!(room(1300), expected, "{text}");
        assert_eq!(room(u32::MAX), room(9000), "{text}: then the underlay does");
        assert_eq!(room(60).is_none(), port == 0, "{text}");
    }
}

#[test]
fn a_device_that_cannot_be_used_has_a_reason_of_its_own() {
    let ours = || Some(ALIAS.to_owned());
    let vxlan = || cni("vxlan", 4789);
    for (device, part) in [
        (Link { name: "other".into(), ..vxlan() }, "ip link add cni0 type vxlan dstport 4789 external"),
        (Link { alias: ours(), ..vxlan() }, "itself: remove device=cni0"),
        (cni("geneve", 4789), "cni0 is of kind geneve: name one of kind vxlan"),
        (Link { kind: LinkKind::Veth, external: None, ..vxlan() }, "cni0 is of kind veth"),
        (Link { external: None, ..cni("", 0) }, "cni0 is not a tunnel"),
        (Link { external: None, ..vxlan() }, "cni0 is not in external mode"),
        (cni("vxlan", 8472), "cni0 uses port 8472, and the target names port 4789"),
        (Link { is_ethernet: false, ..vxlan() }, "cni0 have no Ethernet header"),
        (Link { up: false, ..vxlan() }, "cni0 is down"),
        (Link { queueless: false, ..vxlan() }, "tc qdisc replace dev cni0 root noqueue"),
    ] {
        let (tunnel, links) = with_device(DEVICES[0].0, device);
        let (found, blocked) = target(&tunnel, &links);
        let why = blocked.unwrap();
        assert!(why.contains(part), "{why}");
        assert_eq!((found.up, found.ifindex, found.device.as_str()), (false, None, "cni0"), "{why}");
        nothing_changes(&tunnel, &links);
    }
    let (tunnel, mut links) = with_device("gre:fd00::5/key=7/device=cni0", vxlan());
    links.host.remove(&IfIndex(8));
    let why = target(&tunnel, &links).1.unwrap();
    assert!(why.contains("\"ip link add cni0 type ip6gretap external\""), "{why}");
}

proptest! {
    /// Copies are sent to other software's device only if it meets all requirements, and the device is never changed.
    #[test]
    fn only_a_device_as_needed_is_used(
        tunnel in prop::sample::select(DEVICES.to_vec()), device in prop::sample::select(DEVICES.to_vec()),
        external in prop::option::weighted(0.9, prop::sample::select(vec![0, 4789, 6081, 8472])),
        [is_ours, is_tunnel, up, queueless, is_ethernet]: [bool; 5],
    ) {
        let (_, kind, _) = device;
        let alias = is_ours.then(|| ALIAS.to_owned());
        let kind = if is_tunnel { LinkKind::Other(kind.to_owned()) } else { LinkKind::Dummy };
        let fits = LinkKind::Other(tunnel.1.to_owned()) == kind && external == Some(tunnel.2);
        let device = Link { kind, alias, external, up, queueless, is_ethernet, ..cni("", 0) };
        let (tunnel, links) = with_device(tunnel.0, device);
        let (found, blocked) = target(&tunnel, &links);
        prop_assert_eq!(found.up, fits && !is_ours && up && queueless && is_ethernet);
        prop_assert_eq!(found.up, blocked.is_none());
        prop_assert_eq!(found.up, found.ifindex.is_some());
        nothing_changes(&tunnel, &links);
    }
}
