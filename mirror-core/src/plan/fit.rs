//! Chooses the sessions that fit into the kernel's tables. Sessions that do not fit, or whose filter the kernel
//! rejects, are left out.
//!
//! The ranks are: enforced mirrors, other mirrors, captures of root, readers of the API. Installed sessions do not
//! change this order. Within a rank the namespaces take turns: the next slot goes to the namespace that has the
//! smallest share after it gets the slot. The share of a namespace is its largest share of any table. So a
//! namespace with many pods takes no room from the share of another one (max-min fairness). A namespace spends its
//! share first on installed sessions that are wanted unchanged, then on changed ones, then on new ones. Each of
//! these groups is in the order of the devices, and on a device in the order of the origins and names of the
//! mirrors. So an installed session loses its slot only if its namespace has more than its share and another
//! namespace needs the room. If several tables are full, the shares depend on that order, so the allocation is
//! repeated until its result no longer changes. `plan` calls this module.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::RangeInclusive,
};

use mirror_common::abi::{MAX_FORMS, MAX_SESSIONS_PER_TAP};

use super::keys;
use crate::{
    model::{Actual, Capacity, Desired, Device, MirrorId, Origin, Place, Session, Tap},
    select::Why,
    settings::CaptureFilter,
};

/// The sessions that do not fit, each with the reason.
pub type Unfit = BTreeMap<(Device, MirrorId), Why>;

/// The ranks of sessions, whatever is installed.
const RANKS: [RangeInclusive<Origin>; 4] = [
    Origin::Enforced..=Origin::Enforced,
    Origin::Policy..=Origin::Annotation(Place::Pod),
    Origin::Capture..=Origin::Capture,
    Origin::Reader..=Origin::Reader,
];

/// Maximum number of times that [`fit`] repeats the allocation. It bounds the time that tenants can make `fit`
/// take.
const MOST_REPEATS: usize = 8;

/// Returns the taps with the sessions that fit, and the sessions that do not.
pub(super) fn fit(desired: &Desired, actual: &Actual) -> (BTreeMap<Device, Tap>, Unfit) {
    let (wanted, lacking) = keys::assign(desired, actual);
    let mut fitting = allocate(&wanted, actual, |device| actual.taps.get(device)?.tap.as_ref());
    // The next round finds these sessions installed, and its order of the candidates is another one. It must come to
    // the same result.
    for _ in 0..MOST_REPEATS {
        if fitting.1.is_empty() {
            break;
        }
        let next = allocate(&wanted, actual, |device| fitting.0.get(device));
        let is_same = next.0 == fitting.0;
        fitting = next;
        if is_same {
            break;
        }
    }
    let (mut fitting, mut unfit) = fitting;
    // In the kernel the limits are a flag of sessions, which those of root's captures do not have. So a tap that has only
    // these is read back without limits.
    for tap in fitting.values_mut() {
        tap.head.is_limited &= tap.sessions.values().any(|session| session.origin != Origin::Capture);
    }
    unfit.extend(lacking);
    (fitting, unfit)
}

/// Whether the tables have room for the sessions of these taps beside those that they replace, and the mark for the
/// forms of both: a session that is added while all bits are in use stays without one.
pub(super) fn fits_beside(taps: &BTreeMap<Device, Tap>, actual: &Actual) -> bool {
    let replaced = actual.taps.iter().flat_map(|(device, installed)| {
        let of = installed.tap.iter().flat_map(|tap| &tap.sessions);
        of.filter(|(mirror, _)| taps.get(device).is_none_or(|tap| !tap.sessions.contains_key(*mirror)))
    });
    let replaced: Vec<_> = replaced.map(|(_, session)| session).collect();
    let wanted: Vec<_> = taps.values().flat_map(|tap| tap.sessions.values()).collect();
    let all = || wanted.iter().chain(&replaced).copied();
    let mut taken = Taken::default();
    all().all(|session| taken.fit(0, session, actual).is_ok())
        && (forms(all()) <= MAX_FORMS || forms(wanted.iter().copied()) > MAX_FORMS)
}

