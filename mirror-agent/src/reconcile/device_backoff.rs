//! [`DeviceBackoff`]: devices whose ops have failed, and the time of their next attempt. Pure; the loop calls it.
//!
//! One pod that cannot be tapped must not delay all others. A failed operation may cause events itself, which must not
//! trigger another attempt at once.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;

use super::RETRY;
use crate::{
    model::{Device, Op},
    util::backoff::Backoff,
};

/// The devices that wait.
#[derive(Default)]
pub(super) struct DeviceBackoff(BTreeMap<Device, Failed>);

struct Failed {
    /// The ops of the last attempt. A subset of them, left after a partial success, waits too; a different op is tried
    /// at once.
    ops: Vec<Op>,
    why: BTreeSet<String>,
    backoff: Backoff,
    until: Instant,
}

impl Failed {
    fn covers(&self, ops: &[Op]) -> bool {
        ops.iter().all(|op| self.ops.contains(op))
    }
}

impl DeviceBackoff {
    /// Returns the errors for which these ops of a device wait; `None` if they may be tried now.
    pub(super) fn why(&self, device: Device, ops: &[Op], now: Instant) -> Option<&BTreeSet<String>> {
        let failed = self.0.get(&device)?;
        (failed.covers(ops) && now < failed.until).then_some(&failed.why)
    }

    /// Records that the ops of a device failed. The wait doubles each time. Returns the errors to report. If the device
    /// no longer seems to exist, the first failure is not reported: either the next snapshot does not have the device,
    /// or the ops fail again.
    pub(super) fn failed(
        &mut self,
        device: Device,
        ops: &[Op],
        why: BTreeSet<String>,
        has_gone: bool,
        now: Instant,
    ) -> BTreeSet<String> {
        let before = self.0.get(&device).filter(|failed| failed.covers(ops));
        let mut backoff = before.map_or(RETRY, |failed| failed.backoff);
        let why = if has_gone && before.is_none() { BTreeSet::new() } else { why };
        let until = now + backoff.pause();
        self.0.insert(device, Failed { ops: ops.to_vec(), why: why.clone(), backoff, until });
        why
    }

    /// Forgets the devices without ops.
    pub(super) fn keep(&mut self, ops: &[Op]) {
        let busy: BTreeSet<_> = ops.iter().filter_map(Op::device).collect();
        self.0.retain(|device, _| busy.contains(device));
    }

    /// Forgets a device whose ops have not failed themselves, but wait for those of another device.
    pub(super) fn forget(&mut self, device: Device) {
        self.0.remove(&device);
    }

    /// The time of the next attempt.
    pub(super) fn next(&self) -> Option<Instant> {
        self.0.values().map(|failed| failed.until).min()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::model::{IfIndex, Program};

    #[test]
    fn what_fails_waits_longer_and_longer_and_what_changes_is_tried_at_once() {
        let (start, ms) = (Instant::now(), Duration::from_millis);
        let device = Device::on_node(IfIndex(7));
        let both = [Op::Attach(device, Program::TapEgress), Op::Attach(device, Program::TapIngress)];
        let attach = [Op::Attach(device, Program::TapIngress)];
        let detach = [Op::Detach(device, Program::TapIngress)];
        let why = BTreeSet::from(["no".to_owned()]);
        let mut held = DeviceBackoff::default();
        assert_eq!((held.why(device, &attach, start), held.next()), (None, None));
        held.failed(device, &both, why.clone(), false, start);
        assert_eq!(held.why(device, &attach, start), Some(&why), "the other one has succeeded");
        let mut now = start + ms(100);
        for wait in [200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 30_000, 30_000] {
            held.failed(device, &attach, why.clone(), false, now);
            assert_eq!(held.next(), Some(now + ms(wait)));
            assert_eq!(held.why(device, &attach, now + ms(wait - 1)), Some(&why));
            assert_eq!(held.why(device, &detach, now), None);
            assert_eq!(held.why(Device::on_node(IfIndex(8)), &attach, now), None);
            now += ms(wait);
            assert_eq!(held.why(device, &attach, now), None);
        }
        held.failed(device, &detach, why.clone(), false, now);
        assert_eq!(held.next(), Some(now + ms(100)));
        held.forget(device);
        assert_eq!(
            (held.why(device, &detach, now), held.next()),
            (None, None),
            "a forgotten failure is not tried again"
        );
        held.failed(device, &detach, why, false, now);
        held.keep(&detach);
        assert!(held.next().is_some());
        held.keep(&[]);
        assert_eq!(held.next(), None);
    }
}
