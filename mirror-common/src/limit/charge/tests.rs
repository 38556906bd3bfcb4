extern crate std;

use core::time::Duration;
use std::{collections::BTreeMap, vec, vec::Vec};

use proptest::{collection::vec as any_vec, prelude::*};

use super::*;
use crate::limit::TICKS_PER_NS;

const SECOND_NS: u64 = 1_000_000_000;
const BURST: Duration = Duration::from_millis(50);
const LEN: u32 = 1000;

/// The meters of a node, and their limits.
#[derive(Debug, Clone, Default, PartialEq)]
struct Node {
    session_limits: Limits,
    target_limits: Limits,
    namespace_limits: Limits,
    ceiling: Limits,
    share: Limits,
    node_limits: Limits,
    sessions: BTreeMap<u32, Meter>,
    targets: BTreeMap<u32, Meter>,
    namespaces: BTreeMap<u32, Meter>,
    pods: BTreeMap<u32, PodMeter>,
    node: Meter,
}

impl Node {
    /// A node with this rate, shared by `pods` pods.
    fn of(packets_per_second: u64, pods: u32) -> Self {
        let node_limits = Limits::of_rate(packets_per_second, 0, BURST);
        Self { share: node_limits.share(pods), node_limits, ..Self::default() }
    }

    fn is_copied(&mut self, pod: u32, now_ns: u64) -> bool {
        charge(self, Bill { pod: Some(pod), ..BILL }, now_ns).is_ok()
    }

    /// Every meter.
    fn meters(&self) -> impl Iterator<Item = Meter> {
        let pods = self.pods.values().flat_map(|pod| [pod.ceiling, pod.share]);
        let others = [&self.sessions, &self.targets, &self.namespaces].into_iter().flat_map(BTreeMap::values);
        others.copied().chain(pods).chain([self.node])
    }
}

/// A packet without any limits.
const BILL: Bill = Bill { session: None, target: None, namespace: None, pod: None, len: LEN };

impl Meters for Node {
    fn session<R>(&mut self, id: u32, change: impl FnOnce(&Limits, &mut Meter) -> R) -> Option<R> {
        Some(change(&self.session_limits, self.sessions.entry(id).or_default()))
    }

    fn target<R>(&mut self, place: u32, change: impl FnOnce(&Limits, &mut Meter) -> R) -> Option<R> {
        Some(change(&self.target_limits, self.targets.entry(place).or_default()))
    }

    fn has_namespace_rate(&mut self) -> bool {
        self.namespace_limits.has_rate()
    }

    fn namespace<R>(&mut self, index: u32, change: impl FnOnce(&Limits, &mut Meter) -> R) -> Option<R> {
        Some(change(&self.namespace_limits, self.namespaces.entry(index).or_default()))
    }

    fn pod<R>(&mut self, index: u32, change: impl FnOnce([&Limits; 2], &mut PodMeter) -> R) -> Option<R> {
        Some(change([&self.ceiling, &self.share], self.pods.entry(index).or_default()))
    }

    fn has_node_rate(&mut self) -> bool {
        self.node_limits.has_rate()
    }

    fn node<R>(&mut self, change: impl FnOnce(&Limits, &mut Meter) -> R) -> Option<R> {
        Some(change(&self.node_limits, &mut self.node))
    }
}

/// The traffic of pods: the sending pod, and the time since the packet before. Pod 0 floods.
fn traffic(pods: u32) -> impl Strategy<Value = Vec<(u32, u64)>> {
    let pod = prop_oneof![3 => Just(0), 2 => 0..pods];
    any_vec((pod, prop_oneof![20 => 0..20_000_u64, 1 => 0..60_000_000_u64]), 1..600)
}

fn node_and_traffic() -> impl Strategy<Value = (u64, u32, Vec<(u32, u64)>)> {
    (100..200_000_u64, 1..30_u32).prop_flat_map(|(rate, pods)| (Just(rate), Just(pods), traffic(pods)))
}

