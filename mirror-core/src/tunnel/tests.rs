//! Tests: the text of a tunnel, and when copies can go into it.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use proptest::prelude::*;

use super::*;
use crate::model::{ALIAS, FIRST_IFINDEX, IfIndex, Link, LinkKind};

mod device;

const TEXT: &str = "vxlan:10.9.0.5:4789/vni=77";

fn parse(text: &str) -> Result<Tunnel, String> {
    let (kind, text) = text.split_once(':').unwrap();
    Tunnel::parse(kind, text)
}

fn tunnel() -> Tunnel {
    parse(TEXT).unwrap()
}

fn target(tunnel: &Tunnel, links: &LinkSnapshot) -> (DeviceTarget, Option<String>) {
    super::target(tunnel, links, None)
}

fn link(ifindex: u32, name: &str, mtu: u32) -> Link {
    let link = Link::new(IfIndex(ifindex), name, LinkKind::Other("vxlan".into()), None);
    Link { mtu, alias: Some(ALIAS.into()), external: Some(4789), ..link }
}

fn node() -> LinkSnapshot {
    let host = [link(2, "uplink", 1500), link(9, "pm-vxlan4789", 1500)];
    let route = Route { ifindex: IfIndex(2), mtu: None, is_local: false };
    LinkSnapshot {
        host: host.map(|link| (link.ifindex, link)).into(),
        routes: [(tunnel().remote, Ok(route))].into(),
        ..LinkSnapshot::default()
    }
}

#[test]
fn a_tunnel_has_an_address_and_a_number() {
    let parsed = |text: &str| parse(text).map(|tunnel| tunnel.to_string());
    for (text, expected) in [
        (TEXT, "vxlan:10.9.0.5:4789/vni=77"),
        ("vxlan:[fd00::5]:8472/vni=16777215", "vxlan:[fd00::5]:8472/vni=16777215"),
        ("vxlan:[fd00::5]:4789/vni=1-1", "vxlan:[fd00::5]:4789/vni=1"),
        ("vxlan:10.9.0.5:4789/oversize=fragment/vni=77", "vxlan:10.9.0.5:4789/vni=77/oversize=fragment"),
        ("vxlan:10.9.0.5:4789/oversize=segment/vni=77", "vxlan:10.9.0.5:4789/vni=77"),
        ("vxlan:10.9.0.5:4789/oversize=truncate/vni=77", "vxlan:10.9.0.5:4789/vni=77/oversize=truncate"),
        ("erspan:fd00::5/session=7/oversize=truncate", "erspan:fd00::5/session=7"),
        ("gre:10.9.0.5/key=7/device=cni0/oversize=truncate", "gre:10.9.0.5/key=7/device=cni0"),
        (
            "geneve:10.9.0.5:6081/vni=4096-8191/identity=true",
            "geneve:10.9.0.5:6081/vni=4096-8191/identity=true",
        ),
        ("gre:10.9.0.5/key=4294967295", "gre:10.9.0.5/key=4294967295"),
        ("gre:fd00::5/key=1", "gre:fd00::5/key=1"),
        ("erspan:fd00::5/session=1-1023", "erspan:fd00::5/session=1-1023"),
        ("erspan:10.9.0.5/device=es0/session=7", "erspan:10.9.0.5/session=7/device=es0"),
        ("gre:10.9.0.5/device=cni0/key=7", "gre:10.9.0.5/key=7/device=cni0"),
        (
            "vxlan:10.9.0.5:4789/vni=7/oversize=fragment/device=a=b",
            "vxlan:10.9.0.5:4789/vni=7/device=a=b/oversize=fragment",
        ),
    ] {
        assert_eq!(parsed(text), Ok(expected.to_owned()), "{text}");
    }
    for (text, part) in [
        ("vxlan:10.9.0.5:4789", "add one, as in 10.9.0.5:4789/vni=77"),
        ("vxlan:10.9.0.5/vni=77", "as in 10.9.0.5:4789 or [fd00::5]:4789"),
        ("vxlan:fd00::5:4789/vni=77", "[fd00::5]:4789"),
        ("vxlan:[fd00::5/vni=77", "[fd00::5]:4789"),
        ("vxlan:[fd00::5]:4789/vni=77/oversize=fragment", "use truncate"),
        ("gre:[fd00::5]/key=77", "as in 10.9.0.5 or fd00::5"),
        ("vxlan:10.9.0.5:4789/vni=0", "\"vni=0\""),
        ("vxlan:10.9.0.5:4789/vni=16777216", "1 to 16777215"),
        ("vxlan:10.9.0.5:4789/vni=9-8", "\"vni=9-8\""),
        ("vxlan:10.9.0.5:4789/vni=8-", "\"vni=8-\""),
        ("vxlan:10.9.0.5:4789/vni=77/oversize=cut", "truncate, segment, fragment, drop"),
        ("vxlan:10.9.0.5:4789/vni=77/ttl=3", "\"ttl=3\""),
        ("vxlan:10.9.0.5:4789/vni=77/identity=true", "use vni=N, oversize=WORD"),
        ("vxlan:10.9.0:4789/vni=77", "\"10.9.0:4789\""),
        ("vxlan:ids.example.org:4789/vni=77", "\"ids.example.org:4789\""),
        ("vxlan:127.0.0.1:4789/vni=77", "not an address of another node"),
        ("vxlan:255.255.255.255:4789/vni=77", "not an address of another node"),
        ("vxlan:[fe80::5]:4789/vni=77", "not an address of another node"),
        ("vxlan:239.0.0.1:4789/vni=77", "not an address of another node"),
        ("vxlan:10.9.0.5:0/vni=77", "not an address of another node"),
        ("vxlan:10.9.0.5:4789/vni=77/", "\"\""),
        ("geneve:10.9.0.5:6081/key=7", "identity=true"),
        ("gre:10.9.0.5:47/key=7", "\"10.9.0.5:47\""),
        ("gre:10.9.0.5/vni=7", "use key=N"),
        ("erspan:10.9.0.5/session=1024", "1 to 1023"),
        ("erspan:10.9.0.5/session=7/version=2", "is not an option of this tunnel"),
        ("erspan:fd00::5/session=7/oversize=segment", "use truncate"),
        ("vxlan:10.9.0.5:4789/vni=7/device=", "\"device=\": an interface name has 1 to 15 bytes"),
        ("vxlan:10.9.0.5:4789/vni=7/device=sixteen-bytes-xx", "1 to 15 bytes"),
        ("gre:10.9.0.5/key=7/device=cni0/oversize=segment", "use truncate"),
        ("erspan:10.9.0.5/session=7/device=cni0/oversize=fragment", "use truncate"),
    ] {
        let error = parse(text).map_err(|error| error.contains(part));
        assert_eq!(error, Err(true), "{text}: {:?}", parse(text));
    }
}

