//! [`News`]: the mirrors of a pod that have begun or ended since the last Event on the pod. Pure; called by
//! [`post`](super::post).
//!
//! It compares the present mirrors with those that were posted, and keeps no history. So a pod has at most two pending
//! Events: one for all mirrors that have begun, one for all that have ended. A change that is undone while its Event is
//! pending is not posted. Mirrors that an earlier agent left count as posted. Mirrors that the node's policy gives to
//! every pod are not posted.

use std::collections::BTreeMap;

use tokio::time::{Duration, Instant};

use super::Fact;
use crate::{
    model::{MirrorId, PodId, TargetName},
    report::{Mirrored, Report, Stage},
    select::{Skipped, Why},
};

/// The delay of a change: other changes of the pod may join it, and it may be undone.
const SETTLE: Duration = Duration::from_secs(2);
/// Reasons of the Events. Not `Started`: the kubelet has a reason of that name.
const STARTED: &str = "MirrorStarted";
const ENDED: &str = "MirrorEnded";

/// The posted state of the mirrors of all pods, and the changes that are not posted yet.
#[derive(Debug, Default)]
pub(super) struct News {
    /// `None` before the first complete list of pods.
    told: Option<BTreeMap<PodId, Posted>>,
    untold: BTreeMap<PodId, Untold>,
}

/// The mirrors of a pod that were posted: as copying to this target or, without one, as ended by a limit.
type Posted = BTreeMap<MirrorId, Option<TargetName>>;

/// The changes of a pod that are not posted yet.
#[derive(Debug)]
struct Untold {
    since: Instant,
    is_settled: bool,
    changes: BTreeMap<MirrorId, Change>,
}

#[derive(Debug, PartialEq, Eq)]
enum Change {
    Started(TargetName),
    Ended {
        why: String,
        /// The mirror is still wanted; only its limit ended it.
        is_wanted: bool,
    },
}

impl News {
    /// Compares a new report with the posted state.
    pub(super) fn set(&mut self, report: &Report, now: Instant) {
        let Some(pods) = &report.pods else { return };
        let told = self.told.get_or_insert_with(|| found(report));
        // A deleted pod gets no Events.
        told.retain(|pod, _| pods.contains_key(pod));
        let mut before = std::mem::take(&mut self.untold);
        let none = BTreeMap::new();
        for pod in pods.keys() {
            let mirrors = report.mirrors.get(pod).unwrap_or(&none);
            if let Some(told) = told.get_mut(pod) {
                told.retain(|mirror, target| target.is_some() || mirrors.contains_key(mirror));
            }
            let changes = changes(told.get(pod), mirrors, |mirror| why(report, pod, mirror));
            if !changes.is_empty() {
                let before = before.remove(pod).map(|before| (before.since, before.is_settled));
                let (since, is_settled) = before.unwrap_or((now, false));
                self.untold.insert(pod.clone(), Untold { since, is_settled, changes });
            }
        }
    }

    /// The time at which [`News::settled`] returns more, if no other report arrives.
    pub(super) fn next(&self) -> Option<Instant> {
        self.untold.values().filter(|untold| !untold.is_settled).map(|untold| untold.since + SETTLE).min()
    }

    /// Returns the Events that are due.
    pub(super) fn settled(&mut self, now: Instant) -> Vec<Fact> {
        for untold in self.untold.values_mut() {
            untold.is_settled |= now >= untold.since + SETTLE;
        }
        self.untold.iter().filter(|(_, untold)| untold.is_settled).flat_map(facts).collect()
    }

    /// Notes that the Event was posted, or that the API server refused it for good.
    pub(super) fn note(&mut self, fact: &Fact) {
        let Some(untold) = self.untold.get_mut(&fact.pod) else { return };
        let told = self.told.get_or_insert_default().entry(fact.pod.clone()).or_default();
        untold.changes.retain(|mirror, change| {
            if change.reason() != fact.reason {
                return true;
            }
            match change {
                Change::Started(target) => {
                    told.insert(mirror.clone(), Some(target.clone()));
                }
                Change::Ended { is_wanted: true, .. } => drop(told.insert(mirror.clone(), None)),
                Change::Ended { is_wanted: false, .. } => drop(told.remove(mirror)),
            }
            false
        });
        if untold.changes.is_empty() {
            self.untold.remove(&fact.pod);
        }
    }
}

