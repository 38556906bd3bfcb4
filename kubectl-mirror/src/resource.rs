//! The common part of Mirrors and ClusterMirrors. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use mirror_api::{ClusterMirror, GROUP, Mirror, MirrorSpec, MirrorStatus};

pub(crate) struct Resource<'a> {
    pub(crate) kind: &'static str,
    pub(crate) metadata: &'a ObjectMeta,
    pub(crate) spec: &'a MirrorSpec,
    pub(crate) status: Option<&'a MirrorStatus>,
}

impl<'a> From<&'a Mirror> for Resource<'a> {
    fn from(Mirror { metadata, spec, status }: &'a Mirror) -> Self {
        Self { kind: "Mirror", metadata, spec, status: status.as_ref() }
    }
}

impl<'a> From<&'a ClusterMirror> for Resource<'a> {
    fn from(ClusterMirror { metadata, spec, status }: &'a ClusterMirror) -> Self {
        Self { kind: "ClusterMirror", metadata, spec: &spec.mirror, status: status.as_ref() }
    }
}

impl Resource<'_> {
    pub(crate) fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    /// Its type, as kubectl prints it.
    pub(crate) fn type_(&self) -> String {
        format!("{}.{GROUP}", self.kind.to_lowercase())
    }

    /// Its type and name, as kubectl prints them.
    pub(crate) fn resource(&self) -> String {
        format!("{}/{}", self.type_(), self.name())
    }

    /// Its kind, and its name with the namespace.
    pub(crate) fn full_name(&self) -> String {
        let namespace = self.metadata.namespace.as_ref().map(|namespace| format!("{namespace}/"));
        format!("{} {}{}", self.kind, namespace.unwrap_or_default(), self.name())
    }
}
