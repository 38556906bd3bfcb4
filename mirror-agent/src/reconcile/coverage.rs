//! [`Watch`]: periodically reads the counters of the NICs and of the taps, and keeps the resulting coverage states.
//!
//! `mirror_core::coverage` evaluates the counters. This module knows which counters belong together, and when they are
//! due. It reads them between the rounds, because a round costs more. A reading that changes a state causes a round, so
//! that the reason, the log and the Events have one source. The loop calls this module.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use mirror_common::verdict::Direction;
use mirror_core::coverage::{AtHook, Carried, Judge, Kind, Reading, Seen, State, Way};
use tokio::time::Instant;
use tracing::debug;

use super::{
    Reconciler,
    routes::{INGRESS, Routes},
};
use crate::{
    kernel::{
        cpu::Work,
        dataplane::{Dataplane, TapCount},
        links::{LinkTable, NicPlace},
    },
    model::{
        Actual, ActualTap, Desired, Device, HookState, LinkKind, LinkSnapshot, MirrorId, Owner, Program, Tap,
    },
    report::{Judged, NicCoverage, Report},
    select::{Skipped, Why},
    sources::PodSource,
};

/// The shortest interval between two readings.
const EVERY: Duration = Duration::from_secs(2);
/// The grace period before a bypass is reported while the tap moves to its other side.
const CHANGE: Duration = Duration::from_secs(10);

/// The NICs of the taps, and their coverage.
pub(super) struct Watch {
    /// The reference for the times of the judges.
    began: Instant,
    nics: BTreeMap<Device, Watched>,
    due: Option<Instant>,
}

/// A watched NIC.
struct Watched {
    owner: Owner,
    /// The location of its counters; `None` if it is unknown at the moment.
    place: Option<NicPlace>,
    /// Packets to the pod are seen at the NIC, by a tap on the node side of a veth.
    sees_inside: bool,
    judges: [Judge; Direction::COUNT],
}

impl Default for Watch {
    fn default() -> Self {
        Self { began: Instant::now(), nics: BTreeMap::new(), due: None }
    }
}

impl<P: PodSource, L: LinkTable, D: Dataplane> Reconciler<P, L, D> {
    /// Reads and evaluates the counters. Returns whether a state has changed, so that a round is necessary. Otherwise
    /// the report already has the new numbers.
    pub(super) async fn read_counters(&mut self) -> bool {
        let work = Work::begin();
        let (devices, places) = self.memory.coverage.places();
        let before = self.dataplane.seen(&devices);
        let carried = self.links.counters(&places).await;
        let after = self.dataplane.seen(&devices);
        let (before, carried, after) = match (before, carried, after) {
            (Ok(before), Ok(carried), Ok(after)) => (before, carried, after),
            (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => {
                debug!("cannot read the counters of the NICs: {error:#}");
                Default::default()
            }
        };
        let carried = devices.into_iter().zip(carried).filter_map(|(device, of)| Some((device, of?)));
        let carried = carried.collect();
        let mut has_changed = self.memory.coverage.take(&before, &carried, &after, Instant::now());
        for (device, is_bypassed) in self.memory.coverage.ingress() {
            let carried = carried.get(&device).map(|carried| &carried[INGRESS]);
            has_changed |= self.memory.routes.take(device, carried, is_bypassed);
        }
        self.memory.coverage.due = Some(Instant::now() + work.rest(EVERY));
        if !has_changed {
            let coverage = self.memory.coverage.report(&self.memory.routes);
            let report = Report { coverage, ..Report::clone(&self.report.borrow()) };
            self.report.send_replace(report.into());
        }
        has_changed
    }
}

impl Watch {
    /// The time of the next reading; `None` if there is nothing to read.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Updates the watched NICs from the result of a round: the taps of pods, the locations of their counters, and the
    /// programs ahead of podmirror's. `incomplete`: the devices with unfinished ops. `coming`: the NICs at which a tap
    /// will see packets to its pod only after the next round. `shows_redirects`: see [`LinkTable`].
    pub(super) fn follow(
        &mut self,
        desired: &Desired,
        actual: &Actual,
        links: &LinkSnapshot,
        incomplete: &BTreeSet<Device>,
        coming: &BTreeSet<Device>,
        shows_redirects: bool,
    ) {
        let at = self.began.elapsed();
        let (mut of_pods, mut before) = (BTreeMap::new(), std::mem::take(&mut self.nics));
        for (device, tap) in desired.taps.iter().filter(|(_, tap)| tap.head.owner.pod.is_some()) {
            let place = place(*device, tap, links);
            let same = before.remove(device).filter(|watched| {
                watched.owner.is_same(&tap.head.owner) && (place.is_none() || watched.place == place)
            });
            let entry = actual.taps.get(device).and_then(|installed| installed.tap.as_ref());
            let is_done = !incomplete.contains(device) || entry.is_some_and(|tap| tap.head.sees_inside());
            let sees_inside = tap.head.pod_side().is_some_and(|nic| is_done && !coming.contains(&nic));
            let tells = |direction| {
                // These packets pass a tap at the NIC itself.
                direction == Direction::Egress || shows_redirects || !device.is_on_node() || sees_inside
            };
            let before = same.as_ref().is_some_and(|watched| watched.sees_inside);
            let mut judges = match same {
                Some(watched) => watched.judges,
                None => Direction::ALL.map(|direction| Judge::new(tells(direction), at)),
            };
            if before != sees_inside {
                // The tap can miss other packets now than before, so the old state is void.
                judges[INGRESS] = Judge::new(tells(Direction::Ingress), at);
            }
            for direction in Direction::ALL {
                let (at_device, program) = match direction {
                    // The node side sees these packets until the pod side does, and again while the pod side cannot.
                    Direction::Ingress if !sees_inside => tap.head.own_hook(*device, direction),
                    _ => tap.head.hook(*device, direction),
                };
                let hook = at_hook(actual.taps.get(&at_device), program, incomplete.contains(device));
                judges[direction as usize].hook(hook, at);
            }
            for (judge, kind) in judges.iter_mut().zip(kinds(*device, tap, links).into_iter().flatten()) {
                judge.kind(kind, at);
            }
            of_pods.insert(*device, Watched { owner: tap.head.owner.clone(), place, sees_inside, judges });
        }
        self.nics = of_pods;
        self.due = match self.nics.is_empty() {
            true => None,
            false => Some(self.due.unwrap_or_else(Instant::now)),
        };
    }

