//! Resource use of a process, for benches.

use std::{fs, time::Duration};

use nix::{
    time::{clock_getcpuclockid, clock_gettime},
    unistd::Pid,
};

const KIB_IN_MIB: f64 = 1024.0;

/// CPU time that a process has used.
pub fn cpu_time(pid: u32) -> Duration {
    let clock = clock_getcpuclockid(Pid::from_raw(pid.cast_signed())).unwrap();
    Duration::from(clock_gettime(clock).unwrap())
}

/// Resident memory of a process (RSS) in MiB: now, and its maximum so far.
pub fn memory(pid: u32) -> (f64, f64) {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let value = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        line.split_whitespace().next().unwrap().parse::<f64>().unwrap() / KIB_IN_MIB
    };
    (value("VmRSS:"), value("VmHWM:"))
}
