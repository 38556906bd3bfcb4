//! A command that runs beside tests, in the CPU time that they leave: they mostly wait. Its output follows its end.

use std::{
    env,
    fs::File,
    io,
    path::PathBuf,
    process::{Child, Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};

use crate::{
    process::{command, step},
    workspace,
};

/// A running command.
pub(crate) struct Beside {
    name: &'static str,
    child: Child,
    output: PathBuf,
}

impl Beside {
    /// Starts a command. Its name is that of the file with its output, too.
    pub(crate) fn start(name: &'static str, mut command: Command) -> Result<Self> {
        let output = workspace::root().join(format!("target/beside-{name}.txt"));
        let file = File::create(&output).with_context(|| output.display().to_string())?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().with_context(|| name)?;
        step(&format!("{name} runs beside the next tests, into {}", output.display()));
        Ok(Self { name, child, output })
    }

    /// Starts `cargo xtask test --level LEVEL` with the lowest priority.
    pub(crate) fn level(name: &'static str) -> Result<Self> {
        let mut nice = command("nice");
        nice.args(["-n", "19"]).arg(env::current_exe()?).args(["test", "--level", name]);
        Self::start(name, nice)
    }

    /// Waits for its end, and prints its output.
    ///
    /// # Errors
    ///
    /// The command failed.
    pub(crate) fn end(mut self) -> Result<()> {
        let status = self.child.wait()?;
        step(&format!("{}, which ran beside", self.name));
        io::copy(&mut File::open(&self.output)?, &mut io::stdout())?;
        ensure!(status.success(), "{} failed: {status}", self.name);
        Ok(())
    }
}
