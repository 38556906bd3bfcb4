//! The log of the loop: each change is logged once, when it happens.
//!
//! This module only logs. The loop calls it.

use std::collections::{BTreeMap, BTreeSet};

use tracing::{error, info, warn};

use crate::{
    model::{Actual, Desired, Device, DeviceTarget, Ended, IfIndex, MirrorId, Op, TargetName},
    select::{BadAnnotation, Skipped},
};

/// The states that have been logged, so that each change is logged once.
#[derive(Default)]
pub(super) struct LogDedup {
    bad: BTreeSet<BadAnnotation>,
    skipped: BTreeSet<Skipped>,
    failures: BTreeSet<String>,
    targets: BTreeMap<TargetName, DeviceTarget>,
    refused_targets: BTreeMap<TargetName, String>,
    /// The collectors and tunnels, with the reason if nothing can be copied there.
    reached: BTreeMap<TargetName, (Option<IfIndex>, Option<String>)>,
    fixed_offloads: BTreeMap<String, BTreeSet<String>>,
    /// The mirror interfaces on which copies can overtake each other.
    without_order: BTreeSet<String>,
    ended: BTreeSet<(Device, MirrorId, Ended)>,
}

impl LogDedup {
    pub(super) fn failures(&mut self, failures: BTreeSet<String>) {
        for failure in failures.difference(&self.failures) {
            error!(error = failure, "failed; the agent retries");
        }
        self.failures = failures;
    }

    pub(super) fn bad(&mut self, bad: &[BadAnnotation]) -> BTreeSet<BadAnnotation> {
        let bad: BTreeSet<_> = bad.iter().cloned().collect();
        for bad in bad.difference(&self.bad) {
            let BadAnnotation { pod, key, value, .. } = bad;
            warn!(%pod, key, value, "{bad}");
        }
        self.bad.clone_from(&bad);
        bad
    }

    pub(super) fn skipped(&mut self, skipped: impl Iterator<Item = Skipped>) -> BTreeSet<Skipped> {
        let skipped: BTreeSet<_> = skipped.collect();
        for of @ Skipped { pod, nic, mirror, why } in skipped.difference(&self.skipped) {
            let pod = pod.as_ref().map(tracing::field::display);
            let mirror = mirror.as_ref().map(tracing::field::display);
            // The program that requested a capture gets its reasons.
            if why.is_passing() || of.is_of_capture() {
                info!(pod, nic, mirror, reason = why.name(), "{}: {why}", why.effect());
            } else {
                warn!(pod, nic, mirror, reason = why.name(), "{}: {why}", why.effect());
            }
        }
        self.skipped.clone_from(&skipped);
        skipped
    }

    pub(super) fn ended(&mut self, actual: &Actual) {
        let mut ended = BTreeSet::new();
        for (device, installed) in &actual.taps {
            let Some(tap) = &installed.tap else { continue };
            for (mirror, budget) in &installed.ended {
                let end = (*device, mirror.clone(), *budget);
                if !self.ended.contains(&end) {
                    let pod = tap.head.owner.pod.as_ref().map(tracing::field::display);
                    let (name, budget) = (&tap.head.owner.device, budget.name());
                    info!(pod, ifindex = %device, device = name, %mirror, budget, "the mirror has ended: its budget is used up");
                }
                ended.insert(end);
            }
        }
        self.ended = ended;
    }

    pub(super) fn refused_targets(&mut self, refused: &BTreeMap<TargetName, String>) {
        for (name, why) in refused {
            if self.refused_targets.get(name) != Some(why) {
                warn!(target = %name, "the MirrorTarget is refused: {why}");
            }
        }
        self.refused_targets.clone_from(refused);
    }

