//! `kubectl mirror top`: the present rates of the tapped NICs and of their copies, as the nodes measure them.

use std::time::Duration;

use mirror_api::packets::PodReport;
use mirror_core::{
    settings::show_kubernetes_duration,
    status::{NicReport, columns},
};
use tokio::time::{Instant, sleep_until};

use crate::{
    cli::TopArgs,
    cluster::Cluster,
    reports::{Reports, UNKNOWN, nics, place},
    screen::{Screen, object},
};

/// The time over which nodes measure.
const PACE: Duration = Duration::from_secs(2);
/// Lower rates are shown as `<0.1`.
const LEAST: f64 = 0.1;

/// Shows the rates, once or until Ctrl-C.
pub(crate) async fn top(args: TopArgs, cluster: &Cluster) -> anyhow::Result<()> {
    tokio::select! {
        outcome = show(&args, cluster) => outcome,
        _ = tokio::signal::ctrl_c() => Ok(()),
    }
}

async fn show(args: &TopArgs, cluster: &Cluster) -> anyhow::Result<()> {
    let scope = cluster.scope(args.all_namespaces);
    let mut screen = Screen::new(args.watch, args.output.as_ref(), scope);
    let mut told = Vec::new();
    loop {
        let begun = Instant::now();
        let interval = [("interval", show_kubernetes_duration(PACE))];
        let reports = Reports::get(cluster, scope, "podreports", &interval).await?;
        let text = match &args.output {
            None => table(&reports.pods()?, args.rows),
            Some(output) => object(&reports.object, output)?,
        };
        screen.notes = reports.warnings.iter().map(|warning| format!("{warning}\n")).collect();
        screen.show(&text)?;
        // A redrawn screen has the warnings. Otherwise earlier ones are still visible.
        if !screen.is_redrawn && reports.warnings != told {
            reports.warn();
        }
        if !args.watch {
            return Ok(());
        }
        told = reports.warnings;
        // If there is nothing to measure, the answer comes at once.
        sleep_until(begun + PACE).await;
    }
}

/// The table for people: the NICs ordered by bytes per second, those without rates last, and at most `most` of them.
/// Empty without any.
fn table(pods: &[PodReport], most: usize) -> String {
    let mut nics = nics(pods);
    if nics.is_empty() {
        return String::new();
    }
    let bytes = |nic: &NicReport| nic.rates.map_or(-1.0, |of| of.ingress.bytes + of.egress.bytes);
    // The sort is stable, so rows with equal rates keep their order.
    nics.sort_by(|(_, one), (_, other)| bytes(other).total_cmp(&bytes(one)));
    let head = "NAMESPACE POD NIC NODE INGRESS/S BYTES/S EGRESS/S BYTES/S COPIED/S BYTES/S LOST/S";
    let mut rows = vec![head.split(' ').map(str::to_owned).collect::<Vec<_>>()];
    for &(pod, nic) in nics.iter().take(most) {
        let mut row = place((pod, nic));
        match nic.rates {
            None => row.extend([UNKNOWN; 7].map(str::to_owned)),
            Some(of) => {
                let both = [of.ingress, of.egress, of.copied].map(|of| [of.packets, of.bytes]);
                row.extend(both.as_flattened().iter().chain([&of.lost.packets]).map(|rate| short(*rate)));
            }
        }
        rows.push(row);
    }
    let mut text = columns(&rows);
    if nics.len() > most {
        text += &format!("{most} of {} NICs are shown, those with the most traffic\n", nics.len());
    }
    text
}

/// A rate with three digits at most, and k, M, G for thousands, millions and so on.
fn short(rate: f64) -> String {
    if rate == 0.0 {
        return "0".to_owned();
    }
    if rate < LEAST {
        return format!("<{LEAST}");
    }
    let (mut rate, mut unit) = (rate, "");
    for next in ["k", "M", "G", "T", "P", "E"] {
        if rate < 999.5 {
            break;
        }
        (rate, unit) = (rate / 1000.0, next);
    }
    let decimals = usize::from(rate < 9.95 || (rate < 99.95 && !unit.is_empty()));
    format!("{rate:.decimals$}{unit}")
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use mirror_core::status::{PodMetadata, Rates, Traffic};
    use proptest::prelude::*;

    use super::*;

    fn pod(name: &str, rates: Option<[[f64; 2]; 4]>) -> PodReport {
        let rates = rates.map(|rates| {
            let [ingress, egress, copied, lost] = rates.map(|[packets, bytes]| Traffic { packets, bytes });
            Rates { ingress, egress, copied, lost }
        });
        let metadata = PodMetadata { namespace: "shop".to_owned(), name: name.to_owned() };
        let nic = NicReport { name: "eth0".to_owned(), rates, ..NicReport::default() };
        PodReport { metadata, node: "a".to_owned(), nics: vec![nic], ..PodReport::default() }
    }

    #[test]
    fn the_busiest_nic_comes_first() {
        let busy = [[1000.0, 1e6], [10.0, 1000.0], [1500.0, 1.5e6], [500.0, 5e5]];
        let pods = [pod("idle", Some([[0.0; 2]; 4])), pod("new", None), pod("web", Some(busy))];
        assert_eq!(
            table(&pods, 3),
            "NAMESPACE  POD   NIC   NODE  INGRESS/S  BYTES/S    EGRESS/S   BYTES/S    COPIED/S   BYTES/S    LOST/S\n\
             shop       web   eth0  a     1.0k       1.0M       10         1.0k       1.5k       1.5M       500\n\
             shop       idle  eth0  a     0          0          0          0          0          0          0\n\
             shop       new   eth0  a     <unknown>  <unknown>  <unknown>  <unknown>  <unknown>  <unknown>  <unknown>\n"
        );
        let one = table(&pods, 1);
        assert!(
            one.lines().count() == 3 && one.ends_with("1 of 3 NICs are shown, those with the most traffic\n"),
            "{one}"
        );
        assert_eq!(table(&[], 3), "");
    }

    #[test]
    fn a_rate_is_short() {
        for (rate, text) in [
            (0.0, "0"),
            (0.01, "<0.1"),
            (0.5, "0.5"),
            (9.94, "9.9"),
            (9.96, "10"),
            (999.4, "999"),
            (999.6, "1.0k"),
            (12_345.0, "12.3k"),
            (123_456.0, "123k"),
            (999_600.0, "1.0M"),
            (1.25e9, "1.2G"),
        ] {
            assert_eq!(short(rate), text, "{rate}");
        }
    }

    proptest! {
        #[test]
        fn a_short_rate_is_near_the_rate(rate in LEAST..1e18) {
            let text = short(rate);
            let digits = text.trim_end_matches(char::is_alphabetic);
            let unit = text.strip_prefix(digits).unwrap();
            let power = ["", "k", "M", "G", "T", "P", "E"].iter().position(|of| *of == unit).unwrap();
            let read = digits.parse::<f64>().unwrap() * 1000_f64.powi(i32::try_from(power).unwrap());
            prop_assert!(text.len() <= 5 && (read - rate).abs() <= (0.05 * rate).max(0.5) * 1.01, "{rate} {text}");
        }
    }
}
