//! Where the workspace is, and what cargo builds in it. Called by the tasks.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use crate::{pins, process::Run as _, process::command};

/// The crates that are built for the host.
pub(crate) const HOST_CRATES: [&str; 4] = ["mirror-common", "mirror-agent", "mirror-tests", "xtask"];

/// The root directory of the work tree.
pub(crate) fn root() -> PathBuf {
    let manifest_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest_dir.parent().unwrap_or(manifest_dir).to_owned()
}

/// The pinned stable cargo, in the work tree.
pub(crate) fn rustup_cargo(subcommand: &str) -> Command {
    let mut cargo = command("rustup");
    cargo.args(["run", pins::STABLE, "cargo", subcommand]).current_dir(root());
    cargo
}

/// The same for a subcommand that resolves dependencies, with the lock file as it is.
pub(crate) fn cargo(subcommand: &str) -> Command {
    let mut cargo = rustup_cargo(subcommand);
    cargo.arg("--locked");
    cargo
}

/// Builds with `cargo <arguments>` and returns the executables that came out of it.
pub(crate) fn executables(subcommand: &str, arguments: &[&str]) -> Result<Vec<PathBuf>> {
    let output = cargo(subcommand).args(arguments).arg("--message-format=json-render-diagnostics").read()?;
    let mut executables = Vec::new();
    for line in output.lines() {
        let message: serde_json::Value = serde_json::from_str(line).context("cargo's messages")?;
        if let Some(path) = message["executable"].as_str() {
            executables.push(path.into());
        }
    }
    if executables.is_empty() {
        bail!("`cargo {subcommand} {}` made no executable", arguments.join(" "));
    }
    Ok(executables)
}

/// Builds the agent as for development, and returns its path.
pub(crate) fn agent() -> Result<PathBuf> {
    build_agent(&[])
}

/// Builds the agent as for users, and returns its path.
pub(crate) fn release_agent() -> Result<PathBuf> {
    build_agent(&["--release"])
}

fn build_agent(profile: &[&str]) -> Result<PathBuf> {
    let arguments = [&["--package", "mirror-agent", "--bin", "mirror-agent"], profile].concat();
    let executables = executables("build", &arguments)?;
    executables.into_iter().next().context("cargo built no mirror-agent")
}
