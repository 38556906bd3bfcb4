//! [`Outbox`]: which Event is to be posted next, and when. Pure; [`post`](super::post) asks it.
//!
//! Who does not take an Event is left alone for a while, and for twice as long each time that it does not: the server,
//! where it cannot be reached or has too much to do, and the namespace (a quota, a policy, a right). Nothing that
//! happens meanwhile shortens that.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tokio::time::Instant;

use super::Told;

/// The pause after the first failure, and the longest one.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(300));

/// What became of an Event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// It stands, also from before a restart, or the server will never take it.
    Done,
    /// It may be taken later; others may be taken now.
    Refused,
    /// The server takes none now, or was not reached.
    Away,
}

/// What is to be told.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    /// And whether that is done with.
    told: BTreeMap<Told, bool>,
    /// By who takes none for now: a namespace or, without a name, the server.
    pauses: BTreeMap<Option<String>, Pause>,
}

#[derive(Debug)]
struct Pause {
    length: Duration,
    until: Instant,
}

impl Outbox {
    /// Sets what is to be told, and forgets what no longer is.
    pub(super) fn set(&mut self, tell: BTreeSet<Told>) {
        let before = std::mem::take(&mut self.told);
        let with_is_done = |told| {
            let is_done = before.get(&told).copied().unwrap_or(false);
            (told, is_done)
        };
        self.told = tell.into_iter().map(with_is_done).collect();
        let namespaces: BTreeSet<_> = self.told.keys().map(|told| &told.pod.namespace).collect();
        self.pauses.retain(|who, _| who.as_ref().is_none_or(|namespace| namespaces.contains(namespace)));
    }

    /// What is to be posted next, and when, if not at once. Namespaces that have refused come after all others.
    pub(super) fn next(&self) -> Option<(Told, Option<Instant>)> {
        let until = |who| self.pauses.get(&who).map(|pause| pause.until);
        let server = until(None);
        let pending = self.told.iter().filter(|(_, is_done)| !**is_done).map(|(told, _)| {
            let namespace = until(Some(told.pod.namespace.clone()));
            (server.max(namespace), namespace, told)
        });
        pending.min().map(|(at, _, told)| (told.clone(), at))
    }

    /// Notes what became of an Event.
    pub(super) fn note(&mut self, told: &Told, answer: Answer, now: Instant) {
        let namespace = Some(told.pod.namespace.clone());
        match answer {
            Answer::Done => {
                if let Some(is_done) = self.told.get_mut(told) {
                    *is_done = true;
                }
                self.pauses.remove(&None);
                self.pauses.remove(&namespace);
            }
            Answer::Refused => {
                self.pauses.remove(&None);
                self.pause(namespace, now);
            }
            Answer::Away => {
                self.pause(None, now);
                // It may be for this namespace alone that the server fails (a webhook): the next to be tried is another.
                self.pause(namespace, now);
            }
        }
    }

