//! Keeps the installed taps in namespaces that a new agent cannot read, or cannot find because the pod has no process.
//!
//! Pure. The loop calls [`keep_installed`] for each snapshot, before it selects.

use std::collections::BTreeMap;

use crate::{
    exit,
    model::{ActualTap, Device, IfIndex, Link, LinkKind, LinkSnapshot, Peer, PodLinks, TapHead},
};

/// The state of a reading ([`PodLinks::stale`]) that consists of installed taps only, because no process shows the
/// namespace.
pub(super) const NO_PROCESS: &str = "no process of the pod runs";

/// Adds the NICs of installed taps to the readings of namespaces that cannot be read, so that they stay tapped. This
/// holds for taps of the same pod in the same namespace, whose veth leads to the same other namespace as before.
///
/// Some runtimes (CRI-O) keep no process between two runs of a container, and then a new agent does not find the
/// namespace. So a pod without a reading is considered to be in the namespace of its taps if a veth of them is left.
pub fn keep_installed(links: &mut LinkSnapshot, installed: &BTreeMap<Device, ActualTap>) {
    let hub = exit::hub(links).map(|hub| hub.ifindex.0);
    let LinkSnapshot { host, pods, .. } = links;
    let taps = installed.iter().filter_map(|(device, of)| Some((*device, &of.tap.as_ref()?.head)));
    for (device, tap) in taps.clone().filter(|(device, _)| device.is_on_node()) {
        let is_left = host.get(&device.ifindex).is_some_and(|end| nic(end, tap).is_some());
        if let Some(pod) = tap.owner.pod.as_ref().filter(|_| is_left) {
            let (netns, stale) = (tap.owner.netns, Some(NO_PROCESS.to_owned()));
            let inside = PodLinks { netns, is_host: false, nsid: None, links: Vec::new(), stale };
            pods.entry(pod.uid.clone()).or_insert(Ok(inside));
        }
    }
    let unread = pods.iter_mut().filter_map(|(uid, inside)| Some((uid, inside.as_mut().ok()?)));
    for (uid, inside) in unread.filter(|(_, inside)| inside.links.is_empty()) {
        let netns = inside.netns;
        let mut taps = taps.clone().filter(|(_, TapHead { owner, .. })| {
            owner.netns == netns && owner.pod.as_ref().is_some_and(|pod| pod.uid == *uid)
        });
        for (device, tap) in taps.clone() {
            if !device.is_on_node() {
                let kind = LinkKind::Other(String::new());
                inside.links.push(Link::new(device.ifindex, &tap.owner.nic, kind, None));
            } else if let Some((nic, nsid)) = host.get(&device.ifindex).and_then(|end| nic(end, tap)) {
                if inside.nsid.is_some_and(|of| of != nsid) {
                    continue;
                }
                inside.nsid = Some(nsid);
                inside.links.push(nic);
            }
        }
        if let Some(hub) = hub.filter(|_| taps.any(|(_, tap)| tap.exit.is_some())) {
            let lower = Peer { ifindex: hub, nsid: Some(0) };
            let exit = Link::new(exit::IFINDEX, exit::NAME, LinkKind::Other("macvlan".into()), Some(lower));
            inside.links.push(Link { mtu: exit::MTU, is_private: true, ..exit });
        }
        let is_kept = |why: &&mut String| !inside.links.is_empty() && why.as_str() != NO_PROCESS;
        if let Some(why) = inside.stale.as_mut().filter(is_kept) {
            why.push_str("; existing mirrors continue");
        }
    }
}

/// The NIC at the other end of a veth, as its tap has recorded it, and the id of its namespace.
fn nic(end: &Link, tap: &TapHead) -> Option<(Link, i32)> {
    let peer = end.peer.filter(|_| end.kind == LinkKind::Veth && end.name == tap.owner.device)?;
    let back = Peer { ifindex: end.ifindex.0, nsid: Some(0) };
    Some((Link::new(IfIndex(peer.ifindex), &tap.owner.nic, LinkKind::Veth, Some(back)), peer.nsid?))
}
