//! The plan: the ops that turn the installed state into the wanted state.
//!
//! Pure and total. [`plan`] computes the ops, [`Failures`] decides which of them can still be tried after others have
//! failed, and [`apply`] defines the effect of each op. The property tests check, for every choice of failing ops:
//!
//! * A plan whose ops all succeed leads to the wanted state, and the next plan is empty. A tap that changes its side
//!   takes two plans ([`sides`]).
//! * After any failures, a tap copies only for its own pod, in a requested form, and never a whole packet that must be
//!   cut. Counters and budgets of one owner never become those of another.
//! * The next plan repairs the effects of failed ops.
//!
//! The reconcile loop calls this module.

mod fit;
mod keys;
mod sides;

use std::collections::{BTreeMap, BTreeSet};

use mirror_common::abi::MAX_SESSIONS_PER_TAP;

pub use self::fit::Unfit;
use crate::model::{
    Actual, ActualTap, Desired, Device, HookState, IfIndex, MirrorId, Op, Program, Session, Tap, TapHead,
    Target, TargetName,
};

/// The ops to apply, and the sessions that do not fit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// The ops in order.
    pub ops: Vec<Op>,
    /// The sessions that do not fit into the kernel's tables, or whose filter the kernel rejects. After the plan they
    /// are not installed in any form: a narrower filter that does not fit must not leave the wider filter active.
    pub unfit: Unfit,
    /// The devices on which a tap will see ingress after the next plan, if its program runs there by then.
    pub coming: BTreeSet<Device>,
}

/// Computes the plan that turns `actual` into `desired`, as far as it fits.
///
/// The order of the ops is: removals of taps and sessions; targets and limits; the second stage; taps and sessions;
/// then removals of unused objects, and of hooks, which are slow. If a new session of the same tap replaces a session,
/// the old one is removed just after it, so that no packet is missed; if the tables do not have room for both, just
/// before it. A target that no installed session uses is removed before new ones are written, because they could need
/// its slot. A tap is added entry first, then sessions, then hooks, and removed in the same order. A program without an
/// entry copies nothing, so neither a half-added nor a half-removed tap copies for another pod.
pub fn plan(desired: &Desired, actual: &Actual) -> Plan {
    let (mut taps, unfit) = fit::fit(desired, actual);
    let coming = sides::settle(&mut taps, actual);
    let mut ops = Vec::new();
    remove(&taps, actual, &mut ops);
    let in_use = targets_in_use(actual);
    let forgotten = actual.targets.keys().filter(|name| !desired.targets.contains_key(name));
    let (needed, unused): (Vec<_>, Vec<_>) = forgotten.partition(|name| in_use.contains_key(name));
    ops.extend(unused.into_iter().cloned().map(Op::RemoveTarget));
    ops.extend(retarget(&desired.targets, actual));
    let ceilings = desired.limits.ceilings(desired.owners());
    if actual.ceilings != ceilings {
        ops.push(Op::SetCeilings(Box::new(ceilings)));
    }
    let deliver = desired.deliver();
    let attached = |ifindex: &IfIndex| actual.deliver.get(ifindex) == Some(&HookState::Current);
    for ifindex in deliver.iter().filter(|ifindex| !attached(ifindex)) {
        ops.push(Op::Attach(Device::on_node(*ifindex), Program::Deliver));
        let theirs = desired.targets.iter().filter(|(_, target)| target.ifindex() == Some(*ifindex));
        ops.extend(theirs.map(|(name, target)| Op::SetTarget(name.clone(), target.with_cuts(true))));
    }
    let beside = fit::fits_beside(&taps, actual);
    let hub = desired.hub.filter(|hub| actual.hubs.get(hub) != Some(&HookState::Current));
    ops.extend(hub.map(|hub| Op::Attach(Device::on_node(hub), Program::Hub)));
    for (device, tap) in &taps {
        add(*device, tap, actual, beside, &mut ops);
    }
    // Hooks that no tap needs any more.
    detach(&taps, actual, &mut ops);
    // Second stages and targets that no session needs any more.
    for ifindex in actual.deliver.keys().filter(|ifindex| !deliver.contains(ifindex)) {
        let theirs = desired
            .targets
            .iter()
            .filter(|(name, target)| target.ifindex() == Some(*ifindex) && cuts(name, target, actual));
        ops.extend(theirs.map(|(name, target)| Op::SetTarget(name.clone(), target.with_cuts(false))));
        ops.push(Op::Detach(Device::on_node(*ifindex), Program::Deliver));
    }
    let unused = actual.hubs.keys().filter(|hub| desired.hub != Some(**hub));
    ops.extend(unused.map(|hub| Op::Detach(Device::on_node(*hub), Program::Hub)));
    ops.extend(needed.into_iter().cloned().map(Op::RemoveTarget));
    Plan { ops, unfit, coming }
}

