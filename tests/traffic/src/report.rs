//! The report of a run, as Markdown.

mod goals;

use std::fmt::Write as _;

use crate::{
    figures::{Finding, MIN_ROUNDS, Ratio},
    plan::{Contestant, Kind, Metric, Scenario, Way},
    plots,
    published::{self, SOURCE},
    results::Results,
};

/// The whole report. It refers to the plots of [`plots::all`] as files in the same directory.
pub fn markdown(results: &Results) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write!(text, "# podmirror: traffic with and without a mirror\n\n{}\n\n", judgement(results));
    if plots::has_overview(results) {
        let _ = writeln!(text, "![What is left of a pod's speed]({})\n", plots::OVERVIEW);
    }
    let _ = write!(text, "{}\n## How to read it\n\n{HOW}\n\n{}\n", machine(results), noise(results));
    text += &goals::section(results);
    for way in Way::ALL {
        for kind in Kind::ALL {
            let mut scenarios = results.scenarios();
            scenarios.retain(|scenario| scenario.way == way && scenario.kind == kind);
            if !scenarios.is_empty() {
                text += &section(results, way, kind, &scenarios);
            }
        }
    }
    text.trim_end().to_owned() + "\n"
}

const HOW: &str = "\
* All copies are of the packets of one pod, in both directions. This pod is the client. With a node port it is the server,
  and the client is a node. The other end has no mirror.
* Traffic from node to node is not measured: it is no pod's, so nothing of it is copied.
* A ratio compares a contestant with `off` of the same round. It is the median over the rounds. In brackets is its 95 %
  interval (bootstrap over the rounds; with 11 rounds, such intervals include the true median in some 93 % of cases). If
  the interval includes 1, the cell says \"no difference\".
* Of CPU times, the sums of all rounds are compared, because a sample has few ticks of 10 ms. What was lost is the mean of
  the rounds.
* The row `off` has the medians or means themselves. They depend on the machine: compare ratios only.
* Latency and CPU time: less is better. Bandwidth: more is better.
* CPU time is that of the whole machine, with the other end and the readers. A packet is counted at the NIC of the
  mirrored pod, and a super-frame is one packet.
* The load at the end is that of the run itself: each connection of wrk has a thread of the server.
* Published ratios are from other hardware, without repeats and spread.";

/// Whether the run counts as a result.
fn judgement(results: &Results) -> String {
    let Results { rounds, quick, .. } = results;
    match (*quick, *rounds) {
        (true, _) => {
            "**This is no result**: a quick run shows that the benchmark works, and its figures say nothing."
                .into()
        }
        (_, rounds) if rounds < MIN_ROUNDS => format!(
            "**This is no result**: it has {rounds} rounds, and an interval needs {MIN_ROUNDS}. Give it more `--minutes`, \
             or fewer scenarios with `--only`."
        ),
        (_, rounds) => format!("{rounds} rounds, all contestants in each of them, in random order."),
    }
}

fn machine(results: &Results) -> String {
    let Results { machine, seed, sample_ms, took_s, rounds, remarks, .. } = results;
    let mut text = format!(
        "## The run\n\n| | |\n| --- | --- |\n| kernel | {} |\n| CPU | {} × {} |\n| frequency governor | {} |\n\
         | load (1 minute) before, at the end | {:.2}, {:.2} |\n| rounds, time of a sample | {rounds}, {sample_ms} ms |\n\
         | seed of the order, duration | {seed}, {took_s} s |\n",
        machine.kernel, machine.cpus, machine.cpu, machine.governor, machine.load_before, machine.load_after,
    );
    for (name, version) in &machine.versions {
        let _ = writeln!(text, "| {name} | {version} |");
    }
    text.push('\n');
    for remark in remarks {
        let _ = writeln!(text, "* {remark}");
    }
    text
}

/// How often `off` differs from itself.
fn noise(results: &Results) -> String {
    let scenarios = results.scenarios();
    let ratios = scenarios
        .iter()
        .filter_map(|scenario| results.ratio(*scenario, Contestant::OffAgain, scenario.kind.metric()));
    let ratios: Vec<_> = ratios.collect();
    let differs = ratios.iter().filter(|ratio| ratio.finding() == Finding::Difference).count();
    format!(
        "**Noise.** `{}` is measured like the others and does the same as `off`. In {differs} of {} tables' cells it \
         seems to differ (5 to 7 % are expected by chance). Compare a cell with this row in the same column: a difference \
         that is as small as the noise there means nothing, and one cell that differs alone may be chance.\n",
        Contestant::OffAgain.title(),
        ratios.len(),
    )
}

