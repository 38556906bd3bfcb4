//! [`Book`]: the state of all MirrorNodes and of the objects to aggregate. Decides which status is written next, and
//! when.
//!
//! There is one book for Mirrors and ClusterMirrors, and one for MirrorTargets: [`kinds`](super::kinds) has the
//! differences. A book uses no connection, and the caller provides the times. [`controller`](super) passes in the
//! changes, and carries out the writes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Debug,
    time::Duration,
};

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kube::{core::ObjectMeta, discovery::ApiResource};
use mirror_api::{
    MirrorNodeStatus,
    sum::{Asked, is_current, is_renewed},
};
use tokio::time::Instant;

use super::tell::Said;
use crate::util::pace::Pace;

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

/// The name of an object. Its order is the order in a MirrorNode.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    /// `None`: an object of the cluster.
    pub(super) namespace: Option<String>,
    pub(super) name: String,
}

impl Key {
    pub(super) fn of(metadata: &ObjectMeta) -> Self {
        Self { namespace: metadata.namespace.clone(), name: metadata.name.clone().unwrap_or_default() }
    }
}

/// The objects in a book, as the agent reads them, and how they are aggregated.
pub(super) trait Summed: Sized {
    /// A node's report on an object.
    type Report: PartialEq + Debug;
    type Status: Clone + PartialEq + Debug + Send + Sync + 'static;

    /// The kind of the object with this name.
    fn kind(key: &Key) -> ApiResource;

    /// The part of an object's spec that its status depends on.
    fn asked(read: Result<Self, String>) -> Asked;

    /// Takes the reports out of a MirrorNode. Also returns whether the node has more to report than a MirrorNode holds.
    fn take(node: &mut MirrorNodeStatus) -> (Vec<Self::Report>, bool);

    /// The name and the UID of the object that a report is about.
    fn key(report: &Self::Report) -> Key;
    fn uid(report: &Self::Report) -> &str;

    /// Whether two reports differ in more than counters.
    fn is_news(before: &Self::Report, now: &Self::Report) -> bool;

    /// Aggregates the reports into the status.
    fn sum(
        asked: &Asked,
        reports: Vec<(&str, &Self::Report)>,
        before: Option<&Self::Status>,
        now: &Time,
    ) -> Self::Status;

    /// The time of the last report in a status.
    fn reported(status: &Self::Status) -> Option<&Time>;

    /// The Events that follow from a change of the status.
    fn said<'s>(_before: Option<&Self::Status>, _status: &'s Self::Status) -> Vec<Said<'s>> {
        Vec::new()
    }
}

#[derive(Debug)]
pub(super) struct Write<S: Summed> {
    pub(super) key: Key,
    pub(super) uid: String,
    pub(super) status: S::Status,
    /// The present status.
    pub(super) before: Option<S::Status>,
}

/// The state of all nodes and objects.
#[derive(Debug)]
pub(super) struct Book<S: Summed> {
    nodes: BTreeMap<String, Node>,
    /// All nodes have been listed at least once. Nothing is due before.
    is_complete: bool,
    /// The reports on each object, by node.
    reports: BTreeMap<Key, BTreeMap<String, S::Report>>,
    objects: BTreeMap<Key, Entry<S>>,
    /// When the status of an object is summed up next.
    due: BTreeSet<(Instant, Key)>,
}

#[derive(Debug, Default)]
struct Node {
    reported: Option<Timestamp>,
    /// The report is not stale.
    counts: bool,
    /// The objects in the node's report.
    keys: BTreeSet<Key>,
    /// The node has more to report than a MirrorNode holds.
    has_more: bool,
    /// The largest number of reports on objects of one namespace.
    share: usize,
}

impl Node {
    /// Whether the report may lack this object because there was no room. Objects of the cluster come first, and the
    /// namespaces share the rest (max-min): one that lacks room has at most one report less than any other. Within a
    /// namespace the first objects get the room.
    fn may_lack(&self, key: &Key) -> bool {
        // Hardly any node has more, and each sum asks all nodes.
        if !self.has_more {
            return false;
        }
        let is_beside = |of: &&Key| of.namespace == key.namespace;
        let mut after = self.keys.range::<Key, _>(key..);
        let before = self.keys.range::<Key, _>(..key).rev();
        after.next().is_none_or(|next| key.namespace.is_some() && !is_beside(&next))
            && before.take_while(is_beside).count() + 1 >= self.share
    }
}

#[derive(Debug)]
struct Entry<S: Summed> {
    uid: String,
    asked: Asked,
    /// The status in the API server.
    status: Option<S::Status>,
    /// Times of the last sum and of the last write.
    looked: Option<Instant>,
    written: Option<Instant>,
    /// The last write failed. The API server may have applied it nevertheless, so the next sum is always written.
    has_failed: bool,
    due: Option<Instant>,
    /// More than counters have changed; `pace` says how soon the status may be summed up.
    has_news: bool,
    pace: Pace,
}

