//! Kubernetes clusters for stories: a cluster that this crate builds on this machine ([`built`]), or one that exists
//! ([`Existing`]: kind, k3d, a cluster with Cilium or Calico).
//!
//! A story uses its cluster only through the trait [`TestCluster`]. `xtask` and the harness of the stories
//! (`mirror-tests`) start clusters with this crate. The crate does not depend on the agent.

#![expect(clippy::print_stdout, reason = "says what it starts and stops, on a command line tool's output")]

pub mod built;
mod existing;

use std::{
    env, fmt,
    net::IpAddr,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

pub use built::{BUSYBOX, Built};
pub use existing::{Existing, process_in_netns};

/// The environment variable with the kind of the cluster in `KUBECONFIG`.
pub const KIND_VARIABLE: &str = "MIRROR_TEST_CLUSTER";
/// The variable's value for a cluster that this crate has not built, so it cannot stop the components.
pub const EXISTING: &str = "existing";

/// A cluster that stories can use.
pub trait TestCluster: fmt::Debug + Send + Sync {
    /// The kubeconfig of an administrator.
    fn kubeconfig(&self) -> &Path;

    /// `kubectl` with that kubeconfig.
    fn kubectl(&self) -> Command;

    /// The node on which the stories run: this machine, or a container on it. Fails if there is no such node, or if
    /// pods could be scheduled to other nodes.
    fn node(&self) -> Result<Node>;

    /// Loads an image onto that node, from an archive in the format of `docker save`.
    fn import(&self, archive: &Path) -> Result<()>;

    /// The cluster's components, if stories can stop them.
    fn components(&self) -> Option<&dyn Components>;
}

/// The components of a cluster: its control plane and the programs of its node.
pub trait Components {
    /// The process of a component, if it runs.
    fn pid(&self, component: &str) -> Option<i32>;

    /// Stops a component as a service manager does: by SIGTERM, and if it does not end, by SIGKILL.
    fn stop(&self, component: &str) -> Result<()>;

    /// Starts the components that do not run, and waits until the cluster works.
    fn bring_back(&self) -> Result<()>;

    /// The client of the container runtime (containerd's `ctr`).
    fn runtime(&self) -> Command;
}

/// The node of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// `metadata.name`.
    pub name: String,
    /// Its address inside the cluster.
    pub address: IpAddr,
    /// A file that refers to the node's network namespace.
    pub netns: PathBuf,
    /// The node's BPF file system, as this machine sees it.
    pub bpffs: PathBuf,
}

impl Node {
    /// This machine itself.
    fn this_machine(name: &str, address: IpAddr) -> Self {
        Self {
            name: name.to_owned(),
            address,
            netns: "/proc/self/ns/net".into(),
            bpffs: "/sys/fs/bpf".into(),
        }
    }
}

/// The cluster that `KUBECONFIG` names.
pub fn of_environment() -> Result<Box<dyn TestCluster>> {
    let kubeconfig = env::var_os("KUBECONFIG").map(PathBuf::from);
    let kubeconfig = kubeconfig.context("KUBECONFIG names no cluster: `cargo xtask test` sets it")?;
    if env::var(KIND_VARIABLE).is_ok_and(|kind| kind == EXISTING) {
        Ok(Box::new(Existing::connect(&kubeconfig, None)?))
    } else {
        Ok(Box::new(Built::at(&kubeconfig)?))
    }
}
