//! The loop: wake, look, decide, act, tell.
//!
//! Level-triggered, and the only owner of the dataplane. An event says only that something may have changed; each
//! round looks at everything and does what is missing, so a lost or doubled event does no harm. It knows the three
//! edges by their traits and decides nothing itself. Called by `cmd::run` and `cmd::attach`.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail};
use tokio::time::Instant;
use tracing::{error, info, warn};

use crate::{
    dataplane::Dataplane,
    links::LinkTable,
    mirror_iface::{self, MirrorIface},
    model::{Actual, Desired, Ended, IfIndex, LinkSnapshot, Op, Target},
    plan::plan,
    pods::PodSource,
    select::{BadAnnotation, Policy, Selection, Skipped, Why, choose, select},
    settings::Budget,
};

/// How long a round waits after its first event, so that a burst makes one round.
const COALESCE: Duration = Duration::from_millis(10);
/// A round runs at least this often, should an event have been lost.
const TICK: Duration = Duration::from_secs(60);
/// How long events wait, at most, after a round with a failure.
const PATIENCE: Duration = Duration::from_secs(1);
/// And at least this often while a session has a budget, to tell when it has ended. The kernel ends it by itself.
const BUDGET_TICK: Duration = Duration::from_secs(1);
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
    mirror: MirrorIface,
    started: bool,
    /// Some session has a budget, so that one may end without an event.
    may_end: bool,
    told: Told,
}

/// What has been logged, so that it is logged once a change.
#[derive(Default)]
struct Told {
    bad: BTreeSet<BadAnnotation>,
    skipped: BTreeSet<Skipped>,
    failures: BTreeSet<String>,
    target: Option<Target>,
    fixed_offloads: BTreeSet<String>,
    ended: BTreeSet<(IfIndex, Ended)>,
}

