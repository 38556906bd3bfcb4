//! What is measured: contestants, scenarios, and the order of the turns.

mod contestant;
mod kind;

use std::fmt;

use mirror_tests::random::Random;
use serde::{Deserialize, Serialize};

pub use self::{
    contestant::Contestant,
    kind::{Kind, Metric},
};

/// The path of the traffic. One end is the mirrored pod: the client, or with a node port the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// To a pod of the same node.
    SameNode,
    /// The same through a second NIC of both, a macvlan.
    SameNodeMacvlan,
    /// To a pod of another node, which is a second network namespace.
    TwoNodes,
    /// The same, with the nodes connected by VXLAN.
    TwoNodesVxlan,
    /// To its own node.
    OwnNode,
    /// To the other node.
    OtherNode,
    /// To a pod of the same node by a ClusterIP, which nftables translates.
    ClusterIp,
    /// From a node to its own node port, which nftables translates to a pod of this node.
    NodePortLocal,
    /// From a node to its own node port, which nftables translates to a pod of the other node.
    NodePortRemote,
}

impl Way {
    /// All, in the order of the report.
    pub const ALL: [Self; 9] = [
        Self::SameNode,
        Self::SameNodeMacvlan,
        Self::TwoNodes,
        Self::TwoNodesVxlan,
        Self::OwnNode,
        Self::OtherNode,
        Self::ClusterIp,
        Self::NodePortLocal,
        Self::NodePortRemote,
    ];

    /// The name in the command line, in the files and in the published ratios.
    pub const fn name(self) -> &'static str {
        match self {
            Self::SameNode => "same-node",
            Self::SameNodeMacvlan => "same-node-macvlan",
            Self::TwoNodes => "two-nodes",
            Self::TwoNodesVxlan => "two-nodes-vxlan",
            Self::OwnNode => "own-node",
            Self::OtherNode => "other-node",
            Self::ClusterIp => "cluster-ip",
            Self::NodePortLocal => "node-port-local",
            Self::NodePortRemote => "node-port-remote",
        }
    }

    /// The name in the report.
    pub const fn title(self) -> &'static str {
        match self {
            Self::SameNode => "Pod to pod on one node",
            Self::SameNodeMacvlan => "Pod to pod on one node by macvlan NICs",
            Self::TwoNodes => "Pod to pod on two nodes",
            Self::TwoNodesVxlan => "Pod to pod on two nodes, VXLAN between them",
            Self::OwnNode => "Pod to its own node",
            Self::OtherNode => "Pod to the other node",
            Self::ClusterIp => "Pod to a ClusterIP",
            Self::NodePortLocal => "Node to a node port, pod on this node",
            Self::NodePortRemote => "Node to a node port, pod on the other node",
        }
    }

    /// Whether the traffic passes from node to node.
    pub const fn crosses(self) -> bool {
        match self {
            Self::TwoNodes | Self::TwoNodesVxlan | Self::OtherNode | Self::NodePortRemote => true,
            Self::SameNode
            | Self::SameNodeMacvlan
            | Self::OwnNode
            | Self::ClusterIp
            | Self::NodePortLocal => false,
        }
    }
}

/// One measurement, which is made with every contestant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Scenario {
    /// The way of the traffic.
    pub way: Way,
    /// What is measured.
    pub kind: Kind,
    /// Bytes of a message; for Redis, bytes of a value; for HTTP, the number of connections; for ping, µs between two
    /// requests.
    pub parameter: u32,
}

/// The form of `--only`: `same-node/udp-bandwidth/64`.
impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.way.name(), self.kind.name(), self.parameter)
    }
}

/// The sizes of the published tables, and 1 byte.
const SIZES: [u32; 6] = [1, 64, 128, 512, 1024, 4096];
/// Sizes that are measured with all contestants.
const FULL_SIZES: [u32; 4] = [64, 1024, 4096, BULK];
/// The sizes for the other ways.
const FEW_SIZES: [u32; 2] = [64, 4096];
/// A message size of programs that send bulk data.
const BULK: u32 = 128 * 1024;
/// Connections of wrk, as in the published tables.
const CONNECTIONS: [u32; 2] = [10, 100];
/// Bytes of a value of Redis.
const VALUE: u32 = 64;
/// µs between two pings. Without a pause, a request follows its answer.
const PAUSES_US: [u32; 5] = [0, 1_000, 10_000, 100_000, 1_000_000];
/// From this pause on, a sample has few pings and few contestants: its duration does not depend on them.
const LONG_PAUSE_US: u32 = 100_000;
/// The minimum and maximum number of pings of a sample.
const PINGS: (u64, u64) = (20, 1000);
/// The minimum number of pings with long pauses, and the time in µs in which more are sent.
const FEW_PINGS: (u64, u64) = (3, 500_000);
/// iperf3 writes its own header into a datagram.
const LEAST_DATAGRAM: u32 = 16;
/// sockperf writes its own header into a message.
const LEAST_SOCKPERF: u32 = 64;

