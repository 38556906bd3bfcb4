//! [`findings`]: evaluates the facts about a cluster. Pure.
//!
//! This module checks a cluster before an installation: the server, the nodes, the network and the CRDs. [`rights`]
//! checks the user's rights, and [`installed`] an installed podmirror. `check` reads the facts and prints the
//! findings.

mod installed;
mod rights;

use std::{collections::BTreeMap, ops::Range};

use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, Deployment},
        core::v1::{Node, Pod},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
    jiff::Timestamp,
    kube_aggregator::pkg::apis::apiregistration::v1::APIService,
};
use kube::ResourceExt as _;
use mirror_api::{MirrorNode, MirrorTarget, crds};
use serde::Serialize;

pub(super) use self::rights::{Right, rights};
use super::network;
use crate::screen::named;

/// Maximum number of nodes that a finding names.
const MOST_NAMED: usize = 10;
/// A system that the chart's default does not include.
const ARM: &str = "linux/arm64";
/// Minimum versions of Kubernetes: for the chart, and for all features.
const LEAST_SERVER: (u32, u32) = (1, 25);
const WHOLE_SERVER: (u32, u32) = (1, 30);

/// A value that was read, or the reason why it could not be read.
pub(super) type Read<T> = Result<T, String>;

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
    /// The API of packets, as the API server knows it.
    pub(super) packets: Read<Option<APIService>>,
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

    /// A warning about the objects with these names, if there are any.
    fn about<N: AsRef<str>>(check: &'static str, found: &str, names: &[N], todo: &str) -> Option<Self> {
        let found = || format!("{found} {}", named(names, MOST_NAMED));
        (!names.is_empty()).then(|| Self::warn(check, found(), todo))
    }
}

/// The finding for an API server that does not answer.
pub(super) fn unreachable(why: &str) -> Finding {
    let found = format!("unexpected answer from the API server: {why}");
    Finding::fail("server", found, "check the kubeconfig, and whether kubectl works")
}

/// Returns the findings, in the order of the output.
pub(super) fn findings(facts: &Facts) -> Vec<Finding> {
    let Facts { nodes, daemon_sets, crds, .. } = facts;
    let mut findings = vec![server(&facts.server)];
    let of_nodes = |nodes: &Vec<_>| [systems(nodes, is_installed(facts)), kernels(nodes)].concat();
    findings.extend(judged("nodes", "nodes", nodes, of_nodes));
    findings.extend(judged("network", "DaemonSets of all namespaces", daemon_sets, |sets| networks(sets)));
    findings.extend(judged("resources", "CRDs", crds, |crds| resources(crds, facts)));
    findings.extend(rights::findings(&facts.rights));
    findings.extend(installed::findings(facts));
    findings
}

/// The findings about facts, or one if they could not be read.
fn judged<T>(check: &'static str, what: &str, of: &Read<T>, by: impl Fn(&T) -> Vec<Finding>) -> Vec<Finding> {
    let unread = |why| {
        let todo = format!("fix the cause, or ask an administrator for permission to list {what}");
        vec![Finding::warn(check, format!("cannot read the {what}: {why}"), todo)]
    };
    of.as_ref().map_or_else(unread, by)
}

