//! The loop: wake, look, decide, act, tell.
//!
//! Level-triggered, and the only owner of the dataplane. An event says only that something may have changed; each
//! round looks at everything and does what is missing, so a lost or doubled event does no harm. It knows the three
//! edges by their traits and decides nothing itself. Called by `cmd::run` and `cmd::attach`.

mod expected;
mod held;
mod told;

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use expected::Expected;
use held::Held;
use tokio::{sync::watch, time::Instant};
use told::{Told, tell_op};

use mirror_core::hidden;

use crate::{
    dataplane::Dataplane,
    links::{LinkTable, PodNetns},
    metrics::LoopMetrics,
    mirror_iface::{self, MirrorIface},
    model::{Actual, Desired, LinkSnapshot, Op},
    plan::plan,
    pods::PodSource,
    report::{Report, Reports},
    select::{Choice, Filters, Policy, Selection, Why, choose, select},
    settings::Budget,
};

/// How long a round waits after its first event, so that a burst makes one round.
const COALESCE: Duration = Duration::from_millis(10);
/// A round runs at least this often, should an event have been lost.
pub(crate) const TICK: Duration = Duration::from_secs(60);
/// How long events wait, at most, after a round with a failure.
const PATIENCE: Duration = Duration::from_secs(1);
/// And at least this often while a session has a budget, to tell when it has ended. The kernel ends it by itself.
const BUDGET_TICK: Duration = Duration::from_secs(1);
/// How long a round changes things before the loop looks anew. A hook can cost the kernel some milliseconds, and what is
/// changed meanwhile, a removal above all, must not wait for hundreds of them.
const SLICE: Duration = Duration::from_millis(500);
/// The wait after a round with a failure: doubled from the first to the last.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(30));

/// The loop and what it has told already.
pub struct Reconciler<P, L, D> {
    /// Where pods come from.
    pub pods: P,
    /// The devices.
    pub links: L,
    /// What is installed.
    pub dataplane: D,
    policy: Policy,
    filters: Filters,
    mirror: MirrorIface,
    started: bool,
    /// Some session has a budget, so that one may end without an event.
    may_end: bool,
    expected: Expected,
    held: Held,
    /// How soon to look again for what comes without an event.
    look_again: Option<Duration>,
    /// The last round has left something for the next one.
    is_behind: bool,
    /// When an event woke the loop for the round to come.
    woken: Option<Instant>,
    told: Told,
    report: watch::Sender<Arc<Report>>,
    metrics: LoopMetrics,
}

impl<P: PodSource, L: LinkTable, D: Dataplane> Reconciler<P, L, D> {
    /// A loop that has not looked at anything yet.
    pub fn new(
        pods: P,
        links: L,
        dataplane: D,
        policy: Policy,
        mirror: MirrorIface,
        metrics: LoopMetrics,
    ) -> Self {
        Self {
            pods,
            links,
            dataplane,
            policy,
            filters: Filters::default(),
            mirror,
            started: false,
            may_end: false,
            expected: Expected::default(),
            held: Held::default(),
            look_again: None,
            is_behind: false,
            woken: None,
            told: Told::default(),
            report: watch::Sender::new(Arc::default()),
            metrics,
        }
    }

    /// What the rounds tell.
    pub fn reports(&self) -> Reports {
        self.report.subscribe()
    }

