//! `cargo xtask install`: builds the kubectl plugin with the pinned toolchain, and installs it for the user who runs
//! the command.

use anyhow::Result;

use crate::{process::Run as _, tools, workspace};

/// Installs the plugin beside cargo's other programs. rustup has added their directory to `PATH`, where kubectl searches.
pub(crate) fn run() -> Result<()> {
    tools::stable()?;
    workspace::cargo("install").args(["--path", "kubectl-mirror"]).run()
}
