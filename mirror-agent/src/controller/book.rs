//! [`Book`]: what is known of all MirrorNodes and Mirrors, and which status is to be written next, and when.
//!
//! No connection, and the times come from outside. [`controller`](super) hands over what the watches bring, and carries
//! out the writes.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use mirror_api::{
    MirrorNodeStatus, MirrorStatus, MirrorSummary,
    sum::{Asked, sum},
};
use tokio::time::Instant;

/// How long a change waits for others, as when a Mirror is new and its nodes begin to report.
const SETTLE: Duration = Duration::from_secs(1);
/// The shortest time between two sums, and so between two writes, of one status; and the pause after a write that has failed.
const PACE: Duration = Duration::from_secs(10);
/// The shortest time between two writes of one status if only counters have changed.
const COUNTS_PACE: Duration = Duration::from_secs(60);
/// Every agent watches the Mirrors, so each write goes out once for each node. Writes of counters become rarer, so that
/// no more than this number goes out in a second.
const MOST_SENT_A_SECOND: usize = 10_000;
/// A report that is older does not count. Agents repeat their reports three times as often.
const STALE: Duration = Duration::from_secs(15 * 60);

/// The name of a Mirror or ClusterMirror, in the order in which a MirrorNode has them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    /// The namespace of a Mirror; `None`: a ClusterMirror, which has none.
    pub(super) namespace: Option<String>,
    pub(super) name: String,
}

impl Key {
    fn of(summary: &MirrorSummary) -> Self {
        Self { namespace: summary.namespace.clone(), name: summary.name.clone() }
    }
}

/// A status to write.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Write {
    pub(super) key: Key,
    pub(super) uid: String,
    pub(super) status: MirrorStatus,
    /// The status so far.
    pub(super) before: Option<MirrorStatus>,
}

/// All that is known.
#[derive(Debug, Default)]
pub(super) struct Book {
    nodes: BTreeMap<String, Node>,
    /// What the nodes report on each Mirror, by their names.
    reports: BTreeMap<Key, BTreeMap<String, MirrorSummary>>,
    mirrors: BTreeMap<Key, Entry>,
    /// When the status of a Mirror is to be looked at.
    due: BTreeSet<(Instant, Key)>,
}

#[derive(Debug)]
struct Node {
    reported: Option<Timestamp>,
    is_stale: bool,
    /// The Mirrors that it reports on.
    keys: BTreeSet<Key>,
    /// The last of these, if the node has more to report than a MirrorNode holds.
    last: Option<Key>,
}

impl Node {
    /// Whether its report lacks this Mirror for want of room.
    fn may_have_left_out(&self, key: &Key) -> bool {
        !self.is_stale && self.last.as_ref().is_some_and(|last| last < key)
    }
}

#[derive(Debug)]
struct Entry {
    uid: String,
    asked: Asked,
    /// As the API server has it.
    status: Option<MirrorStatus>,
    /// When it was summed up, and when it was written.
    looked: Option<Instant>,
    written: Option<Instant>,
    due: Option<Instant>,
}

impl Book {
    /// Takes in the report of a node, or that it has gone.
    pub(super) fn set_node(
        &mut self,
        node: &str,
        status: Option<MirrorNodeStatus>,
        now: Instant,
        at: Timestamp,
    ) {
        let (before, is_there) = (self.nodes.remove(node), status.is_some());
        let MirrorNodeStatus { reported, mirrors, more_mirrors, .. } = status.unwrap_or_default();
        let reported = reported.map(|Time(at)| at);
        let keys: BTreeSet<_> = mirrors.iter().map(Key::of).collect();
        let is_stale = is_stale(reported, at);
        let last = more_mirrors.and_then(|_| keys.last().cloned());
        let mut changed = BTreeSet::new();
        if let Some(before) = &before {
            for key in before.keys.difference(&keys) {
                if let Some(reports) = self.reports.get_mut(key) {
                    reports.remove(node);
                    if reports.is_empty() {
                        self.reports.remove(key);
                    }
                }
                changed.insert(key.clone());
            }
        }
        for summary in mirrors {
            let key = Key::of(&summary);
            let of = self.reports.entry(key.clone()).or_default();
            if of.get(node) != Some(&summary) {
                of.insert(node.to_owned(), summary);
                changed.insert(key);
            }
        }
        let was = before.as_ref();
        if was.is_some_and(|before| before.is_stale != is_stale) {
            changed.extend(keys.iter().cloned());
        }
        if was.and_then(|before| before.last.as_ref()) != last.as_ref() {
            changed.extend(self.mirrors.keys().cloned());
        }
        if is_there {
            self.nodes.insert(node.to_owned(), Node { reported, is_stale, keys, last });
        }
        changed.iter().for_each(|key| self.mark(key, now));
    }

    /// Takes in a Mirror or ClusterMirror. `asked` reads what it asks for, if that is new.
    pub(super) fn set_mirror(
        &mut self,
        key: Key,
        uid: &str,
        generation: i64,
        status: Option<MirrorStatus>,
        asked: impl FnOnce() -> Asked,
        now: Instant,
    ) {
        match self.mirrors.get_mut(&key) {
            Some(entry) if entry.uid == uid && entry.asked.generation == generation => {
                if entry.status == status {
                    return;
                }
                entry.status = status;
            }
            _ => {
                let due = self.mirrors.get(&key).and_then(|entry| entry.due);
                let entry =
                    Entry { uid: uid.to_owned(), asked: asked(), status, looked: None, written: None, due };
                self.mirrors.insert(key.clone(), entry);
            }
        }
        self.mark(&key, now);
    }

