//! Tests: the sums of any reports, and what each condition says.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use k8s_openapi::jiff::Timestamp;
use proptest::{collection::vec, option, prelude::*};

use super::*;

fn at(second: i64) -> Time {
    Time(Timestamp::from_second(second).unwrap())
}

fn asked() -> Asked {
    Asked { generation: 3, ..Asked::default() }
}

fn report(selected: i64, covered: i64) -> MirrorSummary {
    let pods = Pods { selected, covered };
    let packets = Packets { copied: 100 * covered, lost: covered };
    MirrorSummary { observed_generation: 3, pods, packets, nics: covered, ..MirrorSummary::default() }
}

fn missing(pod: &str, reason: &str) -> Uncovered {
    let message = format!("{reason} of {pod}");
    let (pod, reason) = (pod.into(), reason.into());
    Uncovered { namespace: "shop".into(), pod, reason, message, ..Uncovered::default() }
}

fn value<'s>(status: &'s MirrorStatus, type_: &str) -> (&'s str, &'s str, &'s str) {
    let Condition { status, reason, message, .. } = condition_of(status, type_).unwrap();
    (status, reason, message)
}

fn of(reports: &[(&str, MirrorSummary)]) -> MirrorStatus {
    sum(&asked(), reports.iter().map(|(node, report)| (*node, report)), None, &at(7))
}

#[test]
fn two_nodes_are_summed_up() {
    let short = MirrorSummary { uncovered: vec![missing("web-2", "NoRoom")], ..report(3, 2) };
    let status = of(&[("one", short), ("two", report(2, 2))]);
    assert_eq!(status.pods, Pods { selected: 5, covered: 4 });
    assert_eq!(status.packets, Packets { copied: 400, lost: 4 });
    assert_eq!((status.reporting_nodes, status.observed_generation, status.more_uncovered), (2, 3, None));
    let [web] = &status.uncovered[..] else { unreachable!("{status:?}") };
    assert_eq!((web.node.as_deref(), web.pod.as_str()), (Some("one"), "web-2"));
    assert_eq!(value(&status, ACCEPTED), ("True", "Accepted", "no node refuses it"));
    assert_eq!(value(&status, COVERED), ("False", "NotCovered", "1 of 5 pods are not covered: NoRoom"));
    assert_eq!(value(&status, ENDED), ("False", "NotEnded", "no limit has been reached"));
    assert_eq!(value(&status, READY), value(&status, COVERED));
    let status = of(&[("two", report(2, 2))]);
    assert_eq!(value(&status, COVERED), ("True", "AllCovered", "2 of 2 pods are covered"));
}

#[test]
fn without_a_report_nothing_is_claimed() {
    let status = of(&[]);
    assert_eq!((status.reporting_nodes, status.pods, status.observed_generation), (0, Pods::default(), 3));
    assert_eq!(value(&status, ACCEPTED), ("Unknown", "NoNodes", "no node reports on it"));
    assert_eq!(value(&status, COVERED), ("Unknown", "NoPods", "no node reports a selected pod"));
    assert_eq!(value(&status, ENDED), ("False", "NotBegun", "no NIC is mirrored"));
    assert_eq!(value(&status, READY), value(&status, ACCEPTED));
    // A node that has more to report than it can may have left it out.
    let reports = [("one", report(2, 2))];
    let asked = Asked { left_out: 1, ..asked() };
    let status = sum(&asked, reports.iter().map(|(node, report)| (*node, report)), None, &at(7));
    let told = ("Unknown", "NotAllTold", "1 node has more Mirrors than a MirrorNode can hold");
    assert_eq!(value(&status, COVERED), told);
}

/// Who reads a status sees whether anybody still writes it.
#[test]
fn a_status_has_the_time_of_its_last_report_to_within_five_minutes() {
    let of = |copied, reported: Option<i64>, before: Option<&MirrorStatus>| {
        let asked = Asked { reported: reported.map(at), ..asked() };
        let packets = Packets { copied, lost: 0 };
        sum(&asked, [("one", &MirrorSummary { packets, ..report(1, 1) })], before, &at(7))
    };
    let time = |status: &MirrorStatus| status.last_report_time.as_ref().map(|time| time.0.as_second());
    let first = of(1, Some(1000), None);
    assert_eq!(time(&first), Some(1000));
    // While nothing changes, the status changes once in five minutes.
    assert_eq!(of(1, Some(1299), Some(&first)), first);
    assert_eq!(time(&of(1, Some(1300), Some(&first))), Some(1300));
    // What is written for another reason has the present time.
    assert_eq!(time(&of(2, Some(1010), Some(&first))), Some(1010));
    assert_eq!(time(&of(1, None, Some(&first))), None);
}

