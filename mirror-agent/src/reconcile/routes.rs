//! [`Routes`]: the side of each veth on which its tap should see packets to the pod.
//!
//! `mirror_core::coverage::Route` decides for each veth. This module keeps these states, and supplies the observations:
//! the programs on the node side, and the counters of each reading. The loop calls it.
//!
//! A CNI can attach its programs after the tap, and change its mode while pods run. So each round queries the taps
//! without a known CNI again: a changed filter or chain causes a round. It queries at most once a second, and less
//! often if that would take more than 1 % of a CPU. If an event causes a round too early, another round follows.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use mirror_common::verdict::Direction;
use mirror_core::{
    coverage::{Carried, Reason, Route, cni_of},
    select::{see_inside, with_two_sides},
};
use tokio::time::Instant;
use tracing::{debug, info};

use super::Reconciler;
use crate::{
    kernel::{cpu::Work, dataplane::Dataplane, links::LinkTable},
    model::{Actual, Desired, Device, LinkSnapshot, Owner, Tap},
    select::{Capture, Choice, Selection, select},
    sources::PodSource,
};

/// The index of packets to the pod, in tables by direction.
pub(super) const INGRESS: usize = Direction::Ingress as usize;

/// The shortest interval between two queries for the CNIs of all taps.
const EVERY: Duration = Duration::from_secs(1);

/// The veths whose taps can see packets to the pod on either side.
pub(super) struct Routes {
    /// The reference for the times of the readings.
    began: Instant,
    of: BTreeMap<Device, (Owner, Route)>,
    /// The earliest time of the next query for CNIs.
    due: Instant,
    /// An event since the last query may be a program of a CNI.
    is_woken: bool,
    /// The longest wait for the next round, because this round was too early to query.
    wait: Option<Duration>,
}

impl Default for Routes {
    fn default() -> Self {
        let began = Instant::now();
        Self { began, of: BTreeMap::new(), due: began, is_woken: false, wait: None }
    }
}

impl Routes {
    /// Returns the reason why the tap on this node side should see packets to the pod at the NIC; `None` if it should
    /// not.
    pub(super) fn inside(&self, device: Device) -> Option<Reason> {
        self.of.get(&device).and_then(|(_, route)| route.inside())
    }

    /// Records an event that may be a program of a CNI.
    pub(super) fn wake(&mut self) {
        self.is_woken = true;
    }

    /// The longest wait for the next round; `None` if no query is due.
    pub(super) fn wait(&self) -> Option<Duration> {
        self.wait
    }

    /// Processes the counters of a tap's NIC, and whether the tap has missed packets. Returns whether the tap has to
    /// move to its other side.
    pub(super) fn take(&mut self, device: Device, carried: Option<&Carried>, is_bypassed: bool) -> bool {
        let Some((owner, route)) = self.of.get_mut(&device) else { return false };
        let before = route.inside();
        if let Some(carried) = carried {
            route.read(*carried, self.began.elapsed());
        }
        if is_bypassed {
            route.bypassed();
        }
        log_change(owner, before, route.inside())
    }
}

/// Logs that a tap has to move to its other side. Returns whether it has to.
fn log_change(owner: &Owner, before: Option<Reason>, now: Option<Reason>) -> bool {
    if before.is_some() == now.is_some() {
        return false;
    }
    let pod = owner.pod.as_ref().map(tracing::field::display);
    let (nic, device) = (&owner.nic, &owner.device);
    match now {
        Some(reason) => {
            info!(pod, nic, device, "packets to the pod are now tapped at its NIC: {reason}");
        }
        None => info!(
            pod,
            nic,
            device,
            "packets no longer bypass the node side of the veth: packets to the pod are now tapped there"
        ),
    }
    true
}

/// Adds the taps whose pod side has unfinished ops.
pub(super) fn complete(desired: &Desired, incomplete: &mut BTreeSet<Device>) {
    let is_lacking = |tap: &Tap| tap.head.pod_side().is_some_and(|nic| incomplete.contains(&nic));
    let lacking = desired.taps.iter().filter(|(_, tap)| is_lacking(tap));
    let lacking: Vec<_> = lacking.map(|(device, _)| *device).collect();
    incomplete.extend(lacking);
}

impl<P: PodSource, L: LinkTable, D: Dataplane> Reconciler<P, L, D> {
    /// Returns the taps, each with the side on which it should see packets to its pod.
    pub(super) async fn selection(
        &mut self,
        choice: &Choice<'_>,
        captures: &[Capture],
        links: &LinkSnapshot,
        actual: &Actual,
    ) -> Selection {
        let Choice { wanted, barred, .. } = choice;
        let mut selection = select(wanted, captures, links, &self.memory.policy);
        selection.bar(barred, captures, links);
        let candidates = with_two_sides(&selection, wanted, links, &self.memory.policy);
        let tells = !candidates.is_empty() && self.links.shows_redirects();
        let mut before = std::mem::take(&mut self.memory.routes.of);
        for device in &candidates {
            let Some(tap) = selection.taps.get(device) else { continue };
            let known = before.remove(device).filter(|(owner, _)| owner.is_same(&tap.head.owner));
            let mut route = match known {
                Some((_, route)) => route,
                None => {
                    let installed = actual.taps.get(device).and_then(|installed| installed.tap.as_ref());
                    let installed =
                        installed.filter(|installed| installed.head.owner.is_same(&tap.head.owner));
                    let is_inside = installed.is_some_and(|installed| installed.head.pod_side.is_some());
                    Route::new(self.cni_at(*device).await, tells, is_inside)
                }
            };
            let (_, program) = tap.head.own_hook(*device, Direction::Ingress);
            route.note_hook(actual.taps.get(device).is_none_or(|installed| !installed.lacks_hook(program)));
            self.memory.routes.of.insert(*device, (tap.head.owner.clone(), route));
        }
        let inside = candidates.into_iter().filter(|device| self.memory.routes.inside(*device).is_some());
        see_inside(inside.collect::<Vec<_>>(), &mut selection, links, &self.memory.policy);
        selection
    }

    /// Queries the unknown CNIs again, once in a round.
    pub(super) async fn learn_cnis(&mut self) {
        self.memory.routes.wait = None;
        let unknown = self.memory.routes.of.iter().filter(|(_, (_, route))| !route.knows_cni());
        let unknown: Vec<_> = unknown.map(|(device, _)| *device).collect();
        if unknown.is_empty() {
            return;
        }
        let now = Instant::now();
        if now < self.memory.routes.due {
            self.memory.routes.wait = self.memory.routes.is_woken.then(|| self.memory.routes.due - now);
            return;
        }
        let work = Work::begin();
        self.memory.routes.is_woken = false;
        for device in unknown {
            let Some(cni) = self.cni_at(device).await else { continue };
            if let Some((owner, route)) = self.memory.routes.of.get_mut(&device) {
                let before = route.inside();
                route.learn(cni);
                log_change(owner, before, route.inside());
            }
        }
        self.memory.routes.due = Instant::now() + work.rest(EVERY);
    }

    /// Returns the known CNI that has a program at a device of the node.
    async fn cni_at(&mut self, device: Device) -> Option<&'static str> {
        match self.dataplane.programs_at(device.ifindex).await {
            Ok(names) => names.iter().find_map(|name| cni_of(name)),
            Err(error) => {
                // The counters still show packets that bypass the tap.
                debug!(%device, "cannot read the programs of other software: {error:#}");
                None
            }
        }
    }
}