    /// Returns the taps whose counters can be read, and the locations of the counters.
    fn places(&self) -> (Vec<Device>, Vec<NicPlace>) {
        self.nics.iter().filter_map(|(device, watched)| Some((*device, watched.place?))).unzip()
    }

    /// Evaluates the counters that were read. Returns whether a state has changed.
    fn take(
        &mut self,
        before: &BTreeMap<Device, TapCount>,
        carried: &BTreeMap<Device, [Carried; Direction::COUNT]>,
        after: &BTreeMap<Device, TapCount>,
        now: Instant,
    ) -> bool {
        let at = now.saturating_duration_since(self.began);
        let mut has_changed = false;
        for (device, watched) in &mut self.nics {
            let counts = before.get(device).zip(after.get(device));
            let counts = counts.filter(|(before, after)| before.serial == after.serial);
            for direction in Direction::ALL {
                let judge = &mut watched.judges[direction as usize];
                let state = judge.state();
                match carried.get(device) {
                    Some(carried) => {
                        let index = direction as usize;
                        let seen = counts.map(|(before, after)| Seen {
                            serial: after.serial,
                            before: before.seen[index],
                            after: after.seen[index],
                        });
                        let mut carried = carried[index];
                        if watched.sees_inside && index == INGRESS {
                            // Packets that bypass the node side pass the NIC, where they are seen.
                            carried.end = None;
                        }
                        judge.read(Reading { at, carried, seen });
                    }
                    None => judge.missed(at),
                }
                has_changed |= judge.state() != state;
            }
        }
        has_changed
    }

    /// Returns each tap, and whether packets bypass the node side of its veth on the way to the pod. Packets that are
    /// missing for another reason do not count: a program ahead of podmirror's may hide them, which the next round
    /// finds out.
    fn ingress(&self) -> Vec<(Device, bool)> {
        let is_bypassed = |watched: &Watched| watched.judges[INGRESS].state() == State::Bypassed(Way::Peer);
        self.nics.iter().map(|(device, watched)| (*device, is_bypassed(watched))).collect()
    }

