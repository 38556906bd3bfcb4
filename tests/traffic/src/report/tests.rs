//! The text of the report.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::results::{FORMAT, Machine, Sample};

/// A run of `rounds` rounds with two kinds and two sizes, in which a value is the round times `factor`.
pub(crate) fn some_results(rounds: usize, factor: fn(usize, Contestant) -> f64) -> Results {
    let contestants = vec![Contestant::Off, Contestant::OffAgain, Contestant::Tcx, Contestant::Tcpdump];
    let mut samples = Vec::new();
    for round in 1..=rounds {
        for kind in [Kind::UdpLatency, Kind::UdpBandwidth] {
            for bytes in [64, 4096] {
                for contestant in &contestants {
                    let value = round as f64 * factor(round, *contestant);
                    let mut figures: BTreeMap<_, _> =
                        kind.further().iter().map(|metric| (*metric, value)).collect();
                    figures.insert(kind.metric(), value * kind.metric().unit());
                    if *contestant == Contestant::Tcpdump {
                        figures.insert(Metric::ReaderLossPercent, 12.5);
                    }
                    let scenario = Scenario { way: Way::SameNode, kind, parameter: bytes };
                    samples.push(Sample {
                        round,
                        scenario,
                        contestant: *contestant,
                        messages: 1000,
                        figures,
                    });
                }
            }
        }
    }
    let machine = Machine {
        kernel: "6.18.0".to_owned(),
        cpu: "a CPU".to_owned(),
        cpus: 2,
        governor: "none".to_owned(),
        load_before: 0.5,
        load_after: 1.25,
        versions: [("iperf3".to_owned(), "3.12".to_owned())].into(),
    };
    Results {
        format: FORMAT,
        machine,
        seed: 7,
        quick: false,
        rounds,
        sample_ms: 200,
        took_s: 60,
        contestants,
        remarks: vec!["A remark.".to_owned()],
        samples,
    }
}

#[test]
fn the_tables_have_medians_ratios_and_what_was_published() {
    let text = markdown(&some_results(7, |round, contestant| match contestant {
        Contestant::Tcx => 0.5,
        Contestant::Tcpdump => 0.8 + round as f64 / 20.0,
        _ => 1.0,
    }));
    let lines: Vec<_> = text.lines().collect();
    let at = |line: &str| {
        lines.iter().position(|other| *other == line).unwrap_or_else(|| panic!("{line}\n{text}"))
    };
    let section = at("## Pod to pod on one node: UDP bandwidth");
    assert_eq!(
        lines[section + 2..][..9],
        [
            "![UDP bandwidth](same-node-udp-bandwidth.svg)",
            "",
            "| bandwidth, Mbit/s | 64 B | 4096 B |",
            "| --- | ---: | ---: |",
            "| off | 4.00 | 4.00 |",
            "| off, again (noise) | no difference (1.00 … 1.00) | no difference (1.00 … 1.00) |",
            "| podmirror, TCX | **0.50** (0.50 … 0.50) | **0.50** (0.50 … 0.50) |",
            "| tcpdump in the pod | no difference (0.90 … 1.10) | no difference (0.90 … 1.10) |",
            "| published: Kube-OVN | 0.76 | 0.62 |",
        ]
    );
    // A share has no ratio.
    let losses = at("| datagrams lost, % | 64 B | 4096 B |");
    assert_eq!(lines[losses + 4], "| podmirror, TCX | 2.00 | 2.00 |");
    // The table of readers has only contestants whose reader counts.
    let readers = at("| packets that the reader lost, % | 64 B | 4096 B |");
    assert_eq!(lines[readers + 2], "| tcpdump in the pod | 12.5 | 12.5 |");
    assert!(text.contains("| load (1 minute) before, at the end | 0.50, 1.25 |"), "{text}");
    assert!(text.contains("* A remark.") && text.contains("In 0 of 4 tables' cells"), "{text}");
}

#[test]
fn too_few_rounds_and_quick_runs_are_no_result() {
    let text = markdown(&some_results(1, |_, _| 1.0));
    assert!(
        text.contains("**This is no result**: it has 1 rounds") && text.contains("1 rounds, no result"),
        "{text}"
    );
    assert!(!text.contains("no difference ("), "{text}");
    let quick = Results { quick: true, ..some_results(7, |_, _| 1.0) };
    assert!(markdown(&quick).contains("**This is no result**: a quick run"));
    assert!(!markdown(&some_results(7, |_, _| 1.0)).contains("no result"));
}

#[test]
fn a_contestant_without_samples_leaves_its_cells_empty() {
    let mut results = some_results(7, |_, _| 1.0);
    results.samples.retain(|sample| sample.contestant != Contestant::Tcx || sample.scenario.parameter == 64);
    let text = markdown(&results);
    assert!(text.contains("| podmirror, TCX | no difference (1.00 … 1.00) |  |"), "{text}");
}

#[test]
fn a_metric_without_samples_has_no_table() {
    let cpu = |text: &str| text.matches(Metric::CpuKernelNsPerPacket.title()).count();
    let mut results = some_results(7, |_, _| 1.0);
    assert_eq!(cpu(&markdown(&results)), 0, "a run of an earlier version");
    for sample in &mut results.samples {
        sample.figures.insert(Metric::CpuKernelNsPerPacket, 1500.0);
    }
    let text = markdown(&results);
    assert_eq!(cpu(&text), 2, "one for each kind: {text}");
    assert!(text.contains("| CPU time in the kernel for a packet, ns | 64 B | 4096 B |"), "{text}");
}

#[test]
fn the_run_of_an_earlier_version_is_read() {
    // Only one scenario of that run: the intervals of all tables take half a minute.
    let results: Results = serde_json::from_str(include_str!("earlier.json")).unwrap();
    let text = markdown(&results);
    assert!(text.contains("## Pod to a ClusterIP: HTTP requests\n"), "{text}");
    assert!(text.contains("| requests a second | 10 connections |"), "{text}");
}

#[test]
fn the_file_of_results_is_read_back() {
    let results = some_results(2, |round, _| 1.0 / round as f64);
    let json = serde_json::to_string_pretty(&results).unwrap();
    assert_eq!(serde_json::from_str::<Results>(&json).unwrap(), results);
    assert!(
        json.contains(r#""contestant": "off-again""#) && json.contains(r#""bits-per-second": "#),
        "{json}"
    );
}

proptest! {
    // Each case resamples many intervals.
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn every_table_has_as_many_cells_in_each_row(rounds in 0_usize..9, missing in 0_usize..64) {
        let mut results = some_results(rounds, |_, _| 1.0);
        if missing < results.samples.len() {
            results.samples.remove(missing);
        }
        let text = markdown(&results);
        let tables = text.split("\n\n").filter(|block| block.starts_with("| "));
        for table in tables {
            let cells: Vec<_> = table.lines().map(|line| line.matches('|').count()).collect();
            prop_assert!(cells.windows(2).all(|pair| pair[0] == pair[1]), "{}", table);
        }
    }
}
