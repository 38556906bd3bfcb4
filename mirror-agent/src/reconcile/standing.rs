//! The installed mirrors of each pod after a round, for the report. Pure; the loop calls it.

use std::collections::BTreeSet;

use super::mirrored::ended;
use crate::{
    model::{Actual, Desired, Device},
    select::Standing,
};

/// Returns the mirrors of each pod that are installed on all its devices for which they are wanted.
pub(super) fn standing(desired: &Desired, actual: &Actual, incomplete: &BTreeSet<Device>) -> Standing {
    let mut standing = Standing::new();
    let mut missing = BTreeSet::new();
    for (device, tap) in &desired.taps {
        let Some(pod) = &tap.owner.pod else { continue };
        for mirror in tap.sessions.keys() {
            if incomplete.contains(device) {
                missing.insert((pod, mirror));
                continue;
            }
            let limit = ended(tap, mirror, actual.taps.get(device));
            let of_pod = standing.entry(pod.clone()).or_default();
            let at_all = of_pod.entry(mirror.clone()).or_default();
            *at_all = at_all.or(limit);
        }
    }
    for (pod, mirror) in missing {
        if let Some(mirrors) = standing.get_mut(pod) {
            mirrors.remove(mirror);
        }
    }
    standing
}
