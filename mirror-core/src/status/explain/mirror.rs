//! A mirror at a NIC as text: its origin, which packets it copies, how many, where to, and its counters.
//!
//! Pure, a part of [`explain`](super).

use std::collections::BTreeMap;

use mirror_common::verdict::{Direction, Misfit, Verdict};

use super::{Subject, Text, coverage, is_attached, target, verb, verdicts};
use crate::{
    annotations::{MIRROR, OVN_MIRROR},
    model::{Directions, Name, Origin, Place},
    status::{CounterStatus, LeftStatus, NodeStatus, SessionStatus, SettingsStatus, TapStatus},
};

impl Subject<'_> {
    /// Writes about one mirror at one NIC.
    pub(super) fn mirror(&self, tap: &TapStatus, session: &SessionStatus, text: &mut Text) {
        text.line(1, &format!("Mirror {}", session.mirror));
        text.line(2, &origin(session));
        text.line(2, &directions(session));
        for line in settings(&session.settings) {
            text.line(2, &line);
        }
        for line in budgets(session) {
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

/// The settings: which packets, how many, and how much of each.
fn settings(settings: &SettingsStatus) -> Vec<String> {
    let SettingsStatus { filter, sample, rate_packets, rate_bits, snaplen, .. } = settings;
    let rates =
        [rate_packets.map(|rate| format!("{rate} packets")), rate_bits.map(|rate| format!("{rate} bits"))];
    let rates: Vec<_> = rates.into_iter().flatten().collect();
    let mut lines = Vec::new();
    lines.extend(filter.as_ref().map(|filter| format!("Filter: only packets that match \"{filter}\".")));
    lines.extend(sample.map(|share| format!("Sample: only {} of the flows.", percent(share))));
    if !rates.is_empty() {
        lines.push(format!("Rate: at most {} a second.", rates.join(" and ")));
    }
    lines.extend(snaplen.map(|bytes| format!("Snap length: only the first {bytes} bytes of each packet.")));
    if lines.is_empty() {
        lines.push(
            "It has no filter, sample, rate or snap length: it copies all these packets completely."
                .to_owned(),
        );
    }
    lines
}

/// Formats a share of at most 1 as a percentage.
fn percent(share: f64) -> String {
    let rounded = (share * 1e6).round() / 1e4;
    if rounded > 0.0 { format!("{rounded} %") } else { "less than 0.0001 %".to_owned() }
}

/// When the mirror ends, or which budget has ended it.
fn budgets(session: &SessionStatus) -> Vec<String> {
    let SessionStatus { settings, ended, left, .. } = session;
    let LeftStatus { duration, packets, bytes } = left;
    let left = |left: Option<String>| left.map(|left| format!("; {left} are left")).unwrap_or_default();
    let count = |count: Option<u64>| left(count.map(|count| count.to_string()));
    let seconds = |time: f64| format!("{} s", (time * 10.0).round() / 10.0);
    let time = settings.duration.map(|of| format!("{}{}", seconds(of), left(duration.map(seconds))));
    let packets = settings.packets.map(|of| format!("{of} copied packets{}", count(*packets)));
    let bytes = settings.bytes.map(|of| format!("{of} bytes of copied packets{}", count(*bytes)));
    let budgets = [time, packets, bytes].into_iter().flatten();
    let ended = ended.as_ref().map(|budget| {
        format!(
            "It has ended, because its budget of {budget} is used up: nothing is copied. All its budgets restart \
             when its settings change."
        )
    });
    budgets.map(|budget| format!("Budget: it ends after {budget}.")).chain(ended).collect()
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
            "It has seen no packet that {}. If there are such packets, they do not pass this tap: docs/networks.md \
             says which networks are covered.",
            verb(direction)
        );
        text.line(2, &line);
    }
}