/// Bulk transfers consist mostly of super-frames. Cut to one frame, all but their beginning would be lost.
#[test]
fn super_frames_are_segmented_where_the_kernel_can() {
    let of = |text: &str| parse(text).map(|tunnel| tunnel.oversize);
    for text in
        [TEXT, "vxlan:[fd00::5]:4789/vni=7", "geneve:10.9.0.5:6081/vni=7/device=cni0", "gre:fd00::5/key=7"]
    {
        assert_eq!(of(text), Ok(Oversize::Segment), "{text}");
    }
    for text in ["erspan:fd00::5/session=7", "gre:10.9.0.5/key=7/device=cni0"] {
        assert_eq!(of(text), Ok(Oversize::Truncate), "{text}");
    }
}

#[test]
fn copies_go_where_a_route_leads_and_as_many_bytes_as_fit() {
    let (found, blocked) = target(&tunnel(), &node());
    assert_eq!((found.up, found.ifindex, found.room, blocked), (true, Some(IfIndex(9)), Some(1464), None));
    assert_eq!((found.device.as_str(), found.destination.to_string()), ("pm-vxlan4789", TEXT.to_owned()));
    let narrow = Route { ifindex: IfIndex(2), mtu: Some(1400), is_local: false };
    let links = LinkSnapshot { routes: [(tunnel().remote, Ok(narrow))].into(), ..node() };
    assert_eq!(target(&tunnel(), &links).0.room, Some(1364), "the route's MTU");
    for (text, room) in [
        ("vxlan:[fd00::5]:4789/vni=77", 1344),
        ("geneve:10.9.0.5:6081/vni=77", 1364),
        ("geneve:10.9.0.5:6081/vni=77/identity=true", 1352),
        ("gre:10.9.0.5/key=77", 1372),
        ("erspan:10.9.0.5/session=77", 1364),
        ("erspan:fd00::5/session=77", 1344),
    ] {
        let tunnel = parse(text).unwrap();
        let links = LinkSnapshot { routes: [(tunnel.remote, Ok(narrow))].into(), ..node() };
        assert_eq!(target(&tunnel, &links).0.room, Some(room), "{text}");
    }
}

