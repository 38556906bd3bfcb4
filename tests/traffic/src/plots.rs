//! The plots of a run, as SVG.
//!
//! One plot for each table: a line for each contestant, with its ratio to `off` for each size of a message, and the
//! interval. An overview plot shows the most informative figures of all tables. The text uses the viewer's fonts, so
//! that no font needs to be installed here.

use plotters::{
    coord::{Shift, types::RangedCoordf64},
    prelude::*,
};

use crate::{
    figures::{MIN_ROUNDS, Ratio},
    plan::{Contestant, Kind, Metric, Scenario, Way},
    published::{self, SOURCE},
    results::Results,
};

/// The file name of a plot.
pub fn file_name(way: Way, kind: Kind) -> String {
    format!("{}-{}.svg", way.name(), kind.name())
}

/// The file name of the overview plot.
pub const OVERVIEW: &str = "overview.svg";
/// The figures of the overview, all pod to pod on one node. Latencies are inverted, so that less is worse everywhere.
const SHOWN: [(&str, Kind, u32); 5] = [
    ("UDP rate, 64 B", Kind::UdpBandwidth, 64),
    ("UDP rate, 1 KiB", Kind::UdpBandwidth, 1024),
    ("TCP rate, 1 KiB", Kind::TcpBandwidth, 1024),
    ("TCP rate, 128 KiB", Kind::TcpBandwidth, 128 * 1024),
    ("TCP latency, 64 B", Kind::TcpLatency, 64),
];

/// Whether the run has measured everything in the overview.
pub fn has_overview(results: &Results) -> bool {
    let scenarios = results.scenarios();
    shown().iter().all(|shown| scenarios.contains(&shown.scenario))
}

fn shown() -> [Shown; 5] {
    SHOWN.map(|(label, kind, parameter)| Shown {
        label: label.to_owned(),
        scenario: Scenario { way: Way::SameNode, kind, parameter },
        is_inverse: kind.metric() == Metric::LatencyUs,
    })
}

/// All plots: file names and contents. An error is one of the plotting library.
pub fn all(results: &Results) -> Result<Vec<(String, String)>, String> {
    let mut plots = Vec::new();
    if has_overview(results) {
        let title = format!("Pod to pod on one node: what is left of a pod's speed{}", caveat(results));
        let plot = plot(results, &title, &shown()).map_err(|why| format!("{OVERVIEW}: {why}"))?;
        plots.push((OVERVIEW.to_owned(), plot));
    }
    for way in Way::ALL {
        for kind in Kind::ALL {
            let mut scenarios = results.scenarios();
            scenarios.retain(|scenario| scenario.way == way && scenario.kind == kind);
            if !scenarios.is_empty() {
                let title = format!("{}: {}, off = 1{}", way.title(), kind.title(), caveat(results));
                let of_scenario = |scenario: &Scenario| Shown {
                    label: scenario.column(),
                    scenario: *scenario,
                    is_inverse: false,
                };
                let shown: Vec<_> = scenarios.iter().map(of_scenario).collect();
                let plot = plot(results, &title, &shown)
                    .map_err(|why| format!("{}: {why}", file_name(way, kind)))?;
                plots.push((file_name(way, kind), plot));
            }
        }
    }
    Ok(plots)
}

/// In pixels, as are the four sizes below.
const WIDTH: u32 = 900;
const LINE_HEIGHT: u32 = 44;
const HEAD_AND_FOOT: u32 = 130;
const NAMES_WIDTH: u32 = 250;
const DOT: i32 = 4;
/// The share of a line's height for its dots, up and down from the middle.
const SPREAD: f64 = 0.36;
/// Range of ratios on the axis: an outlier must not hide the rest.
const AXIS: (f64, f64) = (0.0, 3.0);
/// The width of the legend, as a share of the axis.
const LEGEND: f64 = 0.18;
/// Colours of the shown figures, sizes from small to large, that colour-blind people can distinguish (Okabe and Ito).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 0, 0),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 158, 115),
    RGBColor(213, 94, 0),
    RGBColor(0, 114, 178),
    RGBColor(204, 121, 167),
];

