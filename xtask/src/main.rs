//! `cargo xtask`: the tasks of podmirror's developers, one file each.
//!
//! This file parses the command line and calls the task. It builds with any stable Rust from 1.90 on, and installs the
//! toolchains and programs that the tasks need (`tools`).

#![expect(clippy::print_stdout, reason = "a command line tool for people")]

#[cfg(not(target_os = "linux"))]
compile_error!(
    "podmirror is built, tested and run on Linux only: eBPF and network namespaces are of its kernel"
);

mod bench;
mod beside;
mod build_ebpf;
mod chart;
mod cluster;
mod demo;
#[expect(dead_code, reason = "what is for the build scripts only")]
mod ebpf;
mod fuzz;
mod generate;
mod image;
mod install;
mod layers;
mod lint;
mod pins;
mod portable;
mod release;
mod test;
mod tools;
mod vm;
mod workspace;

use anyhow::Result;
use clap::{Parser, Subcommand};
// The tasks use these as modules of this crate.
use mirror_test_tools::{apt, arch, archive, layout, process, programs, readers};

/// The tasks of podmirror's developers.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Measure, and print figures.
    Bench(bench::BenchArgs),
    /// Build the eBPF objects, and install the tools for them.
    BuildEbpf,
    /// Start and remove a real Kubernetes node on this machine.
    Cluster(cluster::ClusterArgs),
    /// Run the demo: two pods, one of them mirrored.
    Demo,
    /// Write the files that are generated and committed.
    Gen,
    /// Build the agent's container image.
    Image(image::ImageArgs),
    /// Build the kubectl plugin, and install it for this user.
    Install,
    /// Check format, lints, layers, dependencies and spelling.
    Lint,
    /// Make all that a version publishes, and push the image and the chart.
    Release(release::ReleaseArgs),
    /// Run the tests.
    Test(test::TestArgs),
    /// Run tests on another kernel, in qemu.
    Vm(vm::VmArgs),
}

fn main() -> Result<()> {
    match Cli::parse().task {
        Task::Bench(args) => bench::run(args),
        Task::BuildEbpf => build_ebpf::run(),
        Task::Cluster(args) => cluster::run(args),
        Task::Demo => demo::run(),
        Task::Gen => generate::run(),
        Task::Image(args) => image::run(args),
        Task::Install => install::run(),
        Task::Lint => lint::run(),
        Task::Release(args) => release::run(args),
        Task::Test(args) => test::run(args),
        Task::Vm(args) => vm::run(args),
    }
}
