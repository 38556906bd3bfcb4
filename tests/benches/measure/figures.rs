//! Rounds in which the candidates take turns, and printing of medians and quartiles. Shared by the benches.

/// Rounds of a measurement.
pub(crate) const ROUNDS: usize = 41;

/// ns per packet of each candidate in each round, without the first round, which warms up.
pub(crate) fn rounds(names: &[&str], mut measure: impl FnMut(&str) -> f64) -> Vec<Vec<f64>> {
    let all = (0..=ROUNDS).map(|_| names.iter().map(|name| measure(name)).collect());
    all.skip(1).collect()
}

/// Prints the times of each candidate, and their ratios to those of `base` in the same round.
pub(crate) fn report(title: &str, names: &[&str], base: &str, rounds: &[Vec<f64>]) {
    println!("{title:<20}  median  quartiles        against: {base}");
    let base = names.iter().position(|name| *name == base).unwrap();
    for (column, name) in names.iter().enumerate() {
        let [low, median, high] = quartiles(rounds.iter().map(|round| round[column]));
        let [ratio_low, ratio, ratio_high] =
            quartiles(rounds.iter().map(|round| round[column] / round[base]));
        println!(
            "  {name:<18}  {median:>6.0}  {low:>5.0} … {high:<6.0}  {ratio:.3}  ({ratio_low:.3} … {ratio_high:.3})"
        );
    }
    println!();
}

/// How much more `name` costs than `base` within a round.
pub(crate) fn compare(names: &[&str], name: &str, base: &str, rounds: &[Vec<f64>]) {
    let column = |name| names.iter().position(|other| *other == name);
    let (Some(name_at), Some(base_at)) = (column(name), column(base)) else { return };
    let [low, median, high] = quartiles(rounds.iter().map(|round| round[name_at] - round[base_at]));
    let [ratio_low, ratio, ratio_high] =
        quartiles(rounds.iter().map(|round| round[name_at] / round[base_at]));
    println!(
        "{name} against {base}: {median:+.0} ns ({low:+.0} … {high:+.0}), \
         {ratio:.3} times ({ratio_low:.3} … {ratio_high:.3})"
    );
}

/// The lower quartile, the median and the upper quartile.
pub(crate) fn quartiles(values: impl Iterator<Item = f64>) -> [f64; 3] {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| values[(values.len() - 1) * quarter / 4])
}
