//! The checks of an installed podmirror: agents, versions, reports, controller, targets, and the API of packets. Pure,
//! a part of [`judge`](super).

use std::collections::BTreeMap;

use k8s_openapi::{
    api::{
        apps::v1::{DaemonSet, Deployment},
        core::v1::Pod,
    },
    kube_aggregator::pkg::apis::apiregistration::v1::APIService,
};
use kube::ResourceExt as _;
use mirror_api::{
    MirrorNode, MirrorTarget,
    sum::{ACCEPTED, READY, is_current, target},
};

use super::{
    Facts, Finding, Level, MOST_NAMED, WHOLE_SERVER, count, is_fit, is_installed, judged, named, numbers, or,
};

/// The containers of an agent, and of its recorder.
const AGENT: &str = "agent";
const RECORDER: &str = "recorder";

/// The nodes with an agent's pod, and whether the agent is ready.
type Agents = BTreeMap<String, bool>;

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
    let by_node = by_node(pods);
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
    findings.extend(judged("packets", "APIServices", &facts.packets, |of| vec![packets(of.as_ref(), facts)]));
    findings
}

fn by_node(pods: &[Pod]) -> Agents {
    let mut agents = Agents::new();
    for pod in pods {
        if let Some(node) = node_of(pod) {
            *agents.entry(node).or_default() |= is_there(pod) && of_container(pod, AGENT) == Some(true);
        }
    }
    agents
}

/// Whether a container is ready; `None`: the pod has none of this name. An agent can be ready beside a recorder that
/// fails.
fn of_container(pod: &Pod, name: &str) -> Option<bool> {
    let mut all = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    all.find(|of| of.name == name).map(|of| of.ready)
}

/// Whether the pod stays. One that is being deleted may be ready for a while.
fn is_there(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_none()
}

fn agents(Facts { agents, nodes, .. }: &Facts, sets: &[DaemonSet], by_node: &Agents) -> Vec<Finding> {
    let unready: Vec<_> = by_node.iter().filter(|(_, is_ready)| !**is_ready).map(|(node, _)| node).collect();
    let ready = by_node.len() - unready.len();
    let statuses = sets.iter().filter_map(|set| set.status.as_ref());
    let desired: i32 = statuses.map(|status| status.desired_number_scheduled).sum();
    let look =
        format!("kubectl -n {agents} describe daemonset, get pods -o wide, and the logs of the agents there");
    let found = format!("{} ready on {}", count(ready, "agent"), count(by_node.len(), "node"));
    let first = if ready == 0 {
        // For example, the Pod Security level of the namespace forbids the pods.
        let on = if unready.is_empty() { "no node has one".to_owned() } else { named(unready, MOST_NAMED) };
        Finding::fail("agents", format!("no agent of {desired} is ready: {on}"), look)
    } else if !unready.is_empty() {
        Finding::warn("agents", format!("no agent is ready on {}", named(unready, MOST_NAMED)), look)
    } else if usize::try_from(desired).is_ok_and(|desired| by_node.len() < desired) {
        Finding::warn("agents", format!("{found}, and the DaemonSet wants {desired}"), look)
    } else {
        Finding::ok("agents", found)
    };
    let nodes = nodes.iter().flatten().filter(|node| is_fit(node)).map(|node| node.name_any());
    let without: Vec<_> = nodes.filter(|node| !by_node.contains_key(node)).collect();
    let todo = "if agents should run there, check the chart's nodeSelector, affinity, tolerations and image.architectures";
    let without = Finding::about("agents", "these nodes have no agent:", &without, todo);
    [first].into_iter().chain(without).collect()
}

fn node_of(pod: &Pod) -> Option<String> {
    pod.spec.as_ref()?.node_name.clone()
}

/// The nodes with a recorder that does not run. Their agents can be ready nevertheless.
fn recorders(pods: &[Pod], namespace: &str) -> Option<Finding> {
    let is_failing = |pod: &&Pod| is_there(pod) && of_container(pod, RECORDER) == Some(false);
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

/// The tags of the agents' images.
fn versions(facts: &Facts, pods: &[Pod]) -> Option<Finding> {
    let versions: Vec<_> = pods.iter().filter_map(|pod| Some((tag(pod)?, node_of(pod)?))).collect();
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
    let ready: Vec<_> = by_node.iter().filter(|(_, is_ready)| **is_ready).map(|(node, _)| node).collect();
    if ready.is_empty() {
        return Vec::new();
    }
    let with = |is: &dyn Fn(Option<&MirrorNode>) -> bool| -> Vec<_> {
        ready.iter().filter(|node| is(reports.get(**node).copied())).collect()
    };
    let missing = with(&|report| report.is_none());
    let stale = with(&|report| report.is_some_and(|report| is_stale(report, facts)));
    let refusing = with(&|of| of.and_then(|of| of.status.as_ref()).is_some_and(|of| of.refused_count > 0));
    let orphaned = reports.iter().filter(|(node, of)| !by_node.contains_key(*node) && is_stale(of, facts));
    let orphaned: Vec<_> = orphaned.map(|(node, _)| node).collect();
    let log = format!("see the logs of their agents: kubectl -n {} logs", facts.agents);
    let old = "the reports of these nodes are too old, or from the future:";
    let no_agent = "these nodes have a stale report and no agent:";
    let clean = "run agents there, or clean up the mirrors and delete the MirrorNodes: see docs/resources.md";
    let problems = [
        Finding::about("reports", "no MirrorNode of", &missing, &log),
        Finding::about("reports", old, &stale, &format!("check the clocks of these nodes; {log}")),
        Finding::about("reports", no_agent, &orphaned, clean),
        Finding::about("reports", "Mirrors are refused on", &refusing, "kubectl mirror status -A says why"),
    ];
    let ok = Finding::ok("reports", format!("of {}, none too old", count(ready.len(), "node")));
    or(problems.into_iter().flatten(), ok)
}

/// Whether the report is too old. An agent without Mirrors and MirrorTargets does not refresh its report.
fn is_stale(report: &MirrorNode, facts: &Facts) -> bool {
    let Some(status) = &report.status else { return false };
    let is_repeated = !status.mirrors.is_empty() || !status.targets.is_empty();
    is_repeated && !is_current(status.last_report_time.as_ref().map(|time| time.0), facts.now)
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

/// Whether the API server reaches the server of packets.
fn packets(service: Option<&APIService>, facts: &Facts) -> Finding {
    let none = "there is no API of packets, so tail, explain, coverage and top do not work";
    let Some(service) = service else {
        return Finding::warn("packets", none.to_owned(), "the chart's apiserver.enabled installs it");
    };
    let mut conditions = service.status.iter().flat_map(|status| status.conditions.iter().flatten());
    match conditions.find(|of| of.type_ == "Available") {
        Some(of) if of.status == "True" => {
            Finding::ok("packets", "the API of packets is available".to_owned())
        }
        of => {
            let text = |text: Option<&String>| text.map(|text| format!(": {text}")).unwrap_or_default();
            let why = of.map(|of| text(of.reason.as_ref()) + &text(of.message.as_ref())).unwrap_or_default();
            let todo = format!("kubectl -n {} describe deployment, and the logs of its pods", facts.agents);
            Finding::warn("packets", format!("the API of packets is not available{why}"), todo)
        }
    }
}

#[cfg(test)]
mod tests;
