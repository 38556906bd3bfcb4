//! `cargo xtask cluster`: a real Kubernetes node on this machine, brought up and taken down without a trace.
//!
//! etcd, kube-apiserver, kube-controller-manager, kube-scheduler, containerd, kubelet and kube-proxy, as processes of
//! their own, from binaries that `binaries` brings into the cache. Everything that they write lies in `state::DIR`; the
//! few things beyond it are in `machine`. For tests against Kubernetes, and for trying the agent; not for production.

mod binaries;
mod component;
mod control;
mod filter;
mod images;
pub(crate) mod level;
mod machine;
mod node;
mod pki;
mod smoke;
mod state;

use std::{fs, path::PathBuf, time::Instant};

use anyhow::{Context as _, Result, bail};
use clap::Subcommand;

use crate::{
    process::{Run as _, is_root, step},
    tools::{self, Program},
};
use binaries::Binaries;
use state::{Cni, Lock, Mode};

/// The node's name.
const NODE: &str = "podmirror-node";
/// The node's address, on loopback: the same on every machine and in every network.
const NODE_IP: &str = "10.245.0.1";
/// The addresses of pods, and those of them that the node gives out.
const POD_CIDR: &str = "10.244.0.0/16";
const NODE_CIDR: &str = "10.244.0.0/24";
/// The addresses of services, and the first of them, the API server's.
const SERVICE_CIDR: &str = "10.96.0.0/16";
const SERVICE_IP: &str = "10.96.0.1";
/// Where the API server listens.
const API_PORT: u16 = 6443;
/// The bridge that pods are joined by.
const BRIDGE: &str = "podmirror-cni0";

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
        #[arg(long)]
        cni: Option<Cni>,
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
    let _lock = Lock::take()?;
    match args.action {
        Action::Up { cni, api_only } => up(api_only, cni),
        Action::Down => down(),
        Action::Smoke => smoke::run(&Binaries::locate()?),
        Action::Import { archive } => {
            if component::process("containerd").is_none() {
                bail!("there is no running node: `cargo xtask cluster up` brings one up");
            }
            images::import(&Binaries::locate()?, &archive)
        }
    }
}

fn up(api_only: bool, cni: Option<Cni>) -> Result<()> {
    let mode = Mode::wanted(api_only, cni, Mode::present()?)?;
    tools::programs(&[Program::of("iproute2", "ip"), Program::of("mount", "mount")])?;
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
        control::up(&binaries, mode)?;
    }
    step(&format!("the cluster is up after {:.1} s; to use it:", begun.elapsed().as_secs_f32()));
    println!("    export KUBECONFIG={} PATH={}:$PATH", state::KUBECONFIG, state::text("bin"));
    Ok(())
}

fn down() -> Result<()> {
    if !fs::exists(state::DIR)? {
        step("there is no cluster");
        return Ok(());
    }
    let begun = Instant::now();
    let binaries = Binaries::locate()?;
    step("stopping the cluster");
    let runs = |name| component::process(name).is_some();
    // Nobody makes pods any more, kubelet ends those that there are, and then goes.
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
    let rest = control::COMPONENTS.iter().chain(&node::COMPONENTS).rev();
    rest.copied().try_for_each(component::stop)?;
    machine::kill_shims()?;
    filter::clear()?;
    machine::restore()?;
    machine::remove_state()?;
    step(&format!("the cluster is gone after {:.1} s", begun.elapsed().as_secs_f32()));
    Ok(())
}
