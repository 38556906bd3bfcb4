//! The CPU time of a thread, and pauses in proportion to it. The reconcile loop measures its rounds and readings.

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

    /// The pause after the work. The work takes about 1 % of a CPU and, while it waits for locks of the kernel, a fifth
    /// of the time. On a busy node, waiting for the CPU makes the pause no 100 times longer.
    pub(crate) fn rest(&self, shortest: Duration) -> Duration {
        rest(time().saturating_sub(self.cpu), shortest.max(self.began.elapsed() * 4))
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

    #[test]
    fn work_takes_time_of_the_cpu_and_sleep_does_not() {
        let before = time();
        while time() == before {
            std::hint::spin_loop();
        }
        let before = time();
        std::thread::sleep(Duration::from_millis(50));
        assert!(time() - before < Duration::from_millis(25));
    }
}