/// A figure with a colour in a plot.
struct Shown {
    label: String,
    scenario: Scenario,
    /// Shows the ratio of `off` to the contestant.
    is_inverse: bool,
}

impl Shown {
    fn ratio(&self, Ratio { value, low, high, rounds }: Ratio) -> Ratio {
        match self.is_inverse {
            true => Ratio { value: 1.0 / value, low: 1.0 / high, high: 1.0 / low, rounds },
            false => Ratio { value, low, high, rounds },
        }
    }
}

/// A dot: its line, the index of its figure, and the ratio.
struct Dot {
    line: usize,
    shown: usize,
    ratio: Ratio,
}

/// Addition to the title if the run does not count as a result.
fn caveat(results: &Results) -> String {
    match results.quick || results.rounds < MIN_ROUNDS {
        true => format!(" ({} rounds: no result)", results.rounds),
        false => String::new(),
    }
}

type Chart<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

fn plot(
    results: &Results,
    title: &str,
    shown: &[Shown],
) -> Result<String, DrawingAreaErrorKind<std::io::Error>> {
    let contestants: Vec<_> =
        results.contestants.iter().copied().filter(|one| *one != Contestant::Off).collect();
    let mut lines: Vec<&str> = Vec::new();
    let mut dots = Vec::new();
    let mut add = |title, ratio: &dyn Fn(Scenario) -> Option<Ratio>| {
        let ratios = shown.iter().enumerate().filter_map(|(index, one)| {
            Some(Dot { line: lines.len(), shown: index, ratio: one.ratio(ratio(one.scenario)?) })
        });
        let before = dots.len();
        dots.extend(ratios);
        if dots.len() > before {
            lines.push(title);
        }
    };
    for contestant in contestants {
        add(contestant.title(), &|scenario| results.ratio(scenario, contestant, scenario.kind.metric()));
    }
    add(SOURCE, &|scenario| {
        published::ratio(scenario).map(|value| Ratio { value, low: value, high: value, rounds: 1 })
    });
    let bound =
        |ends: &mut dyn Iterator<Item = f64>, first: f64, pick: fn(f64, f64) -> f64| ends.fold(first, pick);
    let low = bound(&mut dots.iter().map(|dot| dot.ratio.low), 0.9, f64::min).max(AXIS.0);
    let high = bound(&mut dots.iter().map(|dot| dot.ratio.high), 1.1, f64::max).min(AXIS.1);

    let mut svg = String::new();
    {
        let height = HEAD_AND_FOOT + LINE_HEIGHT * u32::try_from(lines.len()).unwrap_or(1);
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        area.fill(&WHITE)?;
        draw(
            &area,
            title,
            // Leaves room for the legend on the right.
            (low - 0.02, high + LEGEND * (high - low)),
            &lines,
            shown,
            &dots,
        )?;
        area.present()?;
    }
    Ok(svg)
}

