//! The reactions of the loop to packets that bypass the node side of a pod's veth.

use mirror_common::verdict::{Direction, Hook};
use mirror_core::coverage::{Count, Doubt, Reason, State};

use super::*;
use crate::{
    kernel::dataplane::TapCount,
    model::{FIRST_IFINDEX, Hidden},
    report::NicCoverage,
};

/// The NIC of pod 1.
fn nic() -> Device {
    Device::in_pod(NetnsId { dev: 4, ino: 1 }, IfIndex(2))
}

fn runs(world: &World, device: Device, program: Program) -> bool {
    let installed = world.dataplane.actual.taps.get(&device);
    installed.is_some_and(|installed| installed.state(program) == HookState::Current)
}

/// Whether the tap of pod 1 sees packets to the pod on the node side, and at the NIC.
fn sides(world: &World) -> [bool; 2] {
    let tap = world.dataplane.actual.taps[&device(11)].tap.as_ref().unwrap();
    let is_there = runs(world, nic(), Program::TapIngress);
    assert_eq!(tap.head.pod_side().is_some(), is_there, "an entry and a program");
    let runs_at_node = |program| runs(world, device(11), program);
    assert!(Program::TAP.into_iter().all(runs_at_node), "it is always needed there");
    [!tap.head.sees_inside(), is_there]
}

const NODE: [bool; 2] = [true, false];
const INSIDE: [bool; 2] = [false, true];

fn told(world: &World) -> NicCoverage {
    world.report.borrow().coverage[&device(11)].clone()
}

/// The names of the reasons.
fn reasons(world: &World) -> Vec<&'static str> {
    let mut names: Vec<_> = world.report.borrow().skipped.iter().map(|skipped| skipped.why.name()).collect();
    names.sort_unstable();
    names
}

/// The packets to the pod so far.
#[derive(Default)]
struct Traffic {
    crossed: u64,
    around: u64,
    seen: u64,
}

impl Traffic {
    /// Counts packets to pod 1, which its tap sees on the sides where it is installed, and runs the loop.
    async fn passes(&mut self, world: &mut World, crossed: u64, around: u64, seconds: u64) {
        let tap = world.dataplane.actual.taps.get(&device(11)).and_then(|installed| installed.tap.as_ref());
        let inside = tap.is_some() && runs(world, nic(), Program::TapIngress);
        let at_node = tap.is_some_and(|tap| !tap.head.sees_inside());
        (self.crossed, self.around) = (self.crossed + crossed, self.around + around);
        self.seen += if inside { crossed + around } else { crossed * u64::from(at_node) };
        let count = |packets| Count { packets, bytes: packets * 100 };
        let ingress = Carried { nic: count(self.crossed + self.around), end: Some([self.crossed; 2]) };
        let egress = Carried { nic: count(0), end: Some([0; 2]) };
        world.links.carried.insert(IfIndex(11), Some([ingress, egress]));
        let seen = [count(self.seen), count(0)];
        world.dataplane.seen.insert(device(11), TapCount { serial: 1, seen });
        run_for(world, Duration::from_secs(seconds)).await.unwrap();
    }
}

/// A pod whose tap is inside, because packets bypassed the node side.
async fn moved() -> (World, Traffic) {
    let (mut world, mut traffic) = (world(), Traffic::default());
    add_pod(&mut world, 1);
    traffic.passes(&mut world, 0, 0, 3).await;
    traffic.passes(&mut world, 50, 0, 3).await;
    assert_eq!((sides(&world), told(&world).inside), (NODE, None));
    assert!(!has_exit(&world) && world.links.links.by_name(exit::HUB).is_none());
    traffic.passes(&mut world, 0, 1, 3).await;
    assert_eq!(sides(&world), INSIDE);
    // A first reading, to which later ones are compared.
    traffic.passes(&mut world, 0, 0, 3).await;
    (world, traffic)
}

/// A pod whose NIC has no device on the node, so its tap is inside.
fn with_macvlan() -> World {
    let mut world = world();
    add_pod(&mut world, 1);
    let inside = world.links.links.pods.get_mut("uid-1").unwrap().as_mut().unwrap();
    inside.links[0].kind = LinkKind::Other("macvlan".into());
    inside.links[0].peer = Some(Peer { ifindex: 3, nsid: Some(0) });
    world
}

/// Checks that one round gives the pod a tap and a relay device for its copies.
async fn has_exit_after_a_round(mut world: World) {
    world.round().await.unwrap();
    let exit = |tap: &ActualTap| tap.tap.as_ref().and_then(|tap| tap.head.exit);
    let exits: Vec<_> = world.dataplane.actual.taps.values().map(exit).collect();
    assert_eq!((exits, has_exit(&world)), (vec![Some(exit::IFINDEX)], true));
}

