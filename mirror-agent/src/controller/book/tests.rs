//! Tests: which status is written when, as Mirrors and reports are created, changed and deleted.

#![expect(clippy::unwrap_used, reason = "tests panic")]

mod room;

use k8s_openapi::jiff::SignedDuration;
use mirror_api::{
    MirrorStatus, MirrorSummary, MirrorTargetStatus, Packets, Pods, TargetSummary,
    sum::{RENEW, REPORT_STALE},
};

use super::*;
use crate::model::{Resource, TargetResource};

const STALE: Duration = Duration::from_secs(15 * 60);

/// A running controller: the server accepts every write, and the watch returns it.
struct Run {
    book: Book<Resource>,
    begun: Instant,
    now: Instant,
    /// The writes: seconds, names and statuses.
    written: Vec<(u64, String, MirrorStatus)>,
}

impl Run {
    fn new() -> Self {
        let now = Instant::now();
        let mut book = Book::new();
        book.complete();
        Self { book, begun: now, now, written: Vec::new() }
    }

    /// The wall-clock time.
    fn at(&self) -> Timestamp {
        Timestamp::from_second(1_000_000).unwrap() + self.now.duration_since(self.begun)
    }

    fn mirror(&mut self, name: &str, uid: &str, generation: i64) {
        self.book.set(key(name), uid.into(), asked(generation), None, self.now);
    }

    fn node(&mut self, node: &str, mirrors: Vec<MirrorSummary>) {
        self.report(node, mirrors, Some(self.at()));
    }

    fn report(&mut self, node: &str, mirrors: Vec<MirrorSummary>, reported: Option<Timestamp>) {
        let last_report_time = reported.map(Time);
        let mut status = MirrorNodeStatus { last_report_time, mirrors, ..Default::default() };
        self.book.set_node(node, Some(&mut status), self.now, self.at());
    }

    /// Whether nothing of the object is new.
    fn is_quiet(&self, key: &Key) -> bool {
        self.book.objects[key].due.is_none_or(|due| due >= self.now + COUNTS_PACE)
    }

    /// Advances the time by `seconds`, and writes what is due.
    fn pass(&mut self, seconds: u64) -> &mut Self {
        let end = self.now + Duration::from_secs(seconds);
        while self.now < end {
            self.now += Duration::from_millis(500);
            while let Ok(write) = self.book.due(self.now, self.at()) {
                let Write { key, uid, status, .. } = &write;
                let after = self.now.duration_since(self.begun).as_secs();
                self.written.push((after, key.name.clone(), status.clone()));
                let asked = self.book.objects[key].asked.clone();
                self.book.set(key.clone(), uid.clone(), asked, Some(status.clone()), self.now);
                assert!(self.is_quiet(key));
                // The watch can be faster than the answer to the write.
                self.book.note(&write, true, self.now);
                assert!(self.is_quiet(key));
            }
        }
        self
    }

    /// The writes since the last call: seconds, names and selected pods.
    fn told(&mut self) -> Vec<(u64, String, i64)> {
        let written = std::mem::take(&mut self.written);
        written.into_iter().map(|(at, name, status)| (at, name, status.pods.selected)).collect()
    }
}

fn asked(generation: i64) -> Asked {
    Asked { generation, ..Asked::default() }
}

fn key(name: &str) -> Key {
    Key { namespace: Some("shop".into()), name: name.into() }
}

fn report(name: &str, selected: i64, copied: i64) -> MirrorSummary {
    MirrorSummary {
        kind: "Mirror".into(),
        namespace: Some("shop".into()),
        name: name.into(),
        uid: format!("uid-{name}"),
        observed_generation: 1,
        pods: Pods { selected, covered: selected },
        packets: Packets { copied, lost: 0 },
        nics: selected,
        ..MirrorSummary::default()
    }
}

fn told(written: &[(u64, &str, i64)]) -> Vec<(u64, String, i64)> {
    written.iter().map(|(at, name, selected)| (*at, (*name).to_owned(), *selected)).collect()
}

