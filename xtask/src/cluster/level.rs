//! The levels `api`, `api-versions`, `cluster`, `cilium` and `multus` of `cargo xtask test`: the stories in
//! `tests/tests/api`, with only an API server, those in `tests/tests/cluster`, on a node, and those in
//! `tests/tests/cilium` and `tests/tests/multus`, on a node with this CNI. The command builds a cluster for them, for the
//! level `cluster` once for each of the reference CNI plugins, or uses an existing one.

use std::{path::Path, process::Command};

use anyhow::{Result, bail};
use mirror_test_cluster::{
    BUSYBOX, Built, EXISTING, Existing, KIND_VARIABLE, TestCluster,
    built::{self, Cni, Mode},
};

use crate::{
    arch::Arch,
    image::{self, Image},
    portable,
    process::{Run as _, is_ci, is_root, step},
    tools, workspace,
};

/// Stories that do not depend on the wiring of pods. They run only with the first CNI plugin.
const ANY_WIRING: [&str; 9] = [
    BUILT_ONLY,
    "events::",
    "installation::",
    "lives::",
    "many::",
    "packets::",
    "plugin::",
    "recorder::",
    "targets::",
];
/// Stories that stop components of the cluster, act without the knowledge of its runtime, or install CRDs of others.
/// They run only on a cluster that was built here.
const BUILT_ONLY: &str = "built::";

/// Returns an error if this machine cannot run the level `api`.
pub(crate) fn can_run_api() -> Result<()> {
    if let Some(mode @ Mode::Node(_)) = running()? {
        bail!("there is a cluster ({mode}): `cargo xtask cluster down` removes it");
    }
    built::can_be_brought()
}

/// Returns an error if this machine cannot run the levels `cluster`, `cilium` and `multus`.
pub(crate) fn can_run(given: Option<&Existing>) -> Result<()> {
    match given {
        Some(_) if is_root() => Ok(()),
        Some(_) => bail!("it needs root, to enter the network namespaces of pods"),
        None => built::can_be_brought(),
    }
}

/// The kind of the running cluster. Removes what is left of a cluster whose processes were killed, as a run of CI is
/// when its time is up: no story can use it.
fn running() -> Result<Option<Mode>> {
    let present = Mode::present()?;
    if present.is_some() && !built::is_running() {
        step("removing a cluster that no longer runs");
        built::down()?;
        return Ok(None);
    }
    Ok(present)
}

/// Runs `test` with an API server of this version, or of the cluster's. If the server already runs, it is used and keeps
/// running. Benches use this too.
pub(crate) fn with_api(test: &mut Command, version: Option<&'static str>) -> Result<()> {
    can_run_api()?;
    let is_up = running()?.is_some();
    let outcome = built::up(Some(Mode::ApiOnly(version)))
        .and_then(|()| test.env("KUBECONFIG", built::KUBECONFIG).run());
    if is_up { outcome } else { outcome.and(built::down()) }
}

/// Builds the image, and runs `test` with `arguments` on the given cluster, or for each of these CNIs on a node that is
/// built for it. A node that already runs is used and keeps running: for the reference plugins, one with any CNI.
pub(crate) fn run(
    cnis: &[Cni],
    test: impl Fn() -> Command,
    given: Option<&Existing>,
    arguments: &[String],
) -> Result<()> {
    let image = image::build(Arch::host()?, portable::TEST, "level-cluster.tar")?;
    if let Some(given) = given {
        return on_existing(given, &image, test, arguments);
    }
    match running()? {
        Some(mode @ Mode::Node(cni)) if !is_ci() && (cnis == Cni::PLUGINS || cnis.contains(&cni)) => {
            step(&format!("using the cluster that runs ({mode}), with its CNI alone"));
            built::up(Some(Mode::Node(cni)))?;
            on_built(cni, &image, test(), arguments)
        }
        Some(mode) => bail!("there is a cluster ({mode}): `cargo xtask cluster down` removes it"),
        None => cnis.iter().try_for_each(|cni| {
            let up = built::up(Some(Mode::Node(*cni)));
            up.and_then(|()| on_built(*cni, &image, test(), arguments)).and(built::down())
        }),
    }
}

fn on_built(cni: Cni, image: &Image, mut test: Command, arguments: &[String]) -> Result<()> {
    let cluster = Built::at(Path::new(built::KUBECONFIG))?;
    cluster.import(&image.archive)?;
    step(&format!("stories on a node with the CNI {}", Mode::Node(cni)));
    test.args(["--", "--test-threads=1"]);
    if cni == Cni::Ptp {
        test.args(ANY_WIRING.iter().flat_map(|story| ["--skip", story]));
    }
    stories(&cluster, image, test.args(arguments))
}

fn on_existing(
    cluster: &Existing,
    image: &Image,
    test: impl Fn() -> Command,
    arguments: &[String],
) -> Result<()> {
    let busybox = image.archive.with_file_name("busybox.tar");
    built::write_busybox(&busybox)?;
    step("the images that the stories need on the node");
    cluster.import(&image.archive)?;
    cluster.import(&busybox)?;
    step("looking at the node");
    let node = cluster.node()?;
    println!("    {} ({}), with the image {BUSYBOX}", node.name, node.address);
    step(&format!("stories on the cluster of {}", cluster.kubeconfig().display()));
    let mut run = test();
    run.args(["--", "--test-threads=1", "--skip", BUILT_ONLY]).env(KIND_VARIABLE, EXISTING);
    let outcome = stories(cluster, image, run.args(arguments));
    let left_out = test().args(["--", "--list", "--format=terse", BUILT_ONLY]).args(arguments).read()?;
    for story in left_out.lines().filter_map(|line| line.strip_suffix(": test")) {
        println!("    !!! NOT RUN, because it needs a cluster that is built here: {story}");
    }
    outcome
}

fn stories(cluster: &dyn TestCluster, image: &Image, test: &mut Command) -> Result<()> {
    test.env("KUBECONFIG", cluster.kubeconfig()).env("MIRROR_AGENT", &image.agent);
    test.env("MIRROR_HELM", tools::helm()?.get_program())
        .env("MIRROR_PLUGIN", workspace::program("kubectl-mirror")?);
    let outcome = test.run();
    // Uninstalling the agent also removes what it has left on this machine.
    let mut uninstall = cluster.kubectl();
    uninstall.args(["delete", "--ignore-not-found", "--filename"]);
    let uninstalled = uninstall.arg(workspace::root().join("deploy/rendered/podmirror.yaml")).run();
    outcome.and(uninstalled)
}