/// Its agent is dead. Its pods are there, and nobody knows what is copied of them.
#[test]
fn a_node_with_a_stale_report_is_named_and_covers_nothing() {
    let of = |stale: &[&str], reports: &[(&str, MirrorSummary)]| {
        let asked = Asked { stale: stale.iter().map(|node| (*node).to_owned()).collect(), ..asked() };
        sum(&asked, reports.iter().map(|(node, report)| (*node, report)), None, &at(7))
    };
    let reports = [("one", report(2, 2)), ("two", report(3, 3))];
    let status = of(&["two"], &reports);
    assert_eq!(status.pods, Pods { selected: 5, covered: 2 });
    assert_eq!((status.reporting_nodes, status.packets), (1, Packets { copied: 200, lost: 2 }));
    let told = ("Unknown", REPORT_STALE, "1 node has no current report: two");
    assert_eq!([READY, COVERED].map(|type_| value(&status, type_)), [told; 2]);
    assert_eq!(value(&status, ACCEPTED).0, "True");
    let status = of(&["one", "two"], &reports);
    let told = ("Unknown", REPORT_STALE, "2 nodes have no current report: one, two");
    assert_eq!([READY, ACCEPTED, COVERED].map(|type_| value(&status, type_)), [told; 3]);
    let nodes: Vec<_> = (0..7).map(|node| format!("node-{node}")).collect();
    let nodes: Vec<_> = nodes.iter().map(String::as_str).collect();
    let status = of(&nodes, &nodes.iter().map(|node| (*node, report(1, 1))).collect::<Vec<_>>());
    let told = "7 nodes have no current report: node-0, node-1, node-2, node-3, node-4 and 2 more";
    assert_eq!(value(&status, READY).2, told);

    // What other nodes report of their own pods comes first.
    let short = MirrorSummary { uncovered: vec![missing("web-2", "NoRoom")], ..report(3, 2) };
    let status = of(&["two"], &[("one", short), ("two", report(3, 3))]);
    let told = ("False", "NotCovered", "4 of 6 pods are not covered: NoRoom, ReportStale");
    assert_eq!(value(&status, COVERED), told);
    let ended = MirrorSummary { ended: 2, ..report(2, 2) };
    let status = of(&["two"], &[("one", ended), ("two", report(3, 3))]);
    assert_eq!(value(&status, ENDED).2, "a limit has been reached on 2 of 5 NICs");
}

#[test]
fn a_refusal_is_told_with_the_nodes_that_refuse() {
    let refused = |reason: &str, message: &str| MirrorSummary {
        refused: Some(Refusal { reason: reason.into(), message: message.into() }),
        ..report(1, 0)
    };
    let (target, filter) =
        (refused("NoSuchTarget", "no target ids"), refused("InvalidFilter", "spec.filter: no"));
    let status = of(&[("one", filter.clone()), ("two", filter.clone())]);
    assert_eq!(value(&status, ACCEPTED), ("False", "InvalidFilter", "spec.filter: no"));
    assert_eq!(value(&status, READY), value(&status, ACCEPTED));
    assert_eq!(value(&status, COVERED).2, "2 of 2 pods are not covered: InvalidFilter");
    let status = of(&[("one", report(1, 1)), ("two", target)]);
    let told = ("False", "NoSuchTarget", "no target ids (on 1 of 2 nodes, for example two)");
    assert_eq!(value(&status, ACCEPTED), told);
    // What the controller sees itself comes first.
    let reason = Refusal { reason: "InvalidSpec".into(), message: "spec.rate".into() };
    let asked = Asked { refused: Some(reason), ..asked() };
    let status = sum(&asked, [("one", &filter)], None, &at(7));
    assert_eq!(value(&status, ACCEPTED), ("False", "InvalidSpec", "spec.rate"));
}

#[test]
fn it_has_ended_when_its_limits_have_ended_it_everywhere() {
    let with = |ended, expires: Option<i64>| MirrorSummary {
        ended,
        expiration_time: expires.map(at),
        ..report(2, 2)
    };
    let status =
        |a, b| of(&[("one", with(a, Some(20))), ("two", with(b, Some(30))), ("three", with(2, None))]);
    let (none, some, all) = (of(&[("one", with(0, None))]), status(1, 2), status(2, 2));
    assert_eq!((&none.expiration_time, &some.expiration_time), (&None, &Some(at(30))));
    assert_eq!(value(&some, ENDED).1, "PartlyEnded");
    assert_eq!(value(&some, ENDED).2, "a limit has been reached on 5 of 6 NICs");
    assert_eq!(value(&some, READY).1, "AllCovered");
    assert_eq!(value(&all, ENDED).0, "True");
    assert_eq!(value(&all, READY), ("False", "LimitReached", "a limit has been reached on every NIC"));
}

