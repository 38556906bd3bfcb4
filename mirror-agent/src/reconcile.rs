//! The reconcile loop: wake, look, decide, act, report.
//!
//! The loop is level-triggered, and the only owner of the dataplane. An event means only that something may have
//! changed. Each round looks at everything and makes the missing changes, so a lost or duplicate event does no harm.
//! The loop uses the three interfaces (pods, devices, dataplane) through their traits and decides nothing itself.

mod carry_out;
mod coverage;
mod deleted;
mod device_backoff;
mod devices;
mod expected;
mod log;
mod mirrored;
mod pace;
mod refused;
mod removed_programs;
mod routes;
mod schedule;
mod targets;

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use carry_out::Carried;
use coverage::Watch;
use deleted::DeletedPods;
use device_backoff::DeviceBackoff;
use devices::Devices;
use expected::Expected;
use log::LogDedup;
use mirrored::{found, installed, mirrored};
use pace::Pace;
use refused::{Refused, refuse_mirrors, refuse_selection};
use removed_programs::RemovedPrograms;
use routes::Routes;
use schedule::Schedule;
pub(crate) use schedule::TICK;
use tokio::{sync::watch, time::Instant};
use tracing::trace;

use mirror_core::{destination::Destination, exit, hidden};

use crate::{
    cpu,
    dataplane::Dataplane,
    links::LinkTable,
    metrics::LoopMetrics,
    mirror_iface::MirrorIfaces,
    model::{
        Actual, ActualTap, Desired, Device, IfIndex, LinkSnapshot, MirrorId, Pod, Program, Resource, Tap,
        Target, TargetName,
    },
    plan::{Misfit, Plan, Unfit, plan, retarget, stay_ended},
    pods::PodSource,
    report::{Keyed, Mirrors, Report, Reports},
    select::{
        Capture, Choice, Filters, Policy, Readers, Selection, Skipped, Wanted, Why, choose, coverage,
        keep_installed,
    },
    settings::{Budget, Rate},
};

/// The delay of a round after its first event, so that a burst of events causes one round.
const COALESCE: Duration = Duration::from_millis(10);
/// The longest time that events wait after a round with a failure.
const PATIENCE: Duration = Duration::from_secs(1);
/// The longest wait while a session has a budget, so that the report soon shows that the budget has ended. The kernel
/// ends it without the agent.
const BUDGET_TICK: Duration = Duration::from_secs(1);
/// The time that an unused program of a filter stays: much longer than a packet takes at a tap.
const LEFTOVERS: Duration = Duration::from_secs(1);
/// The number of times that a round looks at the node while it changes devices. A process of a pod can change devices
/// forever.
const MOST_LOOKS: usize = 4;
/// The first and the longest wait after a round with a failure. The wait doubles in between.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(30));

/// The programs that currently read packets (streams and captures).
pub type Reading = watch::Receiver<Arc<Readers>>;

/// The loop, and the state that it has already logged.
pub struct Reconciler<P, L, D> {
    /// The source of pods.
    pub pods: P,
    /// The network devices.
    pub links: L,
    /// The maps and hooks in the kernel.
    pub dataplane: D,
    reading: Reading,
    policy: Policy,
    filters: Filters,
    /// The targets that the agent was started with.
    own_targets: BTreeMap<TargetName, Destination>,
    /// The rate limits of targets that have one.
    max_rates: BTreeMap<TargetName, Rate>,
    mirrors: MirrorIfaces,
    started: bool,
    expected: Expected,
    deleted: DeletedPods,
    coverage: Watch,
    routes: Routes,
    backoff: DeviceBackoff,
    devices: Devices,
    removed: RemovedPrograms,
    pace: Pace,
    /// The next round without an event.
    schedule: Schedule,
    /// The last round was not finished.
    is_behind: bool,
    /// The time of the event that woke the loop for the next round.
    woken: Option<Instant>,
    log: LogDedup,
    /// The mirrors that an earlier agent has left; `None` before the first read.
    found: Option<Arc<Mirrors>>,
    report: watch::Sender<Arc<Report>>,
    metrics: LoopMetrics,
}

