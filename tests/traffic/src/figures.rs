//! Averages, and ratios with their intervals.
//!
//! A run is noisy, so a contestant is compared with `off` within the same round only, and the median is over the
//! rounds. The interval is a bootstrap over the rounds: the range of medians that resampled rounds give.
//!
//! A figure that is counted in steps which are coarse for one sample, such as CPU ticks, uses the sum over all rounds
//! instead of the median: a round in which nothing was counted has no ratio, but must not be excluded.

use mirror_tests::random::Random;

/// With fewer rounds, there is no result: even the whole range of six values misses the median once in 32 times.
pub const MIN_ROUNDS: usize = 6;
/// How often the rounds are drawn again for an interval.
const DRAWS: usize = 2000;
/// A fixed seed: the same samples give the same report.
const SEED: u64 = 1;

/// The median; `None` for no values.
pub fn median(values: &[f64]) -> Option<f64> {
    quantile(values, 0.5)
}

/// The quantile of a share from 0 to 1, interpolated; `None` for no values.
pub fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = share.clamp(0.0, 1.0) * sorted.len().checked_sub(1)? as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    Some(low + (high - low) * at.fract())
}

/// Result of the rounds for a ratio.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finding {
    /// Fewer than [`MIN_ROUNDS`] rounds: no result.
    TooFewRounds,
    /// The interval includes 1.
    NoDifference,
    /// The interval does not include 1.
    Difference,
}

/// How the rounds are averaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Average {
    /// The median; for ratios, the median of the rounds' ratios.
    Median,
    /// The mean; for ratios, the ratio of the sums over all rounds.
    Mean,
}

impl Average {
    /// The average of the rounds' values; `None` for no values.
    pub fn of(self, values: &[f64]) -> Option<f64> {
        match self {
            Self::Median => median(values),
            Self::Mean => (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64),
        }
    }

    /// The ratio of pairs (contestant, base), one pair per round; `None` if it is not finite.
    fn ratio(self, pairs: &[(f64, f64)]) -> Option<f64> {
        let ratio = match self {
            Self::Median => median(&pairs.iter().map(|(on, base)| on / base).collect::<Vec<_>>())?,
            Self::Mean => {
                pairs.iter().map(|(on, _)| on).sum::<f64>() / pairs.iter().map(|(_, base)| base).sum::<f64>()
            }
        };
        ratio.is_finite().then_some(ratio)
    }
}

/// The ratio of a contestant to `off`, or to another one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ratio {
    /// The ratio over all rounds.
    pub value: f64,
    /// The lower end of the 95 % interval.
    pub low: f64,
    /// The upper end of the interval.
    pub high: f64,
    /// The number of rounds.
    pub rounds: usize,
}

impl Ratio {
    /// Computes the ratio of pairs (contestant, base), one pair per round. `None` without a finite ratio, and for means
    /// also if nothing was counted. The median excludes pairs without a finite ratio.
    pub fn of(average: Average, pairs: &[(f64, f64)]) -> Option<Self> {
        let has_ratio = |(on, base): &&(f64, f64)| average == Average::Mean || (on / base).is_finite();
        let pairs: Vec<_> = pairs.iter().filter(has_ratio).copied().collect();
        let mut random = Random::new(SEED);
        let draw = |_| average.ratio(&pairs.iter().map(|_| random.pick(&pairs)).collect::<Vec<_>>());
        // If nothing was counted in any round, there is no ratio.
        let value = average.ratio(&pairs).filter(|value| average == Average::Median || *value != 0.0)?;
        let drawn: Vec<f64> = (0..DRAWS).filter_map(draw).collect();
        let (low, high) = (quantile(&drawn, 0.025)?, quantile(&drawn, 0.975)?);
        Some(Self { value, low, high, rounds: pairs.len() })
    }