#[test]
fn there_is_a_reason_where_nothing_can_be_sent() {
    let why = |change: fn(&mut LinkSnapshot)| {
        let mut links = node();
        change(&mut links);
        let (target, blocked) = target(&tunnel(), &links);
        assert!(!target.up);
        blocked.unwrap()
    };
    let no_device = "the tunnel's device pm-vxlan4789 does not exist";
    let taken = "the agent did not create the device pm-vxlan4789: rename or delete it";
    assert_eq!(why(|links| drop(links.host.remove(&IfIndex(9)))), no_device);
    assert_eq!(why(|links| links.host.get_mut(&IfIndex(9)).unwrap().up = false), no_device);
    assert_eq!(why(|links| links.host.get_mut(&IfIndex(9)).unwrap().alias = None), taken);
    assert_eq!(why(|links| links.host.get_mut(&IfIndex(9)).unwrap().queueless = false), no_device);
    assert_eq!(why(|links| links.host.get_mut(&IfIndex(9)).unwrap().kind = LinkKind::Dummy), no_device);
    let with_address = |links: &mut LinkSnapshot| links.host.get_mut(&IfIndex(9)).unwrap().external = None;
    assert_eq!(why(with_address), taken, "we make no such device");
    let down = "the device uplink, where the packets leave, is down";
    assert_eq!(why(|links| links.host.get_mut(&IfIndex(2)).unwrap().carrier = false), down);
    let no_room = "the MTU on the way, 150, leaves no room for copies";
    assert_eq!(why(|links| links.host.get_mut(&IfIndex(2)).unwrap().mtu = 150), no_room);
    let no_route =
        |links: &mut LinkSnapshot| links.routes.values_mut().for_each(|route| *route = Err("no".into()));
    assert_eq!(why(no_route), "this node has no route to 10.9.0.5: no");
    let local = |links: &mut LinkSnapshot| {
        links.routes.values_mut().for_each(|route| route.as_mut().unwrap().is_local = true);
    };
    assert_eq!(why(local), "10.9.0.5 is an address of this node; name a device instead");
}

/// The error says more than that there is no device. It explains no other reason.
#[test]
fn the_error_of_a_device_that_could_not_be_created_is_the_reason() {
    let failure = "cannot create pm-vxlan4789: no".to_owned();
    let mut links = node();
    let why = |links: &LinkSnapshot| super::target(&tunnel(), links, Some(&failure)).1;
    assert_eq!(why(&links), None);
    let device = links.host.remove(&IfIndex(9)).unwrap();
    assert_eq!(why(&links), Some(failure.clone()));
    links.host.insert(IfIndex(9), Link { alias: None, ..device });
    assert!(why(&links).unwrap().starts_with("the agent did not create the device"));
}

#[test]
fn tunnels_with_the_same_keys_meet() {
    let meet = |a: &str, b: &str| parse(a).unwrap().meets(&parse(b).unwrap());
    let of = |keys: &str| format!("gre:10.9.0.5/key={keys}");
    for (a, b, expected) in
        [("7", "7", true), ("5-9", "7", true), ("5-9", "9-12", true), ("5-9", "10-12", false)]
    {
        assert_eq!((meet(&of(a), &of(b)), meet(&of(b), &of(a))), (expected, expected), "{a} and {b}");
    }
    assert!(!meet("gre:10.9.0.5/key=7", "gre:10.9.0.6/key=7"));
    assert!(meet(TEXT, &format!("{TEXT}/oversize=drop")));
}

