//! Chooses the side of a tap: in the pod's namespace, on the node, or split by direction.
//!
//! Pure. [`select`](super::select) calls it for each NIC without a veth peer on the node. The loop decides for which
//! veths ingress must be seen on the pod side, and then calls [`see_inside`].

use std::{collections::BTreeMap, slice};

use mirror_common::verdict::{Direction, TapKind};

use super::{Policy, Selection, Wanted, Why, is_to_tunnel, is_tunnels, kind_name};
use crate::{
    annotations::{POD_SIDE_TAPS, POD_SIDE_TAPS_WORDS},
    collector, exit,
    model::{Device, Link, LinkKind, LinkSnapshot, Origin, Pod, PodLinks, PodSide, Tap},
};

/// Whether a device that is no veth leads out of the pod: its lower device or peer is in another namespace (macvlan,
/// ipvlan, VLAN), or it is physical (a VF, or a NIC of the node that was moved into the pod). Any other device sends
/// through one of the pod's NICs, whose tap sees its packets.
pub(super) fn leads_out(link: &Link) -> bool {
    let is_over_another = link.peer.is_some_and(|lower| lower.nsid.is_some());
    match &link.kind {
        LinkKind::Loopback | LinkKind::Veth | LinkKind::Dummy | LinkKind::Ifb => false,
        LinkKind::IpvlanL3s => is_over_another,
        LinkKind::Other(kind) => kind.is_empty() || kind != "bridge" && is_over_another,
    }
}

/// Why a NIC cannot be tapped inside its pod.
pub(super) fn refusal(nic: &Link, tap: &Tap, pod: &Pod, policy: &Policy) -> Option<Why> {
    if !policy.taps_inside || !lets_in(pod, tap, policy) {
        return Some(Why::TapsInsideOff);
    }
    // Relay devices and capture files need Ethernet frames.
    if !nic.is_ethernet {
        return Some(Why::NotEthernet);
    }
    if is_tunnels(nic) && tap.sessions.values().any(|session| is_to_tunnel(session, policy)) {
        return Some(Why::TunnelInTunnel(kind_name(&nic.kind).to_owned()));
    }
    None
}

/// The node sides of veths whose taps can see ingress at the NIC instead: a session copies ingress, and the agent and
/// the pod allow taps inside.
pub fn with_two_sides(
    selection: &Selection,
    wanted: &[Wanted<'_>],
    links: &LinkSnapshot,
    policy: &Policy,
) -> Vec<Device> {
    let pods: BTreeMap<_, _> = wanted.iter().map(|wanted| (wanted.pod.id.uid.as_str(), wanted.pod)).collect();
    let has_two = |device: Device, tap: &Tap| {
        let pod = tap.head.owner.pod.as_ref().and_then(|pod| pods.get(pod.uid.as_str()));
        let can_have = tap.copies(Direction::Ingress) && tap.head.kind == TapKind::HostVeth;
        let (Some(pod), true) = (pod, can_have) else { return false };
        let Some((_, nic)) = nic_of(device, tap, links) else { return false };
        !is_collector(pod, nic, policy) && refusal(nic, tap, pod, policy).is_none()
    };
    let taps = selection.taps.iter().filter(|(device, tap)| has_two(**device, tap));
    taps.map(|(device, _)| *device).collect()
}

/// Moves the ingress side of these taps, on the node side of a veth, to the NIC.
pub fn see_inside(
    devices: impl IntoIterator<Item = Device>,
    selection: &mut Selection,
    links: &LinkSnapshot,
    policy: &Policy,
) {
    for device in devices {
        let Some(tap) = selection.taps.get_mut(&device) else { continue };
        let Some((inside, nic)) = nic_of(device, tap, links) else { continue };
        tap.head.pod_side = Some(PodSide::seeing(nic.ifindex));
        tap.head.exit = exit::of(inside, links).filter(|_| exit::needs_exit(tap, policy));
    }
}

/// The NIC at the other end of a tap's veth, and all devices of its namespace.
fn nic_of<'a>(device: Device, tap: &Tap, links: &'a LinkSnapshot) -> Option<(&'a PodLinks, &'a Link)> {
    let inside = links.pods.get(&tap.head.owner.pod.as_ref()?.uid)?.as_ref().ok()?;
    let leads_here =
        |nic: &&Link| inside.host_end(nic, &links.host).is_some_and(|link| link.ifindex == device.ifindex);
    Some((inside, inside.links.iter().find(leads_here)?))
}

/// Whether copies are sent to this NIC. A copy keeps its mark only up to the node side: after it, a program of the CNI
/// could clear the mark, and a tap at the NIC would copy the copy.
fn is_collector(pod: &Pod, nic: &Link, policy: &Policy) -> bool {
    let is_meant = |name: &Option<String>| name.as_ref().is_none_or(|name| *name == nic.name);
    policy
        .collectors()
        .any(|(_, of)| is_meant(&of.nic) && collector::of(of, slice::from_ref(pod)).next().is_some())
}

/// Whether a pod and its namespace allow podmirror's programs and devices in the pod. They cannot refuse an enforced
/// mirror.
fn lets_in(pod: &Pod, tap: &Tap, policy: &Policy) -> bool {
    if !policy.annotations || tap.sessions.values().any(|session| session.origin == Origin::Enforced) {
        return true;
    }
    let said = [&pod.annotations, &*pod.inherited].map(|at| at.get(POD_SIDE_TAPS));
    // An invalid value on the pod does not hide the namespace's value.
    let mut words = said.into_iter().flatten().filter(|word| POD_SIDE_TAPS_WORDS.contains(&word.as_str()));
    words.next().is_none_or(|word| word != "off")
}

#[cfg(test)]
mod tests;
