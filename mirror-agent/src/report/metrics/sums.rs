//! [`Scrape`]: the counters of sessions and NICs, each with a series of its own, or as sums over a namespace.
//!
//! A sum of the present values would decrease when a pod ends. Prometheus takes a decrease for a reset to zero, and
//! would count the rest of the sum a second time. So at each scrape, a sum grows by the increase of its parts since
//! the previous scrape. A sum ends with its last part, so there are never more sums than parts.

use std::collections::BTreeMap;

use mirror_common::verdict::{Direction, Verdict};
use prometheus::{IntCounterVec, core::Collector as _};

use crate::model::Device;

/// A part of a sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    /// A counter of the session with this serial number. The verdict is `None` if the metric has no results.
    Session(u32, Direction, Option<Verdict>),
    /// A counter of the NIC with this tapped device.
    Nic(Device, Direction),
}

/// The sums of one scrape.
#[derive(Default)]
pub(super) struct Sums {
    /// The series, by the id of the metric.
    series: BTreeMap<u64, IntCounterVec>,
    /// The values of the parts, with the id of the metric.
    parts: BTreeMap<(u64, Part), u64>,
}

/// The counters of one scrape.
#[derive(Default)]
pub(super) struct Scrape {
    /// The sums of the scrape before; `None` for the first scrape of the agent.
    pub(super) before: Option<Sums>,
    /// The sums; `None` if each session and NIC has a series of its own.
    pub(super) now: Option<Sums>,
}

impl Scrape {
    /// Adds the value of a part to its series. `labels`: `None` if the part is not shown now.
    pub(super) fn add(&mut self, metric: &IntCounterVec, labels: Option<&[&str]>, part: Part, value: u64) {
        let Some(now) = &mut self.now else {
            if let Some(labels) = labels {
                metric.with_label_values(labels).inc_by(value);
            }
            return;
        };
        let id = metric.desc().first().map_or(0, |desc| desc.id);
        let before = self.before.as_ref();
        // At the first scrape an earlier agent can have shown these packets already.
        let last = before.map_or(value, |before| before.parts.get(&(id, part)).copied().unwrap_or(0));
        now.parts.insert((id, part), value);
        let Some(labels) = labels else { return };
        let sum = metric.with_label_values(labels);
        if sum.get() == 0 {
            let before = before.and_then(|before| before.series.get(&id));
            sum.inc_by(before.map_or(0, |before| before.with_label_values(labels).get()));
        }
        // The counters of a NIC begin at zero again when its tap changes sides.
        sum.inc_by(value.checked_sub(last).unwrap_or(value));
        now.series.entry(id).or_insert_with(|| metric.clone());
    }
}
