//! [`findings`]: evaluates the facts about a cluster. Pure.
//!
//! This module has the checks that need no agent: the server, the nodes, the network and the CRDs; [`rights`] has those
//! of the user's rights, and [`installed`] those of an installed podmirror. `check` reads the facts and prints the
//! findings.

mod installed;
mod rights;

use std::collections::BTreeMap;

use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, Deployment},
        core::v1::{Node, Pod},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    jiff::Timestamp,
};
use kube::ResourceExt as _;
use mirror_api::{MirrorNode, MirrorTarget, crds};
use serde::Serialize;

pub(super) use self::rights::{Asked, Right, asked};
use super::network;
use crate::nodes::Answer;

/// Maximum number of nodes that a finding names.
const MOST_NAMED: usize = 10;
/// Minimum kernels: for the agent, for filters on arm64, and for TCX.
const LEAST_KERNEL: (u32, u32) = (5, 10);
const ARM_FILTERS: (u32, u32) = (6, 0);
const TCX: (u32, u32) = (6, 6);
/// Minimum versions of Kubernetes: for the chart, and for all features.
const LEAST_SERVER: (u32, u32) = (1, 25);
const WHOLE_SERVER: (u32, u32) = (1, 30);

/// A value that was read, or the reason why it could not be read.
pub(super) type Read<T> = Result<T, Unread>;

/// Why something could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Unread {
    /// The user lacks the right.
    pub(super) is_refused: bool,
    pub(super) why: String,
}

#[derive(Debug)]
pub(super) struct Facts {
    /// The version of this program.
    pub(super) plugin: &'static str,
    /// The namespace of the agents.
    pub(super) agents: String,
    pub(super) now: Timestamp,
    /// The version of the server, as in `v1.34.1`.
    pub(super) server: String,
    pub(super) nodes: Read<Vec<Node>>,
    /// The DaemonSets of all namespaces.
    pub(super) daemon_sets: Read<Vec<DaemonSet>>,
    /// The installed CRDs of podmirror.
    pub(super) crds: Read<Vec<CustomResourceDefinition>>,
    pub(super) rights: Vec<Right>,
    /// The DaemonSets of the agents.
    pub(super) installed: Read<Vec<DaemonSet>>,
    /// The pods of the agents.
    pub(super) pods: Read<Vec<Pod>>,
    /// The Deployments of the controller.
    pub(super) controllers: Read<Vec<Deployment>>,
    pub(super) reports: Read<Vec<MirrorNode>>,
    pub(super) targets: Read<Vec<MirrorTarget>>,
    /// The answers of the agents; `None`: the user lacks the right to ask them, or there are none.
    pub(super) answers: Option<Vec<Answer>>,
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum Level {
    Ok,
    /// Something should be examined.
    Warn,
    /// It does not work.
    Fail,
}

impl Level {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::Warn => "WARN",
            Self::Fail => "FAIL",
        }
    }
}

/// The outcome of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) check: &'static str,
    pub(super) result: Level,
    pub(super) found: String,
    /// The remedy; empty if nothing has to be done.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) todo: String,
}

impl Finding {
    pub(super) const fn ok(check: &'static str, found: String) -> Self {
        Self { check, result: Level::Ok, found, todo: String::new() }
    }

    pub(super) fn warn(check: &'static str, found: String, todo: impl Into<String>) -> Self {
        Self { check, result: Level::Warn, found, todo: todo.into() }
    }

    pub(super) fn fail(check: &'static str, found: String, todo: impl Into<String>) -> Self {
        Self { check, result: Level::Fail, found, todo: todo.into() }
    }

    /// A finding for facts that could not be read.
    fn unread(check: &'static str, what: &str, Unread { is_refused, why }: &Unread) -> Self {
        let todo = match is_refused {
            true => format!("ask an administrator for permission to list {what}"),
            false => "fix the cause, and check again".to_owned(),
        };
        Self::warn(check, format!("cannot read the {what}: {why}"), todo)
    }
}

/// The finding for an API server that does not answer.
pub(super) fn unreachable(Unread { why, .. }: &Unread) -> Finding {
    let found = format!("unexpected answer from the API server: {why}");
    Finding::fail("server", found, "check the kubeconfig, and whether kubectl works")
}

/// Returns the findings, in the order of the output.
pub(super) fn findings(facts: &Facts) -> Vec<Finding> {
    let mut findings = vec![server(&facts.server)];
    match &facts.nodes {
        Ok(nodes) => {
            findings.extend(systems(nodes, is_installed(facts)));
            findings.extend(kernels(nodes));
        }
        Err(unread) => findings.push(Finding::unread("nodes", "nodes", unread)),
    }
    findings.extend(networks(&facts.daemon_sets));
    findings.extend(resources(facts));
    findings.extend(rights::findings(&facts.rights));
    findings.extend(installed::findings(facts));
    findings
}

