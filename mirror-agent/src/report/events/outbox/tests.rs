//! Tests: when an Event is posted, refreshed, delayed and remembered.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use proptest::prelude::*;

use super::*;
use crate::model::PodId;

const WRITTEN: Outcome = Outcome::Written { count: 1 };
const MINUTE: u64 = 60;

fn fact(namespace: &str, name: &str) -> Fact {
    let pod = PodId { uid: format!("{namespace}-{name}"), namespace: namespace.into(), name: name.into() };
    Fact { pod, is_news: false, reason: "HostNetwork", note: String::new() }
}

/// Answers the next Event at the time when it is due. Returns its pod, and the wait in seconds.
fn step(outbox: &mut Outbox, now: &mut Instant, answer: Outcome) -> (String, u64) {
    let (pod, _, seconds) = post(outbox, now, answer);
    (pod, seconds)
}

/// Like [`step`], and also returns the kind of the post.
fn post(outbox: &mut Outbox, now: &mut Instant, answer: Outcome) -> (String, Post, u64) {
    let (fact, post, at) = outbox.next().unwrap();
    let at = at.unwrap_or(*now).max(*now);
    let waited = at - *now;
    *now = at;
    outbox.note(&fact, answer, at);
    (fact.pod.to_string(), post, waited.as_secs())
}

/// Whether no Event is due for half an hour.
fn is_quiet(outbox: &Outbox, now: Instant) -> bool {
    outbox.next().is_none_or(|(.., at)| at.is_some_and(|at| at >= now + REFRESH))
}

