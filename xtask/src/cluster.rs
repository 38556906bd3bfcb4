//! `cargo xtask cluster`: starts and removes a real Kubernetes node on this machine, with `mirror-test-cluster`. The
//! submodule implements the levels of tests that use a cluster.

pub(crate) mod level;

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use clap::Subcommand;
use mirror_test_cluster::{
    Built, TestCluster as _,
    built::{self, Cni, Mode},
};

use crate::process::is_root;

/// The command line of `cargo xtask cluster`.
#[derive(Debug, clap::Args)]
pub(crate) struct ClusterArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Start the components that do not run, and leave the others alone.
    Up {
        /// How pods are wired [default: as in the present cluster, or bridge].
        #[arg(long, value_parser = ["bridge", "ptp", "cilium", "multus"])]
        cni: Option<String>,
        /// Start only etcd and the API server.
        #[arg(long, conflicts_with = "cni")]
        api_only: bool,
    },
    /// Stop everything and undo every change. The cluster's objects are lost.
    Down,
    /// Run two pods and a ping, and check that they leave nothing.
    Smoke,
    /// Import an image, from an archive as `docker save` writes it; pods name it with `imagePullPolicy: Never`.
    Import {
        /// The archive.
        archive: PathBuf,
    },
}

pub(crate) fn run(args: ClusterArgs) -> Result<()> {
    ensure!(is_root(), "the cluster needs root, for network namespaces, cgroups and mounts");
    match args.action {
        Action::Up { api_only: true, .. } => built::up(Some(Mode::ApiOnly(None))),
        Action::Up { cni, .. } => {
            let cni: Option<Cni> = cni.map(|name| name.parse()).transpose()?;
            built::up(cni.map(Mode::Node))
        }
        Action::Down => built::down(),
        Action::Smoke => built::smoke(),
        Action::Import { archive } => Built::at(Path::new(built::KUBECONFIG))?.import(&archive),
    }
}
