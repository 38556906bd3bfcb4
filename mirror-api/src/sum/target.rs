//! [`sum`]: the status of a MirrorTarget, from what the nodes report. Pure, a part of [`sum`](super).

use std::collections::BTreeSet;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::{
    ACCEPTED, Asked, ByNode, READY, REPORT_STALE, Value, by_age, condition, is_renewed, most_told, name,
    no_nodes, not_all_told, not_refused, number, observed, of_type, report_stale, text, word,
};
use crate::{MirrorTargetStatus, NotReady, Refusal, TargetNodes, TargetSummary};

/// Most nodes in [`MirrorTargetStatus::not_ready`].
pub const MOST_NOT_READY: usize = 20;

/// The reason of a node that does not have the target.
pub const TARGET_REFUSED: &str = "TargetRefused";
/// The reason of a node that has the target, but cannot copy to it now.
pub const TARGET_DOWN: &str = "TargetDown";

/// The status of a MirrorTarget. The arguments are those of [`sum`](super::sum()).
pub fn sum<'r>(
    asked: &Asked,
    reports: impl IntoIterator<Item = (&'r str, &'r TargetSummary)>,
    before: Option<&MirrorTargetStatus>,
    now: &Time,
) -> MirrorTargetStatus {
    let (reports, stale) = by_age(asked, reports);
    let generations = reports.values().map(|report| report.observed_generation);
    let observed_generation = observed(generations, asked.generation);
    let current = reports.iter().filter_map(|(node, report)| not_ready(node, report));
    let mut not_ready: Vec<_> = current.chain(stale.keys().map(|node| with_stale_report(node))).collect();
    not_ready.sort();
    let (desired, missing) = (number(reports.len() + stale.len()), number(not_ready.len()));
    let nodes = TargetNodes { ready: desired - missing, desired };
    let (type_, destination) = asked.destination.clone().unzip();
    let (was, before) = (before, before.map_or(&[][..], |before| &before.conditions));
    let ready = ready(asked, nodes, &not_ready, &stale);
    let conditions = [(READY, ready), (ACCEPTED, accepted(asked, &reports, &stale))];
    let more = number(not_ready.len().saturating_sub(MOST_NOT_READY));
    let mut status = MirrorTargetStatus {
        observed_generation,
        conditions: conditions
            .into_iter()
            .map(|(type_, value)| condition(type_, value, observed_generation, before, now))
            .collect(),
        type_,
        destination,
        nodes,
        last_report_time: was.and_then(|was| was.last_report_time.clone()),
        ready_nodes: Some(format!("{}/{}", nodes.ready, nodes.desired)),
        not_ready: not_ready.into_iter().take(MOST_NOT_READY).collect(),
        more_not_ready: (more > 0).then_some(more),
    };
    if was != Some(&status) || is_renewed(status.last_report_time.as_ref(), asked.reported.as_ref()) {
        status.last_report_time.clone_from(&asked.reported);
    }
    status
}

/// The condition of this type in a status.
pub fn condition_of<'s>(status: &'s MirrorTargetStatus, type_: &str) -> Option<&'s Condition> {
    of_type(&status.conditions, type_)
}

fn not_ready(node: &str, report: &TargetSummary) -> Option<NotReady> {
    let (reason, message) = match report {
        TargetSummary { refused: Some(why), .. } => (TARGET_REFUSED, why),
        TargetSummary { down: Some(why), .. } => (TARGET_DOWN, why),
        _ => return None,
    };
    Some(NotReady { node: name(node), reason: reason.to_owned(), message: text(message) })
}

fn with_stale_report(node: &str) -> NotReady {
    let message = "its last report is too old or from the future".to_owned();
    NotReady { node: name(node), reason: REPORT_STALE.to_owned(), message }
}

fn accepted(asked: &Asked, reports: &ByNode<'_, TargetSummary>, stale: &ByNode<'_, TargetSummary>) -> Value {
    if let Some(Refusal { reason, message }) = &asked.refused {
        return ("False", word(reason), text(message));
    }
    let refusals = reports
        .iter()
        .filter_map(|(node, report)| Some((*node, (TARGET_REFUSED, report.refused.as_deref()?))));
    match most_told(refusals, reports.len()) {
        Some((reason, message)) => ("False", reason.to_owned(), message),
        None => not_refused(reports, stale),
    }
}