/// Keeps the budgets of ended sessions if their authors have not changed anything: new defaults of the node do not
/// restart a mirror.
pub fn stay_ended(wanted: &mut BTreeMap<Device, Tap>, actual: &Actual) {
    for (device, tap) in wanted {
        let Some(installed) = actual.taps.get(device) else { continue };
        let before = installed.tap.as_ref().filter(|before| before.head.owner.is_same(&tap.head.owner));
        for mirror in installed.ended.keys() {
            let before = before.and_then(|before| before.sessions.get(mirror));
            if let (Some(before), Some(session)) = (before, tap.sessions.get_mut(mirror))
                && before.asks_the_same(session)
            {
                session.settings.budget = before.settings.budget;
            }
        }
    }
}

/// The targets of the installed sessions, each with the devices of these sessions.
fn targets_in_use(actual: &Actual) -> BTreeMap<TargetName, BTreeSet<Device>> {
    let mut in_use = BTreeMap::<_, BTreeSet<_>>::new();
    for (device, installed) in &actual.taps {
        for session in installed.tap.iter().flat_map(|tap| tap.sessions.values()) {
            in_use.entry(session.target.clone()).or_default().insert(*device);
        }
    }
    in_use
}

/// Returns the ops that write the targets. Before the pods are known, these are the only ops.
pub fn retarget(targets: &BTreeMap<TargetName, Target>, actual: &Actual) -> Vec<Op> {
    let now = targets.iter().map(|(name, target)| (name, target.with_cuts(cuts(name, target, actual))));
    let changed = now.filter(|(name, target)| actual.targets.get(name) != Some(target));
    changed.map(|(name, target)| Op::SetTarget(name.clone(), target)).collect()
}

/// Whether copies to a target can be cut by the attached programs. The program of an earlier agent cuts if that agent
/// recorded it.
fn cuts(name: &TargetName, target: &Target, actual: &Actual) -> bool {
    let Some(ifindex) = target.ifindex() else { return false };
    let before = actual.targets.get(name).and_then(Target::device);
    match actual.deliver.get(&ifindex) {
        Some(HookState::Current) => !actual.passed_by.contains_key(&ifindex),
        Some(HookState::Stale | HookState::Unknown) => {
            before.is_some_and(|before| before.cuts && before.ifindex == Some(ifindex))
        }
        Some(HookState::Absent | HookState::Dead) | None => false,
    }
}

/// Adds the removals. A tap for a former owner stops copying before all other ops.
fn remove(wanted: &BTreeMap<Device, Tap>, actual: &Actual, ops: &mut Vec<Op>) {
    for (device, installed) in &actual.taps {
        let Some(tap) = &installed.tap else { continue };
        match wanted.get(device).filter(|wanted| tap.head.owner.is_same(&wanted.head.owner)) {
            None => ops.push(Op::RemoveTap(*device)),
            Some(wanted) => {
                let (gone, _) = leaving(tap, wanted);
                ops.extend(gone.into_iter().map(|mirror| Op::RemoveSession(*device, mirror.clone())));
            }
        }
    }
}

/// The sessions of a tap that are no longer wanted: those that are only removed, and those that are replaced.
fn leaving<'a>(tap: &'a Tap, wanted: &Tap) -> (Vec<&'a MirrorId>, Vec<&'a MirrorId>) {
    let mut gone: Vec<_> =
        tap.sessions.keys().filter(|mirror| !wanted.sessions.contains_key(mirror)).collect();
    let new = wanted.sessions.keys().filter(|mirror| !tap.sessions.contains_key(mirror)).count();
    let replaced = gone.split_off(gone.len().saturating_sub(new));
    (gone, replaced)
}

/// Detaches the programs from hooks that no tap needs.
fn detach(wanted: &BTreeMap<Device, Tap>, actual: &Actual, ops: &mut Vec<Op>) {
    let hooks: BTreeSet<_> = wanted.iter().flat_map(|(device, tap)| tap.head.hooks(*device)).collect();
    for (device, installed) in &actual.taps {
        let attached =
            Program::TAP.into_iter().filter(|program| installed.state(*program) != HookState::Absent);
        let leaving = attached.filter(|program| !hooks.contains(&(*device, *program)));
        ops.extend(leaving.map(|program| Op::Detach(*device, program)));
    }
}

