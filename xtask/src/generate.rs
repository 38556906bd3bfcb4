//! `cargo xtask gen`: writes the files that are generated and committed, so that users need none of the project's
//! tools: the CRDs, the rendered manifest of the chart and its README, and the agent's reference of flags and annotations.
//!
//! `--check` changes nothing, and fails if a file is not up to date. `lint` calls it that way.

use std::fs;

use anyhow::{Context as _, Result, bail};

use crate::{
    chart,
    process::{Run as _, command, step},
    tools, workspace,
};

/// The chart with its default values, for `kubectl apply`.
const RENDERED: &str = "deploy/rendered/podmirror.yaml";
/// The page of the chart, with its values.
const README: &str = "deploy/chart/README.md";

/// The files that the agent prints, and the command for each: flags and annotations, and the CRDs.
const PRINTED: [(&str, &str); 2] =
    [("docs/reference.md", "reference"), ("deploy/chart/files/crds.yaml", "crds")];

/// The text before the rendered chart. It creates the namespace, as Helm does with `--create-namespace`.
const HEAD: &str = "\
# Generated from deploy/chart by `cargo xtask gen`: do not edit.
#
# For Kubernetes 1.30 and newer; older ones need what Helm makes of the chart for them.
#
# kubectl apply -f podmirror.yaml     installs podmirror on every node of the architecture amd64. A node of another one
#                                     gets no agent: that is in the DaemonSet's nodeAffinity
# kubectl delete -f podmirror.yaml    removes it, and all that it has put on the nodes, and the CRDs with every Mirror and
#                                     ClusterMirror of the cluster
---
apiVersion: v1
kind: Namespace
metadata:
  name: podmirror
  labels:
    app.kubernetes.io/name: podmirror
    # The agent uses the node's network, process ids and BPF file system, which the other levels forbid.
    pod-security.kubernetes.io/enforce: privileged
";

/// The command line of `cargo xtask gen`.
#[derive(Debug, clap::Args)]
pub(crate) struct GenArgs {
    /// Change nothing; fail if a file is not up to date.
    #[arg(long)]
    check: bool,
}

/// Writes the files, or checks them.
pub(crate) fn run(args: GenArgs) -> Result<()> {
    let GenArgs { check } = args;
    if !check {
        return write();
    }
    check_printed()?;
    self::check()
}

/// Fails if what is made of the chart is not up to date.
pub(crate) fn check() -> Result<()> {
    step("generated files");
    for (file, text) in [(RENDERED, rendered()?), (README, chart::readme()?)] {
        if fs::read_to_string(workspace::root().join(file)).unwrap_or_default() != text {
            bail!("{file} is not what the chart makes: `cargo xtask gen` writes it");
        }
    }
    Ok(())
}

/// Fails if a file that the agent prints is not up to date. Needs no Go, but builds the agent.
pub(crate) fn check_printed() -> Result<()> {
    step("what the agent prints: the reference, and the CRDs");
    for (file, word) in PRINTED {
        let path = workspace::root().join(file);
        if fs::read_to_string(path).unwrap_or_default() != printed(word)? {
            bail!("{file} is not what `mirror-agent {word}` prints: `cargo xtask gen` writes it");
        }
    }
    Ok(())
}

fn write() -> Result<()> {
    for (file, word) in PRINTED {
        write_file(file, &printed(word)?)?;
    }
    // The chart contains the CRDs.
    write_file(RENDERED, &rendered()?)?;
    write_file(README, &chart::readme()?)
}

fn write_file(file: &str, text: &str) -> Result<()> {
    step(&format!("writing {file}"));
    let path = workspace::root().join(file);
    let dir = path.parent().unwrap_or(&path);
    fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    fs::write(&path, text).with_context(|| path.display().to_string())
}

/// The output of the built agent for this command. xtask does not depend on the agent's crate, because xtask also
/// builds with older versions of Rust.
fn printed(word: &str) -> Result<String> {
    tools::stable()?;
    tools::bpf()?;
    command(workspace::agent()?).arg(word).read()
}

fn rendered() -> Result<String> {
    Ok(HEAD.to_owned() + &without_helm(&chart::rendered()?))
}

/// Removes the lines that name Helm as the objects' manager.
fn without_helm(rendered: &str) -> String {
    const HELMS: [&str; 3] = ["app.kubernetes.io/managed-by: ", "helm.sh/chart: ", "# Source: "];
    let ours = |line: &&str| !HELMS.iter().any(|helms| line.trim_start().starts_with(helms));
    rendered.lines().filter(ours).flat_map(|line| [line, "\n"]).collect()
}

#[cfg(test)]
mod tests {
    use super::without_helm;

    #[test]
    fn what_kubectl_applies_does_not_say_that_helm_manages_it() {
        let rendered = "---\n# Source: podmirror/x.yaml\nlabels:\n  a: b\n  helm.sh/chart: podmirror-1\n  app.kubernetes.io/managed-by: Helm\n";
        assert_eq!(without_helm(rendered), "---\nlabels:\n  a: b\n");
    }
}
