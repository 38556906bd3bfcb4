//! The pods of this node, as a source tells of them.
//!
//! The edge to whoever knows the pods: a file now. It selects nothing and knows no device.

pub mod file;
pub mod parse;

use std::{future::Future, sync::Arc};

use crate::model::Pod;

/// A source of pods.
pub trait PodSource {
    /// The pods of the last complete and valid list; `None`: there was none yet, so nothing may be deleted.
    fn snapshot(&self) -> Option<Arc<[Pod]>>;

    /// Returns when the pods may have changed since the last call. Cancel safe.
    fn changed(&mut self) -> impl Future<Output = ()>;
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
