//! [`Netlink`](super::netlink::Netlink) on the real kernel, in network namespaces that live as long as a test.

#![expect(clippy::unwrap_used, clippy::panic, clippy::expect_used, reason = "a test fails by panicking")]

use std::{
    future::Future,
    net::UdpSocket,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use nix::{
    sched::{CloneFlags, unshare},
    sys::socket::{AddressFamily, SockFlag, SockType, socket},
};
use rtnetlink::{
    Handle, LinkBridge, LinkUnspec, LinkVeth,
    packet_route::{
        link::{AfSpecInet6, AfSpecUnspec, In6AddrGenMode, LinkAttribute, LinkFlags, LinkMessage},
        tc::TcHandle,
    },
};
use tokio::{sync::oneshot, time::timeout};

use super::{ALIAS, LinkChange, LinkTable, PodNetns, netlink::Netlink, netns::netns_id};
use crate::model::{IfIndex, Link, LinkKind, Peer, PodLinks};

pub(super) const DEADLINE: Duration = Duration::from_secs(10);

/// Runs a test in a network namespace of its own, which goes with the thread.
pub(super) fn on_a_node<F: Future<Output = ()>>(test: impl FnOnce() -> F + Send + 'static) {
    let node = thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET).expect("this test needs root: it makes a network namespace");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test());
    });
    if let Err(panic) = node.join() {
        std::panic::resume_unwind(panic);
    }
}

/// A network namespace of its own, which goes when this is dropped.
pub(super) struct PodNs {
    pub(super) path: PathBuf,
    _stop: oneshot::Sender<()>,
}

impl PodNs {
    pub(super) async fn new() -> Self {
        let (path, made) = oneshot::channel();
        let (stop, stopped) = oneshot::channel::<()>();
        thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            let tid = nix::unistd::gettid();
            path.send(PathBuf::from(format!("/proc/self/task/{tid}/ns/net"))).unwrap();
            let _ = stopped.blocking_recv();
        });
        Self { path: made.await.unwrap(), _stop: stop }
    }
}

/// A plain rtnetlink connection, to set the scene with.
pub(super) fn handle() -> Handle {
    let (connection, handle, _) = rtnetlink::new_connection().unwrap();
    tokio::spawn(connection);
    handle
}

pub(super) async fn add(handle: &Handle, message: LinkMessage) {
    handle.link().add(message).execute().await.unwrap();
}

/// Adds a veth with one end in a pod.
pub(super) async fn add_nic(handle: &Handle, pod: &PodNs, host: &str, nic: &str) {
    add(handle, LinkVeth::new(host, nic).build()).await;
    let namespace = std::fs::File::open(&pod.path).unwrap();
    let nic = LinkUnspec::new_with_name(nic).setns_by_fd(namespace.as_raw_fd()).build();
    handle.link().change(nic).execute().await.unwrap();
}

async fn raw_link(handle: &Handle, name: &str) -> LinkMessage {
    use futures_util::StreamExt;
    let found = handle.link().get().match_name(name).execute();
    std::pin::pin!(found).next().await.unwrap().unwrap()
}

pub(super) async fn snapshot_of(netlink: &mut Netlink, path: &Path) -> (Vec<Link>, Result<PodLinks, String>) {
    let pods = [PodNetns { uid: "uid".to_owned(), path: Some(path.to_owned()) }];
    let mut snapshot = netlink.snapshot(&pods).await.unwrap();
    assert_eq!(snapshot.pods.len(), 1);
    (snapshot.host.into_values().collect(), snapshot.pods.remove("uid").unwrap())
}

pub(super) async fn by_name(netlink: &mut Netlink, name: &str) -> Option<Link> {
    netlink.snapshot(&[]).await.unwrap().by_name(name).cloned()
}

/// Until no event has come for a while.
pub(super) async fn quiet(netlink: &mut Netlink) {
    while timeout(Duration::from_millis(100), netlink.changed()).await.is_ok() {}
}

