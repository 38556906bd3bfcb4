//! `cargo xtask build-ebpf`: the eBPF objects alone, and the tools that they need.
//!
//! Run once on a new machine, it is also what makes plain `cargo build` work: the agent's build script builds the same
//! objects, but brings no tools.

use anyhow::{Result, anyhow};

use crate::{ebpf, process::step, tools, workspace};

/// Brings what is missing and builds.
pub(crate) fn run() -> Result<()> {
    tools::bpf()?;
    step("building the eBPF programs");
    let root = workspace::root();
    let objects =
        ebpf::run(&root, ebpf::Action::Build, &root.join("target/bpf")).map_err(|why| anyhow!(why))?;
    step(&format!("{}", objects.mirror.display()));
    Ok(())
}
