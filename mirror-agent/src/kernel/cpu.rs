//! The CPU time of a thread. The reconcile loop measures its rounds and readings with it.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Returns the CPU time of the calling thread.
pub(crate) fn time() -> Duration {
    // Linux has this clock for each thread. Without it, the loop makes no pauses.
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
