//! [`Memory`]: the state that lasts between rounds, and the two steps of a round that only compute.
//!
//! [`Memory::decide`] turns the state of the node into ops, and [`Memory::conclude`] the result of the ops into the
//! report. Both log changes; they do no other I/O, and get the time from their caller.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use mirror_core::{destination::Destination, exit, hidden, targets};
use tokio::time::Instant;

use super::{
    carry_out::Carried,
    coverage::Watch,
    deleted::DeletedPods,
    device_backoff::DeviceBackoff,
    devices::Devices,
    expected::{self, Expected},
    log::LogDedup,
    look::Node,
    mirrored::{found, installed, mirrored},
    removed_programs::RemovedPrograms,
    routes::{self, Routes},
    schedule::Schedule,
};
use crate::{
    mirror_iface::MirrorIfaces,
    model::{
        Actual, ActualTap, Desired, Device, IfIndex, MirrorId, Op, Pod, Program, RingId, Tap, Target,
        TargetName, TargetResource,
    },
    plan::{Plan, plan, retarget, stay_ended},
    report::{Mirrors, Report},
    select::{Choice, Coverage, Filters, Policy, Readers, Selection, Skipped, coverage},
    settings::{Budget, Rate},
};

/// The longest wait while a session has a budget, so that the report soon shows that the budget has ended. The kernel
/// ends it without the agent.
const BUDGET_TICK: Duration = Duration::from_secs(1);
/// The time for which a target is down before its mirrors no longer cover their pods. The pod of a collector is replaced
/// sooner.
const TARGET_GRACE: Duration = Duration::from_secs(10);
/// The time that an unused program of a filter stays: much longer than a packet takes at a tap.
const LEFTOVERS: Duration = Duration::from_secs(1);

/// The state that lasts between rounds.
pub(super) struct Memory {
    pub(super) policy: Policy,
    pub(super) filters: Filters,
    /// The targets that the agent was started with.
    pub(super) own_targets: BTreeMap<TargetName, Destination>,
    /// The rate limits of targets that have one.
    pub(super) max_rates: BTreeMap<TargetName, Rate>,
    pub(super) mirrors: MirrorIfaces,
    /// The agent has passed the checks of its start.
    pub(super) started: bool,
    pub(super) expected: Expected,
    pub(super) deleted: DeletedPods,
    pub(super) coverage: Watch,
    pub(super) routes: Routes,
    pub(super) backoff: DeviceBackoff,
    pub(super) devices: Devices,
    pub(super) removed: RemovedPrograms,
    pub(super) log: LogDedup,
    /// The mirrors that an earlier agent has left; `None` before the first read.
    pub(super) found: Option<Arc<Mirrors>>,
    /// The targets that accept no copies, and since when.
    down: BTreeMap<TargetName, Instant>,
    /// The next round without an event.
    pub(super) schedule: Schedule,
}

/// The inputs of a round: pods, targets and readers, and the mirrors that follow from pods and resources.
pub(super) struct Inputs<'a> {
    /// The listed pods; `None` before the first list.
    pub(super) listed: Option<&'a [Pod]>,
    pub(super) mirror_targets: &'a [TargetResource],
    pub(super) readers: &'a Readers,
    pub(super) choice: Choice<'a>,
}

/// The result of [`Memory::decide`].
pub(super) struct Decision {
    pub(super) desired: Desired,
    pub(super) ops: Vec<Op>,
    /// The time of the decision.
    at: Instant,
    /// The hooks at which nothing is attached in this round.
    pub(super) resting: BTreeSet<(Device, Program)>,
    /// The end of the first of these rests.
    rests_until: Option<Instant>,
    /// The NICs at which a tap will see packets to its pod only after the next round.
    coming: BTreeSet<Device>,
    misfits: BTreeSet<(Device, MirrorId)>,
    /// The reasons that are known before the ops.
    skipped: Vec<Skipped>,
}

