//! `cargo xtask build-ebpf`: installs the tools for the eBPF objects, and builds the objects.
//!
//! Run it once on a new machine, so that plain `cargo build` works: the agent's build script builds the same objects,
//! but does not install tools.

use anyhow::{Result, anyhow};

use crate::{ebpf, process::step, tools, workspace};

/// Installs the missing tools, and builds.
pub(crate) fn run() -> Result<()> {
    tools::bpf()?;
    step("building the eBPF programs");
    let root = workspace::root();
    let objects =
        ebpf::run(&root, ebpf::Action::Build, &root.join("target/bpf")).map_err(|why| anyhow!(why))?;
    step(&format!("{}", objects.mirror.display()));
    Ok(())
}
