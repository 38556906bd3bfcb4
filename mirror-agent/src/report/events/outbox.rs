//! [`Outbox`]: decides which Event is posted or refreshed next, and when. Pure; called by [`post`](super::post).
//!
//! After a failure of the server (unreachable or overloaded), nothing is posted for a while; the pause doubles with
//! each further failure. The same applies to a namespace that rejects Events (because of a quota, a policy or a right).
//! Other Events do not shorten that pause. The Event of a problem is refreshed every 30 to 40 minutes, and a pod gets
//! few new ones at a time, however often its annotations and devices change. News are posted once, and few at a time,
//! because one change can be news for all pods of a cluster. The namespaces take turns with them, because one can have
//! very many pods whose mirrors begin and end all the time.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::Instant;

use super::Fact;
use crate::util::{backoff::Backoff, pace::Pace};

/// The pause after the first failure, and the longest one.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(300));
/// When an existing Event is refreshed at the earliest, and the interval over which refreshes are spread.
const REFRESH: Duration = Duration::from_secs(30 * 60);
const SPREAD_SECONDS: u64 = 10 * 60;
/// Number of new Events of a pod without a pause, and the pause before each further one.
const BURST: u32 = 16;
const PACE: Duration = Duration::from_secs(300);
/// Number of news of the node without a pause, and the pause before each further one.
const NEWS_BURST: u32 = 8;
const NEWS_PACE: Duration = Duration::from_secs(5);
/// Number of former Events, whose problem has passed, that are remembered.
const MOST_FORMER: usize = 1000;

/// How an Event is posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Post {
    /// As a new one.
    Create,
    /// As one more of a series.
    Refresh {
        /// The present count of the series, if this agent has posted it.
        count: Option<i32>,
    },
}

/// The outcome of a request to post an Event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The Event exists, with this count in its series.
    Written {
        /// 1: it is not a series yet.
        count: i32,
    },
    /// The Event exists already, from before a restart of the agent, and must be refreshed.
    Exists,
    /// The Event no longer exists, and must be created.
    Forgotten,
    /// The server rejects the Event in this form. It may accept it at the next refresh.
    NotNow,
    /// The server may accept it later, and may accept others now.
    Refused,
    /// The server accepts none now, or was not reached.
    Away,
}

impl Outcome {
    /// Whether nothing is left to do for news.
    pub(super) const fn ends_news(self) -> bool {
        matches!(self, Self::Written { .. } | Self::NotNow)
    }
}

/// The Events to post, and those that were posted recently.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    facts: BTreeMap<Fact, Entry>,
    /// The Events whose problem has passed, until their next refresh would have been due: a recurring problem is not
    /// posted each time.
    former: BTreeMap<Fact, Entry>,
    /// The pauses and their ends, by their cause: a namespace or, without a name, the server.
    pauses: BTreeMap<Option<String>, (Backoff, Instant)>,
    /// The new Events of each pod, by its UID.
    paces: BTreeMap<String, Pace>,
    /// The news of the node.
    news: Option<Pace>,
    /// When news were last posted in each namespace; only times of the last half hour.
    turns: BTreeMap<String, Instant>,
}

/// The next operation for an Event.
#[derive(Debug, Clone, Copy)]
struct Entry {
    post: Post,
    /// The earliest time for it.
    due: Option<Instant>,
}

