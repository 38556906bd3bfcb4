//! The benchmark with real traffic, run by `cargo xtask bench traffic`: sets up a node for each contestant, takes the
//! samples in rounds, and writes `results.json`, `report.md` and the plots.
//!
//! ```text
//! main ─► stage (a node with its servers and contestant) ─► network (its pods, and the other node)
//!      ─► load (one sample)
//!      ─► machine (its description)
//!      ─► mirror_test_traffic: the order, the figures, the report (pure)
//! ```
//!
//! Every contestant has its own node with the same pods, so nothing is reconfigured between turns. All traffic stays in
//! network namespaces of this run. No figure is a pass or fail.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a bench that cannot go on has failed")]
#![expect(clippy::print_stdout, reason = "its output")]

mod http;
mod load;
mod machine;
mod network;
mod stage;

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, anyhow, bail};
use clap::Parser;
use mirror_test_traffic::{
    figures::MIN_ROUNDS,
    plan::{Contestant, Kind, Scenario, Way, round},
    plots,
    report::markdown,
    results::{FORMAT, Results, Sample},
};
use mirror_tests::{kernel_is_at_least, random::Random};

use self::{
    load::{Cpus, Load},
    stage::Stage,
};

/// Measures real traffic with and without a mirror, and writes a report.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask bench traffic")]
struct Args {
    /// Show only that it works: few scenarios, two short rounds; half a minute.
    #[arg(long)]
    quick: bool,
    /// The directory for the report. It is made.
    #[arg(long, value_name = "DIR", default_value = "target/bench-traffic")]
    out: PathBuf,
    /// Measure only scenarios with this text in their names, for example udp-bandwidth or same-node/tcp-latency/64. Can
    /// be repeated.
    #[arg(long, value_name = "TEXT")]
    only: Vec<String>,
    /// Begin no round that would end later than this many minutes after the start. The first round is always completed.
    #[arg(long, value_name = "MINUTES", default_value_t = 40)]
    minutes: u64,
    /// How long a sample is to take, in ms.
    #[arg(long, value_name = "MS", default_value_t = 100, value_parser = clap::value_parser!(u64).range(10..=10_000))]
    sample: u64,
    /// The seed of the order of the turns [default: from the clock; it is printed].
    #[arg(long)]
    seed: Option<u64>,
    /// Print the names of the scenarios.
    #[arg(long)]
    list: bool,
    /// Measure nothing: write the report and the plots of an earlier run again, whose results.json this is.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["quick", "only", "minutes", "sample", "seed", "list"])]
    again: Option<PathBuf>,
}

/// Rounds of a quick run.
const QUICK_ROUNDS: usize = 2;
const QUICK_SAMPLE_MS: u64 = 30;

fn main() -> Result<()> {
    let args = Args::parse();
    if let Some(path) = &args.again {
        return again(path, &args.out);
    }
    let mut scenarios = Scenario::chosen(&args.only).map_err(|why| anyhow!(why))?;
    if args.quick && args.only.is_empty() {
        scenarios.retain(is_quick);
    }
    if args.list {
        scenarios.iter().for_each(|scenario| println!("{scenario}"));
        return Ok(());
    }
    ctrlc::set_handler(mirror_tests::interrupt)?;
    fs::create_dir_all(&args.out).with_context(|| args.out.display().to_string())?;
    let results = run(&args, &scenarios)?;
    println!("==> {} rounds; the report is {}", results.rounds, args.out.join("report.md").display());
    if results.rounds < MIN_ROUNDS && !args.quick {
        bail!(
            "{} rounds are no result, {MIN_ROUNDS} are needed: give it more --minutes than {}, or fewer scenarios with \
             --only",
            results.rounds,
            args.minutes
        );
    }
    Ok(())
}

/// Writes the report of an earlier run.
fn again(path: &Path, out: &Path) -> Result<()> {
    let of = || path.display().to_string();
    let results: Results =
        serde_json::from_str(&fs::read_to_string(path).with_context(of)?).with_context(of)?;
    fs::create_dir_all(out).with_context(|| out.display().to_string())?;
    write_report(out, &results)
}

/// Selects each way once, and once each kind whose samples can be short.
fn is_quick(scenario: &Scenario) -> bool {
    if scenario.kind == Kind::Ping {
        return scenario.parameter == 0;
    }
    let is_sockperf = matches!(scenario.kind, Kind::TcpSockperf | Kind::UdpSockperf);
    scenario.parameter == 64
        && !is_sockperf
        && (scenario.way == Way::SameNode || scenario.kind == Kind::TcpLatency)
}

