//! Starts a real Kubernetes node on this machine, and removes it completely.
//!
//! The node is etcd, kube-apiserver, kube-controller-manager, kube-scheduler, containerd, kubelet, and kube-proxy or
//! Cilium. They run as separate processes, from binaries that `binaries`, `cilium` and `multus` put into the cache.
//! They write only to `state::DIR`; `machine` handles the few exceptions, and `cilium` those of Cilium. The node is for
//! tests against Kubernetes and for trying the agent, not for production. `cargo xtask cluster` and the levels `api`,
//! `cluster`, `cilium` and `multus` call this module; stories use it as a [`TestCluster`].

mod binaries;
pub mod cilium;
mod component;
mod control;
mod filter;
mod images;
mod machine;
pub mod multus;
mod node;
mod pki;
mod smoke;
mod state;

use std::{
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context as _, Result, bail};
use mirror_test_tools::{
    apt,
    process::{Run as _, is_root, step},
    programs::{self, Program},
};

use crate::{Components, Node, TestCluster};
use binaries::Binaries;
pub(crate) use control::apply;
pub use images::BUSYBOX;
use state::Lock;
pub use state::{AUDIT_LOG, Cni, KUBECONFIG, MANIFESTS, Mode};

const NODE: &str = "podmirror-node";
/// The node's addresses, on loopback: the same on every machine and in every network. An array here has a value for IPv4
/// and one for IPv6 (`machine::families`).
const NODE_IP: &str = "10.245.0.1";
const NODE_IPS: [&str; 2] = [NODE_IP, "fd00:10:245::1"];
/// The CIDRs of all pods, and the parts of them for this node.
const POD_CIDR: &str = "10.244.0.0/16";
const POD_CIDRS: [&str; 2] = [POD_CIDR, "fd00:10:244::/56"];
const NODE_CIDRS: [&str; 2] = ["10.244.0.0/24", "fd00:10:244::/64"];
/// The CIDRs of services, and the first address, which is the API server's.
const SERVICE_CIDRS: [&str; 2] = ["10.96.0.0/16", "fd00:10:96::/112"];
const SERVICE_IP: &str = "10.96.0.1";
/// The address on loopback for servers behind the API server, without a node. An EndpointSlice refuses 127.0.0.1.
pub const BACKEND_IP: &str = "198.18.0.1";
/// Where the API server listens.
const API_PORT: u16 = 6443;
/// The bridge that connects the pods.
const BRIDGE: &str = "podmirror-cni0";

/// Returns an error if this machine cannot run such a cluster.
pub fn can_be_brought() -> Result<()> {
    if !is_root() {
        bail!("the cluster needs root, for network namespaces, cgroups and mounts");
    }
    apt::can_unpack()?;
    Binaries::locate()?.can_be_brought()
}

/// Whether a process of the cluster runs on this machine.
pub fn is_running() -> bool {
    let mut names = control::COMPONENTS.into_iter().chain(node::COMPONENTS);
    names.any(|name| component::process(name).is_some())
}

/// Starts the components that do not run. Without `mode`, the cluster is of the kind of the present one, or a node with
/// a bridge.
pub fn up(mode: Option<Mode>) -> Result<()> {
    let _lock = Lock::take()?;
    start(mode)
}

/// Stops everything and undoes every change. The cluster's objects are lost.
pub fn down() -> Result<()> {
    let _lock = Lock::take()?;
    end()
}

/// Runs two pods, pings from one to the other, and checks that nothing is left of them.
pub fn smoke() -> Result<()> {
    let _lock = Lock::take()?;
    smoke::run(&Binaries::locate()?)
}

/// Writes the image [`BUSYBOX`] as an archive, for a node that this crate has not built.
pub fn write_busybox(archive: &Path) -> Result<()> {
    let binaries = Binaries::locate()?;
    binaries.unpack()?;
    images::write(&binaries, BUSYBOX, archive)
}

/// kubectl, if it has been built.
pub fn kubectl_program() -> Option<PathBuf> {
    let program = Binaries::locate().ok()?.built("kubectl");
    program.exists().then_some(program)
}

/// The cluster that `up` has started.
#[derive(Debug)]
pub struct Built {
    binaries: Binaries,
}

