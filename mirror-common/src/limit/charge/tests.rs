extern crate std;

use core::{cell::RefCell, time::Duration};
use std::{collections::BTreeMap, vec, vec::Vec};

use proptest::{collection::vec as any_vec, prelude::*};

use super::*;
use crate::{
    abi::{MAX_SESSIONS, MAX_TAPS, SETTINGS_PLACES, TARGET_PLACES},
    limit::{LIMITS_LEN, METERS_LEN, TICKS_PER_NS},
};

const SECOND_NS: u64 = 1_000_000_000;
const BURST: Duration = Duration::from_millis(50);
const LEN: u32 = 1000;

/// The meters of a node, and the limits of each level.
#[derive(Debug, Clone, Default, PartialEq)]
struct Node {
    limits: [Limits; Level::ALL.len()],
    meters: RefCell<BTreeMap<u32, Meter>>,
}

impl Node {
    /// A node with this rate, shared by `pods` pods.
    fn of(packets_per_second: u64, pods: u32) -> Self {
        let rate = Limits::of_rate(packets_per_second, 0, BURST);
        Self::default().with(Level::Node, rate).with(Level::Share, rate.share(pods))
    }

    /// The node with these limits of a level.
    fn with(mut self, level: Level, limits: Limits) -> Self {
        self.limits[level as usize] = limits;
        self
    }

    fn is_copied(&self, pod: u32, now_ns: u64) -> bool {
        self.charge(Bill { pod: Some(pod), ..BILL }, now_ns).is_ok()
    }

    /// Charges a copy, and refunds the charges if it is refused, as `decide` does.
    fn charge(&self, bill: Bill, now_ns: u64) -> Result<Paid, Verdict> {
        let mut paid = Paid::NOTHING;
        let charged = charge(self, bill, now_ns, &mut paid);
        if charged.is_err() {
            give_back(self, bill, paid);
        }
        charged.map(|()| paid)
    }

    /// The packets that the meters of each level have counted.
    fn packets(&self) -> [u64; Level::ALL.len()] {
        let mut packets = [0; Level::ALL.len()];
        for (index, meter) in self.meters.borrow().iter() {
            let level = Level::ALL.iter().rposition(|level| *index >= level.meter(0));
            packets[level.unwrap_or_default()] += meter.packets;
        }
        packets
    }
}

/// A packet without any limits.
const BILL: Bill = Bill { session: None, target: None, pod: None, namespace: None, len: LEN };

impl Meters for Node {
    fn limits(&self, index: u32) -> Option<&Limits> {
        let level = Level::ALL.iter().rposition(|level| index >= level.limits(0))?;
        Some(&self.limits[level])
    }

    fn meter<R>(
        &self,
        index: u32,
        share: Option<(&Limits, u32)>,
        change: impl FnOnce(&mut Meter, Option<(&Limits, &mut Meter)>) -> R,
    ) -> Option<R> {
        let mut meters = self.meters.borrow_mut();
        let mut of = |index: u32| *meters.entry(index).or_default();
        let (mut own, mut of_share) = (of(index), share.map(|(limits, index)| (limits, of(index))));
        let changed = change(&mut own, of_share.as_mut().map(|(limits, meter)| (*limits, meter)));
        meters.insert(index, own);
        meters.extend(share.zip(of_share).map(|((_, index), (_, meter))| (index, meter)));
        Some(changed)
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
        let node = Node::of(rate, pods);
        let share = node.limits[Level::Share as usize];
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
        let node = Node::of(rate, pods);
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
        let in_ns = |ns: u64| (ns * TICKS_PER_NS).div_ceil(node.limits[Level::Node as usize].ticks_per_packet);
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
        let node = limited(rates, budget, pods);
        let first = node.charge(bill, SECOND_NS);
        let after = node.clone();
        prop_assert!(first.is_ok(), "nothing is used up yet");
        give_back(&node, bill, first.unwrap_or_default());
        prop_assert!(node.meters.borrow().values().all(|meter| (meter.packets, meter.bytes) == (0, 0)));
        prop_assert_eq!(node.charge(bill, SECOND_NS), first);
        prop_assert_eq!(node, after);
    }

    /// If any meter refuses, no meter is charged. A copy is charged once to each level with limits.
    #[test]
    fn what_is_refused_costs_nothing(
        rates in prop::array::uniform5(prop_oneof![Just(0), 1..1_000_u64]), budget in 0..20_u64, pods in 1..5_u32,
        traffic in any_vec((any_bill(), 0..5_000_000_u64), 1..200),
    ) {
        let node = limited(rates, budget, pods);
        let has = |level: Level| node.limits[level as usize] != Limits::default();
        let mut now = SECOND_NS;
        let mut expected = [0; Level::ALL.len()];
        for (bill, pause) in traffic {
            now += pause;
            if let Ok(paid) = node.charge(bill, now) {
                let is_charged = [
                    bill.session.is_some() && has(Level::Session),
                    bill.target.is_some() && has(Level::Target),
                    bill.pod.is_some() && (has(Level::Pod) || has(Level::Share)),
                    // If it has credit.
                    bill.pod.is_some() && paid.has(Level::Share),
                    bill.pod.is_some() && bill.namespace.is_some() && has(Level::Namespace),
                    bill.pod.is_some() && has(Level::Node),
                ];
                expected.iter_mut().zip(is_charged).for_each(|(sum, is)| *sum += u64::from(is));
            }
            prop_assert_eq!(node.packets(), expected);
        }
    }

