//! The Kubernetes resources of podmirror, version `podmirror.io/v1alpha1`: their fields, schemas and CRDs.
//!
//! Types, and pure functions: [`sum`] sums up the reports of the nodes, [`labels`] parses selectors. [`packets`] has the
//! messages of another API, of packets. This crate asks no server and touches no system, so that programs on other
//! systems can share it. The doc comments are the texts of `kubectl explain`.
//! `sources/kube` of the agent reads the [`Mirror`]s, [`ClusterMirror`]s and [`MirrorTarget`]s, `report/mirror_node` of
//! the agent writes the [`MirrorNode`], `controller` of the agent writes the [`MirrorStatus`] and the
//! [`MirrorTargetStatus`], and `mirror-agent crds` prints the CRDs, as the file of the chart has them.

pub mod labels;
mod mirror;
mod node;
pub mod packets;
mod settings;
mod status;
pub mod sum;
mod target;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSON, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::CustomResourceExt as _;
use serde_json::Value;

pub use self::{
    mirror::{ClusterMirror, ClusterMirrorSpec, Direction, MAX_NAME, Mirror, MirrorSpec, TargetRef},
    node::{
        MirrorNode, MirrorNodeFields, MirrorNodeStatus, MirrorSummary, Packets, Pods, Refusal, TargetSummary,
        Uncovered, cut,
    },
    settings::{Limits, Quantity, RateLimit, Sampling, SettingsSpec},
    status::{MirrorStatus, MirrorTargetStatus, NotReady, TargetNodes},
    target::{
        AllowedNamespaces, FromNamespaces, KeyRange, MirrorTarget, MirrorTargetSpec, PodSelector,
        TargetDevice, TargetErspan, TargetGeneve, TargetGre, TargetOversize, TargetPod, TargetVxlan,
    },
};

/// The API group of the resources.
pub const GROUP: &str = "podmirror.io";

/// The annotation by which Helm leaves an object in the cluster when the release is uninstalled.
const HELM_POLICY: (&str, &str) = ("helm.sh/resource-policy", "keep");

/// The CRDs of all resources, in a fixed order. Helm keeps them when a release ends, because their deletion would
/// delete every object of them.
pub fn crds() -> Vec<CustomResourceDefinition> {
    let mut crds = vec![Mirror::crd(), ClusterMirror::crd(), MirrorTarget::crd(), MirrorNode::crd()];
    for crd in &mut crds {
        let annotations = crd.metadata.annotations.get_or_insert_default();
        annotations.insert(HELM_POLICY.0.to_owned(), HELM_POLICY.1.to_owned());
        let schemas = crd.spec.versions.iter_mut().filter_map(|version| version.schema.as_mut());
        for schema in schemas.filter_map(|schema| schema.open_api_v3_schema.as_mut()) {
            tidy(schema);
            for (name, schema) in schema.properties.iter_mut().flatten() {
                if name == "spec" {
                    bound(name, schema);
                } else if let Some(fields) = &mut schema.properties
                    && let Some(conditions) = fields.get_mut("conditions")
                {
                    bound("conditions", conditions);
                }
            }
        }
    }
    crds
}

/// The name of a network device, a DNS label, a DNS subdomain and a duration.
const DEVICE: &str = r"^[^/:\s]+$";
const LABEL: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
const SUBDOMAIN: &str = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
const DURATION: &str = "^([0-9]{1,5}(h|m|s|ms)){1,4}$";
/// The form of texts, by the end of the field's path: the least and most characters, and the pattern, if any. Those of
/// conditions are Kubernetes' own, which k8s-openapi leaves out.
const TEXTS: [(&str, i64, i64, &str); 15] = [
    ("nics", 1, 15, DEVICE),
    ("limits.duration", 2, 28, DURATION),
    ("rateLimit.burst", 2, 28, DURATION),
    ("targetRef.name", 1, 63, LABEL),
    ("device.name", 1, 15, DEVICE),
    ("pod.namespace", 1, 63, LABEL),
    ("pod.name", 1, 253, SUBDOMAIN),
    ("pod.nic", 1, 15, DEVICE),
    ("device", 1, 15, DEVICE),
    ("remoteIP", 2, 45, "^[0-9A-Fa-f.:]+$"),
    ("matchLabels", 0, 63, ""),
    ("matchExpressions.values", 0, 63, ""),
    (
        "conditions.type",
        1,
        316,
        r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
    ),
    ("conditions.reason", 1, 1024, "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"),
    ("conditions.message", 0, 32768, ""),
];
/// The words of a text, by the end of the field's path.
const WORDS: [(&str, &[&str]); 2] = [
    ("matchExpressions.operator", &["In", "NotIn", "Exists", "DoesNotExist"]),
    ("conditions.status", &["True", "False", "Unknown"]),
];
/// Most characters of another text: of the key of a label, with the prefix.
const MOST_CHARACTERS: i64 = 317;
/// Most labels and requirements of a selector, and most values of a requirement.
const MOST_LABELS: i64 = 16;
const MOST_REQUIREMENTS: i64 = 8;
const MOST_VALUES: i64 = 64;

/// Bounds each text, list and map of a field that has no bound of its own: the agents of all nodes keep what the authors
/// write. Kubernetes bounds no selector.
fn bound(path: &str, schema: &mut JSONSchemaProps) {
    let is = |end: &str| path.strip_suffix(end).is_some_and(|of| of.is_empty() || of.ends_with('.'));
    if let Some((_, words)) = WORDS.iter().find(|(end, _)| is(end)) {
        schema.enum_ = Some(words.iter().map(|word| JSON::from(Value::from(*word))).collect());
    }
    let is_text = schema.type_.as_deref() == Some("string") && schema.enum_.is_none();
    match TEXTS.iter().find(|(end, ..)| is_text && is(end)) {
        Some((_, least, most, pattern)) => {
            schema.min_length = (*least > 0).then_some(*least);
            schema.max_length = Some(*most);
            schema.pattern = (!pattern.is_empty()).then(|| (*pattern).to_owned());
        }
        None if (is_text && schema.format.is_none()) || schema.x_kubernetes_int_or_string == Some(true) => {
            schema.max_length.get_or_insert(MOST_CHARACTERS);
        }
        None => {}
    }
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &mut schema.items {
        schema.max_items.get_or_insert(if is("values") { MOST_VALUES } else { MOST_REQUIREMENTS });
        bound(path, items);
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = &mut schema.additional_properties {
        schema.max_properties.get_or_insert(MOST_LABELS);
        bound(path, values);
    }
    for (name, schema) in schema.properties.iter_mut().flatten() {
        bound(&format!("{path}.{name}"), schema);
    }
}

/// Joins the lines of the doc comments, which `kubectl explain` wraps by itself. Lets no field be null: an absent field
/// is left out. Marks selectors as one value, as Kubernetes does.
fn tidy(schema: &mut JSONSchemaProps) {
    if let Some(description) = &mut schema.description {
        *description = description.replace('\n', " ");
    }
    schema.nullable = None;
    if schema.properties.as_ref().is_some_and(|fields| fields.contains_key("matchLabels")) {
        schema.x_kubernetes_map_type = Some("atomic".to_owned());
    }
    if schema.items.is_some() {
        schema.x_kubernetes_list_type.get_or_insert_with(|| "atomic".to_owned());
    }
    schema.properties.iter_mut().flatten().for_each(|(_, schema)| tidy(schema));
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &mut schema.items {
        tidy(items);
    }
}

#[cfg(test)]
mod tests;
