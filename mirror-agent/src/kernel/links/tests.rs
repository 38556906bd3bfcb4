//! [`Netlink`](super::netlink::Netlink) on the real kernel, in network namespaces that live as long as a test.

#![expect(clippy::unwrap_used, clippy::panic, clippy::expect_used, reason = "a test fails by panicking")]

use std::{
    collections::BTreeSet,
    future::Future,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use mirror_core::coverage::Carried;
use nix::{
    sched::{CloneFlags, unshare},
    sys::socket::{AddressFamily, SockFlag, SockType, socket},
};
use rtnetlink::{
    Handle, LinkUnspec, LinkVeth,
    packet_route::{link::LinkMessage, tc::TcHandle},
};
use tokio::{sync::oneshot, time::timeout};

use super::{LinkTable, NicPlace, PodNetns, netlink::Netlink, socket::connect};
use crate::{
    kernel::netns::Netns,
    model::{IfIndex, Link, LinkChange, LinkKind, PodLinks},
};

mod mirror;

pub(super) const DEADLINE: Duration = Duration::from_secs(10);

/// Runs a test in a new network namespace, which ends with the thread.
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

/// A new network namespace, which is deleted when this is dropped.
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

/// A plain rtnetlink connection, for the setup of a test.
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
    let pods = [PodNetns { uid: "uid".to_owned(), path: Some(path.to_owned()), nics: BTreeSet::new() }];
    let mut snapshot = netlink.snapshot(&pods).await.unwrap();
    assert_eq!(snapshot.pods.len(), 1);
    (snapshot.host.into_values().collect(), snapshot.pods.remove("uid").unwrap())
}

pub(super) async fn by_name(netlink: &mut Netlink, name: &str) -> Option<Link> {
    netlink.snapshot(&[]).await.unwrap().by_name(name).cloned()
}

/// Waits until no event has arrived for 100 ms.
pub(super) async fn quiet(netlink: &mut Netlink) {
    while timeout(Duration::from_millis(100), netlink.changed()).await.is_ok() {}
}

/// The kernel reports its multicast groups at both ends of a veth that is up.
#[test]
fn the_counters_of_a_nic_are_read_from_the_node() {
    on_a_node(|| async {
        let (mut netlink, handle, pod) = (Netlink::new().unwrap(), handle(), PodNs::new().await);
        add_nic(&handle, &pod, "veth1", "eth0").await;
        add_nic(&handle, &pod, "veth2", "eth1").await;
        let (host, inside) = snapshot_of(&mut netlink, &pod.path).await;
        let nsid = inside.unwrap().nsid.unwrap();
        let of = |name: &str| {
            let end = host.iter().find(|link| link.name == name).unwrap();
            NicPlace { nsid, ifindex: IfIndex(end.peer.unwrap().ifindex), end: Some(end.ifindex) }
        };
        let (eth0, eth1) = (of("veth1"), of("veth2"));
        let carried = async |netlink: &mut Netlink, place| netlink.counters(&[place]).await.unwrap()[0];
        let idle = Carried { end: Some([0, 0]), ..Carried::default() };
        assert_eq!(netlink.counters(&[eth1, eth0]).await.unwrap(), [Some([idle; 2]); 2]);

        let up = |name: &str| LinkUnspec::new_with_name(name).up().build();
        handle.link().change(up("veth1")).execute().await.unwrap();
        let (connection, inside, _) = {
            let netns = Netns::open(&pod.path).unwrap();
            let (connection, handle) = netns.inside(connect).await.unwrap();
            (tokio::spawn(connection), handle, netns)
        };
        inside.link().change(up("eth0")).execute().await.unwrap();
        let both = async {
            loop {
                let [ingress, egress] = carried(&mut netlink, eth0).await.unwrap();
                if ingress.nic.packets > 0 && egress.nic.packets > 0 {
                    return [ingress, egress];
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        for Carried { nic, end } in timeout(DEADLINE, both).await.expect("both ends send") {
            let [before, after] = end.unwrap();
            assert!(
                before <= nic.packets && nic.packets <= after && nic.bytes > nic.packets,
                "{nic:?} {end:?}"
            );
        }
        connection.abort();

        let itself = carried(&mut netlink, NicPlace { end: None, ..eth0 }).await.unwrap();
        assert!(itself.iter().all(|of| of.nic.packets > 0 && of.end.is_none()), "{itself:?}");
        for (what, place) in [
            ("another device's place", NicPlace { end: eth1.end, ..eth0 }),
            ("no such NIC", NicPlace { ifindex: IfIndex(999), ..eth0 }),
            ("no such device", NicPlace { end: Some(IfIndex(999)), ..eth0 }),
            ("no such namespace", NicPlace { nsid: 999, ..eth0 }),
        ] {
            assert_eq!(carried(&mut netlink, place).await, None, "{what}");
        }
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
        let pods =
            pods.map(|(uid, path)| PodNetns { uid: uid.to_owned(), path: Some(path), nics: BTreeSet::new() });
        let pods = netlink.snapshot(&pods).await.unwrap().pods;
        assert_eq!(pods["good"].as_ref().unwrap().links.len(), 1, "loopback");
        for (uid, text) in [
            ("missing", "network namespace /nonexistent/netns: No such file or directory (os error 2)"),
            ("file", "network namespace /etc/hostname: not a network namespace"),
            ("directory", "network namespace /proc: not a network namespace"),
            ("other-kind", "network namespace /proc/self/ns/mnt: not a network namespace"),
        ] {
            let why = pods[uid].as_ref().map(|inside| (&inside.links[..], inside.stale.as_deref()));
            let unread = if uid == "missing" { Err(&text.to_owned()) } else { Ok((&[][..], Some(text))) };
            assert_eq!(why, unread);
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

        // First wait until there are no more events. Then a wake-up without a waiter must be kept, even if another wait
        // is cancelled.
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
        // This blocks the only thread that could read events: the events of 600 devices do not fit into the socket's
        // buffer.
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
