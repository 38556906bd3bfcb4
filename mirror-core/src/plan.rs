//! From what is installed to what is wanted, op by op.
//!
//! Pure, and total: `apply(plan(d, a)) == d`, `plan(d, d)` is empty, and every prefix of a plan is safe. Called by
//! the reconcile loop, which carries the ops out one by one and carries on after one that fails.

use mirror_common::verdict::Hook;

use crate::model::{Actual, ActualTap, Desired, HookState, IfIndex, Op, Program, Tap};

/// The ops that turn `actual` into `desired`.
///
/// A tap is added entry first, then hooks, and removed in the same order: a program without an entry copies
/// nothing, so neither a half-added nor a half-removed tap can copy for anybody but the pod that it is for.
/// Removals come first: a device that changed hands stops copying before anything else is done.
pub fn plan(desired: &Desired, actual: &Actual) -> Vec<Op> {
    let mut ops = Vec::new();
    for (ifindex, installed) in &actual.taps {
        let wanted = desired.taps.get(ifindex);
        if let Some(tap) = &installed.tap
            && wanted.is_none_or(|wanted| !same_tap(wanted, tap))
        {
            ops.push(Op::RemoveTap(*ifindex));
        }
        if wanted.is_none() {
            let attached =
                Program::TAP.into_iter().filter(|program| installed.state(*program) != HookState::Absent);
            ops.extend(attached.map(|program| Op::Detach(*ifindex, program)));
        }
    }
    if desired.target != actual.target {
        ops.push(Op::SetTarget(desired.target.clone()));
    }
    // Ahead of the taps, so that the first copy is cut already; and away again when no tap wants it any more.
    let deliver = desired.deliver();
    if let Some(ifindex) = deliver.filter(|ifindex| actual.deliver.get(ifindex) != Some(&HookState::Current))
    {
        ops.push(Op::Attach(ifindex, Program::Deliver));
    }
    for (ifindex, wanted) in &desired.taps {
        add(*ifindex, wanted, actual.taps.get(ifindex), &mut ops);
    }
    let idle = actual.deliver.keys().filter(|ifindex| Some(**ifindex) != deliver);
    ops.extend(idle.map(|ifindex| Op::Detach(*ifindex, Program::Deliver)));
    ops
}

/// Ops for one wanted tap.
fn add(ifindex: IfIndex, wanted: &Tap, installed: Option<&ActualTap>, ops: &mut Vec<Op>) {
    if installed.and_then(|installed| installed.tap.as_ref()) != Some(wanted) {
        ops.push(Op::PutTap(ifindex, Box::new(wanted.clone())));
    }
    let is_missing = |program: &Program| {
        installed.is_none_or(|installed| {
            installed.state(*program) != HookState::Current && !installed.lacks_hook(*program)
        })
    };
    let missing = Program::TAP.into_iter().filter(is_missing);
    ops.extend(missing.map(|program| Op::Attach(ifindex, program)));
}

/// Whether two taps of one ifindex are the same one, so that a change keeps its counters. Names are no part of it:
/// a device can be renamed, and one pod can follow another under the same name.
fn same_tap(a: &Tap, b: &Tap) -> bool {
    match (&a.owner.pod, &b.owner.pod) {
        (Some(pod_a), Some(pod_b)) => pod_a.uid == pod_b.uid && a.owner.netns == b.owner.netns,
        (None, None) => a.owner.nic == b.owner.nic,
        _ => false,
    }
}

/// What an op does to what is installed: what a plan counts on, and what the dataplane must do in the kernel.
pub fn apply(actual: &mut Actual, op: &Op) {
    let mut change = |ifindex: IfIndex, change: &dyn Fn(&mut ActualTap)| {
        let empty = ActualTap {
            tap: None,
            ended: None,
            ingress: HookState::Absent,
            egress: HookState::Absent,
            hidden: Vec::new(),
        };
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

#[cfg(test)]
mod tests;
