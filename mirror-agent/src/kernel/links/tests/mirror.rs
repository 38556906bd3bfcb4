//! `Netlink` creates, changes and deletes the mirror interface.

use std::net::{IpAddr, UdpSocket};

use mirror_core::{exit, tunnel::TunnelDevice};
use rtnetlink::packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, LinkAttribute, LinkFlags, LinkMessage,
};

use mirror_core::destination::Destination;

use super::*;
use crate::model::{ALIAS, TargetName};

#[test]
fn the_mirror_interface_is_made_silent_and_ours() {
    on_a_node(|| async {
        let (mut netlink, handle) = (Netlink::new().unwrap(), handle());
        // As on a node: the kernel reports groups of the new device only if it forwards.
        std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").unwrap();
        netlink
            .apply(&LinkChange::CreateMirror { name: "mirror0".into(), mtu: 65535, offloads: true })
            .await
            .unwrap();

        let mirror = by_name(&mut netlink, "mirror0").await.unwrap();
        let devices = match mirror.kind {
            LinkKind::Dummy => vec!["mirror0"],
            LinkKind::Veth => vec!["mirror0", "mirror0p"],
            kind => panic!("made a {kind:?}"),
        };
        for name in &devices {
            let link = by_name(&mut netlink, name).await.unwrap();
            assert!(link.up && link.carrier && link.queueless, "{link:?}");
            assert_eq!((link.mtu, link.alias.as_deref()), (65535, Some(ALIAS)));
            let raw = raw_link(&handle, name).await;
            assert!(raw.header.flags.contains(LinkFlags::Noarp));
            assert!(!raw.header.flags.contains(LinkFlags::Multicast));
            assert!(no_ipv6_address(&raw), "{raw:?}");
            assert_eq!(
                ipv6_groups(name),
                ["ff010000000000000000000000000001", "ff020000000000000000000000000001"]
            );
            assert_eq!(ipv6_routes(name), Vec::<String>::new());
        }
        let down = LinkUnspec::new_with_index(mirror.ifindex.0).down().build();
        handle.link().change(down).execute().await.unwrap();
        netlink.apply(&LinkChange::SetUp(mirror.ifindex)).await.unwrap();
        devices.iter().for_each(|name| assert_eq!(ipv6_routes(name), Vec::<String>::new()));
        assert_eq!(netlink.snapshot(&[]).await.unwrap().host.len(), devices.len() + 1, "and loopback");

        let again = netlink
            .apply(&LinkChange::CreateMirror { name: "mirror0".into(), mtu: 1500, offloads: true })
            .await;
        let again = format!("{:#}", again.unwrap_err());
        assert!(again.contains("mirror0") && again.contains("File exists (os error 17)"), "{again}");

        netlink.apply(&LinkChange::Delete(mirror.ifindex)).await.unwrap();
        assert_eq!(netlink.snapshot(&[]).await.unwrap().host.len(), 1, "loopback only");
        let gone = mirror.ifindex;
        for change in [
            LinkChange::SetUp(gone),
            LinkChange::SetMtu(gone, 1500),
            LinkChange::SetOffloads(gone, false),
            LinkChange::Delete(gone),
        ] {
            netlink.apply(&change).await.expect("it is already gone");
        }
    });
}

/// If a tap is moved into a pod while no agent runs, it clones to the device that has the index of its target there. So
/// podmirror's devices have indexes that no pod uses.
#[test]
fn no_device_of_ours_has_an_index_that_a_pod_may_have() {
    on_a_node(|| async {
        let mut netlink = Netlink::new().unwrap();
        for name in ["mirror0", "mirror1"] {
            let made = LinkChange::CreateMirror { name: name.into(), mtu: 1500, offloads: true };
            netlink.apply(&made).await.unwrap();
        }
        netlink.apply(&LinkChange::CreateHub).await.unwrap();
        netlink.apply(&LinkChange::CreateTunnel(TunnelDevice::Vxlan(4789))).await.unwrap();
        let host = netlink.snapshot(&[]).await.unwrap().host;
        let ours: Vec<_> = host.values().filter(|link| link.kind != LinkKind::Loopback).collect();
        assert!(ours.len() >= 4 && ours.iter().all(|link| link.ifindex > exit::IFINDEX), "{ours:?}");
        ours.iter().for_each(|link| assert_eq!(ipv6_routes(&link.name), Vec::<String>::new()));
    });
}

