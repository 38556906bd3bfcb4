//! A mirror at a NIC as text: its origin, which packets it copies, how many, where to, and its counters.
//!
//! Pure, a part of [`explain`](super).

use std::collections::BTreeMap;

use mirror_common::verdict::{Direction, Misfit, Verdict};

use super::{Subject, Text, coverage, is_attached, target, verb, verdicts};
use crate::{
    annotations::{MIRROR, OVN_MIRROR},
    model::{Directions, Name, Origin, Place},
    settings::Setting,
    status::{CounterStatus, NodeStatus, SessionStatus, TapStatus},
};

impl Subject<'_> {
    /// Writes about one mirror at one NIC.
    pub(super) fn mirror(&self, tap: &TapStatus, session: &SessionStatus, text: &mut Text) {
        text.line(1, &format!("Mirror {}", session.mirror));
        text.line(2, &origin(session));
        text.line(2, &directions(session));
        for line in settings(session) {
            text.line(2, &line);
        }
        target::write(self.status, &session.target, 2, text);
        if let Some(key) = session.tunnel_key {
            text.line(2, &format!("The tunnel key of its copies is {key}."));
        }
        counters(self.status, tap, session, text);
    }
}

/// The origin of the mirror, as a sentence.
fn origin(session: &SessionStatus) -> String {
    let SessionStatus { mirror, origin, .. } = session;
    let key = if mirror == Name::DEFAULT { MIRROR.to_owned() } else { format!("{MIRROR}.{mirror}") };
    match Origin::ALL.into_iter().find(|of| of.name() == origin) {
        Some(Origin::Policy) => "Requested by --enable-mirror of the agent.".to_owned(),
        Some(Origin::Interface) => "Requested by the command line of the agent.".to_owned(),
        Some(Origin::Annotation(Place::Namespace)) => {
            format!("Requested by the annotation {key} of the namespace.")
        }
        Some(Origin::Annotation(Place::Pod)) if mirror == Name::DEFAULT => {
            format!(
                "Requested by the annotation {key} (or {OVN_MIRROR}, with --kube-ovn-annotations) of the pod."
            )
        }
        Some(Origin::Annotation(Place::Pod)) => format!("Requested by the annotation {key} of the pod."),
        Some(Origin::Capture) => {
            "Requested by a command on the node: `mirror-agent tail` or `mirror-agent capture`.".to_owned()
        }
        Some(Origin::Reader) => "Requested by a reader of the packets API.".to_owned(),
        Some(Origin::Mirror) => format!("Requested by the Mirror {} of the namespace.", resource(mirror)),
        Some(Origin::ClusterMirror) => format!("Requested by the ClusterMirror {}.", resource(mirror)),
        Some(Origin::Enforced) => format!(
            "Requested by the ClusterMirror {}. It is enforced, so annotations and Mirrors cannot restrict it.",
            resource(mirror)
        ),
        None => format!("Requested by: {origin}."),
    }
}

/// The name of the resource that a mirror comes from.
fn resource(mirror: &str) -> &str {
    mirror.split_once('/').map_or(mirror, |(_, name)| name)
}

fn directions(session: &SessionStatus) -> String {
    let (ingress, egress) = (verb(Direction::Ingress), verb(Direction::Egress));
    match Directions::from_name(&session.direction) {
        Some(Directions::Both) => format!("It copies both directions: what {ingress}, and what {egress}."),
        Some(Directions::Ingress) => format!("It copies what {ingress} (ingress)."),
        Some(Directions::Egress) => format!("It copies what {egress} (egress)."),
        None => format!("It copies this direction: {}.", session.direction),
    }
}

/// The settings with what is left of the budgets, and which budget has ended the mirror.
fn settings(session: &SessionStatus) -> Vec<String> {
    let SessionStatus { ended, left, .. } = session;
    let left = |setting: &Setting| match setting.key {
        "duration" => left.duration.map(|time| format!("{} s", (time * 10.0).round() / 10.0)),
        "packets" => left.packets.map(|count| count.to_string()),
        "bytes" => left.bytes.map(|count| count.to_string()),
        _ => None,
    };
    let line = |(setting, value): (&'static Setting, &str)| {
        let left = left(setting).map(|left| format!("; {left} are left")).unwrap_or_default();
        format!("{}{left}.", setting.sentence(value))
    };
    let mut lines: Vec<_> = session.settings().map(line).collect();
    if lines.is_empty() {
        lines.push("It has no filter or limit: it copies all these packets completely.".to_owned());
    }
    lines.extend(ended.as_ref().map(|budget| {
        format!(
            "It has ended, because its budget of {budget} is used up: nothing is copied. All its budgets restart \
             when its settings change."
        )
    }));
    lines
}

/// Writes the counters of the mirror, by result.
fn counters(status: &NodeStatus, tap: &TapStatus, session: &SessionStatus, text: &mut Text) {
    let seen = |direction: Direction| {
        let counters = session.counters.iter().filter(|counter| counter.direction == direction.name());
        counters.fold(0_u64, |sum, counter| sum.saturating_add(counter.packets))
    };
    if session.counters.is_empty() {
        return text.line(2, "The mirror has seen no packet yet.");
    }
    let (ingress, egress) = (seen(Direction::Ingress), seen(Direction::Egress));
    let line =
        format!("The mirror has seen {ingress} packets that reach the pod and {egress} that leave it:");
    text.line(2, &line);
    let order = |name: &str| Verdict::ALL.into_iter().position(|verdict| verdict.name() == name);
    let mut results = BTreeMap::<_, Vec<String>>::new();
    for CounterStatus { direction, result, packets, bytes } in &session.counters {
        // Results that this version does not know come last.
        let key = (order(result).unwrap_or(usize::MAX), result);
        results.entry(key).or_default().push(format!("{direction} {packets} packets ({bytes} bytes)"));
    }
    for ((_, result), counts) in results {
        text.line(3, &format!("{result}: {}", counts.join(", ")));
        text.line(4, verdicts::words(result));
    }
    for (kind, (packets, bytes)) in Misfit::ALL.map(|kind| (kind, session.misfit(kind))) {
        if packets > 0 {
            text.line(3, &format!("{}: {packets} of these copies, by {bytes} bytes", kind.name()));
            text.line(4, verdicts::of_misfit(kind));
        }
    }
    // If the NIC's counters were read, the coverage shows more.
    let is_silent = |direction: &Direction| seen(*direction) == 0 && is_attached(tap, *direction);
    let has_readings = coverage::of(status, tap).is_some();
    for direction in Direction::ALL.into_iter().filter(|it| is_silent(it) && !has_readings) {
        let line = format!(
            "It has seen no packet that {}. If there are such packets, they do not pass this tap: docs/support.md \
             says which networks are covered.",
            verb(direction)
        );
        text.line(2, &line);
    }
}