impl Change {
    const fn reason(&self) -> &'static str {
        match self {
            Self::Started(_) => STARTED,
            Self::Ended { .. } => ENDED,
        }
    }
}

/// The mirrors that an earlier agent left, as if they were posted.
fn found(report: &Report) -> BTreeMap<PodId, Posted> {
    let told = |(mirror, Mirrored { target, is_asked, stage }): (&MirrorId, &Mirrored)| {
        let told = match stage {
            Stage::Pending | Stage::Installed => Some(target.clone()),
            Stage::Ended(_) => None,
        };
        is_asked.then(|| (mirror.clone(), told))
    };
    let of_pods = report.found.iter();
    of_pods.map(|(pod, mirrors)| (pod.clone(), mirrors.iter().filter_map(told).collect())).collect()
}

/// The changes of a pod's mirrors. `why` returns the reason why a mirror is no longer wanted.
fn changes(
    told: Option<&Posted>,
    mirrors: &BTreeMap<MirrorId, Mirrored>,
    why: impl Fn(&MirrorId) -> String,
) -> BTreeMap<MirrorId, Change> {
    let told_of = |mirror| told.and_then(|told| told.get(mirror));
    let of_wanted = mirrors.iter().filter_map(|(mirror, Mirrored { target, is_asked, stage })| {
        let change = match (stage, told_of(mirror)) {
            _ if !is_asked => return None,
            // A mirror whose installation is in progress, or whose NIC was just deleted, is not posted.
            (Stage::Pending, _) | (Stage::Ended(_), Some(None)) => return None,
            (Stage::Installed, Some(Some(of))) if of == target => return None,
            (Stage::Installed, _) => Change::Started(target.clone()),
            (Stage::Ended(limit), _) => {
                let why = format!("its limit of {} is reached", limit.name());
                Change::Ended { why, is_wanted: true }
            }
        };
        Some((mirror.clone(), change))
    });
    let unwanted = told.into_iter().flatten().filter(|(mirror, target)| {
        // The end by a limit was posted already.
        !mirrors.contains_key(mirror) && target.is_some()
    });
    let of_unwanted =
        unwanted.map(|(mirror, _)| (mirror.clone(), Change::Ended { why: why(mirror), is_wanted: false }));
    of_wanted.chain(of_unwanted).collect()
}

/// The reason why a mirror is no longer wanted.
fn why(report: &Report, pod: &PodId, mirror: &MirrorId) -> String {
    let is_of = |skipped: &&Skipped| {
        skipped.pod.as_ref() == Some(pod)
            && match &skipped.mirror {
                // An opt-out is reported for each resource, and it also ends the mirror of the policy.
                Some(of) => {
                    of == mirror || (mirror.0.is_default() && matches!(skipped.why, Why::OptedOut(_)))
                }
                // A reason without a mirror concerns the mirror `default`, or all mirrors.
                None => mirror.0.is_default() || matches!(skipped.why, Why::AnnotationsUnread(_)),
            }
            && skipped.why.is_of_one_mirror()
    };
    let unasked = report.pods.as_ref().and_then(|pods| pods.get(pod)?.as_ref());
    match (report.skipped.iter().find(is_of), unasked) {
        (Some(Skipped { why, .. }), _) | (None, Some(why @ Why::OptedOut(_))) => why.to_string(),
        (None, _) => "no longer requested".to_owned(),
    }
}

/// The Events for the pending changes of a pod.
fn facts((pod, untold): (&PodId, &Untold)) -> Vec<Fact> {
    let mut started = Vec::new();
    let mut ended = BTreeMap::<&str, Vec<String>>::new();
    for (mirror, change) in &untold.changes {
        match change {
            Change::Started(target) => started.push(format!("{mirror} (target {target})")),
            Change::Ended { why, .. } => ended.entry(why).or_default().push(mirror.to_string()),
        }
    }
    let ended: Vec<_> = ended.iter().map(|(why, mirrors)| format!("{}: {why}", mirrors.join(", "))).collect();
    let fact = |reason, note| Fact { pod: pod.clone(), is_news: true, reason, note };
    let started = (!started.is_empty()).then(|| fact(STARTED, format!("Mirrored by {}", started.join(", "))));
    let ended =
        (!ended.is_empty()).then(|| fact(ENDED, format!("No longer mirrored by {}", ended.join("; by "))));
    started.into_iter().chain(ended).collect()
}

#[cfg(test)]
mod tests;
