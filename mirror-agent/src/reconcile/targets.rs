//! The targets of a round: mirror interfaces, collectors, tunnels and streams.
//!
//! `mirror_iface`, `collector` and `tunnel` decide; this module calls them, logs and reports. The loop calls it.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use mirror_core::{
    collector,
    targets::{self, Standing, Targets},
    tunnel::{self, Blocked, Tunnel, TunnelDevice},
};
use tokio::time::Instant;

use super::Reconciler;
use crate::{
    dataplane::Dataplane,
    links::{LinkTable, PodNetns},
    mirror_iface,
    model::{
        Actual, Desired, DeviceTarget, LinkChange, LinkSnapshot, Pod, Target, TargetName, TargetResource,
    },
    pods::PodSource,
    report::Report,
    select::{Readers, Wanted},
    settings::Rate,
};

impl<P: PodSource, L: LinkTable, D: Dataplane> Reconciler<P, L, D> {
    /// Returns the pods whose devices must be read: the wanted ones, the collectors, and those that may have a relay
    /// device.
    pub(super) fn pods_to_read(&self, wanted: &[Wanted<'_>], pods: &[Pod]) -> Vec<PodNetns> {
        let mut nics = BTreeMap::<_, BTreeSet<String>>::new();
        for wanted in wanted {
            let names = wanted.expected_nics().map(|(_, name)| name.to_owned());
            nics.entry(&wanted.pod.id.uid).or_default().extend(names);
        }
        let wanted = wanted.iter().map(|wanted| wanted.pod);
        // A pod without mirrors may still have a relay device, which must be deleted.
        let with_exits = pods.iter().filter(|pod| self.exits.may_be_in(&pod.id.uid));
        let collectors = self.policy.collectors().flat_map(|(_, nic)| collector::of(nic, pods));
        let (mut uids, mut to_read) = (BTreeSet::new(), Vec::new());
        for pod in wanted.chain(collectors).chain(with_exits).filter(|pod| !pod.host_network) {
            if uids.insert(&pod.id.uid) {
                to_read.push(PodNetns {
                    uid: pod.id.uid.clone(),
                    path: pod.netns.clone(),
                    nics: nics.remove(&pod.id.uid).unwrap_or_default(),
                });
            }
        }
        to_read
    }

    /// Sets the targets to those that the agent was started with, and the MirrorTargets.
    pub(super) fn take_listed_targets(&mut self, resources: &[TargetResource]) {
        self.follow_targets(targets::join(&self.own_targets, resources));
    }

    /// Sets the targets, before there is a list, to those that the agent was started with, and the installed ones.
    pub(super) fn take_installed_targets(&mut self, actual: &Actual) {
        let destination = |target: &Target| target.device().map(|device| device.destination.clone());
        let installed = actual.targets.iter().filter_map(|(name, target)| Some((name, destination(target)?)));
        let all = targets::until_listed(&self.own_targets, installed);
        self.follow_targets(Targets { all, ..Targets::default() });
    }

    fn follow_targets(&mut self, Targets { all, users, max_rates, refused }: Targets) {
        self.told.refused_targets(&refused);
        self.mirrors.follow(&all);
        self.links.follow(&all);
        (self.policy.targets, self.policy.users, self.policy.refused_targets) = (all, users, refused);
        self.max_rates = max_rates;
    }

    /// Returns the targets with their present state. Adds to `expected` the UIDs of collectors that are found by their
    /// processes, and have no process or no NIC yet.
    pub(super) fn targets(
        &mut self,
        pods: Option<&[Pod]>,
        links: &LinkSnapshot,
        actual: &Actual,
        readers: &Readers,
        expected: &mut BTreeSet<String>,
        report: &mut Report,
    ) -> BTreeMap<TargetName, Target> {
        let (mut targets, mut reached) = (BTreeMap::new(), Vec::new());
        report.unreached.clear();
        for (name, mirror) in self.mirrors.iter() {
            let link = links.by_name(mirror.name());
            let refusal = link.and_then(mirror_iface::refusal);
            report.unreached.extend(refusal.map(|why| (name.clone(), why)));
            let mut target = mirror.target(links);
            self.told.target(name, &target);
            self.told.fixed_offloads(&target, mirror.fixed_offloads(links));
            self.told.loses_order(&target, mirror.loses_order(links));
            // Taps of an earlier agent must not be given a target that leads back to them.
            let entangled = links.by_name(mirror.name()).and_then(|mirror| {
                let tapped = actual.taps.keys().filter(|device| device.is_on_node());
                let tapped = tapped.filter_map(|device| links.host.get(&device.ifindex));
                tapped.filter_map(|link| mirror_iface::conflict(mirror, link, links)).next()
            });
            if let (false, Some(conflict)) = (report.is_listed, entangled) {
                report.failures.insert(format!(
                    "{conflict}, which is tapped; nothing is copied to target {name} until there is a list of pods"
                ));
                target.ifindex = None;
            }
            targets.insert(name.clone(), target);
        }
        for (name, nic) in self.policy.collectors() {
            let (target, absent) = match pods {
                Some(pods) => collector::target(nic, pods, links),
                None => {
                    let before = actual.targets.get(name).and_then(Target::device);
                    collector::until_listed(nic, before, links)
                }
            };
            let is_passing = absent.as_ref().is_some_and(collector::Absent::is_passing);
            if is_passing {
                let pods = collector::of(nic, pods.unwrap_or_default()).filter(|pod| pod.netns.is_none());
                expected.extend(pods.map(|pod| pod.id.uid.clone()));
            }
            targets.insert(name.clone(), target);
            reached.push((name, absent.map(|absent| absent.to_string()), is_passing));
        }
        for (name, tunnel) in self.policy.tunnels() {
            let (target, blocked) = tunnel::target(tunnel, links);
            let why = blocked.map(|blocked| match (&blocked, self.not_made.why(tunnel)) {
                (Blocked::NoDevice(_), Some(why)) => why,
                _ => blocked.to_string(),
            });
            targets.insert(name.clone(), target);
            reached.push((name, why, false));
        }
        for (name, why, is_passing) in reached {
            self.told.reached(name, &targets[name], why.as_deref(), is_passing);
            report.unreached.extend(why.map(|why| (name.clone(), why)));
        }
        // Other nodes have the same tunnels, and send packets through them to this one.
        let has_tunnels = self.policy.tunnels().next().is_some();
        let devices = targets.into_iter().map(|(name, target)| {
            let ceiling = match pods {
                Some(_) => self.max_rates.get(&name).map(Rate::limits),
                // Until there is a list, the ceiling of an earlier agent stays in force.
                None => actual.targets.get(&name).and_then(Target::device).map(|before| before.ceiling),
            };
            let guarded = target.guarded || has_tunnels;
            let ceiling = ceiling.unwrap_or_default();
            (name, Target::Device(DeviceTarget { guarded, ceiling, ..target }))
        });
        // A stream without a reader is no problem, so it is neither logged nor reported.
        let ring = |name| readers.streams.get(name).copied();
        let streams = self.policy.streams().map(|name| (name.clone(), Target::Stream(ring(name))));
        let captures = readers.captures.iter().map(|of| (of.target(), Target::Stream(Some(of.ring))));
        devices.chain(streams).chain(captures).collect()
    }

    /// Returns the state of each MirrorTarget on this node, at the end of a round that knows which targets are down.
    pub(super) fn standing_targets(
        &self,
        resources: &[TargetResource],
        desired: &Desired,
        report: &Report,
    ) -> Vec<Standing> {
        if !report.is_listed {
            return Vec::new();
        }
        targets::standing(resources, &self.policy.refused_targets, &desired.targets, &report.down)
    }
}

/// The delay before another attempt to create the device of a tunnel.
const AGAIN: Duration = Duration::from_secs(30);

/// The devices of tunnels that could not be created, with the time and the error.
///
/// The error is a reason of their targets, and not a failure of the round, so other targets do not wait. Each attempt
/// causes events, so the next attempt has its own delay.
#[derive(Default)]
pub(super) struct NotMade(BTreeMap<TunnelDevice, (Instant, String)>);

impl NotMade {
    /// Returns the changes without devices that are not due yet. A device is deleted only to be created again.
    pub(super) fn leave_out(&self, changes: Vec<LinkChange>) -> Vec<LinkChange> {
        let is_due = |change: &LinkChange| match change {
            LinkChange::CreateTunnel(device) => {
                self.0.get(device).is_none_or(|(at, _)| at.elapsed() >= AGAIN)
            }
            _ => true,
        };
        changes.into_iter().filter(is_due).collect()
    }

    /// Records whether a device could be created.
    pub(super) fn note(&mut self, device: TunnelDevice, done: Result<(), String>) {
        match done {
            Ok(()) => drop(self.0.remove(&device)),
            Err(why) => drop(self.0.insert(device, (Instant::now(), why))),
        }
    }

    /// Returns the error for a tunnel's device that could not be created.
    fn why(&self, tunnel: &Tunnel) -> Option<String> {
        self.0.get(&tunnel.device()).map(|(_, why)| why.clone())
    }
}
