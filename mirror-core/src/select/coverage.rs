//! [`Coverage`]: the state of each Mirror and ClusterMirror on this node.
//!
//! Pure. The loop calls it at the end of a round, with the installed mirrors and the reasons for those that are
//! missing.

use std::collections::{BTreeMap, BTreeSet};

use super::{Selected, Skipped};
use crate::model::{Ended, MirrorId, PodId, TargetName};

/// The state of a resource on this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coverage {
    /// The resource, with the pods that it selects.
    pub of: Selected,
    /// The pods that are mirrored as requested: on all requested NICs, in all directions, to a target that accepts
    /// copies.
    pub covered: BTreeSet<PodId>,
    /// The reasons for the other pods; at least one for each.
    pub not_covered: BTreeSet<NotCovered>,
}

/// Why a pod is not covered.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct NotCovered {
    /// The pod that is not covered.
    pub pod: PodId,
    /// The NIC, if the reason concerns one.
    pub nic: Option<String>,
    /// The reason, in one word.
    pub reason: &'static str,
    /// An explanation of the reason.
    pub message: String,
}

impl NotCovered {
    fn of(pod: &PodId, Skipped { nic, why, .. }: &Skipped) -> Self {
        Self { pod: pod.clone(), nic: nic.clone(), reason: why.name(), message: why.to_string() }
    }

    fn ended(pod: &PodId, limit: Ended) -> Self {
        let message = format!("a limit has ended it: its budget of {} is used up", limit.name());
        Self { pod: pod.clone(), nic: None, reason: "Ended", message }
    }

    fn target_down(pod: &PodId, target: &TargetName, why: &str) -> Self {
        let message = format!("nothing is copied to the target {target} now: {why}");
        Self { pod: pod.clone(), nic: None, reason: "TargetDown", message }
    }

    /// No reason is known, but the mirror is not installed.
    fn not_yet(pod: &PodId) -> Self {
        let message = "the agent has not installed it yet; if that fails, the log of the agent says why";
        Self { pod: pod.clone(), nic: None, reason: "NotYet", message: message.to_owned() }
    }
}

/// The active mirrors of each pod: those with at least one installed session, and no missing session. The value is the
/// limit that has ended one of the sessions.
pub type Installed = BTreeMap<PodId, BTreeMap<MirrorId, Option<Ended>>>;

/// Returns the coverage of each resource. `skipped` has what is not installed, and why; `down` has the targets that
/// accept no copies, and why.
pub fn coverage(
    selected: Vec<Selected>,
    installed: &Installed,
    skipped: &BTreeSet<Skipped>,
    down: &BTreeMap<TargetName, String>,
) -> Vec<Coverage> {
    let mut reasons = BTreeMap::<_, Vec<_>>::new();
    for skipped in skipped {
        reasons.entry((skipped.pod.as_ref(), group(skipped.mirror.as_ref()))).or_default().push(skipped);
    }
    let of = |of: Selected| {
        let (mut covered, mut not_covered) = (BTreeSet::new(), BTreeSet::new());
        let down = down.get(&of.target);
        let groups = [group(Some(&of.mirror)), group(None)];
        for pod in &of.pods {
            let of_groups = groups.into_iter().filter_map(|key| reasons.get(&(Some(pod), key))).flatten();
            let of_mirror = of_groups.filter(|skipped| skipped.concerns(&of.mirror));
            let of_nics = of_mirror.filter(|skipped| skipped.nic.as_ref().is_none_or(|nic| of.nics.has(nic)));
            let reasons: Vec<_> = of_nics.map(|skipped| NotCovered::of(pod, skipped)).collect();
            if !reasons.is_empty() {
                not_covered.extend(reasons);
                continue;
            }
            let reason = match (installed.get(pod).and_then(|mirrors| mirrors.get(&of.mirror)), down) {
                (Some(None), None) => {
                    covered.insert(pod.clone());
                    continue;
                }
                (Some(None), Some(why)) => NotCovered::target_down(pod, &of.target, why),
                (Some(Some(limit)), _) => NotCovered::ended(pod, *limit),
                (None, _) => NotCovered::not_yet(pod),
            };
            not_covered.insert(reason);
        }
        Coverage { of, covered, not_covered }
    };
    selected.into_iter().map(of).collect()
}

/// The group of a mirror's reasons. All captures are one group, because a pod has few and they can have a reason in
/// common (see [`Skipped::concerns`]). It can have hundreds of other mirrors, and each is its own group.
fn group(mirror: Option<&MirrorId>) -> (bool, Option<&MirrorId>) {
    let is_capture = mirror.is_some_and(|mirror| mirror.0.is_capture());
    (is_capture, mirror.filter(|_| !is_capture))
}

#[cfg(test)]
mod tests;