fn ready(
    asked: &Asked,
    nodes: TargetNodes,
    not_ready: &[NotReady],
    stale: &ByNode<'_, TargetSummary>,
) -> Value {
    let TargetNodes { ready, desired } = nodes;
    let is = |status, reason: &str, message| (status, reason.to_owned(), message);
    if ready + number(stale.len()) < desired {
        let words: BTreeSet<_> = not_ready.iter().map(|node| node.reason.as_str()).collect();
        let words: Vec<_> = words.into_iter().collect();
        return is(
            "False",
            "NotReady",
            format!("{ready} of {desired} nodes can copy to it: {}", words.join(", ")),
        );
    }
    if !stale.is_empty() {
        return report_stale(stale);
    }
    if asked.left_out > 0 {
        return not_all_told(asked.left_out, "MirrorTargets");
    }
    if desired == 0 {
        return no_nodes();
    }
    is("True", "AllReady", format!("{ready} of {desired} nodes can copy to it"))
}

#[cfg(test)]
mod tests {
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

    fn report(refused: Option<&str>, down: Option<&str>) -> TargetSummary {
        let [refused, down] = [refused, down].map(|why| why.map(str::to_owned));
        TargetSummary { observed_generation: 3, refused, down, ..TargetSummary::default() }
    }

    fn of(reports: &[(&str, TargetSummary)]) -> MirrorTargetStatus {
        sum(&asked(), reports.iter().map(|(node, report)| (*node, report)), None, &at(7))
    }