proptest! {
    /// With many pods and a flood: every packet for which a pod's share has credit is copied, whatever the traffic of
    /// the other pods.
    #[test]
    fn a_pod_within_its_share_is_never_refused((rate, pods, traffic) in node_and_traffic()) {
        let mut node = Node::of(rate, pods);
        let share = node.share;
        // The meters of the shares, as if each pod were alone on the node.
        let mut alone = vec![Meter::default(); pods as usize];
        let mut now = SECOND_NS;
        for (pod, pause) in traffic {
            now += pause;
            let is_within = alone[pod as usize].take(&share, now, LEN).is_ok();
            let is_copied = node.is_copied(pod, now);
            prop_assert!(is_copied || !is_within, "pod {pod} at {now}: {node:?}");
        }
    }

    /// Over any period: at most the rate, a burst, the shares' bursts, and one packet for each of them.
    #[test]
    fn the_nodes_rate_holds((rate, pods, traffic) in node_and_traffic(), from: prop::sample::Index) {
        let mut node = Node::of(rate, pods);
        let mut now = SECOND_NS;
        let mut copied = Vec::new();
        for (pod, pause) in traffic {
            now += pause;
            if node.is_copied(pod, now) {
                copied.push(now);
            }
        }
        let copied = &copied[from.index(copied.len())..];
        let stretch_ns = copied[copied.len() - 1] - copied[0];
        let in_ns = |ns: u64| (ns * TICKS_PER_NS).div_ceil(node.node_limits.ticks_per_packet);
        let burst = in_ns(BURST.as_nanos() as u64);
        let most = in_ns(stretch_ns) + 2 * burst + u64::from(pods) + 1;
        prop_assert!(copied.len() as u64 <= most, "{} of {most}", copied.len());
    }

    /// A refunded charge can be taken again, from the same meters.
    #[test]
    fn what_is_given_back_can_be_charged_again(
        rates in prop::array::uniform5(prop_oneof![Just(0), 1..10_000_u64]), budget in 0..3_u64, pods in 1..5_u32,
        bill in any_bill(),
    ) {
        let mut node = limited(rates, budget, pods);
        let first = charge(&mut node, bill, SECOND_NS);
        let after = node.clone();
        prop_assert!(first.is_ok(), "nothing is used up yet");
        give_back(&mut node, bill, first.unwrap_or_default());
        prop_assert_eq!(node.meters().map(|meter| meter.packets + meter.bytes).sum::<u64>(), 0);
        prop_assert_eq!(charge(&mut node, bill, SECOND_NS), first);
        prop_assert_eq!(node, after);
    }

    /// If any meter refuses, no meter is charged. A copy is charged once to each meter.
    #[test]
    fn what_is_refused_costs_nothing(
        rates in prop::array::uniform5(prop_oneof![Just(0), 1..1_000_u64]), budget in 0..20_u64, pods in 1..5_u32,
        traffic in any_vec((any_bill(), 0..5_000_000_u64), 1..200),
    ) {
        let mut node = limited(rates, budget, pods);
        let (has_node, has_namespace) = (node.node_limits.has_rate(), node.namespace_limits.has_rate());
        let mut now = SECOND_NS;
        let mut expected = [0; 5];
        for (bill, pause) in traffic {
            now += pause;
            if charge(&mut node, bill, now).is_ok() {
                let is_pod = bill.pod.is_some();
                let is_charged = [
                    bill.session.is_some(),
                    bill.target.is_some(),
                    is_pod,
                    is_pod && has_namespace && bill.namespace.is_some(),
                    is_pod && has_node,
                ];
                expected.iter_mut().zip(is_charged).for_each(|(sum, is)| *sum += u64::from(is));
            }
            let sum = |meters: &BTreeMap<u32, Meter>| meters.values().map(|meter| meter.packets).sum::<u64>();
            let pods = node.pods.values().map(|pod| pod.ceiling.packets).sum();
            let counted =
                [sum(&node.sessions), sum(&node.targets), pods, sum(&node.namespaces), node.node.packets];
            prop_assert_eq!(counted, expected);
        }
    }

    /// The copies of all sessions of a target are at most its rate, a burst and a packet; the same holds for the pods
    /// of a namespace.
    #[test]
    fn the_rates_of_a_target_and_of_a_namespace_hold(
        rate in 100..200_000_u64, is_target: bool, traffic in traffic(5), from: prop::sample::Index,
    ) {
        let limits = Limits::of_rate(rate, 0, BURST);
        let mut node = match is_target {
            true => Node { target_limits: limits, ..Node::default() },
            false => Node { namespace_limits: limits, ..Node::default() },
        };
        let mut now = SECOND_NS;
        let mut copied = Vec::new();
        for (pod, pause) in traffic {
            now += pause;
            let bill = match is_target {
                true => Bill { session: Some(pod), target: Some(7), ..BILL },
                false => Bill { pod: Some(pod), namespace: Some(7), ..BILL },
            };
            if charge(&mut node, bill, now).is_ok() {
                copied.push(now);
            }
        }
        let copied = &copied[from.index(copied.len())..];
        let stretch_ns = copied[copied.len() - 1] - copied[0];
        let in_ns = |ns: u64| (ns * TICKS_PER_NS).div_ceil(limits.ticks_per_packet);
        let most = in_ns(stretch_ns) + in_ns(BURST.as_nanos() as u64) + 1;
        prop_assert!(copied.len() as u64 <= most, "{} of {most}", copied.len());
    }
}