fn section(results: &Results, way: Way, kind: Kind, scenarios: &[Scenario]) -> String {
    let mut text =
        format!("\n## {}: {}\n\n![{1}]({})\n\n", way.title(), kind.title(), plots::file_name(way, kind));
    text += &table(results, scenarios, kind.metric());
    if published::has(way, kind) {
        let cell = |scenario: &Scenario| {
            published::ratio(*scenario).map_or(String::new(), |ratio| format!("{ratio:.2}"))
        };
        let _ = writeln!(text, "{}", row(SOURCE, scenarios.iter().map(cell)));
        if way == Way::ClusterIp {
            text += "\nIn the published measurement, the server was on another node; here it is on the same node.\n";
        }
    }
    let further = kind.further().iter().chain(kind.cpu());
    // A run of an earlier version may lack some of them.
    let has_values = |metric: &&Metric| {
        let off = |scenario: &Scenario| results.values(*scenario, Contestant::Off, **metric);
        scenarios.iter().any(|scenario| !off(scenario).is_empty())
    };
    for metric in further.filter(has_values) {
        text += &format!("\n{}\n", table(results, scenarios, *metric).trim_end());
    }
    if !reader_losses(results, scenarios).is_empty() {
        text += &format!("\n{}\n", reader_losses(results, scenarios).trim_end());
    }
    text
}

/// A table of a metric: a row for each contestant, a column for each size.
fn table(results: &Results, scenarios: &[Scenario], metric: Metric) -> String {
    let mut text = header(scenarios, metric);
    let contestants = results
        .contestants
        .iter()
        .filter(|contestant| scenarios.iter().any(|scenario| scenario.contestants().contains(contestant)));
    for contestant in contestants {
        let cells = scenarios.iter().map(|scenario| cell(results, *scenario, *contestant, metric));
        let _ = writeln!(text, "{}", row(contestant.title(), cells));
    }
    text
}

/// The table of the packets that the contestants' readers lost; empty if none of them counts.
fn reader_losses(results: &Results, scenarios: &[Scenario]) -> String {
    let metric = Metric::ReaderLossPercent;
    let cells = |contestant| -> Vec<String> {
        scenarios.iter().map(|scenario| cell(results, *scenario, contestant, metric)).collect()
    };
    let readers = results.contestants.iter().map(|contestant| (contestant.title(), cells(*contestant)));
    let readers: Vec<_> = readers.filter(|(_, cells)| cells.iter().any(|cell| !cell.is_empty())).collect();
    if readers.is_empty() {
        return String::new();
    }
    let rows: Vec<_> = readers.into_iter().map(|(title, cells)| row(title, cells.into_iter())).collect();
    header(scenarios, metric) + &rows.join("\n") + "\n"
}

fn header(scenarios: &[Scenario], metric: Metric) -> String {
    let sizes = scenarios.iter().map(|scenario| scenario.column());
    format!("{}\n| --- |{}\n", row(metric.title(), sizes), " ---: |".repeat(scenarios.len()))
}

fn row(title: &str, cells: impl Iterator<Item = String>) -> String {
    format!("| {title} | {} |", cells.collect::<Vec<_>>().join(" | "))
}

/// A cell: for `off` the average, for others the ratio, or for a share also the average. Empty without samples.
fn cell(results: &Results, scenario: Scenario, contestant: Contestant, metric: Metric) -> String {
    if contestant == Contestant::Off || !metric.has_ratio() {
        let values: Vec<f64> = results.values(scenario, contestant, metric).into_values().collect();
        let average = metric.average().of(&values);
        return average.map_or(String::new(), |value| number(value / metric.unit()));
    }
    results.ratio(scenario, contestant, metric).map_or(String::new(), |ratio| ratio_text(&ratio))
}

/// A ratio in the format of the report.
pub fn ratio_text(ratio: &Ratio) -> String {
    let Ratio { value, low, high, rounds } = ratio;
    match ratio.finding() {
        Finding::TooFewRounds => format!("{rounds} rounds, no result"),
        Finding::NoDifference => format!("no difference ({low:.2} … {high:.2})"),
        Finding::Difference => format!("**{value:.2}** ({low:.2} … {high:.2})"),
    }
}

/// Three significant digits, but at least all digits before the point.
fn number(value: f64) -> String {
    match value.abs() {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
pub(crate) mod tests;
