//! Changes the machine's packet filter so that it forwards the packets of pods, and undoes these changes and
//! kube-proxy's.
//!
//! Docker and other programs set the policy of iptables' chain FORWARD to drop. A rule in another chain cannot override
//! that, so the cluster's rules are in the same chain. The node and `down` call this module.

use std::{
    io::Write as _,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};

use super::{NODE_CIDRS, machine::families, node::KUBE_PROXY, state, state::Cni};
use mirror_test_tools::process::{Run as _, command, step};

/// iptables' chain, by the names that nft uses.
const FORWARD: [&str; 2] = ["filter", "FORWARD"];
/// The families of addresses, by the names that nft uses.
const FAMILIES: [&str; 2] = ["ip", "ip6"];
/// The comment of the cluster's rules, by which `clear` finds them.
const COMMENT: &str = "\"podmirror-cluster\"";
/// The iptables tables in which kube-proxy adds rules.
const TABLES: [&str; 3] = ["filter", "mangle", "nat"];

/// The mode of kube-proxy. Each mode has one of the reference plugins, so that stories on both plugins test both modes.
pub(super) fn proxy_mode(cni: Cni) -> &'static str {
    if cni == Cni::Ptp { "iptables" } else { "nftables" }
}

/// Whether kube-proxy has rules for services, as its mode makes them.
pub(super) fn has_services(cni: Cni) -> bool {
    let (rules, service) = match proxy_mode(cni) {
        "iptables" => {
            (command(state::path("bin/iptables-save")).args(["-t", "nat"]).output(), "-j KUBE-SVC-")
        }
        _ => (nft().args(["list", "table", "ip", KUBE_PROXY]).output(), "goto service-"),
    };
    rules.is_ok_and(|rules| String::from_utf8_lossy(&rules.stdout).contains(service))
}

/// Adds rules that accept the packets of pods, if the chain would drop them.
pub(super) fn let_pods_through() -> Result<()> {
    for (family, cidr) in FAMILIES.into_iter().zip(families(&NODE_CIDRS)) {
        let chain = forward(family)?;
        if !chain.contains("policy drop") || chain.contains(COMMENT) {
            continue;
        }
        step("letting pods' packets through this machine's filter, which drops what is forwarded");
        for side in ["saddr", "daddr"] {
            let rule = [family, side, cidr, "accept", "comment", COMMENT];
            nft().args(["insert", "rule", family]).args(FORWARD).args(rule).run()?;
        }
    }
    Ok(())
}

/// Removes the cluster's rules and kube-proxy's.
pub(super) fn clear() -> Result<()> {
    if !state::path("bin/nft").exists() {
        return Ok(()); // no node was ever started
    }
    // kube-proxy does not remove its rules when it ends.
    let tables = nft().args(["list", "tables"]).read()?;
    for (family, tool) in FAMILIES.into_iter().zip(["iptables", "ip6tables"]) {
        for line in forward(family)?.lines().filter(|line| line.contains(COMMENT)) {
            if let Some((_, handle)) = line.rsplit_once("# handle ") {
                nft().args(["delete", "rule", family]).args(FORWARD).args(["handle", handle]).run()?;
            }
        }
        let is_there = |name: &&str| tables.lines().any(|line| line == format!("table {family} {name}"));
        let delete = |name: &str| nft().args(["delete", "table", family, name]).run();
        if is_there(&KUBE_PROXY) {
            delete(KUBE_PROXY)?;
        }
        let program = |name: &str| command(state::path(&format!("bin/{tool}-{name}")));
        for table in TABLES.into_iter().filter(is_there) {
            remove_chains(program, table, "KUBE-")?;
            if is_unused(&program("save").args(["-t", table]).read()?) {
                delete(table)?;
            }
        }
    }
    Ok(())
}

/// Removes the chains with this text in their names, and the rules that jump to them, by iptables' programs `save` and
/// `restore`.
pub(super) fn remove_chains(program: impl Fn(&str) -> Command, table: &str, name: &str) -> Result<()> {
    let saved = program("save").args(["-t", table]).read()?;
    let Some(text) = removal(table, &saved, name) else { return Ok(()) };
    let mut restore = program("restore").arg("--noflush").stdin(Stdio::piped()).spawn()?;
    restore.stdin.take().context("iptables-restore has no input")?.write_all(text.as_bytes())?;
    if !restore.wait()?.success() {
        bail!("iptables-restore does not remove the chains {name}:\n{text}");
    }
    Ok(())
}

/// Returns the input of iptables-restore that removes the chains with this text in their names, and the rules that jump
/// to them, from a table in the format of iptables-save.
fn removal(table: &str, saved: &str, name: &str) -> Option<String> {
    let chain = |line: &'_ str| Some(line.strip_prefix(':')?.split(' ').next()?.to_owned());
    let chains: Vec<_> = saved.lines().filter_map(chain).filter(|chain| chain.contains(name)).collect();
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

/// Whether a table in the format of iptables-save changes no packet. iptables creates such a table when it first lists
/// it.
fn is_unused(saved: &str) -> bool {
    let mut chains = saved.lines().filter(|line| line.starts_with(':')).peekable();
    chains.peek().is_some() && chains.all(|chain| chain.contains(" ACCEPT ")) && !saved.contains("\n-A ")
}

/// The chain with its rules and their handles. Empty if there is no such chain.
fn forward(family: &str) -> Result<String> {
    let output = nft().args(["--handle", "list", "chain", family]).args(FORWARD).output()?;
    Ok(if output.status.success() {
        String::from_utf8_lossy(&output.stdout).into_owned()
    } else {
        String::new()
    })
}

/// nft from the cluster's programs, because the machine may have no nft.
fn nft() -> Command {
    command(state::path("bin/nft"))
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
        assert_eq!(removal("filter", saved, "CILIUM_").unwrap(), expected);
        assert_eq!(removal("filter", "*filter\n:INPUT ACCEPT [0:0]\nCOMMIT\n", "CILIUM_"), None);
    }

    #[test]
    fn a_table_with_a_rule_a_policy_or_a_chain_of_others_is_used() {
        let table = |rest: &str| format!("*nat\n:INPUT ACCEPT [0:0]\n{rest}COMMIT\n");
        assert!(is_unused(&table("")));
        for rest in [":OUTPUT DROP [0:0]\n", ":DOCKER-USER - [0:0]\n", "-A INPUT -j ACCEPT\n"] {
            assert!(!is_unused(&table(rest)), "{rest}");
        }
        assert!(!is_unused("# Table `nat' is incompatible, use 'nft' tool.\n"));
    }
}
