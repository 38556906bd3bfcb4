//! [`Book`]: the state of all MirrorNodes and of the objects to aggregate. Decides which status is written next, and
//! when.
//!
//! There is one book for Mirrors and ClusterMirrors, and one for MirrorTargets: [`kinds`](super::kinds) has the
//! differences. A book uses no connection, and the caller provides the times. [`controller`](super) passes in the watch
//! events, and carries out the writes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Debug,
    time::Duration,
};

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use mirror_api::sum::{is_current, is_renewed};
use tokio::time::Instant;

use crate::pace::Pace;

/// Delay of a change, to combine it with others: when a Mirror is new, its nodes begin to report one after the other.
const SETTLE: Duration = Duration::from_secs(1);
/// The average time between two sums of one status, and so between two writes, under constant changes. Rare changes are
/// summed up earlier. Also the pause after a failed write.
const PACE: Duration = Duration::from_secs(10);
/// The number of changes of an object that are written at once after a quiet time.
const BURST: u32 = 4;
/// The shortest time between two writes of one status if only counters have changed.
const COUNTS_PACE: Duration = Duration::from_secs(60);
/// Upper bound of the objects sent per second for changed counters. Every agent watches the objects, so each write is
/// sent once to each node; writes of counters become rarer to keep this bound.
const MOST_SENT_A_SECOND: usize = 10_000;

/// The kind of the objects in a book, and how an object is aggregated.
pub(super) trait Summed {
    /// The name of an object. Its order is the order in a MirrorNode.
    type Key: Clone + Ord + Debug;
    /// The part of an object's spec that its status depends on.
    type Asked: Clone + Debug + Send + Sync + 'static;
    /// A node's report on an object.
    type Report: PartialEq + Debug;
    type Status: Clone + PartialEq + Debug + Send + Sync + 'static;

    fn key(report: &Self::Report) -> Self::Key;

    /// The UID of the object that a report is about.
    fn uid(report: &Self::Report) -> &str;

    /// Aggregates the reports into the status. `left_out` is the number of nodes that may have left this object out of
    /// their MirrorNode for lack of room, and `reported` the time of the last report.
    fn sum<'r>(
        asked: &Self::Asked,
        left_out: usize,
        reported: Option<Time>,
        reports: impl Iterator<Item = (&'r str, &'r Self::Report)>,
        before: Option<&Self::Status>,
        now: &Time,
    ) -> Self::Status
    where
        Self::Report: 'r;

    /// The time of the last report in a status.
    fn reported(status: &Self::Status) -> Option<&Time>;

    /// Whether two reports differ in more than counters.
    fn is_news(before: &Self::Report, now: &Self::Report) -> bool;

    /// Whether two statuses differ in counters and the time of the last report only.
    fn are_counts(before: &Self::Status, now: &Self::Status) -> bool;
}

/// The report of a node on the objects of a book.
#[derive(Debug)]
pub(super) struct OfNode<R> {
    pub(super) reported: Option<Timestamp>,
    pub(super) reports: Vec<R>,
    /// The node has more to report than a MirrorNode holds.
    pub(super) has_more: bool,
}

#[derive(Debug)]
pub(super) struct Write<S: Summed> {
    pub(super) key: S::Key,
    pub(super) uid: String,
    pub(super) status: S::Status,
    /// The present status.
    pub(super) before: Option<S::Status>,
}

/// The state of all nodes and objects.
#[derive(Debug)]
pub(super) struct Book<S: Summed> {
    nodes: BTreeMap<String, Node<S::Key>>,
    /// The reports on each object, by node.
    reports: BTreeMap<S::Key, BTreeMap<String, S::Report>>,
    objects: BTreeMap<S::Key, Entry<S>>,
    /// When the status of an object is summed up next.
    due: BTreeSet<(Instant, S::Key)>,
}

#[derive(Debug)]
struct Node<K> {
    reported: Option<Timestamp>,
    is_stale: bool,
    /// The objects in the node's report.
    keys: BTreeSet<K>,
    /// The last of these, if the node has more to report than a MirrorNode holds.
    last: Option<K>,
}

