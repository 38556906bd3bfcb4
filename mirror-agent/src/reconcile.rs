//! The reconcile loop: wake, look, decide, act, report.
//!
//! The loop is level-triggered, and the only owner of the dataplane. An event means only that something may have
//! changed. Each round looks at everything and makes the missing changes, so a lost or duplicate event does no harm.
//! The loop uses the three interfaces (pods, devices, dataplane) through their traits and decides nothing itself.

mod carry_out;
mod coverage;
mod devices;
mod exits;
mod expected;
mod gone;
mod held;
mod mirrored;
mod pace;
mod refused;
mod removed;
mod routes;
mod standing;
mod targets;
mod told;

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use carry_out::Carried;
use coverage::Watch;
use exits::Exits;
use expected::Expected;
use gone::Gone;
use held::Held;
use mirrored::{found, mirrored};
use pace::Pace;
use refused::{Refused, refuse_mirrors, refuse_selection};
use removed::Removed;
use routes::Routes;
use standing::standing;
use targets::NotMade;
use tokio::{sync::watch, time::Instant};
use told::Told;

use mirror_core::{destination::Destination, exit, hidden};

use crate::{
    cpu,
    dataplane::Dataplane,
    links::{LinkTable, PodNetns},
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
/// The longest time between two rounds, in case an event was lost.
pub(crate) const TICK: Duration = Duration::from_secs(60);
/// The longest time that events wait after a round with a failure.
const PATIENCE: Duration = Duration::from_secs(1);
/// The longest wait while a session has a budget, so that the report soon shows that the budget has ended. The kernel
/// ends it without the agent.
const BUDGET_TICK: Duration = Duration::from_secs(1);
/// The time that an unused program of a filter stays: much longer than a packet takes at a tap.
const LEFTOVERS: Duration = Duration::from_secs(1);
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
    /// Whether a session has a budget, and so may end without an event.
    may_end: bool,
    expected: Expected,
    gone: Gone,
    coverage: Watch,
    routes: Routes,
    held: Held,
    not_made: NotMade,
    exits: Exits,
    removed: Removed,
    pace: Pace,
    /// The longest wait for the next round, if a change is due without an event (for example, an expected pod).
    look_again: Option<Duration>,
    /// The last round was not finished.
    is_behind: bool,
    /// The time of the event that woke the loop for the next round.
    woken: Option<Instant>,
    told: Told,
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
            may_end: false,
            expected: Expected::default(),
            gone: Gone::default(),
            coverage: Watch::default(),
            routes: Routes::default(),
            held: Held::default(),
            not_made: NotMade::default(),
            exits: Exits::default(),
            removed: Removed::default(),
            pace: Pace::default(),
            look_again: None,
            is_behind: false,
            woken: None,
            told: Told::default(),
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
            let wait = if is_blocked {
                let doubled = (backoff * 2).min(RETRY.1);
                std::mem::replace(&mut backoff, doubled)
            } else {
                backoff = RETRY.0;
                if self.may_end { BUDGET_TICK } else { TICK }
            };
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
            let deadline = Instant::now() + wait.min(self.look_again.unwrap_or(TICK));
            let deadline =
                self.held.next().into_iter().chain(self.removed.next()).fold(deadline, Instant::min);
            if is_blocked {
                // The failed operation may cause events itself, which must not trigger another attempt at once.
                tokio::select! {
                    () = &mut stop => return Ok(()),
                    () = tokio::time::sleep(wait.min(PATIENCE)) => {}
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
        self.told.failures(report.failures.clone());
        report.at = Instant::now();
        report.is_reconciled |= report.is_listed && !is_blocked && !self.is_behind;
        self.report.send_replace(Arc::new(report));
        Ok(is_blocked)
    }

    /// Does the work of a round: look, decide, carry out. Adds failures to the report. Returns those that concern a
    /// single device only.
    async fn try_round(&mut self, report: &mut Report) -> anyhow::Result<BTreeSet<String>> {
        let listed = self.pods.snapshot();
        let pods = listed.as_ref().map(|list| self.with_gone(list)).transpose()?;
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
        report.bad = self.told.bad(bad);
        let asked = |pod: &Pod| (pod.id.clone(), unasked.get(&pod.id).copied());
        report.pods = listed.as_deref().map(|pods| pods.iter().map(asked).collect());
        let mut left = BTreeSet::new();
        let Seen { links, actual, mut selection } =
            self.look(pods.as_deref(), &wanted, captures, &mut report.failures, &mut left).await?;
        report.found = Arc::clone(self.found.get_or_insert_with(|| Arc::new(found(&actual))));

        let mut expected = expected::of(&wanted, &selection.skipped);
        selection.skipped.retain(|skipped| {
            let is_of_gone = skipped.pod.as_ref().is_some_and(|pod| self.gone.has(pod));
            !(is_of_gone && skipped.why.is_passing())
        });
        let targets = self.targets(listed.as_deref(), &links, &actual, &readers, &mut expected, report);
        self.look_again = self.expected.wait(expected, links.host.keys().copied().collect(), Instant::now());
        self.told.ended(&actual);
        let hub = exit::hub(&links).map(|hub| hub.ifindex);
        let without_exit = self.exits.missing(&selection.taps, &self.policy);
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
        if let Some(until) = until.filter(|_| resting.iter().any(|(device, _)| incomplete.contains(device))) {
            let rest = until.saturating_duration_since(Instant::now());
            self.look_again = Some(self.look_again.unwrap_or(rest).min(rest));
        }
        of_devices.extend(self.exits.left().iter().cloned().chain(left));
        if ops.iter().any(|op| op.leaves_filter() || op.leaves_exit()) {
            // The next round removes what no session or tap uses any more.
            self.look_again = Some(self.look_again.unwrap_or(LEFTOVERS).min(LEFTOVERS));
        }
        if !coming.is_subset(&incomplete) {
            // The next round does the second step of moving a tap to its other side.
            self.look_again = Some(Duration::ZERO);
        }
        routes::complete(&desired, &mut incomplete);
        let tapped = desired.taps.values().filter_map(|tap| tap.owner.pod.as_ref());
        if report.is_listed && self.gone.note(tapped) {
            self.look_again = Some(Duration::ZERO);
        }
        for wait in self.exits.wait().into_iter().chain(self.routes.wait()).chain(self.gone.wait()) {
            self.look_again = Some(self.look_again.unwrap_or(wait).min(wait));
        }
        let lacks_hook = |tap: &ActualTap| Program::TAP.into_iter().any(|program| tap.lacks_hook(program));
        incomplete.extend(actual.taps.iter().filter(|(_, tap)| lacks_hook(tap)).map(|(device, _)| *device));
        let shows_redirects = || self.links.shows_redirects();
        self.coverage.follow(&desired, &actual, &links, &incomplete, &coming, shows_redirects);
        let bypassed = self.coverage.bypassed(&desired);
        let skipped = refused.into_iter().chain(selection.skipped).chain(unfit);
        let removed = self.removed.note(&desired, &actual, now);
        let skipped = skipped.chain(hidden).chain(without_exit).chain(bypassed).chain(removed);
        report.skipped = self.told.skipped(skipped);
        report.coverage = self.coverage.report(&self.routes);
        if !self.is_behind {
            report.rings = readers.rings();
        }
        let keyed = |resource: &Resource| Some((resource.id.clone(), Keyed::of(resource, &self.policy)?));
        report.streams = resources.iter().filter_map(keyed).collect();
        report.resources = match pods {
            Some(_) => coverage(selected, &standing(&desired, &actual, &incomplete), &report.skipped),
            None => Vec::new(),
        };
        report.mirrors = mirrored(&wanted, &desired, &actual, &incomplete, &misfits);
        let why_down = |name: &TargetName| report.unwritten.get(name).or_else(|| report.unreached.get(name));
        report.down = mirror_core::targets::down(&desired.targets, why_down);
        report.targets = self.standing_targets(&mirror_targets, &desired, report);
        report.wanted = desired.taps.len();
        report.attached = match report.is_listed {
            true => desired.taps.keys().filter(|device| !incomplete.contains(device)).count(),
            false => actual.taps.values().filter(|tap| tap.tap.is_some()).count(),
        };
        Ok(of_devices)
    }

    /// Returns the pods of a list, and the pods that still run although their objects were deleted.
    fn with_gone(&mut self, list: &Arc<[Pod]>) -> anyhow::Result<Arc<[Pod]>> {
        let now = Instant::now();
        self.gone.deleted(self.pods.deleted(), now);
        let running = self.links.running(self.gone.uids())?;
        Ok(self.gone.join(list, &running, now))
    }

    /// Reads the devices and the installed state, and selects taps. Creates, changes and deletes the devices of targets
    /// and relay devices where necessary.
    async fn look(
        &mut self,
        pods: Option<&[Pod]>,
        wanted: &[Wanted<'_>],
        captures: &[Capture],
        failures: &mut BTreeSet<String>,
        left: &mut BTreeSet<String>,
    ) -> anyhow::Result<Seen> {
        let mut to_read = self.pods_to_read(wanted, pods.unwrap_or_default());
        if pods.is_none() {
            // First, so that the snapshot includes the routes and offloads of the installed targets.
            let installed = self.dataplane.observe().await.context("cannot read what is installed")?;
            self.take_installed_targets(&installed);
        }
        let mut links = self.snapshot(&to_read, &BTreeMap::new()).await?;
        if let Some(pods) = pods.filter(|pods| self.exits.begin(pods, &links)) {
            to_read = self.pods_to_read(wanted, pods);
            links = self.snapshot(&to_read, &BTreeMap::new()).await?;
        }
        let actual = self.dataplane.observe().await.context("cannot read what is installed")?;
        keep_installed(&mut links, &actual.taps);
        if !self.started {
            refuse_mirrors(&self.own_targets, &links)?;
        }
        self.learn_cnis().await;
        // Problems at the start must be known before a mirror interface is created.
        let mut selection = self.selection(wanted, captures, &links, &actual).await;
        if pods.is_some() && !self.started {
            refuse_selection(&selection, &self.policy)?;
            self.started = true;
        }
        let needed = exit::needed(&selection.taps, &actual.taps, &self.policy);
        let keeps_hub = pods.is_none() || !needed.is_empty() || exit::pods_with_exit(&links).next().is_some();
        if self.change_links(pods.is_some(), keeps_hub, &links, failures, left).await {
            links = self.snapshot(&to_read, &actual.taps).await?;
            selection = self.selection(wanted, captures, &links, &actual).await;
        }
        // First the relay hub, then the relay devices on it. A pod may get its NIC between two snapshots.
        for _ in 0..2 {
            let needed = exit::needed(&selection.taps, &actual.taps, &self.policy);
            if pods.is_none() || !self.change_exits(&needed, &links).await {
                break;
            }
            links = self.snapshot(&to_read, &actual.taps).await?;
            selection = self.selection(wanted, captures, &links, &actual).await;
        }
        self.exits.note(&links, &actual);
        Ok(Seen { links, actual, selection })
    }

    /// Reads the devices. If the namespace of an installed tap cannot be read, keeps its devices.
    async fn snapshot(
        &mut self,
        pods: &[PodNetns],
        installed: &BTreeMap<Device, ActualTap>,
    ) -> anyhow::Result<LinkSnapshot> {
        let mut links = self.links.snapshot(pods).await.context("cannot read the network devices")?;
        keep_installed(&mut links, installed);
        Ok(links)
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
        self.may_end = sessions.any(|session| session.settings.budget != Budget::default());
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
