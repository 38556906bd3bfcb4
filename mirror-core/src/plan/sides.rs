//! Changes the side on which a tap sees ingress, in two steps.
//!
//! ```text
//! node side ──► NIC inside the pod     1 the entry for the NIC is written, the program attached: both sides see
//!                                      2 the node side ignores ingress
//! NIC inside the pod ──► node side     1 the node side sees ingress, too
//!                                      2 the entry for the NIC and the program there are removed
//! ```
//!
//! Each step is a separate plan, and the second step begins only after the first is installed. So no packet is
//! missed, whatever fails, unless the node side has no hook for them. If both sides see a packet, its mark prevents a
//! second copy: the packet carries the mark from the node side to the NIC. `plan` calls this module.

use std::collections::{BTreeMap, BTreeSet};

use super::is_missing;
use crate::model::{Actual, Device, HookState, PodSide, Program, Tap};

/// Sets the side of each tap for this plan: one step towards the wanted side. Returns the devices on which a tap will
/// see ingress in the next plan.
pub(super) fn settle(taps: &mut BTreeMap<Device, Tap>, actual: &Actual) -> BTreeSet<Device> {
    let mut coming = BTreeSet::new();
    let state = |device: Device, program| {
        actual.taps.get(&device).map_or(HookState::Absent, |installed| installed.state(program))
    };
    for (device, tap) in taps {
        let installed = actual.taps.get(device).and_then(|installed| installed.tap.as_ref());
        let installed = installed.filter(|installed| installed.head.owner.is_same(&tap.head.owner));
        let before = installed.and_then(|installed| installed.head.pod_side);
        match (&mut tap.head.pod_side, before) {
            (Some(side), before) => {
                let nic = Device::in_pod(tap.head.owner.netns, side.nic);
                // A program without its entry copies nothing. The program of an earlier agent copies.
                let has_entry = before.is_some_and(|before| before.nic == side.nic);
                let runs = matches!(state(nic, Program::TapIngress), HookState::Current | HookState::Stale);
                side.sees = has_entry && runs;
                if !side.sees {
                    coming.insert(nic);
                }
            }
            (None, Some(before)) if before.sees || is_missing(*device, Program::TapEgress, actual) => {
                tap.head.pod_side = Some(PodSide { sees: false, ..before });
                tap.head.exit = installed.and_then(|installed| installed.head.exit);
                coming.insert(*device);
            }
            (None, _) => {}
        }
    }
    coming
}