/// A node with limits of each kind, some of them unlimited: of sessions, targets, namespaces, pods and the node.
fn limited(rates: [u64; 5], budget: u64, pods: u32) -> Node {
    let [session, target_limits, namespace_limits, ceiling, node_limits] =
        rates.map(|rate| Limits::of_rate(rate, rate * 8_000, BURST));
    Node {
        session_limits: Limits { packets: budget, ..session },
        target_limits,
        namespace_limits,
        ceiling,
        share: node_limits.share(pods),
        node_limits,
        ..Node::default()
    }
}

fn any_bill() -> impl Strategy<Value = Bill> {
    let some = || prop::option::of(0..2_u32);
    (some(), some(), some(), some(), 14..65_536_u32).prop_map(|(session, target, namespace, pod, len)| Bill {
        session,
        target,
        namespace,
        pod,
        len,
    })
}

/// The copies of each pod during a second in which pod 0 floods and the others send as much as their share allows.
fn flooded(pods: u32, others_send: bool) -> Vec<u64> {
    let mut node = Node::of(10_000, pods);
    let share_ns = SECOND_NS * u64::from(pods) / 10_000;
    let mut copied = vec![0; pods as usize];
    for now in (SECOND_NS..2 * SECOND_NS).step_by(10_000) {
        copied[0] += u64::from(node.is_copied(0, now));
        for pod in 1..pods {
            if others_send && now % share_ns < 10_000 {
                copied[pod as usize] += u64::from(node.is_copied(pod, now));
            }
        }
    }
    copied
}

#[test]
fn one_pod_alone_gets_the_whole_rate() {
    let [flood, others @ ..] = &flooded(10, false)[..] else { unreachable!() };
    assert!((10_000..=11_100).contains(flood), "{flood}");
    assert_eq!(others, [0; 9]);
}

#[test]
fn a_flood_leaves_the_others_their_shares() {
    let [flood, others @ ..] = &flooded(10, true)[..] else { unreachable!() };
    assert!((1_000..=2_100).contains(flood), "its own share, and both bursts: {flood}");
    assert_eq!(others, [1_000; 9], "all that they sent");
}

#[test]
fn a_ceiling_holds_for_a_pod_though_the_node_has_room() {
    let mut node = Node { ceiling: Limits::of_rate(100, 0, BURST), ..Node::of(10_000, 2) };
    let copied = (0..100_000).filter(|packet| node.is_copied(0, SECOND_NS + packet * 10_000)).count();
    assert!((100..=106).contains(&copied), "a second at 100 a second, and a burst: {copied}");
    assert!(node.is_copied(1, 2 * SECOND_NS), "another pod has its own");
}

#[test]
fn a_session_that_has_ended_says_so_though_its_pod_is_limited_too() {
    let mut node = Node { session_limits: Limits { packets: 1, ..Limits::default() }, ..Node::of(1, 1) };
    let bill = Bill { session: Some(0), pod: Some(0), ..BILL };
    assert!(charge(&mut node, bill, SECOND_NS).is_ok());
    assert_eq!(charge(&mut node, bill, SECOND_NS), Err(Verdict::Ended));
    assert_eq!(charge(&mut node, Bill { session: None, ..bill }, SECOND_NS), Err(Verdict::Limited));
}

#[test]
fn a_meter_that_is_not_there_fails() {
    /// Meters without any maps.
    struct Nothing;
    impl Meters for Nothing {
        fn session<R>(&mut self, _: u32, _: impl FnOnce(&Limits, &mut Meter) -> R) -> Option<R> {
            None
        }

        fn target<R>(&mut self, _: u32, _: impl FnOnce(&Limits, &mut Meter) -> R) -> Option<R> {
            None
        }

        fn has_namespace_rate(&mut self) -> bool {
            true
        }

        fn namespace<R>(&mut self, _: u32, _: impl FnOnce(&Limits, &mut Meter) -> R) -> Option<R> {
            None
        }

        fn pod<R>(&mut self, _: u32, _: impl FnOnce([&Limits; 2], &mut PodMeter) -> R) -> Option<R> {
            None
        }

        fn has_node_rate(&mut self) -> bool {
            true
        }

        fn node<R>(&mut self, _: impl FnOnce(&Limits, &mut Meter) -> R) -> Option<R> {
            None
        }
    }
    for bill in
        [Bill { session: Some(0), ..BILL }, Bill { target: Some(0), ..BILL }, Bill { pod: Some(0), ..BILL }]
    {
        assert_eq!(charge(&mut Nothing, bill, 1), Err(Verdict::Failed));
    }
    assert_eq!(charge(&mut Nothing, BILL, 1), Ok(Paid::NOTHING));
}
