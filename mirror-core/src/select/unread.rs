//! Keeps the installed taps in namespaces that a new agent cannot read.
//!
//! Pure. The loop calls [`keep_installed`] for each snapshot, before it selects.

use std::collections::BTreeMap;

use crate::{
    exit,
    model::{ActualTap, Device, IfIndex, Link, LinkKind, LinkSnapshot, Peer, TapHead},
};

/// Adds the NICs of installed taps to the readings of namespaces that cannot be read, so that they stay tapped. This
/// holds for taps of the same pod in the same namespace, whose veth leads to the same other namespace as before.
pub fn keep_installed(links: &mut LinkSnapshot, installed: &BTreeMap<Device, ActualTap>) {
    let hub = exit::hub(links).map(|hub| hub.ifindex.0);
    let LinkSnapshot { host, pods, .. } = links;
    let unread = pods.iter_mut().filter_map(|(uid, inside)| Some((uid, inside.as_mut().ok()?)));
    for (uid, inside) in unread.filter(|(_, inside)| inside.links.is_empty()) {
        let taps = installed.iter().filter_map(|(device, of)| Some((*device, &of.tap.as_ref()?.head)));
        let netns = inside.netns;
        let mut taps = taps.filter(|(_, TapHead { owner, .. })| {
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
        if let Some(why) = inside.stale.as_mut().filter(|_| !inside.links.is_empty()) {
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
