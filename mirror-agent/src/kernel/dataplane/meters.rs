//! The maps of limits and meters: the budgets and rates, and their use so far.
//!
//! Reads and writes numbers. `mirror_core::budget` decides how a budget continues after a change, and the eBPF programs
//! charge the meters. `maps` calls this module.

use std::time::Duration;

use anyhow::Context as _;
use aya::maps::{Array, Map, MapData};
use mirror_common::{
    abi::{NAMESPACE_LIMIT, NODE_LIMIT, POD_LIMIT, SHARE_LIMIT},
    limit::{Limits, Meter, PodMeter},
};
use nix::time::{ClockId, clock_gettime};
use zerocopy::transmute;

use crate::settings::Ceilings;

type LimitBytes = [u8; size_of::<Limits>()];
/// A lock with its padding, and a meter.
type MeterBytes = [u64; 1 + size_of::<Meter>() / 8];
/// A lock with its padding, and the two meters of a pod.
type PodMeterBytes = [u64; 1 + size_of::<PodMeter>() / 8];

/// `BPF_F_LOCK`: the kernel holds the element's lock while it copies.
const LOCKED: u64 = 4;

/// The maps of limits and meters.
pub(super) struct Meters {
    limits: Array<MapData, LimitBytes>,
    meters: Array<MapData, MeterBytes>,
    node_limits: Array<MapData, LimitBytes>,
    pod_meters: Array<MapData, PodMeterBytes>,
    namespace_meters: Array<MapData, MeterBytes>,
    target_limits: Array<MapData, LimitBytes>,
    target_meters: Array<MapData, MeterBytes>,
}

impl Meters {
    /// Takes the maps from `get`, which returns a map by its name.
    pub(super) fn from_fn(get: &mut impl FnMut(&str) -> anyhow::Result<Map>) -> anyhow::Result<Self> {
        Ok(Self {
            limits: get("LIMITS")?.try_into()?,
            meters: get("METERS")?.try_into()?,
            node_limits: get("NODE_LIMITS")?.try_into()?,
            pod_meters: get("POD_METERS")?.try_into()?,
            namespace_meters: get("NAMESPACE_METERS")?.try_into()?,
            target_limits: get("TARGET_LIMITS")?.try_into()?,
            target_meters: get("TARGET_METERS")?.try_into()?,
        })
    }

    /// Reads the limits in a slot of settings.
    pub(super) fn limits(&self, settings: u32) -> anyhow::Result<Limits> {
        Ok(transmute!(self.limits.get(&settings, 0).context("cannot read the limits")?))
    }

    /// Writes the limits to a slot of settings.
    pub(super) fn set_limits(&mut self, settings: u32, limits: Limits) -> anyhow::Result<()> {
        self.limits.set(settings, &transmute!(limits), 0).context("cannot write the limits")
    }

    /// Reads the meter of a session.
    pub(super) fn meter(&self, id: u32) -> anyhow::Result<Meter> {
        let [_lock, meter @ ..] = self.meters.get(&id, LOCKED).context("cannot read a meter")?;
        Ok(transmute!(meter))
    }

    /// Clears the meter of a session.
    pub(super) fn clear(&mut self, id: u32) -> anyhow::Result<()> {
        self.meters.set(id, &MeterBytes::default(), LOCKED).context("cannot clear a meter")
    }

    /// Clears the meters of a pod.
    pub(super) fn clear_pod(&mut self, place: u32) -> anyhow::Result<()> {
        let full = PodMeterBytes::default();
        self.pod_meters.set(place, &full, LOCKED).context("cannot clear the meters of a pod")
    }

    /// Clears the meter of a namespace.
    pub(super) fn clear_namespace(&mut self, place: u32) -> anyhow::Result<()> {
        let cleared = self.namespace_meters.set(place, &MeterBytes::default(), LOCKED);
        cleared.context("cannot clear the meter of a namespace")
    }

    /// Reads the ceiling of a target.
    pub(super) fn target_limits(&self, place: u32) -> anyhow::Result<Limits> {
        Ok(transmute!(self.target_limits.get(&place, 0).context("cannot read the ceiling of a target")?))
    }

    /// Writes the ceiling of a target.
    pub(super) fn set_target_limits(&mut self, place: u32, limits: Limits) -> anyhow::Result<()> {
        let written = self.target_limits.set(place, &transmute!(limits), 0);
        written.context("cannot write the ceiling of a target")
    }

    /// Clears the meter of a target.
    pub(super) fn clear_target(&mut self, place: u32) -> anyhow::Result<()> {
        let cleared = self.target_meters.set(place, &MeterBytes::default(), LOCKED);
        cleared.context("cannot clear the meter of a target")
    }

    /// Reads the limits of the node.
    pub(super) fn ceilings(&self) -> anyhow::Result<Ceilings> {
        let read = |index| {
            let limits = self.node_limits.get(&index, 0).context("cannot read the node's limits")?;
            anyhow::Ok(transmute!(limits))
        };
        Ok(Ceilings {
            node: read(NODE_LIMIT)?,
            pod: read(POD_LIMIT)?,
            namespace: read(NAMESPACE_LIMIT)?,
            share: read(SHARE_LIMIT)?,
        })
    }

    /// Writes the limits of the node.
    pub(super) fn set_ceilings(&mut self, ceilings: &Ceilings) -> anyhow::Result<()> {
        let Ceilings { node, pod, namespace, share } = *ceilings;
        let written =
            [(NODE_LIMIT, node), (POD_LIMIT, pod), (NAMESPACE_LIMIT, namespace), (SHARE_LIMIT, share)];
        for (index, limits) in written {
            let written = self.node_limits.set(index, &transmute!(limits), 0);
            written.context("cannot write the node's limits")?;
        }
        Ok(())
    }
}

/// The time of the kernel's monotonic clock, in ns.
pub(crate) fn now_ns() -> anyhow::Result<u64> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).context("cannot read the clock")?;
    Ok(Duration::from(now).as_nanos() as u64)
}
