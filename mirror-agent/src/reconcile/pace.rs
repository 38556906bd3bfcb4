//! The earliest time of the next round. Pure; the loop calls it.
//!
//! Each change of a device is an event, and a process in a pod can set a NIC down and up forever. So a round is
//! followed by a pause in proportion to its CPU time. After a quiet time, the loop can use its unused share at
//! once. So neither a single event nor the events at the agent's start wait.

use std::time::Duration;

use tokio::time::Instant;

/// While events keep coming, rounds take 1/`PART` of a CPU.
const PART: u32 = 10;
/// The quiet time whose unused share is kept.
const KEPT: Duration = Duration::from_secs(5);
/// The longest pause.
const LONGEST: Duration = Duration::from_secs(1);

/// The time until which the rounds so far have used their share.
#[derive(Debug, Default)]
pub(super) struct Pace(Option<Instant>);

impl Pace {
    /// Records the CPU time of a round.
    pub(super) fn note(&mut self, taken: Duration, now: Instant) {
        let kept = now.checked_sub(KEPT);
        let from = self.0.max(kept).unwrap_or(now);
        self.0 = Some((from + taken * PART).min(now + LONGEST));
    }

    /// The earliest time of the next round.
    pub(super) fn next(&self, now: Instant) -> Instant {
        self.0.map_or(now, |until| until.max(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of rounds in a minute, with an event each `gap`, and the CPU time `taken` for each round.
    fn rounds(gap: Duration, taken: Duration) -> u32 {
        let (start, mut pace) = (Instant::now(), Pace::default());
        let (mut now, mut rounds) = (start, 0);
        while now < start + Duration::from_secs(60) {
            now = pace.next(now) + taken;
            pace.note(taken, now);
            rounds += 1;
            now = now.max(start + gap * rounds);
        }
        rounds
    }

    #[test]
    fn rounds_take_a_tenth_of_a_cpu_however_often_something_changes() {
        let ms = Duration::from_millis;
        for (gap, taken, expected) in [
            (ms(25), ms(12), 490..=590),
            (ms(1), ms(12), 490..=590),
            (ms(1), ms(1), 5_900..=6_800),
            // Rounds within the share do not wait.
            (ms(25), ms(2), 2_400..=2_400),
            (ms(1_000), ms(90), 60..=60),
            // However long a round is, the next one starts soon.
            (ms(25), ms(400), 40..=45),
        ] {
            let rounds = rounds(gap, taken);
            assert!(expected.contains(&rounds), "every {gap:?}, {taken:?}: {rounds}");
        }
    }

    #[test]
    fn an_event_after_a_quiet_time_does_not_wait() {
        let (start, mut pace) = (Instant::now(), Pace::default());
        assert_eq!(pace.next(start), start);
        for _ in 0..9 {
            pace.note(Duration::from_millis(100), start);
        }
        assert_eq!(pace.next(start), start + LONGEST, "they have taken too much");
        let later = start + KEPT + LONGEST;
        pace.note(Duration::from_millis(400), later);
        assert_eq!(pace.next(later), later);
    }
}
