//! Writes the entries of taps: one, or two for a tap that sees the two directions at different devices.
//!
//! The entry for the node side of the veth is the tap. The entry for the NIC inside the pod (the pod side) is a copy of
//! it with the same sessions. So a mirror of a NIC has one set of counters, one budget and one rate, whichever side
//! copies.

use anyhow::Context as _;
use mirror_common::abi;
use zerocopy::transmute;

use super::{Maps, found, key};
use crate::{
    kernel::dataplane::{ledger::Entry, wire},
    model::Device,
};

impl Maps {
    /// Repairs entries that differ from what an agent writes, because an agent was killed between two writes, or a
    /// write failed. The tunnels become those of the targets. The entries of taps keep only sessions that can be
    /// decoded. Pod-side entries are rewritten from their node-side entries, and those without one are removed.
    pub fn settle(&mut self) -> anyhow::Result<()> {
        self.settle_tunnels()?;
        for device in std::mem::take(&mut self.ledger.unsettled) {
            if let Some(entry) = self.ledger.taps.get(&device).cloned() {
                self.write(device, entry)?;
            }
        }
        let taps = self.ledger.taps.iter().filter(|(_, entry)| entry.head.pod_side.is_some());
        let taps: Vec<_> = taps.map(|(device, entry)| (*device, entry.clone())).collect();
        let is_of_a_tap = |nic: &Device| taps.iter().any(|(_, entry)| entry.head.pod_side() == Some(*nic));
        let left: Vec<_> = self.ledger.pod_sides.keys().filter(|nic| !is_of_a_tap(nic)).copied().collect();
        left.into_iter().try_for_each(|nic| self.remove_pod_side(nic))?;
        taps.iter().try_for_each(|(device, entry)| self.write_pod_side(*device, entry))
    }

    /// Writes the pod-side entry of a tap, if it has one that has changed.
    fn write_pod_side(&mut self, device: Device, entry: &Entry) -> anyhow::Result<()> {
        let Some(nic) = entry.head.pod_side() else { return Ok(()) };
        let tap = wire::encode_pod_side(device, entry);
        if self.ledger.pod_sides.get(&nic) != Some(&tap) {
            self.insert(nic, &tap)?;
            self.ledger.pod_sides.insert(nic, tap);
        }
        Ok(())
    }

    /// Writes the entry of a tap in one step, after its pod-side entry. If the tap has left its old pod side, removes
    /// that entry last.
    pub(super) fn write(&mut self, device: Device, entry: Entry) -> anyhow::Result<()> {
        self.write_pod_side(device, &entry)?;
        self.insert(device, &wire::encode_tap(&entry))?;
        let pod_side = entry.head.pod_side();
        let before = self.ledger.taps.insert(device, entry).and_then(|before| before.head.pod_side());
        self.ledger.drop_unused_filters();
        before.filter(|before| Some(*before) != pod_side).map_or(Ok(()), |nic| self.remove_pod_side(nic))
    }

    fn insert(&mut self, device: Device, tap: &abi::Tap) -> anyhow::Result<()> {
        let written = self.taps.insert(&key(device), &transmute!(*tap), 0);
        written.with_context(|| format!("cannot write the map entry of device {device}"))
    }

    /// Removes a pod-side entry.
    pub(super) fn remove_pod_side(&mut self, nic: Device) -> anyhow::Result<()> {
        found(self.taps.remove(&key(nic)))
            .with_context(|| format!("cannot remove the map entry of device {nic}"))?;
        self.ledger.pod_sides.remove(&nic);
        Ok(())
    }
}