fn draw(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    title: &str,
    (low, high): (f64, f64),
    lines: &[&str],
    shown: &[Shown],
    dots: &[Dot],
) -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
    let count = lines.len() as f64;
    let mut chart: Chart<'_> = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(NAMES_WIDTH)
        // The first line is at the top.
        .build_cartesian_2d(low..high, 0.0..count)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .light_line_style(TRANSPARENT)
        .y_labels(0)
        .x_desc(match shown.iter().any(|one| one.is_inverse) {
            true => "ratio to off, with its 95 % interval; of latency: the ratio of off",
            false => "ratio to off, with its 95 % interval",
        })
        .draw()?;
    // The mesh would draw the names at the borders between the lines.
    for (index, line) in lines.iter().enumerate() {
        let y = count - index as f64 - 0.5;
        let (_, row) = chart.backend_coord(&(low, y));
        area.draw(&Text::new((*line).to_owned(), (16, row - 7), ("sans-serif", 14)))?;
        chart.draw_series([PathElement::new([(low, y - 0.5), (high, y - 0.5)], BLACK.mix(0.15))])?;
    }
    chart.draw_series([PathElement::new([(1.0, 0.0), (1.0, count)], BLACK.stroke_width(1))])?;
    for (index, one) in shown.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let of_it = dots.iter().filter(|dot| dot.shown == index).map(|dot| {
            let shift = SPREAD * (1.0 - 2.0 * (index as f64 + 0.5) / shown.len() as f64);
            (dot, count - dot.line as f64 - 0.5 + shift)
        });
        let of_it: Vec<_> = of_it.collect();
        chart.draw_series(of_it.iter().map(|(Dot { ratio, .. }, y)| {
            let ends = [ratio.low, ratio.high].map(|end| (end.clamp(low, high), *y));
            PathElement::new(ends, colour.stroke_width(2))
        }))?;
        let series = chart.draw_series(of_it.iter().map(|(Dot { ratio, .. }, y)| {
            Circle::new((ratio.value.clamp(low, high), *y), DOT, colour.filled())
        }))?;
        series.label(one.label.clone()).legend(move |(x, y)| Circle::new((x + 8, y), DOT, colour.filled()));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use crate::{report::tests::some_results, results::Sample};

    #[test]
    fn a_plot_names_every_contestant_and_has_a_dot_for_every_ratio() {
        let results = some_results(7, |_, _| 1.0);
        let plots = all(&results).unwrap();
        let names: Vec<_> = plots.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["same-node-udp-latency.svg", "same-node-udp-bandwidth.svg"]);
        let (_, svg) = &plots[1];
        for contestant in &results.contestants[1..] {
            assert!(svg.contains(contestant.title()), "{}", contestant.title());
        }
        assert!(svg.contains(SOURCE) && svg.trim_end().ends_with("</svg>"));
        // A dot for each size of each contestant and of the published ratios, and one in the legend for each size.
        let lines = results.contestants.len() - 1;
        assert_eq!(svg.matches("<circle").count(), 2 * lines + 2 + 2);
    }

    #[test]
    fn the_overview_has_what_says_most_and_less_is_worse() {
        let mut results =
            some_results(7, |_, contestant| if contestant == Contestant::Tcx { 2.0 } else { 1.0 });
        assert!(!has_overview(&results), "a part of it was not measured");
        let measured = results.samples.clone();
        for Shown { scenario, .. } in shown() {
            let of_it = measured.iter().filter(|sample| sample.scenario == measured[0].scenario).cloned();
            results.samples.extend(of_it.map(|sample| {
                let figures = [(scenario.kind.metric(), sample.figures[&Metric::LatencyUs])].into();
                Sample { scenario, figures, ..sample }
            }));
        }
        let plots = all(&results).unwrap();
        assert_eq!(plots[0].0, OVERVIEW);
        assert!(SHOWN.iter().all(|(label, ..)| plots[0].1.contains(label)));
        let latency = Shown { is_inverse: true, ..shown().into_iter().next_back().unwrap() };
        let ratio = latency.ratio(Ratio { value: 2.0, low: 1.25, high: 4.0, rounds: 7 });
        assert_eq!((ratio.value, ratio.low, ratio.high), (0.5, 0.25, 0.8));
        assert!(shown().iter().all(|one| one.is_inverse == (one.scenario.kind == Kind::TcpLatency)));
    }

    #[test]
    fn a_plot_of_few_rounds_says_that_it_is_no_result() {
        let title = |results: &Results| all(results).unwrap()[0].1.contains("no result");
        assert!(title(&some_results(MIN_ROUNDS - 1, |_, _| 1.0)));
        assert!(!title(&some_results(MIN_ROUNDS, |_, _| 1.0)));
        assert!(title(&Results { quick: true, ..some_results(MIN_ROUNDS, |_, _| 1.0) }));
    }

    #[test]
    fn an_outlier_stays_within_the_plot() {
        let results = some_results(6, |_, contestant| if contestant == Contestant::Tcx { 50.0 } else { 1.0 });
        for (_, svg) in all(&results).unwrap() {
            let circles = svg.split("<circle cx=\"").skip(1);
            let at: Vec<i32> =
                circles.map(|circle| circle.split('"').next().unwrap().parse().unwrap()).collect();
            assert!(at.iter().all(|x| (0..=WIDTH as i32).contains(x)), "{at:?}");
        }
    }
}
