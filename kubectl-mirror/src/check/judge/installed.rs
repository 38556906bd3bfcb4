//! The checks of an installed podmirror: agents, versions, reports, controller, targets, and the agents' own status.
//! Pure, a part of [`judge`](super).

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, Deployment},
        core::v1::Pod,
    },
    apimachinery::pkg::apis::meta::v1::Time,
};
use kube::ResourceExt as _;
use mirror_api::{
    MirrorNode, MirrorTarget,
    sum::{ACCEPTED, READY, is_current, target},
};

use super::{
    Facts, Finding, Level, MOST_NAMED, WHOLE_SERVER, count, is_fit, is_installed, judged, named, numbers,
    or_ok,
};
use crate::{
    agents::{self, Agents},
    nodes::Answer,
};

/// The container of a recorder.
const RECORDER: &str = "recorder";

pub(super) fn findings(facts: &Facts) -> Vec<Finding> {
    judged("agents", "DaemonSets of the agents", &facts.installed, |sets| {
        judged("agents", "pods of the agents", &facts.pods, |pods| match is_installed(facts) {
            true => of_installed(facts, sets, pods),
            false => vec![not_installed(facts)],
        })
    })
}

fn not_installed(facts: &Facts) -> Finding {
    let found = format!("podmirror is not installed in namespace {}", facts.agents);
    let todo = "see docs/install.md for the installation, or set another namespace with --agents";
    let has_crds = facts.crds.as_ref().is_ok_and(|crds| !crds.is_empty());
    Finding { result: if has_crds { Level::Warn } else { Level::Ok }, ..Finding::warn("agents", found, todo) }
}

fn of_installed(facts: &Facts, sets: &[DaemonSet], pods: &[Pod]) -> Vec<Finding> {
    let by_node = agents::by_node(pods);
    let mut findings = agents(facts, sets, &by_node);
    findings.extend(recorders(pods, &facts.agents));
    findings.extend(versions(facts, pods));
    // An older server lacks the admission policies that MirrorNodes and the controller require.
    if numbers(&facts.server).is_none_or(|version| version >= WHOLE_SERVER) {
        findings.extend(judged("reports", "MirrorNodes", &facts.reports, |of| reports(of, facts, &by_node)));
        let what = "Deployments of the controller";
        findings.extend(judged("controller", what, &facts.controllers, |of| vec![controller(of, facts)]));
    }
    let targets = |targets: &Vec<_>| targets.iter().map(of_target).collect();
    findings.extend(judged("targets", "MirrorTargets", &facts.targets, targets));
    findings.extend(facts.answers.iter().flat_map(|answers| answered(answers, facts)));
    findings
}

fn agents(facts: &Facts, sets: &[DaemonSet], by_node: &Agents) -> Vec<Finding> {
    let (ready, unready): (Vec<_>, Vec<_>) = by_node.iter().partition(|(_, agent)| agent.is_some());
    let unready: Vec<_> = unready.into_iter().map(|(node, _)| node).collect();
    let statuses = sets.iter().filter_map(|set| set.status.as_ref());
    let desired: i32 = statuses.map(|status| status.desired_number_scheduled).sum();
    let look = format!(
        "kubectl -n {} describe daemonset, get pods -o wide, and the logs of the agents there",
        facts.agents
    );
    let found = format!("{} ready on {}", count(ready.len(), "agent"), count(by_node.len(), "node"));
    let mut findings = Vec::new();
    if ready.is_empty() {
        // For example, the Pod Security level of the namespace forbids the pods.
        let on = if unready.is_empty() { "no node has one".to_owned() } else { named(unready) };
        findings.push(Finding::fail("agents", format!("no agent of {desired} is ready: {on}"), look));
    } else if !unready.is_empty() {
        findings.extend(Finding::about("agents", "no agent is ready on", &unready, &look));
    } else if usize::try_from(desired).is_ok_and(|desired| by_node.len() < desired) {
        findings.push(Finding::warn("agents", format!("{found}, and the DaemonSet wants {desired}"), look));
    } else {
        findings.push(Finding::ok("agents", found));
    }
    let nodes = facts.nodes.iter().flatten().filter(|node| is_fit(node)).map(|node| node.name_any());
    let without: Vec<_> = nodes.filter(|node| !by_node.contains_key(node)).collect();
    let todo = "if agents should run there, check the chart's nodeSelector, affinity, tolerations and image.architectures";
    findings.extend(Finding::about("agents", "these nodes have no agent:", &without, todo));
    findings
}

