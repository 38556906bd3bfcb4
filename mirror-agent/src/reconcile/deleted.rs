//! [`DeletedPods`]: the pods in force although their objects were deleted, because their processes still run: those that
//! are tapped, and those that are barred to readers of interfaces. Pure; the loop calls it.
//!
//! `kubectl delete --force` deletes the object at once, and the kubelet ends the processes afterwards: a second or two
//! later, or much later if the kubelet or the runtime hangs. The packets in this time are still the pod's. The pod is
//! mirrored according to the last state of its object, and to the present state of the Mirrors that select it. An agent
//! that starts in this time does not know the pod.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use crate::model::{Pod, PodId};

/// The longest time that a pod stays in force without an object.
const LONGEST: Duration = Duration::from_secs(60 * 60);
/// The interval between checks whether its processes have ended. That causes no event.
pub(super) const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The deleted pods that may still run.
#[derive(Default)]
pub(super) struct DeletedPods {
    /// The UIDs of the pods that the last round has tapped or barred.
    in_force: BTreeSet<String>,
    /// The pods by UID, each with the time of its deletion.
    pods: BTreeMap<String, (Pod, Instant)>,
}

impl DeletedPods {
    /// Adds pods whose objects were deleted. Keeps only those in force that are found by their processes.
    pub(super) fn add(&mut self, deleted: Vec<Pod>, now: Instant) {
        for pod in deleted {
            if pod.netns.is_none() && self.in_force.contains(&pod.id.uid) {
                self.pods.insert(pod.id.uid.clone(), (pod, now));
            }
        }
    }

    /// The UIDs of the pods whose processes matter.
    pub(super) fn uids(&self) -> BTreeSet<String> {
        self.pods.keys().cloned().collect()
    }

    /// Returns the pods of the round: those of the list, followed by the deleted ones that still run. A new pod with
    /// the name of a deleted one replaces it.
    pub(super) fn join(&mut self, list: &Arc<[Pod]>, running: &BTreeSet<String>, now: Instant) -> Arc<[Pod]> {
        if self.pods.is_empty() {
            return Arc::clone(list);
        }
        let names: BTreeMap<_, _> = list.iter().map(|pod| (name(&pod.id), &pod.id.uid)).collect();
        let mut gone = Vec::new();
        self.pods.retain(|uid, (pod, since)| {
            let has_time = running.contains(uid) && now.saturating_duration_since(*since) < LONGEST;
            match names.get(&name(&pod.id)) {
                // The pod was deleted after the list was read; or it is a static pod whose API object was recreated.
                Some(listed) => *listed == uid && *since == now && has_time,
                None => {
                    gone.extend(has_time.then(|| pod.clone()));
                    has_time
                }
            }
        });
        list.iter().cloned().chain(gone).collect()
    }

    /// Records which pods the round has tapped or barred, and forgets the other deleted pods. Returns whether there were
    /// any.
    pub(super) fn note<'a>(&mut self, in_force: impl Iterator<Item = &'a PodId>) -> bool {
        self.in_force = in_force.map(|pod| pod.uid.clone()).collect();
        let before = self.pods.len();
        self.pods.retain(|uid, _| self.in_force.contains(uid));
        self.pods.len() < before
    }

    /// Whether a pod is one of the deleted ones.
    pub(super) fn has(&self, pod: &PodId) -> bool {
        self.pods.contains_key(&pod.uid)
    }

    /// Returns the time until the next check; `None` if there is no such pod.
    pub(super) fn wait(&self) -> Option<Duration> {
        (!self.pods.is_empty()).then_some(LOOK_AGAIN)
    }
}

fn name(pod: &PodId) -> (&str, &str) {
    (&pod.namespace, &pod.name)
}

#[cfg(test)]
mod tests;