/// The first two numbers of a version, as of `v1.34.1` and `5.15.0-91-generic`.
fn numbers(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.trim_start_matches('v').split(['.', '-', '+']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn server(version: &str) -> Finding {
    let no_status = "without 1.30 there are no MirrorNodes and no controller, so Mirrors have no status";
    let (result, lacks) = match numbers(version) {
        Some(numbers) if numbers < LEAST_SERVER => (Level::Fail, "the chart needs 1.25"),
        Some(numbers) if numbers < WHOLE_SERVER => (Level::Warn, no_status),
        _ => return Finding::ok("server", format!("Kubernetes {version}")),
    };
    let todo = "use 1.30 or newer".to_owned();
    Finding { check: "server", result, found: format!("Kubernetes {version}: {lacks}"), todo }
}

/// A number with its noun.
fn count(number: usize, thing: &str) -> String {
    if number == 1 { format!("1 {thing}") } else { format!("{number} {thing}s") }
}

/// The node's operating system with its architecture, and its kernel.
fn info(node: &Node) -> (String, String) {
    let info = node.status.iter().find_map(|status| status.node_info.clone()).unwrap_or_default();
    (format!("{}/{}", info.operating_system, info.architecture), info.kernel_version)
}

/// Whether podmirror has an agent for the node's system.
fn is_fit(node: &Node) -> bool {
    ["linux/amd64", ARM].contains(&info(node).0.as_str())
}

fn systems(nodes: &[Node], is_installed: bool) -> Vec<Finding> {
    let (fit, others): (Vec<_>, Vec<_>) = nodes.iter().partition(|node| is_fit(node));
    let found = format!("{} of {} with Linux on amd64 or arm64", fit.len(), count(nodes.len(), "node"));
    let name = |node: &Node| format!("{} ({})", node.name_any(), info(node).0);
    let others: Vec<_> = others.into_iter().map(name).collect();
    let mut first = Finding::ok("nodes", found);
    // If podmirror is installed, the check of the agents names the nodes without one.
    if !is_installed && fit.iter().any(|node| info(node).0 == ARM) {
        first.todo = "set the chart's image.architectures, as described in docs/install.md".to_owned();
    }
    if fit.is_empty() {
        first = Finding::fail("nodes", first.found, "podmirror has agents for no other nodes");
    }
    let todo = "the pods of these nodes are not mirrored";
    [first].into_iter().chain(Finding::about("nodes", "no agent for", &others, todo)).collect()
}

/// What kernels lack: the end of the systems' names, the versions, the finding, and the remedy. The first is a
/// failure if all nodes lack it.
type Lack = (&'static str, Range<(u32, u32)>, &'static str, &'static str);

const LACKS: [Lack; 3] = [
    (
        "",
        (0, 0)..(5, 10),
        "older than 5.10, or unknown, so no agent works there:",
        "use Linux 5.10 or newer there, or exclude these nodes with the chart's nodeSelector or affinity",
    ),
    (
        "arm64",
        (5, 10)..(6, 0),
        "older than 6.0 on arm64, so mirrors with a filter are refused there:",
        "use Linux 6.0 or newer there, or mirrors without a filter",
    ),
    (
        "",
        (5, 10)..(6, 6),
        "older than 6.6, so when a pod is mirrored for the first time, one of its packets can be lost, and root in a pod \
         can remove a tap inside the pod:",
        "use Linux 6.6 or newer there, if that matters: see docs/operations.md",
    ),
];

fn kernels(nodes: &[Node]) -> Vec<Finding> {
    let fit: Vec<_> = nodes.iter().filter(|node| is_fit(node)).collect();
    let mut findings = Vec::new();
    for (at, (systems, versions, found, todo)) in LACKS.into_iter().enumerate() {
        let name = |node: &&Node| {
            let (system, kernel) = info(node);
            let lacks = system.ends_with(systems) && versions.contains(&numbers(&kernel).unwrap_or_default());
            lacks.then(|| format!("{} ({kernel})", node.name_any()))
        };
        let names: Vec<_> = fit.iter().filter_map(name).collect();
        let result = if at == 0 && names.len() == fit.len() { Level::Fail } else { Level::Warn };
        findings.extend(Finding::about("kernel", found, &names, todo).map(|of| Finding { result, ..of }));
    }
    if findings.is_empty() && !fit.is_empty() {
        findings.push(Finding::ok("kernel", "all of these nodes have Linux 6.6 or newer".to_owned()));
    }
    findings
}

fn networks(daemon_sets: &[DaemonSet]) -> Vec<Finding> {
    let known = |(name, seen)| Finding::ok("network", format!("{name}: {seen}"));
    let why = "no DaemonSet of a known CNI; podmirror needs pods with veth pairs, macvlan or similar devices";
    let todo = "mirror a pod, and check with `kubectl mirror coverage` whether all its packets are seen";
    or(network::of(daemon_sets).map(known), Finding::warn("network", why.to_owned(), todo))
}

/// Whether any part of podmirror is installed.
fn is_installed(facts: &Facts) -> bool {
    facts.installed.iter().any(|sets| !sets.is_empty()) || facts.pods.iter().any(|pods| !pods.is_empty())
}

fn resources(there: &[CustomResourceDefinition], facts: &Facts) -> Vec<Finding> {
    if there.is_empty() && !is_installed(facts) {
        return vec![Finding::ok("resources", "not installed yet: the chart installs the CRDs".to_owned())];
    }
    let (mut missing, mut other) = (Vec::new(), Vec::new());
    for crd in crds() {
        match there.iter().find(|there| there.name_any() == crd.name_any()) {
            None => missing.push(crd.name_any()),
            Some(there) if schemas(there) != schemas(&crd) => other.push(crd.name_any()),
            Some(_) => {}
        }
    }
    let install = "install them with the chart (crds.install), or as described in docs/resources.md; annotations work \
                   without them";
    let differ = format!("these CRDs have another version than this plugin ({}):", facts.plugin);
    let todo = "upgrade the CRDs, then the agents, and use the plugin of the same version: docs/resources.md";
    let problems = [
        Finding::about("resources", "these CRDs are missing:", &missing, install),
        Finding::about("resources", &differ, &other, todo),
    ];
    let ok = Finding::ok("resources", format!("{} CRDs of this version", there.len()));
    or(problems.into_iter().flatten(), ok)
}

/// The findings of a check; without any, `otherwise`.
fn or(findings: impl Iterator<Item = Finding>, otherwise: Finding) -> Vec<Finding> {
    let findings: Vec<_> = findings.collect();
    if findings.is_empty() { vec![otherwise] } else { findings }
}

/// The schemas of a CRD by version.
fn schemas(crd: &CustomResourceDefinition) -> BTreeMap<&str, Option<&impl PartialEq>> {
    let named = crd.spec.versions.iter().map(|of| (of.name.as_str(), of.schema.as_ref()));
    named.map(|(name, schema)| (name, schema.and_then(|of| of.open_api_v3_schema.as_ref()))).collect()
}

#[cfg(test)]
mod tests;