impl<K: Ord> Node<K> {
    /// Whether the node's report may lack this object because there was no room.
    fn may_have_left_out(&self, key: &K) -> bool {
        !self.is_stale && self.last.as_ref().is_some_and(|last| last < key)
    }
}

#[derive(Debug)]
struct Entry<S: Summed> {
    uid: String,
    generation: i64,
    asked: S::Asked,
    /// The status in the API server.
    status: Option<S::Status>,
    /// Times of the last sum and of the last write.
    looked: Option<Instant>,
    written: Option<Instant>,
    due: Option<Instant>,
    /// More than counters have changed; `pace` says how soon the status may be summed up.
    has_news: bool,
    pace: Pace,
}

impl<S: Summed> Book<S> {
    pub(super) const fn new() -> Self {
        Self {
            nodes: BTreeMap::new(),
            reports: BTreeMap::new(),
            objects: BTreeMap::new(),
            due: BTreeSet::new(),
        }
    }

    /// Updates the report of a node, or removes the node.
    pub(super) fn set_node(
        &mut self,
        node: &str,
        report: Option<OfNode<S::Report>>,
        now: Instant,
        at: Timestamp,
    ) {
        let (before, is_there) = (self.nodes.remove(node), report.is_some());
        let nothing = OfNode { reported: None, reports: Vec::new(), has_more: false };
        let OfNode { reported, reports, has_more } = report.unwrap_or(nothing);
        let keys: BTreeSet<_> = reports.iter().map(S::key).collect();
        let is_stale = !is_current(reported, at);
        let last = keys.last().filter(|_| has_more).cloned();
        let (mut changed, mut counted) = (BTreeSet::new(), BTreeSet::new());
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
        for report in reports {
            let key = S::key(&report);
            let of = self.reports.entry(key.clone()).or_default();
            let before = of.get(node);
            if before != Some(&report) {
                let is_news = before.is_none_or(|before| S::is_news(before, &report));
                if is_news { &mut changed } else { &mut counted }.insert(key);
                of.insert(node.to_owned(), report);
            }
        }
        if let Some(reported) = reported.filter(|_| !is_stale).map(Time) {
            let is_renewed = |of: &S::Status| is_renewed(S::reported(of), Some(&reported));
            let status = |key| self.objects.get(key)?.status.as_ref();
            counted.extend(keys.iter().filter(|key| status(key).is_some_and(is_renewed)).cloned());
        }
        let was = before.as_ref();
        if was.is_some_and(|before| before.is_stale != is_stale) {
            changed.extend(keys.iter().cloned());
        }
        if was.and_then(|before| before.last.as_ref()) != last.as_ref() {
            changed.extend(self.objects.keys().cloned());
        }
        if is_there {
            self.nodes.insert(node.to_owned(), Node { reported, is_stale, keys, last });
        }
        counted.iter().for_each(|key| self.mark(key, false, now));
        changed.iter().for_each(|key| self.mark(key, true, now));
    }

    /// Updates an object. `asked` reads its spec, and is called only if the object is new or changed.
    pub(super) fn set(
        &mut self,
        key: S::Key,
        uid: &str,
        generation: i64,
        status: Option<S::Status>,
        asked: impl FnOnce() -> S::Asked,
        now: Instant,
    ) {
        match self.objects.get_mut(&key) {
            Some(entry) if entry.uid == uid && entry.generation == generation => {
                if entry.status == status {
                    return;
                }
                entry.status = status;
            }
            _ => {
                let due = self.objects.get(&key).and_then(|entry| entry.due);
                let (uid, asked) = (uid.to_owned(), asked());
                let (has_news, pace) = (false, Pace::new(PACE, BURST));
                let entry = Entry {
                    uid,
                    generation,
                    asked,
                    status,
                    looked: None,
                    written: None,
                    due,
                    has_news,
                    pace,
                };
                self.objects.insert(key.clone(), entry);
            }
        }
        self.mark(&key, true, now);
    }

    /// Removes an object that was deleted.
    pub(super) fn remove(&mut self, key: &S::Key) {
        if let Some(due) = self.objects.remove(key).and_then(|entry| entry.due) {
            self.due.remove(&(due, key.clone()));
        }
    }

    pub(super) fn nodes(&self) -> impl Iterator<Item = &String> {
        self.nodes.keys()
    }

