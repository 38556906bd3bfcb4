//! The reactions of the loop to new, changed and deleted MirrorTargets, and of a new agent before it knows them.

use mirror_core::model::{Target, TargetResource};
use proptest::{collection::vec, prelude::*, sample::select};

use super::*;

fn name(text: &str) -> TargetName {
    TargetName(text.parse().unwrap())
}

fn resource(of: &str, to: &str) -> TargetResource {
    TargetResource {
        name: name(of),
        uid: format!("uid-{of}"),
        generation: 1,
        created: 0,
        destination: to.parse(),
        namespaces: Selector::default(),
        max_rate: None,
    }
}

/// The installed targets, and their devices.
fn installed(world: &World) -> Vec<(String, String)> {
    let targets = &world.dataplane.actual.targets;
    let device = |target: &Target| target.device().map(|device| device.device.clone()).unwrap_or_default();
    targets.iter().map(|(name, target)| (name.to_string(), device(target))).collect()
}

/// The devices that the agent has created.
fn made(world: &World) -> BTreeSet<String> {
    let links = world.links.links.host.values();
    links.filter(|link| link.alias.as_deref() == Some(ALIAS)).map(|link| link.name.clone()).collect()
}

/// A new agent on the node of an earlier one, before its first list.
fn started_again(before: World) -> World {
    let mut world = world();
    (world.links, world.dataplane) = (before.links, before.dataplane);
    world
}

const SOON: Duration = Duration::from_millis(1);

#[tokio::test(start_paused = true)]
async fn a_pod_is_not_covered_while_the_target_of_its_mirror_is_down_for_long() {
    let mut world = world();
    add_pod(&mut world, 1);
    world.pods.1.push(mirror_all(Some("ids")));
    world.pods.2.push(resource("ids", "ids0"));
    let mut told = Vec::new();
    let long = Duration::from_secs(10);
    for (up, time) in
        [(true, SOON), (false, long / 2), (true, SOON), (false, long / 2), (false, long), (true, SOON)]
    {
        let mut links = world.links.links.host.values_mut();
        links.find(|link| link.name == "ids0").into_iter().for_each(|ids0| ids0.up = up);
        run_for(&mut world, time).await.unwrap();
        let of_all = world.report.borrow().resources[0].clone();
        told.push((of_all.covered.len(), of_all.not_covered.iter().map(|of| of.reason).collect::<Vec<_>>()));
    }
    let (is, is_not) = ((1, vec![]), (0, vec!["TargetDown"]));
    assert_eq!(told, [is.clone(), is.clone(), is.clone(), is.clone(), is_not, is]);
}

/// A device that can be neither deleted nor set up does not affect others: the agent is ready, and events do not wait.
#[tokio::test(start_paused = true)]
async fn a_device_that_cannot_be_changed_blocks_no_round() {
    let mut world = world();
    add_pod(&mut world, 1);
    let old = Link { name: "old0".into(), alias: Some(ALIAS.into()), ..link(50, LinkKind::Dummy) };
    world.links.links.host.insert(old.ifindex, old);
    let down = Link { name: "mirror0".into(), up: false, ..link(51, LinkKind::Dummy) };
    world.links.links.host.insert(down.ifindex, down);
    world.links.refuses_changes = true;
    assert!(!world.round().await.unwrap(), "blocked");
    let report = Report::clone(&world.reports().borrow());
    assert_eq!((report.failures.len(), report.is_reconciled, tapped(&world)), (2, true, vec![11]));
    world.links.refuses_changes = false;
    run_for(&mut world, TICK * 2).await.unwrap();
    assert!(world.report.borrow().failures.is_empty() && !world.links.links.host.contains_key(&IfIndex(50)));
    assert!(world.links.links.host[&IfIndex(51)].up);
}

/// An event in the history of a node.
#[derive(Debug, Clone)]
enum Step {
    /// These are the MirrorTargets now.
    List(Vec<(&'static str, &'static str)>),
    /// Another agent takes over, and has no list yet.
    Restart,
    /// A device of podmirror disappears.
    Lose,
}

fn any_step() -> impl Strategy<Value = Step> {
    let names = select(vec!["ids", "lab", "west"]);
    let destinations = select(vec!["ids0", "ids1", "mirror0", "pod:a/b", "vxlan:10.9.0.5:14789/vni=1"]);
    prop_oneof![
        4 => vec((names, destinations), 0..4).prop_map(Step::List),
        2 => Just(Step::Restart),
        1 => Just(Step::Lose),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// After any history the node has exactly the targets of the list and their devices. Without a list nothing is
    /// removed.
    #[test]
    fn any_history_ends_with_the_targets_of_the_list(steps in vec(any_step(), 1..12)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let mut world = world();
            add_pod(&mut world, 1);
            world.pods.1.push(mirror_all(Some("ids")));
            let (mut listed, mut list) = (true, Vec::new());
            for step in steps {
                match step {
                    Step::List(mut targets) => {
                        // An API server has only one object with a name.
                        targets.sort();
                        targets.dedup_by_key(|(name, _)| *name);
                        list = targets.iter().map(|(of, to)| resource(of, to)).collect();
                        if !listed {
                            world.pods.0 = Some(Vec::new());
                        }
                        listed = true;
                        world.pods.2.clone_from(&list);
                    }
                    Step::Restart => {
                        world = started_again(world);
                        listed = false;
                    }
                    Step::Lose => {
                        let ours = |link: &&Link| link.alias.as_deref() == Some(ALIAS);
                        let lost = world.links.links.host.values().find(ours).map(|link| link.ifindex);
                        lost.map(|lost| world.links.links.host.remove(&lost));
                    }
                }
                let (before, had) = (installed(&world), made(&world));
                run_for(&mut world, TICK * 2).await.unwrap();
                if listed {
                    let own = [(TargetName::default(), Destination::Device("mirror0".into()))].into();
                    let all = mirror_core::targets::join(&own, &list).all;
                    let names: Vec<_> = installed(&world).into_iter().map(|(name, _)| name).collect();
                    prop_assert_eq!(names, all.keys().map(ToString::to_string).collect::<Vec<_>>());
                    let devices = all.values().filter_map(Destination::device).map(str::to_owned);
                    prop_assert_eq!(made(&world), devices.collect::<BTreeSet<_>>());
                } else {
                    let names = |all: Vec<(String, String)>| all.into_iter().map(|(name, _)| name).collect::<BTreeSet<_>>();
                    prop_assert!(names(before).is_subset(&names(installed(&world))));
                    prop_assert!(had.is_subset(&made(&world)));
                }
            }
            Ok(())
        })?;
    }
}
