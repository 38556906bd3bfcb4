//! The Events on a Mirror or ClusterMirror: the changes from one status to the next.
//!
//! Pure. [`controller`](super) posts them when it has written the status. A restarted controller compares with the
//! status in the API server, so it posts nothing twice.

use mirror_api::{
    MirrorStatus,
    sum::{ACCEPTED, COVERED, ENDED, condition_of},
};

/// Whether it is a warning, the reason, and the note.
pub(super) type Said<'s> = (bool, &'s str, &'s str);

/// The Events that follow from a status that was written.
pub(super) fn said<'s>(before: Option<&MirrorStatus>, status: &'s MirrorStatus) -> Vec<Said<'s>> {
    // The condition, if it has just changed to this value.
    let turned = |type_, value| {
        let before =
            before.and_then(|before| condition_of(before, type_)).map(|before| before.status.as_str());
        condition_of(status, type_).filter(|now| now.status == value && before != Some(value))
    };
    let mut said = Vec::new();
    if let Some(refused) = turned(ACCEPTED, "False") {
        said.push((true, refused.reason.as_str(), refused.message.as_str()));
    }
    let covered = before.map_or(0, |before| before.pods.covered);
    if covered == 0 && status.pods.covered > 0 {
        said.push((false, "Started", "pods are mirrored"));
    }
    // A refused Mirror covers nothing, and its refusal has its own Event. A Mirror that ended by its limits is
    // complete. Numbers change too often for a series.
    let is_refused = condition_of(status, ACCEPTED).is_some_and(|accepted| accepted.status == "False");
    let has_ended = !status.uncovered.is_empty() && status.uncovered.iter().all(|of| of.reason == ENDED);
    if turned(COVERED, "False").is_some() && !is_refused && !has_ended {
        said.push((
            true,
            "NotCovered",
            "not all pods are covered; the status names the first of them, and why",
        ));
    }
    if turned(ENDED, "True").is_some() {
        said.push((false, "Ended", "a limit has been reached on every NIC"));
    }
    said
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "tests panic")]

    use mirror_api::{MirrorSummary, Pods, Refusal, Uncovered, sum};

    use super::*;

    fn status(
        before: Option<&MirrorStatus>,
        (selected, covered, ended): (i64, i64, i64),
        refused: bool,
    ) -> MirrorStatus {
        let refused =
            refused.then(|| Refusal { reason: "InvalidFilter".into(), message: "spec.filter".into() });
        let pods = Pods { selected, covered };
        let of = Uncovered { reason: ENDED.into(), ..Uncovered::default() };
        let uncovered = vec![of; usize::from(ended > 0)];
        let nics = selected;
        let report = MirrorSummary { pods, nics, ended, refused, uncovered, ..MirrorSummary::default() };
        let now = serde_json::from_str("\"2026-01-01T00:00:00Z\"").unwrap();
        sum::sum(&sum::Asked::default(), [("one", &report)], before, &now)
    }

    #[test]
    fn each_turn_is_told_once() {
        let words = |before: Option<&MirrorStatus>, status: &MirrorStatus| {
            said(before, status).iter().map(|said| said.1.to_owned()).collect::<Vec<_>>()
        };
        let nothing = status(None, (0, 0, 0), false);
        assert_eq!(words(None, &nothing), Vec::<String>::new());
        let refused = status(Some(&nothing), (2, 0, 0), true);
        assert_eq!(words(Some(&nothing), &refused), ["InvalidFilter"]);
        assert_eq!(words(Some(&refused), &refused), Vec::<String>::new());
        let some = status(Some(&refused), (2, 1, 0), false);
        assert_eq!(words(Some(&refused), &some), ["Started"], "it was not covered before either");
        let all = status(Some(&some), (2, 2, 0), false);
        assert_eq!(words(Some(&some), &all), Vec::<String>::new());
        let less = status(Some(&all), (3, 2, 0), false);
        assert_eq!(words(Some(&all), &less), ["NotCovered"]);
        // Its limits end it on some nodes.
        let some = status(Some(&all), (3, 2, 1), false);
        assert_eq!(words(Some(&all), &some), Vec::<String>::new());
        let ended = status(Some(&some), (3, 0, 3), false);
        assert_eq!(words(Some(&some), &ended), ["Ended"]);
        assert_eq!(condition_of(&ended, COVERED).unwrap().status, "False", "nothing is copied any more");
        assert_eq!(words(None, &ended), ["Ended"], "nobody was there to tell it");
    }
}
