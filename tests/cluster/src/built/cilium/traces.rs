//! Removes what Cilium leaves on a machine after it has ended. `cilium-dbg` removes its programs, maps and devices;
//! this module removes the rest.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};
use mirror_test_tools::process::{Run as _, command};
use nix::mount::{MntFlags, umount2};

use super::{super::state, Programs};

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
    outcomes.extend(TABLES.map(remove_rules));
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

fn remove_rules(table: &str) -> Result<()> {
    let saved = tool("iptables-save").args(["-t", table]).read()?;
    let Some(text) = removal(table, &saved) else { return Ok(()) };
    let mut restore = tool("iptables-restore").arg("--noflush").stdin(Stdio::piped()).spawn()?;
    restore.stdin.take().context("iptables-restore has no input")?.write_all(text.as_bytes())?;
    if !restore.wait()?.success() {
        bail!("iptables-restore does not remove Cilium's rules:\n{text}");
    }
    Ok(())
}

/// Returns the input of iptables-restore that removes Cilium's chains, and the rules that jump to them, from a table in
/// the format of iptables-save.
fn removal(table: &str, saved: &str) -> Option<String> {
    let chain = |line: &'_ str| Some(line.strip_prefix(':')?.split(' ').next()?.to_owned());
    let chains: Vec<_> = saved.lines().filter_map(chain).filter(|name| name.contains("CILIUM_")).collect();
    if chains.is_empty() {
        return None;
    }
    let is_of_others = |rule: &&str| !chains.iter().any(|chain| rule.split(' ').next() == Some(chain));
    let leads_there = |rule: &&str| chains.iter().any(|chain| rule.ends_with(&format!("-j {chain}")));
    let rules = saved.lines().filter_map(|line| line.strip_prefix("-A "));
    let jumps = rules.filter(is_of_others).filter(leads_there).map(|rule| format!("-D {rule}\n"));
    let emptied = chains.iter().map(|chain| format!("-F {chain}\n"));
    let removed = chains.iter().map(|chain| format!("-X {chain}\n"));
    let lines: String = jumps.chain(emptied).chain(removed).collect();
    Some(format!("*{table}\n{lines}COMMIT\n"))
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

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn chains_of_cilium_are_removed_and_no_rule_of_others() {
        let saved = "*filter\n:INPUT ACCEPT [0:0]\n:DOCKER - [0:0]\n:CILIUM_INPUT - [0:0]\n\
            -A INPUT -m comment --comment \"cilium-feeder: CILIUM_INPUT\" -j CILIUM_INPUT\n\
            -A INPUT -m comment --comment \"not CILIUM_INPUT\" -j DOCKER\n\
            -A CILIUM_INPUT -m mark --mark 0x200/0xf00 -j ACCEPT\nCOMMIT\n";
        let expected = "*filter\n-D INPUT -m comment --comment \"cilium-feeder: CILIUM_INPUT\" -j CILIUM_INPUT\n\
            -F CILIUM_INPUT\n-X CILIUM_INPUT\nCOMMIT\n";
        assert_eq!(removal("filter", saved).unwrap(), expected);
        assert_eq!(removal("filter", "*filter\n:INPUT ACCEPT [0:0]\nCOMMIT\n"), None);
    }
}