impl<P: PodSource, L: LinkTable, D: Dataplane> Reconciler<P, L, D> {
    /// Creates a loop. Does no I/O.
    pub fn new(
        pods: P,
        links: L,
        dataplane: D,
        reading: Reading,
        policy: Policy,
        mirrors: MirrorIfaces,
        metrics: LoopMetrics,
    ) -> Self {
        Self {
            pods,
            links,
            dataplane,
            reading,
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
            pace: Pace::default(),
            schedule: Schedule::new(Instant::now()),
            is_behind: false,
            woken: None,
            log: LogDedup::default(),
            found: None,
            report: watch::Sender::new(Arc::default()),
            metrics,
        }
    }

    /// The reports of the rounds.
    pub fn reports(&self) -> Reports {
        self.report.subscribe()
    }

    /// Runs rounds until `stop` is ready. The installed state stays.
    ///
    /// # Errors
    ///
    /// Only for problems at the start: a device that cannot be a mirror interface, an interface to mirror that does not
    /// exist. Later problems are logged and retried.
    pub async fn run(&mut self, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
        tokio::pin!(stop);
        let mut backoff = RETRY.0;
        loop {
            let began = cpu::time();
            let is_blocked = self.round().await.map_err(|Refused(error)| error)?;
            self.pace.note(cpu::time().saturating_sub(began), Instant::now());
            let pause = is_blocked.then_some(backoff);
            backoff = if is_blocked { (backoff * 2).min(RETRY.1) } else { RETRY.0 };
            self.schedule.after(pause, "an operation failed");
            if self.is_behind {
                // Other tasks of this thread run first, and pending events are handled.
                tokio::select! {
                    biased;
                    () = &mut stop => return Ok(()),
                    () = event(&mut self.pods, &mut self.links, &mut self.reading) => self.note_event(),
                    () = tokio::task::yield_now() => {}
                }
                continue;
            }
            let Schedule { at: deadline, why } = self.schedule;
            trace!(
                "the next round is due in {:?}: {why}",
                deadline.saturating_duration_since(Instant::now())
            );
            if let Some(pause) = pause {
                // The failed operation may cause events itself, which must not trigger another attempt at once.
                tokio::select! {
                    () = &mut stop => return Ok(()),
                    () = tokio::time::sleep(pause.min(PATIENCE)) => {}
                }
            }
            loop {
                let counters = self.coverage.due();
                let hooks = self.dataplane.look_due();
                tokio::select! {
                    () = &mut stop => return Ok(()),
                    () = event(&mut self.pods, &mut self.links, &mut self.reading) => {
                        self.note_event();
                        break;
                    }
                    () = tokio::time::sleep_until(deadline) => break,
                    () = tokio::time::sleep_until(counters.unwrap_or(deadline)), if counters.is_some() => {
                        if self.read_counters().await {
                            break;
                        }
                    }
                    () = tokio::time::sleep_until(hooks.unwrap_or(deadline)), if hooks.is_some() => {
                        if self.dataplane.look().await {
                            self.routes.wake();
                            break;
                        }
                    }
                }
            }
            tokio::select! {
                () = &mut stop => return Ok(()),
                () = tokio::time::sleep_until(self.pace.next(Instant::now() + COALESCE)) => {}
            }
        }
    }

    /// Runs one more round at once: the last one of an agent that ends, after its captures have ended.
    pub async fn last_round(&mut self) {
        // `Refused` matters only at the start of the agent.
        let _ = self.round().await;
    }

    fn note_event(&mut self) {
        self.woken.get_or_insert_with(Instant::now);
        self.routes.wake();
    }

