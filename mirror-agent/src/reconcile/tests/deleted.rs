//! Pods whose objects were deleted, and whose processes still run.

use super::*;

const A_MINUTE: Duration = Duration::from_secs(60);

/// Two tapped pods that are found by their processes. The object of the second one was deleted.
async fn forced() -> World {
    let mut world = world();
    add_pod(&mut world, 1);
    add_pod(&mut world, 2);
    for pod in world.pods.0.as_mut().unwrap() {
        pod.netns = None;
    }
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    assert_eq!(tapped(&world), [11, 12]);
    delete(&mut world);
    world
}

/// Deletes the object of the newest pod.
fn delete(world: &mut World) {
    let pod = world.pods.0.as_mut().unwrap().pop().unwrap();
    world.pods.3.lock().unwrap().push(pod);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_runs_without_an_object_stays_tapped() {
    let mut world = forced().await;
    run_for(&mut world, A_MINUTE).await.unwrap();
    assert_eq!(tapped(&world), [11, 12]);
    let report = world.report.borrow().clone();
    assert_eq!((&report.skipped, &report.failures), (&BTreeSet::new(), &BTreeSet::new()));
    let listed = report.pods.as_ref().unwrap().keys().map(|pod| pod.name.as_str()).collect::<Vec<_>>();
    assert_eq!(listed, ["pod-1"], "there is no object to tell anything");

    world.links.links.pods.remove("uid-2");
    run_for(&mut world, 2 * gone_look()).await.unwrap();
    assert_eq!(tapped(&world), [11], "its processes have ended");
    let report = world.report.borrow().clone();
    assert_eq!(report.skipped, BTreeSet::new());
    assert!(report.mirrors.keys().all(|pod| pod.name == "pod-1"), "{report:?}");
}

fn gone_look() -> Duration {
    super::super::deleted::LOOK_AGAIN
}

/// The device of the NIC is deleted before the last process ends, as by a runtime that removes the network first.
#[tokio::test(start_paused = true)]
async fn a_pod_without_a_nic_is_forgotten_and_nothing_is_told() {
    let mut world = forced().await;
    run_for(&mut world, A_MINUTE).await.unwrap();
    world.links.links.host.remove(&IfIndex(12));
    world.links.links.pods.get_mut("uid-2").unwrap().as_mut().unwrap().links.clear();
    run_for(&mut world, 2 * gone_look()).await.unwrap();
    let report = world.report.borrow().clone();
    assert_eq!((tapped(&world), &report.skipped), (vec![11], &BTreeSet::new()));
    assert!(report.mirrors.keys().all(|pod| pod.name == "pod-1"), "{report:?}");
}

/// The last state of the object counts, even if its last change arrives together with its deletion.
#[tokio::test(start_paused = true)]
async fn an_opt_out_just_before_the_deletion_counts() {
    let mut world = world();
    add_pod(&mut world, 1);
    world.pods.0.as_mut().unwrap()[0].netns = None;
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    assert_eq!(tapped(&world), [11]);
    annotate(&mut world, "mirror", "false");
    delete(&mut world);
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    assert_eq!(tapped(&world), [0; 0]);
}

/// Resources that select the pod still count.
#[tokio::test(start_paused = true)]
async fn a_mirror_that_is_deleted_ends_for_deleted_pods_too() {
    let mut world = world();
    add_pod(&mut world, 1);
    let pod = &mut world.pods.0.as_mut().unwrap()[0];
    (pod.netns, pod.annotations) = (None, BTreeMap::new());
    world.pods.1 = vec![mirror_all(None)];
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    delete(&mut world);
    run_for(&mut world, A_MINUTE).await.unwrap();
    assert_eq!(tapped(&world), [11]);
    world.pods.1.clear();
    run_for(&mut world, 2 * gone_look()).await.unwrap();
    assert_eq!(tapped(&world), [0; 0]);
}

/// The veth exists while the pod's processes run. The reader comes after the deletion.
#[tokio::test(start_paused = true)]
async fn a_reader_stays_out_of_an_opted_out_pod_without_an_object() {
    let wants = Wants::Named { pods: BTreeSet::new(), interfaces: ["dev11".to_owned()].into() };
    let reader = Capture { origin: Origin::Reader, wants, ..capture(&[]) };
    let captures = watch::Sender::default();
    let mut world = world_with(captures.subscribe());
    add_pod(&mut world, 1);
    world.pods.0.as_mut().unwrap()[0].netns = None;
    annotate(&mut world, "mirror", "false");
    run_for(&mut world, Duration::from_millis(1)).await.unwrap();
    assert_eq!(tapped(&world), [0; 0]);

    delete(&mut world);
    run_for(&mut world, Duration::from_secs(5)).await.unwrap();
    captures.send_replace(captured(reader));
    run_for(&mut world, A_MINUTE).await.unwrap();
    let report = world.report.borrow().clone();
    let reasons: Vec<_> = report.skipped.iter().map(|skipped| skipped.why.name()).collect();
    assert_eq!((tapped(&world), reasons), (vec![], vec!["OptedOut"]));

    world.links.links.pods.remove("uid-1");
    run_for(&mut world, 2 * gone_look()).await.unwrap();
    assert_eq!(tapped(&world), [11], "a device of nobody");
}
