//! [`Schedule`]: the time of the next round if no event comes before, and the reason. Pure; the loop calls it.

use std::time::Duration;

use tokio::time::Instant;

use crate::report::TICK;

/// The earliest of the times at which something is due without an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Schedule {
    /// The time of the next round.
    pub(super) at: Instant,
    /// The reason, for the log.
    pub(super) why: &'static str,
}

impl Schedule {
    /// The schedule of a round at `now`, with nothing due.
    pub(super) fn new(now: Instant) -> Self {
        Self { at: now + TICK, why: "an event may be lost" }
    }

    /// Adds a time, if there is one, with its reason.
    pub(super) fn at(&mut self, at: impl IntoIterator<Item = Instant>, why: &'static str) {
        let times = at.into_iter().map(|at| Self { at, why });
        *self = times.fold(*self, |first, new| if new.at < first.at { new } else { first });
    }

    /// Adds a wait from `now`, if there is one, with its reason.
    pub(super) fn after(
        &mut self,
        now: Instant,
        wait: impl IntoIterator<Item = Duration>,
        why: &'static str,
    ) {
        self.at(wait.into_iter().map(|wait| now + wait), why);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_the_times_is_due() {
        let now = Instant::now();
        let mut schedule = Schedule::new(now);
        assert_eq!(schedule.at, now + TICK);
        schedule.at(None, "never");
        for (seconds, why, due) in [(9, "late", "late"), (2, "early", "early"), (5, "between", "early")] {
            schedule.at([now + Duration::from_secs(seconds)], why);
            assert_eq!(schedule.why, due);
        }
        schedule.after(now, [Duration::ZERO], "at once");
        assert_eq!(schedule.why, "at once");
    }
}