#[test]
fn tunnels_of_one_port_share_a_device_and_a_missing_device_is_made() {
    let [a, b, c] =
        [TEXT, "vxlan:10.9.0.6:4789/vni=78", "vxlan:10.9.0.6:4790/vni=77"].map(|text| parse(text).unwrap());
    let create = |port| LinkChange::CreateTunnel(TunnelDevice::Vxlan(port));
    let of = |links: &LinkSnapshot| {
        let name = TargetName::default();
        changes([&a, &b, &c].map(|tunnel| (&name, tunnel)).into_iter(), links)
    };
    assert_eq!(of(&LinkSnapshot::default()), [create(4789), create(4790)]);
    assert_eq!(of(&node()), [create(4790)]);
    let mut half_made = node();
    half_made.host.get_mut(&IfIndex(9)).unwrap().up = false;
    assert_eq!(of(&half_made), [LinkChange::Delete(IfIndex(9)), create(4789), create(4790)]);
    half_made.host.get_mut(&IfIndex(9)).unwrap().alias = None;
    assert_eq!(of(&half_made), [create(4790)], "another program's device is left alone");
    let unnamed = Link { ifindex: FIRST_IFINDEX, ..half_made.host.remove(&IfIndex(9)).unwrap() };
    half_made.host.insert(FIRST_IFINDEX, unnamed);
    assert_eq!(of(&half_made), [LinkChange::Delete(FIRST_IFINDEX), create(4789), create(4790)]);
    let mut local = LinkSnapshot::default();
    let route = Route { ifindex: IfIndex(1), mtu: None, is_local: true };
    local.routes = [(a.remote, Ok(route))].into();
    assert_eq!(of(&local), [create(4789), create(4790)], "the tunnel to 10.9.0.6 needs it");
    local.routes = ["10.9.0.5", "10.9.0.6"].map(|ip| (ip.parse().unwrap(), Ok(route))).into();
    assert_eq!(of(&local), [], "the receiver on this node needs the port");
    for (text, name) in [
        ("geneve:10.9.0.5:65535/vni=7", "pm-geneve65535"),
        ("gre:10.9.0.5/key=7", "pm-gre4"),
        ("gre:fd00::5/key=7", "pm-gre6"),
        ("erspan:10.9.0.5/session=7", "pm-erspan4"),
        ("erspan:fd00::5/session=7", "pm-erspan6"),
    ] {
        assert_eq!(parse(text).unwrap().device().to_string(), name);
    }
}

proptest! {
    /// The text of a tunnel can be parsed again, so it can be stored in a map.
    #[test]
    fn the_text_can_be_read_back(
        v4: [u8; 4], v6: [u8; 16], is_v6: bool, port in 1..=u16::MAX, keys: [u32; 2], oversize in 0..4_usize,
        kind in prop::sample::select(Kind::ALL.to_vec()), identity: bool,
        existing in prop::option::of("[a-z0-9._=-]{3,15}"),
    ) {
        let remote = if is_v6 { IpAddr::from(v6) } else { IpAddr::from(v4) };
        let text = if is_v6 { format!("gre:{remote}/key=1") } else { format!("vxlan:{remote}:1/vni=1") };
        prop_assume!(parse(&text).is_ok());
        let [first, last] = keys.map(|key| 1 + key % kind.key().1);
        let keys = Keys { first: first.min(last), last: first.max(last) };
        let port = if kind.usual_port().is_some() { port } else { 0 };
        let identity = identity && kind == Kind::Geneve;
        let oversize = Oversize::ALL[oversize];
        let is_erspan = kind.name() == "erspan";
        prop_assume!(!(is_v6 && oversize == Oversize::Fragment));
        prop_assume!(!(is_v6 && is_erspan && oversize == Oversize::Segment));
        let leaves_to_kernel = matches!(oversize, Oversize::Segment | Oversize::Fragment);
        prop_assume!(!(leaves_to_kernel && existing.is_some() && kind.usual_port().is_none()));
        let tunnel = Tunnel { kind, remote, port, keys, oversize, identity, existing };
        let text = tunnel.to_string();
        prop_assert_eq!(text.parse(), Ok(Destination::Tunnel(tunnel)));
    }

    #[test]
    fn any_text_has_an_answer(kind in prop::sample::select(Kind::ALL.to_vec()), text in "\\PC{0,40}") {
        let _ = Tunnel::parse(kind.name(), &text);
    }
}