impl Outbox {
    /// Sets the Events to post.
    pub(super) fn set(&mut self, tell: BTreeSet<Fact>, now: Instant) {
        let mut before = std::mem::take(&mut self.former);
        before.append(&mut self.facts);
        let with_entry = |fact| {
            let entry = before.remove(&fact).unwrap_or(Entry { post: Post::Create, due: None });
            (fact, entry)
        };
        self.facts = tell.into_iter().map(with_entry).collect();
        before.retain(|fact, entry| !fact.is_news && entry.due.is_some_and(|due| due > now));
        let mut dues: Vec<_> = before.values().map(|entry| entry.due).collect();
        if let Some(surplus) = dues.len().checked_sub(MOST_FORMER + 1) {
            // The Events that are due first are dropped first.
            let (_, last, _) = dues.select_nth_unstable(surplus);
            before.retain(|_, entry| entry.due > *last);
        }
        self.former = before;
        let namespaces: BTreeSet<_> = self.facts.keys().map(|fact| &fact.pod.namespace).collect();
        self.pauses.retain(|of, _| of.as_ref().is_none_or(|namespace| namespaces.contains(namespace)));
        self.paces.retain(|_, pace| !pace.is_rested(now));
        self.turns.retain(|_, last| *last + REFRESH > now);
    }

    /// The Event to post next, the kind of the post, and its time, if not at once. Namespaces take turns with their news;
    /// with other Events, those that have rejected some come last.
    pub(super) fn next(&self) -> Option<(Fact, Post, Option<Instant>)> {
        let until = |of| self.pauses.get(&of).map(|(_, until)| *until);
        let server = until(None);
        let candidates = self.facts.iter().map(|(fact, entry)| {
            let namespace = until(Some(fact.pod.namespace.clone()));
            let pace = (entry.post == Post::Create).then(|| self.pace(fact)).flatten();
            let turn = self.turns.get(&fact.pod.namespace).filter(|_| fact.is_news);
            (server.max(namespace).max(pace).max(entry.due), turn, namespace, fact, entry.post)
        });
        candidates.min().map(|(at, .., fact, post)| (fact.clone(), post, at))
    }

    /// Notes the outcome for an Event.
    pub(super) fn note(&mut self, fact: &Fact, answer: Outcome, now: Instant) {
        let namespace = Some(fact.pod.namespace.clone());
        match answer {
            Outcome::Refused => {
                self.pauses.remove(&None);
                self.pause(namespace, now);
                return;
            }
            Outcome::Away => {
                self.pause(None, now);
                // The server may fail for this namespace only (because of a webhook): the next attempt is for another
                // namespace.
                self.pause(namespace, now);
                return;
            }
            Outcome::Written { .. } | Outcome::Exists | Outcome::Forgotten | Outcome::NotNow => {
                self.pauses.remove(&None);
                self.pauses.remove(&namespace);
            }
        }
        let Some(entry) = self.facts.get_mut(fact) else { return };
        if entry.post == Post::Create {
            if fact.is_news {
                self.news.get_or_insert(Pace::new(NEWS_PACE, NEWS_BURST)).take(now);
                self.turns.insert(fact.pod.namespace.clone(), now);
            }
            let of_pod = self.paces.entry(fact.pod.uid.clone());
            of_pod.or_insert_with(|| Pace::new(PACE, BURST)).take(now);
        }
        let refreshment = now + REFRESH + Duration::from_secs(fact.digest() % SPREAD_SECONDS);
        *entry = match answer {
            Outcome::Written { count } => {
                Entry { post: Post::Refresh { count: Some(count) }, due: Some(refreshment) }
            }
            Outcome::Exists => Entry { post: Post::Refresh { count: None }, due: None },
            Outcome::Forgotten => Entry { post: Post::Create, due: None },
            _ => Entry { due: Some(refreshment), ..*entry },
        };
    }

    /// The time at which the new Event may be posted, for the pod and for the node, if not at once.
    fn pace(&self, fact: &Fact) -> Option<Instant> {
        let news = self.news.filter(|_| fact.is_news).and_then(|pace| pace.next());
        self.paces.get(&fact.pod.uid).and_then(Pace::next).max(news)
    }

    fn pause(&mut self, of: Option<String>, now: Instant) {
        let (backoff, until) = self.pauses.entry(of).or_insert((Backoff::new(PAUSE.0, PAUSE.1), now));
        *until = now + backoff.pause();
    }
}

#[cfg(test)]
mod tests;
