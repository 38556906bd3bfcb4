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
    tools, workspace,
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
    /// The archive to write [default: target/image/mirror-agent-VERSION-ARCH.tar].
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Builds the image, and prints how to use it.
pub(crate) fn run(args: ImageArgs) -> Result<()> {
    let ImageArgs { arch, output } = args;
    let arch = arch.map_or_else(Arch::host, |name| name.parse())?;
    let name = format!("mirror-agent-{}-{}.tar", env!("CARGO_PKG_VERSION"), arch.name());
    let output = output.unwrap_or_else(|| workspace::root().join("target/image").join(name));
    let bytes = build(arch, portable::RELEASE, &output)?.bytes;
    println!("    {REFERENCE} for {}, {:.1} MB: {}", arch.name(), bytes as f64 / 1e6, output.display());
    println!(
        "    on a node: `ctr -n k8s.io images import FILE`, `podman load -i FILE` or `docker load -i FILE`"
    );
    Ok(())
}

/// An image, and the agent in it.
pub(crate) struct Image {
    pub(crate) archive: PathBuf,
    /// The agent in the image.
    pub(crate) agent: PathBuf,
    bytes: u64,
}

/// The content of an image.
pub(crate) struct Content {
    /// The agent, where it was built.
    agent: PathBuf,
    pub(crate) entries: Vec<Entry>,
    /// The runtime's part of the configuration.
    pub(crate) config: Value,
}

/// Builds the agent in this profile, and writes the image to `to`.
pub(crate) fn build(arch: Arch, profile: &str, to: &Path) -> Result<Image> {
    let Content { agent, entries, config } = content(arch, profile)?;
    step("writing the image");
    if let Some(dir) = to.parent() {
        fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    }
    write_archive(to, REFERENCE, arch, &entries, &config)?;
    Ok(Image { archive: to.to_owned(), agent, bytes: fs::metadata(to)?.len() })
}

/// Builds the agent in this profile: the content of its image.
pub(crate) fn content(arch: Arch, profile: &str) -> Result<Content> {
    tools::bpf()?;
    let built = portable::linux("mirror-agent", arch, profile)?;
    let agent = built.executable()?;
    let revision =
        built.variables.get("PODMIRROR_REVISION").context("the agent's build script told no revision")?;
    let binary = fs::read(&agent).with_context(|| agent.display().to_string())?;
    let is_small = profile != portable::RELEASE || binary.len() <= MAX_BYTES;
    ensure!(is_small, "the agent has {} bytes, more than {MAX_BYTES}", binary.len());
    let config = json!({ "Entrypoint": ["/mirror-agent"], "Labels": labels(revision) });
    Ok(Content { agent, entries: vec![Entry::program("mirror-agent", binary)], config })
}

/// The labels for registries and people (OCI annotations). `revision` is that of the agent's build script: the binary
/// may not run here, and git may have changed since.
pub(crate) fn labels(revision: &str) -> Value {
    let mut labels = json!({
        "org.opencontainers.image.title": "podmirror",
        "org.opencontainers.image.description": "Copies the packets of chosen Kubernetes pods to a mirror interface",
        "org.opencontainers.image.version": env!("CARGO_PKG_VERSION"),
        "org.opencontainers.image.licenses": "(Apache-2.0 OR MIT) AND (MIT OR GPL-2.0-only)",
        "org.opencontainers.image.source": env!("CARGO_PKG_REPOSITORY"),
        "org.opencontainers.image.url": env!("CARGO_PKG_HOMEPAGE"),
    });
    if revision != "unknown" {
        labels["org.opencontainers.image.revision"] = json!(revision);
    }
    labels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_names_its_commit_where_there_is_one() {
        const REVISION: &str = "org.opencontainers.image.revision";
        assert_eq!(labels("1a2b3c4d5e6f-dirty")[REVISION], "1a2b3c4d5e6f-dirty");
        assert!(labels("unknown").get(REVISION).is_none());
    }
}
