//! The machine's packet filter: pods are let through where it drops what is forwarded, and nothing of ours stays.
//!
//! Docker and others give iptables' chain FORWARD the policy to drop. No rule elsewhere overrules that, so that ours
//! have to stand in the same chain. Called by the node, and by `down`.

use std::process::Command;

use anyhow::Result;

use super::{NODE_CIDR, state};
use mirror_test_tools::process::{Run as _, command, step};

/// iptables' chain, as nft calls it.
const FORWARD: [&str; 3] = ["ip", "filter", "FORWARD"];
/// Our rules' comment, by which they are found again.
const COMMENT: &str = "\"podmirror-cluster\"";
/// kube-proxy's tables, which it leaves behind.
const TABLES: [(&str, &str); 2] = [("ip", "kube-proxy"), ("ip6", "kube-proxy")];

/// Lets packets of pods through, if the chain would drop them.
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

/// Removes our rules and kube-proxy's tables.
pub(super) fn clear() -> Result<()> {
    if !state::path("bin/nft").exists() {
        return Ok(()); // a node was never up
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

/// The chain with its rules and their handles; empty where there is none.
fn forward() -> Result<String> {
    let output = nft().args(["--handle", "list", "chain"]).args(FORWARD).output()?;
    Ok(if output.status.success() {
        String::from_utf8_lossy(&output.stdout).into_owned()
    } else {
        String::new()
    })
}

/// nft of the cluster's own: the machine may have none.
fn nft() -> Command {
    command(state::path("bin/nft"))
}
