//! podmirror's performance goals, compared with the results of a run. A part of the report.
//!
//! It has only goals that this benchmark measures. `bench packet` measures the cost of one packet.

use std::fmt::Write as _;

use super::ratio_text;
use crate::{
    figures::{Average, MIN_ROUNDS, Ratio, median},
    plan::{Contestant, Kind, Metric, Scenario, Way},
    results::Results,
};

/// A goal for a figure, on one node.
struct Goal {
    kind: Kind,
    parameter: u32,
    contestant: Contestant,
    wanted: Wanted,
}

/// The goal for a figure, compared with `off`.
enum Wanted {
    /// At least this share of it.
    AtLeast(f64),
    /// At most this many µs longer.
    AddsUs(f64),
    /// Unchanged.
    Same,
    /// The time that it adds to a datagram is at most this multiple of the time that another contestant adds.
    AddsPartOf(Contestant, f64),
}

/// Sizes of bulk TCP messages and of datagrams, in bytes.
const TCP: [u32; 2] = [4096, 128 * 1024];
const UDP: [(u32, f64); 3] = [(64, 0.92), (1024, 0.92), (4096, 0.90)];
/// The most that may be added to the latency of a message of 64 bytes, in µs.
const ADDED_US: f64 = 0.3;
/// Two figures are the same if the whole interval of their ratio is this close to 1.
const SAME: f64 = 0.05;
/// A contestant, another one, and the largest ratio of the times that they add to a datagram.
const PARTS: [(Contestant, Contestant, f64); 3] = [
    (Contestant::Tcx, Contestant::Mirred, 1.10),
    (Contestant::TcxFew, Contestant::Mirred, 0.35),
    (Contestant::Stream96, Contestant::Tcpdump96, 0.7),
];

fn goals() -> Vec<Goal> {
    let of = |kind, parameter, contestant, wanted| Goal { kind, parameter, contestant, wanted };
    let tcp = TCP.map(|bytes| of(Kind::TcpBandwidth, bytes, Contestant::Tcx, Wanted::AtLeast(0.97)));
    let udp = UDP.map(|(bytes, part)| of(Kind::UdpBandwidth, bytes, Contestant::Tcx, Wanted::AtLeast(part)));
    let latency = [Kind::TcpLatency, Kind::UdpLatency]
        .map(|kind| of(kind, 64, Contestant::Tcx, Wanted::AddsUs(ADDED_US)));
    let others = [Kind::UdpBandwidth, Kind::TcpLatency, Kind::UdpLatency]
        .map(|kind| of(kind, 64, Contestant::Unselected, Wanted::Same));
    let parts = PARTS.iter().flat_map(|(contestant, other, part)| {
        UDP.map(|(bytes, _)| of(Kind::UdpBandwidth, bytes, *contestant, Wanted::AddsPartOf(*other, *part)))
    });
    tcp.into_iter().chain(udp).chain(latency).chain(others).chain(parts).collect()
}

/// The table; empty if the run has measured none of the goals.
pub(super) fn section(results: &Results) -> String {
    let mut rows = String::new();
    for Goal { kind, parameter, contestant, wanted } in goals() {
        let scenario = Scenario { way: Way::SameNode, kind, parameter };
        let (what, ratio) = match &wanted {
            Wanted::AddsPartOf(other, _) => {
                ("sending a datagram", added(results, scenario, contestant, *other))
            }
            _ => (kind.title(), results.ratio(scenario, contestant, kind.metric())),
        };
        let Some(ratio) = ratio else { continue };
        let off = results.values(scenario, Contestant::Off, kind.metric());
        let off = median(&off.into_values().collect::<Vec<_>>()).unwrap_or_default();
        // Writing to a string cannot fail.
        let _ = writeln!(
            rows,
            "| {what}, {} | {} | {} | {} | {} |",
            scenario.column(),
            contestant.title(),
            wanted.words(),
            wanted.measured(&ratio),
            wanted.judge(&ratio, off),
        );
    }
    match rows.is_empty() {
        true => rows,
        false => format!(
            "\n## What is to be reached\n\nPod to pod on one node. \"open\": the interval includes the goal, or it is too \
             wide.\n\n| figure | with | goal | measured | reached |\n| --- | --- | --- | --- | --- |\n{rows}"
        ),
    }
}

/// The time that a contestant adds to a datagram, as a ratio to the time that another one adds. A round has too much
/// noise for the ratio of two differences, so their sums are compared.
fn added(results: &Results, scenario: Scenario, contestant: Contestant, other: Contestant) -> Option<Ratio> {
    let rates = |of| results.values(scenario, of, Metric::SentPerSecond);
    let (on, others, off) = (rates(contestant), rates(other), rates(Contestant::Off));
    let pairs = off.iter().filter_map(|(round, off)| {
        let more = |rate: &f64| 1.0 / rate - 1.0 / off;
        Some((more(on.get(round)?), more(others.get(round)?)))
    });
    Ratio::of(Average::Mean, &pairs.collect::<Vec<_>>())
}

