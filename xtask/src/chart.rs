//! Renders the Helm chart, and checks the result.
//!
//! This module does not use a cluster. The tests on a cluster check that the API server accepts the result, and that
//! the agent runs with it. `generate` and `lint` call this module.

mod cases;
mod openshift;
mod prometheus;
mod schemas;
#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};

use self::cases::{OLDEST_KUBERNETES, REFUSED, TAKEN, TAKEN_BY_NEWER, WITHOUT};
use crate::{
    process::{Run as _, step},
    tools, workspace,
};

/// The manifest in `deploy/rendered` is for this version and newer ones.
const RENDERED_FOR: &str = "1.30.0";
/// Values of platforms, which the page explains; `full-values.yaml` is for the checks alone.
const PLATFORMS: (&str, &str) = ("deploy/chart/ci", "docs/platforms.md");

/// Renders the chart with its default values, as `helm install podmirror --namespace podmirror` does.
pub(crate) fn rendered() -> Result<String> {
    template(&[], RENDERED_FOR)?.arg("--skip-tests").read()
}

/// The chart's README, with a table of all values.
pub(crate) fn readme() -> Result<String> {
    let mut docs = tools::helm_docs()?;
    docs.args(["--chart-search-root", "deploy/chart", "--sort-values-order", "file", "--dry-run"]);
    let text = docs.args(["--log-level", "error"]).current_dir(workspace::root()).read()?;
    ensure!(text.contains("## Values"), "helm-docs has not read deploy/chart/values.yaml");
    if let Some(row) = text.lines().find(|line| line.ends_with("|  |")) {
        bail!("a value in deploy/chart/values.yaml has no comment that begins with `# -- `: {row}");
    }
    Ok(text)
}

/// Checks the chart with helm's own rules, with values that must be taken or refused, with the schemas of
/// Kubernetes, with OpenShift's constraints, and with the metrics.
pub(crate) fn check() -> Result<()> {
    step("chart");
    let version = env!("CARGO_PKG_VERSION");
    let manifest = fs::read_to_string(workspace::root().join("deploy/chart/Chart.yaml"))?;
    for key in ["version", "appVersion"] {
        if !manifest.lines().any(|line| line == format!("{key}: {version}")) {
            bail!("deploy/chart/Chart.yaml does not say `{key}: {version}`, the workspace's version");
        }
    }
    helm()?.args(["lint", "--strict", "--quiet", "deploy/chart"]).run()?;
    let mut manifests = BTreeMap::new();
    let of_oldest = TAKEN.iter().map(|taken| (taken, OLDEST_KUBERNETES));
    for ((values, part), kubernetes) in
        of_oldest.chain(TAKEN_BY_NEWER.iter().map(|taken| (taken, RENDERED_FOR)))
    {
        let text = template(values, kubernetes)?.read()?;
        if !text.contains(part) {
            bail!("the chart with {} renders to something without {part:?}", values.join(" "));
        }
        manifests.insert(format!("{}, Kubernetes {kubernetes}", values.join(" ")), text);
    }
    for (values, kubernetes, part) in WITHOUT {
        if template(values, kubernetes)?.args(["--show-only", "templates/*.yaml"]).read()?.contains(part) {
            bail!("the chart with {} has {part:?} for Kubernetes {kubernetes}", values.join(" "));
        }
    }
    for (values, part) in REFUSED {
        let output = template(values, OLDEST_KUBERNETES)?.output().context("helm")?;
        let told = String::from_utf8_lossy(&output.stderr);
        if output.status.success() {
            bail!("the chart takes {}", values.join(" "));
        }
        if !told.contains(part) {
            bail!("the chart refuses {} without naming {part:?}: {told}", values.join(" "));
        }
    }
    println!(
        "    {} values rendered, {} refused",
        TAKEN.len() + TAKEN_BY_NEWER.len() + WITHOUT.len(),
        REFUSED.len()
    );
    manifests.extend(schemas::check(&platforms()?)?);
    openshift::check(&manifests)?;
    prometheus::check(&manifests)
}

/// The files with the values of platforms.
fn platforms() -> Result<Vec<PathBuf>> {
    let (directory, page) = PLATFORMS;
    let page_text = fs::read_to_string(workspace::root().join(page)).context(page)?;
    let entries = fs::read_dir(workspace::root().join(directory)).context(directory)?;
    let mut files: Vec<_> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    files.sort();
    for name in files.iter().filter_map(|file| file.file_name()?.to_str()) {
        ensure!(name == "full-values.yaml" || page_text.contains(name), "{page} does not explain {name}");
    }
    Ok(files)
}

/// Renders the chart with a file of values.
fn with_file(file: &Path, kubernetes: &str) -> Result<String> {
    let file: &OsStr = file.as_ref();
    template(&[], kubernetes)?.arg("--values").arg(file).read()
}

fn template(values: &[&str], kubernetes: &str) -> Result<Command> {
    let mut template = helm()?;
    template.args(["template", "podmirror", "deploy/chart", "--namespace", "podmirror"]);
    // A helm that Go has built without helm's own makefile assumes a very old cluster.
    template.args(["--kube-version", kubernetes]);
    template.args(values.iter().flat_map(|value| ["--set", value]));
    Ok(template)
}

/// helm in the work tree, without the user's settings and repositories.
fn helm() -> Result<Command> {
    let mut helm = tools::helm()?;
    helm.current_dir(workspace::root()).env("KUBECONFIG", "/dev/null");
    for name in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
        helm.env(name, workspace::root().join("target/helm"));
    }
    Ok(helm)
}
