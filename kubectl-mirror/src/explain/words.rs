//! Describes a pod and its mirrors from the API server's objects. Pure. The agent's own text is in
//! `mirror_core::status`.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{Namespace, Pod},
    apimachinery::pkg::apis::meta::v1::LabelSelector,
};
use kube::{
    ResourceExt as _,
    core::{Selector, SelectorExt as _},
};
use mirror_api::{ClusterMirror, Mirror, MirrorNode, MirrorSpec, MirrorSummary};
use mirror_core::{
    annotations::{OVN_ATTACHMENT, OVN_MIRROR, PREFIX},
    status::printable,
};
use serde_json::Value;

use crate::resource::Resource;

/// Maximum length of a line in characters. An annotation can have 256 KiB.
const MOST: usize = 1024;

/// The objects that were read. Missing objects do not exist, or the user has no right to read them.
pub(super) struct Facts {
    pub(super) pod: Pod,
    pub(super) namespace: Option<Namespace>,
    pub(super) mirrors: Vec<Mirror>,
    pub(super) of_cluster: Vec<ClusterMirror>,
    /// The MirrorNode of the pod's node.
    pub(super) node: Option<MirrorNode>,
}

/// The hint about a right that would give more information.
pub(super) fn missing_right(right: &str) -> String {
    format!(
        "The agent of the node knows more: the hooks, filters, budgets, targets and counters of this pod. Asking it \
         requires {right}. Only administrators should have this right, because it gives root on the node."
    )
}

/// Returns the text about the pod.
pub(super) fn words(facts: &Facts) -> String {
    let mut parts = vec![about_pod(facts)];
    parts.extend(selecting(facts).iter().map(|mirror| about_mirror(mirror, facts)));
    if parts.len() == 1 {
        parts.push(vec!["No Mirror and no ClusterMirror that you may read selects it.".to_owned()]);
    }
    let text = |lines: Vec<String>| lines.iter().map(|text| line(text)).collect::<String>();
    parts.into_iter().map(text).collect::<Vec<_>>().join(
        "
",
    )
}

fn about_pod(Facts { pod, namespace, .. }: &Facts) -> Vec<String> {
    let name = format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
    let spec = pod.spec.as_ref();
    let mut lines = vec![match spec.and_then(|spec| spec.node_name.as_ref()) {
        Some(node) => format!("{name} is on node {node}. This is what the API server knows of it."),
        None => format!("{name} is not assigned to a node yet, so it is not mirrored yet."),
    }];
    if spec.and_then(|spec| spec.host_network).unwrap_or(false) {
        lines.push("It uses the network of its node (hostNetwork), so it has no NIC to mirror.".into());
    }
    let annotations = [
        ("the pod", Some(pod.annotations())),
        ("the namespace", namespace.as_ref().map(|of| of.annotations())),
    ];
    for (whose, annotations) in annotations {
        let own = annotations.into_iter().flatten().filter(|(key, _)| is_ours(key));
        lines.extend(own.map(|(key, value)| format!("Annotation of {whose}: {key} is {value:?}.")));
    }
    lines
}

/// Whether an annotation is a setting of podmirror.
fn is_ours(key: &str) -> bool {
    key.starts_with(PREFIX) || key == OVN_MIRROR || key.ends_with(OVN_ATTACHMENT)
}

