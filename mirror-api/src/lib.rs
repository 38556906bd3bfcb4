//! The Kubernetes resources of podmirror, version `podmirror.io/v1alpha1`: their fields, schemas and CRDs.
//!
//! Types, and [`sum`]: pure functions that sum up the reports of the nodes. This crate asks no server and touches no
//! system, so that programs on other systems can share it. The doc comments are the texts of `kubectl explain`.
//! `pods/kube` of the agent reads the [`Mirror`]s, [`ClusterMirror`]s and [`MirrorTarget`]s, `mirror_node` of the agent writes the
//! [`MirrorNode`], `controller` of the agent writes the [`MirrorStatus`] and the [`MirrorTargetStatus`], and `mirror-agent crds` prints the CRDs, from
//! which `cargo xtask gen` makes the file of the chart.

mod mirror;
mod node;
mod status;
pub mod sum;
mod target;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray,
};
use kube::CustomResourceExt as _;

pub use self::{
    mirror::{
        ClusterMirror, ClusterMirrorSpec, Direction, Limits, MAX_NAME, Mirror, MirrorSpec, Stream, TargetRef,
    },
    node::{
        Cut, MirrorNode, MirrorNodeFields, MirrorNodeStatus, MirrorSummary, NotCovered, Packets, Pods,
        Refusal, TargetSummary,
    },
    status::{MirrorStatus, MirrorTargetStatus, NotReady, TargetNodes, Worst},
    target::{
        MirrorTarget, MirrorTargetSpec, TargetDevice, TargetErspan, TargetGeneve, TargetGre, TargetOversize,
        TargetPod, TargetVxlan,
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
        schemas.filter_map(|schema| schema.open_api_v3_schema.as_mut()).for_each(join_lines);
    }
    crds
}

/// Joins the lines of the doc comments, which `kubectl explain` wraps by itself.
fn join_lines(schema: &mut JSONSchemaProps) {
    if let Some(description) = &mut schema.description {
        *description = description.replace('\n', " ");
    }
    schema.properties.iter_mut().flatten().for_each(|(_, schema)| join_lines(schema));
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &mut schema.items {
        join_lines(items);
    }
}

#[cfg(test)]
mod tests;
