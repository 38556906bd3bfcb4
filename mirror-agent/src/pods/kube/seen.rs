//! [`Seen`]: the newest version that a watch has seen, and which lists are therefore accepted. Pure; `Follower` uses
//! it.
//!
//! An API server responds from its cache, which may lag behind: after a partition, or while it starts. With a load
//! balancer, the next response may come from another server. An old list would remove taps, enable a mirror that was
//! revoked, and restart an ended budget. So a list is accepted only if it is not older than the newest version seen.

use std::{cmp::Ordering, time::Duration};

use tokio::time::Instant;

/// The number of consecutive outdated responses after which the newest list is requested. A server without streaming
/// lists may read that list from its store, so this is a last resort.
const PAST_ANSWERS: u32 = 3;
/// A list older than the newest version seen is accepted if each newest list has been older for this long. Versions go
/// back for good if the server's store was restored from a backup.
const BACK_FOR: Duration = Duration::from_secs(300);

/// The list to request from the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ask {
    /// Any list in the server's cache.
    Any,
    /// A list that is not older than this version, from the server's cache.
    NotOlderThan(String),
    /// The newest list: the present one, or a later one.
    Newest,
}

/// The decision about a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Judgement {
    /// Accept it.
    Take,
    /// Accept it: versions are permanently lower.
    TakeBack,
    /// Reject it: it is outdated.
    Past,
}

/// The newest resource version that a watch has seen, and the number of consecutive older responses.
#[derive(Debug, Default)]
pub(super) struct Seen {
    newest: Option<String>,
    past_answers: u32,
    /// The time since which the newest list has been older than the version seen.
    back_since: Option<Instant>,
}

impl Seen {
    /// Returns the list to request.
    ///
    /// A new agent has seen nothing, and the state in the kernel has no version, so the agent requests the newest list.
    /// If lists are not streamed it accepts any list: the newest one could make the store read all pods of the cluster.
    pub(super) fn ask(&self, is_streaming: bool) -> Ask {
        match &self.newest {
            None if is_streaming => Ask::Newest,
            None => Ask::Any,
            Some(_) if self.past_answers >= PAST_ANSWERS => Ask::Newest,
            Some(version) => Ask::NotOlderThan(version.clone()),
        }
    }

    /// Decides about a list of this version, which is the response to `ask`. Records the version if the list is
    /// accepted.
    pub(super) fn judge(&mut self, ask: &Ask, version: &str, now: Instant) -> Judgement {
        let is_past = self.newest.as_ref().is_some_and(|newest| is_older(version, newest));
        let mut judgement = Judgement::Take;
        if is_past {
            let back_since = match ask {
                Ask::Newest => *self.back_since.get_or_insert(now),
                Ask::Any | Ask::NotOlderThan(_) => now,
            };
            if now.duration_since(back_since) < BACK_FOR {
                self.refused();
                return Judgement::Past;
            }
            judgement = Judgement::TakeBack;
        }
        *self = Self { newest: Some(version.to_owned()), ..Self::default() };
        judgement
    }

    /// Records that the server's data are older than the request demands, by its own response.
    pub(super) fn refused(&mut self) {
        self.past_answers = self.past_answers.saturating_add(1);
    }

    /// Records the version of a change or a bookmark of the watch.
    pub(super) fn saw(&mut self, version: &str) {
        if self.newest.as_ref().is_none_or(|newest| !is_older(version, newest)) {
            self.newest = Some(version.to_owned());
        }
    }

    /// The newest version seen; empty if none.
    pub(super) fn newest(&self) -> &str {
        self.newest.as_deref().unwrap_or_default()
    }
}