impl Memory {
    pub(super) fn new(policy: Policy, mirrors: MirrorIfaces) -> Self {
        Self {
            own_targets: policy.targets.clone(),
            max_rates: BTreeMap::new(),
            policy,
            filters: Filters::default(),
            mirrors,
            started: false,
            expected: Expected::default(),
            deleted: DeletedPods::default(),
            coverage: Watch::default(),
            routes: Routes::default(),
            backoff: DeviceBackoff::default(),
            devices: Devices::default(),
            removed: RemovedPrograms::default(),
            log: LogDedup::default(),
            found: None,
            down: BTreeMap::new(),
            schedule: Schedule::new(Instant::now()),
        }
    }

    /// Returns the state to install, and the ops that lead to it from the state of the node.
    pub(super) fn decide(
        &mut self,
        inputs: &Inputs<'_>,
        node: &Node,
        mut selection: Selection,
        report: &mut Report,
        now: Instant,
    ) -> Decision {
        let Node { links, actual, .. } = node;
        report.found = Arc::clone(self.found.get_or_insert_with(|| Arc::new(found(actual))));
        let mut expected = expected::of(&inputs.choice.wanted, &selection.skipped);
        selection.skipped.retain(|skipped| {
            let is_deleted = skipped.pod.as_ref().is_some_and(|pod| self.deleted.has(pod));
            !(is_deleted && skipped.why.is_passing())
        });
        let targets = self.targets(inputs, node, &mut expected, report);
        let devices = links.host.keys().copied().collect();
        let wait = self.expected.wait(expected, devices, now);
        self.schedule.after(now, wait, "a pod is expected");
        self.log.ended(actual);
        let without_relay = self.devices.without_relay(&selection.taps, &self.policy);
        stay_ended(&mut selection.taps, actual);
        exit::stay_without(&mut selection.taps, &actual.taps, &self.policy);
        let hub = exit::hub(links).map(|hub| hub.ifindex);
        let (desired, Plan { ops, unfit, coming }) =
            self.plan(targets, selection.taps, hub, actual, inputs.listed.is_some());
        let mut sessions = desired.taps.values().flat_map(|tap| tap.sessions.values());
        let may_end = sessions.any(|session| session.settings.budget != Budget::default());
        self.schedule.after(now, may_end.then_some(BUDGET_TICK), "a session may use up its budget");
        let leaves = ops.iter().any(|op| op.leaves_filter() || op.leaves_exit());
        self.schedule.after(
            now,
            leaves.then_some(LEFTOVERS),
            "no session or tap uses a program or a relay device",
        );
        let (resting, rests_until) = self.removed.resting(now);
        let misfits = unfit.keys().cloned().collect();
        let unfit = unfit.into_iter().filter_map(|((device, mirror), why)| {
            Some(Skipped::of_nic(&desired.taps.get(&device)?.head.owner, Some(&mirror), why))
        });
        let known = selection.skipped.into_iter().chain(unfit);
        let skipped = known.chain(hidden::of_taps(&desired, actual)).chain(without_relay).collect();
        Decision { desired, ops, at: now, resting, rests_until, coming, misfits, skipped }
    }

    /// Returns the wanted state, and the plan that leads to it.
    fn plan(
        &self,
        targets: BTreeMap<TargetName, Target>,
        taps: BTreeMap<Device, Tap>,
        hub: Option<IfIndex>,
        actual: &Actual,
        is_listed: bool,
    ) -> (Desired, Plan) {
        let limits = self.policy.limits;
        if is_listed {
            // A tap that moves back to the node side still copies through its relay device in this round.
            let installed = actual.taps.values().filter_map(|installed| installed.tap.as_ref());
            let hub = hub.filter(|_| taps.values().chain(installed).any(|tap| tap.head.exit.is_some()));
            let desired = Desired { targets, limits, taps, hub };
            let plan = plan(&desired, actual);
            (desired, plan)
        } else {
            // Without a complete list, the taps that an earlier agent has installed stay in force.
            let plan = Plan { ops: retarget(&targets, actual), ..Plan::default() };
            (Desired { targets, limits, taps: BTreeMap::new(), hub: None }, plan)
        }
    }