    /// The finding for this ratio.
    pub fn finding(&self) -> Finding {
        match self {
            Self { rounds, .. } if *rounds < MIN_ROUNDS => Finding::TooFewRounds,
            Self { low, high, .. } if *low <= 1.0 && *high >= 1.0 => Finding::NoDifference,
            _ => Finding::Difference,
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use proptest::{collection::vec, prelude::*};

    use super::*;

    #[test]
    fn medians_and_quantiles_of_few_values() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[4.0, 1.0]), Some(2.5));
        assert_eq!(median(&[9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(quantile(&[1.0, 2.0, 3.0, 4.0, 5.0], 0.25), Some(2.0));
        assert_eq!(quantile(&[1.0, 2.0], 7.0), Some(2.0));
    }

    /// The ratio of the median.
    fn of(pairs: &[(f64, f64)]) -> Option<Ratio> {
        Ratio::of(Average::Median, pairs)
    }

    #[test]
    fn a_single_round_is_no_result() {
        let ratio = of(&[(2.0, 1.0)]).unwrap();
        assert_eq!((ratio.value, ratio.finding()), (2.0, Finding::TooFewRounds));
        let ratio = of(&[(2.0, 1.0); MIN_ROUNDS]).unwrap();
        assert_eq!((ratio.low, ratio.high, ratio.finding()), (2.0, 2.0, Finding::Difference));
    }

    #[test]
    fn noise_around_one_is_no_difference() {
        let noise = [0.9, 1.2, 0.95, 1.1, 1.0, 0.85, 1.05];
        let ratio = of(&noise.map(|value| (value, 1.0))).unwrap();
        assert_eq!(ratio.finding(), Finding::NoDifference);
        let ratio = of(&noise.map(|value| (value * 0.5, 1.0))).unwrap();
        assert_eq!(ratio.finding(), Finding::Difference);
    }

    #[test]
    fn a_round_without_a_value_is_left_out() {
        assert_eq!(of(&[(1.0, 0.0)]), None);
        assert_eq!(of(&[(1.0, 0.0), (3.0, 2.0), (f64::NAN, 1.0)]).unwrap().rounds, 1);
    }

    #[test]
    fn what_is_counted_in_coarse_steps_has_its_sums_compared() {
        // A tick in one of two rounds: a median would use only the rounds in which `off` has one.
        let ticks = [(10.0, 0.0), (0.0, 10.0), (10.0, 10.0), (0.0, 0.0), (10.0, 0.0), (10.0, 20.0)];
        let ratio = Ratio::of(Average::Mean, &ticks).unwrap();
        assert_eq!((ratio.value, ratio.rounds, ratio.finding()), (1.0, 6, Finding::NoDifference));
        assert_eq!(Average::Mean.of(&[1.0, 0.0, 5.0]), Some(2.0));
        assert_eq!((Average::Mean.of(&[]), Ratio::of(Average::Mean, &[])), (None, None));
        assert_eq!(Ratio::of(Average::Mean, &[(1.0, 0.0)]), None);
        assert_eq!(Ratio::of(Average::Mean, &[(0.0, 1.0); MIN_ROUNDS]), None);
    }

    proptest! {
        // Each case resamples thousands of times.
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn the_interval_holds_the_median_and_lies_within_the_rounds(
            pairs in vec((0.1_f64..10.0, 0.1_f64..10.0), 1..30),
        ) {
            let ratio = of(&pairs).unwrap();
            let ratios: Vec<f64> = pairs.iter().map(|(on, off)| on / off).collect();
            let (least, most) = (quantile(&ratios, 0.0).unwrap(), quantile(&ratios, 1.0).unwrap());
            prop_assert!(least <= ratio.low && ratio.low <= ratio.high && ratio.high <= most);
            prop_assert!(ratio.low <= ratio.value && ratio.value <= ratio.high, "{ratio:?}");
            prop_assert_eq!(of(&pairs), Some(ratio), "the same samples give the same interval");
        }

        #[test]
        fn what_slows_both_of_a_round_changes_nothing(
            pairs in vec((0.1_f64..10.0, 0.1_f64..10.0), 6..20),
            slow in vec(0.25_f64..4.0, 20),
        ) {
            let slowed: Vec<_> =
                pairs.iter().zip(&slow).map(|((on, off), slow)| (on * slow, off * slow)).collect();
            let (plain, slowed) = (of(&pairs).unwrap(), of(&slowed).unwrap());
            prop_assert!((plain.value - slowed.value).abs() < 1e-9);
            prop_assert!((plain.low - slowed.low).abs() < 1e-9 && (plain.high - slowed.high).abs() < 1e-9);
        }

        #[test]
        fn the_order_of_the_values_does_not_matter(mut values in vec(0.1_f64..10.0, 1..30)) {
            let before = median(&values);
            values.reverse();
            prop_assert_eq!(median(&values), before);
        }
    }
}