#[test]
fn changes_are_written_together_and_not_too_often() {
    let mut run = Run::new();
    run.mirror("a", "uid-a", 1);
    run.node("one", vec![report("a", 2, 0)]);
    run.node("two", vec![report("a", 3, 0)]);
    run.pass(5);
    assert_eq!(run.told(), told(&[(1, "a", 5)]));
    for pods in 4..30 {
        run.node("two", vec![report("a", pods, 0)]);
        run.pass(1);
    }
    run.pass(20);
    let written = run.told();
    // The quiet time before allows three writes in a row; then each one waits for its turn.
    assert_eq!(written.iter().map(|(at, ..)| *at).collect::<Vec<_>>(), [6, 7, 8, 11, 21, 31]);
    assert_eq!(written.last().unwrap().2, 31);
    assert_eq!(run.pass(1000).told().len(), 2, "the reports become stale, one after the other");
}

#[test]
fn counters_alone_are_written_once_a_minute() {
    let mut run = Run::new();
    run.mirror("a", "uid-a", 1);
    for second in 0..600 {
        run.node("one", vec![report("a", 2, second)]);
        run.pass(1);
    }
    assert!((10..=11).contains(&run.told().len()));
    // Changes of other fields are not delayed by that.
    run.node("one", vec![report("a", 2, 1000)]);
    run.pass(3);
    run.node("one", vec![report("a", 3, 1000)]);
    run.pass(12);
    assert_eq!(run.told().last().unwrap().2, 3);
}

/// Nothing changes, and three nodes repeat their reports one after the other. A reader sees that the status is written.
#[test]
fn a_status_in_which_nothing_changes_is_written_once_in_five_minutes() {
    let mut run = Run::new();
    run.mirror("a", "uid-a", 1);
    for second in 0..3600_u64 {
        for (node, turn) in [("one", 0), ("two", 100), ("three", 170)] {
            if second % 300 == turn || second == 0 {
                run.node(node, vec![report("a", 2, 7)]);
            }
        }
        run.pass(1);
        let written = run.written.last().map(|(.., status)| status.last_report_time.clone().unwrap());
        let age = run.at().duration_since(written.unwrap().0);
        assert!(age < RENEW * 2 + SignedDuration::from_secs(20), "{second}: {age}");
    }
    assert!((11..=13).contains(&run.told().len()));
    // The last agent is removed.
    assert_eq!(run.pass(900).written.pop().unwrap().2.last_report_time, None);
}

/// Another change was just before this one, and the counters change all the time.
#[test]
fn a_change_of_a_quiet_mirror_is_written_within_two_seconds() {
    let mut run = Run::new();
    run.mirror("a", "uid-a", 1);
    for second in 0..600 {
        run.node("one", vec![report("a", 2, second)]);
        run.pass(1);
    }
    run.told();
    run.node("one", vec![report("a", 3, 600)]);
    run.pass(3);
    run.node("one", vec![report("a", 4, 600)]);
    run.pass(3);
    assert_eq!(run.told(), told(&[(601, "a", 3), (604, "a", 4)]));
}

#[test]
fn in_a_large_cluster_counters_are_written_less_often() {
    let mut run = Run::new();
    assert_eq!(run.book.counts_pace(), COUNTS_PACE);
    for node in 0..1000 {
        run.node(&format!("node-{node}"), Vec::new());
    }
    for mirror in 0..1000 {
        run.mirror(&format!("m{mirror}"), "1", 1);
    }
    assert_eq!(run.book.counts_pace(), Duration::from_secs(100));
}

#[test]
fn a_deleted_node_does_not_count_and_one_with_a_stale_report_covers_nothing() {
    let mut run = Run::new();
    run.mirror("a", "uid-a", 1);
    run.node("one", vec![report("a", 2, 0)]);
    run.node("two", vec![report("a", 3, 0)]);
    // Its agent does not repeat this report.
    run.node("idle", Vec::new());
    run.pass(20);
    run.book.set_node("two", None, run.now, run.at());
    run.pass(20);
    assert_eq!(run.told(), told(&[(1, "a", 5), (21, "a", 2)]));
    assert_eq!(run.book.stale().count(), 0);
    run.pass(STALE.as_secs());
    let MirrorStatus { pods, conditions, .. } = &run.written.last().unwrap().2;
    assert_eq!((*pods, conditions[0].reason.as_str()), (Pods { selected: 2, covered: 0 }, REPORT_STALE));
    assert_eq!(run.told(), told(&[(901, "a", 2)]));
    assert_eq!(run.book.stale().collect::<Vec<_>>(), ["one"]);
    // Its agent runs again.
    run.node("one", vec![report("a", 2, 0)]);
    run.pass(20);
    assert_eq!(run.told(), told(&[(941, "a", 2)]));
}

