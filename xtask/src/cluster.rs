//! `cargo xtask cluster`: a real Kubernetes node on this machine (`mirror-test-cluster` makes it), and the levels of
//! tests that use a cluster.

pub(crate) mod level;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::Subcommand;
use mirror_test_cluster::{Built, TestCluster as _, built};

use crate::process::is_root;

/// The command line of `cargo xtask cluster`.
#[derive(Debug, clap::Args)]
pub(crate) struct ClusterArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Bring up what is not running; what runs is left alone.
    Up {
        /// How pods are wired [default: as the cluster that there is, or bridge].
        #[arg(long, value_parser = ["bridge", "ptp"])]
        cni: Option<String>,
        /// Only etcd and the API server: objects, and nobody who acts on them.
        #[arg(long, conflicts_with = "cni")]
        api_only: bool,
    },
    /// Stop everything and undo every change, the cluster's objects included.
    Down,
    /// Run two pods, ping, and look for what they leave.
    Smoke,
    /// Import an image, from an archive as `docker save` writes it; pods name it with `imagePullPolicy: Never`.
    Import {
        /// The archive.
        archive: PathBuf,
    },
}

/// Does it.
pub(crate) fn run(args: ClusterArgs) -> Result<()> {
    if !is_root() {
        bail!("the cluster needs root, for network namespaces, cgroups and mounts");
    }
    match args.action {
        Action::Up { cni, api_only } => built::up(api_only, cni.map(|name| name.parse()).transpose()?),
        Action::Down => built::down(),
        Action::Smoke => built::smoke(),
        Action::Import { archive } => Built::at(Path::new(built::KUBECONFIG))?.import(&archive),
    }
}
