//! [`Pace`]: a rate limit for writes to the API server: immediate while changes are rare, at intervals otherwise. A
//! token bucket. [`rest`]: the pause after work that is repeated for ever.
//!
//! Pure.

use std::time::Duration;

use tokio::time::Instant;

/// The longest [`rest`].
const LONGEST: Duration = Duration::from_secs(30);

/// The pause after work with this cost (`cpu::Work`). The work then takes about 1 % of a CPU, or more if it takes longer
/// than 300 ms.
pub(crate) fn rest(cost: Duration, shortest: Duration) -> Duration {
    (cost * 100).max(shortest).min(LONGEST)
}

/// The rate limit of the writes of one object.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    /// The average time between two writes.
    every: Duration,
    /// The number of writes that need no pause after a quiet time.
    burst: u32,
    /// When the writes so far would have ended if each had waited for its interval.
    over: Option<Instant>,
}

impl Pace {
    pub(crate) const fn new(every: Duration, burst: u32) -> Self {
        Self { every, burst, over: None }
    }

    /// Counts a write.
    pub(crate) fn take(&mut self, now: Instant) {
        self.over = Some(self.over.map_or(now, |over| over.max(now)) + self.every);
    }

    /// When the next write is allowed; `None`: now.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.over?.checked_sub(self.every * (self.burst - 1))
    }

    /// Whether the whole burst is allowed.
    pub(crate) fn is_rested(&self, now: Instant) -> bool {
        self.over.is_none_or(|over| over <= now)
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests panic")]

    use proptest::{collection::vec, prelude::*};

    use super::*;

    const EVERY: Duration = Duration::from_secs(10);
    const BURST: u32 = 4;

    proptest! {
        /// Over any period there are at most as many writes as its length allows, plus the accumulated ones. After a
        /// quiet time no write waits.
        #[test]
        fn writes_are_bounded_and_the_first_ones_do_not_wait(wishes in vec(0..60_000_u64, 1..60)) {
            let (mut pace, begun) = (Pace::new(EVERY, BURST), Instant::now() + EVERY * 100);
            let mut writes = Vec::<Duration>::new();
            let mut now = begun;
            for wish in wishes {
                now += Duration::from_millis(wish);
                let at = pace.next().map_or(now, |next| next.max(now));
                let is_quiet = writes.len() < BURST as usize
                    || at - begun >= writes[writes.len() - BURST as usize] + EVERY * BURST;
                prop_assert!(!is_quiet || at == now);
                now = at;
                pace.take(now);
                writes.push(now - begun);
            }
            for (first, from) in writes.iter().enumerate() {
                for (last, to) in writes.iter().enumerate().skip(first) {
                    let most = BURST + u32::try_from((*to - *from).as_nanos() / EVERY.as_nanos()).unwrap();
                    prop_assert!((last - first + 1) as u32 <= most);
                }
            }
        }
    }
}
