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
    let mut build = cargo(subcommand);
    build.args(arguments);
    made_by(build)
}

/// Runs a cargo that builds one executable, and returns it.
pub(crate) fn executable(build: Command) -> Result<PathBuf> {
    made_by(build)?.into_iter().next().context("cargo built no executable")
}

fn made_by(mut build: Command) -> Result<Vec<PathBuf>> {
    let output = build.arg("--message-format=json-render-diagnostics").read()?;
    let mut executables = Vec::new();
    for line in output.lines() {
        let message: serde_json::Value = serde_json::from_str(line).context("cargo's messages")?;
        if let Some(path) = message["executable"].as_str() {
            executables.push(path.into());
        }
    }
    if executables.is_empty() {
        bail!("cargo made no executable: {build:?}");
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
    let mut build = cargo("build");
    build.args(["--package", "mirror-agent", "--bin", "mirror-agent"]).args(profile);
    executable(build)
}