#[test]
fn both_ends_of_a_pods_veth_name_each_other() {
    on_a_node(|| async {
        let (mut netlink, handle, pod) = (Netlink::new().unwrap(), handle(), PodNs::new().await);
        let (_, before) = snapshot_of(&mut netlink, &pod.path).await;
        assert_eq!(before.unwrap().nsid, None, "nothing connects the two namespaces yet");

        add(&handle, LinkBridge::new("cni0").build()).await;
        add_nic(&handle, &pod, "veth1", "eth0").await;
        let bridge = raw_link(&handle, "cni0").await.header.index;
        let veth1 = LinkUnspec::new_with_name("veth1").mtu(1450).controller(bridge).up().build();
        handle.link().change(veth1).execute().await.unwrap();

        let (host, pod_links) = snapshot_of(&mut netlink, &pod.path).await;
        let pod_links = pod_links.unwrap();
        assert_eq!(pod_links.netns, netns_id(&pod.path).unwrap());
        assert!(!pod_links.is_host);
        let nsid = pod_links.nsid.expect("the veth connects the two namespaces");
        let find = |links: &[Link], name: &str| links.iter().find(|link| link.name == name).cloned().unwrap();

        let (veth1, eth0) = (find(&host, "veth1"), find(&pod_links.links, "eth0"));
        assert_eq!(veth1.kind, LinkKind::Veth);
        assert_eq!(veth1.peer, Some(Peer { ifindex: eth0.ifindex.0, nsid: Some(nsid) }));
        assert_eq!((veth1.master, veth1.mtu), (Some(IfIndex(bridge)), 1450));
        assert!(veth1.up && !veth1.carrier, "the other end is down");
        assert!(veth1.queueless);
        assert_eq!(eth0.kind, LinkKind::Veth);
        assert_eq!(eth0.peer.unwrap().ifindex, veth1.ifindex.0);
        assert!(eth0.peer.unwrap().nsid.is_some());
        assert!(!eth0.up && eth0.queueless, "never up, but a veth");
        assert_eq!(find(&pod_links.links, "lo").kind, LinkKind::Loopback);
        let bridge = find(&host, "cni0");
        assert_eq!((bridge.kind, bridge.peer), (LinkKind::Other("bridge".into()), None));
    });
}

#[test]
fn a_nic_that_comes_or_goes_is_seen_at_once() {
    on_a_node(|| async {
        let (mut netlink, handle, pod) = (Netlink::new().unwrap(), handle(), PodNs::new().await);
        let mut nics = async || {
            let (_, inside) = snapshot_of(&mut netlink, &pod.path).await;
            let mut names: Vec<_> = inside.unwrap().links.into_iter().map(|link| link.name).collect();
            names.sort();
            names
        };
        assert_eq!(nics().await, ["lo"]);
        for _ in 0..2 {
            add_nic(&handle, &pod, "veth1", "eth0").await;
            assert_eq!([nics().await, nics().await], [["eth0", "lo"]; 2]);
            add_nic(&handle, &pod, "veth2", "eth1").await;
            assert_eq!(nics().await, ["eth0", "eth1", "lo"]);
            for (device, left) in [("veth1", ["eth1", "lo"].as_slice()), ("veth2", &["lo"])] {
                let index = raw_link(&handle, device).await.header.index;
                handle.link().del(index).execute().await.unwrap();
                assert_eq!(nics().await, left);
            }
        }
    });
}

#[test]
fn a_pod_in_the_nodes_namespace_is_recognised() {
    on_a_node(|| async {
        let mut netlink = Netlink::new().unwrap();
        let (host, pod) = snapshot_of(&mut netlink, Path::new("/proc/thread-self/ns/net")).await;
        let pod = pod.unwrap();
        assert!(pod.is_host);
        assert_eq!(pod.links, host);
    });
}

#[test]
fn a_namespace_that_cannot_be_read_is_an_error_of_its_pod_alone() {
    on_a_node(|| async {
        let (mut netlink, good) = (Netlink::new().unwrap(), PodNs::new().await);
        let pods = [
            ("good", good.path.clone()),
            ("missing", "/nonexistent/netns".into()),
            ("file", "/etc/hostname".into()),
            ("directory", "/proc".into()),
            ("other-kind", "/proc/self/ns/mnt".into()),
        ];
        let pods = pods.map(|(uid, path)| PodNetns { uid: uid.to_owned(), path: Some(path) });
        let pods = netlink.snapshot(&pods).await.unwrap().pods;
        assert_eq!(pods["good"].as_ref().unwrap().links.len(), 1, "loopback");
        for (uid, text) in [
            ("missing", "network namespace /nonexistent/netns: No such file or directory (os error 2)"),
            ("file", "network namespace /etc/hostname: not a network namespace"),
            ("directory", "network namespace /proc: not a network namespace"),
            ("other-kind", "network namespace /proc/self/ns/mnt: not a network namespace"),
        ] {
            assert_eq!(pods[uid], Err(text.to_owned()));
        }
    });
}

#[test]
fn a_namespace_is_not_kept_alive_by_having_been_read() {
    on_a_node(|| async {
        let (mut netlink, handle, pod) = (Netlink::new().unwrap(), handle(), PodNs::new().await);
        add_nic(&handle, &pod, "veth1", "eth0").await;
        snapshot_of(&mut netlink, &pod.path).await.1.unwrap();
        drop(pod);
        let gone = async {
            while by_name(&mut netlink, "veth1").await.is_some() {
                netlink.changed().await;
            }
        };
        timeout(DEADLINE, gone).await.expect("the veth goes with the pod's namespace");
    });
}

