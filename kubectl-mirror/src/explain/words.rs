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
        "The agent of the node knows more: the hooks, filters, budgets, targets and counters of this pod. To ask it \
         needs {right}. That is an administrator's right, because it is root on the node."
    )
}

/// Returns the text about the pod.
pub(super) fn words(facts: &Facts) -> String {
    let mut text = String::new();
    about_pod(facts, &mut text);
    let selecting = selecting(facts);
    if selecting.is_empty() {
        text += "\n";
        line(&mut text, 0, "No Mirror and no ClusterMirror that you may read selects it.");
    }
    for mirror in &selecting {
        text += "\n";
        about_mirror(mirror, facts, &mut text);
    }
    text
}

fn about_pod(Facts { pod, namespace, .. }: &Facts, text: &mut String) {
    let name = format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
    let spec = pod.spec.as_ref();
    match spec.and_then(|spec| spec.node_name.as_ref()) {
        Some(node) => {
            line(text, 0, &format!("{name} is on node {node}. This is what the API server knows of it."))
        }
        None => line(text, 0, &format!("{name} is on no node yet, so nothing of it is mirrored yet.")),
    }
    if spec.and_then(|spec| spec.host_network).unwrap_or(false) {
        line(
            text,
            0,
            "It has the network of its node (hostNetwork), so it has no NIC that could be mirrored.",
        );
    }
    let annotations = [
        ("the pod", Some(pod.annotations())),
        ("the namespace", namespace.as_ref().map(|of| of.annotations())),
    ];
    for (whose, annotations) in annotations {
        for (key, value) in annotations.into_iter().flatten().filter(|(key, _)| is_ours(key)) {
            line(text, 0, &format!("Annotation of {whose}: {key} is {value:?}."));
        }
    }
}

/// Whether an annotation is a setting of podmirror.
fn is_ours(key: &str) -> bool {
    key.starts_with(PREFIX) || key == OVN_MIRROR || key.ends_with(OVN_ATTACHMENT)
}

/// Appends a resource, its conditions, and the report of the pod's node on both.
fn about_mirror(mirror: &Resource<'_>, facts: &Facts, text: &mut String) {
    let Resource { metadata, spec, status, .. } = mirror;
    let target = match (&spec.stream, &spec.target_ref) {
        (Some(_), _) => "a program that has its key",
        (None, Some(target)) => target.name.as_str(),
        (None, None) => "default, the mirror interface of the node",
    };
    line(text, 0, &format!("{} selects it. Target: {target}", mirror.full_name()));
    for (field, value) in wishes(spec) {
        line(text, 1, &format!("{field}: {value}"));
    }
    for condition in status.iter().flat_map(|status| &status.conditions) {
        let (reason, message) = (&condition.reason, &condition.message);
        line(text, 1, &format!("{}: {} ({reason}) {message}", condition.type_, condition.status));
    }
    let Some(node) = &facts.node else { return };
    let Some(reported) = node.status.as_ref() else { return };
    let name = node.name_any();
    match reported.mirrors.iter().find(|of| Some(&of.uid) == metadata.uid.as_ref()) {
        Some(of) => about_summary(&name, of, &facts.pod, text),
        None if reported.more_mirrors.is_some() => {
            line(text, 1, &format!("Node {name} does not name it in its MirrorNode, which is full."));
        }
        None => line(text, 1, &format!("Node {name} has not reported on it.")),
    }
    if let Some(time) = &reported.last_report_time {
        line(text, 1, &format!("Node {name} reported at {}.", time.0));
    }
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

/// Appends the node's report on a resource and on the pod.
fn about_summary(node: &str, of: &MirrorSummary, pod: &Pod, text: &mut String) {
    if let Some(refused) = &of.refused {
        line(text, 1, &format!("Node {node} refuses it: {}: {}", refused.reason, refused.message));
    }
    let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
    let mut is_named = false;
    for reason in of.uncovered.iter().filter(|of| of.namespace == namespace && of.pod == name) {
        let nic = reason.nic.as_ref().map(|nic| format!(", NIC {nic}")).unwrap_or_default();
        line(text, 1, &format!("Node {node} does not cover it{nic}: {}: {}", reason.reason, reason.message));
        is_named = true;
    }
    match of.more_uncovered {
        _ if is_named || of.refused.is_some() => {}
        Some(more @ 1..) => line(
            text,
            1,
            &format!("Node {node} lists no reason for this pod; {more} reasons are not listed."),
        ),
        _ => line(text, 1, &format!("Node {node} has no reason against this pod.")),
    }
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

/// Appends a line with an indent. Users write parts of it, so it is cut, and control characters are removed.
fn line(text: &mut String, depth: usize, line: &str) {
    let mut chars = line.chars();
    let cut: String = chars.by_ref().take(MOST).collect();
    let more = if chars.next().is_some() { " …" } else { "" };
    *text += &format!("{}{}{more}\n", "  ".repeat(depth), printable(&cut));
}

#[cfg(test)]
mod tests;
