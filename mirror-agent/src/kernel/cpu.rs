//! The CPU time of a thread, and pauses in proportion to it. Wall time would count what other processes of the node take.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use tokio::time::Instant;

use crate::util::pace::rest;

/// A measurement of work that this thread repeats for ever.
pub(crate) struct Work {
    began: Instant,
    cpu: Duration,
}

impl Work {
    pub(crate) fn begin() -> Self {
        Self { began: Instant::now(), cpu: time() }
    }

    /// Its CPU time so far, or a 25th of its duration if that is more. If a wait, for a lock of the kernel or for a CPU,
    /// counted as a whole, a busy node would be read far too seldom.
    pub(crate) fn cost(&self) -> Duration {
        time().saturating_sub(self.cpu).max(self.began.elapsed() / 25)
    }

    /// The pause after the work, which then takes about 1 % of a CPU, and waits for at most a fifth of the time.
    pub(crate) fn rest(&self, shortest: Duration) -> Duration {
        rest(self.cost(), shortest)
    }
}

/// Returns the CPU time of the calling thread.
pub(crate) fn time() -> Duration {
    // Linux has this clock for each thread. Without it, the pauses are the shortest.
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn after_work_the_pause_is_a_hundred_times_as_long() {
        let work = Work::begin();
        let before = time();
        while time() - before < 10 * MS {
            std::hint::spin_loop();
        }
        assert!(work.rest(MS) >= 1000 * MS);
    }

    #[test]
    fn after_a_wait_the_pause_is_four_times_as_long() {
        let work = Work::begin();
        std::thread::sleep(50 * MS);
        let pause = work.rest(MS);
        let waited = work.began.elapsed();
        assert!(pause >= 200 * MS && pause < waited * 50, "{pause:?} after {waited:?}");
    }
}
