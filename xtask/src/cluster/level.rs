//! The levels `api` and `cluster` of `cargo xtask test`: the stories in `tests/tests/api`, with an API server alone, and
//! those in `tests/tests/cluster`, on a node, with each way to wire pods. Either is brought up for them.

use std::{env, path::Path, process::Command};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum as _;

use super::{Cni, Lock, Mode, binaries::Binaries, control::kubectl, down, images, state, up};
use crate::{
    apt,
    arch::Arch,
    image::{self, Image},
    process::{Run as _, is_ci, is_root, step},
    tools, workspace,
};

/// Stories that are the same however pods are wired: they run with the first way alone.
const ANY_WIRING: [&str; 5] = ["events::", "helm", "lives::", "many::", "outages::"];

/// Why this machine cannot run the level `api`, if so.
pub(crate) fn can_run_api() -> Result<()> {
    if let Some(mode @ Mode::Node(_)) = Mode::present()? {
        bail!("there is a cluster ({mode}), which is in the way: `cargo xtask cluster down` removes it");
    }
    can_run()
}

/// Why this machine cannot run the level `cluster`, if so.
pub(crate) fn can_run() -> Result<()> {
    if !is_root() {
        bail!("it needs root, for network namespaces, cgroups and mounts");
    }
    apt::can_unpack()?;
    Binaries::locate()?.can_be_brought()
}

/// Runs `test` with an API server: one that is up is used, and left up. Also for benches.
pub(crate) fn with_api(test: &mut Command) -> Result<()> {
    can_run_api()?;
    let is_up = Mode::present()?.is_some();
    let lock = Lock::take()?;
    let outcome = up(true, None);
    drop(lock);
    let outcome = outcome.and_then(|()| test.env("KUBECONFIG", state::KUBECONFIG).run());
    if is_up {
        return outcome;
    }
    let removed = Lock::take().and_then(|_lock| down());
    outcome
        .context("`cargo xtask cluster up --api-only` brings up an API server that is kept after the tests")
        .and(removed)
}

/// Builds the image, and runs `test`, with more arguments for the tests, on a node. A cluster that is up is used, and
/// left up.
pub(crate) fn run(test: impl Fn() -> Command, arguments: &[String]) -> Result<()> {
    let image = image::build(Arch::host()?, &workspace::root().join("target/image/level-cluster.tar"))?;
    match Mode::present()? {
        Some(mode @ Mode::Node(cni)) if !is_ci() => {
            step(&format!(
                "using the cluster that there is ({mode}), and leaving it up; with this wiring alone"
            ));
            bring_up(cni)?;
            stories(cni, &image, test(), arguments)
        }
        Some(mode) => {
            bail!("there is a cluster ({mode}), which is in the way: `cargo xtask cluster down` removes it")
        }
        None => Cni::value_variants().iter().try_for_each(|cni| {
            let outcome = bring_up(*cni).and_then(|()| stories(*cni, &image, test(), arguments));
            let removed = Lock::take().and_then(|_lock| down());
            outcome
                .context("`cargo xtask cluster up` brings up a cluster that is kept after the tests")
                .and(removed)
        }),
    }
}

fn bring_up(cni: Cni) -> Result<()> {
    let _lock = Lock::take()?;
    up(false, Some(cni))
}

fn stories(cni: Cni, image: &Image, mut test: Command, arguments: &[String]) -> Result<()> {
    let binaries = Binaries::locate()?;
    images::import(&binaries, &image.archive)?;
    test.env("KUBECONFIG", Path::new(state::KUBECONFIG)).env("MIRROR_AGENT", &image.agent);
    // The tests stop components of the node, and have it bring them back.
    test.env("MIRROR_HELM", tools::helm()?.get_program());
    test.env("MIRROR_XTASK", env::current_exe()?).args(["--", "--test-threads=1"]);
    if cni != Cni::Bridge {
        test.args(ANY_WIRING.iter().flat_map(|story| ["--skip", story]));
    }
    step(&format!("stories on a node with the CNI plugin {}", Mode::Node(cni)));
    let outcome = test.args(arguments).run();
    // With the agent goes what it has put on this machine.
    let mut uninstall = kubectl(&binaries);
    uninstall.args(["delete", "--ignore-not-found", "--filename"]);
    let uninstalled = uninstall.arg(workspace::root().join("deploy/rendered/podmirror.yaml")).run();
    outcome.and(uninstalled)
}
