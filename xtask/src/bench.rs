//! `cargo xtask bench`: figures for people. It never fails because of a time.

use std::os::unix::process::CommandExt as _;

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;

use crate::{
    cluster::level,
    process::{Run as _, command, is_root},
    programs,
    test::bpffs,
    tools, vm, workspace,
};

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Bench {
    /// ns per packet of the tap programs.
    Packet,
    /// ns per packet by the kind of the target.
    Target,
    /// A few pings in a gigabit of junk: what a capture has of them.
    Capture,
    /// The agent with many pods: how soon it taps, its memory, its CPU time.
    Scale,
    /// The controller with 1000 simulated nodes: its writes, its memory, its CPU time.
    Controller,
    /// The packets API by a pod's rate and its number of readers: packets lost, CPU time, memory, the first packet.
    Packets,
    /// The mirror of Open vSwitch beside podmirror, in a guest whose kernel has both.
    Switch,
    /// Real traffic with and without a mirror, beside other ways to copy: a report with plots.
    Traffic,
}

/// The command line of `cargo xtask bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct BenchArgs {
    /// What to measure.
    bench: Bench,
    /// The options of `traffic`; `cargo xtask bench traffic -- --help` lists them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Runs the benchmark, which prints its figures.
pub(crate) fn run(args: BenchArgs) -> Result<()> {
    let BenchArgs { bench, arguments } = args;
    let is_understood = bench == Bench::Traffic || arguments.is_empty();
    ensure!(is_understood, "`{}` is not understood: only `bench traffic` has options", arguments.join(" "));
    ensure!(is_root(), "the benches load programs and make network namespaces: run them as root");
    tools::stable()?;
    tools::bpf()?;
    programs::bring(&programs::NETWORK)?;
    bpffs()?;
    let name = bench.to_possible_value().context("each has a name")?;
    let mut cargo = workspace::cargo("bench");
    cargo.args(["--package", "mirror-tests", "--bench", name.get_name()]);
    if bench != Bench::Packet {
        // The agent is optimised, as users run it.
        cargo.env("MIRROR_AGENT", workspace::release_agent()?);
    }
    match bench {
        Bench::Packet | Bench::Target | Bench::Capture => cargo.run(),
        Bench::Scale | Bench::Controller | Bench::Packets => level::with_api(&mut cargo, None),
        Bench::Switch => vm::bench_switch(),
        Bench::Traffic => {
            programs::bring(&programs::TRAFFIC)?;
            let agent = workspace::release_agent()?;
            let mut traffic = command(workspace::program("traffic")?);
            // Replaces this process, so that Ctrl-C does not end it before the benchmark has removed what it created.
            Err(traffic.env("MIRROR_AGENT", agent).args(arguments).exec()).context("bench traffic")
        }
    }
}
