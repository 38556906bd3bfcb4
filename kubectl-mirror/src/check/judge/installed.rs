//! The checks of an installed podmirror: agents, versions, reports, controller, targets, and the agents' own status.
//! Pure, a part of [`judge`](super).

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    api::{apps::v1::Deployment, core::v1::Pod},
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
};
use kube::ResourceExt as _;
use mirror_api::{
    MirrorNode, MirrorTarget,
    sum::{ACCEPTED, READY, is_current, target},
};

use super::{Facts, Finding, MOST_NAMED, count, is_fit, is_installed, is_whole, judged, named};
use crate::{
    agents::{self, Agents},
    nodes::Answer,
};

/// The container of a recorder.
const RECORDER: &str = "recorder";

pub(super) fn findings(facts: &Facts) -> Vec<Finding> {
    let Facts { agents: namespace, installed, pods, .. } = facts;
    let pods = match (installed, pods) {
        (Ok(_), Ok(pods)) => pods,
        (Err(unread), _) => return vec![Finding::unread("agents", "DaemonSets of the agents", unread)],
        (_, Err(unread)) => return vec![Finding::unread("agents", "pods of the agents", unread)],
    };
    if !is_installed(facts) {
        let found = format!("podmirror is not installed in namespace {namespace}");
        let todo = "see docs/install.md for the installation, or set another namespace with --agents";
        return vec![match facts.crds.as_ref().is_ok_and(|crds| !crds.is_empty()) {
            true => {
                Finding::warn("agents", found, "the CRDs are installed; set another namespace with --agents")
            }
            false => Finding { todo: todo.to_owned(), ..Finding::ok("agents", found) },
        }];
    }
    let by_node = agents::by_node(pods);
    let mut findings = agents(facts, &by_node);
    findings.extend(recorders(pods, namespace));
    findings.extend(versions(facts, pods));
    if is_whole(facts) {
        findings.extend(judged("reports", "MirrorNodes", &facts.reports, |of| reports(of, facts, &by_node)));
        let what = "Deployments of the controller";
        findings.extend(judged("controller", what, &facts.controllers, |of| vec![controller(of, facts)]));
    }
    let of_targets = |of: &Vec<_>| of.iter().map(|of| of_target(of, is_whole(facts))).collect();
    findings.extend(judged("targets", "MirrorTargets", &facts.targets, of_targets));
    findings.extend(facts.answers.iter().flat_map(|answers| answered(answers, facts)));
    findings
}

fn agents(facts: &Facts, by_node: &Agents) -> Vec<Finding> {
    let namespace = &facts.agents;
    let unready = || by_node.iter().filter(|(_, agent)| agent.is_none()).map(|(node, _)| node.as_str());
    let ready = by_node.len() - unready().count();
    let statuses = facts.installed.iter().flatten().filter_map(|set| set.status.as_ref());
    let desired: i32 = statuses.map(|status| status.desired_number_scheduled).sum();
    let look = format!("kubectl -n {namespace} get pods -o wide, and the logs of the agents there");
    let mut findings = Vec::new();
    if ready == 0 {
        let found = match desired {
            0 => "the DaemonSet schedules no agent on any node".to_owned(),
            // For example, the Pod Security level of the namespace forbids the pods.
            _ if by_node.is_empty() => {
                format!("the DaemonSet wants {desired}, but no node has one")
            }
            _ => format!("no agent of {desired} is ready: {}", named(unready())),
        };
        let todo = format!("kubectl -n {namespace} describe daemonset, and {look}");
        findings.push(Finding::fail("agents", found, todo));
    } else if unready().next().is_some() {
        findings.push(Finding::warn("agents", format!("no agent is ready on {}", named(unready())), look));
    } else if usize::try_from(desired).is_ok_and(|desired| by_node.len() < desired) {
        let found = format!("{} ready, and the DaemonSet wants {desired}", count(ready, "agent"));
        findings.push(Finding::warn("agents", found, format!("kubectl -n {namespace} describe daemonset")));
    } else {
        findings.push(Finding::ok(
            "agents",
            format!("{} ready on {}", count(ready, "agent"), count(by_node.len(), "node")),
        ));
    }
    let nodes = facts.nodes.iter().flatten().filter(|node| is_fit(node)).map(|node| node.name_any());
    let without: Vec<_> = nodes.filter(|node| !by_node.contains_key(node)).collect();
    if !without.is_empty() {
        let found = format!("these nodes have no agent: {}", named(without));
        let todo = "if agents should run there, check the chart's nodeSelector, affinity, tolerations and \
                    image.architectures";
        findings.push(Finding::warn("agents", found, todo));
    }
    findings
}