    fn value<'s>(status: &'s MirrorTargetStatus, type_: &str) -> (&'s str, &'s str, &'s str) {
        let Condition { status, reason, message, .. } = condition_of(status, type_).unwrap();
        (status, reason, message)
    }

    #[test]
    fn nodes_that_cannot_copy_are_named_with_the_reason() {
        let (good, down) = (report(None, None), report(None, Some("no pod a/b runs here")));
        let status = of(&[("one", good.clone()), ("two", good.clone())]);
        assert_eq!((status.nodes, status.not_ready.len()), (TargetNodes { ready: 2, desired: 2 }, 0));
        assert_eq!(value(&status, ACCEPTED), ("True", "Accepted", "no node refuses it"));
        assert_eq!(value(&status, READY), ("True", "AllReady", "2 of 2 nodes can copy to it"));

        let refused = report(Some("ids0 is taken"), None);
        let status = of(&[("one", good), ("two", down), ("six", refused)]);
        assert_eq!(status.nodes, TargetNodes { ready: 1, desired: 3 });
        let told = ("False", TARGET_REFUSED, "ids0 is taken (on 1 of 3 nodes, for example six)");
        assert_eq!(value(&status, ACCEPTED), told);
        let told = ("False", "NotReady", "1 of 3 nodes can copy to it: TargetDown, TargetRefused");
        assert_eq!(value(&status, READY), told);
        let nodes: Vec<_> = status.not_ready.iter().map(|of| format!("{} {}", of.node, of.message)).collect();
        assert_eq!(nodes, ["six ids0 is taken", "two no pod a/b runs here"]);
    }

    #[test]
    fn a_node_with_a_stale_report_is_not_ready() {
        let (good, down) = (report(None, None), report(None, Some("no pod a/b runs here")));
        let of = |stale: &[&str], one| {
            let asked = Asked { stale: stale.iter().map(|node| (*node).to_owned()).collect(), ..asked() };
            sum(&asked, [("one", one), ("two", &good)], None, &at(7))
        };
        let status = of(&["two"], &good);
        assert_eq!(status.nodes, TargetNodes { ready: 1, desired: 2 });
        assert_eq!(value(&status, ACCEPTED).0, "True");
        let told = ("Unknown", REPORT_STALE, "1 node has no current report: two");
        assert_eq!(value(&status, READY), told);
        let [two] = &status.not_ready[..] else { unreachable!("{status:?}") };
        assert_eq!((two.node.as_str(), two.reason.as_str()), ("two", REPORT_STALE));
        let told = ("False", "NotReady", "0 of 2 nodes can copy to it: ReportStale, TargetDown");
        assert_eq!(value(&of(&["two"], &down), READY), told);
        let status = of(&["one", "two"], &down);
        let told = ("Unknown", REPORT_STALE, "2 nodes have no current report: one, two");
        assert_eq!([READY, ACCEPTED].map(|type_| value(&status, type_)), [told; 2]);
    }

    #[test]
    fn without_a_report_nothing_is_claimed() {
        let status = of(&[]);
        assert_eq!((status.nodes, status.observed_generation), (TargetNodes::default(), 3));
        assert_eq!(value(&status, ACCEPTED), ("Unknown", "NoNodes", "no node reports on it"));
        assert_eq!(value(&status, READY).1, "NoNodes");
        let asked = Asked { left_out: 2, ..asked() };
        let good = report(None, None);
        let status = sum(&asked, [("one", &good)], None, &at(7));
        let told = ("Unknown", "NotAllTold", "2 nodes have more MirrorTargets than a MirrorNode can hold");
        assert_eq!(value(&status, READY), told);
    }

    #[test]
    fn what_the_controller_sees_itself_comes_first() {
        let refused = Refusal { reason: "InvalidSpec".into(), message: "spec.vxlan.remote".into() };
        let asked = Asked { refused: Some(refused), ..asked() };
        let status = sum(&asked, [], None, &at(7));
        assert_eq!(value(&status, ACCEPTED), ("False", "InvalidSpec", "spec.vxlan.remote"));
    }

    prop_compose! {
        fn any_report()(
            observed_generation in -1..5_i64,
            refused in option::of("\\PC{0,9}|\n[a-z]{600}"),
            down in option::of("\\PC{0,9}"),
        ) -> TargetSummary {
            TargetSummary { observed_generation, refused, down, ..TargetSummary::default() }
        }
    }

    proptest! {
        /// The order of the nodes does not matter, the same reports change nothing, and the numbers fit together.
        #[test]
        fn a_status_is_bounded_and_fits_together(
            reports in vec((any_report(), prop::bool::weighted(0.2)), 0..50),
            turn in 0..50_usize,
            left_out in 0..2_usize,
        ) {
            let (reports, is_stale): (Vec<_>, Vec<_>) = reports.into_iter().unzip();
            let mut nodes: Vec<_> = reports.iter().enumerate().map(|(at, report)| (format!("n{at:02}"), report)).collect();
            let stale = nodes.iter().zip(&is_stale).filter(|(_, is_stale)| **is_stale);
            let stale: BTreeSet<_> = stale.map(|((node, _), _)| node.clone()).collect();
            let old = number(stale.len());
            let asked = Asked { left_out, stale, ..asked() };
            let of = |nodes: &[(String, &TargetSummary)], before: Option<&MirrorTargetStatus>, second| {
                sum(&asked, nodes.iter().map(|(node, report)| (node.as_str(), *report)), before, &at(second))
            };
            let status = of(&nodes, None, 7);
            let turn = turn.min(nodes.len());
            nodes.rotate_left(turn);
            prop_assert_eq!(&of(&nodes, Some(&status), 99), &status);

            let TargetNodes { ready, desired: of } = status.nodes;
            let current = reports.iter().zip(&is_stale).filter(|(_, is_stale)| !**is_stale);
            let current: Vec<_> = current.map(|(report, _)| report).collect();
            let is_ready = |report: &&&TargetSummary| report.refused.is_none() && report.down.is_none();
            prop_assert_eq!(of, number(reports.len()));
            prop_assert_eq!(ready, number(current.iter().filter(is_ready).count()));
            prop_assert_eq!(ready + number(status.not_ready.len()) + status.more_not_ready.unwrap_or(0), of);
            prop_assert!(status.not_ready.len() <= MOST_NOT_READY && status.not_ready.is_sorted());
            prop_assert!(status.more_not_ready.is_none_or(|more| more > 0));
            prop_assert!((0..=3).contains(&status.observed_generation));
            let is_refused = current.iter().any(|report| report.refused.is_some());
            prop_assert_eq!(value(&status, ACCEPTED).0 == "False", is_refused);
            prop_assert_eq!(value(&status, READY).0 == "False", ready + old < of);
            prop_assert_eq!(value(&status, READY).0 == "True", ready == of && of > 0 && left_out == 0);
            for NotReady { message, .. } in &status.not_ready {
                prop_assert!(message.len() <= 512 && !message.contains(char::is_control));
            }
        }
    }
}
