//! Removes what Cilium leaves on a machine after it has ended. `cilium-dbg` removes its programs, maps and devices;
//! this module removes the rest.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};
use mirror_test_tools::process::{Run as _, command};
use nix::mount::{MntFlags, umount2};

use super::{
    super::{filter, state},
    Programs,
};

/// Cilium's own directory: its sockets and its state.
const DIR: &str = "/run/cilium";
/// The iptables tables in which Cilium adds rules.
const TABLES: [&str; 4] = ["raw", "mangle", "nat", "filter"];
/// Directories of the BPF file system that Cilium leaves empty, innermost first.
const BPFFS: [&str; 2] = ["/sys/fs/bpf/tc/globals", "/sys/fs/bpf/tc"];
/// The file that lists the nft tables from before Cilium.
const BEFORE: &str = "cilium/tables-before";

/// Records the state before Cilium runs for the first time. Fails if another Cilium runs here.
pub(super) fn note() -> Result<()> {
    let file = state::path(BEFORE);
    if file.exists() {
        return Ok(());
    }
    if Path::new(DIR).exists() {
        bail!("{DIR} exists: another Cilium runs on this machine, or has left it");
    }
    let tables = nft().args(["list", "tables"]).read()?;
    fs::write(file, tables).context(BEFORE)
}

/// Removes everything, if Cilium has run. Continues after an error, and returns the first error.
pub(super) fn remove(programs: &Programs) -> Result<()> {
    if !state::path(BEFORE).exists() {
        return Ok(());
    }
    let mut outcomes = vec![clean_up(programs), remove_sets(), remove_directory()];
    let program = |name: &str| tool(&format!("iptables-{name}"));
    outcomes.extend(TABLES.map(|table| filter::remove_chains(program, table, "CILIUM_")));
    outcomes.push(remove_tables());
    for dir in BPFFS {
        // Not recursive: a directory that is not empty is in use by other software.
        let _ = fs::remove_dir(dir);
    }
    outcomes.into_iter().collect()
}

fn clean_up(programs: &Programs) -> Result<()> {
    let mut cleanup = command(programs.built("cilium-dbg"));
    let output = cleanup.args(["post-uninstall-cleanup", "--force"]).output().context("cilium-dbg")?;
    if !output.status.success() {
        bail!("cilium-dbg does not clean up: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// A command that the agent calls, too.
fn tool(name: &str) -> Command {
    command(state::path("cilium/bin").join(name))
}

fn nft() -> Command {
    command(state::path("bin/nft"))
}

/// iptables creates a table when it first lists it. Empty tables that did not exist before Cilium are removed.
fn remove_tables() -> Result<()> {
    let before = fs::read_to_string(state::path(BEFORE)).context(BEFORE)?;
    let now = nft().args(["list", "tables"]).read()?;
    for table in TABLES {
        let line = format!("table ip {table}");
        let is_new = now.lines().any(|now| now == line) && !before.lines().any(|before| before == line);
        if is_new && !tool("iptables-save").args(["-t", table]).read()?.contains("\n-A ") {
            nft().args(["delete", "table", "ip", table]).run()?;
        }
    }
    Ok(())
}

fn remove_sets() -> Result<()> {
    let sets = tool("ipset").args(["list", "-name"]).read()?;
    sets.lines()
        .filter(|set| set.starts_with("cilium_"))
        .try_for_each(|set| tool("ipset").args(["destroy", set]).run())
}

fn remove_directory() -> Result<()> {
    let table = fs::read_to_string("/proc/self/mounts")?;
    let paths = table.lines().filter_map(|line| line.split(' ').nth(1)).map(PathBuf::from);
    for mount in paths.filter(|path| path.starts_with(DIR)) {
        umount2(&mount, MntFlags::MNT_DETACH).with_context(|| mount.display().to_string())?;
    }
    match fs::remove_dir_all(DIR) {
        Err(error) if Path::new(DIR).exists() => Err(error).context(DIR),
        _ => Ok(()),
    }
}