/// Its agent is dead, and no other node reports on the Mirror.
#[test]
fn a_mirror_with_a_stale_report_ends_in_time() {
    let mut run = Run::new();
    run.mirror("a", "uid-a", 1);
    let expiration_time = Some(Time(run.at() + Duration::from_secs(3600)));
    run.node("one", vec![MirrorSummary { expiration_time, ..report("a", 2, 0) }]);
    run.pass(3700);
    let written = run.written.iter().map(|(at, _, status)| (*at, status.conditions[3].reason.as_str()));
    let written: Vec<_> = written.collect();
    let [(1, "NotEnded"), (901, "NotEnded"), (at, "LimitReached")] = written[..] else {
        unreachable!("{written:?}")
    };
    assert!((3600..=3661).contains(&at), "{at}");
}

/// A node with a wrong clock, or a compromised one.
#[test]
fn a_report_without_a_time_or_from_the_future_is_stale() {
    let mut run = Run::new();
    let written = |run: &mut Run| {
        let written = std::mem::take(&mut run.written).into_iter();
        written.map(|(at, _, status)| (at, status.pods.selected, status.pods.covered)).collect::<Vec<_>>()
    };
    run.mirror("a", "uid-a", 1);
    run.report("one", vec![report("a", 2, 0)], None);
    run.report("two", vec![report("a", 2, 0)], Some(run.at() + Duration::from_secs(3600)));
    run.pass(20);
    assert_eq!((written(&mut run), run.book.stale().count()), (vec![(1, 4, 0)], 2));
    // No more reports arrive from there. When the time of the report has passed, it is soon stale again.
    run.pass(2 * 3600);
    let mut written = written(&mut run);
    // The time in the status is renewed meanwhile.
    written.dedup_by_key(|(_, selected, covered)| (*selected, *covered));
    let [(from, 4, 2), (to, 4, 0)] = written[..] else { unreachable!("{written:?}") };
    assert!(to - from <= 20 * 60 + 1, "{written:?}");
}

#[test]
fn a_report_on_a_mirror_of_the_same_name_before_it_does_not_count() {
    let mut run = Run::new();
    run.node("one", vec![report("a", 2, 0)]);
    run.mirror("a", "another", 1);
    run.pass(5);
    assert_eq!(run.told(), told(&[(1, "a", 0)]));
    run.book.remove(&key("a"));
    run.node("one", vec![report("a", 7, 0)]);
    assert_eq!(run.pass(60).told(), []);
    assert!(run.book.due.is_empty());
    run.mirror("a", "uid-a", 1);
    run.pass(5);
    assert_eq!(run.told(), told(&[(66, "a", 7)]));
}

#[test]
fn what_a_node_has_no_room_for_is_not_known() {
    let mut run = Run::new();
    let unknown = |run: &Run| {
        let of = |status: &MirrorStatus| status.conditions[2].reason.clone();
        run.written.iter().map(|(_, name, status)| (name.clone(), of(status))).collect::<Vec<_>>()
    };
    run.mirror("a", "uid-a", 1);
    run.mirror("z", "uid-z", 1);
    let mut status = MirrorNodeStatus {
        mirrors: vec![report("b", 1, 0), report("c", 1, 0)],
        more_mirrors: Some(1),
        last_report_time: Some(Time(run.at())),
        ..MirrorNodeStatus::default()
    };
    run.book.set_node("one", Some(&mut status), run.now, run.at());
    run.pass(5);
    let expected = [("a", "NoPods"), ("z", "NotAllTold")];
    let expected = expected.map(|(name, reason)| (name.to_owned(), reason.to_owned()));
    assert_eq!(unknown(&run), expected);
    // The agent is dead.
    run.pass(STALE.as_secs());
    run.mirror("z", "uid-z", 2);
    run.pass(5);
    assert_eq!(run.book.stale().count(), 1);
    assert_eq!(unknown(&run)[2..], expected[1..]);
}