    /// Runs rounds until `stop` is ready. What is installed then stays.
    ///
    /// # Errors
    ///
    /// Only for what is wrong from the start: a mirror interface that cannot be one, an interface to mirror that
    /// does not exist. Whatever goes wrong later is logged and tried again.
    pub async fn run(&mut self, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
        tokio::pin!(stop);
        let mut backoff = RETRY.0;
        loop {
            let is_blocked = self.round().await.map_err(|Refused(error)| error)?;
            let wait = if is_blocked {
                let doubled = (backoff * 2).min(RETRY.1);
                std::mem::replace(&mut backoff, doubled)
            } else {
                backoff = RETRY.0;
                if self.may_end { BUDGET_TICK } else { TICK }
            };
            if self.is_behind {
                // Whoever else has something to do on this thread goes first, and so does what has happened.
                tokio::select! {
                    biased;
                    () = &mut stop => return Ok(()),
                    () = self.pods.changed() => self.note_event(),
                    () = self.links.changed() => self.note_event(),
                    () = tokio::task::yield_now() => {}
                }
                continue;
            }
            let deadline = Instant::now() + wait.min(self.look_again.unwrap_or(TICK));
            let deadline = self.held.next().map_or(deadline, |held| held.min(deadline));
            if is_blocked {
                // What failed may make events of its own, which must not have it tried again at once.
                tokio::select! {
                    () = &mut stop => return Ok(()),
                    () = tokio::time::sleep(wait.min(PATIENCE)) => {}
                }
            }
            tokio::select! {
                () = &mut stop => return Ok(()),
                () = self.pods.changed() => self.note_event(),
                () = self.links.changed() => self.note_event(),
                () = tokio::time::sleep_until(deadline) => {}
            }
            tokio::select! {
                () = &mut stop => return Ok(()),
                () = tokio::time::sleep(COALESCE) => {}
            }
        }
    }

    fn note_event(&mut self) {
        self.woken.get_or_insert_with(Instant::now);
    }

    /// One round. Whether something failed in it that concerns all devices, and not one alone.
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

    /// Does what a round does. What fails is in the report, but for what concerns one device alone: that is returned.
    async fn try_round(&mut self, report: &mut Report) -> anyhow::Result<BTreeSet<String>> {
        let failures = &mut report.failures;
        let pods = self.pods.snapshot();
        report.is_listed = pods.is_some();
        let Choice { wanted, refused, bad } =
            choose(pods.as_deref().unwrap_or_default(), &self.policy, &mut self.filters);
        report.bad = self.told.bad(bad);
        let namespaces: Vec<_> = wanted
            .iter()
            .filter(|wanted| !wanted.pod.host_network)
            .map(|wanted| PodNetns { uid: wanted.pod.id.uid.clone(), path: wanted.pod.netns.clone() })
            .collect();

        let mut links = self.links.snapshot(&namespaces).await.context("cannot read the network devices")?;
        let actual = self.dataplane.observe().await.context("cannot read what is installed")?;
        if !self.started {
            refuse_mirror(&self.mirror, &links)?;
        }
        // What is wrong from the start must be known before the mirror interface is made.
        let mut selection = select(&wanted, &links, &self.policy);
        if pods.is_some() && !self.started {
            refuse_selection(&selection, &self.policy)?;
            self.started = true;
        }
        if self.change_links(&links, &actual, failures).await {
            links = self.links.snapshot(&namespaces).await.context("cannot read the network devices")?;
            selection = select(&wanted, &links, &self.policy);
        }

        let expected = expected::of(&wanted, &selection.skipped);
        self.look_again = self.expected.wait(expected, links.host.keys().copied().collect(), Instant::now());
        let mut target = self.mirror.target(&links);
        self.told.target(&target);
        self.told.fixed_offloads(&target, self.mirror.fixed_offloads(&links));
        // Taps that an earlier agent has left must not be given a target that leads back to them.
        let entangled = links.by_name(self.mirror.name()).and_then(|mirror| {
            let tapped = actual.taps.keys().filter_map(|ifindex| links.host.get(ifindex));
            tapped.filter_map(|link| mirror_iface::conflict(mirror, link, &links)).next()
        });
        if let (None, Some(conflict)) = (&pods, entangled) {
            failures.insert(format!(
                "{conflict}, which is tapped; nothing is copied until there is a list of pods"
            ));
            target.ifindex = None;
        }
        let desired = match pods {
            Some(_) => Desired { target, taps: selection.taps },
            // No complete list yet: what an earlier agent has installed stays as it is.
            None => Desired { target, taps: BTreeMap::new() },
        };
        self.may_end = desired.taps.values().any(|tap| tap.settings.budget != Budget::default());
        self.told.ended(&actual);
        let mut ops = plan(&desired, &actual);
        if pods.is_none() {
            ops.retain(|op| matches!(op, Op::SetTarget(_)));
        }
        let hidden = hidden::of_taps(&desired, &actual);
        report.skipped = self.told.skipped(refused.into_iter().chain(selection.skipped).chain(hidden));
        self.held.keep(&ops);
        let mut of_devices = BTreeSet::new();
        let mut incomplete = BTreeSet::new();
        let mut spent = Duration::ZERO;
        // What belongs to one device stands together, and is told when all of it has succeeded.
        for ops in ops.chunk_by(|a, b| a.ifindex() == b.ifindex()) {
            let ifindex = ops.first().and_then(Op::ifindex);
            if let Some(why) = ifindex.and_then(|ifindex| self.held.why(ifindex, ops, Instant::now())) {
                of_devices.extend(why.iter().cloned());
                incomplete.extend(ifindex);
                continue;
            }
            if spent >= SLICE {
                self.is_behind = true;
                incomplete.extend(ifindex);
                continue;
            }
            // An op holds the thread for some milliseconds: others may go on between two devices.
            tokio::task::yield_now().await;
            let chunk_began = Instant::now();
            let mut failed = BTreeSet::new();
            for op in ops {
                let began = Instant::now();
                let applied = self.dataplane.apply(op).await;
                self.metrics.op(op, began.elapsed(), applied.is_err());
                failed.extend(applied.err().map(|error| format!("{error:#}")));
            }
            if !failed.is_empty() {
                match ifindex {
                    Some(ifindex) => {
                        of_devices.extend(failed.iter().cloned());
                        incomplete.insert(ifindex);
                        self.held.failed(ifindex, ops, failed, Instant::now());
                    }
                    None => failures.extend(failed),
                }
                continue;
            }
            // Not that of failures, or a slow one would keep all others from their turn.
            spent += chunk_began.elapsed();
            ops.iter().for_each(|op| tell_op(op, &actual));
            if let Some(woken) = self.woken.filter(|_| ops.iter().any(|op| is_new_tap(op, &actual))) {
                self.metrics.new_tap(woken.elapsed());
            }
        }
        report.wanted = desired.taps.len();
        report.attached = match pods {
            Some(_) => desired.taps.keys().filter(|ifindex| !incomplete.contains(ifindex)).count(),
            None => actual.taps.values().filter(|tap| tap.tap.is_some()).count(),
        };
        Ok(of_devices)
    }

