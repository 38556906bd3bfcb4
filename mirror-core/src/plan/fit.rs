//! The sessions that fit into the kernel's tables, and those that do not.
//!
//! Installed sessions that are wanted without a change keep their places. Then come changed sessions, then new ones; each
//! in the order of the devices and, on a device, of the origins and names of its mirrors. Captures come after all mirrors,
//! also captures that are installed. `plan` calls it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use mirror_common::{abi::MAX_SESSIONS_PER_TAP, filter::FilterProgram};

use crate::model::{Actual, Desired, Device, MirrorId, NoRoom, Origin, Session, Tap};

/// A session that does not fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfit {
    /// The tapped device.
    pub device: Device,
    /// The mirror.
    pub mirror: MirrorId,
    /// The table that is full.
    pub why: NoRoom,
}

/// The taps with the sessions that fit, and the sessions that do not.
pub(super) fn fit(desired: &Desired, actual: &Actual) -> (BTreeMap<Device, Tap>, Vec<Unfit>) {
    let mut room = Room { actual, taps: 0, sessions: 0, filters: BTreeSet::new() };
    let mut fitting = BTreeMap::new();
    let mut unfit = Vec::new();
    let passes = [Pass::Unchanged, Pass::Changed, Pass::New];
    for pass in [false, true].into_iter().flat_map(|captures| passes.map(|pass| (captures, pass))) {
        for (device, tap) in &desired.taps {
            for (mirror, session) in in_order(tap) {
                let of = match installed(actual, *device, tap, mirror) {
                    Some(installed) if installed == session => Pass::Unchanged,
                    Some(_) => Pass::Changed,
                    None => Pass::New,
                };
                if (session.origin == Origin::Capture, of) != pass {
                    continue;
                }
                let has_tap = fitting.contains_key(device);
                match room.take(has_tap, session) {
                    Ok(()) => {
                        let bare = || Tap { sessions: BTreeMap::new(), ..tap.clone() };
                        let sessions = &mut fitting.entry(*device).or_insert_with(bare).sessions;
                        sessions.insert(mirror.clone(), session.clone());
                    }
                    Err(why) => unfit.push(Unfit { device: *device, mirror: mirror.clone(), why }),
                }
            }
        }
    }
    // In the kernel the limits are a flag of the mirrors' sessions, so a tap without mirrors is read back without limits.
    for tap in fitting.values_mut() {
        tap.is_limited &= tap.sessions.values().any(|session| session.origin != Origin::Capture);
    }
    (fitting, unfit)
}

/// The order in which sessions get places.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    Unchanged,
    Changed,
    New,
}

fn installed<'a>(actual: &'a Actual, device: Device, tap: &Tap, mirror: &MirrorId) -> Option<&'a Session> {
    let installed = actual.taps.get(&device)?.tap.as_ref().filter(|old| old.owner.is_same(&tap.owner))?;
    installed.sessions.get(mirror)
}

/// The sessions of a tap. Those that keep their place where not all fit come first.
fn in_order(tap: &Tap) -> Vec<(&MirrorId, &Session)> {
    let mut sessions: Vec<_> = tap.sessions.iter().collect();
    sessions.sort_by_key(|(mirror, session)| (session.origin, (*mirror).clone()));
    sessions.truncate(MAX_SESSIONS_PER_TAP);
    sessions
}

/// The room that is taken so far.
struct Room<'a> {
    actual: &'a Actual,
    taps: usize,
    sessions: usize,
    filters: BTreeSet<Vec<u8>>,
}

impl Room<'_> {
    fn take(&mut self, has_tap: bool, session: &Session) -> Result<(), NoRoom> {
        let capacity = &self.actual.capacity;
        let filter = session.settings.filter.as_ref().map(|filter| bytes(&filter.program));
        let is_new_filter = filter.as_ref().is_some_and(|filter| !self.filters.contains(filter));
        if !has_tap && self.taps == capacity.taps {
            return Err(NoRoom::Taps(capacity.taps));
        }
        if self.sessions == capacity.sessions {
            return Err(NoRoom::Sessions(capacity.sessions));
        }
        if is_new_filter && self.filters.len() == capacity.filters {
            return Err(NoRoom::Filters(capacity.filters));
        }
        self.taps += usize::from(!has_tap);
        self.sessions += 1;
        self.filters.extend(filter);
        Ok(())
    }
}

fn bytes(program: &Arc<FilterProgram>) -> Vec<u8> {
    use zerocopy::IntoBytes as _;
    program.as_bytes().to_vec()
}