impl<P: PodSource, L: LinkTable, D: Dataplane> Reconciler<P, L, D> {
    /// A loop that has not looked at anything yet.
    pub fn new(pods: P, links: L, dataplane: D, policy: Policy, mirror: MirrorIface) -> Self {
        Self { pods, links, dataplane, policy, mirror, started: false, may_end: false, told: Told::default() }
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
            let wait = match self.round().await {
                Ok(failures) if failures.is_empty() => {
                    self.told.failures.clear();
                    backoff = RETRY.0;
                    if self.may_end { BUDGET_TICK } else { TICK }
                }
                Ok(failures) => {
                    for failure in failures.difference(&self.told.failures) {
                        error!(error = failure, "failed; it will be tried again");
                    }
                    self.told.failures = failures;
                    let wait = backoff;
                    backoff = (backoff * 2).min(RETRY.1);
                    wait
                }
                Err(Refused(error)) => return Err(error),
            };
            let deadline = Instant::now() + wait;
            if wait < TICK && !self.told.failures.is_empty() {
                // What failed may make events of its own, which must not have it tried again at once.
                tokio::select! {
                    () = &mut stop => return Ok(()),
                    () = tokio::time::sleep(wait.min(PATIENCE)) => {}
                }
            }
            tokio::select! {
                () = &mut stop => return Ok(()),
                () = self.pods.changed() => {}
                () = self.links.changed() => {}
                () = tokio::time::sleep_until(deadline) => {}
            }
            tokio::select! {
                () = &mut stop => return Ok(()),
                () = tokio::time::sleep(COALESCE) => {}
            }
        }
    }

    /// One round. Returns what failed in it.
    async fn round(&mut self) -> Result<BTreeSet<String>, Refused> {
        let mut failures = BTreeSet::new();
        if let Err(error) = self.try_round(&mut failures).await {
            match error.downcast::<Refused>() {
                Ok(refused) => return Err(refused),
                Err(error) => {
                    failures.insert(format!("{error:#}"));
                }
            }
        }
        Ok(failures)
    }

    async fn try_round(&mut self, failures: &mut BTreeSet<String>) -> anyhow::Result<()> {
        let pods = self.pods.snapshot();
        let (chosen, bad) = choose(pods.as_deref().unwrap_or_default(), &self.policy);
        self.told.bad(bad);
        let namespaces: Vec<_> = chosen
            .iter()
            .filter(|(pod, _)| !pod.host_network)
            .filter_map(|(pod, _)| Some((pod.id.uid.clone(), pod.netns.clone()?)))
            .collect();

        let mut links = self.links.snapshot(&namespaces).await.context("cannot read the network devices")?;
        let actual = self.dataplane.observe().await.context("cannot read what is installed")?;
        if !self.started {
            refuse_mirror(&self.mirror, &links)?;
        }
        // What is wrong from the start must be known before the mirror interface is made.
        let mut selection = select(&chosen, &links, &self.policy);
        if pods.is_some() && !self.started {
            refuse_selection(&selection)?;
            self.started = true;
        }
        if self.change_links(&links, &actual, failures).await {
            links = self.links.snapshot(&namespaces).await.context("cannot read the network devices")?;
            selection = select(&chosen, &links, &self.policy);
        }

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
        self.told.skipped(selection.skipped);
        // What belongs to one device stands together, and is told when all of it has succeeded.
        for ops in ops.chunk_by(|a, b| a.ifindex() == b.ifindex()) {
            let mut has_failed = false;
            for op in ops {
                if let Err(error) = self.dataplane.apply(op).await {
                    failures.insert(format!("{error:#}"));
                    has_failed = true;
                }
            }
            if !has_failed {
                ops.iter().for_each(|op| tell_op(op, &actual));
            }
        }
        Ok(())
    }

    /// Changes the mirror interface where it must be; whether anything was changed.
    async fn change_links(
        &mut self,
        links: &LinkSnapshot,
        actual: &Actual,
        failures: &mut BTreeSet<String>,
    ) -> bool {
        let changes = self.mirror.changes(links, &actual.target);
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

fn refuse_selection(selection: &Selection) -> anyhow::Result<()> {
    let refused = selection.skipped.iter().find_map(|skipped| match (&skipped.why, &skipped.nic) {
        (Why::MirrorInterface(conflict), _) => {
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

impl Told {
    fn bad(&mut self, bad: Vec<BadAnnotation>) {
        let bad: BTreeSet<_> = bad.into_iter().collect();
        for BadAnnotation { pod, key, value } in bad.difference(&self.bad) {
            warn!(%pod, key, value, "annotation has an unknown value and is ignored");
        }
        self.bad = bad;
    }

    fn skipped(&mut self, skipped: Vec<Skipped>) {
        let skipped: BTreeSet<_> = skipped.into_iter().collect();
        for Skipped { pod, nic, why } in skipped.difference(&self.skipped) {
            let pod = pod.as_ref().map(tracing::field::display);
            warn!(pod, nic, reason = why.name(), "not mirrored: {why}");
        }
        self.skipped = skipped;
    }

    fn ended(&mut self, actual: &Actual) {
        let mut ended = BTreeSet::new();
        for (ifindex, installed) in &actual.taps {
            let (Some(tap), Some(budget)) = (&installed.tap, installed.ended) else { continue };
            ended.insert((*ifindex, budget));
            if !self.ended.contains(&(*ifindex, budget)) {
                let pod = tap.owner.pod.as_ref().map(tracing::field::display);
                info!(pod, %ifindex, device = tap.owner.device, budget = budget.name(), "the mirror has ended: its budget is used up");
            }
        }
        self.ended = ended;
    }

    fn target(&mut self, target: &Target) {
        if self.told_target(target) {
            return;
        }
        let Target { name, ifindex, up, .. } = target;
        match ifindex {
            None => {
                warn!(mirror_iface = name, "the mirror interface is gone; nothing is copied until it is back")
            }
            Some(ifindex) if *up => info!(mirror_iface = name, %ifindex, "the mirror interface takes copies"),
            Some(ifindex) => {
                warn!(mirror_iface = name, %ifindex, "the mirror interface is down; nothing is copied until it is up");
            }
        }
        self.target = Some(target.clone());
    }

    fn fixed_offloads(&mut self, target: &Target, fixed: Option<&BTreeSet<String>>) {
        let fixed = fixed.cloned().unwrap_or_default();
        if !fixed.is_subset(&self.fixed_offloads) {
            let offloads = fixed.iter().map(String::as_str).collect::<Vec<_>>().join(" ");
            warn!(
                mirror_iface = target.name,
                offloads,
                "the mirror interface cannot switch these offloads off; copies that need them stay as they are"
            );
        }
        self.fixed_offloads = fixed;
    }

    fn told_target(&self, target: &Target) -> bool {
        self.target.as_ref() == Some(target)
    }
}

/// Logs an op that changed something for people.
fn tell_op(op: &Op, actual: &Actual) {
    match op {
        Op::PutTap(ifindex, tap) => {
            let pod = tap.owner.pod.as_ref().map(tracing::field::display);
            let (device, nic, direction) = (&tap.owner.device, &tap.owner.nic, tap.directions.name());
            info!(pod, %ifindex, device, nic, direction, "mirroring");
        }
        Op::RemoveTap(ifindex) => {
            let owner = actual.taps.get(ifindex).and_then(|installed| Some(&installed.tap.as_ref()?.owner));
            let pod = owner.and_then(|owner| owner.pod.as_ref()).map(tracing::field::display);
            info!(pod, %ifindex, device = owner.map(|owner| &owner.device), "no longer mirroring");
        }
        Op::SetTarget(_) | Op::Attach(..) | Op::Detach(..) => {}
    }
}

#[cfg(test)]
mod tests;
