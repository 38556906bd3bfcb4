//! [`Gone`]: the tapped pods whose objects were deleted, and whose processes run on. Pure; the loop calls it.
//!
//! `kubectl delete --force` deletes the object at once, and the kubelet ends the processes afterwards: a second or two later,
//! or much later if the kubelet or the runtime hangs. The packets of that time are those of the pod still. The pod is
//! mirrored as its object was last, so what the object said before counts, and so does what has become of the Mirrors that
//! select it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use crate::model::{Pod, PodId};

/// The longest time that a pod stays in force without an object.
const LONGEST: Duration = Duration::from_secs(60 * 60);
/// How soon to look again whether its processes have ended. No event tells of that.
pub(super) const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The deleted pods that may still run.
#[derive(Default)]
pub(super) struct Gone {
    /// The UIDs of the pods that the last round has tapped.
    tapped: BTreeSet<String>,
    /// By UID, each with the time of its deletion.
    pods: BTreeMap<String, (Pod, Instant)>,
}

impl Gone {
    /// Takes in the pods whose objects were deleted. Only a tapped pod that is found by its processes has something to keep.
    pub(super) fn deleted(&mut self, deleted: Vec<Pod>, now: Instant) {
        for pod in deleted {
            if pod.netns.is_none() && self.tapped.contains(&pod.id.uid) {
                self.pods.insert(pod.id.uid.clone(), (pod, now));
            }
        }
    }

    /// The UIDs of the pods whose processes matter.
    pub(super) fn uids(&self) -> BTreeSet<String> {
        self.pods.keys().cloned().collect()
    }

    /// The pods of the round: those of the list, and behind them the deleted ones that run. A new pod of the name of a deleted
    /// one takes its place.
    pub(super) fn join(&mut self, list: &Arc<[Pod]>, running: &BTreeSet<String>, now: Instant) -> Arc<[Pod]> {
        if self.pods.is_empty() {
            return Arc::clone(list);
        }
        let names: BTreeMap<_, _> = list.iter().map(|pod| (name(&pod.id), &pod.id.uid)).collect();
        let mut gone = Vec::new();
        self.pods.retain(|uid, (pod, since)| {
            let has_time = running.contains(uid) && now.saturating_duration_since(*since) < LONGEST;
            match names.get(&name(&pod.id)) {
                // It was deleted after the list was read; or it has a new object, as the picture of a static pod.
                Some(listed) => *listed == uid && *since == now && has_time,
                None => {
                    gone.extend(has_time.then(|| pod.clone()));
                    has_time
                }
            }
        });
        list.iter().cloned().chain(gone).collect()
    }

    /// Notes which pods the round has tapped. A deleted pod without a tap is forgotten; returns whether there was one.
    pub(super) fn note<'a>(&mut self, tapped: impl Iterator<Item = &'a PodId>) -> bool {
        self.tapped = tapped.map(|pod| pod.uid.clone()).collect();
        let before = self.pods.len();
        self.pods.retain(|uid, _| self.tapped.contains(uid));
        self.pods.len() < before
    }

    /// Whether this is one of them.
    pub(super) fn has(&self, pod: &PodId) -> bool {
        self.pods.contains_key(&pod.uid)
    }

    /// How soon to look again; `None`: there is no such pod.
    pub(super) fn wait(&self) -> Option<Duration> {
        (!self.pods.is_empty()).then_some(LOOK_AGAIN)
    }
}

fn name(pod: &PodId) -> (&str, &str) {
    (&pod.namespace, &pod.name)
}

#[cfg(test)]
mod tests;
