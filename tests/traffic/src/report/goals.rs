//! What podmirror is to reach, beside what a run has shown. A part of the report.
//!
//! Only what this benchmark measures. `bench packet` has the cost of one packet.

use std::fmt::Write as _;

use super::ratio_text;
use crate::{
    figures::{MIN_ROUNDS, Ratio, median},
    plan::{Contestant, Kind, Scenario, Way},
    results::Results,
};

/// A figure that is to be reached, on one node.
struct Goal {
    kind: Kind,
    parameter: u32,
    contestant: Contestant,
    wanted: Wanted,
}

/// What a figure is to be, compared with `off`.
enum Wanted {
    /// This part of it, or more.
    AtLeast(f64),
    /// At most so many seconds longer.
    Adds(f64),
    /// The same.
    Same,
}

/// Bulk TCP, and datagrams, in bytes.
const TCP: [u32; 2] = [4096, 128 * 1024];
const UDP: [(u32, f64); 3] = [(64, 0.92), (1024, 0.92), (4096, 0.90)];
/// The longest that a message of 64 bytes is to take more, in seconds.
const ADDED: f64 = 0.3e-6;

fn goals() -> Vec<Goal> {
    let of = |kind, parameter, contestant, wanted| Goal { kind, parameter, contestant, wanted };
    let tcp = TCP.map(|bytes| of(Kind::TcpBandwidth, bytes, Contestant::Tcx, Wanted::AtLeast(0.97)));
    let udp = UDP.map(|(bytes, part)| of(Kind::UdpBandwidth, bytes, Contestant::Tcx, Wanted::AtLeast(part)));
    let latency =
        [Kind::TcpLatency, Kind::UdpLatency].map(|kind| of(kind, 64, Contestant::Tcx, Wanted::Adds(ADDED)));
    let others =
        [Kind::UdpBandwidth, Kind::UdpLatency].map(|kind| of(kind, 64, Contestant::Unselected, Wanted::Same));
    tcp.into_iter().chain(udp).chain(latency).chain(others).collect()
}

/// The table; empty if the run has measured none of them.
pub(super) fn section(results: &Results) -> String {
    let mut rows = String::new();
    for Goal { kind, parameter, contestant, wanted } in goals() {
        let scenario = Scenario { way: Way::SameNode, kind, parameter };
        let pairs = results.pairs(scenario, contestant, kind.metric());
        let Some(ratio) = Ratio::of(&pairs) else { continue };
        let off = median(&pairs.iter().map(|(_, off)| *off).collect::<Vec<_>>()).unwrap_or_default();
        // Writing to a string cannot fail.
        let _ = writeln!(
            rows,
            "| {}, {} | {} | {} | {} | {} |",
            kind.title(),
            scenario.column(),
            contestant.title(),
            wanted.words(),
            ratio_text(&ratio),
            wanted.judge(&ratio, off),
        );
    }
    match rows.is_empty() {
        true => rows,
        false => format!(
            "\n## What is to be reached\n\nPod to pod on one node. \"open\": the interval includes the goal.\n\n\
             | figure | with | goal | measured | reached |\n| --- | --- | --- | --- | --- |\n{rows}"
        ),
    }
}

impl Wanted {
    fn words(&self) -> String {
        match self {
            Self::AtLeast(part) => format!("≥ {part:.2}"),
            Self::Adds(seconds) => format!("at most {:.1} µs more", seconds * 1e6),
            Self::Same => "no difference".to_owned(),
        }
    }

    /// Whether a ratio reaches it. `off` is the figure without a mirror.
    fn judge(&self, ratio: &Ratio, off: f64) -> &'static str {
        let Ratio { low, high, rounds, .. } = ratio;
        // Whether both ends of the interval reach it.
        let ends = match self {
            Self::AtLeast(part) => [low >= part, high >= part],
            Self::Adds(seconds) => [low, high].map(|end| (end - 1.0) * off <= *seconds),
            Self::Same => [*low <= 1.0 && *high >= 1.0; 2],
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
        let ratio = |low: f64, high: f64| Ratio { median: (low + high) / 2.0, low, high, rounds: MIN_ROUNDS };
        let part = Wanted::AtLeast(0.9);
        assert_eq!(
            [(0.91, 1.0), (0.85, 0.95), (0.7, 0.8)].map(|(low, high)| part.judge(&ratio(low, high), 1.0)),
            ["yes", "open", "no"]
        );
        // Of 30 µs: 1 % more is 0.3 µs.
        let adds = Wanted::Adds(0.3e-6);
        assert_eq!(
            [(0.9, 1.009), (0.99, 1.02), (1.02, 1.1)].map(|(low, high)| adds.judge(&ratio(low, high), 30e-6)),
            ["yes", "open", "no"]
        );
        assert_eq!(
            [(0.9, 1.1), (1.02, 1.1)].map(|(low, high)| Wanted::Same.judge(&ratio(low, high), 1.0)),
            ["yes", "no"]
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
        let none = Results { samples: Vec::new(), ..some_results(7, half) };
        assert_eq!(section(&none), "");
    }
}
