//! The map `UNREAD`: until when nothing is copied to a mirror interface that nobody reads.
//!
//! `maps` says which targets are such mirror interfaces. `when_read` looks for readers, and writes the times through
//! [`Unread`] from a thread of its own.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::Context as _;
use aya::maps::{Array, Map, MapData};

use super::meters::now_ns;
use crate::model::Readable;

/// The map, and the mirror interfaces that get copies only while somebody reads them.
#[derive(Clone)]
pub struct Unread(Arc<Mutex<Inner>>);

struct Inner {
    until: Array<MapData, u64>,
    /// By the places of their targets.
    mirrors: BTreeMap<u32, Readable>,
}

/// A moment, in ns of the kernel's monotonic clock.
#[derive(Debug, Clone, Copy)]
pub struct Moment(u64);

impl Moment {
    /// This moment.
    pub fn now() -> anyhow::Result<Self> {
        now_ns().map(Self)
    }
}

impl Unread {
    /// The map that `get` gives for its name.
    pub(super) fn from_fn(get: &mut impl FnMut(&str) -> anyhow::Result<Map>) -> anyhow::Result<Self> {
        let inner = Inner { until: get("UNREAD")?.try_into()?, mirrors: BTreeMap::new() };
        Ok(Self(Arc::new(Mutex::new(inner))))
    }

    /// These are the mirror interfaces from now on, by the places of their targets.
    pub(super) fn follow(&self, mirrors: BTreeMap<u32, Readable>) {
        self.inner().mirrors = mirrors;
    }

    /// Another device has come to the place of a target: what was said of the one before does not hold for it.
    pub(super) fn clear(&self, place: u32) -> anyhow::Result<()> {
        self.inner().until.set(place, &0, 0).context("cannot write that a target is read")
    }

    /// The mirror interfaces.
    pub fn mirrors(&self) -> BTreeSet<Readable> {
        self.inner().mirrors.values().copied().collect()
    }

    /// Until `lease` after the moment `seen`, nothing is copied to the mirror interfaces that nobody reads. Copies to the
    /// others are made.
    pub fn withhold(&self, unread: &BTreeSet<Readable>, seen: Moment, lease: Duration) -> anyhow::Result<()> {
        let inner = &mut *self.inner();
        for (place, mirror) in &inner.mirrors {
            let until = if unread.contains(mirror) { seen.0 + lease.as_nanos() as u64 } else { 0 };
            inner.until.set(*place, &until, 0).context("cannot write whether a target is read")?;
        }
        Ok(())
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // A panic in another thread ends the agent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
