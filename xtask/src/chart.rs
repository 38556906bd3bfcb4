//! Renders the Helm chart, and checks the result.
//!
//! This module does not use a cluster. The level api checks that the API server accepts the result, and that Prometheus
//! answers the queries of the dashboard and the alerts; the level cluster, that the agent runs with it. `generate` and
//! `lint` call this module.

mod monitors;
mod openshift;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use anyhow::{Context as _, Result, anyhow, ensure};
use serde_json::Value;

use crate::{
    pins,
    process::{Run as _, command, is_ci, step},
    programs, tools, workspace,
};

/// The manifest in `deploy/rendered` is for this version and newer ones.
const RENDERED_FOR: &str = "1.30.0";
/// The chart in the work tree.
pub(crate) const CHART: &str = "deploy/chart";
/// Values of platforms, which the page explains; `full-values.yaml` is for the checks alone.
const PLATFORMS: (&str, &str) = ("deploy/chart/ci", "docs/platforms.md");

/// The tests of the alerts for promtool.
const ALERTS: &str = "xtask/chart/alerts.yaml";

/// Rendered charts, by their values or the files with these.
type Manifests = BTreeMap<String, String>;

/// The cases of `cases.yaml`, by the version of Kubernetes. A case has lists of values and of texts.
type Cases = BTreeMap<String, Vec<BTreeMap<String, Vec<String>>>>;

/// Renders a chart with its default values, as `helm install podmirror --namespace podmirror` does.
pub(crate) fn rendered(chart: &Path) -> Result<String> {
    template(chart, &[], RENDERED_FOR)?.arg("--skip-tests").read()
}

/// The chart's README, with a table of all values.
pub(crate) fn readme() -> Result<String> {
    let mut docs = tools::go_program("github.com/norwoodj/helm-docs/cmd/helm-docs", pins::HELM_DOCS)?;
    docs.args(["--chart-search-root", "deploy/chart", "--sort-values-order", "file", "--dry-run"]);
    let text = docs.args(["--log-level", "error"]).current_dir(workspace::root()).read()?;
    ensure!(text.contains("## Values"), "helm-docs has not read deploy/chart/values.yaml");
    let row = text.lines().find(|line| line.ends_with("|  |"));
    ensure!(
        row.is_none(),
        "a value in deploy/chart/values.yaml has no comment that begins with `# -- `: {}",
        row.unwrap_or_default()
    );
    Ok(text)
}

/// Checks the chart with helm's own rules, with values that must be taken or refused, with OpenShift's constraints, and
/// its monitors and alerts.
pub(crate) fn check() -> Result<()> {
    step("chart");
    helm()?.args(["lint", "--strict", "--quiet", CHART]).run()?;
    let mut manifests = rendered_cases()?;
    manifests.extend(platforms()?);
    each_with(&manifests, "kind: SecurityContextConstraints\n", openshift::fits)?;
    each_with(&manifests, "apiVersion: monitoring.coreos.com/", monitors::check)?;
    match programs::promtool() {
        Err(why) if !is_ci() => println!("    NOT CHECKED: the alerts: {why:#}"),
        promtool => {
            command(promtool?).args(["test", "rules", ALERTS]).current_dir(workspace::root()).run()?;
        }
    }
    Ok(())
}

/// Renders the chart with the values of each case, compares the outcome, and returns the manifests.
fn rendered_cases() -> Result<Manifests> {
    const KEYS: [&str; 4] = ["set", "has", "lacks", "refused"];
    let cases: Cases = serde_saphyr::from_str(include_str!("../chart/cases.yaml"))
        .map_err(|why| anyhow!("xtask/chart/cases.yaml: {why}"))?;
    let (mut manifests, mut refused) = (Manifests::new(), 0);
    let cases = cases.iter().flat_map(|(version, cases)| cases.iter().map(move |case| (version, case)));
    for (kubernetes, case) in cases {
        let texts = |key: &str| case.get(key).map(Vec::as_slice).unwrap_or_default();
        let title = format!("{}, Kubernetes {kubernetes}", texts("set").join(" "));
        ensure!(case.keys().all(|key| KEYS.contains(&key.as_str())), "{title}: a key is none of {KEYS:?}");
        let output = template(CHART.as_ref(), texts("set"), kubernetes)?.output().context("helm")?;
        let is_taken = output.status.success();
        let told = String::from_utf8_lossy(&output.stderr);
        ensure!(is_taken != case.contains_key("refused"), "helm with {title}: {}; {told}", output.status);
        let text = if is_taken { String::from_utf8_lossy(&output.stdout) } else { told };
        let mut wanted = texts("has").iter().chain(texts("refused"));
        let missing = wanted.find(|part| !text.contains(*part));
        ensure!(missing.is_none(), "the outcome of {title} does not have {missing:?}");
        let other = texts("lacks").iter().find(|part| text.contains(*part));
        ensure!(other.is_none(), "the outcome of {title} has {other:?}");
        if is_taken {
            manifests.insert(title, text.into_owned());
        } else {
            refused += 1;
        }
    }
    println!("    {} values rendered, {refused} refused", manifests.len());
    Ok(manifests)
}

/// Checks the objects of each manifest that contains `part`, as at least one does.
fn each_with(manifests: &Manifests, part: &str, mut check: impl FnMut(&[Value]) -> Result<()>) -> Result<()> {
    let mut with_part = manifests.iter().filter(|(_, manifest)| manifest.contains(part)).peekable();
    ensure!(with_part.peek().is_some(), "no values make {part:?}");
    with_part.try_for_each(|(values, manifest)| {
        let objects: Vec<Value> =
            serde_saphyr::from_multiple(manifest).map_err(|why| anyhow!("{values}: {why}"))?;
        check(&objects).with_context(|| values.clone())
    })
}

/// Renders the chart with the values of each platform.
fn platforms() -> Result<Manifests> {
    let (directory, page) = PLATFORMS;
    let page_text = fs::read_to_string(workspace::root().join(page)).context(page)?;
    let mut manifests = Manifests::new();
    for file in workspace::files(&[directory])? {
        let (_, name) = file.rsplit_once('/').context("a file in a directory")?;
        ensure!(name == "full-values.yaml" || page_text.contains(name), "{page} does not explain {name}");
        let manifest = template(CHART.as_ref(), &[], RENDERED_FOR)?.args(["--values", &file]).read()?;
        manifests.insert(file, manifest);
    }
    Ok(manifests)
}

fn template(chart: &Path, values: &[String], kubernetes: &str) -> Result<Command> {
    let mut template = helm()?;
    template.args(["template", "podmirror", "--namespace", "podmirror"]).arg(chart);
    // A helm that Go has built without helm's own makefile assumes a very old cluster.
    template.args(["--kube-version", kubernetes]);
    template.args(values.iter().flat_map(|value| ["--set", value.as_str()]));
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
