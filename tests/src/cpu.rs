//! [`OneCpu`]: packets in their order.

use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};

/// While this lives, the thread that made it runs on one CPU, and so do the threads and programs that it starts. Their
/// packets then do not overtake each other on the way through veths. ERSPAN numbers its packets, and the kernel's receiver
/// drops one that another has overtaken.
#[derive(Debug)]
pub struct OneCpu {
    before: CpuSet,
}

impl OneCpu {
    /// The first CPU that the calling thread may use.
    #[track_caller]
    pub fn of_this_thread() -> Self {
        let before = sched_getaffinity(Pid::from_raw(0)).unwrap();
        let first = (0..CpuSet::count()).find(|cpu| before.is_set(*cpu).unwrap()).unwrap();
        let mut one = CpuSet::new();
        one.set(first).unwrap();
        sched_setaffinity(Pid::from_raw(0), &one).unwrap();
        Self { before }
    }
}

impl Drop for OneCpu {
    fn drop(&mut self) {
        // A failure leaves the next stories of this thread on one CPU, which is slow and not wrong.
        let _ = sched_setaffinity(Pid::from_raw(0), &self.before);
    }
}