impl Built {
    /// Returns the cluster that `up` has started. Fails if there is none, or if `kubeconfig` is not its kubeconfig.
    pub fn at(kubeconfig: &Path) -> Result<Self> {
        if kubeconfig != Path::new(KUBECONFIG) || Mode::present()?.is_none() {
            bail!(
                "{} is of no cluster of `cargo xtask cluster up`; for any other, `cargo xtask test` has --kubeconfig",
                kubeconfig.display()
            );
        }
        Ok(Self { binaries: Binaries::locate()? })
    }
}

impl TestCluster for Built {
    fn kubeconfig(&self) -> &Path {
        Path::new(KUBECONFIG)
    }

    fn kubectl(&self) -> Command {
        control::kubectl(&self.binaries)
    }

    fn node(&self) -> Result<Node> {
        if !is_up()? {
            bail!("there is no running node: `cargo xtask cluster up` brings one up");
        }
        let address: IpAddr = NODE_IP.parse()?;
        Ok(Node::this_machine(NODE, address))
    }

    fn import(&self, archive: &Path) -> Result<()> {
        let _lock = Lock::take()?;
        if component::process("containerd").is_none() {
            bail!("there is no running node: `cargo xtask cluster up` brings one up");
        }
        images::import(&self.binaries, archive)
    }

    fn components(&self) -> Option<&dyn Components> {
        Some(self)
    }
}

impl Components for Built {
    fn pid(&self, component: &str) -> Option<i32> {
        component::process(component).map(|process| process.pid)
    }

    fn stop(&self, component: &str) -> Result<()> {
        let _lock = Lock::take()?;
        component::stop(component)
    }

    fn bring_back(&self) -> Result<()> {
        up(None)
    }

    fn runtime(&self) -> Command {
        node::ctr(&self.binaries)
    }
}

/// Whether the present cluster can run pods now.
fn is_up() -> Result<bool> {
    Ok(match Mode::present()? {
        Some(Mode::Node(cni)) => node::is_up(cni),
        Some(Mode::ApiOnly(_)) | None => false,
    })
}

fn start(mode: Option<Mode>) -> Result<()> {
    let mode = Mode::wanted(mode, Mode::present()?)?;
    programs::bring(&[Program::of("iproute2", "ip"), Program::of("mount", "mount")])?;
    let binaries = Binaries::bring(mode)?;
    let begun = Instant::now();
    fs::create_dir_all(state::DIR).context(state::DIR)?;
    if let Mode::Node(_) = mode {
        machine::record()?;
    }
    fs::write(state::path("mode"), mode.to_string())?;
    pki::make()?;
    node::link_kubectl(&binaries)?;
    step(&format!("starting the cluster ({mode}); its state is in {}", state::DIR));
    if let Mode::Node(cni) = mode {
        machine::prepare(cni)?;
        control::up(&binaries, mode)?;
        node::up(&binaries, cni)?;
        control::wait_for_service_account(&binaries)?;
    } else {
        machine::add_addresses(&[BACKEND_IP])?;
        control::up(&binaries, mode)?;
    }
    step(&format!("the cluster is up after {:.1} s; to use it:", begun.elapsed().as_secs_f32()));
    println!("    export KUBECONFIG={} PATH={}:$PATH", KUBECONFIG, state::text("bin"));
    Ok(())
}

fn end() -> Result<()> {
    if !fs::exists(state::DIR)? {
        step("there is no cluster");
        return Ok(());
    }
    let begun = Instant::now();
    let binaries = Binaries::locate()?;
    step("stopping the cluster");
    let runs = |name| component::process(name).is_some();
    // Without the controller manager no new pods are created; kubelet can end the existing ones and is then stopped.
    component::stop("kube-controller-manager")?;
    component::stop("kube-scheduler")?;
    if runs("kubelet") && runs("kube-apiserver") && runs("containerd") {
        let mut delete = control::kubectl(&binaries);
        delete.args(["delete", "pods", "--all", "--all-namespaces", "--grace-period=1", "--timeout=30s"]);
        if !delete.succeeds() {
            println!("    kubelet does not end the pods: they are killed");
        }
    }
    component::stop("kubelet")?;
    machine::kill_pods()?;
    let network = cilium::COMPONENTS.iter().chain(&[node::KUBE_PROXY]).copied();
    let rest = control::COMPONENTS.into_iter().chain(node::COMPONENTS).chain(network);
    rest.rev().try_for_each(component::stop)?;
    machine::kill_shims()?;
    cilium::clear()?;
    filter::clear()?;
    machine::restore()?;
    machine::remove_state()?;
    step(&format!("the cluster is gone after {:.1} s", begun.elapsed().as_secs_f32()));
    Ok(())
}