/// Its agent is dead. The programs on the node end the mirror without it.
#[test]
fn a_time_limit_ends_a_mirror_on_a_node_with_a_stale_report() {
    let with = |ended| MirrorSummary { ended, expiration_time: Some(at(30)), ..report(2, 2) };
    let reports = [("one", with(2)), ("two", with(0))];
    let ended = |stale: &[&str], second| {
        let asked = Asked { stale: stale.iter().map(|node| (*node).to_owned()).collect(), ..asked() };
        let reports = reports.iter().map(|(node, report)| (*node, report));
        value(&sum(&asked, reports, None, &at(second)), ENDED).2.to_owned()
    };
    let [partly, all] = ["on 2 of 4 NICs", "on every NIC"].map(|on| format!("a limit has been reached {on}"));
    assert_eq!([29, 30].map(|second| ended(&["two"], second)), [partly.clone(), all]);
    assert_eq!(ended(&[], 30), partly, "a current report says it itself");
}

#[test]
fn a_condition_keeps_its_time_as_long_as_it_keeps_its_value() {
    let first = of(&[("one", report(2, 2))]);
    let then = |reports: &[(&str, MirrorSummary)], before, second| {
        let reports = reports.iter().map(|(node, report)| (*node, report));
        sum(&asked(), reports, Some(before), &at(second))
    };
    let time = |status: &MirrorStatus, type_| {
        condition_of(status, type_).unwrap().last_transition_time.0.as_second()
    };
    let more = then(&[("one", report(3, 3))], &first, 20);
    assert_eq!((time(&more, ACCEPTED), time(&more, COVERED)), (7, 7));
    let less = then(&[("one", report(3, 2))], &more, 30);
    assert_eq!((time(&less, ACCEPTED), time(&less, COVERED)), (7, 30));
    assert_eq!(time(&then(&[("one", report(3, 3))], &less, 40), COVERED), 40);
}

#[test]
fn a_node_cannot_make_the_sums_wrong_but_by_its_own_share() {
    let odd = MirrorSummary {
        observed_generation: 1 << 40,
        pods: Pods { selected: -5, covered: 1000 },
        packets: Packets { copied: i64::MAX, lost: -7 },
        nics: -1,
        ended: 9,
        more_uncovered: Some(-3),
        uncovered: vec![Uncovered {
            message: "a\nb\u{1b}[31m".repeat(1000),
            reason: "no word\n".into(),
            ..missing("web", "")
        }],
        ..MirrorSummary::default()
    };
    let status = of(&[("odd", odd.clone()), ("odder", odd), ("one", report(2, 2))]);
    assert_eq!(status.pods, Pods { selected: 2, covered: 2 });
    assert_eq!(status.packets, Packets { copied: i64::MAX, lost: 2 });
    assert_eq!((status.observed_generation, status.more_uncovered), (3, None));
    assert_eq!(value(&status, ENDED).1, "NotEnded");
    for of in &status.uncovered {
        assert!(of.message.len() <= MOST_BYTES && !of.message.contains(char::is_control), "{of:?}");
        assert_eq!(of.reason, "Other");
    }
}

#[test]
fn a_report_counts_for_a_while_only() {
    let now = at(100_000).0;
    let counts = |age: i64| is_current(Some(at(100_000 - age).0), now);
    let expected = [(0, true), (900, true), (901, false), (16_200, false), (-300, true), (-301, false)];
    assert_eq!(expected.map(|(age, _)| (age, counts(age))), expected);
    assert!(!is_current(None, now), "it may be of any age");
}

prop_compose! {
    fn any_report()(
        generation in 0..5_i64,
        selected in 0..9_i64,
        covered in 0..9_i64,
        counts in prop::array::uniform4(0..1_000_000_i64),
        pods in vec(0..40_u8, 0..25),
        refusal in option::of(0..3_u8),
        more in option::of(0..5_i64),
    ) -> MirrorSummary {
        let [copied, lost, nics, ended] = counts;
        MirrorSummary {
            observed_generation: generation,
            pods: Pods { selected, covered },
            packets: Packets { copied, lost },
            nics,
            ended,
            refused: refusal.map(|of| Refusal { reason: format!("Refusal{of}"), message: "é".repeat(500) }),
            uncovered: pods.iter().map(|pod| missing(&format!("{}{pod}", "p".repeat(250)), "No")).collect(),
            more_uncovered: more,
            ..MirrorSummary::default()
        }
    }
}