    /// The copies of all sessions of a target are at most its rate, a burst and a packet; the same holds for the pods
    /// of a namespace.
    #[test]
    fn the_rates_of_a_target_and_of_a_namespace_hold(
        rate in 100..200_000_u64, is_target: bool, traffic in traffic(5), from: prop::sample::Index,
    ) {
        let limits = Limits::of_rate(rate, 0, BURST);
        let level = if is_target { Level::Target } else { Level::Namespace };
        let node = Node::default().with(level, limits);
        let mut now = SECOND_NS;
        let mut copied = Vec::new();
        for (pod, pause) in traffic {
            now += pause;
            let bill = match is_target {
                true => Bill { session: Some((pod, pod)), target: Some(7), ..BILL },
                false => Bill { pod: Some(pod), namespace: Some(7), ..BILL },
            };
            if node.charge(bill, now).is_ok() {
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

/// A node with limits of each kind, some of them unlimited: of sessions, targets, pods, namespaces and the node.
fn limited(rates: [u64; 5], budget: u64, pods: u32) -> Node {
    let [session, target, pod, namespace, node] =
        rates.map(|rate| Limits::of_rate(rate, rate * 8_000, BURST));
    let session = Limits { packets: budget, ..session };
    Node { limits: [session, target, pod, node.share(pods), namespace, node], ..Node::default() }
}

fn any_bill() -> impl Strategy<Value = Bill> {
    let some = || prop::option::of(0..2_u32);
    (some(), some(), some(), some(), 14..65_536_u32).prop_map(|(session, target, pod, namespace, len)| Bill {
        session: session.map(|id| (id, id)),
        target,
        pod,
        namespace,
        len,
    })
}

/// The copies of each pod during a second in which pod 0 floods and the others send as much as their share allows.
fn flooded(pods: u32, others_send: bool) -> Vec<u64> {
    let node = Node::of(10_000, pods);
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
    let node = Node::of(10_000, 2).with(Level::Pod, Limits::of_rate(100, 0, BURST));
    let copied = (0..100_000).filter(|packet| node.is_copied(0, SECOND_NS + packet * 10_000)).count();
    assert!((100..=106).contains(&copied), "a second at 100 a second, and a burst: {copied}");
    assert!(node.is_copied(1, 2 * SECOND_NS), "another pod has its own");
}

#[test]
fn a_session_that_has_ended_says_so_though_its_pod_is_limited_too() {
    let node = Node::of(1, 1).with(Level::Session, Limits { packets: 1, ..Limits::default() });
    let bill = Bill { session: Some((0, 0)), pod: Some(0), ..BILL };
    assert!(node.charge(bill, SECOND_NS).is_ok());
    assert_eq!(node.charge(bill, SECOND_NS), Err(Verdict::Ended));
    assert_eq!(node.charge(Bill { session: None, ..bill }, SECOND_NS), Err(Verdict::Limited));
}

#[test]
fn a_meter_that_is_not_there_fails() {
    /// Meters without any maps, or with the map of limits alone.
    struct Nothing(Option<Limits>);
    impl Meters for Nothing {
        fn limits(&self, _: u32) -> Option<&Limits> {
            self.0.as_ref()
        }

        fn meter<R>(
            &self,
            _: u32,
            _: Option<(&Limits, u32)>,
            _: impl FnOnce(&mut Meter, Option<(&Limits, &mut Meter)>) -> R,
        ) -> Option<R> {
            None
        }
    }
    let bills = [
        Bill { session: Some((0, 0)), ..BILL },
        Bill { target: Some(0), ..BILL },
        Bill { pod: Some(0), ..BILL },
    ];
    for meters in [Nothing(None), Nothing(Some(Limits::of_rate(1, 0, BURST)))] {
        let charged = |bill| {
            let mut paid = Paid::NOTHING;
            (charge(&meters, bill, 1, &mut paid), paid)
        };
        assert_eq!(bills.map(charged), [(Err(Verdict::Failed), Paid::NOTHING); 3]);
        assert_eq!(charged(BILL), (Ok(()), Paid::NOTHING));
    }
}

#[test]
fn each_level_has_its_own_limits_and_meters() {
    let sizes = [
        (SETTINGS_PLACES, MAX_SESSIONS),
        (TARGET_PLACES, TARGET_PLACES),
        (1, MAX_TAPS),
        (1, MAX_TAPS),
        (1, MAX_TAPS),
        (1, 1),
    ];
    let mut next = (0, 0);
    for (level, (limits, meters)) in Level::ALL.into_iter().zip(sizes) {
        assert_eq!((level.limits(0), level.meter(0)), next, "{level:?}");
        next = (level.limits(limits), level.meter(meters));
    }
    assert_eq!((LIMITS_LEN, METERS_LEN), (next.0 as usize, next.1 as usize));
}
