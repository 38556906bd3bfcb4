//! The samples of a run, in the format of `results.json`. Written by the binary, read by the report and the plots.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    figures::Ratio,
    plan::{Contestant, Metric, Scenario},
};

/// The version of the format of `results.json`.
pub const FORMAT: u32 = 1;

/// A run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Results {
    /// [`FORMAT`].
    pub format: u32,
    /// The machine of the run.
    pub machine: Machine,
    /// The seed of the order of the turns.
    pub seed: u64,
    /// Whether it was a quick run, whose figures do not count.
    pub quick: bool,
    /// Completed rounds, without the samples that warmed up.
    pub rounds: usize,
    /// The configured duration of a sample, in ms.
    pub sample_ms: u64,
    /// The duration of the run, in s.
    pub took_s: u64,
    /// The contestants.
    pub contestants: Vec<Contestant>,
    /// Remarks for readers of the report, a sentence each.
    pub remarks: Vec<String>,
    /// All samples in order.
    pub samples: Vec<Sample>,
}

/// The machine of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// The output of `uname -r`.
    pub kernel: String,
    /// The model of the CPUs.
    pub cpu: String,
    /// The number of CPUs.
    pub cpus: usize,
    /// The CPU frequency governor, or the reason why there is none.
    pub governor: String,
    /// The load average of the last minute before the run.
    pub load_before: f64,
    /// The load average of the last minute at the end of the run.
    pub load_after: f64,
    /// The versions of podmirror and of the tools.
    pub versions: BTreeMap<String, String>,
}

/// One sample.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// The round, counted from 1.
    pub round: usize,
    /// The scenario.
    pub scenario: Scenario,
    /// The contestant.
    pub contestant: Contestant,
    /// The number of sent messages.
    pub messages: u64,
    /// Its figures.
    pub figures: BTreeMap<Metric, f64>,
}

impl Results {
    /// The scenarios of the run, in the order of the report.
    pub fn scenarios(&self) -> Vec<Scenario> {
        let mut scenarios: Vec<_> = self.samples.iter().map(|sample| sample.scenario).collect();
        scenarios.sort_unstable();
        scenarios.dedup();
        scenarios
    }

    /// The values of a contestant, by round.
    pub fn values(&self, scenario: Scenario, contestant: Contestant, metric: Metric) -> BTreeMap<usize, f64> {
        let of_both = |sample: &&Sample| sample.scenario == scenario && sample.contestant == contestant;
        let samples = self.samples.iter().filter(of_both);
        samples.filter_map(|sample| Some((sample.round, *sample.figures.get(&metric)?))).collect()
    }

    /// The values of a contestant and of `off`, for each round that has both.
    pub fn pairs(&self, scenario: Scenario, contestant: Contestant, metric: Metric) -> Vec<(f64, f64)> {
        let off = self.values(scenario, Contestant::Off, metric);
        let values = self.values(scenario, contestant, metric);
        values.iter().filter_map(|(round, value)| Some((*value, *off.get(round)?))).collect()
    }

    /// The ratio of a contestant to `off`; `None` without samples.
    pub fn ratio(&self, scenario: Scenario, contestant: Contestant, metric: Metric) -> Option<Ratio> {
        Ratio::of(metric.average(), &self.pairs(scenario, contestant, metric))
    }
}
