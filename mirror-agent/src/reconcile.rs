//! The reconcile loop: wake, look, decide, act, conclude.
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
mod look;
mod memory;
mod mirrored;
mod pace;
mod refused;
mod removed_programs;
mod routes;
mod schedule;
mod targets;

use std::{collections::BTreeSet, future::Future, sync::Arc, time::Duration};

use memory::{Inputs, Memory};
use pace::Pace;
use refused::Refused;
use schedule::Schedule;
use tokio::{sync::watch, time::Instant};
use tracing::trace;

use crate::{
    kernel::{cpu, dataplane::Dataplane, links::LinkTable},
    mirror_iface::MirrorIfaces,
    model::Pod,
    report::{Report, Reports, metrics::LoopMetrics},
    select::{Policy, Readers, choose},
    sources::PodSource,
    util::backoff::Backoff,
};

/// The delay of a round after its first event, so that a burst of events causes one round.
const COALESCE: Duration = Duration::from_millis(10);
/// The longest time that events wait after a round with a failure.
const PATIENCE: Duration = Duration::from_secs(1);
/// The wait after the first failure, and the waits after failures in a row.
const AGAIN: Duration = Duration::from_millis(100);
const RETRY: Backoff = Backoff::new(AGAIN, Duration::from_secs(30));

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
    memory: Memory,
    pace: Pace,
    /// The last round was not finished.
    is_behind: bool,
    /// The time of the event that woke the loop for the next round.
    woken: Option<Instant>,
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
            memory: Memory::new(policy, mirrors),
            pace: Pace::default(),
            is_behind: false,
            woken: None,
            report: watch::Sender::new(Arc::new(Report { at: Some(Instant::now()), ..Report::default() })),
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
        let mut backoff = RETRY;
        loop {
            let began = cpu::time();
            let is_blocked = self.round().await.map_err(|Refused(error)| error)?;
            self.pace.note(cpu::time().saturating_sub(began), Instant::now());
            let pause = is_blocked.then(|| backoff.pause());
            if !is_blocked {
                backoff = RETRY;
            }
            self.memory.schedule.after(Instant::now(), pause, "an operation failed");
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
            let Schedule { at: deadline, why } = self.memory.schedule;
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
                let counters = self.memory.coverage.due();
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
                            self.memory.routes.wake();
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
        self.memory.routes.wake();
    }

    /// Runs one round. Returns whether an operation failed that concerns more than a single device.
    async fn round(&mut self) -> Result<bool, Refused> {
        let began = Instant::now();
        self.is_behind = false;
        self.memory.schedule = Schedule::new(began);
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
        let is_success = report.is_listed && !self.is_behind && !is_blocked;
        self.metrics.round(began.elapsed(), is_success);
        self.memory.log.failures(report.failures.clone());
        report.at = Some(Instant::now());
        report.is_reconciled |= report.is_listed && !is_blocked && !self.is_behind;
        self.report.send_replace(Arc::new(report));
        Ok(is_blocked)
    }

    /// Does the work of a round: look, decide, act, conclude. Adds failures to the report. Returns those that concern a
    /// single device only.
    async fn try_round(&mut self, report: &mut Report) -> anyhow::Result<BTreeSet<String>> {
        let listed = self.pods.snapshot();
        let pods = listed.as_ref().map(|list| self.with_deleted(list)).transpose()?;
        let readers = self.reading.borrow_and_update().clone();
        let (resources, mirror_targets) = (self.pods.resources(), self.pods.targets());
        report.is_listed = pods.is_some();
        if report.is_listed {
            self.links.follow(self.memory.take_listed_targets(&mirror_targets));
        }
        let choice = loop {
            let Memory { policy, filters, .. } = &mut self.memory;
            let choice =
                choose(pods.as_deref().unwrap_or_default(), &resources, &readers.captures, policy, filters);
            if !filters.is_behind() {
                break choice;
            }
            // Other tasks, such as those that answer probes, run between the parts.
            tokio::task::yield_now().await;
        };
        report.bad = self.memory.log.bad(&choice.bad);
        let asked = |pod: &Pod| (pod.id.clone(), choice.unasked.get(&pod.id).cloned());
        report.pods = listed.as_deref().map(|pods| pods.iter().map(asked).collect());

        let look = self.look(pods.as_deref(), &choice, &readers.captures, &mut report.failures);
        let (node, selection) = look.await?;
        let inputs =
            Inputs { listed: listed.as_deref(), mirror_targets: &mirror_targets, readers: &readers, choice };
        let decision = self.memory.decide(&inputs, &node, selection, report, Instant::now());
        let mut carried = self.carry_out(&decision, &node.actual, report).await;
        self.is_behind = carried.is_behind;
        let mut of_devices = std::mem::take(&mut carried.of_devices);
        of_devices.extend(self.memory.devices.left().iter().cloned());
        self.memory.conclude(inputs, &node, decision, carried, report, Instant::now());
        Ok(of_devices)
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

#[cfg(test)]
mod tests;