impl Wanted {
    fn words(&self) -> String {
        match self {
            Self::AtLeast(part) => format!("≥ {part:.2}"),
            Self::AddsUs(us) => format!("at most {us:.1} µs more"),
            Self::Same => format!("within {SAME:.2} of 1"),
            Self::AddsPartOf(other, part) => {
                format!("adds ≤ {part:.2} × what {} adds", other.title())
            }
        }
    }

    fn measured(&self, ratio: &Ratio) -> String {
        match self {
            Self::AddsPartOf(..) if ratio.rounds >= MIN_ROUNDS => {
                format!("{:.2} ({:.2} … {:.2})", ratio.value, ratio.low, ratio.high)
            }
            _ => ratio_text(ratio),
        }
    }

    /// Whether a ratio meets the goal. `off` is the figure without a mirror.
    fn judge(&self, ratio: &Ratio, off: f64) -> &'static str {
        let Ratio { low, high, rounds, .. } = ratio;
        // Whether each end of the interval meets the goal.
        let ends = match self {
            Self::AtLeast(part) => [low >= part, high >= part],
            Self::AddsUs(us) => [low, high].map(|end| (end - 1.0) * off <= *us),
            // Missed only if the interval excludes 1.
            Self::Same => [(1.0 - low).max(high - 1.0) <= SAME, *low <= 1.0 && *high >= 1.0],
            Self::AddsPartOf(_, part) => [low, high].map(|end| end <= part),
        };
        match ends {
            _ if *rounds < MIN_ROUNDS => "too few rounds",
            [true, true] => "yes",
            [false, false] => "no",
            _ => "open",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::some_results;

    #[test]
    fn an_interval_reaches_a_goal_misses_it_or_leaves_it_open() {
        let ratio = |low: f64, high: f64| Ratio { value: (low + high) / 2.0, low, high, rounds: MIN_ROUNDS };
        let part = Wanted::AtLeast(0.9);
        assert_eq!(
            [(0.91, 1.0), (0.85, 0.95), (0.7, 0.8)].map(|(low, high)| part.judge(&ratio(low, high), 1.0)),
            ["yes", "open", "no"]
        );
        // 1 % of 30 µs is 0.3 µs.
        let adds = Wanted::AddsUs(0.3);
        assert_eq!(
            [(0.9, 1.009), (0.99, 1.02), (1.02, 1.1)].map(|(low, high)| adds.judge(&ratio(low, high), 30.0)),
            ["yes", "open", "no"]
        );
        assert_eq!(
            [(0.97, 1.04), (1.01, 1.04), (0.9, 1.1), (1.02, 1.1)]
                .map(|(low, high)| Wanted::Same.judge(&ratio(low, high), 1.0)),
            ["yes", "open", "open", "no"]
        );
        let part = Wanted::AddsPartOf(Contestant::Mirred, 1.1);
        assert_eq!(
            [(-0.1, 1.0), (0.9, 1.2), (1.2, 1.5)].map(|(low, high)| part.judge(&ratio(low, high), 1.0)),
            ["yes", "open", "no"]
        );
        let few = Ratio { rounds: MIN_ROUNDS - 1, ..ratio(1.0, 1.0) };
        assert_eq!(part.judge(&few, 1.0), "too few rounds");
    }

    #[test]
    fn the_table_has_what_the_run_has_measured() {
        let half = |_, contestant| if contestant == Contestant::Tcx { 0.5 } else { 1.0 };
        let text = section(&some_results(7, half));
        let rows: Vec<_> = text.lines().filter(|line| line.contains("podmirror, TCX")).collect();
        assert_eq!(
            rows,
            [
                "| UDP bandwidth, 64 B | podmirror, TCX | ≥ 0.92 | **0.50** (0.50 … 0.50) | no |",
                "| UDP bandwidth, 4096 B | podmirror, TCX | ≥ 0.90 | **0.50** (0.50 … 0.50) | no |",
                "| UDP latency, 64 B | podmirror, TCX | at most 0.3 µs more | **0.50** (0.50 … 0.50) | yes |",
            ]
        );
        // A datagram takes 1 s with off, 1.5 s with one contestant, and 2 s with the other.
        let slower = |_, contestant| match contestant {
            Contestant::Tcx => 1.0 / 1.5,
            Contestant::Tcpdump => 0.5,
            _ => 1.0,
        };
        let mut results = some_results(7, slower);
        for sample in &mut results.samples {
            if sample.contestant == Contestant::Tcpdump {
                sample.contestant = Contestant::Mirred;
            }
        }
        let text = section(&results);
        assert!(text.contains("| sending a datagram, 64 B | podmirror, TCX | adds ≤ 1.10 × what tc mirred adds | 0.50 (0.50 … 0.50) | yes |"), "{text}");
        let none = Results { samples: Vec::new(), ..some_results(7, half) };
        assert_eq!(section(&none), "");
    }
}
