//! The pods of this node, and the Mirrors, ClusterMirrors and MirrorTargets, as a source lists them.
//!
//! The interface to the source of pods: the Kubernetes API, or a file. This module selects no pods and accesses no
//! device.

pub mod file;
pub mod kube;
pub mod parse;
mod static_pods;

use std::{future::Future, sync::Arc};

use tokio::{sync::watch, time::Instant};

use crate::model::{Pod, Resource, TargetResource};

/// A source of pods.
pub trait PodSource {
    /// The pods of the last complete and valid list; `None` before the first one, when nothing may be deleted.
    fn snapshot(&self) -> Option<Arc<[Pod]>>;

    /// Returns the pods whose objects were deleted since the last call, in their last state. The processes of such a
    /// pod may still run. Only the Kubernetes API has objects: a pod that a file no longer lists is not to be mirrored.
    fn deleted(&self) -> Vec<Pod> {
        Vec::new()
    }

    /// The Mirrors and ClusterMirrors at the same moment. Only the Kubernetes API has any.
    fn resources(&self) -> Arc<[Resource]> {
        Arc::new([])
    }

    /// The MirrorTargets at the same moment.
    fn targets(&self) -> Arc<[TargetResource]> {
        Arc::new([])
    }

    /// Waits until the pods or resources may have changed since the last call. Cancel safe.
    fn changed(&mut self) -> impl Future<Output = ()>;

    /// Whether the source's list of pods is up to date. The receiver stays valid while the loop owns the source. The
    /// default is `Current`, for a source on this machine: it is always reachable, and its last list is always up to
    /// date.
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
    /// The source cannot be reached; the last valid list stays in force.
    Away {
        /// The time since which it cannot be reached.
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
