//! Creates and deletes the relay devices (`exit`) of pods in each round, and remembers which could not be created.
//!
//! `mirror_core::exit` decides; this module carries out. The loop calls it.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use mirror_core::exit;
use tokio::time::Instant;

use super::Reconciler;
use crate::{
    dataplane::Dataplane,
    links::LinkTable,
    model::{Actual, Device, LinkChange, LinkSnapshot, NetnsId, Pod, Tap},
    pods::PodSource,
    select::{Policy, Skipped, Why},
};

/// The delay before another attempt to create a relay device after a failure.
const AGAIN: Duration = Duration::from_secs(30);
/// The shortest interval between creating two relay devices in one pod: a process of the pod can delete them as fast as
/// the agent creates them.
const REST: Duration = Duration::from_secs(1);

/// The relay devices of the last snapshot.
#[derive(Default)]
pub(super) struct Exits {
    /// The UIDs of pods that have a relay device, or a tap inside.
    pods: BTreeSet<String>,
    /// The UIDs of pods of the first list whose devices were not read yet. An agent that ended between two steps may
    /// have left a relay device in any pod, and no tap shows in which. `None` before the first list.
    unread: Option<BTreeSet<String>>,
    /// The time and the result of the last attempt to create the relay device of a namespace. The key `None` is for the
    /// relay hub. Such an error is a reason of these pods, and not a failure of the round, so other pods do not wait.
    tried: BTreeMap<Option<NetnsId>, (Instant, Result<(), String>)>,
    /// The errors for relay devices that could not be deleted.
    left: BTreeSet<String>,
    /// The longest wait for the next round, if an action is due without an event.
    wait: Option<Duration>,
}

impl Exits {
    /// Processes the first list of pods. Returns whether there are more pods to read now.
    pub(super) fn begin(&mut self, pods: &[Pod], links: &LinkSnapshot) -> bool {
        if self.unread.is_some() {
            return false;
        }
        // If there is no relay hub, the kernel has deleted all relay devices with it.
        let may_be_left = exit::hub(links).is_some();
        let is_unread = |pod: &&Pod| !pod.host_network && !links.pods.contains_key(&pod.id.uid);
        let unread = pods.iter().filter(is_unread).filter(|_| may_be_left);
        let unread: BTreeSet<_> = unread.map(|pod| pod.id.uid.clone()).collect();
        !self.unread.insert(unread).is_empty()
    }

    /// Records the state that a round has found.
    pub(super) fn note(&mut self, links: &LinkSnapshot, actual: &Actual) {
        let with_exit = exit::pods_with_exit(links);
        let taps = actual.taps.values().filter_map(|installed| installed.tap.as_ref());
        let tapped = taps.filter(|tap| tap.is_inside()).filter_map(|tap| Some(&tap.owner.pod.as_ref()?.uid));
        self.pods = with_exit.chain(tapped).cloned().collect();
        let is_read =
            |uid: &String| matches!(links.pods.get(uid), Some(Ok(inside)) if inside.stale.is_none());
        if let Some(unread) = &mut self.unread {
            unread.retain(|uid| exit::hub(links).is_some() && !is_read(uid));
        }
    }

    /// Whether a pod may have a relay device.
    pub(super) fn may_be_in(&self, uid: &str) -> bool {
        self.pods.contains(uid) || self.unread.as_ref().is_some_and(|unread| unread.contains(uid))
    }

    /// The longest wait for the next round, while an action is due.
    pub(super) fn wait(&self) -> Option<Duration> {
        self.wait
    }

    /// The errors for relay devices that could not be deleted. They concern their pods only.
    pub(super) fn left(&self) -> &BTreeSet<String> {
        &self.left
    }

    /// Returns the wanted taps whose copies cannot leave their pod.
    pub(super) fn missing(&self, wanted: &BTreeMap<Device, Tap>, policy: &Policy) -> Vec<Skipped> {
        let taps = wanted.values().filter(|tap| tap.is_inside() && tap.exit.is_none());
        let missing = taps.filter_map(|tap| {
            let why = |of| self.tried.get(&of)?.1.as_ref().err();
            let why = why(None).or_else(|| why(Some(tap.owner.netns)))?;
            exit::needs_exit(tap, policy).then(|| Skipped {
                pod: tap.owner.pod.clone(),
                nic: Some(tap.owner.nic.clone()),
                mirror: None,
                why: Why::NoExit(why.clone()),
            })
        });
        missing.collect()
    }
}

impl<P: PodSource, L: LinkTable, D: Dataplane> Reconciler<P, L, D> {
    /// Creates the relay hub, and creates and deletes relay devices, so that exactly these namespaces have one. Returns
    /// whether anything was changed.
    pub(super) async fn change_exits(&mut self, needed: &BTreeSet<NetnsId>, links: &LinkSnapshot) -> bool {
        self.exits.left.clear();
        self.exits.tried.retain(|of, _| of.map_or(!needed.is_empty(), |netns| needed.contains(&netns)));
        let tried = &self.exits.tried;
        let rest = |change: &LinkChange| {
            let (at, made) = made(change).and_then(|of| tried.get(&of))?;
            let rest = if made.is_ok() { REST } else { AGAIN };
            rest.checked_sub(at.elapsed()).filter(|rest| *rest > Duration::ZERO)
        };
        let mut changes = exit::changes(needed, links);
        self.exits.wait = changes.iter().filter_map(rest).min();
        changes.retain(|change| rest(change).is_none());
        // The relay hub is deleted in the round after its last relay device.
        if changes.iter().any(|change| matches!(change, LinkChange::DeleteExit(_))) {
            self.exits.wait = Some(REST.min(self.exits.wait.unwrap_or(REST)));
        }
        let mut changed = false;
        for change in &changes {
            let done = self.links.apply(change).await.map_err(|error| format!("{error:#}"));
            changed |= done.is_ok();
            match (made(change), done) {
                (Some(of), done) => drop(self.exits.tried.insert(of, (Instant::now(), done))),
                (None, Err(error)) => drop(self.exits.left.insert(error)),
                (None, Ok(())) => {}
            }
        }
        changed
    }
}

/// Returns the namespace whose relay device a change creates. `Some(None)`: the change creates the relay hub, or brings
/// it up. `None`: the change deletes a device.
const fn made(change: &LinkChange) -> Option<Option<NetnsId>> {
    match change {
        LinkChange::CreateExit(netns, _) => Some(Some(*netns)),
        LinkChange::DeleteExit(_) | LinkChange::Delete(_) => None,
        _ => Some(None),
    }
}