/// The nodes with a recorder that does not run. Their agents can be ready nevertheless.
fn recorders(pods: &[Pod], namespace: &str) -> Option<Finding> {
    let mut runs = BTreeMap::<_, bool>::new();
    for (pod, spec) in pods.iter().filter_map(|pod| Some((pod, pod.spec.as_ref()?))) {
        if let (Some(node), true) = (&spec.node_name, spec.containers.iter().any(|of| of.name == RECORDER)) {
            let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
            let mut states = statuses.filter(|of| of.name == RECORDER).filter_map(|of| of.state.as_ref());
            *runs.entry(node.as_str()).or_default() |= states.any(|state| state.running.is_some());
        }
    }
    let failing: Vec<_> = runs.into_iter().filter(|(_, runs)| !runs).map(|(node, _)| node).collect();
    (!failing.is_empty()).then(|| {
        let todo = format!("kubectl -n {namespace} logs POD -c {RECORDER}, for the pods of the agents there");
        Finding::warn("agents", format!("the recorder does not run on {}", named(failing)), todo)
    })
}

/// The tag of the image of an agent.
fn tag(pod: &Pod) -> Option<String> {
    let container = pod.spec.as_ref()?.containers.first()?;
    let image = container.image.as_deref()?.split('@').next()?;
    let (_, tag) = image.rsplit_once('/').map_or(image, |(_, last)| last).split_once(':')?;
    Some(tag.to_owned())
}

/// The versions that the agents report; without a report, the tags of their images.
fn versions(facts: &Facts, pods: &[Pod]) -> Vec<Finding> {
    let mut versions = BTreeMap::<String, Vec<String>>::new();
    for Answer { node, status, .. } in facts.answers.iter().flatten() {
        if let Ok(status) = status {
            let version = status.version.split(' ').next().unwrap_or_default();
            versions.entry(version.to_owned()).or_default().push(node.clone());
        }
    }
    if versions.is_empty() {
        for pod in pods {
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
            let (Some(tag), Some(node)) = (tag(pod), node) else { continue };
            versions.entry(tag).or_default().push(node);
        }
    }
    let plugin = facts.plugin;
    if versions.len() > 1 {
        let of = |(version, nodes): (&String, &Vec<String>)| format!("{version} on {}", named(nodes));
        let found = format!("the agents differ: {}", versions.iter().map(of).collect::<Vec<_>>().join("; "));
        let todo = format!(
            "kubectl -n {} rollout status daemonset shows whether an upgrade is in progress",
            facts.agents
        );
        return vec![Finding::warn("versions", found, todo)];
    }
    let Some(version) = versions.keys().next() else { return Vec::new() };
    let is_version = version.starts_with(|first: char| first.is_ascii_digit());
    vec![if version == plugin {
        Finding::ok("versions", format!("the agents and this plugin have {plugin}"))
    } else if is_version {
        let found = format!("the agents have {version}, this plugin has {plugin}");
        Finding::warn("versions", found, "use the plugin of the agents' version")
    } else {
        let found = format!("all agents have the image {version}, whose tag does not contain their version");
        Finding::ok("versions", found)
    }]
}

fn reports(reports: &[MirrorNode], facts: &Facts, by_node: &Agents) -> Vec<Finding> {
    let reports: BTreeMap<_, _> = reports.iter().map(|report| (report.name_any(), report)).collect();
    let ready: Vec<_> =
        by_node.iter().filter(|(_, agent)| agent.is_some()).map(|(node, _)| node.as_str()).collect();
    let of_agents = || ready.iter().filter_map(|node| Some((*node, *reports.get(*node)?)));
    let missing: Vec<_> = ready.iter().copied().filter(|node| !reports.contains_key(*node)).collect();
    let stale: Vec<_> = of_agents().filter(|(_, of)| is_stale(of, facts)).map(|(node, _)| node).collect();
    let refused = |of: &MirrorNode| of.status.as_ref().map_or(0, |status| status.refused_count);
    let refusing: Vec<_> = of_agents().filter(|(_, of)| refused(of) > 0).map(|(node, _)| node).collect();
    let log = format!("kubectl -n {} logs of their agents says why", facts.agents);
    let old = "the reports of these nodes are ignored, because they are too old or from the future:";
    let problems = [
        (missing, "no MirrorNode of", format!("wait a minute after the start of an agent; {log}")),
        (stale, old, format!("check the clocks of these nodes; {log}")),
        (refusing, "Mirrors are refused on", "kubectl mirror status -A says why".to_owned()),
    ];
    let problems = problems.into_iter().filter(|(nodes, ..)| !nodes.is_empty());
    let warn = |(nodes, what, todo)| Finding::warn("reports", format!("{what} {}", named(nodes)), todo);
    let mut findings: Vec<_> = problems.map(warn).collect();
    if findings.is_empty() && !ready.is_empty() {
        findings.push(Finding::ok("reports", format!("of {}, none too old", count(ready.len(), "node"))));
    }
    findings
}