    /// Runs one round. Returns whether an operation failed that concerns more than a single device.
    async fn round(&mut self) -> Result<bool, Refused> {
        let began = Instant::now();
        self.is_behind = false;
        self.schedule = Schedule::new(began);
        let mut report = Report { failures: BTreeSet::new(), ..Report::clone(&self.report.borrow()) };
        let of_devices = match self.try_round(&mut report).await.map_err(anyhow::Error::downcast::<Refused>) {
            Ok(of_devices) => of_devices,
            Err(Ok(refused)) => return Err(refused),
            Err(Err(error)) => {
                report.failures.insert(format!("{error:#}"));
                BTreeSet::new()
            }
        };
        let is_blocked = !report.failures.is_empty();
        report.failures.extend(of_devices);
        if !self.is_behind {
            self.woken = None;
        }
        self.metrics.round(began.elapsed());
        self.log.failures(report.failures.clone());
        report.at = Instant::now();
        report.is_reconciled |= report.is_listed && !is_blocked && !self.is_behind;
        self.report.send_replace(Arc::new(report));
        Ok(is_blocked)
    }

    /// Does the work of a round: look, decide, carry out. Adds failures to the report. Returns those that concern a
    /// single device only.
    async fn try_round(&mut self, report: &mut Report) -> anyhow::Result<BTreeSet<String>> {
        let listed = self.pods.snapshot();
        let pods = listed.as_ref().map(|list| self.with_deleted(list)).transpose()?;
        let readers = self.reading.borrow_and_update().clone();
        let captures = &readers.captures;
        report.is_listed = pods.is_some();
        let (resources, mirror_targets) = (self.pods.resources(), self.pods.targets());
        if report.is_listed {
            self.take_listed_targets(&mirror_targets);
        }
        let Choice { wanted, refused, unasked, bad, selected } = loop {
            let choice = choose(
                pods.as_deref().unwrap_or_default(),
                &resources,
                captures,
                &self.policy,
                &mut self.filters,
            );
            if !self.filters.is_behind() {
                break choice;
            }
            // Other tasks, such as those that answer probes, run between the parts.
            tokio::task::yield_now().await;
        };
        report.bad = self.log.bad(bad);
        let asked = |pod: &Pod| (pod.id.clone(), unasked.get(&pod.id).copied());
        report.pods = listed.as_deref().map(|pods| pods.iter().map(asked).collect());
        let Seen { links, actual, mut selection } =
            self.look(pods.as_deref(), &wanted, captures, &mut report.failures).await?;
        report.found = Arc::clone(self.found.get_or_insert_with(|| Arc::new(found(&actual))));

        let mut expected = expected::of(&wanted, &selection.skipped);
        selection.skipped.retain(|skipped| {
            let is_deleted = skipped.pod.as_ref().is_some_and(|pod| self.deleted.has(pod));
            !(is_deleted && skipped.why.is_passing())
        });
        let targets = self.targets(listed.as_deref(), &links, &actual, &readers, &mut expected, report);
        let devices = links.host.keys().copied().collect();
        let wait = self.expected.wait(expected, devices, Instant::now());
        self.schedule.after(wait, "a pod is expected");
        self.log.ended(&actual);
        let hub = exit::hub(&links).map(|hub| hub.ifindex);
        let without_exit = self.devices.without_relay(&selection.taps, &self.policy);
        stay_ended(&mut selection.taps, &actual);
        exit::stay_without(&mut selection.taps, &actual.taps, &self.policy);
        let (desired, Plan { ops, unfit, coming }) =
            self.decide(targets, selection.taps, hub, &actual, report.is_listed);
        let misfits = unfit.iter().map(|unfit| (unfit.device, unfit.mirror.clone())).collect();
        let unfit = unfit.into_iter().map(|unfit| not_installed(unfit, &desired));
        let hidden = hidden::of_taps(&desired, &actual);

        let now = Instant::now();
        let (resting, until) = self.removed.resting(now);
        let Carried { mut of_devices, mut incomplete } =
            self.carry_out(&ops, &resting, &desired, &actual, report).await;
        let rests = resting.iter().any(|(device, _)| incomplete.contains(device));
        self.schedule.at(until.filter(|_| rests), "a removed program is attached again");
        of_devices.extend(self.devices.left().iter().cloned());
        let leaves = ops.iter().any(|op| op.leaves_filter() || op.leaves_exit());
        self.schedule
            .after(leaves.then_some(LEFTOVERS), "no session or tap uses a program or a relay device");
        let is_moving = !coming.is_subset(&incomplete);
        self.schedule.after(is_moving.then_some(Duration::ZERO), "a tap moves to its other side");
        routes::complete(&desired, &mut incomplete);
        let tapped = desired.taps.values().filter_map(|tap| tap.owner.pod.as_ref());
        let has_ended = report.is_listed && self.deleted.note(tapped);
        self.schedule.after(has_ended.then_some(Duration::ZERO), "a deleted pod has ended");
        self.schedule.after(self.deleted.wait(), "a deleted pod still runs");
        self.schedule.after(self.devices.wait(), "a device is created again");
        self.schedule.after(self.routes.wait(), "a CNI may have attached a program");
        self.schedule.at(self.backoff.next(), "the operations of a device failed");
        let lacks_hook = |tap: &ActualTap| Program::TAP.into_iter().any(|program| tap.lacks_hook(program));
        incomplete.extend(actual.taps.iter().filter(|(_, tap)| lacks_hook(tap)).map(|(device, _)| *device));
        let shows_redirects = || self.links.shows_redirects();
        self.coverage.follow(&desired, &actual, &links, &incomplete, &coming, shows_redirects);
        let bypassed = self.coverage.bypassed(&desired);
        let skipped = refused.into_iter().chain(selection.skipped).chain(unfit);
        let removed = self.removed.note(&desired, &actual, now);
        self.schedule.at(self.removed.next(), "a reason ends");
        let skipped = skipped.chain(hidden).chain(without_exit).chain(bypassed).chain(removed);
        report.skipped = self.log.skipped(skipped);
        report.coverage = self.coverage.report(&self.routes);
        if !self.is_behind {
            report.rings = readers.rings();
        }
        let keyed = |resource: &Resource| Some((resource.id.clone(), Keyed::of(resource, &self.policy)?));
        report.streams = resources.iter().filter_map(keyed).collect();
        report.resources = match pods {
            Some(_) => coverage(selected, &installed(&desired, &actual, &incomplete), &report.skipped),
            None => Vec::new(),
        };
        report.mirrors = mirrored(&wanted, &desired, &actual, &incomplete, &misfits);
        let why_down = |name: &TargetName| report.unwritten.get(name).or_else(|| report.unreached.get(name));
        report.down = mirror_core::targets::down(&desired.targets, why_down);
        report.targets = self.target_states(&mirror_targets, &desired, report);
        report.wanted = desired.taps.len();
        report.attached = match report.is_listed {
            true => desired.taps.keys().filter(|device| !incomplete.contains(device)).count(),
            false => actual.taps.values().filter(|tap| tap.tap.is_some()).count(),
        };
        Ok(of_devices)
    }

