//! The directory of the cluster's state, the kind of the cluster, and a lock that lets one task at a time change it.

use std::{
    fmt, fs,
    os::{linux::net::SocketAddrExt as _, unix::net},
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};

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
    /// Only etcd and the API server: they store objects, and no controller acts on them.
    ApiOnly,
    /// A node that runs pods.
    Node(Cni),
}

impl Mode {
    /// The mode that the command line requests. Without `cni`, pods are wired as in the present cluster, or by a
    /// bridge.
    pub(super) fn wanted(api_only: bool, cni: Option<Cni>, present: Option<Self>) -> Result<Self> {
        let wanted = match (api_only, cni, present) {
            (true, _, _) => Self::ApiOnly,
            (false, Some(cni), _) => Self::Node(cni),
            (false, None, Some(Self::Node(cni))) => Self::Node(cni),
            (false, None, _) => Self::Node(Cni::Bridge),
        };
        match present {
            Some(present) if present != wanted => bail!(
                "there is a cluster of another kind ({present}, and {wanted} is wanted): `cargo xtask cluster down` removes it"
            ),
            _ => Ok(wanted),
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
        f.write_str(match self {
            Self::ApiOnly => "api-only",
            Self::Node(Cni::Bridge) => "bridge",
            Self::Node(Cni::Ptp) => "ptp",
            Self::Node(Cni::Cilium) => "cilium",
            Self::Node(Cni::Multus) => "multus",
        })
    }
}

impl FromStr for Mode {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut modes = std::iter::once(Self::ApiOnly).chain(Cni::ALL.map(Self::Node));
        let mode = modes.find(|mode| mode.to_string() == text);
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
        let bridge = Mode::Node(Cni::Bridge);
        let ptp = Mode::Node(Cni::Ptp);
        assert_eq!(wanted(false, None, None).unwrap(), bridge);
        assert_eq!(wanted(false, None, Some(ptp)).unwrap(), ptp);
        assert_eq!(wanted(true, None, Some(Mode::ApiOnly)).unwrap(), Mode::ApiOnly);
        assert_eq!(wanted(false, Some(Cni::Ptp), None).unwrap(), ptp);
        for (api_only, cni, present) in
            [(false, Some(Cni::Ptp), bridge), (true, None, bridge), (false, None, Mode::ApiOnly)]
        {
            let why = wanted(api_only, cni, Some(present)).unwrap_err().to_string();
            assert!(why.contains(&present.to_string()) && why.contains("cluster down"), "{why}");
        }
        for mode in [Mode::ApiOnly].into_iter().chain(Cni::ALL.map(Mode::Node)) {
            assert_eq!(mode.to_string().parse::<Mode>().unwrap(), mode);
        }
    }
}
