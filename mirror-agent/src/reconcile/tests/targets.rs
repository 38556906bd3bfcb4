//! The reactions of the loop to new, changed and deleted MirrorTargets, and of a new agent before it knows them.

use mirror_common::limit::Limits;
use mirror_core::{
    model::{Target, TargetResource},
    settings::parse_rate,
};
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
async fn a_mirror_target_comes_changes_and_goes() {
    let mut world = world();
    add_pod(&mut world, 1);
    world.pods.1.push(mirror_all(Some("ids")));
    run_for(&mut world, SOON).await.unwrap();
    let sessions = |world: &World| {
        let tap = world.dataplane.actual.taps[&device(11)].tap.as_ref().unwrap();
        tap.sessions.iter().map(|(mirror, of)| format!("{mirror} {}", of.target)).collect::<Vec<_>>()
    };
    assert_eq!(sessions(&world), ["default default"], "the node has no such target yet");

    world.pods.2.push(resource("ids", "ids0"));
    run_for(&mut world, SOON).await.unwrap();
    assert_eq!(sessions(&world), ["default default", "mirror/all ids"]);
    assert_eq!(
        installed(&world),
        [("default", "mirror0"), ("ids", "ids0")].map(|(a, b)| (a.into(), b.into()))
    );
    assert_eq!(made(&world), ["ids0".to_owned(), "mirror0".to_owned()].into());
    assert_eq!(world.links.followed, world.memory.policy.targets);

    world.pods.2 = vec![resource("ids", "ids1")];
    run_for(&mut world, SOON).await.unwrap();
    assert_eq!(sessions(&world), ["default default", "mirror/all ids"]);
    assert_eq!(
        installed(&world),
        [("default", "mirror0"), ("ids", "ids1")].map(|(a, b)| (a.into(), b.into()))
    );

    world.pods.2.clear();
    run_for(&mut world, SOON).await.unwrap();
    assert_eq!(sessions(&world), ["default default"]);
    run_for(&mut world, TICK * 2).await.unwrap();
    assert_eq!(installed(&world), [("default".into(), "mirror0".into())]);
    assert_eq!(made(&world), ["mirror0".to_owned()].into(), "nothing is left behind");
}

#[tokio::test(start_paused = true)]
async fn the_limit_of_a_mirror_target_changes_and_stays_without_a_list() {
    let mut world = world();
    add_pod(&mut world, 1);
    world.pods.1.push(mirror_all(Some("ids")));
    let ceiling =
        |world: &World, of: &str| world.dataplane.actual.targets[&name(of)].device().unwrap().ceiling;
    let none = Limits::default();
    for max_rate in [None, parse_rate("9pps").ok(), parse_rate("1Gbit").ok(), None, parse_rate("5pps").ok()] {
        world.pods.2 = vec![TargetResource { max_rate, ..resource("ids", "ids0") }];
        run_for(&mut world, SOON).await.unwrap();
        assert_eq!(ceiling(&world, "ids"), max_rate.map_or(none, |rate| rate.limits()));
        assert_eq!(ceiling(&world, "default"), none);
    }
    let mut world = started_again(world);
    run_for(&mut world, TICK * 2).await.unwrap();
    assert_eq!(ceiling(&world, "ids"), parse_rate("5pps").unwrap().limits());
    world.pods.0 = Some(Vec::new());
    world.pods.2 = vec![resource("ids", "ids0")];
    run_for(&mut world, TICK * 2).await.unwrap();
    assert_eq!(ceiling(&world, "ids"), none);
}

#[tokio::test(start_paused = true)]
async fn a_mirror_target_that_cannot_be_stops_no_agent_and_says_why() {
    let mut world = world();
    let lo = Link { name: "lo".into(), ..link(1, LinkKind::Loopback) };
    world.links.links.host.insert(IfIndex(1), lo);
    add_pod(&mut world, 1);
    world.pods.1.push(mirror_all(Some("ids")));
    world.pods.2 = vec![resource("bad", "mirror0"), resource("ids", "lo")];
    run_for(&mut world, SOON).await.unwrap();
    assert_eq!(tapped(&world), [11]);
    let report = Report::clone(&world.reports().borrow());
    let unreached: Vec<_> = report.unreached.iter().map(|(name, why)| format!("{name}: {why}")).collect();
    assert!(
        unreached.len() == 1 && unreached[0].starts_with("ids: lo cannot be the mirror interface"),
        "{unreached:?}"
    );
    assert!(world.memory.policy.refused_targets.contains_key(&name("bad")));
    let [bad, ids] = &report.targets[..] else { panic!("{report:?}") };
    assert_eq!((bad.name.clone(), bad.uid.as_str(), bad.generation), (name("bad"), "uid-bad", 1));
    let why = "mirror0 is already the destination of target default".to_owned();
    assert_eq!((bad.destination.as_ref().err(), ids.destination.as_ref().err()), (Some(&why), None));
    assert_eq!(report.down, report.unreached, "each pod of it is reported");
    let message = format!("nothing is copied to the target ids now: {}", report.down[&name("ids")]);
    run_for(&mut world, Duration::from_secs(11)).await.unwrap();
    let report = world.report.borrow().clone();
    let told: Vec<_> =
        report.resources[0].not_covered.iter().map(|of| (of.reason, of.message.as_str())).collect();
    assert_eq!(told, [("TargetDown", message.as_str())]);
}

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

/// A device that cannot be deleted does not affect others: the agent is ready, and events do not wait.
#[tokio::test(start_paused = true)]
async fn a_device_that_cannot_be_deleted_blocks_no_round() {
    let mut world = world();
    add_pod(&mut world, 1);
    let old = Link { name: "old0".into(), alias: Some(ALIAS.into()), ..link(50, LinkKind::Dummy) };
    world.links.links.host.insert(old.ifindex, old);
    world.links.refuses_deletions = true;
    assert!(!world.round().await.unwrap(), "blocked");
    let report = Report::clone(&world.reports().borrow());
    assert_eq!((report.failures.len(), report.is_reconciled, tapped(&world)), (1, true, vec![11]));
    world.links.refuses_deletions = false;
    run_for(&mut world, TICK * 2).await.unwrap();
    assert!(world.report.borrow().failures.is_empty() && !world.links.links.host.contains_key(&IfIndex(50)));
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
