//! The reports of the loop about the wanted mirrors, and about those of an earlier agent.

use super::*;
use crate::{
    model::Ended,
    report::{Mirrors, Stage},
};

/// The mirrors by pod and name, with target and stage.
fn told(mirrors: &Mirrors) -> Vec<String> {
    let of_pod = |(pod, mirrors): (&PodId, &BTreeMap<_, _>)| {
        let told = |(mirror, of): (&MirrorId, &crate::report::Mirrored)| {
            let by = if of.is_asked { "" } else { " by policy" };
            format!("{} {mirror} {} {:?}{by}", pod.name, of.target, of.stage)
        };
        mirrors.iter().map(told).collect::<Vec<_>>()
    };
    mirrors.iter().flat_map(of_pod).collect()
}

fn reported(world: &World) -> [Vec<String>; 2] {
    let report = Report::clone(&world.reports().borrow());
    [told(&report.mirrors), told(&report.found)]
}

const SOON: Duration = Duration::from_millis(1);

#[tokio::test(start_paused = true)]
async fn mirrors_that_are_wanted_are_reported_and_those_that_were_found() {
    let (captures, reading) = watch::channel(Arc::default());
    let mut world = world_with(reading);
    // Everything is mirrored by policy, and one pod by its annotation as well.
    world.memory.policy.enable_mirror = true;
    add_pod(&mut world, 1);
    add_pod(&mut world, 2);
    world.pods.0.as_mut().unwrap()[1].annotations.clear();
    let pods = world.pods.0.take();
    run_for(&mut world, SOON).await.unwrap();
    assert_eq!(reported(&world).concat(), [""; 0], "there is no list of pods");
    world.pods.0 = pods;
    captures.send_replace(captured(capture(&[])));
    world.dataplane.failures = vec![Op::Attach(device(11), Program::TAP[0]); 1].into();
    run_for(&mut world, SOON).await.unwrap();
    let policy = "pod-2 default default Installed by policy".to_owned();
    assert_eq!(reported(&world), [vec!["pod-1 default default Pending".to_owned(), policy.clone()], vec![]]);
    run_for(&mut world, Duration::from_secs(1)).await.unwrap();
    let stands = vec!["pod-1 default default Installed".to_owned(), policy.clone()];
    assert_eq!(reported(&world), [stands.clone(), vec![]]);
    assert_eq!(tapped(&world), [11, 12]);

    // Another agent takes over.
    let before = world;
    let mut world = world_with(watch::channel(Arc::default()).1);
    (world.links, world.dataplane, world.memory.policy) =
        (before.links, before.dataplane, before.memory.policy);
    run_for(&mut world, SOON).await.unwrap();
    assert_eq!(reported(&world), [vec![], stands.clone()]);
    world.pods.0 = before.pods.0;
    world.pods.1.push(mirror_all(None));
    run_for(&mut world, SOON).await.unwrap();
    let all = |pod: &str, stage: &str| format!("{pod} mirror/all default {stage}");
    let [of_first, of_second] = [&stands[0], &stands[1]].map(String::clone);
    let with_all =
        |stage| vec![of_first.clone(), all("pod-1", "Installed"), of_second.clone(), all("pod-2", stage)];
    assert_eq!(reported(&world), [with_all("Installed"), stands.clone()]);

    // A limit ends one of them.
    let installed = world.dataplane.actual.taps.get_mut(&device(12)).unwrap();
    installed.ended.insert(mirror_all(None).id.mirror(), Ended::Packets);
    run_for(&mut world, SOON).await.unwrap();
    assert_eq!(reported(&world), [with_all("Ended(Packets)"), stands]);
    let of_all = world.report.borrow().resources[0].clone();
    let covered: Vec<_> = of_all.covered.iter().map(|pod| pod.name.as_str()).collect();
    let others: Vec<_> = of_all.not_covered.iter().map(|of| (of.pod.name.as_str(), of.reason)).collect();
    assert_eq!((covered, others), (vec!["pod-1"], vec![("pod-2", "Ended")]));
    world.memory.found = None;
    run_for(&mut world, SOON).await.unwrap();
    let both = with_all("Ended(Packets)");
    assert_eq!(reported(&world), [both.clone(), both]);
}

/// The stage of a pod's mirror is the lowest of its NICs.
#[test]
fn the_stages_are_in_order() {
    let over = Stage::Ended(Ended::Duration);
    assert_eq!([over, Stage::Pending, Stage::Installed].into_iter().min(), Some(Stage::Pending));
    assert_eq!([over, Stage::Installed].into_iter().min(), Some(Stage::Installed));
}
