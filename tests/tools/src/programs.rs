//! Programs of this machine: found, or installed with the distribution's packages.
//!
//! Each function searches first, and does nothing if the programs exist. Otherwise it prints what it installs. If a
//! program cannot be installed, one message names it and the command that installs it.

use std::{collections::BTreeSet, path::PathBuf};

use anyhow::{Context as _, Result, anyhow, bail};

use crate::{
    apt::{self, Apt},
    ebpf,
    process::{Run as _, command, find, is_root, step},
};

/// A program and its Debian package.
#[derive(Debug, Clone, Copy)]
pub struct Program {
    /// The program to search for.
    pub name: &'static str,
    /// The package to install.
    pub package: &'static str,
}

impl Program {
    /// A program and its package.
    pub const fn of(package: &'static str, name: &'static str) -> Self {
        Self { name, package }
    }
}

/// Network programs of the tests and the demo.
pub const NETWORK: [Program; 4] = [
    Program::of("iproute2", "ip"),
    Program::of("iputils-ping", "ping"),
    Program::of("tcpdump", "tcpdump"),
    Program::of("ethtool", "ethtool"),
];

/// Traffic generators of `bench traffic`, and nft, which translates service addresses.
pub const TRAFFIC: [Program; 6] = [
    Program::of("iperf3", "iperf3"),
    Program::of("sockperf", "sockperf"),
    Program::of("wrk", "wrk"),
    // The package also contains the server, see `bench traffic`: Debian's package redis-server would start a service.
    Program::of("redis-tools", "redis-benchmark"),
    Program::of("redis-tools", "redis-check-rdb"),
    Program::of("nftables", "nft"),
];

/// Drops packets in the stories of the level api.
pub const FIREWALL: [Program; 1] = [Program::of("nftables", "nft")];

/// Programs that translate service addresses in the stories of a guest.
pub const SERVICES: [Program; 2] = [Program::of("nftables", "nft"), Program::of("ipvsadm", "ipvsadm")];

/// Programs that write capture files in common formats, and that people read them with.
pub const CAPTURES: [Program; 4] = [
    Program::of("wireshark-common", "capinfos"),
    Program::of("wireshark-common", "editcap"),
    Program::of("wireshark-common", "mergecap"),
    Program::of("tshark", "tshark"),
];

/// Fetches files of a release, as the documents say.
pub const DOWNLOADS: [Program; 1] = [Program::of("curl", "curl")];

/// Finds Go, even if sudo has removed its directory from the path. `what_for` names what Go is to build.
pub fn go(what_for: &str) -> Result<PathBuf> {
    const USUAL: &str = "/usr/local/go/bin/go";
    let usual = || Some(PathBuf::from(USUAL)).filter(|path| path.is_file());
    find("go").or_else(usual).with_context(|| {
        format!("Go is needed to build {what_for}, and is neither in PATH nor {USUAL}: see https://go.dev/dl")
    })
}

/// Installs missing programs.
pub fn bring(programs: &[Program]) -> Result<()> {
    let missing: BTreeSet<_> = programs
        .iter()
        .filter(|program| find(program.name).is_none())
        .map(|program| program.package)
        .collect();
    let missing: Vec<_> = missing.into_iter().collect();
    if missing.is_empty() { Ok(()) } else { install_packages(&missing) }
}

/// The environment variable with the path of promtool. Prometheus is in the same directory.
pub const PROMTOOL: &str = "MIRROR_PROMTOOL";

/// Returns promtool, Prometheus' linter for metrics and rules. Debian's package would start a server, so it is only
/// unpacked, into the cache.
pub fn promtool() -> Result<PathBuf> {
    let found = find("promtool").filter(|promtool| promtool.with_file_name("prometheus").is_file());
    if let Some(promtool) = found {
        return Ok(promtool);
    }
    let dir = cache_dir()?.join("promtool");
    let promtool = dir.join("usr/bin/promtool");
    if !promtool.exists() {
        apt::can_unpack().context("promtool of Prometheus is needed")?;
        step(&format!("bringing promtool into {}", dir.display()));
        Apt::new(&["bookworm"])?.unpack(&["prometheus"], &dir)?;
    }
    Ok(promtool)
}

/// The project's cache.
pub fn cache_dir() -> Result<PathBuf> {
    ebpf::cache_dir().map_err(|why| anyhow!(why))
}

/// Installs packages of the distribution.
pub fn install_packages(packages: &[&str]) -> Result<()> {
    let list = packages.join(" ");
    if find("apt-get").is_none() {
        bail!(
            "Debian's packages `{list}` are needed, and there is no apt here: install what your distribution calls them"
        );
    }
    if !is_root() {
        bail!("packages are missing, and only root can install them: `apt-get install {list}`");
    }
    step(&format!("installing {list} (apt-get)"));
    let apt = || {
        let mut apt = command("apt-get");
        // Another installation may be running, such as unattended upgrades.
        apt.env("DEBIAN_FRONTEND", "noninteractive").args(["--option", "DPkg::Lock::Timeout=120"]);
        apt
    };
    // The package lists may never have been fetched, or may name versions that no longer exist.
    let mut install = apt();
    install.args(["install", "--yes", "--quiet", "--quiet", "--no-install-recommends"]).args(packages);
    if install.succeeds() {
        return Ok(());
    }
    apt()
        .args(["update", "--quiet", "--quiet"])
        .run()
        .context("the package lists could not be fetched; is the network there?")?;
    install.stdout(std::process::Stdio::inherit()).stderr(std::process::Stdio::inherit());
    install.run().with_context(|| format!("the packages {list} cannot be had from this system's apt sources"))
}
