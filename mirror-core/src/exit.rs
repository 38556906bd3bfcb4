//! Relay devices, through which copies leave the network namespaces of pods, and the relay hub that they share.
//!
//! A tap inside a pod can clone packets only to a device of its own namespace. So a pod with such a tap gets a relay
//! device (`exit`), a private macvlan on the relay hub (`hub`). The hub is a device of the node, where the program
//! `hub` passes the copies to their targets. A stream needs no relay device.
//!
//! Pure: takes taps and devices, returns changes. The reconcile loop applies the changes through `links`; `select`
//! looks up the relay device of a pod.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    destination::Destination,
    mirror_iface,
    model::{
        ActualTap, Device, FIRST_IFINDEX, IfIndex, Link, LinkChange, LinkKind, LinkSnapshot, NetnsId,
        PodLinks, Session, Tap,
    },
    select::Policy,
};

/// The name of the relay hub.
pub const HUB: &str = "podmirror-hub";
/// The name of a relay device, for people who look into a pod.
pub const NAME: &str = "podmirror";
/// The index of a relay device in its namespace.
///
/// No other device has such a high index, because the kernel counts from 1. If a NIC is moved to another namespace
/// together with its programs, a clone there finds no device of this index.
pub const IFINDEX: IfIndex = IfIndex(FIRST_IFINDEX.0 - 1);
/// MTU in bytes of the relay hub and the relay devices: the largest possible, so that every packet fits.
pub const MTU: u32 = 65535;

/// Whether a device inside a pod is a relay device. The name is not compared, because root in the pod can change it.
/// The lower device of a pod's own macvlan is inside the pod.
pub fn is_exit(link: &Link) -> bool {
    let is_macvlan = matches!(&link.kind, LinkKind::Other(kind) if kind == "macvlan");
    link.ifindex == IFINDEX && is_macvlan && link.peer.is_some_and(|lower| lower.nsid.is_some())
}

/// The relay hub.
pub fn hub(links: &LinkSnapshot) -> Option<&Link> {
    links.by_name(HUB).filter(|link| mirror_iface::is_ours(link))
}

/// The relay device of a pod, if it exists and is unchanged.
pub fn of(pod: &PodLinks, links: &LinkSnapshot) -> Option<IfIndex> {
    let hub = hub(links)?;
    let exit = pod.links.iter().find(|link| is_exit(link))?;
    is_sound(exit, hub).then_some(exit.ifindex)
}

/// The UIDs of the pods that have a relay device, in any state.
pub fn pods_with_exit(links: &LinkSnapshot) -> impl Iterator<Item = &String> {
    let has_exit = |inside: &PodLinks| inside.links.iter().any(is_exit);
    let pods = links.pods.iter();
    pods.filter(move |(_, inside)| inside.as_ref().is_ok_and(has_exit)).map(|(uid, _)| uid)
}

/// Whether a relay device leads to the relay hub and to no other relay device, has no queue, and accepts packets of any
/// length. Root in the pod can change all of this. A queue can hold, change or repeat the copies.
fn is_sound(exit: &Link, hub: &Link) -> bool {
    let leads_to_hub = exit.peer.is_some_and(|lower| lower.ifindex == hub.ifindex.0);
    exit.up && exit.mtu == MTU && exit.is_private && exit.queueless && leads_to_hub
}

/// Whether copies of a tap inside a pod leave the pod through its relay device. The target of a capture is not in the
/// policy.
pub fn needs_exit(tap: &Tap, policy: &Policy) -> bool {
    let leaves =
        |session: &Session| policy.targets.get(&session.target).is_some_and(|to| *to != Destination::Stream);
    tap.sessions.values().any(leaves)
}

/// The network namespaces that need a relay device now: those of wanted taps inside pods, and those of installed taps,
/// which still copy.
pub fn needed(
    wanted: &BTreeMap<Device, Tap>,
    installed: &BTreeMap<Device, ActualTap>,
    policy: &Policy,
) -> BTreeSet<NetnsId> {
    let is_inside = |tap: &&Tap| tap.head.is_inside();
    let wanted = wanted.values().filter(is_inside);
    let wanted = wanted.filter(|tap| needs_exit(tap, policy));
    let installed = installed.values().filter_map(|installed| installed.tap.as_ref()).filter(is_inside);
    let installed = installed.filter(|tap| tap.head.exit.is_some());
    wanted.chain(installed).map(|tap| tap.head.owner.netns).collect()
}

/// Falls back to the node side for taps whose relay device could not be created, so that at least the packets there are
/// mirrored. A pod side that is already installed is kept: its packets count as `target_down` until the relay device
/// exists again.
pub fn stay_without(
    taps: &mut BTreeMap<Device, Tap>,
    installed: &BTreeMap<Device, ActualTap>,
    policy: &Policy,
) {
    for (device, tap) in
        taps.iter_mut().filter(|(_, tap)| tap.head.pod_side.is_some() && tap.head.exit.is_none())
    {
        let stands = installed.get(device).and_then(|installed| installed.tap.as_ref());
        let is_there = stands.is_some_and(|stands| stands.head.pod_side() == tap.head.pod_side());
        if needs_exit(tap, policy) && !is_there {
            tap.head.pod_side = None;
        }
    }
}

/// Creates relay devices in these namespaces, and deletes those of other pods. The relay hub comes first, and relay
/// devices follow when it exists.
///
/// The hub is never deleted here: [`mirror_iface::left_behind`] deletes it when it is no longer needed, and the kernel
/// deletes the relay devices with it.
pub fn changes(needed: &BTreeSet<NetnsId>, links: &LinkSnapshot) -> Vec<LinkChange> {
    let mut changes = Vec::new();
    let half_made = links.by_name(HUB).filter(|link| mirror_iface::is_half_made(link));
    changes.extend(half_made.map(|link| LinkChange::Delete(link.ifindex)));
    match hub(links) {
        None if !needed.is_empty() => {
            changes.push(LinkChange::CreateHub);
        }
        Some(hub) if !needed.is_empty() && !hub.up => changes.push(LinkChange::SetUp(hub.ifindex)),
        _ => {}
    }
    // If not even loopback is in the list, the namespace could not be read.
    let is_read = |pod: &&PodLinks| !pod.is_host && !pod.links.is_empty();
    for pod in links.pods.values().filter_map(|pod| pod.as_ref().ok()).filter(is_read) {
        let exit = pod.links.iter().find(|link| is_exit(link));
        match (exit, needed.contains(&pod.netns)) {
            (Some(exit), true) if !hub(links).is_some_and(|hub| is_sound(exit, hub)) => {
                // The device is incomplete, or a process of the pod has changed it or taken it down.
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
