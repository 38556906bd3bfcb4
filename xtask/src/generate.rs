//! `cargo xtask gen`: writes the files that are generated and committed, so that users need none of the project's tools.
//!
//! Of the code: the CRDs, the reference of flags and annotations, and the runbooks. The level unit compares them. Of the
//! chart: its rendered manifest and its README. `lint` compares them.

use std::{fs, path::Path};

use anyhow::{Context as _, Result, ensure};

use crate::{
    chart,
    process::{Run as _, step},
    tools, workspace,
};

/// The text before the rendered chart. It creates the namespace, as Helm does with `--create-namespace`.
const HEAD: &str = include_str!("../chart/head.yaml");

/// Writes the files.
pub(crate) fn run() -> Result<()> {
    tools::stable()?;
    tools::bpf()?;
    step("writing the CRDs, the reference, and the runbooks");
    let mut tests = workspace::members("test");
    tests.env("PODMIRROR_WRITE_GENERATED", "1").args(["--lib", "--", "up_to_date"]).run()?;
    // The chart contains the CRDs.
    for (file, text) in of_chart()? {
        step(&format!("writing {file}"));
        fs::write(workspace::root().join(file), text).context(file)?;
    }
    Ok(())
}

/// Fails if what is made of the chart is not up to date.
pub(crate) fn check() -> Result<()> {
    step("generated files");
    for (file, text) in of_chart()? {
        let is_up_to_date = fs::read_to_string(workspace::root().join(file)).is_ok_and(|old| old == text);
        ensure!(is_up_to_date, "{file} is not up to date: `cargo xtask gen` writes it");
    }
    Ok(())
}

/// The files that helm and helm-docs make of the chart.
fn of_chart() -> Result<[(&'static str, String); 2]> {
    let rendered = manifest(chart::CHART.as_ref())?;
    Ok([("deploy/rendered/podmirror.yaml", rendered), ("deploy/chart/README.md", chart::readme()?)])
}

/// The objects of a chart, for those who have no Helm.
pub(crate) fn manifest(chart: &Path) -> Result<String> {
    api_service_first(&(HEAD.to_owned() + &without_helm(&chart::rendered(chart)?)))
}

/// Removes the lines that name Helm as the objects' manager.
fn without_helm(rendered: &str) -> String {
    const HELMS: [&str; 3] = ["app.kubernetes.io/managed-by: ", "helm.sh/chart: ", "# Source: "];
    let ours = |line: &&str| !HELMS.iter().any(|helms| line.trim_start().starts_with(helms));
    rendered.lines().filter(ours).flat_map(|line| [line, "\n"]).collect()
}

/// Moves the APIService to the beginning, because kubectl deletes the objects in the order of the file: while the
/// APIService exists without its server, Kubernetes completes the deletion of no namespace.
fn api_service_first(manifest: &str) -> Result<String> {
    const END: &str = "\n---\n";
    let mut documents: Vec<_> = manifest.trim_end().split(END).collect();
    let place = documents.iter().position(|document| document.contains("\nkind: APIService\n"));
    let service = documents.remove(place.context("the chart has no APIService")?);
    // The comments of the head are before the first document.
    documents.insert(1, service);
    Ok(documents.join(END) + "\n")
}

#[cfg(test)]
mod tests {
    use super::{api_service_first, without_helm};

    #[test]
    fn kubectl_deletes_the_apiservice_first() {
        let manifest = "# a\n---\nkind: Namespace\n---\n# b\nkind: APIService\nspec:\n---\nkind: c\n";
        let expected = "# a\n---\n# b\nkind: APIService\nspec:\n---\nkind: Namespace\n---\nkind: c\n";
        assert_eq!(api_service_first(manifest).ok().as_deref(), Some(expected));
        assert!(api_service_first("# a\n---\nkind: Namespace\n").is_err());
    }

    #[test]
    fn what_kubectl_applies_does_not_say_that_helm_manages_it() {
        let rendered = "---\n# Source: podmirror/x.yaml\nlabels:\n  a: b\n  helm.sh/chart: podmirror-1\n  app.kubernetes.io/managed-by: Helm\n";
        assert_eq!(without_helm(rendered), "---\nlabels:\n  a: b\n");
    }
}
