//! What the loop logs: once a change, and each thing when it is so.
//!
//! Logs, and decides nothing. The loop calls it.

use std::collections::BTreeSet;

use tracing::{error, info, warn};

use crate::{
    model::{Actual, Ended, IfIndex, Op, Target},
    select::{BadAnnotation, Skipped},
};

/// What has been logged, so that it is logged once a change.
#[derive(Default)]
pub(super) struct Told {
    bad: BTreeSet<BadAnnotation>,
    skipped: BTreeSet<Skipped>,
    failures: BTreeSet<String>,
    target: Option<Target>,
    fixed_offloads: BTreeSet<String>,
    /// The mirror interfaces on which copies can overtake each other.
    without_order: BTreeSet<String>,
    ended: BTreeSet<(IfIndex, Ended)>,
}

impl Told {
    pub(super) fn failures(&mut self, failures: BTreeSet<String>) {
        for failure in failures.difference(&self.failures) {
            error!(error = failure, "failed; it will be tried again");
        }
        self.failures = failures;
    }

    pub(super) fn bad(&mut self, bad: Vec<BadAnnotation>) -> BTreeSet<BadAnnotation> {
        let bad: BTreeSet<_> = bad.into_iter().collect();
        for bad in bad.difference(&self.bad) {
            let BadAnnotation { pod, key, value, .. } = bad;
            warn!(%pod, key, value, "{bad}");
        }
        self.bad.clone_from(&bad);
        bad
    }

    pub(super) fn skipped(&mut self, skipped: impl Iterator<Item = Skipped>) -> BTreeSet<Skipped> {
        let skipped: BTreeSet<_> = skipped.collect();
        for Skipped { pod, nic, why } in skipped.difference(&self.skipped) {
            let pod = pod.as_ref().map(tracing::field::display);
            if why.is_passing() {
                info!(pod, nic, reason = why.name(), "not mirrored yet: {why}");
            } else {
                warn!(pod, nic, reason = why.name(), "not mirrored: {why}");
            }
        }
        self.skipped.clone_from(&skipped);
        skipped
    }

    pub(super) fn ended(&mut self, actual: &Actual) {
        let mut ended = BTreeSet::new();
        for (ifindex, installed) in &actual.taps {
            let (Some(tap), Some(budget)) = (&installed.tap, installed.ended) else { continue };
            ended.insert((*ifindex, budget));
            if !self.ended.contains(&(*ifindex, budget)) {
                let pod = tap.owner.pod.as_ref().map(tracing::field::display);
                info!(pod, %ifindex, device = tap.owner.device, budget = budget.name(), "the mirror has ended: its budget is used up");
            }
        }
        self.ended = ended;
    }

    pub(super) fn target(&mut self, target: &Target) {
        if self.told_target(target) {
            return;
        }
        let Target { name, ifindex, up, .. } = target;
        match ifindex {
            None => {
                warn!(mirror_iface = name, "the mirror interface is gone; nothing is copied until it is back")
            }
            Some(ifindex) if *up => info!(mirror_iface = name, %ifindex, "the mirror interface takes copies"),
            Some(ifindex) => {
                warn!(mirror_iface = name, %ifindex, "the mirror interface is down; nothing is copied until it is up");
            }
        }
        self.target = Some(target.clone());
    }

    pub(super) fn fixed_offloads(&mut self, target: &Target, fixed: Option<&BTreeSet<String>>) {
        let fixed = fixed.cloned().unwrap_or_default();
        if !fixed.is_subset(&self.fixed_offloads) {
            let offloads = fixed.iter().map(String::as_str).collect::<Vec<_>>().join(" ");
            warn!(
                mirror_iface = target.name,
                offloads,
                "the mirror interface cannot switch these offloads off; copies that need them stay as they are"
            );
        }
        self.fixed_offloads = fixed;
    }

    pub(super) fn loses_order(&mut self, target: &Target, loses_order: bool) {
        if !loses_order {
            self.without_order.remove(&target.name);
        } else if self.without_order.insert(target.name.clone()) {
            warn!(
                mirror_iface = target.name,
                "copies of one connection can overtake each other here: the mirror interface is not ours and has no \
                 queue; give it one: tc qdisc add dev {} root pfifo limit 1000",
                target.name
            );
        }
    }

    fn told_target(&self, target: &Target) -> bool {
        self.target.as_ref() == Some(target)
    }
}

/// Logs an op that changed something for people.
pub(super) fn tell_op(op: &Op, actual: &Actual) {
    match op {
        Op::PutTap(ifindex, tap) => {
            let pod = tap.owner.pod.as_ref().map(tracing::field::display);
            let (device, nic, direction) = (&tap.owner.device, &tap.owner.nic, tap.directions.name());
            info!(pod, %ifindex, device, nic, direction, "mirroring");
        }
        Op::RemoveTap(ifindex) => {
            let owner = actual.taps.get(ifindex).and_then(|installed| Some(&installed.tap.as_ref()?.owner));
            let pod = owner.and_then(|owner| owner.pod.as_ref()).map(tracing::field::display);
            info!(pod, %ifindex, device = owner.map(|owner| &owner.device), "no longer mirroring");
        }
        Op::SetTarget(_) | Op::Attach(..) | Op::Detach(..) => {}
    }
}
