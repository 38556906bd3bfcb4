//! A description of the machine that runs the benchmark.

use std::{collections::BTreeMap, env, fs, process::Command};

use anyhow::{Context as _, Result};
use mirror_test_traffic::results::Machine;

use crate::load::CONGESTION_CONTROL;

pub(crate) fn read() -> Result<Machine> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo")?;
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let governor = fs::read_to_string("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
    let release = nix::sys::utsname::uname()?.release().to_string_lossy().into_owned();
    let load = load()?;
    let mut versions = BTreeMap::from([("TCP".to_owned(), CONGESTION_CONTROL.to_owned())]);
    let agent = env::var_os("MIRROR_AGENT").context("`cargo xtask bench traffic` sets MIRROR_AGENT")?;
    for (name, mut command) in [
        ("podmirror", Command::new(agent)),
        ("iperf3", Command::new("iperf3")),
        ("redis", Command::new("redis-benchmark")),
        ("sockperf", Command::new("sockperf")),
        ("tcpdump", Command::new("tcpdump")),
        ("wrk", Command::new("wrk")),
    ] {
        let output = command.arg("--version").output().with_context(|| name.to_owned())?;
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        let version = match text.trim().strip_prefix("mirror-agent ") {
            // The version includes the commit.
            Some(version) => Some(version),
            None => text
                .split([' ', ',', '\n'])
                .find(|word| word.contains(|c: char| c.is_ascii_digit() || c == '#')),
        };
        versions.insert(name.to_owned(), version.unwrap_or("unknown").to_owned());
    }
    Ok(Machine {
        kernel: release,
        cpu: model.map_or("unknown", |(_, model)| model).to_owned(),
        cpus: cpuinfo.lines().filter(|line| line.starts_with("processor")).count(),
        governor: governor
            .map_or("none (the machine does not show one)".to_owned(), |text| text.trim().to_owned()),
        load_before: load,
        load_after: load,
        versions,
    })
}

/// The load average of the last minute.
pub(crate) fn load() -> Result<f64> {
    let load = fs::read_to_string("/proc/loadavg")?;
    load.split(' ').next().and_then(|first| first.parse().ok()).context("/proc/loadavg begins with a number")
}