#[test]
fn a_server_that_is_away_is_asked_less_and_less_often_by_one_event() {
    let mut now = Instant::now();
    let mut outbox = Outbox::default();
    outbox.set([fact("a", "x"), fact("a", "y")].into(), now);
    let waits: Vec<_> = (0..12).map(|_| step(&mut outbox, &mut now, Outcome::Away).1).collect();
    assert_eq!(waits, [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
    assert_eq!(step(&mut outbox, &mut now, WRITTEN), ("a/x".into(), 300));
    assert_eq!(step(&mut outbox, &mut now, Outcome::Away), ("a/y".into(), 0));
    assert_eq!(step(&mut outbox, &mut now, WRITTEN), ("a/y".into(), 1));
    assert!(is_quiet(&outbox, now));
}

#[test]
fn a_namespace_that_refuses_holds_up_no_other() {
    let mut now = Instant::now();
    let mut outbox = Outbox::default();
    outbox.set([fact("a", "x"), fact("a", "y"), fact("b", "z")].into(), now);
    assert_eq!(step(&mut outbox, &mut now, Outcome::Refused), ("a/x".into(), 0));
    assert_eq!(step(&mut outbox, &mut now, WRITTEN), ("b/z".into(), 0));
    assert_eq!(step(&mut outbox, &mut now, Outcome::Refused), ("a/x".into(), 1));
    outbox.set([fact("a", "x"), fact("a", "y"), fact("b", "z"), fact("c", "new")].into(), now);
    assert_eq!(step(&mut outbox, &mut now, WRITTEN), ("c/new".into(), 0));
    assert_eq!(step(&mut outbox, &mut now, WRITTEN), ("a/x".into(), 2));
    assert_eq!(step(&mut outbox, &mut now, WRITTEN), ("a/y".into(), 0));
    assert!(is_quiet(&outbox, now));
}

#[test]
fn a_namespace_for_which_the_server_fails_holds_up_no_other() {
    let mut now = Instant::now();
    let mut outbox = Outbox::default();
    outbox.set([fact("a", "x"), fact("b", "y"), fact("c", "z")].into(), now);
    assert_eq!(step(&mut outbox, &mut now, Outcome::Away), ("a/x".into(), 0));
    assert_eq!(step(&mut outbox, &mut now, WRITTEN), ("b/y".into(), 1));
    assert_eq!(step(&mut outbox, &mut now, WRITTEN), ("c/z".into(), 0));
    assert_eq!(step(&mut outbox, &mut now, Outcome::Away), ("a/x".into(), 0));
}

#[test]
fn an_event_that_still_holds_is_refreshed_before_the_server_forgets_it() {
    const TTL: u64 = 60 * MINUTE;
    let mut now = Instant::now();
    let mut outbox = Outbox::default();
    outbox.set([fact("a", "x")].into(), now);
    assert_eq!(post(&mut outbox, &mut now, WRITTEN), ("a/x".into(), Post::Create, 0));
    for count in 1..50 {
        // The same report again changes nothing.
        outbox.set([fact("a", "x")].into(), now);
        let (_, how, waited) = post(&mut outbox, &mut now, Outcome::Written { count: count + 1 });
        assert_eq!(how, Post::Refresh { count: Some(count) });
        assert!((30 * MINUTE..40 * MINUTE).contains(&waited) && waited < TTL, "{waited} s");
    }
    // A server that keeps Events for a shorter time, or a new server.
    let (_, how, _) = post(&mut outbox, &mut now, Outcome::Forgotten);
    assert_eq!(how, Post::Refresh { count: Some(50) });
    assert_eq!(post(&mut outbox, &mut now, WRITTEN), ("a/x".into(), Post::Create, 0));
}

#[test]
fn what_the_server_does_not_take_is_tried_again_with_the_refreshments() {
    let mut now = Instant::now();
    let mut outbox = Outbox::default();
    outbox.set([fact("a", "x")].into(), now);
    assert_eq!(post(&mut outbox, &mut now, Outcome::NotNow), ("a/x".into(), Post::Create, 0));
    assert!(is_quiet(&outbox, now));
    assert_eq!(post(&mut outbox, &mut now, WRITTEN).1, Post::Create);
}

#[test]
fn the_refreshments_of_many_events_are_spread() {
    let mut now = Instant::now();
    let begun = now;
    let mut outbox = Outbox::default();
    let tell: BTreeSet<_> = (0..1000).map(|number| fact("a", &number.to_string())).collect();
    outbox.set(tell, now);
    (0..1000).for_each(|_| assert_eq!(step(&mut outbox, &mut now, WRITTEN).1, 0));
    let mut of_minute = [0; 10];
    for _ in 0..1000 {
        step(&mut outbox, &mut now, WRITTEN);
        of_minute[usize::try_from((now - begun).as_secs() / MINUTE).unwrap() - 30] += 1;
    }
    assert!(of_minute.iter().all(|number| (50..150).contains(number)), "{of_minute:?}");
}

#[test]
fn what_comes_and_goes_is_not_posted_each_time() {
    let mut now = Instant::now();
    let mut outbox = Outbox::default();
    outbox.set([fact("a", "x"), fact("a", "y")].into(), now);
    assert_eq!(step(&mut outbox, &mut now, WRITTEN), ("a/x".into(), 0));
    assert_eq!(step(&mut outbox, &mut now, Outcome::Away), ("a/y".into(), 0));
    outbox.set([fact("a", "x")].into(), now);
    assert!(is_quiet(&outbox, now));
    for _ in 0..100 {
        outbox.set([].into(), now);
        assert_eq!(outbox.next(), None);
        outbox.set([fact("a", "x")].into(), now);
        assert!(is_quiet(&outbox, now));
    }
    // After the time of its next refresh, it is posted again.
    outbox.set([].into(), now);
    now += Duration::from_secs(50 * MINUTE);
    outbox.set([].into(), now);
    outbox.set([fact("a", "x")].into(), now);
    assert_eq!(post(&mut outbox, &mut now, Outcome::Exists), ("a/x".into(), Post::Create, 0));
}

#[test]
fn a_pod_that_always_says_something_else_is_held_back_and_holds_up_no_other() {
    let mut now = Instant::now();
    let begun = now;
    let mut outbox = Outbox::default();
    let change = |number: u32| Fact { note: number.to_string(), ..fact("a", "x") };
    let mut posted = 0;
    for number in 0..3600 {
        outbox.set([change(number)].into(), now);
        if outbox.next().is_some_and(|(.., at)| at.is_none_or(|at| at <= now)) {
            step(&mut outbox, &mut now, WRITTEN);
            posted += 1;
        }
        now += Duration::from_secs(1);
    }
    assert_eq!(posted, BURST + 3599 / 300);
    outbox.set([change(9999), fact("a", "y")].into(), now);
    assert_eq!(step(&mut outbox, &mut now, WRITTEN), ("a/y".into(), 0));
    // The last change is posted in the end.
    let (pod, waited) = step(&mut outbox, &mut now, WRITTEN);
    assert!(pod == "a/x" && waited <= 300, "{waited} s");
    assert!(now - begun < Duration::from_secs(3600 + 301));
}

#[test]
fn news_are_posted_once_and_those_of_a_node_one_after_the_other() {
    let mut now = Instant::now();
    let begun = now;
    let mut outbox = Outbox::default();
    let news = |number: u32| Fact { is_news: true, ..fact("a", &format!("{number:03}")) };
    let mut tell: BTreeSet<_> = (0..100).map(news).collect();
    let mut posted = Vec::new();
    while !tell.is_empty() {
        outbox.set(tell.clone(), now);
        let (fact, how, at) = outbox.next().unwrap();
        assert_eq!(how, Post::Create);
        now = at.unwrap_or(now).max(now);
        outbox.note(&fact, WRITTEN, now);
        assert!(tell.remove(&fact) && WRITTEN.ends_news());
        posted.push((now - begun).as_secs());
        // A problem is not delayed by them.
        if posted.len() == 50 {
            let problem = self::fact("a", "late");
            outbox.set(tell.iter().cloned().chain([problem.clone()]).collect(), now);
            assert_eq!(post(&mut outbox, &mut now, WRITTEN), (problem.pod.to_string(), Post::Create, 0));
        }
    }
    let expected: Vec<_> =
        [0; NEWS_BURST as usize].into_iter().chain((1..=92).map(|number| number * 5)).collect();
    assert_eq!(posted, expected);

    // The same change again is posted, and continues the Event.
    now += Duration::from_secs(60);
    outbox.set([news(1)].into(), now);
    assert_eq!(post(&mut outbox, &mut now, Outcome::Exists).1, Post::Create);
    assert_eq!(post(&mut outbox, &mut now, WRITTEN), ("a/001".into(), Post::Refresh { count: None }, 0));
    outbox.set([].into(), now);
    assert!(outbox.next().is_none() && outbox.former.keys().all(|fact| !fact.is_news));
}

/// The mirrors of all pods in the namespace "many" begin and end all the time, more often than a node posts news.
#[test]
fn a_namespace_that_always_has_news_holds_up_no_other() {
    let mut now = Instant::now();
    let mut outbox = Outbox::default();
    let news = |namespace: &str, pod: u32, note: u32| {
        let note = note.to_string();
        Fact { is_news: true, note, ..fact(namespace, &format!("{pod:03}")) }
    };
    let mut others = BTreeSet::new();
    let mut posted = Vec::new();
    for round in 0..100 {
        if round == 90 {
            others = [news("one", 0, 0), news("two", 0, 0), news("two", 1, 0)].into();
        }
        let many = (0..200).map(|pod| news("many", pod, round));
        outbox.set(many.chain(others.iter().cloned()).collect(), now);
        if round == 90 {
            // A namespace that has refused an Event once has its turn when its pause is over.
            outbox.note(&news("one", 0, 0), Outcome::Refused, now);
        }
        let (fact, how, at) = outbox.next().unwrap();
        let at = at.unwrap_or(now).max(now);
        outbox.note(&fact, WRITTEN, at);
        others.remove(&fact);
        posted.push((fact.pod.namespace, how, (at - now).as_secs()));
        now = at;
    }
    assert!(posted[..90].iter().all(|(namespace, ..)| namespace == "many"));
    let expected = ["two", "one", "many", "two", "many", "many", "many", "many", "many", "many"];
    assert_eq!(posted[90..], expected.map(|namespace| (namespace.to_owned(), Post::Create, 5)));
    outbox.set([].into(), now + REFRESH);
    assert!(outbox.turns.is_empty());
}

#[test]
fn a_pod_whose_mirror_always_comes_and_goes_gets_few_news() {
    let mut now = Instant::now();
    let mut outbox = Outbox::default();
    let mut posted = 0;
    for number in 0..3600_u32 {
        let note = if number % 20 < 10 { "begun" } else { "ended" };
        outbox.set([Fact { is_news: true, note: note.into(), ..fact("a", "x") }].into(), now);
        if let Some((fact, post, _)) = outbox.next().filter(|(.., at)| at.is_none_or(|at| at <= now)) {
            outbox.note(&fact, WRITTEN, now);
            posted += u32::from(post == Post::Create);
        }
        now += Duration::from_secs(1);
    }
    assert!(posted <= BURST + 3600 / 300, "{posted}");
}

#[test]
fn what_was_told_is_remembered_within_bounds() {
    let mut now = Instant::now();
    let mut outbox = Outbox::default();
    for round in 0..200 {
        let tell: BTreeSet<_> = (0..20).map(|number| fact("a", &format!("{round}-{number}"))).collect();
        outbox.set(tell, now);
        (0..20).for_each(|_| assert_eq!(step(&mut outbox, &mut now, WRITTEN).1, 0));
        now += Duration::from_secs(1);
        assert!(outbox.former.len() <= MOST_FORMER);
    }
    assert!(outbox.former.len() > MOST_FORMER * 9 / 10, "{}", outbox.former.len());
    outbox.set([].into(), now + Duration::from_secs(60 * MINUTE));
    assert!(outbox.former.is_empty() && outbox.paces.is_empty());
}

proptest! {
    /// For any Events that begin and end, and any answers: a server that does not answer gets its pause, an existing
    /// Event is not posted again too early, and every Event is posted in the end.
    #[test]
    fn pauses_are_kept_and_nothing_is_forgotten(
        steps in prop::collection::vec(
            (prop::collection::btree_set((0..3_u8, 0..3_u8), 1..6), 0..7_usize),
            1..40,
        ),
    ) {
        use Outcome::{Away, Exists, Forgotten, NotNow, Refused};
        let mut now = Instant::now();
        let mut outbox = Outbox::default();
        let mut quiet_until = now;
        let mut done = BTreeMap::new();
        for (tell, answer) in &steps {
            let tell: BTreeSet<_> =
                tell.iter().map(|(namespace, name)| fact(&namespace.to_string(), &name.to_string())).collect();
            outbox.set(tell.clone(), now);
            let (next, _, at) = outbox.next().unwrap();
            prop_assert!(tell.contains(&next));
            now = at.unwrap_or(now).max(now);
            prop_assert!(now >= quiet_until);
            prop_assert!(done.get(&next).is_none_or(|at| now >= *at + REFRESH));
            let answer = [Away, Refused, Exists, Forgotten, NotNow, WRITTEN, WRITTEN][*answer];
            outbox.note(&next, answer, now);
            match answer {
                Away => quiet_until = now + PAUSE.0,
                Outcome::Written { .. } => drop(done.insert(next, now)),
                Refused | NotNow => {}
                Exists | Forgotten => drop(done.remove(&next)),
            }
        }
        let last: BTreeSet<_> = outbox.facts.keys().cloned().collect();
        let begun = now;
        // The upper bound of all pauses and intervals together.
        while now < begun + 2 * REFRESH {
            let (next, _, at) = outbox.next().unwrap();
            now = at.unwrap_or(now).max(now);
            outbox.note(&next, WRITTEN, now);
            done.insert(next, now);
        }
        prop_assert!(last.iter().all(|fact| done.contains_key(fact)));
    }
}
