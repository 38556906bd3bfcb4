//! The targets of a round: mirror interfaces, collectors, tunnels and streams.
//!
//! `mirror_iface`, `collector` and `tunnel` decide; this module calls them, logs and reports. Pure but for the log.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    look::Node,
    memory::{Inputs, Memory},
};
use crate::{
    mirror_iface,
    model::{Actual, DeviceTarget, Target, TargetName, TargetResource},
    report::Report,
    settings::Rate,
};
use mirror_core::{
    collector,
    destination::Destination,
    targets::{self, Targets},
    tunnel,
};

impl Memory {
    /// Sets the targets to those that the agent was started with, and the MirrorTargets. Returns all of them.
    pub(super) fn take_listed_targets(
        &mut self,
        resources: &[TargetResource],
    ) -> &BTreeMap<TargetName, Destination> {
        self.follow_targets(targets::join(&self.own_targets, resources))
    }

    /// Sets the targets, before there is a list, to those that the agent was started with, and the installed ones.
    /// Returns all of them.
    pub(super) fn take_installed_targets(&mut self, actual: &Actual) -> &BTreeMap<TargetName, Destination> {
        let destination = |target: &Target| target.device().map(|device| device.destination.clone());
        let installed = actual.targets.iter().filter_map(|(name, target)| Some((name, destination(target)?)));
        let all = targets::until_listed(&self.own_targets, installed);
        self.follow_targets(Targets { all, ..Targets::default() })
    }

    fn follow_targets(
        &mut self,
        Targets { all, users, max_rates, refused }: Targets,
    ) -> &BTreeMap<TargetName, Destination> {
        self.log.refused_targets(&refused);
        self.mirrors.follow(&all);
        (self.policy.targets, self.policy.users, self.policy.refused_targets) = (all, users, refused);
        self.max_rates = max_rates;
        &self.policy.targets
    }

    /// Returns the targets with their present state. Adds to `expected` the UIDs of collectors that are found by their
    /// processes, and have no process or no NIC yet.
    pub(super) fn targets(
        &mut self,
        &Inputs { listed: pods, readers, .. }: &Inputs<'_>,
        Node { links, actual, .. }: &Node,
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
            self.log.target(name, &target);
            self.log.fixed_offloads(&target, mirror.fixed_offloads(links));
            self.log.loses_order(&target, mirror.loses_order(links));
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
            let (why, is_passing) = absent.unzip();
            let is_passing = is_passing.unwrap_or_default();
            if is_passing {
                let pods = collector::of(nic, pods.unwrap_or_default()).filter(|pod| pod.netns.is_none());
                expected.extend(pods.map(|pod| pod.id.uid.clone()));
            }
            targets.insert(name.clone(), target);
            reached.push((name, why, is_passing));
        }
        for (name, tunnel) in self.policy.tunnels() {
            let (target, why) = tunnel::target(tunnel, links, self.devices.why_no_tunnel(tunnel));
            targets.insert(name.clone(), target);
            reached.push((name, why, false));
        }
        for (name, why, is_passing) in reached {
            self.log.reached(name, &targets[name], why.as_deref(), is_passing);
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
}