fn node_of(pod: &Pod) -> Option<String> {
    pod.spec.as_ref()?.node_name.clone()
}

/// The nodes with a recorder that does not run. Their agents can be ready nevertheless.
fn recorders(pods: &[Pod], namespace: &str) -> Option<Finding> {
    let is_failing = |pod: &&Pod| {
        let mut of = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
        pod.metadata.deletion_timestamp.is_none() && of.any(|of| of.name == RECORDER && !of.ready)
    };
    let failing: Vec<_> = pods.iter().filter(is_failing).filter_map(node_of).collect();
    let todo = format!("kubectl -n {namespace} logs POD -c {RECORDER}, for the pods of the agents there");
    Finding::about("agents", "the recorder does not run on", &failing, &todo)
}

/// The tag of the image of an agent.
fn tag(pod: &Pod) -> Option<String> {
    let container = pod.spec.as_ref()?.containers.first()?;
    let image = container.image.as_deref()?.split('@').next()?;
    let (_, tag) = image.rsplit_once('/').map_or(image, |(_, last)| last).split_once(':')?;
    Some(tag.to_owned())
}

/// The versions that the agents report; without a report, the tags of their images.
fn versions(facts: &Facts, pods: &[Pod]) -> Option<Finding> {
    let reported = |Answer { node, status, .. }: &Answer| {
        let version = status.as_ref().ok()?.version.split(' ').next()?;
        Some((version.to_owned(), node.clone()))
    };
    let mut versions: Vec<_> = facts.answers.iter().flatten().filter_map(reported).collect();
    if versions.is_empty() {
        versions = pods.iter().filter_map(|pod| Some((tag(pod)?, node_of(pod)?))).collect();
    }
    let plugin = facts.plugin;
    let (first, of_first) = versions.first()?;
    let is_number = first.starts_with(|first: char| first.is_ascii_digit());
    Some(if let Some((other, node)) = versions.iter().find(|(version, _)| version != first) {
        let look = "rollout status daemonset shows whether an upgrade is in progress";
        let found = format!("the agents differ: {first} on {of_first}, {other} on {node}");
        Finding::warn("versions", found, format!("kubectl -n {} {look}", facts.agents))
    } else if is_number && first != plugin {
        let found = format!("the agents have {first}, this plugin has {plugin}");
        Finding::warn("versions", found, "use the plugin of the agents' version")
    } else {
        Finding::ok("versions", format!("all agents have {first}, this plugin has {plugin}"))
    })
}

fn reports(reports: &[MirrorNode], facts: &Facts, by_node: &Agents) -> Vec<Finding> {
    let reports: BTreeMap<_, _> = reports.iter().map(|report| (report.name_any(), report)).collect();
    let (mut ready, mut missing, mut stale, mut refusing) = (0, Vec::new(), Vec::new(), Vec::new());
    for (node, _) in by_node.iter().filter(|(_, agent)| agent.is_some()) {
        ready += 1;
        let Some(report) = reports.get(node) else {
            missing.push(node);
            continue;
        };
        if is_stale(report, facts) {
            stale.push(node);
        }
        if report.status.as_ref().is_some_and(|status| status.refused_count > 0) {
            refusing.push(node);
        }
    }
    let orphaned = reports.iter().filter(|(node, of)| !by_node.contains_key(*node) && is_stale(of, facts));
    let orphaned: Vec<_> = orphaned.map(|(node, _)| node).collect();
    let log = format!("see the logs of their agents: kubectl -n {} logs", facts.agents);
    let old = "the reports of these nodes are too old, or from the future:";
    let no_agent = "these nodes have a stale report and no agent:";
    let remove =
        "run agents there, or clean up the mirrors and delete the MirrorNodes: see docs/resources.md";
    let problems = [
        Finding::about("reports", "no MirrorNode of", &missing, &log),
        Finding::about("reports", old, &stale, &format!("check the clocks of these nodes; {log}")),
        Finding::about("reports", no_agent, &orphaned, remove),
        Finding::about("reports", "Mirrors are refused on", &refusing, "kubectl mirror status -A says why"),
    ];
    if ready == 0 {
        return Vec::new();
    }
    or_ok(problems.into_iter().flatten(), "reports", format!("of {}, none too old", count(ready, "node")))
}