/// Adds the ops for one wanted tap. `beside`: the tables have room for the sessions of before and after.
fn add(device: Device, wanted: &Tap, actual: &Actual, beside: bool, ops: &mut Vec<Op>) {
    let entry = actual.taps.get(&device).and_then(|installed| installed.tap.as_ref());
    let entry = entry.filter(|tap| tap.head.owner.is_same(&wanted.head.owner));
    if entry.is_none_or(|tap| tap.head != wanted.head) {
        ops.push(Op::PutTap(device, Box::new(wanted.head.clone())));
    }
    let (_, replaced) = entry.map(|tap| leaving(tap, wanted)).unwrap_or_default();
    let most = wanted.sessions.len() + replaced.len();
    let mut removals = replaced.into_iter().map(|mirror| Op::RemoveSession(device, mirror.clone()));
    if !beside || most > MAX_SESSIONS_PER_TAP {
        ops.extend(&mut removals);
    }
    for (mirror, session) in &wanted.sessions {
        let op = match entry.and_then(|tap| tap.sessions.get(mirror)) {
            None => Op::AddSession,
            Some(installed) if installed != session => Op::ChangeSession,
            Some(_) => continue,
        };
        ops.push(op(device, mirror.clone(), Box::new(session.clone())));
    }
    ops.extend(removals);
    let missing = wanted.head.hooks(device).filter(|(at, program)| is_missing(*at, *program, actual));
    ops.extend(missing.map(|(at, program)| Op::Attach(at, program)));
}

/// Whether a program of a tap has yet to be attached at a device. A device without the hook never gets it.
fn is_missing(device: Device, program: Program, actual: &Actual) -> bool {
    actual.taps.get(&device).is_none_or(|installed| {
        installed.state(program) != HookState::Current && !installed.lacks_hook(program)
    })
}

/// The failed ops of a plan, and the ops that must not be tried after them.
///
/// A failed op does not stop ops that are safe without it: removals are always tried, and so are all ops of other
/// devices. If a second stage fails, only the sessions that need it for cutting are stopped.
#[derive(Debug, Clone)]
pub struct Failures {
    devices: BTreeSet<Device>,
    /// Targets that were not written.
    targets: BTreeSet<TargetName>,
    /// Targets that were written, but whose second stage failed.
    uncut: BTreeSet<TargetName>,
    limits: bool,
    in_use: BTreeMap<TargetName, BTreeSet<Device>>,
    /// The tap of each NIC inside a pod that is the pod side of a tap.
    taps: BTreeMap<Device, Device>,
}

impl Failures {
    /// No failures yet, for the ops of a plan for this state.
    pub fn none(ops: &[Op], actual: &Actual) -> Self {
        let installed =
            actual.taps.iter().filter_map(|(device, of)| Some((of.tap.as_ref()?.head.pod_side()?, *device)));
        let put = ops.iter().filter_map(|op| match op {
            Op::PutTap(device, head) => Some((head.pod_side()?, *device)),
            _ => None,
        });
        Self {
            taps: installed.chain(put).collect(),
            devices: BTreeSet::new(),
            targets: BTreeSet::new(),
            uncut: BTreeSet::new(),
            limits: false,
            in_use: targets_in_use(actual),
        }
    }

    /// Records an op that failed or was not tried.
    pub fn add(&mut self, op: &Op) {
        match op {
            Op::SetTarget(name, target) => {
                let failed =
                    if self.lacks_second_stage(target) { &mut self.uncut } else { &mut self.targets };
                failed.insert(name.clone());
            }
            Op::SetCeilings(_) => self.limits = true,
            // The other sessions of the device do not depend on it.
            Op::AddSession(..) => {}
            _ => self.devices.extend(op.device()),
        }
    }

    /// Whether a target would be marked as cutting although its second stage could not be attached.
    fn lacks_second_stage(&self, target: &Target) -> bool {
        let cutting = target.device().filter(|target| target.cuts);
        let device = cutting.and_then(|target| target.ifindex).map(Device::on_node);
        device.is_some_and(|device| self.devices.contains(&device))
    }

