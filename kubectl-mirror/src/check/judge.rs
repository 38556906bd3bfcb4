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
use crate::{nodes::Answer, screen};

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
fn judged<T>(
    check: &'static str,
    what: &str,
    facts: &Read<T>,
    judge: impl FnOnce(&T) -> Vec<Finding>,
) -> Vec<Finding> {
    facts.as_ref().map_or_else(|unread| vec![Finding::unread(check, what, unread)], judge)
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
        Some(numbers) if numbers < WHOLE_SERVER => {
            let lacks = "without 1.30 there are no MirrorNodes and no controller, so Mirrors have no status";
            Finding::warn("server", format!("{found}: {lacks}"), "use 1.30 or newer; everything else works")
        }
        Some(_) => Finding::ok("server", found),
    }
}

fn named(names: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    screen::named(names, MOST_NAMED)
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
    let number = count(nodes.len(), "node");
    if fit.is_empty() {
        let found = format!("none of {number} has Linux on amd64 or arm64");
        let todo = "podmirror has agents for Linux on amd64 and arm64 only";
        findings.push(Finding::fail("nodes", found, todo));
    } else {
        let of: Vec<_> = fit.iter().map(|(of, number)| format!("{number} with linux/{of}")).collect();
        let mut finding = Finding::ok("nodes", format!("{number}: {}", of.join(", ")));
        // If podmirror is installed, the check of the agents names the nodes without one.
        if fit.contains_key("arm64") && !is_installed {
            finding.todo = "set the chart's image.architectures, as described in docs/install.md".to_owned();
        }
        findings.push(finding);
    }
    findings.extend(others.into_iter().map(|(system, names)| {
        let found = format!("{system}: {}", named(names));
        Finding::warn("nodes", found, "no agent runs on these nodes, and their pods are not mirrored")
    }));
    findings
}

/// What a kernel lacks: whether this is so for an architecture and a version, the finding, and the remedy. The first is a
/// failure if all nodes lack it.
type Lack = (fn(&str, Option<(u32, u32)>) -> bool, &'static str, &'static str);

const LACKS: [Lack; 4] = [
    (
        |_, version| version.is_some_and(|version| version < LEAST_KERNEL),
        "older than 5.10, so no agent works there",
        "use Linux 5.10 or newer there, or exclude these nodes with the chart's nodeSelector or affinity",
    ),
    (
        |of, version| of == "arm64" && version.is_some_and(|of| (LEAST_KERNEL..ARM_FILTERS).contains(&of)),
        "older than 6.0 on arm64, so mirrors with a filter are refused there",
        "use Linux 6.0 or newer there, or mirrors without a filter",
    ),
    (
        |_, version| version.is_some_and(|of| (LEAST_KERNEL..TCX).contains(&of)),
        "older than 6.6, so when a pod is mirrored for the first time, one of its packets can be lost, and root in a pod \
         can remove a tap inside the pod",
        "use Linux 6.6 or newer there, if that matters: see docs/operations.md",
    ),
    (|_, version| version.is_none(), "unknown version format", "podmirror needs Linux 5.10 or newer"),
];

fn kernels(nodes: &[Node]) -> Vec<Finding> {
    let fit: Vec<_> = nodes.iter().filter(|node| is_fit(node)).collect();
    let version = |node: &&Node| numbers(info(node).2);
    let mut findings = Vec::new();
    for (at, (lacks, found, todo)) in LACKS.into_iter().enumerate() {
        let of = fit.iter().filter(|node| lacks(info(node).1, version(node)));
        let names: Vec<_> = of.map(|node| format!("{} ({})", node.name_any(), info(node).2)).collect();
        let found = format!("{found}: {}", named(&names));
        match names.len() {
            0 => {}
            all if at == 0 && all == fit.len() => findings.push(Finding::fail("kernel", found, todo)),
            _ => findings.push(Finding::warn("kernel", found, todo)),
        }
    }
    if findings.is_empty()
        && let (Some(least), Some(most)) =
            (fit.iter().min_by_key(|of| version(of)), fit.iter().max_by_key(|of| version(of)))
    {
        let (least, most) = (info(least).2, info(most).2);
        let range = if least == most { least.to_owned() } else { format!("{least} to {most}") };
        findings.push(Finding::ok("kernel", format!("Linux {range}")));
    }
    findings
}

fn networks(daemon_sets: &[DaemonSet]) -> Vec<Finding> {
    let todo = "mirror a pod, and check with `kubectl mirror coverage` whether all its packets are seen";
    let networks = network::of(daemon_sets);
    if networks.is_empty() {
        let found = "no DaemonSet of a known CNI found; podmirror needs pods with veth pairs, macvlan or similar devices";
        return vec![Finding::warn("network", found.to_owned(), todo)];
    }
    let finding = |(name, _, covered): network::Network| match covered {
        Some(covered) => Finding::ok("network", format!("{name}: {covered}")),
        None => Finding::warn("network", format!("{name}: not tested with podmirror"), todo),
    };
    networks.into_iter().map(finding).collect()
}

/// Whether any part of podmirror is installed.
fn is_installed(facts: &Facts) -> bool {
    facts.installed.as_ref().is_ok_and(|sets| !sets.is_empty())
        || facts.pods.as_ref().is_ok_and(|pods| !pods.is_empty())
}

fn resources(there: &[CustomResourceDefinition], facts: &Facts) -> Vec<Finding> {
    let (mut missing, mut other) = (Vec::new(), Vec::new());
    for crd in crds() {
        let name = crd.name_any();
        match there.iter().find(|there| there.name_any() == name) {
            None => missing.push(name),
            Some(there) if schemas(there) != schemas(&crd) => other.push(name),
            Some(_) => {}
        }
    }
    if there.is_empty() && !is_installed(facts) {
        return vec![Finding::ok("resources", "not installed yet: the chart installs the CRDs".to_owned())];
    }
    let mut findings = Vec::new();
    if !missing.is_empty() {
        let todo = "install them with the chart (crds.install), or as described in docs/resources.md; annotations work without them";
        let found = format!("these CRDs are missing: {}", named(&missing));
        findings.push(Finding::warn("resources", found, todo));
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
    let named = crd.spec.versions.iter().map(|of| (of.name.as_str(), of.schema.as_ref()));
    named.map(|(name, schema)| (name, schema.and_then(|of| of.open_api_v3_schema.as_ref()))).collect()
}

#[cfg(test)]
mod tests;