#[test]
fn a_write_that_has_failed_is_tried_again_later() {
    let mut run = Run::new();
    run.mirror("a", "uid-a", 1);
    run.now += SETTLE;
    let write = run.book.due(run.now, run.at()).unwrap();
    run.book.note(&write, false, run.now);
    assert_eq!(run.book.due.first().unwrap().0, run.now + PACE);
    // Another client has written the status: the controller writes it again.
    run.pass(15);
    assert_eq!(run.told().len(), 1);
    let status = MirrorStatus::default();
    run.book.set(key("a"), "uid-a".into(), asked(1), Some(status), run.now);
    assert_eq!(run.pass(15).told().len(), 1);
}

/// The watch returns a status, and then its write times out. Before the controller retries, the old state is back.
#[test]
fn a_write_whose_answer_is_lost_is_taken_back() {
    let mut run = Run::new();
    run.mirror("a", "uid-a", 1);
    run.node("one", vec![report("a", 2, 0)]);
    run.pass(20);
    assert_eq!(run.told(), told(&[(1, "a", 2)]));
    run.node("one", vec![report("a", 3, 0)]);
    run.now += SETTLE;
    let lost = run.book.due(run.now, run.at()).unwrap();
    assert_eq!(lost.status.pods.selected, 3);
    run.book.set(key("a"), "uid-a".into(), asked(1), Some(lost.status.clone()), run.now);
    run.book.note(&lost, false, run.now);
    run.node("one", vec![report("a", 2, 0)]);
    run.now += SETTLE;
    let write = run.book.due(run.now, run.at()).unwrap();
    let Write { status, before, .. } = &write;
    assert_eq!((Some(status), before), (lost.before.as_ref(), &lost.before), "no Event follows");
    run.book.note(&write, true, run.now);
    assert_eq!(run.pass(60).told(), []);
}

#[test]
fn a_mirror_target_has_the_sum_of_the_nodes_that_report_on_it() {
    let mut run = Run::new();
    let mut book = Book::<TargetResource>::new();
    book.complete();
    let ids = Key { namespace: None, name: "ids".into() };
    book.set(ids.clone(), "uid-ids".into(), asked(1), None, run.now);
    let report = |run: &Run, book: &mut Book<TargetResource>, node: &str, (name, uid): (&str, &str), more| {
        let target = TargetSummary { name: name.into(), uid: uid.into(), ..TargetSummary::default() };
        let (last_report_time, targets) = (Some(Time(run.at())), vec![target]);
        let mut status =
            MirrorNodeStatus { last_report_time, targets, more_targets: more, ..Default::default() };
        book.set_node(node, Some(&mut status), run.now, run.at());
    };
    report(&run, &mut book, "one", ("ids", "uid-ids"), None);
    report(&run, &mut book, "two", ("ids", "uid-ids"), None);
    report(&run, &mut book, "old", ("ids", "uid-before"), None);
    run.now += SETTLE;
    let write = book.due(run.now, run.at()).unwrap();
    let ready = |write: &Write<TargetResource>| {
        let MirrorTargetStatus { nodes, conditions, .. } = &write.status;
        (nodes.ready, nodes.desired, conditions[0].reason.clone())
    };
    assert_eq!((&write.key, write.uid.as_str()), (&ids, "uid-ids"));
    assert_eq!(ready(&write), (2, 2, "AllReady".to_owned()));
    book.note(&write, true, run.now);
    // One of the nodes sends no more reports.
    run.now += STALE;
    report(&run, &mut book, "one", ("ids", "uid-ids"), None);
    run.now += SETTLE * 2;
    let write = book.due(run.now, run.at()).unwrap();
    assert_eq!(ready(&write), (1, 2, REPORT_STALE.to_owned()));
    book.note(&write, true, run.now);
    // Its Node is deleted. The report of the other one ends before this object, because there was no more room.
    book.set_node("two", None, run.now, run.at());
    report(&run, &mut book, "one", ("a", "uid-a"), Some(1));
    run.now += PACE;
    let write = book.due(run.now, run.at()).unwrap();
    assert_eq!(ready(&write), (0, 0, "NotAllTold".to_owned()));
}
