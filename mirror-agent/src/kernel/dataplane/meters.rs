//! The maps of limits and meters: the budgets and rates of every [`Level`], and their use so far.
//!
//! Reads and writes numbers. `mirror_core::budget` decides how a budget continues after a change, and the eBPF programs
//! charge the meters. `maps` calls this module.

use std::time::Duration;

use anyhow::Context as _;
use aya::maps::{Array, Map, MapData};
use mirror_common::limit::{Level, Limits, Meter};
use nix::time::{ClockId, clock_gettime};
use zerocopy::transmute;

use crate::settings::Ceilings;

type LimitBytes = [u8; size_of::<Limits>()];
/// A lock with its padding, and a meter.
type MeterBytes = [u64; 1 + size_of::<Meter>() / 8];

/// `BPF_F_LOCK`: the kernel holds the element's lock while it copies.
const LOCKED: u64 = 4;

/// The maps of limits and meters. Each method takes the place within a level.
pub(super) struct Meters {
    limits: Array<MapData, LimitBytes>,
    meters: Array<MapData, MeterBytes>,
}

impl Meters {
    /// Takes the maps from `get`, which returns a map by its name.
    pub(super) fn from_fn(get: &mut impl FnMut(&str) -> anyhow::Result<Map>) -> anyhow::Result<Self> {
        Ok(Self { limits: get("LIMITS")?.try_into()?, meters: get("METERS")?.try_into()? })
    }

    /// Reads limits.
    pub(super) fn limits(&self, level: Level, place: u32) -> anyhow::Result<Limits> {
        let limits = self.limits.get(&level.limits(place), 0);
        Ok(transmute!(limits.with_context(|| format!("cannot read the limits of the level {level:?}"))?))
    }

    /// Writes limits.
    pub(super) fn set_limits(&mut self, level: Level, place: u32, limits: Limits) -> anyhow::Result<()> {
        let written = self.limits.set(level.limits(place), &transmute!(limits), 0);
        written.with_context(|| format!("cannot write the limits of the level {level:?}"))
    }

    /// Reads the meter of a session.
    pub(super) fn meter(&self, id: u32) -> anyhow::Result<Meter> {
        let meter = self.meters.get(&Level::Session.meter(id), LOCKED);
        let [_lock, meter @ ..] = meter.context("cannot read a meter")?;
        Ok(transmute!(meter))
    }

    /// Clears a meter, which is full then. A program with the entry of a removed tap may still write to a share, whose
    /// lock the programs do not take: at worst, the share begins with the debt of a packet.
    pub(super) fn clear(&mut self, level: Level, place: u32) -> anyhow::Result<()> {
        let cleared = self.meters.set(level.meter(place), &MeterBytes::default(), LOCKED);
        cleared.with_context(|| format!("cannot clear the meter of the level {level:?}"))
    }

    /// Reads the limits of the node.
    pub(super) fn ceilings(&self) -> anyhow::Result<Ceilings> {
        Ok(Ceilings {
            node: self.limits(Level::Node, 0)?,
            pod: self.limits(Level::Pod, 0)?,
            namespace: self.limits(Level::Namespace, 0)?,
            share: self.limits(Level::Share, 0)?,
        })
    }

    /// Writes the limits of the node.
    pub(super) fn set_ceilings(&mut self, ceilings: &Ceilings) -> anyhow::Result<()> {
        let Ceilings { node, pod, namespace, share } = *ceilings;
        self.set_limits(Level::Node, 0, node)?;
        self.set_limits(Level::Pod, 0, pod)?;
        self.set_limits(Level::Namespace, 0, namespace)?;
        self.set_limits(Level::Share, 0, share)
    }
}

/// The time of the kernel's monotonic clock, in ns.
pub(crate) fn now_ns() -> anyhow::Result<u64> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).context("cannot read the clock")?;
    Ok(Duration::from(now).as_nanos() as u64)
}