fn has_exit(world: &World) -> bool {
    let inside = world.links.links.pods["uid-1"].as_ref().unwrap();
    inside.links.iter().any(exit::is_exit)
}

fn of_ingress(world: &World) -> State {
    told(world).directions[Direction::Ingress as usize].state.clone()
}

/// A CNI attaches its programs behind the tap, or changes its mode while pods run. It is recognised without a packet.
#[tokio::test(start_paused = true)]
async fn a_known_cni_that_comes_later_is_recognised_by_the_next_round() {
    let mut world = world();
    add_pod(&mut world, 1);
    run_for(&mut world, Duration::from_secs(5)).await.unwrap();
    assert_eq!(sides(&world), NODE);
    let change = |world: &mut World, name: &str| {
        world.dataplane.programs.insert(IfIndex(11), [name.to_owned()].into());
        world.dataplane.look_due = Some(Instant::now());
    };
    // Two changes in short succession. The second one is too early for a query at once.
    change(&mut world, "neighbour");
    run_for(&mut world, Duration::from_millis(100)).await.unwrap();
    assert_eq!(sides(&world), NODE);
    change(&mut world, "cali_tc_preambl");
    run_for(&mut world, Duration::from_millis(1200)).await.unwrap();
    assert_eq!((sides(&world), told(&world).inside), (INSIDE, Some(Reason::Cni("Calico"))));
    // The CNI is known permanently.
    let asked = world.dataplane.asked;
    change(&mut world, "neighbour");
    run_for(&mut world, Duration::from_secs(100)).await.unwrap();
    assert_eq!((sides(&world), world.dataplane.asked), (INSIDE, asked));
}

#[tokio::test(start_paused = true)]
async fn many_rounds_ask_for_the_cni_once_a_second() {
    let mut world = world();
    add_pod(&mut world, 1);
    run_for(&mut world, Duration::from_secs(5)).await.unwrap();
    let asked = world.dataplane.asked;
    for _ in 0..100 {
        world.dataplane.look_due = Some(Instant::now());
        run_for(&mut world, Duration::from_millis(100)).await.unwrap();
    }
    let asked = world.dataplane.asked - asked;
    assert!((9..=12).contains(&asked), "{asked} times in 10 s");
}

#[tokio::test(start_paused = true)]
async fn a_new_agent_keeps_the_side_that_it_finds() {
    let (before, mut traffic) = moved().await;
    let mut world = world();
    world.dataplane.actual = before.dataplane.actual;
    for installed in world.dataplane.actual.taps.values_mut() {
        for program in Program::TAP {
            if installed.state(program) == HookState::Current {
                *installed.state_mut(program) = HookState::Stale;
            }
        }
    }
    (world.links, world.pods) = (before.links, before.pods);
    run_for(&mut world, Duration::from_secs(1)).await.unwrap();
    assert_eq!(sides(&world), INSIDE);
    let is_changed = |op: &Op| matches!(op, Op::PutTap(..) | Op::Detach(..));
    assert!(!world.dataplane.tried.iter().any(is_changed), "{:?}", world.dataplane.tried);
    // The new agent itself has seen no packet bypass the node side.
    for _ in 0..9 {
        traffic.passes(&mut world, 5, 0, 3).await;
    }
    assert_eq!(sides(&world), NODE);
}

/// The error that keeps a program out of the pod is only logged, so the pod gets the missing packets as a reason
/// meanwhile.
#[tokio::test(start_paused = true)]
async fn a_tap_that_cannot_get_inside_tells_what_it_misses() {
    let (mut world, mut traffic) = (world(), Traffic::default());
    add_pod(&mut world, 1);
    traffic.passes(&mut world, 0, 0, 3).await;
    traffic.passes(&mut world, 50, 0, 3).await;
    world.dataplane.failures = vec![Op::Attach(nic(), Program::TapIngress); 100].into();
    traffic.passes(&mut world, 0, 9, 3).await;
    traffic.passes(&mut world, 0, 9, 3).await;
    assert!(!reasons(&world).contains(&"Bypassed"), "the tap is about to change its side");
    for _ in 0..4 {
        traffic.passes(&mut world, 0, 9, 3).await;
    }
    assert_eq!(reasons(&world), ["Bypassed"]);
    world.dataplane.failures.clear();
    for _ in 0..12 {
        traffic.passes(&mut world, 0, 9, 3).await;
    }
    assert_eq!((sides(&world), reasons(&world)), (INSIDE, vec![]));
}

