//! Whole histories of a node: pods, devices, failing ops and new agents, in any order, with the loop interrupted at any
//! time.

use proptest::{collection::vec, prelude::*};

use super::*;

/// The pod that no step concerns. Neither the others nor the agent's own failures may cost it its tap.
const BYSTANDER: u32 = 9;

#[derive(Debug, Clone)]
enum Step {
    /// A pod is created, or deleted with its devices.
    Toggle(u32),
    /// A pod asks for a mirror with this rate, or for none.
    Ask(u32, Option<u32>),
    /// The device of a pod on the node disappears, or is back.
    Unplug(u32),
    /// The device of a pod on the node becomes a port of this bridge.
    Move(u32, u32),
    /// The next ops fail.
    Fail(usize),
    /// Another agent takes over, and has no list yet.
    Restart,
    /// The list of pods is complete again.
    List,
}

fn any_step() -> impl Strategy<Value = (Step, u64)> {
    let pod = || 1..5_u32;
    let step = prop_oneof![
        4 => pod().prop_map(Step::Toggle),
        3 => (pod(), proptest::option::of(1..3_u32)).prop_map(|(pod, rate)| Step::Ask(pod, rate)),
        2 => pod().prop_map(Step::Unplug),
        2 => (pod(), 5..7_u32).prop_map(|(pod, bridge)| Step::Move(pod, bridge)),
        2 => (1..6_usize).prop_map(Step::Fail),
        1 => Just(Step::Restart),
        2 => Just(Step::List),
    ];
    // The time until the next step, in milliseconds. An op takes 10.
    (step, prop_oneof![1..60_u64, 1..3_000_u64])
}

/// The node apart from the agent: the pods with their annotations, and the devices that are unplugged.
struct Cluster {
    pods: Vec<Pod>,
    unplugged: BTreeMap<u32, Link>,
}

fn uid(number: u32) -> String {
    format!("uid-{number}")
}

impl Cluster {
    fn new(world: &mut World) -> Self {
        add_pod(world, BYSTANDER);
        let bridges = [5, 6].map(|at| (IfIndex(at), link(at, LinkKind::Other("bridge".into()))));
        world.links.links.host.extend(bridges);
        Self { pods: world.pods.0.clone().unwrap(), unplugged: BTreeMap::new() }
    }

    fn step(&mut self, world: &mut World, step: &Step) {
        let host = &mut world.links.links.host;
        match *step {
            Step::Toggle(number) => match self.pods.iter().position(|pod| pod.id.uid == uid(number)) {
                Some(index) => {
                    self.pods.remove(index);
                    host.remove(&IfIndex(10 + number));
                    world.links.links.pods.remove(&uid(number));
                    self.unplugged.remove(&number);
                }
                None => {
                    let listed = world.pods.0.take();
                    add_pod(world, number);
                    self.pods.extend(std::mem::replace(&mut world.pods.0, listed).unwrap());
                }
            },
            Step::Ask(number, rate) => {
                let annotations: &[(&str, String)] = match rate {
                    Some(rate) => &[(MIRROR, "true".into()), ("podmirror.io/rate", format!("{rate}pps"))],
                    None => &[],
                };
                let asked = annotations.iter().map(|(key, value)| ((*key).to_owned(), value.clone()));
                let pod = self.pods.iter_mut().find(|pod| pod.id.uid == uid(number));
                pod.into_iter().for_each(|pod| pod.annotations = asked.clone().collect());
            }
            Step::Unplug(number) => match self.unplugged.remove(&number) {
                Some(link) => drop(host.insert(link.ifindex, link)),
                None => {
                    let link = host.remove(&IfIndex(10 + number));
                    self.unplugged.extend(link.map(|link| (number, link)));
                }
            },
            Step::Move(number, bridge) => {
                let link = host.get_mut(&IfIndex(10 + number));
                link.into_iter().for_each(|link| link.master = Some(IfIndex(bridge)));
            }
            Step::Fail(ops) => world.dataplane.fails = ops,
            Step::Restart => restart(world),
            Step::List => world.pods.0 = Some(Vec::new()),
        }
        if let Some(listed) = &mut world.pods.0 {
            listed.clone_from(&self.pods);
        }
    }
}

fn taps(world: &World) -> &BTreeMap<Device, ActualTap> {
    &world.dataplane.actual.taps
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// In the end the node is as a first agent would have made it, and nothing is written any more. A pod that no step
    /// concerns is tapped all the time.
    #[test]
    fn any_history_ends_as_if_there_had_been_none(steps in vec(any_step(), 1..16)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let mut world = world();
            world.dataplane.takes = Duration::from_millis(10);
            let mut cluster = Cluster::new(&mut world);
            run_for(&mut world, Duration::from_secs(1)).await.unwrap();
            let bystander = device(10 + BYSTANDER);
            let before = taps(&world)[&bystander].clone();
            for (step, pause) in steps {
                cluster.step(&mut world, &step);
                run_for(&mut world, Duration::from_millis(pause)).await.unwrap();
                prop_assert_eq!(taps(&world).get(&bystander), Some(&before), "after {:?}", step);
            }
            cluster.step(&mut world, &Step::List);
            world.dataplane.fails = 0;
            run_for(&mut world, TICK * 2).await.unwrap();

            let mut first = super::world();
            (first.pods.0, first.links.links) = (world.pods.0.clone(), world.links.links.clone());
            run_for(&mut first, TICK * 2).await.unwrap();
            prop_assert_eq!(taps(&world), taps(&first));
            prop_assert_eq!(&world.dataplane.actual.targets, &first.dataplane.actual.targets);
            let report = |world: &World| {
                let report = world.report.borrow();
                (report.skipped.clone(), report.failures.clone(), report.pods.clone(), report.resources.clone())
            };
            prop_assert_eq!(report(&world), report(&first));
            let tried = world.dataplane.tried.len();
            run_for(&mut world, TICK * 2).await.unwrap();
            prop_assert_eq!(&world.dataplane.tried[tried..], &[]);
            Ok(())
        })?;
    }
}
