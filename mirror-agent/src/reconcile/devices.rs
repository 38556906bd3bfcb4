//! The devices that mirroring needs: mirror interfaces, the devices of tunnels, the relay hub, and the relay devices of
//! pods.
//!
//! `mirror_core::{mirror_iface, tunnel, exit}` decide which devices to create, change and delete. This module carries
//! that out and remembers the results. The loop calls it.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use mirror_core::{
    exit,
    tunnel::{self, Tunnel, TunnelDevice},
};
use tokio::time::Instant;

use super::{Reconciler, look::Node};
use crate::{
    kernel::{dataplane::Dataplane, links::LinkTable},
    mirror_iface,
    model::{Actual, Device, LinkChange, LinkSnapshot, NetnsId, Pod, Tap},
    select::{Policy, Skipped, Why},
    sources::PodSource,
};

/// The delay before another attempt to create a device after a failure.
const AGAIN: Duration = Duration::from_secs(30);
/// The shortest interval between creating a device twice: a process of a pod can delete its relay device as fast as the
/// agent creates it.
const REST: Duration = Duration::from_secs(1);

/// The devices whose creation has a delay of its own: the error is a reason of the pods or targets concerned, and not a
/// failure of the round, so other pods do not wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Made {
    Tunnel(TunnelDevice),
    Hub,
    Relay(NetnsId),
}

/// The results of earlier rounds.
#[derive(Default)]
pub(super) struct Devices {
    /// The UIDs of pods that have a relay device, or a tap inside.
    pods: BTreeSet<String>,
    /// The UIDs of pods of the first list whose devices were not read yet. An agent that ended between two steps may
    /// have left a relay device in any pod, and no tap shows in which. `None` before the first list.
    unread: Option<BTreeSet<String>>,
    /// The time and the result of the last attempt to create each device.
    tried: BTreeMap<Made, (Instant, Result<(), String>)>,
    /// The errors for devices that could not be deleted, and for settings that devices of other software never take:
    /// an MTU above the device's maximum, a VLAN whose lower device is down. They affect no other device.
    left: BTreeSet<String>,
    /// The longest wait for the next round, if an action is due without an event.
    wait: Option<Duration>,
}

impl Devices {
    /// Processes the first list of pods. Returns whether there are more pods to read now.
    pub(super) fn begin(&mut self, pods: &[Pod], links: &LinkSnapshot) -> bool {
        if self.unread.is_some() {
            return false;
        }
        // If there is no relay hub, the kernel has deleted all relay devices with it.
        let may_be_left = exit::hub(links).is_some();
        let is_unread = |pod: &&Pod| !pod.host_network && !links.pods.contains_key(&pod.id.uid);
        let unread = pods.iter().filter(is_unread).filter(|_| may_be_left);
        let unread: BTreeSet<_> = unread.map(|pod| pod.id.uid.clone()).collect();
        !self.unread.insert(unread).is_empty()
    }

    /// Records the state that a round has found.
    pub(super) fn note(&mut self, links: &LinkSnapshot, actual: &Actual) {
        let with_exit = exit::pods_with_exit(links);
        let taps = actual.taps.values().filter_map(|installed| installed.tap.as_ref());
        let tapped =
            taps.filter(|tap| tap.head.is_inside()).filter_map(|tap| Some(&tap.head.owner.pod.as_ref()?.uid));
        self.pods = with_exit.chain(tapped).cloned().collect();
        let is_read =
            |uid: &String| matches!(links.pods.get(uid), Some(Ok(inside)) if inside.stale.is_none());
        if let Some(unread) = &mut self.unread {
            unread.retain(|uid| exit::hub(links).is_some() && !is_read(uid));
        }
    }

    /// Whether a pod may have a relay device.
    pub(super) fn may_be_in(&self, uid: &str) -> bool {
        self.pods.contains(uid) || self.unread.as_ref().is_some_and(|unread| unread.contains(uid))
    }

    /// The longest wait for the next round, while an action is due.
    pub(super) fn wait(&self) -> Option<Duration> {
        self.wait
    }

    /// The errors for devices that could not be deleted or set up. They affect no other device.
    pub(super) fn left(&self) -> &BTreeSet<String> {
        &self.left
    }

    /// Returns the error for a tunnel's device that could not be created.
    pub(super) fn why_no_tunnel(&self, tunnel: &Tunnel) -> Option<&String> {
        self.error(Made::Tunnel(tunnel.device()))
    }

