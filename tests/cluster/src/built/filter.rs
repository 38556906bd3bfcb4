//! Changes the machine's packet filter so that it forwards the packets of pods, and undoes these changes.
//!
//! Docker and other programs set the policy of iptables' chain FORWARD to drop. A rule in another chain cannot override
//! that, so the cluster's rules are in the same chain. The node and `down` call this module.

use std::process::Command;

use anyhow::Result;

use super::{NODE_CIDR, state};
use mirror_test_tools::process::{Run as _, command, step};

/// iptables' chain, by the names that nft uses.
const FORWARD: [&str; 3] = ["ip", "filter", "FORWARD"];
/// The comment of the cluster's rules, by which `clear` finds them.
const COMMENT: &str = "\"podmirror-cluster\"";
/// kube-proxy's tables, which it does not remove when it ends.
const TABLES: [(&str, &str); 2] = [("ip", "kube-proxy"), ("ip6", "kube-proxy")];

/// Adds rules that accept the packets of pods, if the chain would drop them.
pub(super) fn let_pods_through() -> Result<()> {
    let chain = forward()?;
    if !chain.contains("policy drop") || chain.contains(COMMENT) {
        return Ok(());
    }
    step("letting pods' packets through this machine's filter, which drops what is forwarded");
    for side in ["saddr", "daddr"] {
        let rule = ["ip", side, NODE_CIDR, "accept", "comment", COMMENT];
        nft().args(["insert", "rule"]).args(FORWARD).args(rule).run()?;
    }
    Ok(())
}

/// Removes the cluster's rules and kube-proxy's tables.
pub(super) fn clear() -> Result<()> {
    if !state::path("bin/nft").exists() {
        return Ok(()); // no node was ever started
    }
    for line in forward()?.lines().filter(|line| line.contains(COMMENT)) {
        if let Some((_, handle)) = line.rsplit_once("# handle ") {
            nft().args(["delete", "rule"]).args(FORWARD).args(["handle", handle]).run()?;
        }
    }
    let tables = nft().args(["list", "tables"]).read()?;
    for (family, name) in TABLES {
        if tables.lines().any(|line| line == format!("table {family} {name}")) {
            nft().args(["delete", "table", family, name]).run()?;
        }
    }
    Ok(())
}

/// The chain with its rules and their handles. Empty if there is no such chain.
fn forward() -> Result<String> {
    let output = nft().args(["--handle", "list", "chain"]).args(FORWARD).output()?;
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
