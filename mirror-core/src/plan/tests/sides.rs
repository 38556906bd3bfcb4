//! A tap changes sides: no packet is missed, whatever fails.

use mirror_common::verdict::{Direction, Hook, TapKind};
use proptest::{collection::vec, prelude::*};

use super::{
    super::*,
    carry_out, installed, same_owner,
    worlds::{actual, desired},
};
use crate::{
    model::{Capacity, Directions, Hidden, NetnsId, Origin, Owner, PodId, PodSide},
    settings::{NodeLimits, Settings},
};

const NODE_END: Device = Device::on_node(IfIndex(11));
const NIC: Device = Device::in_pod(NetnsId { dev: 4, ino: 7 }, IfIndex(2));

/// Whether a program with an entry sees the ingress of the pod of this owner.
fn sees_ingress(actual: &Actual, device: Device, owner: &Owner) -> bool {
    let Some(tap) = same_owner(actual, &device, owner) else { return false };
    let at_node = (!tap.head.sees_inside()).then(|| tap.head.own_hook(device, Direction::Ingress));
    at_node.into_iter().chain([tap.head.hook(device, Direction::Ingress)]).any(|(at, program)| {
        let state = actual.taps.get(&at).map(|installed| installed.state(program));
        matches!(state, Some(HookState::Current | HookState::Stale))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Packets that were seen before are still seen, before each op of every plan and whichever ops fail.
    #[test]
    fn whatever_fails_no_packet_is_missed(
        desired in desired(), before in actual(), failing in vec(prop::bool::weighted(0.3), 200),
    ) {
        let mut actual = before.clone();
        let mut failing = failing.into_iter();
        // A tap that does not fit is removed.
        let mut seen: BTreeMap<_, _> = before.taps.keys().map(|device| (*device, Owner::default())).collect();
        for _ in 0..3 {
            let (fitting, _) = fit::fit(&desired, &actual);
            seen.retain(|device, owner| {
                let Some(tap) = fitting.get(device) else { return false };
                *owner = tap.head.owner.clone();
                sees_ingress(&before, *device, owner)
            });
            let stays = |now: &Actual| seen.iter().all(|(device, owner)| sees_ingress(now, *device, owner));
            let mut missed = None;
            carry_out(&plan(&desired, &actual).ops, &mut actual, |_| failing.next().unwrap_or(false), |now, op| {
                if !stays(now) {
                    missed.get_or_insert(op.clone());
                }
            });
            prop_assert_eq!(missed, None);
            prop_assert!(stays(&actual));
        }
    }
}

/// A tap with one session, on this side.
fn wanted(nic: Option<IfIndex>) -> Desired {
    let owner = Owner {
        pod: Some(PodId { uid: "1".into(), ..PodId::default() }),
        netns: NetnsId { dev: 4, ino: 7 },
        ..Owner::default()
    };
    let session = Session {
        directions: Directions::Both,
        settings: Settings::default(),
        target: TargetName::default(),
        origin: Origin::Policy,
        asked: 0,
        key: None,
    };
    let sessions = [(MirrorId::default(), session)].into();
    let (exit, pod_side) = (nic, nic.map(PodSide::seeing));
    let head = TapHead { exit, pod_side, ..TapHead::new(owner, TapKind::HostVeth) };
    Desired {
        targets: [(TargetName::default(), Target::Stream(None))].into(),
        limits: NodeLimits::default(),
        taps: [(NODE_END, Tap { head, sessions })].into(),
        hub: None,
    }
}

/// The op that writes the entry of a tap, whose pod side already sees or does not yet.
fn put(desired: &Desired, sees: bool) -> Op {
    let mut tap = desired.taps[&NODE_END].clone();
    if let Some(side) = &mut tap.head.pod_side {
        side.sees = sees;
    }
    Op::PutTap(NODE_END, Box::new(tap.head))
}

/// The order of the ops, in both directions.
#[test]
fn both_sides_see_until_the_new_one_is_found_in_place() {
    let capacity = Capacity { taps: 9, sessions: 99, filters: 99, instructions: 99_999 };
    let [node, inside] = [None, Some(NIC.ifindex)].map(wanted);
    let mut actual = installed(&node, capacity);
    let mut step = |desired: &Desired| {
        let Plan { ops, coming, .. } = plan(desired, &actual);
        carry_out(&ops, &mut actual, |_| false, |_, _| {});
        (ops, coming.into_iter().collect::<Vec<_>>())
    };
    let (attach, detach) = (Op::Attach(NIC, Program::TapIngress), Op::Detach(NIC, Program::TapIngress));
    assert_eq!(step(&inside), (vec![put(&inside, false), attach], vec![NIC]));
    assert_eq!(step(&inside), (vec![put(&inside, true)], vec![]));
    assert_eq!(step(&inside), (vec![], vec![]));
    assert_eq!(step(&node), (vec![put(&inside, false)], vec![NODE_END]));
    assert_eq!(step(&node), (vec![put(&node, false), detach], vec![]));
    assert_eq!(step(&node), (vec![], vec![]));
    assert_eq!(actual, installed(&node, capacity));
}

/// With an ingress qdisc, the device on the node has no egress hook, and the tap waits for nothing there.
#[test]
fn a_tap_leaves_the_pod_for_a_side_without_a_hook() {
    let capacity = Capacity { taps: 9, sessions: 99, filters: 99, instructions: 99_999 };
    let [node, inside] = [None, Some(NIC.ifindex)].map(wanted);
    let mut actual = installed(&inside, capacity);
    let end = actual.taps.get_mut(&NODE_END).unwrap();
    (end.egress, end.hidden) = (HookState::Absent, vec![(Hook::Egress, Hidden::NoHook)]);
    let mut step = || {
        let Plan { ops, coming, .. } = plan(&node, &actual);
        carry_out(&ops, &mut actual, |_| false, |_, _| {});
        (ops, coming.into_iter().collect::<Vec<_>>())
    };
    assert_eq!(step(), (vec![put(&inside, false)], vec![NODE_END]));
    assert_eq!(step(), (vec![put(&node, false), Op::Detach(NIC, Program::TapIngress)], vec![]));
    assert_eq!(step(), (vec![], vec![]));
}

/// If the entry of a side could not be written, that side gets no program, and the program on the node side stays.
#[test]
fn a_side_without_its_entry_is_not_changed_to() {
    let capacity = Capacity { taps: 9, sessions: 99, filters: 99, instructions: 99_999 };
    let [node, inside] = [None, Some(NIC.ifindex)].map(wanted);
    let mut actual = installed(&node, capacity);
    for _ in 0..3 {
        carry_out(&plan(&inside, &actual).ops, &mut actual, |op| matches!(op, Op::PutTap(..)), |_, _| {});
        assert_eq!(actual, installed(&node, capacity));
    }
    // Only the program could not be attached.
    carry_out(&plan(&inside, &actual).ops, &mut actual, |op| matches!(op, Op::Attach(..)), |_, _| {});
    assert!(sees_ingress(&actual, NODE_END, &inside.taps[&NODE_END].head.owner));
    assert_eq!(plan(&inside, &actual).ops, [Op::Attach(NIC, Program::TapIngress)]);
}

/// The pod side copies with the sessions of its tap. It gets no program until these are as wanted.
#[test]
fn a_session_that_could_not_be_changed_keeps_the_second_side_waiting() {
    let capacity = Capacity { taps: 9, sessions: 99, filters: 99, instructions: 99_999 };
    let [node, mut inside] = [None, Some(NIC.ifindex)].map(wanted);
    for session in inside.taps.values_mut().flat_map(|tap| tap.sessions.values_mut()) {
        session.directions = Directions::Ingress;
    }
    let mut actual = installed(&node, capacity);
    let ops = plan(&inside, &actual).ops;
    let attach = Op::Attach(NIC, Program::TapIngress);
    assert!(ops.contains(&attach) && ops.iter().any(|op| matches!(op, Op::ChangeSession(..))));
    carry_out(&ops, &mut actual, |op| matches!(op, Op::ChangeSession(..)), |_, op| assert_ne!(*op, attach));
    assert_eq!(actual.taps.get(&NIC).map(|nic| nic.state(Program::TapIngress)), None);
    for _ in 0..2 {
        carry_out(&plan(&inside, &actual).ops, &mut actual, |_| false, |_, _| {});
    }
    assert_eq!(plan(&inside, &actual).ops, []);
    assert!(actual.taps[&NODE_END].tap.as_ref().is_some_and(|tap| tap.head.sees_inside()));
}
