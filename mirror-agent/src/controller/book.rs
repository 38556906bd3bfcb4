//! [`Book`]: what is known of all MirrorNodes and of the objects that are summed up, and which status is to be written
//! next, and when.
//!
//! There is a book for Mirrors and ClusterMirrors, and a book for MirrorTargets: [`kinds`](super::kinds) says what differs.
//! No connection, and the times come from outside. [`controller`](super) hands over what the watches bring, and carries
//! out the writes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Debug,
    time::Duration,
};

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use mirror_api::sum::is_current;
use tokio::time::Instant;

use crate::pace::Pace;

/// How long a change waits for others, as when a Mirror is new and its nodes begin to report.
const SETTLE: Duration = Duration::from_secs(1);
/// The time between two sums, and so between two writes, of one status, if it changes all the time: news are summed up
/// earlier where they are rare. Also the pause after a write that has failed.
const PACE: Duration = Duration::from_secs(10);
/// The shortest time between two writes of one status if only counters have changed.
const COUNTS_PACE: Duration = Duration::from_secs(60);
/// Every agent watches the objects, so each write goes out once for each node. Writes of counters become rarer, so that
/// no more than this number goes out in a second.
const MOST_SENT_A_SECOND: usize = 10_000;

/// The objects of a book, and how one of them is summed up.
pub(super) trait Summed {
    /// The name of an object. The order is that in which a MirrorNode has them.
    type Key: Clone + Ord + Debug;
    /// What an object asks for, as far as its status depends on it.
    type Asked: Clone + Debug + Send + Sync + 'static;
    /// What a node reports on an object.
    type Report: PartialEq + Debug;
    type Status: Clone + PartialEq + Debug + Send + Sync + 'static;

    fn key(report: &Self::Report) -> Self::Key;

    /// The UID of the object that a report is about.
    fn uid(report: &Self::Report) -> &str;

    /// The status. So many nodes as `left_out` says may have more to report than a MirrorNode holds.
    fn sum<'r>(
        asked: &Self::Asked,
        left_out: usize,
        reports: impl Iterator<Item = (&'r str, &'r Self::Report)>,
        before: Option<&Self::Status>,
        now: &Time,
    ) -> Self::Status
    where
        Self::Report: 'r;

    /// Whether two reports differ in more than counters.
    fn is_news(before: &Self::Report, now: &Self::Report) -> bool;

    /// Whether two statuses differ in nothing but counters.
    fn are_counts(before: &Self::Status, now: &Self::Status) -> bool;
}

/// What a node reports on the objects of a book.
#[derive(Debug)]
pub(super) struct OfNode<R> {
    pub(super) reported: Option<Timestamp>,
    pub(super) reports: Vec<R>,
    /// The node has more to report than a MirrorNode holds.
    pub(super) has_more: bool,
}

/// A status to write.
#[derive(Debug)]
pub(super) struct Write<S: Summed> {
    pub(super) key: S::Key,
    pub(super) uid: String,
    pub(super) status: S::Status,
    /// The status so far.
    pub(super) before: Option<S::Status>,
}

/// All that is known.
#[derive(Debug)]
pub(super) struct Book<S: Summed> {
    nodes: BTreeMap<String, Node<S::Key>>,
    /// What the nodes report on each object, by their names.
    reports: BTreeMap<S::Key, BTreeMap<String, S::Report>>,
    objects: BTreeMap<S::Key, Entry<S>>,
    /// When the status of an object is to be looked at.
    due: BTreeSet<(Instant, S::Key)>,
}

#[derive(Debug)]
struct Node<K> {
    reported: Option<Timestamp>,
    is_stale: bool,
    /// The objects that it reports on.
    keys: BTreeSet<K>,
    /// The last of these, if the node has more to report than a MirrorNode holds.
    last: Option<K>,
}

impl<K: Ord> Node<K> {
    /// Whether its report lacks this object for want of room.
    fn may_have_left_out(&self, key: &K) -> bool {
        !self.is_stale && self.last.as_ref().is_some_and(|last| last < key)
    }
}

#[derive(Debug)]
struct Entry<S: Summed> {
    uid: String,
    generation: i64,
    asked: S::Asked,
    /// As the API server has it.
    status: Option<S::Status>,
    /// When it was summed up, and when it was written.
    looked: Option<Instant>,
    written: Option<Instant>,
    due: Option<Instant>,
    /// It is to be summed up for more than counters, and how soon that may be.
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

    /// Takes in the report of a node, or that it has gone.
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

    /// Takes in an object. `asked` reads what it asks for, if that is new.
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
                let (has_news, pace) = (false, Pace::new(PACE));
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

    /// Takes in that an object has gone.
    pub(super) fn remove(&mut self, key: &S::Key) {
        if let Some(due) = self.objects.remove(key).and_then(|entry| entry.due) {
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

    /// The names of all objects.
    pub(super) fn objects(&self) -> impl Iterator<Item = &S::Key> {
        self.objects.keys()
    }

    /// Looks for reports that have become too old.
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

    /// When a status is to be looked at next.
    pub(super) fn next(&self) -> Option<Instant> {
        self.due.first().map(|(due, _)| *due)
    }

    /// The next status to write, if one is due.
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

    /// A change may concern this object. `is_news`: not of counters alone.
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

    /// Sets when the status of an object is looked at, unless it is to be looked at earlier.
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
        // A report on an object that had the same name before says nothing of this one.
        let reports = reports.filter(|(node, report)| S::uid(report) == entry.uid && counts(node));
        let reports = reports.map(|(node, report)| (node.as_str(), report));
        let left_out = self.nodes.values().filter(|node| node.may_have_left_out(key)).count();
        // The API server keeps whole seconds.
        let now = Time(Timestamp::from_second(at.as_second()).unwrap_or(at));
        Some(S::sum(&entry.asked, left_out, reports, entry.status.as_ref(), &now))
    }
}

#[cfg(test)]
mod tests;
