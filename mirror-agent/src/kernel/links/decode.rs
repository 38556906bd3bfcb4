//! Converts rtnetlink messages to [`Link`]. Pure; `netlink` calls it for every device of a dump.

use rtnetlink::packet_route::link::{
    InfoData, InfoGeneve, InfoGre, InfoGre6, InfoIpVlan, InfoKind, InfoMacVlan, InfoVxlan, IpVlanMode,
    LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage, MacVlanMode,
};

use crate::model::{IfIndex, Link, LinkKind, Peer};

/// Returns the device that an `RTM_NEWLINK` message describes.
pub(super) fn link(message: LinkMessage) -> Link {
    let flags = message.header.flags;
    let index = IfIndex(message.header.index);
    let mut link = Link {
        up: flags.contains(LinkFlags::Up),
        carrier: flags.contains(LinkFlags::LowerUp),
        queueless: false,
        is_ethernet: matches!(message.header.link_layer_type, LinkLayerType::Ether | LinkLayerType::Loopback),
        ..Link::new(index, "", LinkKind::Other(String::new()), None)
    };
    let (mut info_kind, mut qdisc, mut is_l3s) = (None, String::new(), false);
    let (mut peer_ifindex, mut peer_nsid) = (0, None);
    for attribute in message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name = name,
            LinkAttribute::Mtu(mtu) => link.mtu = mtu,
            LinkAttribute::Address(address) => link.address = address.try_into().ok(),
            LinkAttribute::IfAlias(alias) => link.alias = Some(alias),
            LinkAttribute::Controller(master) => link.master = (master != 0).then_some(IfIndex(master)),
            LinkAttribute::Link(ifindex) => peer_ifindex = ifindex,
            LinkAttribute::LinkNetNsId(nsid) => peer_nsid = Some(nsid),
            LinkAttribute::Qdisc(name) => qdisc = name,
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    match info {
                        LinkInfo::Kind(kind) => info_kind = Some(kind),
                        LinkInfo::Data(data) => {
                            link.external = external(&data);
                            link.is_private = matches!(&data, InfoData::MacVlan(infos)
                                if infos.contains(&InfoMacVlan::Mode(MacVlanMode::Private)));
                            is_l3s = matches!(&data, InfoData::IpVlan(infos)
                                if infos.contains(&InfoIpVlan::Mode(IpVlanMode::L3S)));
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    link.queueless = queueless(&qdisc, info_kind.as_ref());
    link.kind = if is_l3s { LinkKind::IpvlanL3s } else { kind(flags, info_kind) };
    link.peer = peer(link.ifindex, peer_ifindex, peer_nsid);
    link
}

fn kind(flags: LinkFlags, info_kind: Option<InfoKind>) -> LinkKind {
    match info_kind {
        _ if flags.contains(LinkFlags::Loopback) => LinkKind::Loopback,
        Some(InfoKind::Veth | InfoKind::Netkit) => LinkKind::Veth,
        Some(InfoKind::Dummy) => LinkKind::Dummy,
        Some(InfoKind::Ifb) => LinkKind::Ifb,
        Some(other) => LinkKind::Other(other.to_string()),
        None => LinkKind::Other(String::new()),
    }
}

/// Returns the UDP port (0 if it has none) of a tunnel's device in external mode; `None` for any other device.
fn external(data: &InfoData) -> Option<u16> {
    let (is_external, port) = match data {
        InfoData::Vxlan(infos) => (
            infos.contains(&InfoVxlan::CollectMetadata(true)),
            infos.iter().find_map(|info| if let InfoVxlan::Port(port) = info { Some(*port) } else { None }),
        ),
        InfoData::Geneve(infos) => (
            infos.contains(&InfoGeneve::CollectMetadata),
            infos.iter().find_map(|info| if let InfoGeneve::Port(port) = info { Some(*port) } else { None }),
        ),
        InfoData::GreTap(infos) | InfoData::ErSpan(infos) => {
            (infos.contains(&InfoGre::CollectMetadata), None)
        }
        InfoData::GreTap6(infos) | InfoData::Ip6ErSpan(infos) => {
            (infos.contains(&InfoGre6::CollectMetadata), None)
        }
        _ => (false, None),
    };
    is_external.then(|| port.unwrap_or(0))
}

/// Whether the device has no queue. A device that was never up has the qdisc `noop`, and may get another one when it
/// comes up. For such a device, the kind decides.
fn queueless(qdisc: &str, info_kind: Option<&InfoKind>) -> bool {
    match qdisc {
        "noqueue" => true,
        "noop" => {
            matches!(info_kind, Some(InfoKind::Dummy | InfoKind::Veth | InfoKind::Netkit | InfoKind::Bridge))
        }
        _ => false,
    }
}

/// Returns the device that `IFLA_LINK` refers to, if it is another one. Without a namespace id, `IFLA_LINK` is 0 for a
/// tunnel without a lower device, and the device itself for some kinds. A negative id means that the kernel could not
/// give the peer's namespace an id: then the peer cannot be identified.
fn peer(own: IfIndex, ifindex: u32, nsid: Option<i32>) -> Option<Peer> {
    let other_device = match nsid {
        Some(nsid) => nsid >= 0 && ifindex != 0,
        None => ifindex != 0 && ifindex != own.0,
    };
    other_device.then_some(Peer { ifindex, nsid })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mk_message(flags: LinkFlags, attributes: Vec<LinkAttribute>) -> LinkMessage {
        let mut message = LinkMessage::default();
        message.header.index = 7;
        message.header.flags = flags;
        message.header.link_layer_type = LinkLayerType::Ether;
        message.attributes = attributes;
        message
    }

    fn info(kind: InfoKind) -> LinkAttribute {
        LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)])
    }

    #[test]
    fn every_field_has_its_attribute() {
        let message = mk_message(
            LinkFlags::Up | LinkFlags::LowerUp,
            vec![
                LinkAttribute::IfName("veth1".into()),
                LinkAttribute::Mtu(1450),
                LinkAttribute::Controller(3),
                LinkAttribute::Link(2),
                LinkAttribute::LinkNetNsId(0),
                LinkAttribute::Qdisc("noqueue".into()),
                LinkAttribute::IfAlias("hello".into()),
                LinkAttribute::Address(vec![2, 0, 0, 0, 0, 7]),
                info(InfoKind::Veth),
            ],
        );
        assert_eq!(
            link(message),
            Link {
                ifindex: IfIndex(7),
                name: "veth1".into(),
                kind: LinkKind::Veth,
                up: true,
                carrier: true,
                master: Some(IfIndex(3)),
                peer: Some(Peer { ifindex: 2, nsid: Some(0) }),
                queueless: true,
                is_ethernet: true,
                address: Some([2, 0, 0, 0, 0, 7]),
                mtu: 1450,
                alias: Some("hello".into()),
                external: None,
                is_private: false,
                offloads: None,
            }
        );
    }

    #[test]
    fn loopback_is_told_by_its_flag_and_others_by_their_kind() {
        assert_eq!(link(mk_message(LinkFlags::Loopback, vec![])).kind, LinkKind::Loopback);
        assert_eq!(link(mk_message(LinkFlags::Up, vec![])).kind, LinkKind::Other(String::new()));
        for (kind, word) in
            [(InfoKind::MacVlan, "macvlan"), (InfoKind::IpVlan, "ipvlan"), (InfoKind::Bridge, "bridge")]
        {
            let link = link(mk_message(LinkFlags::Up, vec![info(kind)]));
            assert_eq!(link.kind, LinkKind::Other(word.into()));
        }
        assert_eq!(link(mk_message(LinkFlags::Up, vec![info(InfoKind::Dummy)])).kind, LinkKind::Dummy);
        assert_eq!(link(mk_message(LinkFlags::Up, vec![info(InfoKind::Ifb)])).kind, LinkKind::Ifb);
    }

    #[test]
    fn an_ipvlan_in_mode_l3s_is_a_kind_of_its_own() {
        for (mode, expected) in [
            (IpVlanMode::L2, LinkKind::Other("ipvlan".into())),
            (IpVlanMode::L3, LinkKind::Other("ipvlan".into())),
            (IpVlanMode::L3S, LinkKind::IpvlanL3s),
        ] {
            let data = InfoData::IpVlan(vec![InfoIpVlan::Mode(mode)]);
            let infos = vec![LinkInfo::Kind(InfoKind::IpVlan), LinkInfo::Data(data)];
            let message = mk_message(LinkFlags::Up, vec![LinkAttribute::LinkInfo(infos)]);
            assert_eq!(link(message).kind, expected, "{mode:?}");
        }
    }

    #[test]
    fn a_macvlan_in_private_mode_is_told_from_others() {
        for (mode, expected) in
            [(MacVlanMode::Private, true), (MacVlanMode::Bridge, false), (MacVlanMode::Vepa, false)]
        {
            let data = InfoData::MacVlan(vec![InfoMacVlan::Mode(mode)]);
            let infos = vec![LinkInfo::Kind(InfoKind::MacVlan), LinkInfo::Data(data)];
            assert_eq!(
                link(mk_message(LinkFlags::Up, vec![LinkAttribute::LinkInfo(infos)])).is_private,
                expected
            );
        }
    }

    #[test]
    fn a_tunnels_device_in_external_mode_has_its_port() {
        let of = |data: InfoData| {
            let infos = vec![LinkInfo::Kind(InfoKind::Vxlan), LinkInfo::Data(data)];
            link(mk_message(LinkFlags::Up, vec![LinkAttribute::LinkInfo(infos)])).external
        };
        let vxlan = |is_external| {
            InfoData::Vxlan(vec![InfoVxlan::Port(4789), InfoVxlan::CollectMetadata(is_external)])
        };
        assert_eq!((of(vxlan(true)), of(vxlan(false))), (Some(4789), None));
        let geneve = vec![InfoGeneve::CollectMetadata, InfoGeneve::Port(6081)];
        assert_eq!(of(InfoData::Geneve(geneve)), Some(6081));
        assert_eq!(of(InfoData::Geneve(vec![InfoGeneve::Id(7), InfoGeneve::Port(6081)])), None);
        for (data, expected) in [
            (InfoData::GreTap(vec![InfoGre::CollectMetadata]), Some(0)),
            (InfoData::ErSpan(vec![InfoGre::CollectMetadata]), Some(0)),
            (InfoData::GreTap(vec![]), None),
            (InfoData::GreTap6(vec![InfoGre6::CollectMetadata]), Some(0)),
            (InfoData::Ip6ErSpan(vec![InfoGre6::CollectMetadata]), Some(0)),
            (InfoData::Ip6ErSpan(vec![]), None),
            (InfoData::GreTun(vec![InfoGre::CollectMetadata]), None),
        ] {
            assert_eq!(of(data.clone()), expected, "{data:?}");
        }
    }

    #[test]
    fn a_peer_is_another_device_that_can_be_named() {
        let own = IfIndex(7);
        assert_eq!(peer(own, 0, None), None);
        assert_eq!(peer(own, 7, None), None);
        assert_eq!(peer(own, 3, None), Some(Peer { ifindex: 3, nsid: None }));
        // The two ends of a veth often have the same index in their two namespaces.
        assert_eq!(peer(own, 7, Some(0)), Some(Peer { ifindex: 7, nsid: Some(0) }));
        assert_eq!(peer(own, 3, Some(-1)), None);
        assert_eq!(peer(own, 0, Some(0)), None);
    }

    #[test]
    fn a_device_that_was_never_up_is_queueless_by_its_kind() {
        assert!(queueless("noqueue", None));
        assert!(queueless("noop", Some(&InfoKind::Veth)));
        assert!(!queueless("noop", None));
        assert!(!queueless("noop", Some(&InfoKind::Bond)));
        assert!(!queueless("pfifo_fast", Some(&InfoKind::Dummy)));
        assert!(!queueless("", Some(&InfoKind::Dummy)));
    }
}