/// The first two numbers of a version, as of `v1.34.1` and `5.15.0-91-generic`.
fn numbers(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.trim_start_matches('v').split(['.', '-', '+']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Whether the server has the admission policies that MirrorNodes and the controller require.
fn is_whole(facts: &Facts) -> bool {
    numbers(&facts.server).is_some_and(|version| version >= WHOLE_SERVER)
}

fn server(version: &str) -> Finding {
    let found = format!("Kubernetes {version}");
    match numbers(version) {
        None => Finding::warn("server", format!("{found}: unknown version format"), "use 1.30 or newer"),
        Some(numbers) if numbers < LEAST_SERVER => {
            Finding::fail("server", format!("{found}: the chart needs 1.25"), "use 1.30 or newer")
        }
        Some(numbers) if numbers < WHOLE_SERVER => Finding::warn(
            "server",
            format!(
                "{found}: without 1.30 there are no MirrorNodes and no controller, so Mirrors have no status"
            ),
            "use 1.30 or newer; everything else works",
        ),
        Some(_) => Finding::ok("server", found),
    }
}

/// The first names, and the number of the remaining ones.
fn named<'n>(names: impl IntoIterator<Item = &'n str>) -> String {
    let names: Vec<_> = names.into_iter().collect();
    let first = names.iter().take(MOST_NAMED).copied().collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(MOST_NAMED) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

/// A number with its noun.
fn count(number: usize, thing: &str) -> String {
    if number == 1 { format!("1 {thing}") } else { format!("{number} {thing}s") }
}

fn info(node: &Node) -> (&str, &str, &str) {
    let info = node.status.as_ref().and_then(|status| status.node_info.as_ref());
    info.map_or(("", "", ""), |info| (&info.operating_system, &info.architecture, &info.kernel_version))
}

/// Whether podmirror has an agent for the node's operating system and architecture.
fn is_fit(node: &Node) -> bool {
    let (system, architecture, _) = info(node);
    system == "linux" && ["amd64", "arm64"].contains(&architecture)
}

fn systems(nodes: &[Node], is_installed: bool) -> Vec<Finding> {
    let mut others = BTreeMap::<_, Vec<_>>::new();
    let mut fit = BTreeMap::<_, usize>::new();
    for node in nodes {
        let (system, architecture, _) = info(node);
        if is_fit(node) {
            *fit.entry(architecture).or_default() += 1;
        } else {
            others.entry(format!("{system}/{architecture}")).or_default().push(node.name_any());
        }
    }
    let mut findings = Vec::new();
    if fit.is_empty() {
        let found = format!("none of {} has Linux on amd64 or arm64", count(nodes.len(), "node"));
        findings.push(Finding::fail(
            "nodes",
            found,
            "podmirror has agents for Linux on amd64 and arm64 only",
        ));
    } else {
        let of: Vec<_> = fit.iter().map(|(of, number)| format!("{number} with linux/{of}")).collect();
        let found = format!("{}: {}", count(nodes.len(), "node"), of.join(", "));
        // If podmirror is installed, the check of the agents names the nodes without one.
        findings.push(match fit.contains_key("arm64") && !is_installed {
            true => Finding {
                todo: "set the chart's image.architectures, as described in docs/install.md".to_owned(),
                ..Finding::ok("nodes", found)
            },
            false => Finding::ok("nodes", found),
        });
    }
    findings.extend(others.into_iter().map(|(system, names)| {
        let found = format!("{system}: {}", named(names.iter().map(String::as_str)));
        Finding::warn("nodes", found, "no agent runs on these nodes, and their pods are not mirrored")
    }));
    findings
}

fn kernels(nodes: &[Node]) -> Vec<Finding> {
    let fit: Vec<_> = nodes.iter().filter(|node| is_fit(node)).collect();
    let version = |node: &&Node| numbers(info(node).2);
    let with = |is_so: &dyn Fn(&Node, (u32, u32)) -> bool| {
        let of = fit.iter().filter(|node| version(node).is_some_and(|version| is_so(node, version)));
        let names = of.map(|node| format!("{} ({})", node.name_any(), info(node).2)).collect::<Vec<_>>();
        (!names.is_empty()).then(|| (names.len(), named(names.iter().map(String::as_str))))
    };
    let mut findings = Vec::new();
    if let Some((number, names)) = with(&|_, version| version < LEAST_KERNEL) {
        let todo =
            "use Linux 5.10 or newer there, or exclude these nodes with the chart's nodeSelector or affinity";
        let found = format!("older than 5.10, so no agent works there: {names}");
        findings.push(match number == fit.len() {
            true => Finding::fail("kernel", found, todo),
            false => Finding::warn("kernel", found, todo),
        });
    }
    if let Some((_, names)) =
        with(&|node, version| info(node).1 == "arm64" && (LEAST_KERNEL..ARM_FILTERS).contains(&version))
    {
        let found = format!("older than 6.0 on arm64, so mirrors with a filter are refused there: {names}");
        findings.push(Finding::warn(
            "kernel",
            found,
            "use Linux 6.0 or newer there, or mirrors without a filter",
        ));
    }
    if let Some((_, names)) = with(&|_, version| (LEAST_KERNEL..TCX).contains(&version)) {
        let found = format!(
            "older than 6.6, so when a pod is mirrored for the first time, one of its packets can be lost, and root in a pod \
             can remove a tap inside the pod: {names}"
        );
        let todo = "use Linux 6.6 or newer there, if that matters: see docs/operations.md";
        findings.push(Finding::warn("kernel", found, todo));
    }
    let unknown = fit.iter().filter(|node| version(node).is_none()).map(|node| node.name_any());
    let unknown: Vec<_> = unknown.collect();
    if !unknown.is_empty() {
        let found = format!("unknown version format: {}", named(unknown.iter().map(String::as_str)));
        findings.push(Finding::warn("kernel", found, "podmirror needs Linux 5.10 or newer"));
    }
    if findings.is_empty()
        && let (Some(least), Some(most)) =
            (fit.iter().min_by_key(|node| version(node)), fit.iter().max_by_key(|node| version(node)))
    {
        let (least, most) = (info(least).2, info(most).2);
        let range = if least == most { least.to_owned() } else { format!("{least} to {most}") };
        findings.push(Finding::ok("kernel", format!("Linux {range}")));
    }
    findings
}

fn networks(daemon_sets: &Read<Vec<DaemonSet>>) -> Vec<Finding> {
    let todo = "mirror a pod, and check with `kubectl mirror coverage` whether all its packets are seen";
    let networks = match daemon_sets {
        Ok(daemon_sets) => network::of(daemon_sets),
        Err(unread) => return vec![Finding::unread("network", "DaemonSets of all namespaces", unread)],
    };
    if networks.is_empty() {
        let found = "no DaemonSet of a known CNI found; podmirror needs pods with veth pairs, macvlan or similar devices";
        return vec![Finding::warn("network", found.to_owned(), todo)];
    }
    let finding = |network: &network::Network| match network.covered {
        Some(covered) => Finding::ok("network", format!("{}: {covered}", network.name)),
        None => Finding::warn("network", format!("{}: not tested with podmirror", network.name), todo),
    };
    networks.into_iter().map(finding).collect()
}

/// Whether any part of podmirror is installed.
fn is_installed(facts: &Facts) -> bool {
    facts.installed.as_ref().is_ok_and(|sets| !sets.is_empty())
        || facts.pods.as_ref().is_ok_and(|pods| !pods.is_empty())
}

fn resources(facts: &Facts) -> Vec<Finding> {
    let there = match &facts.crds {
        Ok(there) => there,
        Err(unread) => return vec![Finding::unread("resources", "CRDs", unread)],
    };
    let (mut missing, mut other) = (Vec::new(), Vec::new());
    for crd in crds() {
        let name = crd.name_any();
        match there.iter().find(|there| there.name_any() == name) {
            None => missing.push(name),
            Some(there) if schemas(there) != schemas(&crd) => other.push(name),
            Some(_) => {}
        }
    }
    let named = |names: &[String]| named(names.iter().map(String::as_str));
    if there.is_empty() && !is_installed(facts) {
        return vec![Finding::ok("resources", "not installed yet: the chart installs the CRDs".to_owned())];
    }
    let mut findings = Vec::new();
    if !missing.is_empty() {
        let todo = "install them with the chart (crds.install), or as described in docs/resources.md; annotations work without them";
        findings.push(Finding::warn(
            "resources",
            format!("these CRDs are missing: {}", named(&missing)),
            todo,
        ));
    }
    if !other.is_empty() {
        let found =
            format!("these CRDs have another version than this plugin ({}): {}", facts.plugin, named(&other));
        let todo =
            "upgrade the CRDs, then the agents, and use the plugin of the same version: docs/resources.md";
        findings.push(Finding::warn("resources", found, todo));
    }
    if findings.is_empty() {
        findings.push(Finding::ok("resources", format!("{} of this version", count(there.len(), "CRD"))));
    }
    findings
}

/// The schemas of a CRD by version.
fn schemas(crd: &CustomResourceDefinition) -> BTreeMap<&str, Option<&impl PartialEq>> {
    let versions = crd.spec.versions.iter();
    versions
        .map(|of| {
            (of.name.as_str(), of.schema.as_ref().and_then(|schema| schema.open_api_v3_schema.as_ref()))
        })
        .collect()
}

#[cfg(test)]
mod tests;
