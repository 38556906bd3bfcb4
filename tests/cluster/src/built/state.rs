//! The directory of the cluster's state, the kind of the cluster, and a lock that lets one task at a time change it.

use std::{
    fmt, fs,
    os::{linux::net::SocketAddrExt as _, unix::net},
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use mirror_test_tools::KUBERNETES;

use super::component::eventually;

/// The directory for everything that the cluster writes. The path is fixed, so that `down` finds it. It is not below
/// `/run`, because many systems mount `/run` with `noexec`.
pub(super) const DIR: &str = "/var/lib/podmirror-cluster";
/// The administrator's kubeconfig.
pub const KUBECONFIG: &str = "/var/lib/podmirror-cluster/kubeconfig";
/// The directory for manifests of static pods.
pub const MANIFESTS: &str = "/var/lib/podmirror-cluster/manifests";
/// The API server's audit log. It has only requests for resources of `packets.podmirror.io`.
pub const AUDIT_LOG: &str = "/var/lib/podmirror-cluster/log/audit.log";
/// The socket of containerd.
pub(super) const CONTAINERD: &str = "/var/lib/podmirror-cluster/containerd.sock";

/// Path of a file of the state.
pub(super) fn path(name: &str) -> PathBuf {
    Path::new(DIR).join(name)
}

/// The same path as text, for a command line or a configuration.
pub(super) fn text(name: &str) -> String {
    format!("{DIR}/{name}")
}

/// How pods are wired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cni {
    /// veths as ports of a bridge.
    Bridge,
    /// veths to which the node has routes.
    Ptp,
    /// Cilium, with eBPF host routing and without kube-proxy.
    Cilium,
    /// Multus, which wires pods as `Bridge` does, and to the additional networks that they name.
    Multus,
}

impl Cni {
    /// The reference plugins of CNI: they need no daemons on the node.
    pub const PLUGINS: [Self; 2] = [Self::Bridge, Self::Ptp];
    /// All ways to wire pods.
    pub const ALL: [Self; 4] = [Self::Bridge, Self::Ptp, Self::Cilium, Self::Multus];
}

impl FromStr for Cni {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|cni| Mode::Node(*cni).to_string() == name);
        found.with_context(|| format!("no way to wire pods: {name}"))
    }
}

/// The kind of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Only etcd and the API server: they store objects, and no controller acts on them. The API server has one of the
    /// versions in [`KUBERNETES`], or without one that of the other components.
    ApiOnly(Option<&'static str>),
    /// A node that runs pods.
    Node(Cni),
}

impl Mode {
    /// All kinds.
    fn all() -> impl Iterator<Item = Self> {
        let versions = [None].into_iter().chain(KUBERNETES.map(Some));
        versions.map(Self::ApiOnly).chain(Cni::ALL.map(Self::Node))
    }

    /// The requested mode, else that of the present cluster, else a node with a bridge.
    pub(super) fn wanted(requested: Option<Self>, present: Option<Self>) -> Result<Self> {
        match (requested, present) {
            (Some(wanted), Some(present)) if present != wanted => bail!(
                "there is a cluster of another kind ({present}, and {wanted} is wanted): `cargo xtask cluster down` removes it"
            ),
            _ => Ok(requested.or(present).unwrap_or(Self::Node(Cni::Bridge))),
        }
    }

    /// The mode of the present cluster, running or not.
    pub fn present() -> Result<Option<Self>> {
        let file = path("mode");
        if !file.exists() {
            return Ok(None);
        }
        fs::read_to_string(&file)?.parse().map(Some)
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::ApiOnly(None) => "api-only",
            Self::ApiOnly(Some(version)) => return write!(f, "api-only of {version}"),
            Self::Node(Cni::Bridge) => "bridge",
            Self::Node(Cni::Ptp) => "ptp",
            Self::Node(Cni::Cilium) => "cilium",
            Self::Node(Cni::Multus) => "multus",
        };
        f.write_str(name)
    }
}

impl FromStr for Mode {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let mode = Self::all().find(|mode| mode.to_string() == text);
        mode.with_context(|| format!("{DIR}/mode says {text:?}, which is no kind of cluster"))
    }
}

/// A lock that a task holds while it works on the cluster. The kernel releases it when the task ends, for any reason.
pub(super) struct Lock(#[expect(dead_code, reason = "held, not used")] net::UnixListener);

impl Lock {
    /// Waits until no other task holds the lock.
    pub(super) fn take() -> Result<Self> {
        let address = net::SocketAddr::from_abstract_name("podmirror-cluster")?;
        eventually(Duration::from_secs(120), || Ok(net::UnixListener::bind_addr(&address).ok().map(Self)))?
            .context("another `cargo xtask cluster` has been at work for 120 s")
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn what_there_is_is_brought_back_and_never_turned_into_another_kind() {
        let wanted = Mode::wanted;
        assert_eq!(wanted(None, None).unwrap(), Mode::Node(Cni::Bridge));
        for mode in Mode::all() {
            assert_eq!(mode.to_string().parse::<Mode>().unwrap(), mode);
            assert_eq!(wanted(Some(mode), None).unwrap(), mode);
            for present in Mode::all() {
                assert_eq!(wanted(None, Some(present)).unwrap(), present);
                let outcome = wanted(Some(mode), Some(present));
                if present == mode {
                    assert_eq!(outcome.unwrap(), mode);
                    continue;
                }
                let why = outcome.unwrap_err().to_string();
                assert!(why.contains(&present.to_string()) && why.contains("cluster down"), "{why}");
            }
        }
    }
}