    pub(super) fn target(&mut self, name: &TargetName, target: &DeviceTarget) {
        if self.targets.get(name) == Some(target) {
            return;
        }
        let DeviceTarget { device, ifindex, up, .. } = target;
        let target_name = tracing::field::display(name);
        match ifindex {
            None => {
                warn!(
                    mirror_iface = device,
                    target = target_name,
                    "the mirror interface no longer exists; nothing is copied until it exists again"
                )
            }
            Some(ifindex) if *up => {
                info!(mirror_iface = device, target = target_name, %ifindex, "the mirror interface is up")
            }
            Some(ifindex) => {
                warn!(mirror_iface = device, target = target_name, %ifindex, "the mirror interface is down; nothing is copied until it is up");
            }
        }
        self.targets.insert(name.clone(), target.clone());
    }

    /// Logs the state of a collector or a tunnel: the copies that it accepts, or the reason why it accepts none.
    pub(super) fn reached(
        &mut self,
        name: &TargetName,
        target: &DeviceTarget,
        why: Option<&str>,
        is_passing: bool,
    ) {
        let now = (target.ifindex, why.map(str::to_owned));
        if self.reached.get(name) == Some(&now) {
            return;
        }
        let DeviceTarget { destination, device, ifindex, room, .. } = target;
        let ifindex = ifindex.map(tracing::field::display);
        match why {
            None => info!(target = %name, %destination, device, ifindex, room, "the target is up"),
            Some(why) if is_passing => {
                info!(target = %name, %destination, "nothing is copied to the target yet: {why}")
            }
            Some(why) => warn!(target = %name, %destination, "nothing is copied to the target: {why}"),
        }
        self.reached.insert(name.clone(), now);
    }

    pub(super) fn fixed_offloads(&mut self, target: &DeviceTarget, fixed: Option<&BTreeSet<String>>) {
        let fixed = fixed.cloned().unwrap_or_default();
        let told = self.fixed_offloads.entry(target.device.clone()).or_default();
        if !fixed.is_subset(told) {
            let offloads = fixed.iter().map(String::as_str).collect::<Vec<_>>().join(" ");
            warn!(
                mirror_iface = target.device,
                offloads,
                "the mirror interface cannot disable these offloads; copies that need them are not changed"
            );
        }
        *told = fixed;
    }

    pub(super) fn loses_order(&mut self, target: &DeviceTarget, loses_order: bool) {
        let device = &target.device;
        if !loses_order {
            self.without_order.remove(device);
        } else if self.without_order.insert(device.clone()) {
            warn!(
                mirror_iface = device,
                "copies of a connection can be reordered: other software created the mirror interface, and it has no \
                 queue; add one: tc qdisc add dev {device} root pfifo limit 1000"
            );
        }
    }
}

/// Logs an op with an effect that users can see.
pub(super) fn log_op(op: &Op, desired: &Desired, actual: &Actual) {
    let owner = |device| Some(&actual.taps.get(device)?.tap.as_ref()?.head.owner);
    match op {
        Op::AddSession(device, mirror, session) | Op::ChangeSession(device, mirror, session) => {
            let owner = desired.taps.get(device).map(|tap| &tap.head.owner);
            let pod = owner.and_then(|owner| owner.pod.as_ref()).map(tracing::field::display);
            let (name, nic) = (owner.map(|owner| &owner.device), owner.map(|owner| &owner.nic));
            let network = owner.and_then(|owner| owner.network.as_ref());
            let (direction, target) = (session.directions.name(), &session.target);
            info!(pod, ifindex = %device, device = name, nic, network, %mirror, %target, direction, "mirroring");
        }
        Op::RemoveTap(device) => {
            let pod = owner(device).and_then(|owner| owner.pod.as_ref()).map(tracing::field::display);
            let name = owner(device).map(|owner| &owner.device);
            info!(pod, ifindex = %device, device = name, "no longer mirroring");
        }
        Op::RemoveSession(device, mirror) => {
            let pod = owner(device).and_then(|owner| owner.pod.as_ref()).map(tracing::field::display);
            info!(pod, ifindex = %device, %mirror, "no longer mirroring");
        }
        Op::SetTarget(..)
        | Op::RemoveTarget(_)
        | Op::SetCeilings(_)
        | Op::PutTap(..)
        | Op::Attach(..)
        | Op::Detach(..) => {}
    }
}