    /// Whether an op can be tried.
    pub fn allow(&self, op: &Op) -> bool {
        // The pod side of a tap uses the sessions of the tap.
        let tap = |device: &Device| self.taps.get(device).is_some_and(|tap| self.devices.contains(tap));
        let is_whole = |device: &Device| !self.limits && !self.devices.contains(device) && !tap(device);
        match op {
            Op::SetTarget(_, target) => !self.lacks_second_stage(target),
            // If a session did not get its new target, the old target is still needed.
            Op::RemoveTarget(name) => {
                self.in_use.get(name).is_none_or(|devices| devices.is_disjoint(&self.devices))
            }
            // Copies would no longer be cut.
            Op::Detach(_, Program::Deliver) => self.devices.is_empty() && self.targets.is_empty(),
            Op::PutTap(device, _) | Op::Attach(device, Program::TapIngress | Program::TapEgress) => {
                is_whole(device)
            }
            // A new session waits for its target. An existing session is changed, and does not copy what it could not
            // cut.
            Op::AddSession(device, _, session) => {
                let is_uncut = session.settings.snaplen.is_some() && self.uncut.contains(&session.target);
                is_whole(device) && !is_uncut && !self.targets.contains(&session.target)
            }
            Op::ChangeSession(device, ..) => is_whole(device),
            Op::SetCeilings(_)
            | Op::RemoveTap(_)
            | Op::RemoveSession(..)
            | Op::Attach(_, Program::Deliver | Program::Hub)
            | Op::Detach(..) => true,
        }
    }
}

/// Applies an op to the installed state. A plan assumes this effect, and the dataplane implements it in the kernel.
///
/// # Errors
///
/// An object that the op needs is missing. The dataplane returns an error, too.
pub fn apply(actual: &mut Actual, op: &Op) -> Result<(), &'static str> {
    match op {
        Op::SetTarget(name, target) => drop(actual.targets.insert(name.clone(), target.clone())),
        Op::RemoveTarget(name) => drop(actual.targets.remove(name)),
        Op::SetCeilings(ceilings) => actual.ceilings = **ceilings,
        Op::Attach(device, Program::Deliver) => {
            actual.deliver.insert(device.ifindex, HookState::Current);
        }
        Op::Detach(device, Program::Deliver) => {
            actual.deliver.remove(&device.ifindex);
            actual.passed_by.remove(&device.ifindex);
        }
        Op::Attach(device, Program::Hub) => {
            actual.hubs.insert(device.ifindex, HookState::Current);
        }
        Op::Detach(device, Program::Hub) => {
            actual.hubs.remove(&device.ifindex);
        }
        Op::PutTap(device, head) => {
            let tap = &mut actual.taps.entry(*device).or_default().tap;
            match tap {
                Some(tap) if !tap.head.owner.is_same(&head.owner) => {
                    return Err("the device is tapped for another owner");
                }
                _ => {}
            }
            let sessions = tap.take().map(|tap| tap.sessions).unwrap_or_default();
            *tap = Some(Tap { head: TapHead::clone(head), sessions });
        }
        Op::RemoveTap(device) => change(actual, *device, |installed| {
            installed.tap = None;
            installed.ended.clear();
        }),
        Op::AddSession(device, mirror, session) => {
            if !actual.targets.contains_key(&session.target) {
                return Err("there is no such target");
            }
            let sessions = sessions_of(actual, *device)?;
            if sessions.contains_key(mirror) {
                return Err("there is such a session already");
            }
            sessions.insert(mirror.clone(), Session::clone(session));
        }
        Op::ChangeSession(device, mirror, session) => {
            if !actual.targets.contains_key(&session.target) {
                return Err("there is no such target");
            }
            let installed =
                sessions_of(actual, *device)?.get_mut(mirror).ok_or("there is no such session")?;
            let goes_on = installed.asks_the_same(session);
            *installed = Session::clone(session);
            if !goes_on {
                change(actual, *device, |installed| {
                    installed.ended.remove(mirror);
                });
            }
        }
        Op::RemoveSession(device, mirror) => change(actual, *device, |installed| {
            if let Some(tap) = &mut installed.tap {
                tap.sessions.remove(mirror);
            }
            installed.ended.remove(mirror);
        }),
        Op::Attach(device, program) => {
            *actual.taps.entry(*device).or_default().state_mut(*program) = HookState::Current;
        }
        Op::Detach(device, program) => {
            change(actual, *device, |installed| *installed.state_mut(*program) = HookState::Absent);
        }
    }
    Ok(())
}

/// Removes something from a device.
fn change(actual: &mut Actual, device: Device, change: impl FnOnce(&mut ActualTap)) {
    if let Some(installed) = actual.taps.get_mut(&device) {
        change(installed);
        if *installed == ActualTap::default() {
            actual.taps.remove(&device);
        }
    }
}

fn sessions_of(
    actual: &mut Actual,
    device: Device,
) -> Result<&mut BTreeMap<MirrorId, Session>, &'static str> {
    let tap = actual.taps.get_mut(&device).and_then(|installed| installed.tap.as_mut());
    Ok(&mut tap.ok_or("the device is not tapped")?.sessions)
}

#[cfg(test)]
mod tests;
