//! Ratios that others have published, from `published.csv`, which names their sources.

use crate::plan::{Kind, Scenario, Way};

/// The source, as named in the report.
pub const SOURCE: &str = "published: Kube-OVN";

const TABLE: &str = include_str!("../published.csv");

/// The published ratio of a mirror to none; `None` if there is none.
pub fn ratio(scenario: Scenario) -> Option<f64> {
    lines().find_map(|(way, kind, parameter, ratio)| {
        let is_it =
            way == scenario.way.name() && kind == scenario.kind.name() && parameter == scenario.parameter;
        is_it.then_some(ratio)
    })
}

/// Whether there is a published ratio for any size.
pub fn has(way: Way, kind: Kind) -> bool {
    lines().any(|(other, what, ..)| other == way.name() && what == kind.name())
}

/// Way, kind, parameter, ratio.
fn lines() -> impl Iterator<Item = (&'static str, &'static str, u32, f64)> {
    TABLE.lines().filter_map(|line| {
        let mut cells = line.split(',');
        let (way, kind) = (cells.next()?, cells.next()?);
        Some((way, kind, cells.next()?.parse().ok()?, cells.next()?.parse().ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_the_table_is_of_a_way_and_a_kind() {
        let body = TABLE.lines().filter(|line| !line.starts_with('#') && !line.starts_with("way"));
        assert_eq!(body.count(), lines().count());
        for (way, kind, parameter, ratio) in lines() {
            assert!(Way::ALL.iter().any(|known| known.name() == way), "{way}");
            assert!(Kind::ALL.iter().any(|known| known.name() == kind), "{kind}");
            assert!(parameter >= 10 && (0.1..10.0).contains(&ratio), "{way} {kind} {parameter} {ratio}");
        }
    }

    #[test]
    fn ratios_stand_beside_the_same_scenario() {
        let of = |kind, parameter| ratio(Scenario { way: Way::SameNode, kind, parameter });
        assert_eq!(of(Kind::TcpBandwidth, 4096), Some(0.90));
        assert_eq!(of(Kind::UdpBandwidth, 4096), Some(0.62));
        assert_eq!(of(Kind::TcpBandwidth, 131_072), None);
        assert!(has(Way::ClusterIp, Kind::TcpLatency) && !has(Way::SameNode, Kind::TcpSockperf));
    }
}