impl Scenario {
    /// All scenarios, in the order of the report.
    pub fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for way in Way::ALL {
            for kind in Kind::ALL {
                let sizes: &[u32] = match (way, kind) {
                    (Way::SameNode, Kind::TcpSockperf | Kind::UdpSockperf) => &[LEAST_SOCKPERF],
                    (
                        Way::SameNode | Way::ClusterIp | Way::NodePortLocal | Way::NodePortRemote,
                        Kind::Http,
                    ) => &CONNECTIONS,
                    (Way::SameNode, Kind::RedisGet | Kind::RedisSet) => &[VALUE],
                    (Way::SameNode, Kind::Ping) => &PAUSES_US,
                    (
                        _,
                        Kind::TcpSockperf
                        | Kind::UdpSockperf
                        | Kind::Http
                        | Kind::RedisGet
                        | Kind::RedisSet
                        | Kind::Ping,
                    ) => &[],
                    (Way::SameNode, _) => &SIZES,
                    _ => &FEW_SIZES,
                };
                let bulk = (way == Way::SameNode && kind == Kind::TcpBandwidth).then_some(BULK);
                all.extend(
                    sizes
                        .iter()
                        .copied()
                        .chain(bulk)
                        .map(|parameter| Self { way, kind, parameter }.possible()),
                );
            }
        }
        all
    }

    /// Its column in the report.
    pub fn column(self) -> String {
        match (self.kind, self.parameter) {
            (Kind::Http, connections) => format!("{connections} connections"),
            (Kind::Ping, 0) => "without a pause".to_owned(),
            (Kind::Ping, pause) => format!("each {} ms", f64::from(pause) / 1000.0),
            (_, bytes) => format!("{bytes} B"),
        }
    }

    /// The scenario with at least the smallest message that its tool can send.
    fn possible(self) -> Self {
        match self.kind {
            Kind::UdpBandwidth => Self { parameter: self.parameter.max(LEAST_DATAGRAM), ..self },
            _ => self,
        }
    }

    /// Whether so little is sent that the CPU time is mostly that of other processes.
    pub const fn is_mostly_idle(self) -> bool {
        matches!(self.kind, Kind::Ping) && self.parameter >= LONG_PAUSE_US
    }

    /// The number of pings of a sample with this duration.
    pub fn pings(self, sample_us: u64) -> u64 {
        let in_time = |us: u64| us / u64::from(self.parameter.max(1));
        match self.is_mostly_idle() {
            true => in_time(FEW_PINGS.1).max(FEW_PINGS.0),
            false => in_time(sample_us).clamp(PINGS.0, PINGS.1),
        }
    }

    /// The scenarios whose names contain one of these texts; all, if there is no text. An error names a text that no
    /// scenario contains.
    pub fn chosen(only: &[String]) -> Result<Vec<Self>, String> {
        let mut all = Self::all();
        for text in only {
            if !all.iter().any(|scenario| scenario.to_string().contains(text)) {
                let names: Vec<String> = all.iter().map(Self::to_string).collect();
                return Err(format!(
                    "--only {text}: no scenario has this in its name; there are {}",
                    names.join(" ")
                ));
            }
        }
        all.retain(|scenario| only.is_empty() || only.iter().any(|text| scenario.to_string().contains(text)));
        Ok(all)
    }

    /// The contestants: all where a table is most informative, and few elsewhere, so that there is time for more
    /// rounds. A sample takes three seconds with sockperf, one with wrk, and two with a ping per second.
    pub fn contestants(self) -> &'static [Contestant] {
        match (self.way, self.kind) {
            (Way::SameNodeMacvlan, _) => &Contestant::INSIDE,
            (_, Kind::TcpSockperf | Kind::UdpSockperf) => &Contestant::THREE,
            (_, Kind::Http | Kind::RedisGet | Kind::RedisSet) => &Contestant::FEW,
            (_, Kind::Ping) if self.parameter > LONG_PAUSE_US => &Contestant::THREE,
            (_, Kind::Ping) if self.is_mostly_idle() => &Contestant::FEW,
            (Way::SameNode, Kind::Ping) => &Contestant::ALL,
            (Way::SameNode, _) if FULL_SIZES.contains(&self.parameter) => &Contestant::ALL,
            _ => &Contestant::FEW,
        }
    }
}

/// One sample: a scenario with a contestant.
pub type Turn = (Scenario, Contestant);

