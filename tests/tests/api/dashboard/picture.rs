//! Draws panels as Grafana does: a line for each series.
//!
//! As SVG with the viewer's fonts, as the plots of `bench traffic`.

use plotters::{coord::Shift, prelude::*};

const COLUMNS: u32 = 3;
/// Of a panel, in pixels.
const WIDTH: u32 = 420;
const HEIGHT: u32 = 210;
/// The most names in a legend: those of the series with the largest values.
const NAMED: usize = 5;

/// A panel: its title, its unit as Grafana names it, and the points of each series by its name.
pub(super) struct Panel<'q> {
    pub(super) title: &'q str,
    pub(super) unit: &'q str,
    pub(super) series: Vec<(String, Vec<(f64, f64)>)>,
}

/// Returns the picture of all panels.
pub(super) fn draw(panels: &[Panel<'_>]) -> String {
    let rows = u32::try_from(panels.len()).unwrap().div_ceil(COLUMNS);
    let mut svg = String::new();
    {
        let size = (COLUMNS * WIDTH, rows * HEIGHT);
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        area.fill(&WHITE).unwrap();
        let places = area.split_evenly((rows as usize, COLUMNS as usize));
        places.iter().zip(panels).for_each(|(place, panel)| draw_panel(place, panel));
        area.present().unwrap();
    }
    svg
}

fn draw_panel(place: &DrawingArea<SVGBackend<'_>, Shift>, panel: &Panel<'_>) {
    let largest = |points: &[(f64, f64)]| points.iter().map(|(_, y)| *y).fold(0.0, f64::max);
    let mut series: Vec<_> = panel.series.iter().collect();
    series.sort_by(|(_, one), (_, other)| largest(other).total_cmp(&largest(one)));
    let top = series.first().map(|(_, points)| largest(points)).filter(|top| *top > 0.0).unwrap_or(1.0);
    let last = series.iter().flat_map(|(_, points)| points).map(|(x, _)| *x).fold(1.0, f64::max);
    let mut chart = ChartBuilder::on(place)
        .caption(panel.title, ("sans-serif", 15))
        .margin(8)
        .y_label_area_size(60)
        // Leaves room for the legend above the lines.
        .build_cartesian_2d(0.0..last, 0.0..1.6 * top)
        .unwrap();
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .x_labels(0)
        .y_labels(5)
        .y_label_formatter(&|value| with_unit(*value, panel.unit))
        .draw()
        .unwrap();
    for (index, (name, points)) in series.into_iter().enumerate() {
        let style = Palette99::pick(index).stroke_width(2);
        let drawn = chart.draw_series([PathElement::new(points.clone(), style)]).unwrap();
        if index < NAMED {
            drawn.label(name).legend(move |(x, y)| PathElement::new([(x, y), (x + 12, y)], style));
        }
    }
    let mut names = chart.configure_series_labels();
    names.position(SeriesLabelPosition::UpperLeft).margin(2).legend_area_size(16);
    names.background_style(WHITE.mix(0.7)).label_font(("sans-serif", 11)).draw().unwrap();
}

/// A value in a unit of Grafana.
fn with_unit(value: f64, unit: &str) -> String {
    let (value, unit) = match unit {
        "percentunit" => (100.0 * value, "%"),
        "bps" => (value, "bit/s"),
        "bytes" => (value, "B"),
        "pps" | "reqps" => (value, "/s"),
        "s" => (value, "s"),
        _ => (value, ""),
    };
    let (value, prefix) = match value {
        large if large >= 1e6 => (large / 1e6, "M"),
        medium if medium >= 1e3 => (medium / 1e3, "k"),
        small => (small, ""),
    };
    format!("{value:.1} {prefix}{unit}")
}
