//! [`OneCpu`]: keeps packets in order.

use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};

/// While this exists, the thread that created it runs on one CPU, and so do the threads and programs that it starts.
/// Their packets then do not overtake each other in veths. ERSPAN numbers its packets, and the kernel's receiver drops
/// a packet that another has overtaken.
#[derive(Debug)]
pub struct OneCpu {
    before: CpuSet,
}

impl OneCpu {
    /// Pins to the first CPU that the calling thread may use.
    #[track_caller]
    pub fn of_this_thread() -> Self {
        Self::numbered(Self::usable()[0])
    }

    /// Pins to the CPU with this number.
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
        // After a failure the next stories of this thread stay on one CPU, which is slow but correct.
        let _ = sched_setaffinity(Pid::from_raw(0), &self.before);
    }
}