/// Whether the report is too old. An agent without Mirrors and MirrorTargets does not refresh its report.
fn is_stale(report: &MirrorNode, facts: &Facts) -> bool {
    let Some(status) = &report.status else { return false };
    let is_repeated = !status.mirrors.is_empty() || !status.targets.is_empty();
    is_repeated && !is_current(status.last_report_time.as_ref().map(|Time(at)| *at), facts.now)
}

fn controller(controllers: &[Deployment], facts: &Facts) -> Finding {
    let available =
        |of: &Deployment| of.status.as_ref().and_then(|status| status.available_replicas).unwrap_or(0);
    let available: i32 = controllers.iter().map(available).sum();
    if controllers.is_empty() {
        let found = "there is no controller, so Mirrors and MirrorTargets have no status".to_owned();
        let todo = "the chart's controller.enabled installs it; mirrors work without it";
        return Finding::warn("controller", found, todo);
    }
    if available == 0 {
        let found = "no controller is available, so the status of Mirrors and MirrorTargets is not updated";
        let todo = format!("kubectl -n {} describe deployment", facts.agents);
        return Finding::warn("controller", found.to_owned(), todo);
    }
    Finding::ok("controller", format!("{available} available"))
}

fn of_target(target: &MirrorTarget, is_whole: bool) -> Finding {
    let name = target.name_any();
    let look = format!("kubectl get mirrortarget {name} -o yaml shows the nodes and the reasons");
    let Some(status) = &target.status else {
        let todo = match is_whole {
            true => "the controller writes the status: see the check controller",
            false => "the status needs Kubernetes 1.30; use `mirror-agent status` on a node instead",
        };
        return Finding::warn("targets", format!("{name} has no status"), todo);
    };
    let why = |of: &Condition| format!("{name}: {}: {}", of.reason, of.message);
    let condition = |type_| target::condition_of(status, type_);
    match (condition(ACCEPTED), condition(READY)) {
        (Some(refused), _) if refused.status == "False" => Finding::warn("targets", why(refused), look),
        (_, Some(ready)) if ready.status == "True" => {
            let users = match target.spec.allowed_namespaces {
                Some(_) => "",
                None => "; only ClusterMirrors may use it",
            };
            Finding::ok("targets", format!("{name}: {}{users}", ready.message))
        }
        (_, Some(ready)) => Finding::warn("targets", why(ready), look),
        (_, None) => Finding::warn("targets", format!("{name} has no condition Ready"), look),
    }
}

/// The findings from the agents' own status.
fn answered(answers: &[Answer], facts: &Facts) -> Vec<Finding> {
    let own: BTreeSet<_> = facts.targets.iter().flatten().map(|target| target.name_any()).collect();
    let mut told = Vec::new();
    for Answer { node, status, .. } in answers {
        match status {
            Err(why) => told.push(format!("{node} does not answer: {why}")),
            Ok(status) => {
                let Some(notes) = &status.notes else {
                    told.push(format!("{node}: no agent is running there, or it does not answer"));
                    continue;
                };
                told.extend(notes.failures.iter().map(|failure| format!("{node}: {failure}")));
                // The status of a MirrorTarget reports it for all nodes.
                let unreached = notes.unreached_targets.iter().filter(|of| !own.contains(&of.target));
                told.extend(unreached.map(|of| format!("{node}: target {}: {}", of.target, of.message)));
            }
        }
    }
    if told.is_empty() {
        return vec![Finding::ok("failures", format!("none on {}", count(answers.len(), "node")))];
    }
    let more = told.len().saturating_sub(MOST_NAMED);
    told.truncate(MOST_NAMED);
    told.extend((more > 0).then(|| format!("{more} more")));
    let todo =
        format!("kubectl -n {} exec POD -- /mirror-agent status, and docs/operations.md", facts.agents);
    told.into_iter().map(|found| Finding::warn("failures", found, todo.clone())).collect()
}

#[cfg(test)]
mod tests;
