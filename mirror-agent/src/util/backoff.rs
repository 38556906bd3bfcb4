//! [`Backoff`]: pauses that double with each failure in a row. Pure.

use std::time::Duration;

/// The pauses after failures. After a success, begin with a new one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Backoff {
    next: Duration,
    longest: Duration,
}

impl Backoff {
    pub(crate) const fn new(first: Duration, longest: Duration) -> Self {
        Self { next: first, longest }
    }

    /// The pause after one more failure.
    pub(crate) fn pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(self.longest);
        pause
    }
}