    /// Changes the mirror interface where it must be; whether anything was changed.
    async fn change_links(
        &mut self,
        links: &LinkSnapshot,
        actual: &Actual,
        failures: &mut BTreeSet<String>,
    ) -> bool {
        let mut changes = self.mirror.changes(links, &actual.target);
        // Programs of another version may still copy to what it has made.
        if actual.other_versions.is_empty() {
            changes.extend(self.mirror.left_behind(links, &changes));
        }
        for change in &changes {
            if let Err(error) = self.links.apply(change).await {
                failures.insert(format!("{error:#}"));
            }
        }
        !changes.is_empty()
    }
}

/// Wrong from the start: not tried again.
#[derive(Debug, thiserror::Error)]
#[error("{0:#}")]
struct Refused(anyhow::Error);

fn refuse_mirror(mirror: &MirrorIface, links: &LinkSnapshot) -> anyhow::Result<()> {
    match links.by_name(mirror.name()).and_then(mirror_iface::refusal) {
        Some(why) => bail!(Refused(anyhow!(why))),
        None => Ok(()),
    }
}

fn refuse_selection(selection: &Selection, policy: &Policy) -> anyhow::Result<()> {
    let refused = selection.skipped.iter().find_map(|skipped| match (&skipped.why, &skipped.nic) {
        (Why::MirrorInterface(conflict), _) if policy.is_strict || skipped.pod.is_none() => {
            Some(anyhow!("{conflict}, so copies would loop; choose another --mirror-iface"))
        }
        (Why::NoSuchInterface, Some(name)) => Some(anyhow!("there is no interface {name:?} to mirror")),
        _ => None,
    });
    match refused {
        Some(error) => bail!(Refused(error)),
        None => Ok(()),
    }
}

/// Whether an op gives a device a tap that it did not have: none, or that of another owner.
fn is_new_tap(op: &Op, actual: &Actual) -> bool {
    let Op::PutTap(ifindex, tap) = op else { return false };
    let installed = actual.taps.get(ifindex).and_then(|installed| installed.tap.as_ref());
    installed.is_none_or(|installed| installed.owner != tap.owner)
}

#[cfg(test)]
mod tests;