/// Whether the report is too old. An agent without Mirrors and MirrorTargets does not refresh its report.
fn is_stale(report: &MirrorNode, facts: &Facts) -> bool {
    let Some(status) = &report.status else { return false };
    let is_repeated = !status.mirrors.is_empty() || !status.targets.is_empty();
    is_repeated && !is_current(status.last_report_time.as_ref().map(|Time(at)| *at), facts.now)
}

fn controller(controllers: &[Deployment], facts: &Facts) -> Finding {
    let statuses = controllers.iter().filter_map(|of| of.status.as_ref());
    let available: i32 = statuses.filter_map(|status| status.available_replicas).sum();
    if available > 0 {
        return Finding::ok("controller", format!("{available} available"));
    }
    let found = "no controller is available, so the status of Mirrors and MirrorTargets is not updated";
    let todo = match controllers.is_empty() {
        true => "the chart's controller.enabled installs it; mirrors work without it".to_owned(),
        false => format!("kubectl -n {} describe deployment", facts.agents),
    };
    Finding::warn("controller", found.to_owned(), todo)
}

fn of_target(target: &MirrorTarget) -> Finding {
    let name = target.name_any();
    let condition = |type_| target.status.as_ref().and_then(|status| target::condition_of(status, type_));
    let refused = condition(ACCEPTED).filter(|accepted| accepted.status == "False");
    let found = match refused.or(condition(READY)) {
        Some(ready) if ready.status == "True" => {
            return Finding::ok("targets", format!("{name}: {}", ready.message));
        }
        Some(of) => format!("{name}: {}: {}", of.reason, of.message),
        None => format!("{name} has no condition Ready, which the controller writes"),
    };
    let todo = format!("kubectl get mirrortarget {name} -o yaml shows the nodes and the reasons");
    Finding::warn("targets", found, todo)
}

/// The findings from the agents' own status.
fn answered(answers: &[Answer], facts: &Facts) -> Vec<Finding> {
    let own: BTreeSet<_> = facts.targets.iter().flatten().map(|target| target.name_any()).collect();
    let mut failures = Vec::new();
    for Answer { node, status, .. } in answers {
        match status.as_ref().map(|status| &status.notes) {
            Err(why) => failures.push(format!("{node} does not answer: {why}")),
            Ok(None) => failures.push(format!("{node}: no agent is running there, or it does not answer")),
            Ok(Some(notes)) => {
                failures.extend(notes.failures.iter().map(|failure| format!("{node}: {failure}")));
                // The status of a MirrorTarget reports it for all nodes.
                let unreached = notes.unreached_targets.iter().filter(|of| !own.contains(&of.target));
                failures.extend(unreached.map(|of| format!("{node}: target {}: {}", of.target, of.message)));
            }
        }
    }
    let more = failures.len().saturating_sub(MOST_NAMED);
    failures.truncate(MOST_NAMED);
    failures.extend((more > 0).then(|| format!("{more} more")));
    let todo =
        format!("kubectl -n {} exec POD -- /mirror-agent status, and docs/operations.md", facts.agents);
    let warn = |found| Finding::warn("failures", found, todo.clone());
    or_ok(failures.into_iter().map(warn), "failures", format!("none on {}", count(answers.len(), "node")))
}

#[cfg(test)]
mod tests;
