//! Runs other programs, and prints progress.

use std::{
    env,
    ffi::OsStr,
    io::Write as _,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};

use crate::ebpf::without_outer_cargo;

/// Prints the next step.
pub fn step(what: &str) {
    println!("==> {what}");
    // Other programs write to the same terminal or file.
    let _ = std::io::stdout().flush();
}

/// A command that runs without the environment of `cargo run`.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    without_outer_cargo(&mut command);
    command
}

/// Runs a program to its end. A failure is an error that names the program.
pub trait Run {
    /// Runs with this process's standard output and error.
    fn run(&mut self) -> Result<()>;
    /// Runs, and returns the standard output.
    fn read(&mut self) -> Result<String>;
    /// Runs without output, and returns whether it succeeded.
    fn succeeds(&mut self) -> bool;
}

impl Run for Command {
    fn run(&mut self) -> Result<()> {
        let status = self.status().with_context(|| line(self))?;
        if !status.success() {
            bail!("`{}` failed: {status}", line(self));
        }
        Ok(())
    }

    fn read(&mut self) -> Result<String> {
        let output = self.stderr(Stdio::inherit()).output().with_context(|| line(self))?;
        if !output.status.success() {
            bail!("`{}` failed: {}", line(self), output.status);
        }
        String::from_utf8(output.stdout).with_context(|| line(self))
    }

    fn succeeds(&mut self) -> bool {
        let quiet = self.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        quiet.status().is_ok_and(|status| status.success())
    }
}

/// The command as a person would type it.
fn line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// Path of `program`, searched as the shell does, and in the directories for the administrator's programs.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    env::split_paths(&path).chain(system).map(|dir| dir.join(program)).find(|file| file.is_file())
}

/// Whether this process runs as root.
pub fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Whether this is an unattended run, in which nothing may be skipped.
pub fn is_ci() -> bool {
    env::var("CI").is_ok_and(|value| !value.is_empty() && value != "false" && value != "0")
}