/// The turns of a round: the scenarios in a random order, and within each the contestants in a random order. So all
/// samples of a scenario are close together in time.
pub fn round(scenarios: &[Scenario], present: &[Contestant], random: &mut Random) -> Vec<Turn> {
    let mut scenarios = scenarios.to_vec();
    random.shuffle(&mut scenarios);
    let mut turns = Vec::new();
    for scenario in scenarios {
        let mut contestants = scenario.contestants().to_vec();
        contestants.retain(|contestant| present.contains(contestant));
        random.shuffle(&mut contestants);
        turns.extend(contestants.into_iter().map(|contestant| (scenario, contestant)));
    }
    turns
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::collections::BTreeSet;

    use proptest::{collection::vec, prelude::*, sample::select};

    use super::*;

    #[test]
    fn every_scenario_has_a_name_of_its_own_and_a_baseline() {
        let all = Scenario::all();
        let names: BTreeSet<String> = all.iter().map(Scenario::to_string).collect();
        assert_eq!(names.len(), all.len());
        assert!(
            names.contains("same-node/udp-bandwidth/64") && names.contains("same-node/tcp-bandwidth/131072")
        );
        assert!(all.iter().all(|scenario| scenario.contestants().contains(&Contestant::Off)));
    }

    #[test]
    fn a_part_of_the_name_chooses() {
        let chosen =
            |only: &[&str]| Scenario::chosen(&only.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>());
        assert_eq!(chosen(&[]).unwrap(), Scenario::all());
        let two = chosen(&["same-node/tcp-latency/64", "own-node/udp-bandwidth/4096"]).unwrap();
        assert_eq!(
            two.iter().map(Scenario::to_string).collect::<Vec<_>>(),
            ["same-node/tcp-latency/64", "own-node/udp-bandwidth/4096"]
        );
        let why = chosen(&["udp-bandwidth", "upd"]).unwrap_err();
        assert!(why.starts_with("--only upd: ") && why.contains("same-node/udp-bandwidth/64"), "{why}");
    }

    #[test]
    fn long_pauses_have_few_pings() {
        let pings = |pause, sample_us| {
            Scenario { way: Way::SameNode, kind: Kind::Ping, parameter: pause }.pings(sample_us)
        };
        assert_eq!(PAUSES_US.map(|pause| pings(pause, 100_000)), [1000, 100, 20, 5, 3]);
        assert_eq!(
            [pings(1_000, 10_000), pings(10_000, 1_000_000), pings(100_000, 10_000_000)],
            [20, 100, 5]
        );
    }

    #[test]
    fn a_whole_run_has_enough_rounds() {
        // As in a run on a machine with 2 CPUs: 33 ms more than the configured 100 ms of a sample.
        let sample_ms = |scenario: &Scenario| match scenario.kind {
            Kind::TcpSockperf | Kind::UdpSockperf => 3_000,
            Kind::Http => 1_100,
            Kind::Ping if scenario.is_mostly_idle() => {
                scenario.pings(100_000).saturating_sub(1) * u64::from(scenario.parameter) / 1000 + 10
            }
            _ => 133,
        };
        let round = Scenario::all().iter().map(|s| sample_ms(s) * s.contestants().len() as u64).sum::<u64>();
        let of_40_minutes = 40 * 60 * 1000 / round;
        assert!(of_40_minutes >= 10, "{of_40_minutes} rounds, each of {round} ms");
    }

    proptest! {
        #[test]
        fn a_round_has_each_turn_once_and_a_seed_repeats_it(
            seed: u64,
            scenarios in vec(select(Scenario::all()), 1..6),
        ) {
            let scenarios: Vec<_> = BTreeSet::from_iter(scenarios).into_iter().collect();
            let turns = round(&scenarios, &Contestant::ALL, &mut Random::new(seed));
            let distinct: BTreeSet<_> = turns.iter().copied().collect();
            let expected = scenarios.iter().flat_map(|scenario| {
                scenario.contestants().iter().map(|contestant| (*scenario, *contestant))
            });
            prop_assert_eq!(&distinct, &expected.collect::<BTreeSet<_>>());
            prop_assert_eq!(distinct.len(), turns.len());
            prop_assert_eq!(&turns, &round(&scenarios, &Contestant::ALL, &mut Random::new(seed)));
            // The compared samples are adjacent.
            let mut blocks: Vec<_> = turns.iter().map(|(scenario, _)| *scenario).collect();
            blocks.dedup();
            prop_assert_eq!(blocks.len(), scenarios.len());
        }

        #[test]
        fn only_those_that_are_there_take_part(seed: u64) {
            let present = [Contestant::Off, Contestant::Mirred];
            let turns = round(&Scenario::all(), &present, &mut Random::new(seed));
            prop_assert!(turns.iter().all(|(_, contestant)| present.contains(contestant)));
        }

        /// 500 rounds: the chance that a contestant never has the first turn is below 10^-12.
        #[test]
        fn no_contestant_has_the_first_turn_always(seed: u64) {
            let mut random = Random::new(seed);
            let scenario = Scenario::all()[0];
            let first: BTreeSet<_> =
                (0..500).map(|_| round(&[scenario], &Contestant::ALL, &mut random)[0].1).collect();
            prop_assert_eq!(first, scenario.contestants().iter().copied().collect::<BTreeSet<_>>());
        }
    }
}