    /// Returns the wanted taps whose copies cannot leave their pod.
    pub(super) fn without_relay(&self, wanted: &BTreeMap<Device, Tap>, policy: &Policy) -> Vec<Skipped> {
        let taps = wanted.values().filter(|tap| tap.head.is_inside() && tap.head.exit.is_none());
        let missing = taps.filter_map(|tap| {
            let why = self.error(Made::Hub).or_else(|| self.error(Made::Relay(tap.head.owner.netns)))?;
            let why = exit::needs_exit(tap, policy).then(|| Why::NoRelayDevice(why.clone()))?;
            Some(Skipped::of_nic(&tap.head.owner, None, why))
        });
        missing.collect()
    }

    fn error(&self, device: Made) -> Option<&String> {
        self.tried.get(&device)?.1.as_ref().err()
    }

    /// Removes the changes that are not due yet, and forgets the attempts at devices that are no longer `needed`.
    fn keep_due(&mut self, changes: &mut Vec<LinkChange>, needed: &BTreeSet<Made>, links: &LinkSnapshot) {
        self.tried.retain(|device, _| needed.contains(device));
        let wait = |change: &LinkChange| {
            let (at, made) = self.tried.get(&made(change, links)?)?;
            let wait = if made.is_ok() { REST } else { AGAIN };
            wait.checked_sub(at.elapsed()).filter(|wait| *wait > Duration::ZERO)
        };
        self.wait = changes.iter().filter_map(wait).min();
        changes.retain(|change| wait(change).is_none());
        // If the deletion fails, no event shows when it can succeed.
        if changes.iter().any(|change| matches!(change, LinkChange::DeleteExit(_))) {
            self.wait = Some(REST.min(self.wait.unwrap_or(REST)));
        }
    }
}

/// Returns the device with a delay of its own that a change creates or brings up.
fn made(change: &LinkChange, links: &LinkSnapshot) -> Option<Made> {
    match change {
        LinkChange::CreateTunnel(device) => Some(Made::Tunnel(*device)),
        LinkChange::CreateHub => Some(Made::Hub),
        LinkChange::SetUp(ifindex) if exit::hub(links).is_some_and(|hub| hub.ifindex == *ifindex) => {
            Some(Made::Hub)
        }
        LinkChange::CreateExit(netns, _) => Some(Made::Relay(*netns)),
        _ => None,
    }
}

impl<P: PodSource, L: LinkTable, D: Dataplane> Reconciler<P, L, D> {
    /// Creates, changes and deletes devices where necessary. Returns whether a device has changed, and the errors that
    /// concern more than a single pod or target. Without a list, the pods and the MirrorTargets are unknown, so nothing
    /// is deleted, and no pod changes.
    pub(super) async fn change_devices(
        &mut self,
        Node { links, actual, .. }: &Node,
        taps: &BTreeMap<Device, Tap>,
        is_listed: bool,
    ) -> (bool, BTreeSet<String>) {
        let needed = exit::needed(taps, &actual.taps, &self.memory.policy);
        let mut changes = Vec::new();
        if is_listed {
            let mut names = self.memory.policy.own_devices();
            if !needed.is_empty() || exit::pods_with_exit(links).next().is_some() {
                names.insert(exit::HUB.to_owned());
            }
            let names = names.iter().map(String::as_str).collect();
            let left_behind = mirror_iface::left_behind(&names, links);
            // Both delete a relay hub that is half made.
            let of_relays = exit::changes(&needed, links).into_iter();
            changes.extend(of_relays.filter(|change| !left_behind.contains(change)));
            changes.extend(left_behind);
        }
        changes.extend(self.memory.mirrors.changes(links));
        changes.extend(tunnel::changes(self.memory.policy.tunnels(), links));
        let relays = needed.iter().map(|netns| Made::Relay(*netns));
        let tunnels = self.memory.policy.tunnels().map(|(_, tunnel)| Made::Tunnel(tunnel.device()));
        let hub = (!needed.is_empty()).then_some(Made::Hub);
        let with_delay = relays.chain(tunnels).chain(hub).collect();
        self.memory.devices.keep_due(&mut changes, &with_delay, links);
        self.memory.devices.left.clear();
        let (mut has_changed, mut failures) = (false, BTreeSet::new());
        for change in &changes {
            let done = self.links.apply(change).await.map_err(|error| format!("{error:#}"));
            has_changed |= done.is_ok();
            match (made(change, links), change, done) {
                (Some(device), _, done) => {
                    self.memory.devices.tried.insert(device, (Instant::now(), done));
                }
                (
                    None,
                    LinkChange::Delete(_)
                    | LinkChange::DeleteExit(_)
                    | LinkChange::SetMtu(..)
                    | LinkChange::SetUp(_)
                    | LinkChange::SetOffloads(_, true),
                    Err(error),
                ) => {
                    self.memory.devices.left.insert(error);
                }
                (None, _, Err(error)) => {
                    failures.insert(error);
                }
                (None, _, Ok(())) => {}
            }
        }
        (has_changed, failures)
    }
}
