//! The sessions that fit into the kernel's tables, and those that do not, or whose filter the kernel refuses.
//!
//! Installed sessions that are wanted without a change keep their places. Then come changed sessions, then new ones; each
//! in the order of the devices and, on a device, of the origins and names of its mirrors. Enforced mirrors come ahead of
//! all others, and captures after all mirrors; both also where others are installed. `plan` calls it.

use std::collections::{BTreeMap, BTreeSet};

use mirror_common::abi::MAX_SESSIONS_PER_TAP;

use super::keys;
use crate::{
    model::{Actual, Desired, Device, MirrorId, NoRoom, Origin, Session, Tap},
    settings::CaptureFilter,
};

/// A session that does not fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfit {
    /// The tapped device.
    pub device: Device,
    /// The mirror.
    pub mirror: MirrorId,
    /// Why not.
    pub why: Misfit,
}

/// Why a session does not fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Misfit {
    /// A table is full.
    NoRoom(NoRoom),
    /// The kernel refuses its filter, with this reason.
    FilterRefused(String),
}

impl From<NoRoom> for Misfit {
    fn from(table: NoRoom) -> Self {
        Self::NoRoom(table)
    }
}

/// The taps with the sessions that fit, and the sessions that do not.
pub(super) fn fit(desired: &Desired, actual: &Actual) -> (BTreeMap<Device, Tap>, Vec<Unfit>) {
    let mut room = Room { actual, taps: 0, sessions: 0, filters: BTreeSet::new(), instructions: 0 };
    let mut fitting = BTreeMap::new();
    let (wanted, mut unfit) = keys::assign(desired, actual);
    let passes = [Pass::Unchanged, Pass::Changed, Pass::New];
    let ranks = [Rank::Enforced, Rank::Mirror, Rank::Capture];
    for pass in ranks.into_iter().flat_map(|rank| passes.map(|pass| (rank, pass))) {
        for (device, tap) in &wanted {
            for (mirror, session) in in_order(tap) {
                let of = match installed(actual, *device, tap, mirror) {
                    Some(installed) if installed == session => Pass::Unchanged,
                    Some(_) => Pass::Changed,
                    None => Pass::New,
                };
                if (Rank::of(session.origin), of) != pass {
                    continue;
                }
                // A tap with two sides has two entries.
                let new =
                    usize::from(!fitting.contains_key(device)) * (1 + usize::from(tap.pod_side.is_some()));
                match room.take(new, session) {
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

/// Which sessions get places before others, whatever is installed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rank {
    Enforced,
    Mirror,
    Capture,
}

impl Rank {
    const fn of(origin: Origin) -> Self {
        match origin {
            Origin::Enforced => Self::Enforced,
            Origin::Capture => Self::Capture,
            _ => Self::Mirror,
        }
    }
}

/// The order in which sessions of a rank get places.
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
    filters: BTreeSet<CaptureFilter>,
    instructions: usize,
}

impl Room<'_> {
    /// Takes room for a session, and for so many new entries of its tap.
    fn take(&mut self, entries: usize, session: &Session) -> Result<(), Misfit> {
        let capacity = &self.actual.capacity;
        let filter = session.settings.filter.as_ref();
        if let Some(why) = filter.and_then(|filter| self.actual.refused.get(filter)) {
            return Err(Misfit::FilterRefused(why.clone()));
        }
        let new_filter = filter.filter(|filter| !self.filters.contains(*filter));
        let instructions = self.instructions + new_filter.map_or(0, CaptureFilter::length);
        if entries > 0 && self.taps + entries > capacity.taps {
            return Err(NoRoom::Taps(capacity.taps).into());
        }
        if self.sessions == capacity.sessions {
            return Err(NoRoom::Sessions(capacity.sessions).into());
        }
        if new_filter.is_some() && self.filters.len() == capacity.filters {
            return Err(NoRoom::Filters(capacity.filters).into());
        }
        if new_filter.is_some() && instructions > capacity.instructions {
            return Err(NoRoom::Instructions(capacity.instructions).into());
        }
        self.taps += entries;
        self.sessions += 1;
        self.filters.extend(new_filter.cloned());
        self.instructions = instructions;
        Ok(())
    }
}
