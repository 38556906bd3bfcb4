//! The pods of this node, and the Mirrors, ClusterMirrors and MirrorTargets, as a source lists them.
//!
//! The edge to the source of pods: the Kubernetes API, or a file. This module selects nothing and knows no device.

pub mod file;
pub mod kube;
pub mod parse;

use std::{future::Future, sync::Arc};

use tokio::{sync::watch, time::Instant};

use crate::model::{Pod, Resource, TargetResource};

/// A source of pods.
pub trait PodSource {
    /// The pods of the last complete and valid list; `None`: there was none yet, so nothing may be deleted.
    fn snapshot(&self) -> Option<Arc<[Pod]>>;

    /// The pods whose objects were deleted since the last call, each as it was last. The processes of such a pod may run
    /// on. Only the Kubernetes API has objects: a pod that a file no longer names is not to be mirrored.
    fn deleted(&self) -> Vec<Pod> {
        Vec::new()
    }

    /// The Mirrors and ClusterMirrors, as of the same moment. Only the Kubernetes API has any.
    fn resources(&self) -> Arc<[Resource]> {
        Arc::new([])
    }

    /// The MirrorTargets, as of the same moment.
    fn targets(&self) -> Arc<[TargetResource]> {
        Arc::new([])
    }

    /// Returns when the pods or resources may have changed since the last call. Cancel safe.
    fn changed(&mut self) -> impl Future<Output = ()>;

    /// Whether the source's list of pods is up to date. The receiver stays valid while the loop owns the source. A
    /// source on this machine can always be reached, and its last list is always up to date: so the default is
    /// `Current`.
    fn state(&self) -> watch::Receiver<SourceState> {
        watch::channel(SourceState::Current).1
    }
}

/// Whether a source's list of pods is up to date.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceState {
    /// The source has not given a list yet.
    Starting,
    /// The list is up to date.
    Current,
    /// It cannot be reached; the last good list stays in force.
    Away {
        /// Since when.
        since: Instant,
    },
}

/// A source without pods, for a mirror of interfaces.
pub struct NoPods;

impl PodSource for NoPods {
    fn snapshot(&self) -> Option<Arc<[Pod]>> {
        Some(Arc::new([]))
    }

    fn changed(&mut self) -> impl Future<Output = ()> {
        std::future::pending()
    }
}