/// The whole run. The files are written after every round, so that they exist if a later round fails.
fn run(args: &Args, scenarios: &[Scenario]) -> Result<Results> {
    let begun = Instant::now();
    let seed = args
        .seed
        .unwrap_or_else(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |time| time.as_secs()));
    let mut random = Random::new(seed);
    let sample_ms = if args.quick { QUICK_SAMPLE_MS } else { args.sample };
    let cpus = Cpus::of_this_machine()?;
    let machine = machine::read()?;
    println!("==> {} scenarios, --seed {seed}, load {}", scenarios.len(), machine.load_before);

    let mut contestants: Vec<_> = Contestant::ALL.to_vec();
    contestants.retain(|one| scenarios.iter().any(|scenario| scenario.contestants().contains(one)));
    let (present, missing): (Vec<_>, Vec<_>) =
        contestants.into_iter().partition(|one| !one.needs_tcx() || kernel_is_at_least(6, 6));
    println!("==> a node for each of {} contestants", present.len());
    let stages = set_up(&present, scenarios, cpus);
    println!("==> ready after {} s", begun.elapsed().as_secs());

    let load = Load::calibrated(cpus, &stages[0], scenarios, Duration::from_millis(sample_ms));
    // The figures of a quick run do not count.
    for stage in stages.iter().filter(|_| !args.quick) {
        warm_up(&load, stage, scenarios);
    }
    let mut results = Results {
        format: FORMAT,
        machine,
        seed,
        quick: args.quick,
        rounds: 0,
        sample_ms,
        took_s: 0,
        contestants: present.clone(),
        remarks: remarks(cpus, &missing),
        samples: Vec::new(),
    };
    let standing_remarks = results.remarks.clone();
    loop {
        let round_begun = Instant::now();
        let number = results.rounds + 1;
        for (scenario, contestant) in round(scenarios, &present, &mut random) {
            let stage = stages.iter().find(|stage| stage.contestant() == contestant).unwrap();
            let (messages, figures) = load.sample(stage, scenario);
            results.samples.push(Sample { round: number, scenario, contestant, messages, figures });
        }
        results.rounds = number;
        results.took_s = begun.elapsed().as_secs();
        results.machine.load_after = machine::load()?;
        results.remarks = standing_remarks.clone();
        results.remarks.extend(stages.iter().filter_map(Stage::copies));
        write(&args.out, &results)?;
        println!("==> round {number} took {} s", round_begun.elapsed().as_secs());
        let is_last = match args.quick {
            true => number == QUICK_ROUNDS,
            false => begun.elapsed() + round_begun.elapsed() > Duration::from_secs(60 * args.minutes),
        };
        if is_last {
            break;
        }
    }
    stages.into_iter().for_each(Stage::end);
    Ok(results)
}

/// Takes one sample of a contestant on each way, and discards it.
fn warm_up(load: &Load, stage: &Stage, scenarios: &[Scenario]) {
    for way in Way::ALL {
        let takes_part = |scenario: &&Scenario| {
            scenario.way == way && scenario.contestants().contains(&stage.contestant())
        };
        if let Some(scenario) = scenarios.iter().find(takes_part) {
            load.sample(stage, *scenario);
        }
    }
}

/// Creates the nodes concurrently, because most of the time is spent waiting for the kernel.
fn set_up(present: &[Contestant], scenarios: &[Scenario], cpus: Cpus) -> Vec<Stage> {
    thread::scope(|scope| {
        let threads: Vec<_> =
            present.iter().map(|one| scope.spawn(move || Stage::new(*one, scenarios, cpus))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|why| std::panic::resume_unwind(why)))
            .collect()
    })
}

/// Remarks that apply to every run.
fn remarks(cpus: Cpus, missing: &[Contestant]) -> Vec<String> {
    let mut remarks = vec![cpus.remark()];
    let names: Vec<_> = missing.iter().map(|contestant| contestant.title()).collect();
    if !names.is_empty() {
        remarks.push(format!(
            "This kernel has no TCX (Linux 6.6), so these did not take part: {}.",
            names.join("; ")
        ));
    }
    remarks
}

fn write(out: &Path, results: &Results) -> Result<()> {
    let path = out.join("results.json");
    fs::write(&path, serde_json::to_string_pretty(results)? + "\n")
        .with_context(|| path.display().to_string())?;
    write_report(out, results)
}

fn write_report(out: &Path, results: &Results) -> Result<()> {
    let mut files = plots::all(results).map_err(|why| anyhow!(why))?;
    files.push(("report.md".to_owned(), markdown(results)));
    for (name, content) in files {
        let path = out.join(name);
        fs::write(&path, content).with_context(|| path.display().to_string())?;
    }
    Ok(())
}
