//! Tests of the targets of flags together with MirrorTargets.

#![expect(clippy::unwrap_used, reason = "tests panic")]

use std::time::Duration;

use proptest::{collection::vec, prelude::*, sample::select};

use super::*;
use crate::model::IfIndex;

fn name(text: &str) -> TargetName {
    TargetName(text.parse().unwrap())
}

fn own() -> BTreeMap<TargetName, Destination> {
    [("default", "mirror0"), ("ids", "vxlan:10.9.0.5:14789/vni=77"), ("live", "stream")]
        .map(|(of, to)| (name(of), to.parse().unwrap()))
        .into()
}

const RATE: Rate = Rate { packets: Some(9), bits: None, burst: Duration::from_millis(50) };

fn resource(of: &str, created: i64, to: &str) -> TargetResource {
    TargetResource {
        name: name(of),
        uid: format!("uid-{of}"),
        generation: created,
        created,
        destination: to.parse(),
        namespaces: Selector::default(),
        max_rate: None,
    }
}

#[test]
fn a_mirror_target_stands_beside_the_flags_and_the_older_one_comes_first() {
    let resources = [
        resource("late", 9, "ids0"),
        TargetResource { max_rate: Some(RATE), ..resource("early", 8, "ids0") },
        TargetResource { max_rate: Some(RATE), ..resource("ids", 1, "ids1") },
        resource("same-keys", 1, "vxlan:10.9.0.5:14789/vni=70-80"),
        resource("other-keys", 1, "vxlan:10.9.0.5:14789/vni=80-90"),
        resource("broken", 1, "vxlan:10.9.0.5/vni=1"),
        resource("iface", 1, "mirror0"),
    ];
    let Targets { all, users, max_rates, refused } = join(&own(), &resources);
    assert_eq!(
        all.keys().map(ToString::to_string).collect::<Vec<_>>(),
        ["default", "early", "ids", "live", "other-keys"]
    );
    assert_eq!(all[&name("ids")], own()[&name("ids")], "the administrator of the node comes first");
    assert_eq!(users.keys().collect::<Vec<_>>(), [&name("early"), &name("other-keys")]);
    assert_eq!(max_rates, [(name("early"), RATE)].into(), "not of a MirrorTarget that is refused");
    let refused: Vec<_> = refused.iter().map(|(of, why)| format!("{of}: {why}")).collect();
    assert_eq!(
        refused[1..],
        [
            "ids: the destination of target ids is already vxlan:10.9.0.5:14789/vni=77",
            "iface: mirror0 is already the destination of target default",
            "late: ids0 is already the destination of target early",
            "same-keys: the target ids, vxlan:10.9.0.5:14789/vni=77, has the same keys; use others",
        ]
    );
    assert!(
        refused[0].starts_with("broken: \"10.9.0.5\" is not an address of a vxlan tunnel"),
        "{refused:?}"
    );
}

fn device(ifindex: Option<u32>, up: bool) -> Target {
    let destination = "ids0".parse().unwrap();
    let ifindex = ifindex.map(IfIndex);
    Target::Device(DeviceTarget {
        destination,
        device: "ids0".into(),
        ifindex,
        up,
        ..DeviceTarget::default()
    })
}

#[test]
fn each_mirror_target_is_told_as_what_it_is_on_the_node() {
    let resources = ["up", "new", "down", "bad", "away", "gone", "stream"].map(|of| resource(of, 3, "ids0"));
    let refused = [(name("bad"), "it has no address".to_owned())].into();
    let away = "no pod a/b runs here".to_owned();
    let present = [
        (name("away"), device(None, false)),
        (name("bad"), device(Some(7), true)),
        (name("down"), device(Some(7), false)),
        (name("gone"), device(None, false)),
        (name("own"), device(Some(7), true)),
        (name("stream"), Target::Stream(None)),
        (name("up"), device(Some(7), true)),
    ];
    let present = present.into();
    let down: Vec<_> = down(&present, |of| (*of == name("away")).then_some(&away)).into_iter().collect();
    let expected = [
        ("away", "no pod a/b runs here"),
        ("down", "the device ids0 is down"),
        ("gone", "the device of ids0 does not exist"),
    ];
    assert_eq!(down, expected.map(|(of, why)| (name(of), why.to_owned())));
    let told = states(&resources, &refused, &present);
    let expected = ["away", "bad", "down", "gone", "stream", "up"].map(|of| match of {
        "bad" => {
            TargetResource { destination: Err("it has no address".to_owned()), ..resource(of, 3, "ids0") }
        }
        of => resource(of, 3, "ids0"),
    });
    assert_eq!(told, expected);
}