/// Whether version `a` is certainly older than `b`.
///
/// Versions are decimal numbers of any length. Kubernetes documents that since 1.35. Before, they were officially
/// opaque, and in fact the revisions of its store. A version of another form is never older: then only the server's own
/// check guarantees that a list is new enough.
fn is_older(a: &str, b: &str) -> bool {
    let number = |text: &str| {
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| text.trim_start_matches('0').to_owned())
    };
    let (Some(a), Some(b)) = (number(a), number(b)) else { return false };
    a.len().cmp(&b.len()).then_with(|| a.cmp(&b)) == Ordering::Less
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn versions_are_compared_as_numbers_and_others_not_at_all() {
        for (a, b, expected) in [
            ("9", "10", true),
            ("10", "9", false),
            ("7", "7", false),
            ("007", "8", true),
            ("0", "1", true),
            ("99999999999999999999", "100000000000000000000", true),
            ("", "1", false),
            ("1", "", false),
            ("v1", "v2", false),
            ("1", "v2", false),
        ] {
            assert_eq!(is_older(a, b), expected, "{a} {b}");
        }
    }

    #[test]
    fn a_new_agent_asks_for_the_newest_list_where_that_costs_little() {
        let seen = Seen::default();
        assert_eq!(seen.ask(true), Ask::Newest);
        assert_eq!(seen.ask(false), Ask::Any);
    }

    #[test]
    fn a_server_that_stays_behind_is_asked_for_the_newest_list() {
        let (mut seen, now) = (Seen::default(), Instant::now());
        seen.saw("50");
        let wanted = Ask::NotOlderThan("50".into());
        for _ in 0..PAST_ANSWERS {
            assert_eq!(seen.ask(true), wanted);
            assert_eq!(seen.judge(&wanted, "49", now), Judgement::Past);
        }
        assert_eq!((seen.ask(true), seen.ask(false)), (Ask::Newest, Ask::Newest));
        assert_eq!(seen.judge(&Ask::Newest, "51", now), Judgement::Take);
        assert_eq!(seen.ask(true), Ask::NotOlderThan("51".into()));
    }

    #[test]
    fn a_store_that_was_restored_is_believed_after_a_while_and_from_then_on() {
        let (mut seen, begun) = (Seen::default(), Instant::now());
        seen.saw("5000");
        (0..PAST_ANSWERS).for_each(|_| seen.refused());
        for second in (0..300).step_by(10) {
            let now = begun + Duration::from_secs(second);
            assert_eq!(seen.judge(&seen.ask(true), "70", now), Judgement::Past, "{second}");
        }
        let now = begun + BACK_FOR;
        assert_eq!(seen.judge(&seen.ask(true), "71", now), Judgement::TakeBack);
        assert_eq!(seen.ask(true), Ask::NotOlderThan("71".into()));
        assert_eq!(seen.judge(&seen.ask(true), "72", now), Judgement::Take);
    }

    proptest! {
        /// For any responses at any time: an accepted list is not older than the newest version seen, unless the newest
        /// list was older for five minutes without a break. If a server keeps its newest list, that list is accepted in
        /// the end.
        #[test]
        fn nothing_from_the_past_is_taken_and_nothing_hangs_for_ever(
            steps in prop::collection::vec((0..4_u8, 0..100_u64, 0..120_u64), 1..60),
        ) {
            let mut seen = Seen::default();
            let mut now = Instant::now();
            let mut newest: Option<u64> = None;
            let mut back_since = None;
            for (what, version, seconds) in steps {
                now += Duration::from_secs(seconds);
                if what == 0 {
                    seen.saw(&version.to_string());
                    newest = newest.max(Some(version));
                    continue;
                }
                let ask = seen.ask(what == 1);
                let judgement = seen.judge(&ask, &version.to_string(), now);
                if newest.is_none_or(|newest| version >= newest) {
                    prop_assert_eq!(judgement, Judgement::Take);
                    (newest, back_since) = (Some(version), None);
                    continue;
                }
                if ask == Ask::Newest {
                    back_since.get_or_insert(now);
                }
                if judgement == Judgement::TakeBack {
                    prop_assert!(back_since.is_some_and(|since| now.duration_since(since) >= BACK_FOR));
                    (newest, back_since) = (Some(version), None);
                } else {
                    prop_assert_eq!(judgement, Judgement::Past);
                }
            }
            seen.saw("1000");
            for _ in 0..PAST_ANSWERS + 3 {
                let ask = seen.ask(true);
                seen.judge(&ask, "1", now);
                now += BACK_FOR / 2;
            }
            prop_assert_eq!(seen.newest(), "1");
        }
    }
}
