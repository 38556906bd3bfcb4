//! Multus as the CNI plugin of the cluster. It calls the reference plugins for the node's own network and for the
//! additional networks of a pod.
//!
//! The node's own network is a bridge, followed by the plugin `bandwidth` for pods with a limit. `binaries` installs
//! Multus' program, which Go builds from source, `node` configures it, and `down` removes it with the rest.

use std::{fs, os::unix::fs::symlink, path::PathBuf};

use anyhow::{Context as _, Result};
use mirror_test_tools::{
    process::{Run as _, step},
    programs,
};
use serde_json::{Value, json};

use super::{
    binaries::{Binaries, go_build, once, version_in},
    control::kubectl,
    node::NETWORK,
    pki, state,
};

/// The Go module whose `tool` line is the program; it pins every version.
const GO_MOD: &str = include_str!("../../go/multus/go.mod");
const GO_SUM: &str = include_str!("../../go/multus/go.sum");
const MODULE: &str = "gopkg.in/k8snetworkplumbingwg/multus-cni.v4";
/// The CRD of the objects that describe additional networks.
const NETWORKS: &str = include_str!("multus/networks.yaml");
/// The directory of the plugins, for containerd and for Multus.
const PLUGINS: &str = "cni/bin";

/// Returns an error if Multus is missing and cannot be built on this machine.
pub fn can_be_brought() -> Result<()> {
    if program()?.exists() { Ok(()) } else { go().map(drop) }
}

/// Builds Multus, if it is missing.
pub(super) fn bring() -> Result<()> {
    let built = built()?;
    once(&built, &[GO_MOD, GO_SUM].concat(), || {
        let module = built.join("module");
        fs::create_dir_all(&module)?;
        fs::write(module.join("go.mod"), GO_MOD)?;
        fs::write(module.join("go.sum"), GO_SUM)?;
        step(&format!(
            "building Multus {} into {} (go build; once, some minutes)",
            version_in(GO_MOD, MODULE)?,
            built.display()
        ));
        let mut build = go_build(go()?, &module, "-s -w");
        build
            .arg("tool")
            .run()
            .context("Multus cannot be built; is Go new enough, and is its module proxy reachable?")
    })
}

/// Fills the directory of the plugins: Multus, and those that it calls.
pub(super) fn configure(binaries: &Binaries) -> Result<()> {
    fs::create_dir_all(state::path(PLUGINS))?;
    let reference = fs::read_dir(binaries.debian("usr/lib/cni"))?;
    let reference = reference.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    for plugin in reference.into_iter().chain([program()?]) {
        let link = state::path(PLUGINS).join(plugin.file_name().context("a plugin has a name")?);
        if !link.is_symlink() {
            symlink(plugin, link)?;
        }
    }
    Ok(())
}

/// Creates the CRD NetworkAttachmentDefinition.
pub(super) fn up(binaries: &Binaries) -> Result<()> {
    let file = state::path("networks.yaml");
    fs::write(&file, NETWORKS)?;
    kubectl(binaries).args(["apply", "-f"]).arg(file).run()?;
    let kind = "crd/network-attachment-definitions.k8s.cni.cncf.io";
    kubectl(binaries).args(["wait", "--for=condition=Established", "--timeout=60s", kind]).run()
}

/// Multus' configuration, with the plugin of the node's own network. Multus passes the limits in a pod's annotations on
/// to the plugin `bandwidth`.
pub(super) fn config(network: &Value) -> Value {
    let capabilities = json!({ "bandwidth": true });
    json!({
        "type": "multus",
        "capabilities": capabilities,
        "kubeconfig": pki::kubeconfig("admin"),
        "binDir": state::text(PLUGINS),
        "cniDir": state::text("cni/multus"),
        "delegates": [{
            "cniVersion": "0.4.0",
            "name": NETWORK,
            "plugins": [network, { "type": "bandwidth", "capabilities": capabilities }],
        }],
    })
}

fn built() -> Result<PathBuf> {
    let name = format!("multus-{}", version_in(GO_MOD, MODULE)?);
    Ok(programs::cache_dir()?.join("cluster").join(name))
}

fn program() -> Result<PathBuf> {
    Ok(built()?.join("bin/multus"))
}

fn go() -> Result<PathBuf> {
    programs::go(&format!(
        "Multus, in version {} or newer",
        GO_MOD.lines().find_map(|line| line.strip_prefix("go ")).unwrap_or("1.25")
    ))
}