    fn pause(&mut self, who: Option<String>, now: Instant) {
        let length = self.pauses.get(&who).map_or(PAUSE.0, |pause| (pause.length * 2).min(PAUSE.1));
        self.pauses.insert(who, Pause { length, until: now + length });
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests panic")]

    use proptest::prelude::*;

    use super::*;
    use crate::model::PodId;

    fn told(namespace: &str, name: &str) -> Told {
        let pod =
            PodId { uid: format!("{namespace}-{name}"), namespace: namespace.into(), name: name.into() };
        Told { pod, reason: "HostNetwork", note: String::new() }
    }

    /// Notes an answer to what is next, at the moment when it is due. What it was, and how long that took.
    fn step(outbox: &mut Outbox, now: &mut Instant, answer: Answer) -> (String, u64) {
        let (told, at) = outbox.next().unwrap();
        let at = at.unwrap_or(*now).max(*now);
        let waited = at - *now;
        *now = at;
        outbox.note(&told, answer, at);
        (told.pod.to_string(), waited.as_secs())
    }

    #[test]
    fn a_server_that_is_away_is_asked_less_and_less_often_by_one_event() {
        let mut now = Instant::now();
        let mut outbox = Outbox::default();
        outbox.set([told("a", "x"), told("a", "y")].into());
        let waits: Vec<_> = (0..12).map(|_| step(&mut outbox, &mut now, Answer::Away).1).collect();
        assert_eq!(waits, [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
        assert_eq!(step(&mut outbox, &mut now, Answer::Done), ("a/x".into(), 300));
        assert_eq!(step(&mut outbox, &mut now, Answer::Away), ("a/y".into(), 0));
        assert_eq!(step(&mut outbox, &mut now, Answer::Done), ("a/y".into(), 1));
        assert_eq!(outbox.next(), None);
    }

    #[test]
    fn a_namespace_that_refuses_holds_up_no_other() {
        let mut now = Instant::now();
        let mut outbox = Outbox::default();
        outbox.set([told("a", "x"), told("a", "y"), told("b", "z")].into());
        assert_eq!(step(&mut outbox, &mut now, Answer::Refused), ("a/x".into(), 0));
        assert_eq!(step(&mut outbox, &mut now, Answer::Done), ("b/z".into(), 0));
        assert_eq!(step(&mut outbox, &mut now, Answer::Refused), ("a/x".into(), 1));
        outbox.set([told("a", "x"), told("a", "y"), told("b", "z"), told("c", "new")].into());
        assert_eq!(step(&mut outbox, &mut now, Answer::Done), ("c/new".into(), 0));
        assert_eq!(step(&mut outbox, &mut now, Answer::Done), ("a/x".into(), 2));
        assert_eq!(step(&mut outbox, &mut now, Answer::Done), ("a/y".into(), 0));
        assert_eq!(outbox.next(), None);
    }

    #[test]
    fn a_namespace_for_which_the_server_fails_holds_up_no_other() {
        let mut now = Instant::now();
        let mut outbox = Outbox::default();
        outbox.set([told("a", "x"), told("b", "y"), told("c", "z")].into());
        assert_eq!(step(&mut outbox, &mut now, Answer::Away), ("a/x".into(), 0));
        assert_eq!(step(&mut outbox, &mut now, Answer::Done), ("b/y".into(), 1));
        assert_eq!(step(&mut outbox, &mut now, Answer::Done), ("c/z".into(), 0));
        assert_eq!(step(&mut outbox, &mut now, Answer::Away), ("a/x".into(), 0));
    }

    #[test]
    fn what_is_no_longer_to_be_told_is_dropped_and_what_comes_back_is_told_again() {
        let mut now = Instant::now();
        let mut outbox = Outbox::default();
        outbox.set([told("a", "x"), told("a", "y")].into());
        assert_eq!(step(&mut outbox, &mut now, Answer::Done), ("a/x".into(), 0));
        assert_eq!(step(&mut outbox, &mut now, Answer::Away), ("a/y".into(), 0));
        outbox.set([told("a", "x")].into());
        assert_eq!(outbox.next(), None);
        outbox.set([].into());
        outbox.set([told("a", "x")].into());
        // The pause of the server goes on.
        assert_eq!(step(&mut outbox, &mut now, Answer::Done), ("a/x".into(), 1));
        assert_eq!(outbox.next(), None);
    }

    proptest! {
        /// Whatever comes and goes and is answered: who has not answered has its pause, what is done with is not posted
        /// again, and everything is posted in the end.
        #[test]
        fn pauses_are_kept_and_nothing_is_forgotten(
            steps in prop::collection::vec(
                (prop::collection::btree_set((0..3_u8, 0..3_u8), 1..6), 0..4_usize),
                1..40,
            ),
        ) {
            use Answer::{Away, Done, Refused};
            let mut now = Instant::now();
            let mut outbox = Outbox::default();
            let mut quiet_until = now;
            let mut done = BTreeSet::new();
            for (tell, answer) in &steps {
                let tell: BTreeSet<_> =
                    tell.iter().map(|(namespace, name)| told(&namespace.to_string(), &name.to_string())).collect();
                outbox.set(tell.clone());
                done.retain(|told| tell.contains(told));
                let Some((next, at)) = outbox.next() else {
                    prop_assert_eq!(&done, &tell);
                    continue;
                };
                prop_assert!(tell.contains(&next) && !done.contains(&next));
                prop_assert!(at.unwrap_or(now).max(now) >= quiet_until);
                now = at.unwrap_or(now).max(now);
                let answer = [Away, Refused, Done, Done][*answer];
                outbox.note(&next, answer, now);
                match answer {
                    Away => quiet_until = now + PAUSE.0,
                    Refused => {}
                    Done => drop(done.insert(next)),
                }
            }
            let pending = outbox.told.values().filter(|is_done| !**is_done).count();
            for _ in 0..pending {
                step(&mut outbox, &mut now, Done);
            }
            prop_assert_eq!(outbox.next(), None);
        }
    }
}
