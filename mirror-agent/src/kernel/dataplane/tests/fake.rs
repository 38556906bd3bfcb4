//! A [`Dataplane`] for tests: the installed state is a value, and ops can be made to fail.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    io::Error,
    time::Duration,
};

use anyhow::Context as _;
use tokio::time::Instant;

use crate::{
    kernel::dataplane::{Dataplane, TapCount},
    model::{Actual, Capacity, Device, HookState, IfIndex, Op},
    plan::apply,
};

/// The installed state, changed by each op.
pub(crate) struct Fake {
    pub(crate) actual: Actual,
    /// Every op that was tried, in order.
    pub(crate) tried: Vec<Op>,
    /// Ops that fail, once for each time that they are listed here.
    pub(crate) failures: VecDeque<Op>,
    /// The number of the next ops that fail, whichever they are.
    pub(crate) fails: usize,
    /// Makes these failures say that the device no longer exists.
    pub(crate) says_gone: bool,
    /// The duration of each op.
    pub(crate) takes: Duration,
    /// The time at which a poll of the hooks finds a change.
    pub(crate) look_due: Option<Instant>,
    /// The devices at which each program is removed as soon as it is attached.
    pub(crate) removed: BTreeSet<Device>,
    /// The counts that the taps report.
    pub(crate) seen: BTreeMap<Device, TapCount>,
    /// The programs of other software at the devices of the node.
    pub(crate) programs: BTreeMap<IfIndex, BTreeSet<String>>,
    /// The number of requests for the programs of a device.
    pub(crate) asked: usize,
}

impl Default for Fake {
    fn default() -> Self {
        Self {
            actual: Actual::empty(Capacity { taps: 100, sessions: 800, filters: 100, instructions: 100_000 }),
            tried: Vec::new(),
            failures: VecDeque::new(),
            fails: 0,
            says_gone: false,
            takes: Duration::ZERO,
            look_due: None,
            removed: BTreeSet::new(),
            seen: BTreeMap::new(),
            programs: BTreeMap::new(),
            asked: 0,
        }
    }
}

impl Dataplane for Fake {
    async fn observe(&mut self) -> anyhow::Result<Actual> {
        Ok(self.actual.clone())
    }

    fn look_due(&self) -> Option<Instant> {
        self.look_due
    }

    async fn look(&mut self) -> bool {
        self.look_due.take().is_some()
    }

    fn seen(&mut self, devices: &[Device]) -> anyhow::Result<BTreeMap<Device, TapCount>> {
        Ok(devices.iter().filter_map(|device| Some((*device, *self.seen.get(device)?))).collect())
    }

    async fn programs_at(&mut self, device: IfIndex) -> anyhow::Result<BTreeSet<String>> {
        self.asked += 1;
        Ok(self.programs.get(&device).cloned().unwrap_or_default())
    }

    async fn apply(&mut self, op: &Op) -> anyhow::Result<()> {
        self.tried.push(op.clone());
        tokio::time::sleep(self.takes).await;
        let listed = self.failures.iter().position(|failure| failure == op);
        if listed.is_some() || self.fails > 0 {
            match listed {
                Some(position) => drop(self.failures.remove(position)),
                None => self.fails -= 1,
            }
            let error = if self.says_gone {
                Error::from_raw_os_error(libc::ENODEV)
            } else {
                Error::other("injected")
            };
            return Err(error).with_context(|| format!("injected failure of {op:?}"));
        }
        apply(&mut self.actual, op).map_err(anyhow::Error::msg)?;
        if let Op::Attach(device, program) = op
            && self.removed.contains(device)
            && let Some(installed) = self.actual.taps.get_mut(device)
        {
            *installed.state_mut(*program) = HookState::Dead;
        }
        Ok(())
    }
}
