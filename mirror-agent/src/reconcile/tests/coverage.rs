//! The reports of the loop about the counters that it reads between its rounds. [`routes`](super::routes) tests its
//! reactions.

use mirror_common::verdict::Direction;
use mirror_core::coverage::{Count, Doubt, State, Way};

use super::*;
use crate::{kernel::dataplane::TapCount, report::NicCoverage};

/// Packets to the pod that have passed the hook (`seen`), and that have bypassed the node side (`around`).
#[derive(Default)]
struct Traffic {
    seen: u64,
    around: u64,
}

impl Traffic {
    /// Counts packets at the NIC of pod 1, and runs the loop.
    async fn passes(&mut self, world: &mut World, seen: u64, around: u64, seconds: u64) {
        (self.seen, self.around) = (self.seen + seen, self.around + around);
        let count = |packets| Count { packets, bytes: packets * 100 };
        let ingress = Carried { nic: count(self.seen + self.around), end: Some([self.seen; 2]) };
        let egress = Carried { nic: count(0), end: Some([0; 2]) };
        world.links.carried.insert(IfIndex(11), Some([ingress, egress]));
        let seen = [count(self.seen), count(0)];
        world.dataplane.seen.insert(device(11), TapCount { serial: 1, seen });
        run_for(world, Duration::from_secs(seconds)).await.unwrap();
    }
}

fn told(world: &World) -> NicCoverage {
    world.report.borrow().coverage[&device(11)].clone()
}

fn states(world: &World) -> [State; 2] {
    told(world).directions.map(|judged| judged.state)
}

fn reasons(world: &World) -> Vec<&'static str> {
    world.report.borrow().skipped.iter().map(|skipped| skipped.why.name()).collect()
}

/// A pod, on a node whose administrator forbids taps inside pods.
fn world_outside() -> World {
    let mut world = world();
    world.memory.policy.taps_inside = false;
    add_pod(&mut world, 1);
    world
}

const IDLE: State = State::Unknown(Doubt::Idle);
const AROUND: State = State::Bypassed(Way::Peer);

#[tokio::test(start_paused = true)]
async fn only_a_direction_that_a_mirror_copies_gives_a_reason() {
    let captures = watch::Sender::new(Arc::<Readers>::default());
    let mut world = world_with(captures.subscribe());
    world.memory.policy.taps_inside = false;
    add_pod(&mut world, 1);
    let annotations = &mut world.pods.0.as_mut().unwrap()[0].annotations;
    annotations.insert(MIRROR.into(), "egress".into());
    let mut traffic = Traffic::default();
    traffic.passes(&mut world, 0, 0, 3).await;
    traffic.passes(&mut world, 0, 50, 3).await;
    assert_eq!((states(&world), reasons(&world)), ([AROUND, IDLE], vec![]));
    // A capture requests both directions, and has its own reason.
    captures.send_replace(captured(capture(&[])));
    traffic.passes(&mut world, 0, 50, 3).await;
    let report = world.report.borrow().clone();
    let skipped: Vec<_> = report.skipped.iter().collect();
    let expected = Why::Bypassed(Direction::Ingress, Way::Peer);
    assert!(matches!(skipped[..], [skipped] if skipped.why == expected && skipped.is_of_capture()));
}

#[tokio::test(start_paused = true)]
async fn counters_that_cannot_be_read_become_a_doubt_and_a_new_nic_begins_again() {
    let mut world = world_outside();
    let mut traffic = Traffic::default();
    traffic.passes(&mut world, 0, 0, 3).await;
    traffic.passes(&mut world, 50, 0, 3).await;
    assert_eq!(states(&world)[0], State::Covered);
    world.links.carried.insert(IfIndex(11), None);
    run_for(&mut world, Duration::from_secs(70)).await.unwrap();
    assert_eq!(states(&world), [State::Unknown(Doubt::Unread), State::Unknown(Doubt::Unread)]);
    traffic.passes(&mut world, 50, 50, 3).await;
    assert_eq!(states(&world)[0], AROUND, "what happened meanwhile is not lost");

    // The pod has another sandbox, and the same device leads there.
    let inside = world.links.links.pods.get_mut("uid-1").unwrap().as_mut().unwrap();
    inside.netns.ino = 99;
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    assert_eq!((states(&world)[0].clone(), told(&world).directions[0].carried), (IDLE, 0));
}

#[tokio::test(start_paused = true)]
async fn without_the_tap_of_a_pod_nothing_is_read() {
    let mut world = world();
    world.links.links.host.insert(IfIndex(7), link(7, LinkKind::Veth));
    world.memory.policy.interfaces = vec!["dev7".into()];
    world.pods.0 = Some(Vec::new());
    run_for(&mut world, TICK).await.unwrap();
    assert_eq!((tapped(&world), world.memory.coverage.due()), (vec![7], None));
    add_pod(&mut world, 1);
    run_for(&mut world, Duration::from_secs(1)).await.unwrap();
    assert!(world.memory.coverage.due().is_some());
    world.pods.0 = Some(Vec::new());
    run_for(&mut world, Duration::from_secs(1)).await.unwrap();
    assert_eq!((world.memory.coverage.due(), world.report.borrow().coverage.len()), (None, 0));
}
