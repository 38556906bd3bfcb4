//! Which mirrors stand after a round, pod by pod. Pure; the loop asks for its report.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::{Desired, Device, MirrorId, PodId};

/// The mirrors of each pod that stand on all its devices for which they are wanted.
pub(super) fn standing(
    desired: &Desired,
    incomplete: &BTreeSet<Device>,
) -> BTreeMap<PodId, BTreeSet<MirrorId>> {
    let mut standing = BTreeMap::<_, BTreeSet<_>>::new();
    let mut missing = BTreeSet::new();
    for (device, tap) in &desired.taps {
        let Some(pod) = &tap.owner.pod else { continue };
        let mirrors = tap.sessions.keys().cloned();
        match incomplete.contains(device) {
            true => missing.extend(mirrors.map(|mirror| (pod.clone(), mirror))),
            false => standing.entry(pod.clone()).or_default().extend(mirrors),
        }
    }
    for (pod, mirror) in missing {
        if let Some(mirrors) = standing.get_mut(&pod) {
            mirrors.remove(&mirror);
        }
    }
    standing
}