    /// The states for the report.
    pub(super) fn report(&self, routes: &Routes) -> BTreeMap<Device, NicCoverage> {
        let nics = self.nics.iter().filter_map(|(device, Watched { owner, sees_inside, judges, .. })| {
            let directions = judges.each_ref().map(|judge| {
                let totals = judge.totals();
                let since = self.began + judge.since();
                Judged { state: judge.state(), since, seen: totals.seen, carried: totals.carried }
            });
            let Owner { pod, nic, device: name, .. } = owner.clone();
            let inside = routes.inside(*device).filter(|_| *sees_inside);
            Some((*device, NicCoverage { pod: pod?, nic, device: name, inside, directions }))
        });
        nics.collect()
    }

    /// Returns the directions that a mirror copies and in which packets bypass the tap.
    pub(super) fn bypassed(&self, desired: &Desired) -> Vec<Skipped> {
        let mut skipped = Vec::new();
        for (device, watched) in &self.nics {
            let Some(tap) = desired.taps.get(device) else { continue };
            for direction in Direction::ALL {
                let judge = &watched.judges[direction as usize];
                let State::Bypassed(way) = judge.state() else { continue };
                let changes_side =
                    direction == Direction::Ingress && tap.head.pod_side.is_some() && !watched.sees_inside;
                if changes_side && self.began.elapsed().saturating_sub(judge.since()) < CHANGE {
                    continue;
                }
                let wants =
                    |session: &crate::model::Session| session.directions.bits() & direction.bit() != 0;
                let mut mirrors = tap.sessions.iter().filter(|(_, session)| wants(session)).map(|(id, _)| id);
                let Some(first) = mirrors.next() else { continue };
                // The reason concerns the whole pod, unless only captures copy this direction.
                let is_of_captures = |mirror: &MirrorId| mirror.0.is_capture();
                let only = is_of_captures(first) && mirrors.all(is_of_captures);
                let (mirror, why) = (only.then_some(first), Why::Bypassed(direction, way));
                skipped.push(Skipped::of_nic(&tap.head.owner, mirror, why));
            }
        }
        skipped
    }
}

/// Returns the location of the counters of a tap's NIC.
fn place(device: Device, tap: &Tap, links: &LinkSnapshot) -> Option<NicPlace> {
    if device.is_on_node() {
        let nic = links.host.get(&device.ifindex)?.peer?;
        return Some(NicPlace {
            nsid: nic.nsid?,
            ifindex: crate::model::IfIndex(nic.ifindex),
            end: Some(device.ifindex),
        });
    }
    let inside = links.pods.get(&tap.head.owner.pod.as_ref()?.uid)?.as_ref().ok()?;
    Some(NicPlace { nsid: inside.nsid?, ifindex: device.ifindex, end: None })
}

/// Returns, by direction, what the kind of a tap's NIC means for its counters; `None` if it is unknown at the moment.
fn kinds(device: Device, tap: &Tap, links: &LinkSnapshot) -> Option<[Kind; Direction::COUNT]> {
    let mut kinds = [Kind::Segments; Direction::COUNT];
    if device.is_on_node() {
        // A veth.
        return Some(kinds);
    }
    let inside = links.pods.get(&tap.head.owner.pod.as_ref()?.uid)?.as_ref().ok()?;
    match &inside.links.iter().find(|nic| nic.ifindex == device.ifindex)?.kind {
        LinkKind::IpvlanL3s => {
            kinds.fill(Kind::Plain);
            kinds[INGRESS] = Kind::L3s;
        }
        LinkKind::Other(kind) if kind == "macvlan" || kind == "ipvlan" => kinds.fill(Kind::Plain),
        _ => {}
    }
    Some(kinds)
}

/// Returns the state of a hook after a round, given its state before the round.
fn at_hook(installed: Option<&ActualTap>, program: Program, is_incomplete: bool) -> AtHook {
    let mut hidden = installed.into_iter().flat_map(|installed| &installed.hidden);
    let hidden = hidden.find(|(hook, _)| *hook == program.hook()).map(|(_, hidden)| hidden);
    let runs = installed
        .is_some_and(|installed| matches!(installed.state(program), HookState::Current | HookState::Stale));
    match hidden {
        Some(hidden) => AtHook::Behind(hidden.clone()),
        None if runs || !is_incomplete => AtHook::First,
        None => AtHook::Absent,
    }
}
