//! The level fuzz beyond the filters against libpcap: cargo-fuzz on each target of `tests/fuzz`, for a time.

use std::{env, fs, path::Path};

use anyhow::{Context as _, Result, ensure};

use crate::{
    pins,
    process::{Run as _, command, step},
    tools,
};

/// The time for each target, in seconds, and the variable for another one.
const SECONDS: &str = "60";
const VARIABLE: &str = "MIRROR_FUZZ_SECONDS";

/// Most MiB of memory, and seconds for one input: a parser that needs more is a defect.
const LIMITS: [&str; 2] = ["-rss_limit_mb=2048", "-timeout=10"];

/// Runs the targets whose names are in `only`; empty: all. What they find is kept in `target/fuzz-corpus`, for the next run.
pub(crate) fn run(only: &[String]) -> Result<()> {
    let cargo_fuzz = tools::cargo_program("cargo-fuzz", "cargo-fuzz", pins::CARGO_FUZZ)?;
    let seconds = env::var(VARIABLE).unwrap_or_else(|_| SECONDS.to_owned());
    let seeds = Path::new("tests/fuzz/seeds");
    let mut targets = fs::read_dir(seeds)
        .context("cannot list the targets")?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<Vec<_>>>()?;
    targets.retain(|target| only.is_empty() || only.contains(target));
    targets.sort();
    ensure!(!targets.is_empty(), "no target of tests/fuzz is named {}", only.join(" "));
    for target in targets {
        step(&format!("fuzzing {target} for {seconds} s"));
        let corpus = Path::new("target/fuzz-corpus").join(&target);
        fs::create_dir_all(&corpus).with_context(|| format!("cannot make {}", corpus.display()))?;
        let mut fuzz = command("rustup");
        fuzz.args(["run", pins::NIGHTLY]).arg(cargo_fuzz.get_program());
        fuzz.args(["run", "--fuzz-dir", "tests/fuzz", "--target-dir", "target/fuzz", &target]);
        fuzz.arg(&corpus).arg(seeds.join(&target));
        fuzz.args(["--", &format!("-max_total_time={seconds}"), "-print_final_stats=1"]).args(LIMITS);
        fuzz.run().with_context(|| format!("the target {target} has found a defect"))?;
    }
    Ok(())
}
