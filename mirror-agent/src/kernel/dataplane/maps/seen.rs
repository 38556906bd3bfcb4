//! The counts of the packets that taps have seen, by direction and over all verdicts.

use std::collections::BTreeMap;

use mirror_common::verdict::{Direction, Verdict};
use mirror_core::coverage::Count;

use super::Maps;
use crate::{kernel::dataplane::TapCount, model::Device};

impl Maps {
    /// Returns what the oldest session of each of these taps has seen. Each session of a tap counts every packet, so
    /// one is enough; the oldest is most likely the one that was read before. Taps without a session are left out.
    pub fn seen(&self, devices: &[Device]) -> anyhow::Result<BTreeMap<Device, TapCount>> {
        let mut seen = BTreeMap::new();
        for device in devices {
            let sessions = self.ledger.taps.get(device).into_iter().flat_map(|entry| entry.sessions.values());
            let Some(oldest) = sessions.min_by_key(|placed| placed.serial) else { continue };
            let counters = self.counters(oldest.id)?;
            let sum = Direction::ALL.map(|direction| {
                let verdicts = Verdict::ALL.map(|verdict| counters.packets(direction, verdict)).into_iter();
                verdicts.fold(Count::default(), Count::plus)
            });
            seen.insert(*device, TapCount { serial: oldest.serial, seen: sum });
        }
        Ok(seen)
    }
}
