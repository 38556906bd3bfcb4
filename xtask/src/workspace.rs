//! Finds the workspace, and runs cargo in it. The tasks call this module.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::{pins, process::Run as _, process::command};

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

/// cargo's metadata of the members (`cargo metadata`).
pub(crate) fn metadata() -> Result<Value> {
    let metadata = rustup_cargo("metadata").args(["--no-deps", "--format-version=1"]).read()?;
    serde_json::from_str(&metadata).context("cargo's metadata")
}

/// The result of a build.
#[derive(Debug, Default)]
pub(crate) struct Built {
    pub(crate) executables: Vec<PathBuf>,
    /// The environment variables that build scripts set for the compiler, which the code reads with `env!`.
    pub(crate) variables: BTreeMap<String, String>,
}

impl Built {
    /// The executable of a build that makes one.
    pub(crate) fn executable(&self) -> Result<PathBuf> {
        self.executables.first().cloned().context("cargo built no executable")
    }

    /// The executable whose file name satisfies `is_it`.
    fn named(&self, is_it: impl Fn(&str) -> bool) -> Result<PathBuf> {
        let name = |path: &&PathBuf| path.file_name().and_then(|name| name.to_str()).is_some_and(&is_it);
        self.executables.iter().find(name).cloned().context("cargo did not build what it was asked for")
    }

    /// Parses cargo's messages, one JSON object per line.
    fn of(messages: &str) -> Result<Self> {
        let mut built = Self::default();
        for line in messages.lines() {
            let message: Value = serde_json::from_str(line).context("cargo's messages")?;
            built.executables.extend(message["executable"].as_str().map(PathBuf::from));
            for variable in message["env"].as_array().into_iter().flatten() {
                if let (Some(name), Some(value)) = (variable[0].as_str(), variable[1].as_str()) {
                    built.variables.insert(name.to_owned(), value.to_owned());
                }
            }
        }
        Ok(built)
    }
}

/// A test target (`tests/tests/<name>`), and the agent's debug build.
pub(crate) struct Tested {
    pub(crate) test: PathBuf,
    pub(crate) agent: PathBuf,
}

/// Builds a test target and the agent.
pub(crate) fn tested(name: &str) -> Result<Tested> {
    let mut build = members("build");
    build.args(["--bin", "mirror-agent", "--test", name]);
    let built = built_by(build)?;
    Ok(Tested {
        test: built.named(|file| file.starts_with(&format!("{name}-")))?,
        agent: built.named(|file| file == "mirror-agent")?,
    })
}

/// Builds a program for development, with the same selection, and returns its path.
pub(crate) fn program(name: &str) -> Result<PathBuf> {
    let mut build = members("build");
    build.args(["--bin", name]);
    built_by(build)?.executable()
}

/// Builds a benchmark of the tests, optimised, and returns its path.
pub(crate) fn benchmark(name: &str) -> Result<PathBuf> {
    let mut build = cargo("bench");
    build.args(["--package", "mirror-tests", "--bench", name, "--no-run"]);
    built_by(build)?.named(|file| file.starts_with(&format!("{name}-")))
}

/// Runs a cargo command that builds at least one executable.
pub(crate) fn built_by(mut build: Command) -> Result<Built> {
    let built = Built::of(&build.arg("--message-format=json-render-diagnostics").read()?)?;
    ensure!(!built.executables.is_empty(), "cargo made no executable: {build:?}");
    Ok(built)
}

/// Builds the agent for development, with the same selection, and returns its path.
pub(crate) fn agent() -> Result<PathBuf> {
    Ok(tested("demo")?.agent)
}

/// Builds the agent for users, and returns its path.
pub(crate) fn release_agent() -> Result<PathBuf> {
    let mut build = cargo("build");
    build.args(["--package", "mirror-agent", "--bin", "mirror-agent", "--release"]);
    built_by(build)?.executable()
}