#[test]
fn changes_wake_and_none_is_lost() {
    on_a_node(|| async {
        let (mut netlink, handle) = (Netlink::new().unwrap(), handle());
        add(&handle, LinkVeth::new("a", "b").build()).await;
        timeout(DEADLINE, netlink.changed()).await.expect("new devices wake");

        // Until it is quiet; then a wake-up that nobody waits for must be kept, over a cancelled wait too.
        quiet(&mut netlink).await;
        {
            let mut cancelled = std::pin::pin!(netlink.changed());
            assert!(futures_util::poll!(cancelled.as_mut()).is_pending());
            handle.link().change(LinkUnspec::new_with_name("a").mtu(1400).build()).execute().await.unwrap();
        }
        timeout(DEADLINE, netlink.changed()).await.expect("a change wakes who asks later");

        quiet(&mut netlink).await;
        let index = i32::try_from(raw_link(&handle, "a").await.header.index).unwrap();
        handle.qdisc().add(index).ingress().execute().await.unwrap();
        timeout(DEADLINE, netlink.changed()).await.expect("a new ingress qdisc wakes");

        quiet(&mut netlink).await;
        let mut removal = handle.qdisc().del(index);
        removal.message_mut().header.parent = TcHandle::INGRESS;
        removal.execute().await.unwrap();
        timeout(DEADLINE, netlink.changed()).await.expect("a removed ingress qdisc wakes");
    });
}

#[test]
fn an_overrun_of_the_event_socket_wakes_and_leaves_it_listening() {
    on_a_node(|| async {
        let mut netlink = Netlink::new().unwrap();
        // This blocks the only thread that could read events: 600 devices are more than the socket's buffer holds.
        let burst = thread::spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let handle = handle();
                for n in 0..300 {
                    add(&handle, LinkVeth::new(&format!("a{n}"), &format!("b{n}")).build()).await;
                }
            });
        });
        burst.join().unwrap();
        timeout(DEADLINE, netlink.changed()).await.unwrap();
        let host = netlink.snapshot(&[]).await.unwrap().host;
        assert_eq!(host.len(), 601, "a dump of many parts is complete");

        quiet(&mut netlink).await;
        let some = host.values().find(|link| link.name == "a0").unwrap().ifindex;
        netlink.apply(&LinkChange::SetMtu(some, 1400)).await.unwrap();
        timeout(DEADLINE, netlink.changed()).await.expect("it still listens");
    });
}

#[test]
fn the_mirror_interface_is_made_silent_and_ours() {
    on_a_node(|| async {
        let (mut netlink, handle) = (Netlink::new().unwrap(), handle());
        // As on a node: it is when forwarding that the kernel would report groups on the new device.
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
        }
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
            netlink.apply(&change).await.expect("it has gone already");
        }
    });
}

/// A DHCP request of a pod is a broadcast, and the node may have a DHCP server.
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
        // What is sent later arrives later, so nothing that is still on its way can be missed.
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

/// The multicast groups that a device is in. Those of all nodes are the two that are never reported to the link.
fn ipv6_groups(device: &str) -> Vec<String> {
    let table = std::fs::read_to_string("/proc/thread-self/net/igmp6").unwrap();
    let rows = table.lines().map(|row| row.split_whitespace().collect::<Vec<_>>());
    let mut groups: Vec<_> = rows.filter(|row| row[1] == device).map(|row| row[2].to_owned()).collect();
    groups.sort();
    groups
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
fn a_mirror_interface_that_cannot_be_finished_is_deleted_again() {
    on_a_node(|| async {
        let mut netlink = Netlink::new().unwrap();
        // Creation starts with an MTU that every driver takes; this one is refused when it is set.
        let made = netlink
            .apply(&LinkChange::CreateMirror { name: "mirror0".into(), mtu: u32::MAX, offloads: true })
            .await;
        let error = format!("{:#}", made.unwrap_err());
        assert!(error.contains("mirror0") && error.contains("os error 22"), "{error}");
        assert_eq!(netlink.snapshot(&[]).await.unwrap().host.len(), 1, "loopback only");
    });
}

#[test]
fn a_device_is_brought_up_and_its_mtu_changed() {
    on_a_node(|| async {
        let (mut netlink, handle) = (Netlink::new().unwrap(), handle());
        add(&handle, LinkBridge::new("br0").down().build()).await;
        let bridge = by_name(&mut netlink, "br0").await.unwrap();
        assert!(!bridge.up && bridge.queueless, "never up, but a bridge");
        netlink.apply(&LinkChange::SetUp(bridge.ifindex)).await.unwrap();
        netlink.apply(&LinkChange::SetMtu(bridge.ifindex, 9000)).await.unwrap();
        let bridge = by_name(&mut netlink, "br0").await.unwrap();
        assert_eq!((bridge.up, bridge.mtu), (true, 9000));

        let error = netlink.apply(&LinkChange::SetMtu(bridge.ifindex, 1)).await.unwrap_err();
        let expected = format!(
            "cannot set the MTU of the device with index {} to 1: Invalid argument (os error 22)",
            bridge.ifindex
        );
        assert_eq!(format!("{error:#}"), expected);
    });
}
