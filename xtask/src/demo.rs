//! `cargo xtask demo`: builds the agent and the story `tests/tests/demo`, and replaces itself by the story.

use std::os::unix::process::CommandExt as _;

use anyhow::{Context as _, Result, ensure};

use crate::{
    process::{command, is_root, step},
    programs,
    test::bpffs,
    tools,
    workspace::{AGENT, tested},
};

/// Runs the demo. Returns only if it cannot run.
pub(crate) fn run() -> Result<()> {
    ensure!(is_root(), "the demo needs root, to load programs and to make network namespaces");
    tools::stable()?;
    tools::bpf()?;
    programs::bring(&programs::NETWORK)?;
    bpffs()?;
    step("building the agent");
    let (demo, agent) = (tested("demo", "demo")?, tested("demo", AGENT)?);
    // Replaces this process, so that Ctrl-C does not end it before the demo has removed what it created.
    Err(command(&demo).env("MIRROR_AGENT", agent).exec()).with_context(|| demo.display().to_string())
}