impl<S: Summed> Book<S> {
    pub(super) const fn new() -> Self {
        Self {
            nodes: BTreeMap::new(),
            is_complete: false,
            reports: BTreeMap::new(),
            objects: BTreeMap::new(),
            due: BTreeSet::new(),
        }
    }

    /// Notes that all nodes have been listed.
    pub(super) const fn complete(&mut self) {
        self.is_complete = true;
    }

    /// Updates the report of a node, or removes the node.
    pub(super) fn set_node(
        &mut self,
        name: &str,
        status: Option<&mut MirrorNodeStatus>,
        now: Instant,
        at: Timestamp,
    ) {
        let before = self.nodes.remove(name).unwrap_or_default();
        let (mut node, mut reports, is_there) = (Node::default(), Vec::new(), status.is_some());
        let mut reported = None;
        if let Some(status) = status {
            (reports, node.has_more) = S::take(status);
            reported = status.last_report_time.as_ref();
            node.reported = reported.map(|Time(at)| *at);
            node.counts = is_current(node.reported, at);
            node.keys = reports.iter().map(S::key).collect();
            let namespaces: Vec<_> = node.keys.iter().filter_map(|key| key.namespace.as_deref()).collect();
            node.share = namespaces.chunk_by(|a, b| a == b).map(<[_]>::len).max().unwrap_or(0);
        }
        // The objects with a change, and whether it is more than counters.
        let mut marks = Vec::new();
        for key in before.keys.difference(&node.keys) {
            if let Some(reports) = self.reports.get_mut(key) {
                reports.remove(name);
                if reports.is_empty() {
                    self.reports.remove(key);
                }
            }
            marks.push((key.clone(), true));
        }
        let is_renewed = |status| is_renewed(S::reported(status), reported);
        for report in reports {
            let key = S::key(&report);
            let of = self.reports.entry(key.clone()).or_default();
            let status = self.objects.get(&key).and_then(|entry| entry.status.as_ref());
            match of.get(name) {
                Some(before) if *before == report && !status.is_some_and(is_renewed) => {}
                before => marks.push((key, before.is_none_or(|before| S::is_news(before, &report)))),
            }
            of.insert(name.to_owned(), report);
        }
        if before.counts != node.counts {
            marks.extend(node.keys.iter().map(|key| (key.clone(), true)));
        }
        if (before.has_more, &before.keys) != (node.has_more, &node.keys) {
            let changed = self.objects.keys().filter(|key| before.may_lack(key) != node.may_lack(key));
            marks.extend(changed.map(|key| (key.clone(), true)));
        }
        if is_there {
            self.nodes.insert(name.to_owned(), node);
        }
        marks.iter().for_each(|(key, is_news)| self.mark(key, *is_news, now));
    }

    /// Updates an object.
    pub(super) fn set(
        &mut self,
        key: Key,
        uid: String,
        asked: Asked,
        status: Option<S::Status>,
        now: Instant,
    ) {
        match self.objects.get_mut(&key).filter(|entry| entry.uid == uid) {
            Some(entry) if entry.asked == asked && entry.status == status => return,
            Some(entry) => (entry.asked, entry.status) = (asked, status),
            None => {
                self.remove(&key);
                let (looked, written, has_failed, due, has_news) = (None, None, false, None, false);
                let pace = Pace::new(PACE, BURST);
                let entry = Entry { uid, asked, status, looked, written, has_failed, due, has_news, pace };
                self.objects.insert(key.clone(), entry);
            }
        }
        self.mark(&key, true, now);
    }

    /// Removes an object that was deleted.
    pub(super) fn remove(&mut self, key: &Key) {
        if let Some(due) = self.objects.remove(key).and_then(|entry| entry.due) {
            self.due.remove(&(due, key.clone()));
        }
    }

    /// The numbers of nodes and of objects.
    pub(super) fn sizes(&self) -> (usize, usize) {
        (self.nodes.len(), self.objects.len())
    }

    /// The nodes with a stale report on objects of this book. An agent does not repeat an empty report.
    pub(super) fn stale(&self) -> impl Iterator<Item = &str> {
        let stale = self.nodes.iter().filter(|(_, node)| !node.counts && !node.keys.is_empty());
        stale.map(|(name, _)| name.as_str())
    }

    /// Returns the next status to write. If none is due, returns when to call this again: at the latest after
    /// [`SETTLE`], because no change is due earlier than that.
    pub(super) fn due(&mut self, now: Instant, at: Timestamp) -> Result<Write<S>, Instant> {
        let mut next = now + SETTLE;
        if !self.is_complete {
            return Err(next);
        }
        self.expire(now, at);
        while let Some((due, key)) = self.due.first().cloned() {
            if due > now {
                next = next.min(due);
                break;
            }
            self.due.pop_first();
            if let Some(write) = self.sum(key, now, at) {
                return Ok(write);
            }
        }
        Err(next)
    }

