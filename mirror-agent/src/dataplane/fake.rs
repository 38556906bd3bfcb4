//! The dataplane's twin for tests: what is installed is a value, and ops can be made to fail.

use std::{collections::VecDeque, time::Duration};

use anyhow::bail;
use mirror_common::verdict::Hook;

use super::Dataplane;
use crate::model::{Actual, ActualTap, HookState, IfIndex, Op, Program, Tap};

/// An installed state that ops change, op by op.
#[derive(Default)]
pub(crate) struct Fake {
    pub(crate) actual: Actual,
    /// Every op that was tried, in order.
    pub(crate) tried: Vec<Op>,
    /// Ops that fail, once for each time that they stand here.
    pub(crate) failures: VecDeque<Op>,
    /// How long each op takes.
    pub(crate) takes: Duration,
}

impl Dataplane for Fake {
    async fn observe(&mut self) -> anyhow::Result<Actual> {
        Ok(self.actual.clone())
    }

    async fn apply(&mut self, op: &Op) -> anyhow::Result<()> {
        self.tried.push(op.clone());
        tokio::time::sleep(self.takes).await;
        if let Some(position) = self.failures.iter().position(|failure| failure == op) {
            self.failures.remove(position);
            bail!("injected failure of {op:?}");
        }
        apply(&mut self.actual, op);
        Ok(())
    }
}

/// What an op does to what is installed.
pub(crate) fn apply(actual: &mut Actual, op: &Op) {
    let mut change = |ifindex: IfIndex, change: &dyn Fn(&mut ActualTap)| {
        let empty =
            ActualTap { tap: None, ended: None, ingress: HookState::Absent, egress: HookState::Absent };
        let tap = actual.taps.entry(ifindex).or_insert_with(|| empty.clone());
        change(tap);
        if *tap == empty {
            actual.taps.remove(&ifindex);
        }
    };
    match op {
        Op::SetTarget(target) => actual.target = target.clone(),
        Op::PutTap(ifindex, tap) => change(*ifindex, &|installed| installed.tap = Some(Tap::clone(tap))),
        Op::RemoveTap(ifindex) => change(*ifindex, &|installed| installed.tap = None),
        Op::Attach(ifindex, Program::Deliver) => drop(actual.deliver.insert(*ifindex, HookState::Current)),
        Op::Detach(ifindex, Program::Deliver) => drop(actual.deliver.remove(ifindex)),
        Op::Attach(ifindex, program) => change(*ifindex, &|tap| *state(tap, *program) = HookState::Current),
        Op::Detach(ifindex, program) => change(*ifindex, &|tap| *state(tap, *program) = HookState::Absent),
    }
}

fn state(tap: &mut ActualTap, program: Program) -> &mut HookState {
    match program.hook() {
        Hook::Ingress => &mut tap.ingress,
        Hook::Egress => &mut tap.egress,
    }
}