    /// The number of reports that are ignored because they are too old.
    pub(super) fn stale(&self) -> usize {
        self.nodes.values().filter(|node| node.is_stale).count()
    }

    pub(super) fn objects(&self) -> impl Iterator<Item = &S::Key> {
        self.objects.keys()
    }

    /// Marks reports that have become too old.
    pub(super) fn expire(&mut self, now: Instant, at: Timestamp) {
        let mut changed = BTreeSet::new();
        for node in self.nodes.values_mut() {
            if std::mem::replace(&mut node.is_stale, !is_current(node.reported, at)) != node.is_stale {
                changed.extend(node.keys.iter().cloned());
                if node.last.is_some() {
                    changed.extend(self.objects.keys().cloned());
                }
            }
        }
        changed.iter().for_each(|key| self.mark(key, true, now));
    }

    /// When the next status is due to be summed up.
    pub(super) fn next(&self) -> Option<Instant> {
        self.due.first().map(|(due, _)| *due)
    }

    /// Returns the next status to write, if one is due.
    pub(super) fn due(&mut self, now: Instant, at: Timestamp) -> Option<Write<S>> {
        let counts_pace = self.counts_pace();
        while self.next().is_some_and(|due| due <= now) {
            let (_, key) = self.due.pop_first()?;
            let Some(status) = self.sum(&key, at) else { continue };
            let Some(entry) = self.objects.get_mut(&key) else { continue };
            (entry.due, entry.looked) = (None, Some(now));
            if std::mem::take(&mut entry.has_news) {
                entry.pace.take(now);
            }
            if entry.status.as_ref() == Some(&status) {
                continue;
            }
            let are_counts = entry.status.as_ref().is_some_and(|before| S::are_counts(before, &status));
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
    pub(super) fn note(&mut self, write: &Write<S>, is_written: bool, now: Instant) {
        let Some(entry) = self.objects.get_mut(&write.key).filter(|entry| entry.uid == write.uid) else {
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
        let seconds = self.objects.len() * self.nodes.len() / MOST_SENT_A_SECOND;
        COUNTS_PACE.max(Duration::from_secs(seconds as u64))
    }

    /// Schedules an object after a change. `is_news`: more than counters have changed.
    fn mark(&mut self, key: &S::Key, is_news: bool, now: Instant) {
        if let Some(entry) = self.objects.get_mut(key) {
            entry.has_news |= is_news;
            let earliest = match is_news {
                true => entry.pace.next(),
                false => entry.looked.map(|looked| looked + PACE),
            };
            self.set_due(key, earliest.unwrap_or(now).max(now + SETTLE));
        }
    }

    /// Schedules the sum of an object's status, unless it is already scheduled earlier.
    fn set_due(&mut self, key: &S::Key, at: Instant) {
        let Some(entry) = self.objects.get_mut(key) else { return };
        if let Some(before) = entry.due {
            if before <= at {
                return;
            }
            self.due.remove(&(before, key.clone()));
        }
        entry.due = Some(at);
        self.due.insert((at, key.clone()));
    }

    fn sum(&self, key: &S::Key, at: Timestamp) -> Option<S::Status> {
        let entry = self.objects.get(key)?;
        let reports = self.reports.get(key).into_iter().flatten();
        let counts = |node: &str| self.nodes.get(node).is_some_and(|node| !node.is_stale);
        // A report about a deleted object of the same name does not count for this one.
        let reports = reports.filter(|(node, report)| S::uid(report) == entry.uid && counts(node));
        let reports = reports.map(|(node, report)| (node.as_str(), report));
        // The clock of a node can be ahead.
        let reported = reports.clone().filter_map(|(node, _)| self.nodes.get(node)?.reported).max();
        let reported = reported.map(|reported| reported.min(at));
        let left_out = self.nodes.values().filter(|node| node.may_have_left_out(key)).count();
        // The API server stores whole seconds.
        let seconds = |at: Timestamp| Time(Timestamp::from_second(at.as_second()).unwrap_or(at));
        let (now, reported) = (seconds(at), reported.map(seconds));
        Some(S::sum(&entry.asked, left_out, reported, reports, entry.status.as_ref(), &now))
    }
}

#[cfg(test)]
mod tests;
