//! [`Pace`]: how soon a change may be written: at once where changes are rare, and at intervals where they are not.
//!
//! A token bucket. Pure. The writer of the MirrorNode and the controller use it.

use std::time::Duration;

use tokio::time::Instant;

/// The writes that a quiet time saves up.
const BURST: u32 = 4;

/// The pace of the writes of one object.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    /// The time between two writes, on average.
    every: Duration,
    /// When the writes so far would be over, had each waited for its turn.
    over: Option<Instant>,
}

impl Pace {
    pub(crate) const fn new(every: Duration) -> Self {
        Self { every, over: None }
    }

    /// Takes note of a write.
    pub(crate) fn take(&mut self, now: Instant) {
        self.over = Some(self.over.map_or(now, |over| over.max(now)) + self.every);
    }

    /// When the next write may be; `None`: at any time.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.over?.checked_sub(self.every * (BURST - 1))
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests panic")]

    use proptest::{collection::vec, prelude::*};

    use super::*;

    const EVERY: Duration = Duration::from_secs(10);

    proptest! {
        /// In any time there are no more writes than its length allows, and those that were saved up. After a quiet time
        /// nothing waits.
        #[test]
        fn writes_are_bounded_and_the_first_ones_do_not_wait(wishes in vec(0..60_000_u64, 1..60)) {
            let (mut pace, begun) = (Pace::new(EVERY), Instant::now() + EVERY * 100);
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
