//! Finds the workspace, and runs cargo and git in it. The tasks call this module.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::{
    pins, portable,
    process::{Run as _, command},
};

/// The agent's package and program.
pub(crate) const AGENT: &str = "mirror-agent";
/// The kubectl plugin's.
pub(crate) const PLUGIN: &str = "kubectl-mirror";

/// The root directory of the work tree.
pub(crate) fn root() -> PathBuf {
    let manifest_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest_dir.parent().unwrap_or(manifest_dir).to_owned()
}

/// The files of the work tree that match one of git's patterns, new ones too.
pub(crate) fn files(patterns: &[&str]) -> Result<Vec<String>> {
    let mut git = command("git");
    git.args(["ls-files", "--cached", "--others", "--exclude-standard", "--"]).args(patterns);
    let files = git.current_dir(root()).read()?;
    // A file that was deleted without git is still in its index.
    Ok(files.lines().filter(|file| root().join(file).exists()).map(str::to_owned).collect())
}

/// The commit of the work tree, with `-dirty` if there are changes. `None` in an archive of the sources.
pub(crate) fn commit() -> Option<String> {
    let mut git = command("git");
    git.args(["--git-dir=.git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]);
    let output = git.current_dir(root()).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}

/// The pinned stable cargo, in the work tree.
pub(crate) fn rustup_cargo(subcommand: &str) -> Command {
    let mut cargo = command("rustup");
    cargo.args(["run", pins::STABLE, "cargo", subcommand]).current_dir(root());
    cargo
}

/// The pinned stable cargo for a subcommand that resolves dependencies, with the lock file unchanged.
pub(crate) fn cargo(subcommand: &str) -> Command {
    let mut cargo = rustup_cargo(subcommand);
    cargo.arg("--locked");
    cargo
}

/// The same cargo for all members that are built for the host. All builds of tests use this selection: cargo rebuilds a
/// dependency for each selection of members that needs other features of it.
pub(crate) fn members(subcommand: &str) -> Command {
    let mut cargo = cargo(subcommand);
    cargo.args(["--workspace", "--exclude", "mirror-ebpf"]);
    cargo
}

/// Runs a cargo command that builds the program, test or benchmark `name`, and returns its path.
pub(crate) fn executable(build: Command, name: &str) -> Result<PathBuf> {
    executables(build, &[(name, "")]).map(|mut paths| paths.remove(0))
}

/// Runs a cargo command that builds programs, each for a target of Rust, and returns their paths.
pub(crate) fn executables(mut build: Command, programs: &[(&str, &str)]) -> Result<Vec<PathBuf>> {
    let messages = build.arg("--message-format=json-render-diagnostics").read()?;
    let messages = messages.lines().map(serde_json::from_str::<Value>).collect::<Result<Vec<_>, _>>();
    let messages = messages.context("cargo's messages")?;
    let path = |(name, target): &(&str, &str)| {
        let mut paths = messages.iter().filter(|message| message["target"]["name"] == *name);
        let path =
            paths.find_map(|message| message["executable"].as_str().filter(|path| path.contains(target)));
        path.map(PathBuf::from).with_context(|| format!("cargo did not build {name}: {build:?}"))
    };
    programs.iter().map(path).collect()
}

/// Builds a program for development, with the same selection, and returns its path.
pub(crate) fn program(name: &str) -> Result<PathBuf> {
    let mut build = members("build");
    build.args(["--bin", name]);
    executable(build, name)
}

/// Builds a test target (`tests/tests/<test>`) and the agent for development, and returns the path of `name`, one of the
/// two.
pub(crate) fn tested(test: &str, name: &str) -> Result<PathBuf> {
    let mut build = members("build");
    build.args(["--bin", AGENT, "--test", test]);
    executable(build, name)
}

/// Builds a benchmark of the tests, optimised, and returns its path.
pub(crate) fn benchmark(name: &str) -> Result<PathBuf> {
    let mut build = cargo("bench");
    build.args(["--package", "mirror-tests", "--bench", name, "--no-run"]);
    executable(build, name)
}

/// Builds the agent for users, and returns its path.
pub(crate) fn release_agent() -> Result<PathBuf> {
    let mut build = cargo("build");
    build.args(["--package", AGENT, "--bin", AGENT, "--profile", portable::RELEASE]);
    executable(build, AGENT)
}
