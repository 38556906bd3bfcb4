//! The last step of a round: carries out the ops of a plan, device by device.
//!
//! `plan` decides which ops may be tried after others have failed, and `device_backoff` how long a failed device
//! waits.

use std::{collections::BTreeSet, time::Duration};

use tokio::time::Instant;

use super::{Reconciler, log::log_op, memory::Decision};
use crate::{
    kernel::{
        dataplane::{Dataplane, says_gone},
        links::LinkTable,
    },
    model::{Actual, Device, Op},
    plan::Failures,
    report::Report,
    sources::PodSource,
};

/// The longest time that a round changes the installed state before the loop looks again. A hook can take the kernel
/// some milliseconds, and a change of the pods, above all a removal, must not wait for hundreds of hooks.
pub(super) const SLICE: Duration = Duration::from_millis(500);

/// The result of carrying out a plan.
#[derive(Default)]
pub(super) struct Carried {
    /// The errors that concern a single device only.
    pub(super) of_devices: BTreeSet<String>,
    /// The devices with unfinished ops.
    pub(super) incomplete: BTreeSet<Device>,
    /// The time of the round did not suffice.
    pub(super) is_behind: bool,
}

impl<P: PodSource, L: LinkTable, D: Dataplane> Reconciler<P, L, D> {
    /// Carries out the ops of a decision, as far as they succeed and as the time of this round suffices. Attaches
    /// nothing at the `resting` hooks.
    pub(super) async fn carry_out(
        &mut self,
        Decision { desired, ops, resting, .. }: &Decision,
        actual: &Actual,
        report: &mut Report,
    ) -> Carried {
        self.memory.backoff.keep(ops);
        report.unwritten.clear();
        let mut carried = Carried::default();
        let Carried { of_devices, incomplete, is_behind } = &mut carried;
        let mut failures = Failures::none(ops, actual);
        let mut spent = Duration::ZERO;
        // The ops of a device are consecutive. They are logged when all of them have succeeded.
        for ops in ops.chunk_by(|a, b| a.device() == b.device()) {
            let device = ops.first().and_then(Op::device);
            let held = device.and_then(|device| self.memory.backoff.why(device, ops, Instant::now()));
            *is_behind |= held.is_none() && spent >= SLICE;
            if held.is_some() || spent >= SLICE {
                of_devices.extend(held.into_iter().flatten().cloned());
                incomplete.extend(device);
                ops.iter().for_each(|op| failures.add(op));
                continue;
            }
            // An op blocks the thread for some milliseconds, so other tasks may run between two devices.
            tokio::task::yield_now().await;
            let chunk_began = Instant::now();
            let (mut errors, mut has_gone) = (BTreeSet::new(), true);
            let mut is_whole = true;
            for op in ops {
                let rests =
                    matches!(op, Op::Attach(device, program) if resting.contains(&(*device, *program)));
                if rests || !failures.allow(op) {
                    is_whole = false;
                    failures.add(op);
                    continue;
                }
                let began = Instant::now();
                let applied = self.dataplane.apply(op).await;
                self.metrics.op(op, began.elapsed(), applied.is_err());
                if let Err(error) = applied {
                    failures.add(op);
                    has_gone &= says_gone(&error);
                    let error = format!("{error:#}");
                    if let Op::SetTarget(name, _) = op {
                        report.unwritten.insert(name.clone(), error.clone());
                    }
                    errors.insert(error);
                }
            }
            if !is_whole || !errors.is_empty() {
                incomplete.extend(device);
            }
            if !errors.is_empty() {
                match device {
                    Some(device) => {
                        of_devices.extend(self.memory.backoff.failed(
                            device,
                            ops,
                            errors,
                            has_gone,
                            Instant::now(),
                        ));
                    }
                    None => report.failures.extend(errors),
                }
                continue;
            }
            // The time of failed ops does not count, or a slow failure would starve all other devices.
            spent += chunk_began.elapsed();
            if !is_whole {
                device.into_iter().for_each(|device| self.memory.backoff.forget(device));
                continue;
            }
            ops.iter().for_each(|op| log_op(op, desired, actual));
            if let Some(woken) = self.woken.filter(|_| ops.iter().any(|op| is_new_tap(op, actual))) {
                self.metrics.new_tap(woken.elapsed());
            }
        }
        carried
    }
}

/// Whether an op adds a tap to a device that had none, or had the tap of another owner.
fn is_new_tap(op: &Op, actual: &Actual) -> bool {
    let Op::PutTap(device, head) = op else { return false };
    let installed = actual.taps.get(device).and_then(|installed| installed.tap.as_ref());
    installed.is_none_or(|installed| !installed.head.owner.is_same(&head.owner))
}