fn nodes(reports: &[MirrorSummary]) -> Vec<(String, &MirrorSummary)> {
    reports.iter().enumerate().map(|(number, report)| (format!("node-{number}"), report)).collect()
}

fn of_nodes(nodes: &[(String, &MirrorSummary)]) -> MirrorStatus {
    sum(&asked(), nodes.iter().map(|(node, report)| (node.as_str(), *report)), None, &at(7))
}

proptest! {
    #[test]
    fn the_order_of_the_nodes_does_not_matter(reports in vec(any_report(), 0..12), turn in 0..12_usize) {
        let mut nodes = nodes(&reports);
        let status = of_nodes(&nodes);
        let turn = turn.min(nodes.len());
        nodes.rotate_left(turn);
        prop_assert_eq!(&of_nodes(&nodes), &status);
        nodes.reverse();
        prop_assert_eq!(&of_nodes(&nodes), &status);
    }

    /// Also one whose counters have begun again: the sum is that of the reports of now.
    #[test]
    fn a_node_that_goes_away_takes_its_share_away(reports in vec(any_report(), 1..12), one in 0..12_usize) {
        let mut nodes = nodes(&reports);
        let all = of_nodes(&nodes);
        let (_, gone) = nodes.remove(one % reports.len());
        let rest = of_nodes(&nodes);
        prop_assert_eq!(all.packets.copied - rest.packets.copied, gone.packets.copied);
        prop_assert_eq!(all.packets.lost - rest.packets.lost, gone.packets.lost);
        prop_assert_eq!(all.pods.selected - rest.pods.selected, gone.pods.selected);
        prop_assert_eq!(all.pods.covered - rest.pods.covered, gone.pods.covered.min(gone.pods.selected));
        prop_assert_eq!(all.reporting_nodes - rest.reporting_nodes, 1);
    }

    /// Whatever the other nodes report. The pods of its node still count.
    #[test]
    fn a_stale_report_never_makes_a_mirror_ready(
        reports in vec((prop_oneof![any_report(), (1..9_i64).prop_map(|pods| report(pods, pods))], any::<bool>()), 1..12),
        turn in 0..12_usize,
    ) {
        let (reports, is_stale): (Vec<_>, Vec<_>) = reports.into_iter().unzip();
        let mut nodes = nodes(&reports);
        let all = of_nodes(&nodes);
        let stale = nodes.iter().zip(is_stale).filter(|(_, is_stale)| *is_stale);
        let stale: BTreeSet<_> = stale.map(|((node, _), _)| node.clone()).collect();
        let asked = Asked { stale: stale.clone(), ..asked() };
        let of = |nodes: &[(String, &MirrorSummary)]| {
            sum(&asked, nodes.iter().map(|(node, report)| (node.as_str(), *report)), None, &at(7))
        };
        let status = of(&nodes);
        let turn = turn.min(nodes.len());
        nodes.rotate_left(turn);
        prop_assert_eq!(&of(&nodes), &status);
        prop_assert!(stale.is_empty() || value(&status, READY).0 != "True");
        prop_assert_eq!(status.pods.selected, all.pods.selected);
        prop_assert!(status.pods.covered <= all.pods.covered && all.pods.covered <= all.pods.selected);
        prop_assert_eq!(status.reporting_nodes + number(stale.len()), number(reports.len()));
    }

    /// The same reports give the same status, with the same times.
    #[test]
    fn a_sum_of_the_same_reports_changes_nothing(reports in vec(any_report(), 0..6)) {
        let nodes = nodes(&reports);
        let status = of_nodes(&nodes);
        let reports = nodes.iter().map(|(node, report)| (node.as_str(), *report));
        prop_assert_eq!(&sum(&asked(), reports, Some(&status), &at(9999)), &status);
    }

    #[test]
    fn a_status_has_a_bounded_size_and_is_consistent(reports in vec(any_report(), 0..8)) {
        let status = of_nodes(&nodes(&reports));
        prop_assert!(status.uncovered.len() <= MOST_UNCOVERED);
        prop_assert!(status.uncovered.is_sorted());
        prop_assert!(status.pods.covered <= status.pods.selected);
        prop_assert!(status.observed_generation <= 3);
        prop_assert!(status.more_uncovered.is_none_or(|more| more > 0));
        let bytes = serde_json::to_vec(&status).unwrap().len();
        prop_assert!(bytes < 40 << 10, "{}", bytes);
    }
}
