//! [`RemovedPrograms`]: the taps whose programs were recently removed inside their pods.
//!
//! Root in a pod can remove a filter. The next round attaches it again, and then only some missing packets would show
//! the removal. So the reason stays for a while. The loop calls this module.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use mirror_common::verdict::Direction;
use tokio::time::Instant;

use crate::{
    model::{Actual, ActualTap, Desired, Device, HookState, Program},
    select::{Skipped, Why},
    util::backoff::Backoff,
};

/// The time that the reason stays.
const STAYS: Duration = Duration::from_secs(30);
/// The intervals between attaching a program twice, while the reason stays. A process in the pod can remove the program
/// as fast as the agent attaches it, and loading it takes the kernel some time.
const REST: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(8));

/// The directions of taps in which packets may have been missed.
#[derive(Default)]
pub(super) struct RemovedPrograms(BTreeMap<(Device, Direction), Gap>);

struct Gap {
    /// The last time when no program was found.
    found: Instant,
    /// The earliest time to attach it again.
    rests_until: Instant,
    /// The pauses after the next attempts.
    rest: Backoff,
    /// The hook. The other hook of the device has its own pause. With a common one, each hook could become due while
    /// the other one pauses.
    at: (Device, Program),
}

impl Gap {
    fn new(at: (Device, Program), now: Instant) -> Self {
        Self { found: now, rests_until: now, rest: REST, at }
    }
}

impl RemovedPrograms {
    /// Returns the hooks where nothing may be attached now, and the earliest time to attach one of them.
    pub(super) fn resting(&self, now: Instant) -> (BTreeSet<(Device, Program)>, Option<Instant>) {
        let resting = || self.0.values().filter(|gap| gap.rests_until > now);
        (resting().map(|gap| gap.at).collect(), resting().map(|gap| gap.rests_until).min())
    }

    /// Records the state that a round has found, and returns the reasons.
    pub(super) fn note(&mut self, desired: &Desired, actual: &Actual, now: Instant) -> Vec<Skipped> {
        let mut skipped = Vec::new();
        self.0.retain(|_, gap| now.saturating_duration_since(gap.found) < STAYS);
        for (device, tap) in &desired.taps {
            for direction in Direction::ALL {
                let (at, program) = tap.head.hook(*device, direction);
                let installed = actual.taps.get(&at);
                // The earlier tap of another owner is irrelevant for this one.
                let entry = actual.taps.get(device).and_then(|installed| installed.tap.as_ref());
                let is_same = entry.is_some_and(|entry| entry.head.owner.is_same(&tap.head.owner));
                if !is_same || at.is_on_node() || !tap.copies(direction) {
                    self.0.remove(&(*device, direction));
                    continue;
                }
                let is_dead = |installed: &ActualTap| {
                    // A missing hook has its own reason.
                    installed.state(program) == HookState::Dead && !installed.lacks_hook(program)
                };
                if installed.is_some_and(is_dead) {
                    let gap =
                        self.0.entry((*device, direction)).or_insert_with(|| Gap::new((at, program), now));
                    (gap.found, gap.at) = (now, (at, program));
                    if gap.rests_until <= now {
                        // The program is attached in this round.
                        gap.rests_until = now + gap.rest.pause();
                    }
                }
                if self.0.contains_key(&(*device, direction)) {
                    skipped.push(Skipped::of_nic(&tap.head.owner, None, Why::Removed(direction)));
                }
            }
        }
        self.0.retain(|(device, _), _| desired.taps.contains_key(device));
        skipped
    }

    /// The time when the first of the reasons ends.
    pub(super) fn next(&self) -> Option<Instant> {
        self.0.values().map(|gap| gap.found).min().map(|found| found + STAYS)
    }
}
