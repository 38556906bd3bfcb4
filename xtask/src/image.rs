//! `cargo xtask image`: builds the agent's container image, without a container engine.
//!
//! The image is a static binary (musl) in an empty file system. The same sources give the same image: it contains no
//! time, no path and no name of the machine. The caller decides what to do with the image.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::{
    arch::Arch,
    archive::{Entry, write_archive},
    portable,
    process::step,
    tools,
    workspace::{self, AGENT},
};

/// Name and tag of the image: the chart's defaults.
pub(crate) const REFERENCE: &str = concat!("localhost/mirror-agent:", env!("CARGO_PKG_VERSION"));

/// The largest acceptable size of an agent for users, in bytes.
const MAX_BYTES: usize = 20_000_000;

/// The command line of `cargo xtask image`.
#[derive(Debug, clap::Args)]
pub(crate) struct ImageArgs {
    /// The nodes' architecture [default: this machine's].
    #[arg(long, value_name = "ARCH", value_parser = ["amd64", "arm64"])]
    arch: Option<String>,
}

/// Builds the image, and prints how to use it.
pub(crate) fn run(args: ImageArgs) -> Result<()> {
    let arch = args.arch.map_or_else(Arch::host, |name| name.parse())?;
    let name = format!("mirror-agent-{}-{}.tar", env!("CARGO_PKG_VERSION"), arch.name());
    let archive = build(arch, portable::RELEASE, &name)?.archive;
    let megabytes = fs::metadata(&archive)?.len() as f64 / 1e6;
    println!("    {REFERENCE} for {}, {megabytes:.1} MB: {}", arch.name(), archive.display());
    println!(
        "    on a node: `ctr -n k8s.io images import FILE`, `podman load -i FILE` or `docker load -i FILE`"
    );
    Ok(())
}

/// An image, and the agent in it.
pub(crate) struct Image {
    pub(crate) archive: PathBuf,
    /// The agent, where it was built.
    pub(crate) agent: PathBuf,
}

/// Builds the agent in this profile, and writes the image to the archive `name` in `target/image`.
pub(crate) fn build(arch: Arch, profile: &str, name: &str) -> Result<Image> {
    tools::bpf()?;
    let agent = portable::linux(&[AGENT], &[arch], profile)?.remove(0);
    let (entries, config) = content(&agent, profile)?;
    step("writing the image");
    let dir = workspace::root().join("target/image");
    fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
    let archive = dir.join(name);
    write_archive(&archive, REFERENCE, arch, &entries, &config)?;
    Ok(Image { archive, agent })
}

/// Returns the files of the image with an agent that was built in this profile, and the runtime's part of its
/// configuration.
pub(crate) fn content(agent: &Path, profile: &str) -> Result<(Vec<Entry>, Value)> {
    let binary = fs::read(agent).with_context(|| agent.display().to_string())?;
    let is_small = profile != portable::RELEASE || binary.len() <= MAX_BYTES;
    ensure!(is_small, "the agent has {} bytes, more than {MAX_BYTES}", binary.len());
    let labels = labels(&workspace::commit().unwrap_or_default());
    let config = json!({ "Entrypoint": ["/mirror-agent"], "Labels": labels });
    Ok((vec![Entry::program(AGENT, binary)], config))
}

/// The labels for registries and people (OCI annotations). Without a commit (empty), there is no label for it.
pub(crate) fn labels(commit: &str) -> Value {
    let mut labels = json!({
        "org.opencontainers.image.title": "podmirror",
        "org.opencontainers.image.description": "Copies the packets of chosen Kubernetes pods to a mirror interface",
        "org.opencontainers.image.version": env!("CARGO_PKG_VERSION"),
        "org.opencontainers.image.licenses": "(Apache-2.0 OR MIT) AND (MIT OR GPL-2.0-only)",
        "org.opencontainers.image.source": env!("CARGO_PKG_REPOSITORY"),
        "org.opencontainers.image.url": env!("CARGO_PKG_HOMEPAGE"),
    });
    if !commit.is_empty() {
        labels["org.opencontainers.image.revision"] = json!(commit);
    }
    labels
}