/// A DHCP request of a pod is a broadcast, and the node may run a DHCP server.
#[test]
fn a_copied_broadcast_does_not_reach_the_node_itself() {
    on_a_node(|| async {
        let mut netlink = Netlink::new().unwrap();
        netlink.apply(&LinkChange::SetUp(IfIndex(1))).await.unwrap();
        netlink
            .apply(&LinkChange::CreateMirror { name: "mirror0".into(), mtu: 1500, offloads: true })
            .await
            .unwrap();
        let mirror = by_name(&mut netlink, "mirror0").await.unwrap();
        let server = UdpSocket::bind("0.0.0.0:67").unwrap();
        server.set_read_timeout(Some(DEADLINE)).unwrap();

        let mut frame = [0xff; 6].to_vec();
        frame.extend([2, 0, 0, 0, 0, 1, 0x08, 0x00]);
        frame.extend([0x45, 0, 0, 32, 0, 0, 0, 0, 64, 17, 0x7a, 0xce, 0, 0, 0, 0, 255, 255, 255, 255]);
        frame.extend([0, 68, 0, 67, 0, 12, 0, 0]);
        frame.extend(*b"copy");
        send_frame(mirror.ifindex, &frame);
        // This packet is sent last and arrives last, so no earlier packet can be missed.
        UdpSocket::bind("127.0.0.1:0").unwrap().send_to(b"last", "127.0.0.1:67").unwrap();
        let mut buffer = [0; 16];
        let (length, _) = server.recv_from(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], b"last");
    });
}

fn send_frame(ifindex: IfIndex, frame: &[u8]) {
    let socket = socket(AddressFamily::Packet, SockType::Raw, SockFlag::SOCK_CLOEXEC, None).unwrap();
    // SAFETY: every field of a `sockaddr_ll` is a number.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_ifindex = ifindex.0.cast_signed();
    let length = size_of::<libc::sockaddr_ll>() as u32;
    let (fd, address) = (socket.as_raw_fd(), (&raw const address).cast());
    // SAFETY: pointers and lengths are of one slice and of one `sockaddr_ll`.
    let sent = unsafe { libc::sendto(fd, frame.as_ptr().cast(), frame.len(), 0, address, length) };
    assert_eq!(sent, frame.len().cast_signed(), "{}", std::io::Error::last_os_error());
}

/// Returns the multicast groups that a device is in, without the two all-nodes groups, which are never reported.
fn ipv6_groups(device: &str) -> Vec<String> {
    let table = std::fs::read_to_string("/proc/thread-self/net/igmp6").unwrap();
    let rows = table.lines().map(|row| row.split_whitespace().collect::<Vec<_>>());
    let mut groups: Vec<_> = rows.filter(|row| row[1] == device).map(|row| row[2].to_owned()).collect();
    groups.sort();
    groups
}

/// The destinations of the device's IPv6 routes.
fn ipv6_routes(device: &str) -> Vec<String> {
    let table = std::fs::read_to_string("/proc/thread-self/net/ipv6_route").unwrap();
    let rows = table.lines().map(|row| row.split_whitespace().collect::<Vec<_>>());
    rows.filter(|row| row.last() == Some(&device)).map(|row| row[0].to_owned()).collect()
}

fn no_ipv6_address(link: &LinkMessage) -> bool {
    let families = link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::AfSpecUnspec(families) => Some(families),
        _ => None,
    });
    families.into_iter().flatten().any(|family| {
        matches!(family, AfSpecUnspec::Inet6(settings)
            if settings.contains(&AfSpecInet6::AddrGenMode(In6AddrGenMode::None)))
    })
}

#[test]
fn addresses_of_a_mirror_interface_are_shown_and_taken_away() {
    on_a_node(|| async {
        let (mut netlink, handle) = (Netlink::new().unwrap(), handle());
        let device = Destination::Device("mirror0".into());
        netlink.follow(&[(TargetName::default(), device)].into());
        let create = LinkChange::CreateMirror { name: "mirror0".into(), mtu: 65535, offloads: true };
        netlink.apply(&create).await.unwrap();
        let mirror = by_name(&mut netlink, "mirror0").await.unwrap().ifindex;
        let other_end = by_name(&mut netlink, "mirror0p").await.map(|link| link.ifindex);
        let addresses =
            ["169.254.7.7", "10.1.2.3", "fe80::7"].map(|address| address.parse::<IpAddr>().unwrap());
        let devices: Vec<_> = [Some(mirror), other_end].into_iter().flatten().collect();
        netlink.changed().await;
        for device in &devices {
            for address in addresses {
                handle.address().add(device.0, address, 16).execute().await.unwrap();
            }
        }
        netlink.changed().await;
        let there = netlink.snapshot(&[]).await.unwrap().addresses;
        assert_eq!(there, devices.iter().map(|device| (*device, addresses.into())).collect());
        for device in devices {
            netlink.apply(&LinkChange::RemoveAddresses(device)).await.unwrap();
        }
        assert!(netlink.snapshot(&[]).await.unwrap().addresses.is_empty());
        netlink.apply(&LinkChange::RemoveAddresses(IfIndex(4711))).await.expect("it has none");
    });
}

#[test]
fn a_mirror_interface_that_cannot_be_finished_is_deleted_again() {
    on_a_node(|| async {
        let mut netlink = Netlink::new().unwrap();
        // Creation starts with an MTU that every driver accepts; this one is refused when it is set.
        let made = netlink
            .apply(&LinkChange::CreateMirror { name: "mirror0".into(), mtu: u32::MAX, offloads: true })
            .await;
        let error = format!("{:#}", made.unwrap_err());
        assert!(error.contains("mirror0") && error.contains("os error 22"), "{error}");
        assert_eq!(netlink.snapshot(&[]).await.unwrap().host.len(), 1, "loopback only");
    });
}