    /// Takes in that a Mirror or ClusterMirror has gone.
    pub(super) fn remove_mirror(&mut self, key: &Key) {
        if let Some(due) = self.mirrors.remove(key).and_then(|entry| entry.due) {
            self.due.remove(&(due, key.clone()));
        }
    }

    /// The names of all nodes.
    pub(super) fn nodes(&self) -> impl Iterator<Item = &String> {
        self.nodes.keys()
    }

    /// How many reports do not count, because they are too old.
    pub(super) fn stale(&self) -> usize {
        self.nodes.values().filter(|node| node.is_stale).count()
    }

    /// The names of all Mirrors and ClusterMirrors.
    pub(super) fn mirrors(&self) -> impl Iterator<Item = &Key> {
        self.mirrors.keys()
    }

    /// Looks for reports that have become too old.
    pub(super) fn expire(&mut self, now: Instant, at: Timestamp) {
        let mut changed = BTreeSet::new();
        for node in self.nodes.values_mut() {
            if std::mem::replace(&mut node.is_stale, is_stale(node.reported, at)) != node.is_stale {
                changed.extend(node.keys.iter().cloned());
                if node.last.is_some() {
                    changed.extend(self.mirrors.keys().cloned());
                }
            }
        }
        changed.iter().for_each(|key| self.mark(key, now));
    }

    /// When a status is to be looked at next.
    pub(super) fn next(&self) -> Option<Instant> {
        self.due.first().map(|(due, _)| *due)
    }

    /// The next status to write, if one is due.
    pub(super) fn due(&mut self, now: Instant, at: Timestamp) -> Option<Write> {
        let counts_pace = self.counts_pace();
        while self.next().is_some_and(|due| due <= now) {
            let (_, key) = self.due.pop_first()?;
            let Some(status) = self.sum(&key, at) else { continue };
            let Some(entry) = self.mirrors.get_mut(&key) else { continue };
            (entry.due, entry.looked) = (None, Some(now));
            if entry.status.as_ref() == Some(&status) {
                continue;
            }
            let are_counts = entry
                .status
                .as_ref()
                .is_some_and(|before| MirrorStatus { packets: before.packets, ..status.clone() } == *before);
            if let Some(later) = entry.written.map(|written| written + counts_pace)
                && are_counts
                && now < later
            {
                self.set_due(&key, later);
                continue;
            }
            return Some(Write { uid: entry.uid.clone(), before: entry.status.clone(), key, status });
        }
        None
    }

    /// Notes whether a status was written.
    pub(super) fn note(&mut self, write: &Write, is_written: bool, now: Instant) {
        let Some(entry) = self.mirrors.get_mut(&write.key).filter(|entry| entry.uid == write.uid) else {
            return;
        };
        entry.written = Some(now);
        if is_written {
            entry.status = Some(write.status.clone());
        } else {
            self.set_due(&write.key, now + PACE);
        }
    }

    /// The shortest time between two writes of one status if only counters have changed.
    fn counts_pace(&self) -> Duration {
        let seconds = self.mirrors.len() * self.nodes.len() / MOST_SENT_A_SECOND;
        COUNTS_PACE.max(Duration::from_secs(seconds as u64))
    }

    /// A change may concern this Mirror.
    fn mark(&mut self, key: &Key, now: Instant) {
        if let Some(entry) = self.mirrors.get(key) {
            let earliest = entry.looked.map_or(now, |looked| looked + PACE);
            self.set_due(key, earliest.max(now + SETTLE));
        }
    }

    /// Sets when the status of a Mirror is looked at, unless it is to be looked at earlier.
    fn set_due(&mut self, key: &Key, at: Instant) {
        let Some(entry) = self.mirrors.get_mut(key) else { return };
        if let Some(before) = entry.due {
            if before <= at {
                return;
            }
            self.due.remove(&(before, key.clone()));
        }
        entry.due = Some(at);
        self.due.insert((at, key.clone()));
    }

    fn sum(&self, key: &Key, at: Timestamp) -> Option<MirrorStatus> {
        let entry = self.mirrors.get(key)?;
        let reports = self.reports.get(key).into_iter().flatten();
        let counts = |node: &str| self.nodes.get(node).is_some_and(|node| !node.is_stale);
        // A report on a Mirror that had the same name before says nothing of this one.
        let reports = reports.filter(|(node, summary)| summary.uid == entry.uid && counts(node));
        let reports: Vec<_> = reports.map(|(node, summary)| (node.as_str(), summary)).collect();
        let left_out = self.nodes.values().filter(|node| node.may_have_left_out(key)).count();
        let asked = Asked { left_out, ..entry.asked.clone() };
        // The API server keeps whole seconds.
        let now = Time(Timestamp::from_second(at.as_second()).unwrap_or(at));
        Some(sum(&asked, reports, entry.status.as_ref(), &now))
    }
}

/// Whether a report is too old.
fn is_stale(reported: Option<Timestamp>, at: Timestamp) -> bool {
    reported.is_some_and(|reported| at.duration_since(reported).as_secs() > STALE.as_secs().cast_signed())
}

#[cfg(test)]
mod tests;