    /// Returns the pods of a list, and the pods that still run although their objects were deleted.
    fn with_deleted(&mut self, list: &Arc<[Pod]>) -> anyhow::Result<Arc<[Pod]>> {
        let now = Instant::now();
        self.deleted.add(self.pods.deleted(), now);
        let running = self.links.running(self.deleted.uids())?;
        Ok(self.deleted.join(list, &running, now))
    }

    /// Looks at the node, and changes devices where necessary. Then it looks again, because what it saw is old: the
    /// relay hub comes before the relay devices on it, and a pod may get a NIC in the meantime.
    async fn look(
        &mut self,
        pods: Option<&[Pod]>,
        wanted: &[Wanted<'_>],
        captures: &[Capture],
        failures: &mut BTreeSet<String>,
    ) -> anyhow::Result<Seen> {
        let mut looks = 0;
        loop {
            let seen = self.look_once(pods, wanted, captures).await?;
            let (has_changed, failed) = self.change_devices(&seen, pods.is_some()).await;
            failures.extend(failed);
            looks += 1;
            if !has_changed || looks == MOST_LOOKS {
                // Not every change of a pod's devices is an event on the node.
                self.schedule.after(has_changed.then_some(RETRY.0), "devices have changed");
                self.devices.note(&seen.links, &seen.actual);
                return Ok(seen);
            }
        }
    }

    /// Reads the installed state and the devices, and selects taps.
    async fn look_once(
        &mut self,
        pods: Option<&[Pod]>,
        wanted: &[Wanted<'_>],
        captures: &[Capture],
    ) -> anyhow::Result<Seen> {
        let actual = self.dataplane.observe().await.context("cannot read what is installed")?;
        if pods.is_none() {
            // Before the devices, so that the snapshot includes the routes and offloads of the installed targets.
            self.take_installed_targets(&actual);
        }
        let mut links = self.snapshot(wanted, pods).await?;
        if pods.is_some_and(|pods| self.devices.begin(pods, &links)) {
            links = self.snapshot(wanted, pods).await?;
        }
        keep_installed(&mut links, &actual.taps);
        if !self.started {
            refuse_mirrors(&self.own_targets, &links)?;
        }
        self.learn_cnis().await;
        // Problems at the start must be known before a mirror interface is created.
        let selection = self.selection(wanted, captures, &links, &actual).await;
        if pods.is_some() && !self.started {
            refuse_selection(&selection, &self.policy)?;
            self.started = true;
        }
        Ok(Seen { links, actual, selection })
    }

    async fn snapshot(
        &mut self,
        wanted: &[Wanted<'_>],
        pods: Option<&[Pod]>,
    ) -> anyhow::Result<LinkSnapshot> {
        let pods = self.pods_to_read(wanted, pods.unwrap_or_default());
        self.links.snapshot(&pods).await.context("cannot read the network devices")
    }

    /// Returns the wanted state, and the ops that lead to it.
    fn decide(
        &mut self,
        targets: BTreeMap<TargetName, Target>,
        taps: BTreeMap<Device, Tap>,
        hub: Option<IfIndex>,
        actual: &Actual,
        is_listed: bool,
    ) -> (Desired, Plan) {
        let limits = self.policy.limits;
        let (desired, plan) = if is_listed {
            // A tap that moves back to the node side still copies through its relay device in this round.
            let installed = actual.taps.values().filter_map(|installed| installed.tap.as_ref());
            let hub = hub.filter(|_| taps.values().chain(installed).any(|tap| tap.exit.is_some()));
            let desired = Desired { targets, limits, taps, hub };
            let plan = plan(&desired, actual);
            (desired, plan)
        } else {
            // Without a complete list, the taps that an earlier agent has installed stay in force.
            let plan = Plan { ops: retarget(&targets, actual), ..Plan::default() };
            (Desired { targets, limits, taps: BTreeMap::new(), hub: None }, plan)
        };
        let mut sessions = desired.taps.values().flat_map(|tap| tap.sessions.values());
        let may_end = sessions.any(|session| session.settings.budget != Budget::default());
        self.schedule.after(may_end.then_some(BUDGET_TICK), "a session may use up its budget");
        (desired, plan)
    }
}

/// Waits until the pods, the devices or the programs that read packets may have changed. Cancel safe.
async fn event(pods: &mut impl PodSource, links: &mut impl LinkTable, reading: &mut Reading) {
    tokio::select! {
        () = pods.changed() => {}
        () = links.changed() => {}
        Ok(()) = reading.changed() => {}
    }
}

/// The state that a round has found.
struct Seen {
    links: LinkSnapshot,
    actual: Actual,
    selection: Selection,
}

/// Converts a session that cannot be installed to a skipped one.
fn not_installed(unfit: Unfit, desired: &Desired) -> Skipped {
    let Unfit { device, mirror, why } = unfit;
    let owner = desired.taps.get(&device).map(|tap| tap.owner.clone()).unwrap_or_default();
    let mirror = Some(mirror).filter(|mirror| *mirror != MirrorId::default());
    let why = match why {
        Misfit::NoRoom(table) => Why::NoRoom(table),
        Misfit::FilterRefused(why) => Why::FilterRefused(why),
    };
    Skipped { pod: owner.pod, nic: Some(owner.nic), mirror, why }
}

#[cfg(test)]
mod tests;