/// A resource, its conditions, and the report of the pod's node on both.
fn about_mirror(mirror: &Resource<'_>, facts: &Facts) -> Vec<String> {
    let Resource { metadata, spec, status, .. } = mirror;
    let target = match (&spec.stream, &spec.target_ref) {
        (Some(_), _) => "a program that has its key",
        (None, Some(target)) => target.name.as_str(),
        (None, None) => "default, the mirror interface of the node",
    };
    let mut lines: Vec<_> =
        wishes(spec).into_iter().map(|(field, value)| format!("{field}: {value}")).collect();
    let conditions = status.iter().flat_map(|status| &status.conditions);
    lines.extend(conditions.map(|of| format!("{}: {} ({}) {}", of.type_, of.status, of.reason, of.message)));
    if let Some((node, reported)) = facts.node.as_ref().and_then(|node| Some((node, node.status.as_ref()?))) {
        let name = node.name_any();
        match reported.mirrors.iter().find(|of| Some(&of.uid) == metadata.uid.as_ref()) {
            Some(of) => lines.extend(about_summary(&name, of, &facts.pod)),
            None if reported.more_mirrors.is_some() => {
                lines.push(format!("The MirrorNode of node {name} is full and does not list it."));
            }
            None => lines.push(format!("Node {name} has not reported on it.")),
        }
        let time = reported.last_report_time.as_ref();
        lines.extend(time.map(|time| format!("Node {name} reported at {}.", time.0)));
    }
    let head = format!("{} selects it. Target: {target}", mirror.full_name());
    [head].into_iter().chain(lines.into_iter().map(|line| format!("  {line}"))).collect()
}

/// The settings of a resource besides its pods and its target: the fields of its `spec`, unchanged.
fn wishes(spec: &MirrorSpec) -> Vec<(String, Value)> {
    match serde_json::to_value(spec) {
        Ok(Value::Object(fields)) => {
            let is_told = |key: &str| ["podSelector", "targetRef", "stream"].contains(&key);
            fields.into_iter().filter(|(key, _)| !is_told(key)).collect()
        }
        _ => Vec::new(),
    }
}

/// The node's report on a resource and on the pod.
fn about_summary(node: &str, of: &MirrorSummary, pod: &Pod) -> Vec<String> {
    let refused = of.refused.iter();
    let mut lines: Vec<_> =
        refused.map(|of| format!("Node {node} refuses it: {}: {}", of.reason, of.message)).collect();
    let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
    for reason in of.uncovered.iter().filter(|of| of.namespace == namespace && of.pod == name) {
        let nic = reason.nic.as_ref().map(|nic| format!(", NIC {nic}")).unwrap_or_default();
        lines.push(format!("Node {node} does not cover it{nic}: {}: {}", reason.reason, reason.message));
    }
    match of.more_uncovered {
        _ if !lines.is_empty() => {}
        Some(more @ 1..) => {
            lines.push(format!(
                "Node {node} lists no problem with this pod, but {more} problems are not listed."
            ));
        }
        _ => lines.push(format!("Node {node} reports no problem with this pod.")),
    }
    lines
}

/// The resources that select the pod, ClusterMirrors first.
fn selecting(facts: &Facts) -> Vec<Resource<'_>> {
    let Facts { pod, namespace, mirrors, of_cluster, .. } = facts;
    let is_in = |mirror: &&ClusterMirror| {
        let labels = namespace.as_ref().map(|of| of.labels());
        labels.is_some_and(|labels| selects(&mirror.spec.namespace_selector, labels))
    };
    let is_of = |spec: &MirrorSpec| {
        let names = spec.stream.as_ref().and_then(|stream| stream.pods.as_ref());
        let is_named = names.is_none_or(|names| names.contains(&pod.name_any()));
        is_named && selects(&spec.pod_selector, pod.labels())
    };
    let of_cluster = of_cluster.iter().filter(is_in).map(Resource::from);
    let mirrors = mirrors.iter().map(Resource::from);
    of_cluster.chain(mirrors).filter(|mirror| is_of(mirror.spec)).collect()
}

/// Whether a selector matches the labels. An invalid selector selects nothing.
fn selects(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    Selector::try_from(selector.clone()).is_ok_and(|selector| selector.matches(labels))
}

/// A line of the text. Users write parts of it, so it is cut, and control characters are removed.
fn line(line: &str) -> String {
    let mut chars = line.chars();
    let cut: String = chars.by_ref().take(MOST).collect();
    let more = if chars.next().is_some() { " …" } else { "" };
    format!(
        "{}{more}
",
        printable(&cut)
    )
}

#[cfg(test)]
mod tests;