/// The number of forms in which sessions copy, apart from captures.
fn forms<'s>(sessions: impl Iterator<Item = &'s Session>) -> usize {
    let mirrors = sessions.filter(|session| session.origin < Origin::Capture);
    mirrors.map(|session| (&session.target, session.settings.snaplen)).collect::<BTreeSet<_>>().len()
}

/// Allocates the tables to the wanted sessions, given the taps that are installed.
fn allocate<'i>(
    wanted: &BTreeMap<Device, Tap>,
    actual: &Actual,
    installed: impl Fn(&Device) -> Option<&'i Tap>,
) -> (BTreeMap<Device, Tap>, Unfit) {
    let mut taken = Taken::default();
    let (mut fitting, mut unfit) = (BTreeMap::new(), Unfit::new());
    for rank in RANKS {
        let mut turns = Turns::default();
        for (device, tap) in wanted {
            let installed =
                installed(device).filter(|installed| installed.head.owner.is_same(&tap.head.owner));
            let of_rank = in_order(tap).into_iter().filter(|(_, session)| rank.contains(&session.origin));
            for (mirror, session) in of_rank {
                let pass = match installed.and_then(|installed| installed.sessions.get(mirror)) {
                    Some(installed) if installed == session => Pass::Unchanged,
                    Some(_) => Pass::Changed,
                    None => Pass::New,
                };
                turns.add(Candidate { device: *device, tap, mirror, session, pass });
            }
        }
        turns.sort();
        for namespace in turns.of.keys().copied().collect::<Vec<_>>() {
            turns.enqueue(namespace, &fitting, &actual.capacity);
        }
        while let Some((namespace, next)) = turns.next() {
            let (new, Candidate { device, tap, mirror, session, .. }) = (next.entries(&fitting), next);
            match taken.fit(new, session, actual) {
                Ok(()) => {
                    let bare = || Tap { head: tap.head.clone(), sessions: BTreeMap::new() };
                    let sessions = &mut fitting.entry(device).or_insert_with(bare).sessions;
                    sessions.insert(mirror.clone(), session.clone());
                    turns.took(namespace, new, session);
                }
                Err(why) => drop(unfit.insert((device, mirror.clone()), why)),
            }
            turns.enqueue(namespace, &fitting, &actual.capacity);
        }
    }
    (fitting, unfit)
}

/// The order of sessions within a rank and a namespace.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Pass {
    Unchanged,
    Changed,
    New,
}

/// A session that needs a slot.
struct Candidate<'a> {
    device: Device,
    tap: &'a Tap,
    mirror: &'a MirrorId,
    session: &'a Session,
    pass: Pass,
}

impl Candidate<'_> {
    /// The number of new entries of its tap. A tap with two sides needs two.
    fn entries(&self, fitting: &BTreeMap<Device, Tap>) -> usize {
        usize::from(!fitting.contains_key(&self.device)) * (1 + usize::from(self.tap.head.pod_side.is_some()))
    }
}

/// A namespace. `None`: interfaces that belong to no pod.
type Namespace<'a> = Option<&'a str>;

/// The candidates of the namespaces.
#[derive(Default)]
struct Turns<'a> {
    /// The candidates of each namespace, and the resources that the namespace has used.
    of: BTreeMap<Namespace<'a>, (Taken<'a>, VecDeque<Candidate<'a>>)>,
    /// The namespaces with candidates, by the share that each has if it gets its next candidate. A turn changes
    /// only the share of the namespace that takes it. Between equal shares an installed session wins.
    queue: BTreeSet<(usize, Pass, Namespace<'a>)>,
}

impl<'a> Turns<'a> {
    fn add(&mut self, candidate: Candidate<'a>) {
        let namespace = candidate.tap.head.owner.pod.as_ref().map(|pod| pod.namespace.as_str());
        self.of.entry(namespace).or_default().1.push_back(candidate);
    }