#[test]
fn a_device_of_a_tunnel_is_no_mirror_interface() {
    let tunnel: Destination = "gre:10.9.0.5/key=1/device=gre7".parse().unwrap();
    let device = Destination::Device("gre7".into());
    let beside = |to: &Destination| BTreeMap::from([(name("a"), to.clone())]);
    let why = objection(&name("b"), &device, &beside(&tunnel)).unwrap();
    assert_eq!(why, "the target gre:10.9.0.5/key=1/device=gre7 uses the device gre7; name another device");
    let why = objection(&name("b"), &tunnel, &beside(&device)).unwrap();
    assert_eq!(why, "it uses the device gre7, which is the target a; use another device");
}

#[test]
fn before_a_list_installed_targets_stay() {
    let installed = [("old", "old0"), ("ids", "ids1"), ("again", "mirror0"), ("capture", "stream")];
    let installed: Vec<(_, Destination)> = installed.map(|(of, to)| (name(of), to.parse().unwrap())).into();
    let all = until_listed(&own(), installed.iter().map(|(of, to)| (of, to.clone())));
    let mut expected = own();
    expected.insert(name("old"), Destination::Device("old0".into()));
    assert_eq!(all, expected);
}

fn any_destination() -> impl Strategy<Value = Result<Destination, String>> {
    select(vec![
        "ids0",
        "ids1",
        "mirror0",
        "pod:a/b",
        "pod:a/app=b",
        "vxlan:10.9.0.5:14789/vni=1-50",
        "vxlan:10.9.0.5:14789/vni=50-99",
        "vxlan:10.9.0.6:14789/vni=1",
        "gre:10.9.0.5/key=7/device=ids0",
        "no:no",
    ])
    .prop_map(str::parse)
}

proptest! {
    #[test]
    fn any_mirror_targets_leave_the_node_with_targets_that_agree(
        resources in vec(("[a-f]", 0..3_i64, any_destination()), 0..24),
    ) {
        let resources: Vec<_> = resources
            .into_iter()
            .map(|(of, created, destination)| TargetResource { destination, ..resource(&of, created, "ids0") })
            .collect();
        let targets = join(&own(), &resources);
        // The targets of the flags are unchanged, and open to all namespaces.
        for (of, to) in own() {
            prop_assert_eq!(&targets.all[&of], &to);
            prop_assert!(!targets.users.contains_key(&of));
        }
        prop_assert!(targets.all.len() <= MAX_TARGETS as usize);
        // Each could have been a flag together with the others.
        for (of, to) in &targets.all {
            let mut others = targets.all.clone();
            others.remove(of);
            prop_assert_eq!(objection(of, to, &others), None);
        }
        // Each name of a MirrorTarget is a target or refused. A refused one can have the name of an older one.
        for resource in &resources {
            let of = &resource.name;
            prop_assert!(targets.users.contains_key(of) || targets.refused.contains_key(of));
        }
        // The order of the list does not matter, unless two of one name were created at the same time.
        let mut sorted = resources.clone();
        sorted.sort_by(|a, b| (&a.name, a.created).cmp(&(&b.name, b.created)));
        sorted.dedup_by(|a, b| a.name == b.name);
        let mut reversed = sorted.clone();
        reversed.reverse();
        prop_assert_eq!(join(&own(), &sorted), join(&own(), &reversed));
        // Each is reported once, with its state.
        let present: BTreeMap<_, _> = targets.all.keys().map(|of| (of.clone(), device(Some(7), true))).collect();
        let told = states(&sorted, &targets.refused, &present);
        let names: Vec<_> = sorted.iter().map(|resource| resource.name.clone()).collect();
        prop_assert_eq!(told.iter().map(|of| of.name.clone()).collect::<Vec<_>>(), names);
        for TargetResource { name, destination, .. } in told {
            prop_assert_eq!(destination.as_ref().err(), targets.refused.get(&name));
        }
    }
}
