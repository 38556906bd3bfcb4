//! Tests: the statuses of Mirrors and ClusterMirrors that a node has no room for in its report.

use mirror_core::fair::shares;
use proptest::{collection::vec, prelude::*, sample::subsequence};

use super::*;

const NAMESPACES: [Option<&str>; 4] = [None, Some("a"), Some("b"), Some("c")];
const OF_EACH: u8 = 8;

fn of(namespace: Option<&str>, number: u8) -> Key {
    Key { namespace: namespace.map(str::to_owned), name: format!("m{number}") }
}

/// All objects of the cluster.
fn all() -> Vec<Key> {
    let of_each = |namespace| (0..OF_EACH).map(move |number| of(namespace, number));
    NAMESPACES.into_iter().flat_map(of_each).collect()
}

/// A controller that has written the status of all objects.
fn run() -> Run {
    let mut run = Run::new();
    for key in all() {
        let uid = format!("uid-{}", key.name);
        run.book.set(key, uid, asked(1), None, run.now);
    }
    assert_eq!(sum_up(&mut run).len(), all().len());
    run
}

/// The objects in the report of a node with this room, as agents share it, if `wanted` select pods there.
fn with_room(wanted: &BTreeSet<Key>, room: usize) -> BTreeSet<Key> {
    let of_namespaces = NAMESPACES.map(|namespace| {
        let of_namespace = wanted.iter().filter(|key| key.namespace.as_deref() == namespace);
        of_namespace.collect::<Vec<_>>()
    });
    let wants: Vec<_> = of_namespaces.iter().map(Vec::len).collect();
    let of_cluster = wants[0].min(room);
    let places = [of_cluster].into_iter().chain(shares(&wants[1..], room - of_cluster));
    let reported = of_namespaces.into_iter().zip(places);
    reported.flat_map(|(keys, places)| keys.into_iter().take(places)).cloned().collect()
}

/// A new report of the only node. Returns the marked objects.
fn set_node(run: &mut Run, reported: &BTreeSet<Key>, has_more: bool) -> BTreeSet<Key> {
    let summary = |key: &Key| MirrorSummary { namespace: key.namespace.clone(), ..report(&key.name, 1, 0) };
    let mut status = MirrorNodeStatus {
        mirrors: reported.iter().map(summary).collect(),
        more_mirrors: has_more.then_some(1),
        last_report_time: Some(Time(run.at())),
        ..MirrorNodeStatus::default()
    };
    run.book.set_node("one", Some(&mut status), run.now, run.at());
    let marked = run.book.objects.iter().filter(|(_, entry)| entry.has_news);
    marked.map(|(key, _)| key.clone()).collect()
}

/// Sums up all objects, also those without a mark. Returns those with another status than before.
fn sum_up(run: &mut Run) -> BTreeSet<Key> {
    let (now, at) = (run.now, run.at());
    all().into_iter().filter(|key| run.book.sum(key.clone(), now, at).is_some()).collect()
}

/// The objects whose status says that a node may lack room for them.
fn unknown(run: &Run) -> BTreeSet<Key> {
    let reason = |key: &Key| &run.book.objects[key].status.as_ref().unwrap().conditions[2].reason;
    all().into_iter().filter(|key| reason(key) == "NotAllTold").collect()
}

/// It creates and deletes Mirrors around the bound, and the other objects of the cluster are not summed up again.
#[test]
fn a_namespace_without_room_is_nothing_to_the_others() {
    let mut run = run();
    let of_a = (0..OF_EACH).map(|number| of(Some("a"), number));
    let wanted: BTreeSet<_> = of_a.chain([of(None, 0), of(Some("b"), 0), of(Some("b"), 1)]).collect();
    let reported = with_room(&wanted, 9);
    let without_room = BTreeSet::from([of(Some("a"), 6), of(Some("a"), 7)]);
    assert_eq!(&wanted - &reported, without_room);
    assert_eq!(set_node(&mut run, &reported, true), wanted);
    assert_eq!((sum_up(&mut run), unknown(&run)), (wanted, without_room.clone()));
    assert_eq!(set_node(&mut run, &reported, false), without_room);
    assert_eq!((sum_up(&mut run), unknown(&run)), (without_room.clone(), BTreeSet::new()));
    assert_eq!(set_node(&mut run, &reported, true), without_room);
    assert_eq!((sum_up(&mut run), unknown(&run)), (without_room.clone(), without_room));
    assert_eq!(set_node(&mut run, &reported, true), BTreeSet::new());
}

proptest! {
    /// For any reports of a node one after the other: exactly the objects whose status changes are marked, and the
    /// status of each object without room says so.
    #[test]
    fn what_a_full_report_changes_is_marked_and_nothing_else(
        reports in vec((subsequence(all(), 0..=all().len()), 0..40_usize), 1..8),
    ) {
        let mut run = run();
        for (wanted, room) in reports {
            let wanted: BTreeSet<_> = wanted.into_iter().collect();
            let reported = with_room(&wanted, room);
            let marked = set_node(&mut run, &reported, reported.len() < wanted.len());
            prop_assert_eq!(sum_up(&mut run), marked);
            prop_assert!((&wanted - &reported).is_subset(&unknown(&run)));
        }
    }
}
