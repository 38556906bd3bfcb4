//! The agent's size and speed: from its start to the first tap, and its memory with many. Run by
//! `cargo xtask bench agent`. Prints, and a person reads.

#![expect(clippy::unwrap_used, reason = "a bench that cannot go on has failed")]
#![expect(clippy::print_stdout, reason = "its output")]

use std::{fs, time::Instant};

use mirror_tests::{Agent, AttachMode, Lab, PodNs, PodSpec, PodsFile};

const STARTS: usize = 15;
const PODS: usize = 100;

fn main() {
    let lab = Lab::new("bench-agent");
    lab.bridge("br0");
    let pods: Vec<PodNs> = (0..PODS).map(|number| lab.pod(&format!("p{number}"), "br0")).collect();
    let specs: Vec<PodSpec> = pods.iter().map(|pod| PodSpec::of(pod).mirror("true")).collect();
    let file = PodsFile::new(&lab, &specs);
    let mode = if AttachMode::Tcx.is_applicable() { AttachMode::Tcx } else { AttachMode::Clsact };

    let mut first = Vec::new();
    let mut all = Vec::new();
    let mut rss = Vec::new();
    for _ in 0..STARTS {
        let start = Instant::now();
        let agent = Agent::run(&lab, mode, &file, &[]);
        agent.wait_for_log(&["\"mirroring\""]);
        first.push(start.elapsed().as_secs_f64() * 1e3);
        agent.wait_for_taps(PODS);
        all.push(start.elapsed().as_secs_f64() * 1e3);
        let status = fs::read_to_string(format!("/proc/{}/status", agent.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let kib: f64 = line.split_whitespace().next().unwrap().parse().unwrap();
        rss.push(kib / 1024.0);
        agent.stop();
        lab.cleanup();
    }
    println!("agent with {PODS} pods, {}, {STARTS} starts      median  worst", mode.name());
    for (what, values) in [
        ("start to the first tap, ms", &mut first),
        ("start to the last tap, ms", &mut all),
        ("memory (RSS), MiB", &mut rss),
    ] {
        values.sort_by(f64::total_cmp);
        println!("  {what:<36} {:>8.1} {:>6.1}", values[values.len() / 2], values[values.len() - 1]);
    }
}