    /// Completes the report of a round after its ops.
    pub(super) fn conclude(
        &mut self,
        inputs: Inputs<'_>,
        Node { links, actual, shows_redirects }: &Node,
        decision: Decision,
        Carried { mut incomplete, is_behind, .. }: Carried,
        report: &mut Report,
        now: Instant,
    ) {
        let Decision { desired, at, resting, rests_until, coming, misfits, skipped, .. } = decision;
        let Inputs { listed, mirror_targets, readers, choice } = inputs;
        let rests = resting.iter().any(|(device, _)| incomplete.contains(device));
        self.schedule.at(rests_until.filter(|_| rests), "a removed program is attached again");
        let is_moving = !coming.is_subset(&incomplete);
        self.schedule.after(now, is_moving.then_some(Duration::ZERO), "a tap moves to its other side");
        routes::complete(&desired, &mut incomplete);
        let tapped = desired.taps.values().filter_map(|tap| tap.head.owner.pod.as_ref());
        let barred = choice.barred.iter().map(|(pod, _)| &pod.id);
        let has_ended = report.is_listed && self.deleted.note(tapped.chain(barred));
        self.schedule.after(now, has_ended.then_some(Duration::ZERO), "a deleted pod has ended");
        self.schedule.after(now, self.deleted.wait(), "a deleted pod still runs");
        self.schedule.after(now, self.devices.wait(), "a device is created again");
        self.schedule.after(now, self.routes.wait(), "a CNI may have attached a program");
        self.schedule.at(self.backoff.next(), "the operations of a device failed");
        let lacks_hook = |tap: &ActualTap| Program::TAP.into_iter().any(|program| tap.lacks_hook(program));
        incomplete.extend(actual.taps.iter().filter(|(_, tap)| lacks_hook(tap)).map(|(device, _)| *device));
        self.coverage.follow(&desired, actual, links, &incomplete, &coming, *shows_redirects);
        let bypassed = self.coverage.bypassed(&desired);
        // The time is that of `resting`: a rest may have ended meanwhile, and nothing was attached.
        let removed = self.removed.note(&desired, actual, at);
        self.schedule.at(self.removed.next(), "a reason ends");
        let skipped = choice.refused.into_iter().chain(skipped).chain(bypassed).chain(removed);

        report.skipped = self.log.skipped(skipped);
        report.coverage = self.coverage.report(&self.routes);
        if !is_behind {
            report.rings = readers.rings();
        }
        let why_down = |name: &TargetName| report.unwritten.get(name).or_else(|| report.unreached.get(name));
        report.down = targets::down(&desired.targets, why_down);
        let down = self.down_for_long(&report.down, now);
        let installed = installed(&desired, actual, &incomplete);
        let all = listed.map(|_| coverage(choice.selected, &installed, &report.skipped, &down));
        // A capture that selects pods is that of a reader of the API.
        let ring = |of: &Coverage| of.of.mirror.0.capture_number().map(RingId);
        let (of_readers, resources): (Vec<_>, _) =
            all.unwrap_or_default().into_iter().partition(|of| ring(of).is_some());
        report.resources = resources;
        report.readers = of_readers.into_iter().filter_map(|of| Some((ring(&of)?, of))).collect();
        report.mirrors = mirrored(&choice.wanted, &desired, actual, &incomplete, &misfits);
        report.targets = match report.is_listed {
            true => targets::states(mirror_targets, &self.policy.refused_targets, &desired.targets),
            false => Vec::new(),
        };
        report.wanted = desired.taps.len();
        report.attached = match report.is_listed {
            true => desired.taps.keys().filter(|device| !incomplete.contains(device)).count(),
            false => actual.taps.values().filter(|tap| tap.tap.is_some()).count(),
        };
    }

    /// Returns the targets that have been down for [`TARGET_GRACE`], given those that are down.
    fn down_for_long(
        &mut self,
        down: &BTreeMap<TargetName, String>,
        now: Instant,
    ) -> BTreeMap<TargetName, String> {
        self.down.retain(|name, _| down.contains_key(name));
        for name in down.keys() {
            self.down.entry(name.clone()).or_insert(now);
        }
        let ends = self.down.values().map(|since| *since + TARGET_GRACE).filter(|end| *end > now);
        self.schedule.at(ends, "a target has been down for long");
        let is_long = |name: &TargetName| now.saturating_duration_since(self.down[name]) >= TARGET_GRACE;
        down.iter().filter(|(name, _)| is_long(name)).map(|(name, why)| (name.clone(), why.clone())).collect()
    }
}
