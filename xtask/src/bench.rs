//! `cargo xtask bench`: prints figures for people. It never fails because of a time.

use anyhow::{Result, bail};
use clap::ValueEnum;

use crate::{
    cluster::level,
    process::{Run as _, is_root},
    programs,
    test::bpffs,
    tools, workspace,
};

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Bench {
    /// ns per packet of the tap programs.
    Packet,
    /// ns per packet by the kind of the target.
    Target,
    /// The agent with many pods: how soon it taps, its memory, its CPU time.
    Scale,
}

/// The command line of `cargo xtask bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct BenchArgs {
    /// What to measure.
    bench: Bench,
}

/// Measures and prints.
pub(crate) fn run(args: BenchArgs) -> Result<()> {
    if !is_root() {
        bail!("the benches load programs and make network namespaces: run them as root");
    }
    tools::stable()?;
    tools::bpf()?;
    programs::bring(&programs::NETWORK)?;
    bpffs()?;
    let mut bench = workspace::cargo("bench");
    bench.args(["--package", "mirror-tests", "--bench"]);
    match args.bench {
        Bench::Packet => bench.arg("packet").run(),
        // Here and below, the agent as users run it: optimised.
        Bench::Target => bench.arg("target").env("MIRROR_AGENT", workspace::release_agent()?).run(),
        Bench::Scale => level::with_api(bench.arg("scale").env("MIRROR_AGENT", workspace::release_agent()?)),
    }
}