    /// Notes whether a status was written.
    pub(super) fn note(&mut self, write: &Write<S>, is_written: bool, now: Instant) {
        let Some(entry) = self.objects.get_mut(&write.key).filter(|entry| entry.uid == write.uid) else {
            return;
        };
        (entry.written, entry.has_failed) = (Some(now), !is_written);
        if !is_written {
            if entry.status.as_ref() == Some(&write.status) {
                entry.status = write.before.clone();
            }
            self.set_due(&write.key, now + PACE);
        }
    }

    /// Marks reports that have become stale.
    fn expire(&mut self, now: Instant, at: Timestamp) {
        let mut changed = BTreeSet::new();
        for node in self.nodes.values_mut() {
            if std::mem::replace(&mut node.counts, is_current(node.reported, at)) != node.counts {
                changed.extend(node.keys.iter().cloned());
            }
        }
        changed.iter().for_each(|key| self.mark(key, true, now));
    }

    /// The shortest time between two writes of one status if only counters have changed.
    fn counts_pace(&self) -> Duration {
        let seconds = self.objects.len() * self.nodes.len() / MOST_SENT_A_SECOND;
        COUNTS_PACE.max(Duration::from_secs(seconds as u64))
    }

    /// Schedules an object after a change. `is_news`: more than counters have changed.
    fn mark(&mut self, key: &Key, is_news: bool, now: Instant) {
        let counts_pace = self.counts_pace();
        if let Some(entry) = self.objects.get_mut(key) {
            entry.has_news |= is_news;
            let earliest = match is_news {
                true => entry.pace.next(),
                false => entry.looked.map(|at| at + PACE).max(entry.written.map(|at| at + counts_pace)),
            };
            self.set_due(key, earliest.unwrap_or(now).max(now + SETTLE));
        }
    }

    /// Schedules the sum of an object's status, unless it is already scheduled earlier.
    fn set_due(&mut self, key: &Key, at: Instant) {
        let Some(entry) = self.objects.get_mut(key) else { return };
        if entry.due.is_some_and(|before| before <= at) {
            return;
        }
        if let Some(before) = entry.due.replace(at) {
            self.due.remove(&(before, key.clone()));
        }
        self.due.insert((at, key.clone()));
    }

    /// Aggregates the status of an object, and returns it if the API server may have another one.
    fn sum(&mut self, key: Key, now: Instant, at: Timestamp) -> Option<Write<S>> {
        let again = now + self.counts_pace();
        let entry = self.objects.get_mut(&key)?;
        (entry.due, entry.looked) = (None, Some(now));
        if std::mem::take(&mut entry.has_news) {
            entry.pace.take(now);
        }
        let reports = self.reports.get(&key).into_iter().flatten().filter_map(|(name, report)| {
            // A report about a deleted object of the same name does not count for this one.
            let node = self.nodes.get(name).filter(|_| S::uid(report) == entry.uid)?;
            Some((name.as_str(), report, node))
        });
        let reports: Vec<_> = reports.collect();
        let current = reports.iter().filter(|(.., node)| node.counts);
        // The clock of a node can be ahead.
        let reported = current.filter_map(|(.., node)| node.reported).max().map(|reported| reported.min(at));
        let stale = reports.iter().filter(|(.., node)| !node.counts);
        let stale: BTreeSet<_> = stale.map(|(name, ..)| (*name).to_owned()).collect();
        if !stale.is_empty() {
            // A time limit ends a mirror on these nodes, and they do not report it.
            entry.due = Some(again);
            self.due.insert((again, key.clone()));
        }
        let left_out = self.nodes.values().filter(|node| node.may_lack(&key)).count();
        // The API server stores whole seconds.
        let seconds = |at: Timestamp| Time(Timestamp::from_second(at.as_second()).unwrap_or(at));
        let asked = Asked { left_out, stale, reported: reported.map(seconds), ..entry.asked.clone() };
        let reports = reports.into_iter().map(|(name, report, _)| (name, report)).collect();
        let status = S::sum(&asked, reports, entry.status.as_ref(), &seconds(at));
        if !entry.has_failed && entry.status.as_ref() == Some(&status) {
            return None;
        }
        // Before the API server answers, its watch can already deliver the written object, which is no news then.
        entry.written = Some(now);
        let (uid, before) = (entry.uid.clone(), entry.status.replace(status.clone()));
        Some(Write { key, uid, status, before })
    }
}

#[cfg(test)]
mod tests;
