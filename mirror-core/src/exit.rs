//! Exits: the devices through which copies leave the network namespaces of pods, and the hub that all of them lead to.
//!
//! A tap inside a pod can clone only to a device of its own namespace. So a pod with such a tap gets an exit, a private
//! macvlan over the hub. The hub is a device of the node, at which the program `hub` hands the copies to their targets.
//! A stream needs no exit.
//!
//! Pure: taps and devices in, changes out. The reconcile loop carries the changes out through `links`; `select` asks
//! which exit a pod has.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    destination::Destination,
    mirror_iface,
    model::{
        ActualTap, Device, IfIndex, Link, LinkChange, LinkKind, LinkSnapshot, NetnsId, PodLinks, Session, Tap,
    },
    select::Policy,
};

/// The name of the hub.
pub const HUB: &str = "podmirror-hub";
/// The name of an exit, for people who look into a pod.
pub const NAME: &str = "podmirror";
/// The index of an exit in its namespace.
///
/// No other device has so great an index, because the kernel counts from 1. So a clone that happens in another namespace,
/// because a NIC was moved there with its programs, meets no device.
pub const IFINDEX: IfIndex = IfIndex(0x706d_0000);
/// The lowest index of the devices of the node that we make. A tapped device that is moved into a pod while no agent runs takes
/// its programs along too.
pub const FIRST_IFINDEX: IfIndex = IfIndex(IFINDEX.0 + 1);
/// MTU in bytes of the hub and the exits: the largest one, so that no packet is too long.
pub const MTU: u32 = 65535;

/// Whether a device inside a pod is an exit, under any name: root in the pod can change that. A macvlan of the pod itself
/// has its lower device inside the pod.
pub fn is_exit(link: &Link) -> bool {
    let is_macvlan = matches!(&link.kind, LinkKind::Other(kind) if kind == "macvlan");
    link.ifindex == IFINDEX && is_macvlan && link.peer.is_some_and(|lower| lower.nsid.is_some())
}

/// The hub.
pub fn hub(links: &LinkSnapshot) -> Option<&Link> {
    links.by_name(HUB).filter(|link| mirror_iface::is_ours(link))
}

/// Whether a device is a hub that an agent has made and not finished, because it was killed. It has got its name with the
/// first request, and its alias and its MTU with a later one.
pub fn is_half_made(link: &Link) -> bool {
    let is_of_kind = matches!(link.kind, LinkKind::Dummy | LinkKind::Veth);
    link.name == HUB && is_of_kind && link.alias.is_none() && !link.up && link.mtu < MTU
}

/// The exit of a pod, if it is there and as we have made it.
pub fn of(pod: &PodLinks, links: &LinkSnapshot) -> Option<IfIndex> {
    let hub = hub(links)?;
    let exit = pod.links.iter().find(|link| is_exit(link))?;
    is_sound(exit, hub).then_some(exit.ifindex)
}

/// The UIDs of the pods that have an exit, in any state.
pub fn pods_with_exit(links: &LinkSnapshot) -> impl Iterator<Item = &String> {
    let has_exit = |inside: &PodLinks| inside.links.iter().any(is_exit);
    let pods = links.pods.iter();
    pods.filter(move |(_, inside)| inside.as_ref().is_ok_and(has_exit)).map(|(uid, _)| uid)
}

/// Whether an exit leads to the hub and to no other exit, without a queue, and takes packets of any length: root in the pod
/// can change that. A queue can keep, change or repeat the copies.
fn is_sound(exit: &Link, hub: &Link) -> bool {
    let leads_to_hub = exit.peer.is_some_and(|lower| lower.ifindex == hub.ifindex.0);
    exit.up && exit.mtu == MTU && exit.is_private && exit.queueless && leads_to_hub
}

/// Whether copies of a tap inside a pod leave the pod through its exit. The target of a capture is none of the policy.
pub fn needs_exit(tap: &Tap, policy: &Policy) -> bool {
    let leaves =
        |session: &Session| policy.targets.get(&session.target).is_some_and(|to| *to != Destination::Stream);
    tap.sessions.values().any(leaves)
}

/// The network namespaces that must have an exit now: those of the wanted taps inside pods, and those of the installed
/// taps, which still copy.
pub fn needed(
    wanted: &BTreeMap<Device, Tap>,
    installed: &BTreeMap<Device, ActualTap>,
    policy: &Policy,
) -> BTreeSet<NetnsId> {
    let is_inside = |tap: &&Tap| tap.is_inside();
    let wanted = wanted.values().filter(is_inside);
    let wanted = wanted.filter(|tap| needs_exit(tap, policy));
    let installed = installed.values().filter_map(|installed| installed.tap.as_ref()).filter(is_inside);
    let installed = installed.filter(|tap| tap.exit.is_some());
    wanted.chain(installed).map(|tap| tap.owner.netns).collect()
}

/// Takes back to the node's end what needs an exit that could not be made, so that at least the packets are mirrored that
/// pass there. What is inside already stays: its packets count as `target_down` until the exit is there again.
pub fn stay_without(
    taps: &mut BTreeMap<Device, Tap>,
    installed: &BTreeMap<Device, ActualTap>,
    policy: &Policy,
) {
    for (device, tap) in taps.iter_mut().filter(|(_, tap)| tap.pod_side.is_some() && tap.exit.is_none()) {
        let stands = installed.get(device).and_then(|installed| installed.tap.as_ref());
        let is_there = stands.is_some_and(|stands| stands.pod_side() == tap.pod_side());
        if needs_exit(tap, policy) && !is_there {
            tap.pod_side = None;
        }
    }
}

/// The changes that give these namespaces their exits, and take those of other pods away. The hub comes first, and
/// exits are made when it is there.
///
/// It is never deleted here: [`mirror_iface::left_behind`] deletes it when nothing names it any more, and the kernel
/// deletes the exits with it.
pub fn changes(needed: &BTreeSet<NetnsId>, links: &LinkSnapshot) -> Vec<LinkChange> {
    let mut changes = Vec::new();
    match hub(links) {
        None if links.by_name(HUB).is_some_and(is_half_made) => {
            changes.extend(links.by_name(HUB).map(|hub| LinkChange::Delete(hub.ifindex)));
        }
        None if !needed.is_empty() => {
            changes.push(LinkChange::CreateHub);
        }
        Some(hub) if !needed.is_empty() && !hub.up => changes.push(LinkChange::SetUp(hub.ifindex)),
        _ => {}
    }
    // Where not even loopback was seen, the namespace could not be read.
    let is_read = |pod: &&PodLinks| !pod.is_host && !pod.links.is_empty();
    for pod in links.pods.values().filter_map(|pod| pod.as_ref().ok()).filter(is_read) {
        let exit = pod.links.iter().find(|link| is_exit(link));
        match (exit, needed.contains(&pod.netns)) {
            (Some(exit), true) if !hub(links).is_some_and(|hub| is_sound(exit, hub)) => {
                // Half-made, or taken down or changed by a process of the pod.
                changes.push(LinkChange::DeleteExit(pod.netns));
            }
            (None, true) => {
                changes.extend(hub(links).map(|hub| LinkChange::CreateExit(pod.netns, hub.ifindex)));
            }
            (Some(_), false) => changes.push(LinkChange::DeleteExit(pod.netns)),
            (Some(_), true) | (None, false) => {}
        }
    }
    changes
}