    fn sort(&mut self) {
        for (_, candidates) in self.of.values_mut() {
            candidates.make_contiguous().sort_by_key(|candidate| candidate.pass);
        }
    }

    /// Adds a namespace to the queue, if it has a candidate.
    fn enqueue(&mut self, namespace: Namespace<'a>, fitting: &BTreeMap<Device, Tap>, capacity: &Capacity) {
        if let Some((taken, candidates)) = self.of.get(&namespace)
            && let Some(next) = candidates.front()
        {
            let share = share(taken.with(next.entries(fitting), next.session), capacity);
            self.queue.insert((share, next.pass, namespace));
        }
    }

    /// The next candidate, of the namespace that has the smallest share after it gets the candidate.
    fn next(&mut self) -> Option<(Namespace<'a>, Candidate<'a>)> {
        let (.., namespace) = self.queue.pop_first()?;
        let candidate = self.of.get_mut(&namespace)?.1.pop_front()?;
        Some((namespace, candidate))
    }

    fn took(&mut self, namespace: Namespace<'a>, entries: usize, session: &'a Session) {
        if let Some((taken, _)) = self.of.get_mut(&namespace) {
            taken.take(entries, session);
        }
    }
}

/// The resources that one namespace uses, or all namespaces together. A shared filter counts for each namespace
/// that uses it. Otherwise the first namespace would pay for all of them, and another one can be the first in the
/// next round.
#[derive(Default)]
struct Taken<'a> {
    /// The amount of each table: taps, sessions, filters, instructions of filters.
    of: [usize; 4],
    filters: BTreeSet<&'a CaptureFilter>,
}

impl<'a> Taken<'a> {
    /// The amount of each table with one more session, which needs this number of entries.
    fn with(&self, entries: usize, session: &Session) -> [usize; 4] {
        let filter = session.settings.filter.as_ref().filter(|filter| !self.filters.contains(filter));
        let more = [entries, 1, usize::from(filter.is_some()), filter.map_or(0, CaptureFilter::length)];
        std::array::from_fn(|table| self.of[table] + more[table])
    }

    fn take(&mut self, entries: usize, session: &'a Session) {
        self.of = self.with(entries, session);
        self.filters.extend(session.settings.filter.as_ref());
    }

    /// Takes the resources of the session, if the tables have room for it beside what is taken.
    fn fit(&mut self, entries: usize, session: &'a Session, actual: &Actual) -> Result<(), Why> {
        let filter = session.settings.filter.as_ref();
        if let Some(why) = filter.and_then(|filter| actual.refused.get(filter)) {
            return Err(Why::FilterRefused(why.clone()));
        }
        let Capacity { taps, sessions, filters, instructions } = actual.capacity;
        let limits = [
            (taps, "taps per node is reached"),
            (sessions, "sessions (mirrors of NICs) per node is reached"),
            (filters, "different filters per node is reached"),
            (instructions, "instructions of all filters per node is exceeded by this filter"),
        ];
        let mut tables = self.with(entries, session).into_iter().zip(limits);
        if let Some((_, (most, of))) = tables.find(|(needed, (most, _))| needed > most) {
            return Err(Why::NoRoom(format!("the limit of {most} {of}")));
        }
        self.take(entries, session);
        Ok(())
    }
}

/// The largest of the shares that these amounts take of their tables, in millionths.
fn share(of: [usize; 4], capacity: &Capacity) -> usize {
    let Capacity { taps, sessions, filters, instructions } = *capacity;
    let shares = of.into_iter().zip([taps, sessions, filters, instructions]);
    shares.map(|(of, all)| of.saturating_mul(1_000_000) / all.max(1)).max().unwrap_or_default()
}

/// The sessions of a tap. Those that keep their slot if not all fit come first.
fn in_order(tap: &Tap) -> Vec<(&MirrorId, &Session)> {
    let mut sessions: Vec<_> = tap.sessions.iter().collect();
    sessions.sort_by_key(|(mirror, session)| (session.origin, (*mirror).clone()));
    sessions.truncate(MAX_SESSIONS_PER_TAP);
    sessions
}
