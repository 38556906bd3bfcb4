//! How a tap changes the side on which it sees what reaches its pod.
//!
//! ```text
//!  node's end ──► NIC inside the pod    1 the entry for the NIC is written, the program attached: both see
//!                                       2 the node's end leaves it to the NIC
//!  NIC ──► node's end                   1 the node's end sees, too
//!                                       2 the entry for the NIC and the program there go
//! ```
//!
//! Each step is a plan of its own, which has found the step before in place. So no packet is missed, whatever fails. A
//! packet that both see carries the mark of its copy from the node's end to the NIC. `plan` calls it.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::{Actual, Device, HookState, PodSide, Program, Tap};

/// Gives each tap the side for this plan, on its way to the wanted side. Returns the devices on which a tap is to see what
/// reaches its pod in the next plan.
pub(super) fn settle(taps: &mut BTreeMap<Device, Tap>, actual: &Actual) -> BTreeSet<Device> {
    let mut coming = BTreeSet::new();
    let state = |device: Device, program| {
        actual.taps.get(&device).map_or(HookState::Absent, |installed| installed.state(program))
    };
    for (device, tap) in taps {
        let installed = actual.taps.get(device).and_then(|installed| installed.tap.as_ref());
        let installed = installed.filter(|installed| installed.owner.is_same(&tap.owner));
        let before = installed.and_then(|installed| installed.pod_side);
        match (&mut tap.pod_side, before) {
            (Some(side), before) => {
                let nic = Device::in_pod(tap.owner.netns, side.nic);
                // Without its entry a program copies nothing. That of an earlier agent copies.
                let has_entry = before.is_some_and(|before| before.nic == side.nic);
                let runs = matches!(state(nic, Program::TapIngress), HookState::Current | HookState::Stale);
                side.sees = has_entry && runs;
                if !side.sees {
                    coming.insert(nic);
                }
            }
            (None, Some(before))
                if before.sees || state(*device, Program::TapEgress) != HookState::Current =>
            {
                tap.pod_side = Some(PodSide { sees: false, ..before });
                tap.exit = installed.and_then(|installed| installed.exit);
                coming.insert(*device);
            }
            (None, _) => {}
        }
    }
    coming
}