/// The earlier agent has removed the tap of a pod, and ended before it could delete the relay device there. The relay
/// hub stays for another pod.
#[tokio::test(start_paused = true)]
async fn a_new_agent_deletes_an_exit_that_no_tap_tells_of() {
    let (mut before, _) = moved().await;
    add_pod(&mut before, 2);
    for pod in before.pods.0.as_mut().unwrap() {
        if pod.id.name == "pod-2" {
            pod.annotations.clear();
        }
    }
    let netns = NetnsId { dev: 4, ino: 2 };
    before.links.apply(&LinkChange::CreateExit(netns, IfIndex(91))).await.unwrap();
    let inside = before.links.links.pods["uid-2"].clone();
    // Between two containers, no process shows the namespace of the pod.
    before.links.links.pods.remove("uid-2");

    let mut world = world();
    (world.links, world.dataplane) = (before.links, before.dataplane);
    world.links.applied.clear();
    run_for(&mut world, Duration::from_secs(1)).await.unwrap();
    world.pods = before.pods;
    run_for(&mut world, Duration::from_secs(1)).await.unwrap();
    assert_eq!(world.links.applied, [], "nothing is known of the pod");
    world.links.links.pods.insert("uid-2".into(), inside);
    run_for(&mut world, TICK * 2).await.unwrap();
    assert_eq!(world.links.applied.first(), Some(&LinkChange::DeleteExit(netns)));
    let is_asked_for = |asked: &Vec<PodNetns>| asked.iter().any(|pod| pod.uid == "uid-2");
    assert!(!world.links.asked.last().is_some_and(is_asked_for), "it is not read for ever");
}

#[tokio::test(start_paused = true)]
async fn without_a_way_out_of_the_pod_the_tap_stays_and_says_so() {
    let (mut world, mut traffic) = (world(), Traffic::default());
    world.links.refuses_exits = true;
    add_pod(&mut world, 1);
    traffic.passes(&mut world, 0, 0, 3).await;
    traffic.passes(&mut world, 50, 1, 3).await;
    traffic.passes(&mut world, 50, 1, 3).await;
    assert_eq!((sides(&world), reasons(&world)), (NODE, vec!["Bypassed", "NoRelayDevice"]));
    world.links.refuses_exits = false;
    traffic.passes(&mut world, 50, 1, 40).await;
    assert_eq!((sides(&world), reasons(&world)), (INSIDE, vec![]));
    // A process of the pod deletes the relay device. If it cannot be created again, the tap inside stays.
    world
        .links
        .links
        .pods
        .get_mut("uid-1")
        .unwrap()
        .as_mut()
        .unwrap()
        .links
        .retain(|link| !exit::is_exit(link));
    world.links.refuses_exits = true;
    traffic.passes(&mut world, 50, 1, 61).await;
    assert_eq!((sides(&world), reasons(&world)), (INSIDE, vec!["NoRelayDevice"]));
}

/// A tap inside a pod is never installed without a relay device that the agent could create.
#[tokio::test(start_paused = true)]
async fn a_nic_that_comes_while_devices_are_made_gets_its_relay_device_in_the_same_round() {
    let mut world = with_macvlan();
    let inside = world.links.links.pods.get_mut("uid-1").unwrap().as_mut().unwrap();
    let nic = inside.links.remove(0);
    world.links.comes = Some(("uid-1".into(), nic));
    has_exit_after_a_round(world).await;
}

/// An agent was killed while it created the relay hub.
#[tokio::test(start_paused = true)]
async fn a_half_made_hub_delays_no_relay_device() {
    let mut world = with_macvlan();
    let half = Link { name: exit::HUB.into(), up: false, ..link(FIRST_IFINDEX.0, LinkKind::Dummy) };
    world.links.links.host.insert(half.ifindex, half);
    has_exit_after_a_round(world).await;
}

/// The device on the node has got an ingress qdisc, and so no egress hook. The tap stays in the pod until the pod opts
/// out, and then leaves it without keeping the loop busy.
#[tokio::test(start_paused = true)]
async fn a_node_side_without_a_hook_is_no_reason_to_stay_in_a_pod_that_opts_out() {
    let (mut world, mut traffic) = moved().await;
    let end = world.dataplane.actual.taps.get_mut(&device(11)).unwrap();
    (end.egress, end.hidden) = (HookState::Absent, vec![(Hook::Egress, Hidden::NoHook)]);
    for _ in 0..9 {
        traffic.passes(&mut world, 5, 0, 3).await;
    }
    let is_inside = |world: &World| {
        let tap = world.dataplane.actual.taps[&device(11)].tap.as_ref().unwrap();
        [tap.head.is_inside(), runs(world, nic(), Program::TapIngress), has_exit(world)]
    };
    assert_eq!((is_inside(&world), reasons(&world)), ([true; 3], vec![]));
    annotate(&mut world, "pod-side-taps", "off");
    let rounds = world.links.asked.len();
    run_for(&mut world, Duration::from_secs(50)).await.unwrap();
    let rounds = world.links.asked.len() - rounds;
    assert!(rounds < 30, "{rounds} rounds in 50 s");
    assert_eq!((is_inside(&world), reasons(&world)), ([false; 3], vec!["Hidden"]));
}

