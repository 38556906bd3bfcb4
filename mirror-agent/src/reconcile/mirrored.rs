//! The wanted mirrors of pods, and the progress of each, for the report. Pure; the loop calls it.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    model::{Actual, ActualTap, Desired, Device, Ended, MirrorId, Origin, PodId, Session, Tap},
    report::{Mirrored, Mirrors, Stage},
    select::{Installed, Wanted},
};

/// The mirrors that an earlier agent has left.
pub(super) fn found(actual: &Actual) -> Mirrors {
    let mut found = Mirrors::new();
    for installed in actual.taps.values() {
        let Some(tap) = &installed.tap else { continue };
        let Some(pod) = &tap.head.owner.pod else { continue };
        for (mirror, session) in &tap.sessions {
            let stage = stage_of(installed.ended.get(mirror).copied());
            let Some(new) = of_session(session, stage) else { continue };
            let of_pod = found.entry(pod.clone()).or_default();
            let at_all = of_pod.entry(mirror.clone()).or_insert(new);
            at_all.stage = at_all.stage.min(stage);
        }
    }
    found
}

/// Returns the wanted mirrors. `incomplete` are the devices with unfinished ops, and `misfits` the sessions that cannot
/// be installed.
pub(super) fn mirrored(
    wanted: &[Wanted<'_>],
    desired: &Desired,
    actual: &Actual,
    incomplete: &BTreeSet<Device>,
    misfits: &BTreeSet<(Device, MirrorId)>,
) -> Mirrors {
    let mut stages = BTreeMap::<(&PodId, &MirrorId), Stage>::new();
    for (device, tap) in &desired.taps {
        let Some(pod) = &tap.head.owner.pod else { continue };
        for mirror in tap.sessions.keys() {
            let is_missing = incomplete.contains(device) || misfits.contains(&(*device, mirror.clone()));
            let stage = if is_missing {
                Stage::Pending
            } else {
                stage_of(ended(tap, mirror, actual.taps.get(device)))
            };
            stages.entry((pod, mirror)).and_modify(|of| *of = stage.min(*of)).or_insert(stage);
        }
    }
    let of_pod = |wanted: &Wanted<'_>| {
        let pod = &wanted.pod.id;
        let mirrors = wanted.mirrors.iter().filter_map(|(mirror, session)| {
            let stage = stages.get(&(pod, mirror)).copied().unwrap_or(Stage::Pending);
            Some((mirror.clone(), of_session(session, stage)?))
        });
        (pod.clone(), mirrors.collect::<BTreeMap<_, _>>())
    };
    wanted.iter().map(of_pod).filter(|(_, mirrors)| !mirrors.is_empty()).collect()
}

/// Returns the mirrors of each pod that are installed on all its devices for which they are wanted.
pub(super) fn installed(desired: &Desired, actual: &Actual, incomplete: &BTreeSet<Device>) -> Installed {
    let mut installed = Installed::new();
    let mut missing = BTreeSet::new();
    for (device, tap) in &desired.taps {
        let Some(pod) = &tap.head.owner.pod else { continue };
        for mirror in tap.sessions.keys() {
            if incomplete.contains(device) {
                missing.insert((pod, mirror));
                continue;
            }
            let limit = ended(tap, mirror, actual.taps.get(device));
            let of_pod = installed.entry(pod.clone()).or_default();
            let at_all = of_pod.entry(mirror.clone()).or_default();
            *at_all = at_all.or(limit);
        }
    }
    for (pod, mirror) in missing {
        if let Some(mirrors) = installed.get_mut(pod) {
            mirrors.remove(mirror);
        }
    }
    installed
}

/// Returns the limit that has ended an installed session.
fn ended(tap: &Tap, mirror: &MirrorId, before: Option<&ActualTap>) -> Option<Ended> {
    let before = before?;
    before.tap.as_ref().filter(|of| of.head.owner.is_same(&tap.head.owner))?;
    before.ended.get(mirror).copied()
}

fn stage_of(ended: Option<Ended>) -> Stage {
    ended.map_or(Stage::Installed, Stage::Ended)
}

/// Returns `None` if a program reads the packets itself, because it knows when that begins and ends.
fn of_session(session: &Session, stage: Stage) -> Option<Mirrored> {
    let is_asked = match session.origin {
        Origin::Annotation(_) | Origin::Mirror | Origin::ClusterMirror | Origin::Enforced => true,
        Origin::Policy => false,
        Origin::Interface | Origin::Capture | Origin::Reader => return None,
    };
    Some(Mirrored { target: session.target.clone(), is_asked, stage })
}
