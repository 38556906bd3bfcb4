//! The pods of this node, as a source tells of them.
//!
//! The edge to whoever knows the pods: the Kubernetes API, or a file. It selects nothing and knows no device.

pub mod file;
pub mod kube;
pub mod parse;

use std::{future::Future, sync::Arc};

use tokio::{sync::watch, time::Instant};

use crate::model::Pod;

/// A source of pods.
pub trait PodSource {
    /// The pods of the last complete and valid list; `None`: there was none yet, so nothing may be deleted.
    fn snapshot(&self) -> Option<Arc<[Pod]>>;

    /// Returns when the pods may have changed since the last call. Cancel safe.
    fn changed(&mut self) -> impl Future<Output = ()>;

    /// How near the source is to what it tells of, for whoever asks while the loop has it. One that lies on this
    /// machine is never away, and so is what it told last.
    fn state(&self) -> watch::Receiver<SourceState> {
        watch::channel(SourceState::Current).1
    }
}

/// How near a source is to what it tells of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceState {
    /// It has not told of anything yet.
    Starting,
    /// What it tells is what there is.
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
