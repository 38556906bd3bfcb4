//! The map `UNREAD`: until when nothing is copied to a mirror interface without readers.
//!
//! `maps` sets which targets are such mirror interfaces. `when_read` looks for readers, and writes the times through
//! [`Unread`] from its own thread.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::Context as _;
use aya::maps::{Array, Map, MapData};

use crate::model::Readable;

/// The map, and the mirror interfaces that get copies only while a program reads them.
#[derive(Clone)]
pub struct Unread(Arc<Mutex<Inner>>);

struct Inner {
    until: Array<MapData, u64>,
    /// The mirror interfaces, by the places of their targets.
    mirrors: BTreeMap<u32, Readable>,
}

impl Unread {
    /// Takes the map from `get`, which returns a map by its name.
    pub(super) fn from_fn(get: &mut impl FnMut(&str) -> anyhow::Result<Map>) -> anyhow::Result<Self> {
        let inner = Inner { until: get("UNREAD")?.try_into()?, mirrors: BTreeMap::new() };
        Ok(Self(Arc::new(Mutex::new(inner))))
    }

    /// Sets the mirror interfaces, by the places of their targets.
    pub(super) fn follow(&self, mirrors: BTreeMap<u32, Readable>) {
        self.inner().mirrors = mirrors;
    }

    /// Forgets the state of the old target after its slot was reused for another device.
    pub(super) fn clear(&self, place: u32) -> anyhow::Result<()> {
        self.inner().until.set(place, &0, 0).context("cannot write that a target is read")
    }

    /// The mirror interfaces.
    pub fn mirrors(&self) -> BTreeSet<Readable> {
        self.inner().mirrors.values().copied().collect()
    }

    /// Stops the copies to the mirror interfaces in `unread` until `lease` after the moment `seen_ns` of the kernel's
    /// monotonic clock. The other mirror interfaces get copies.
    pub fn withhold(&self, unread: &BTreeSet<Readable>, seen_ns: u64, lease: Duration) -> anyhow::Result<()> {
        let inner = &mut *self.inner();
        for (place, mirror) in &inner.mirrors {
            let until = if unread.contains(mirror) { seen_ns + lease.as_nanos() as u64 } else { 0 };
            inner.until.set(*place, &until, 0).context("cannot write whether a target is read")?;
        }
        Ok(())
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // A panic in another thread ends the agent, so a poisoned lock does not matter.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