/// A program that hides packets at the hook that the tap no longer uses is no reason any more.
#[tokio::test(start_paused = true)]
async fn a_program_ahead_at_the_nodes_end_does_not_hide_what_reaches_the_pod() {
    let (mut world, mut traffic) = moved().await;
    let hidden = vec![(Hook::Egress, Hidden::Program("first".into()))];
    world.dataplane.actual.taps.get_mut(&device(11)).unwrap().hidden = hidden;
    traffic.passes(&mut world, 0, 50, 3).await;
    assert_eq!((of_ingress(&world), reasons(&world)), (State::Covered, vec![]));
}

#[tokio::test(start_paused = true)]
async fn a_side_that_fails_is_tried_again_and_the_other_one_stays() {
    let (mut world, mut traffic) = (world(), Traffic::default());
    add_pod(&mut world, 1);
    traffic.passes(&mut world, 0, 0, 3).await;
    world.dataplane.failures = vec![Op::Attach(nic(), Program::TapIngress); 4].into();
    let rounds = world.links.asked.len();
    traffic.passes(&mut world, 50, 1, 2).await;
    let failures = world.dataplane.failures.len();
    assert!(
        failures < 4 && world.links.asked.len() < rounds + 12,
        "{failures} {}",
        world.links.asked.len() - rounds
    );
    // The other side still sees all packets that pass the node side.
    assert_ne!(of_ingress(&world), State::NoHook);
    run_for(&mut world, Duration::from_secs(5)).await.unwrap();
    assert_eq!(sides(&world), INSIDE);
}

/// The pod removes the programs of both directions, one at a time. Each has its own pause, and does not delay the other
/// one.
#[tokio::test(start_paused = true)]
async fn the_rest_of_one_direction_is_not_that_of_the_other() {
    let mut world = with_macvlan();
    run_for(&mut world, Duration::from_secs(1)).await.unwrap();
    let state = |world: &World, program| world.dataplane.actual.taps[&nic()].state(program);
    let mut remove = async |program, milliseconds| {
        *world.dataplane.actual.taps.get_mut(&nic()).unwrap().state_mut(program) = HookState::Dead;
        run_for(&mut world, Duration::from_millis(milliseconds)).await.unwrap();
    };
    for (program, milliseconds) in [
        (Program::TapIngress, 500),
        (Program::TapEgress, 700),
        (Program::TapIngress, 10),
        (Program::TapEgress, 10),
    ] {
        remove(program, milliseconds).await;
    }
    run_for(&mut world, Duration::from_secs(10)).await.unwrap();
    assert_eq!(Program::TAP.map(|program| state(&world, program)), [HookState::Current; 2]);
}

/// The pod does not keep the loop busy, and the node side sees the pod's packets meanwhile.
#[tokio::test(start_paused = true)]
async fn what_a_pod_removes_again_and_again_is_attached_less_and_less_often() {
    let (mut world, _) = moved().await;
    world.dataplane.removed.insert(nic());
    world.dataplane.actual.taps.get_mut(&nic()).unwrap().ingress = HookState::Dead;
    let is_attach = |op: &&Op| **op == Op::Attach(nic(), Program::TapIngress);
    let attached = |world: &World| world.dataplane.tried.iter().filter(is_attach).count();
    let (before, rounds) = (attached(&world), world.links.asked.len());
    run_for(&mut world, Duration::from_secs(60)).await.unwrap();
    // After 0, 1, 3, 7, 15, 23, 31, 39, 47 and 55 s.
    let (attached, rounds) = (attached(&world) - before, world.links.asked.len() - rounds);
    assert!((9..=10).contains(&attached) && rounds < 60, "{attached} times in {rounds} rounds");
    let tap = world.dataplane.actual.taps[&device(11)].tap.as_ref().unwrap();
    assert!(!tap.head.sees_inside());
    assert_eq!((of_ingress(&world), reasons(&world)), (State::Unknown(Doubt::Idle), vec!["Removed"]));
    world.dataplane.removed.clear();
    run_for(&mut world, Duration::from_secs(10)).await.unwrap();
    assert_eq!(sides(&world), INSIDE);
    run_for(&mut world, Duration::from_secs(31)).await.unwrap();
    assert_eq!((sides(&world), reasons(&world)), (INSIDE, vec![]));
}
