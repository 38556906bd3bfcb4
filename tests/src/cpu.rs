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
        Self::numbered(Self::usable()[0])
    }

    /// The CPU with this number.
    #[track_caller]
    pub fn numbered(cpu: usize) -> Self {
        let before = sched_getaffinity(Pid::from_raw(0)).unwrap();
        let mut one = CpuSet::new();
        one.set(cpu).unwrap();
        sched_setaffinity(Pid::from_raw(0), &one).unwrap();
        Self { before }
    }

    /// The numbers of the CPUs that the calling thread may use: at least one.
    #[track_caller]
    pub fn usable() -> Vec<usize> {
        let usable = sched_getaffinity(Pid::from_raw(0)).unwrap();
        (0..CpuSet::count()).filter(|cpu| usable.is_set(*cpu).unwrap()).collect()
    }
}

impl Drop for OneCpu {
    fn drop(&mut self) {
        // A failure leaves the next stories of this thread on one CPU, which is slow and not wrong.
        let _ = sched_setaffinity(Pid::from_raw(0), &self.before);
    }
}
