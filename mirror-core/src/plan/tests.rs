//! The guarantees of a plan, over small worlds and any failures.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod sides;
mod worlds;

use mirror_common::verdict::TapKind;
use proptest::{
    collection::{btree_map, vec},
    prelude::*,
};
use worlds::{actual, desired, device, session, tap, target};

use super::*;
use crate::{
    destination::Destination,
    model::{Capacity, DeviceTarget, Directions, Name, Origin, Owner, Place, PodId},
    select::Why,
    settings::{NodeLimits, Settings, parse_filter},
    tunnel::Keys,
};

/// Whether a session does not fit because this table is full.
fn is_full(why: &Why, table: &str) -> bool {
    matches!(why, Why::NoRoom(why) if why.contains(table))
}

/// The installed state after all of `desired` that fits is installed.
fn installed(desired: &Desired, capacity: Capacity) -> Actual {
    settled(desired, &Actual::empty(capacity))
}

/// The installed state after `desired` has replaced `before`.
fn settled(desired: &Desired, before: &Actual) -> Actual {
    let (taps, _) = fit::fit(desired, before);
    let deliver: BTreeMap<_, _> =
        desired.deliver().into_iter().map(|ifindex| (ifindex, HookState::Current)).collect();
    let passed_by: BTreeMap<_, _> =
        before.passed_by.clone().into_iter().filter(|(ifindex, _)| deliver.contains_key(ifindex)).collect();
    let is_cutting = |ifindex| deliver.contains_key(&ifindex) && !passed_by.contains_key(&ifindex);
    let cuts = |target: &Target| target.ifindex().is_some_and(is_cutting);
    let with_cuts = |target: &Target| target.with_cuts(cuts(target));
    let mut installed = BTreeMap::<Device, ActualTap>::new();
    for (device, tap) in taps {
        let old = before.taps.get(&device);
        let goes_on = |mirror: &MirrorId| {
            let was =
                old.and_then(|old| old.tap.as_ref()).filter(|was| was.head.owner.is_same(&tap.head.owner));
            was.and_then(|was| was.sessions.get(mirror))
                .is_some_and(|was| was.asks_the_same(&tap.sessions[mirror]))
        };
        let ended = old.map(|old| old.ended.clone()).unwrap_or_default();
        let ended =
            ended.into_iter().filter(|(mirror, _)| tap.sessions.contains_key(mirror) && goes_on(mirror));
        let ended = ended.collect();
        for (at, program) in tap.head.hooks(device) {
            *installed.entry(at).or_default().state_mut(program) = HookState::Current;
        }
        let of = installed.entry(device).or_default();
        (of.ended, of.tap) = (ended, Some(tap));
    }
    Actual {
        targets: desired.targets.iter().map(|(name, target)| (name.clone(), with_cuts(target))).collect(),
        ceilings: desired.limits.ceilings(desired.owners()),
        taps: installed,
        deliver: deliver.clone(),
        hubs: desired.hub.map(|hub| (hub, HookState::Current)).into_iter().collect(),
        passed_by: passed_by.clone(),
        capacity: before.capacity,
        refused: before.refused.clone(),
    }
}

/// Applies a plan as the loop does. An op that is tried fails if `fails` returns true. `watch` sees the world before
/// each op.
fn carry_out(
    ops: &[Op],
    actual: &mut Actual,
    mut fails: impl FnMut(&Op) -> bool,
    mut watch: impl FnMut(&Actual, &Op),
) -> Failures {
    let mut failures = Failures::none(ops, actual);
    for op in ops {
        let is_done = failures.allow(op) && !fails(op) && {
            watch(actual, op);
            let done = apply(actual, op);
            // A session cannot get a target that could not be written. Nothing else is refused.
            assert!(done.is_ok() || matches!(op, Op::ChangeSession(..)), "{op:?}: {done:?}");
            done.is_ok()
        };
        if !is_done {
            failures.add(op);
        }
    }
    failures
}

/// Applies plans until nothing is left to do. A second plan is needed only while a tap changes sides.
fn carry_out_all(desired: &Desired, actual: &mut Actual) -> Result<(), TestCaseError> {
    let Plan { ops, coming, .. } = plan(desired, actual);
    carry_out(&ops, actual, |_| false, |_, _| {});
    let second = plan(desired, actual);
    prop_assert!(second.ops.is_empty() || !coming.is_empty(), "{:?}", second.ops);
    carry_out(&second.ops, actual, |_| false, |_, _| {});
    prop_assert_eq!(plan(desired, actual).ops, vec![]);
    Ok(())
}

/// The tap of a hook, in the plan for this wanted state.
fn of_hook(desired: &Desired, before: &Actual, hook: (Device, Program)) -> Option<(Device, Tap)> {
    let (mut taps, _) = fit::fit(desired, before);
    super::sides::settle(&mut taps, before);
    taps.into_iter().find(|(device, tap)| tap.head.hooks(*device).any(|of| of == hook))
}

fn same_owner<'a>(actual: &'a Actual, device: &Device, owner: &Owner) -> Option<&'a Tap> {
    actual.taps.get(device)?.tap.as_ref().filter(|tap| tap.head.owner.is_same(owner))
}

/// `wants` sessions in each namespace, at most 7 per pod. Up to `enforced` pods of a namespace also have an enforced
/// session.
fn crowd(wants: &[usize], enforced: usize) -> Desired {
    let session = |origin| Session {
        directions: Directions::Both,
        settings: Settings::default(),
        target: TargetName::default(),
        origin,
        asked: 0,
        key: None,
    };
    let mut taps = BTreeMap::new();
    for (namespace, wants) in wants.iter().enumerate() {
        for (pod, from) in (0..*wants).step_by(7).enumerate() {
            let named = |mirror: usize| MirrorId(format!("m{mirror}").parse().unwrap());
            let origin = Origin::Annotation(Place::Pod);
            let mut sessions: BTreeMap<_, _> =
                (from..(from + 7).min(*wants)).map(|mirror| (named(mirror), session(origin))).collect();
            if pod < enforced {
                sessions.insert(MirrorId("all".parse().unwrap()), session(Origin::Enforced));
            }
            let id = PodId {
                uid: format!("{namespace}-{pod}"),
                namespace: namespace.to_string(),
                name: pod.to_string(),
            };
            let owner = Owner { pod: Some(id), ..Owner::default() };
            let device = Device::on_node(IfIndex(u32::try_from(100 * namespace + pod + 1).unwrap()));
            taps.insert(device, Tap { head: TapHead::new(owner, TapKind::HostVeth), sessions });
        }
    }
    let target = Target::Device(DeviceTarget { ifindex: Some(IfIndex(9)), ..DeviceTarget::default() });
    Desired { targets: [(TargetName::default(), target)].into(), taps, ..Desired::default() }
}

/// A mirror gets another name, beside others of its tap. It is added before the old one is removed, unless the tap, the
/// table or the bits for its form are full.
#[test]
fn a_renamed_mirror_comes_before_it_goes_if_there_is_room() {
    for (mirrors, sessions, snaplens, new, is_added_first) in [
        (5, 6, [None; 4], None, true),
        (7, 8, [None; 4], None, true),
        (8, 9, [None; 4], None, false),
        (5, 5, [None; 4], None, false),
        (5, 6, [Some(100), Some(200), Some(300), Some(400)], Some(400), true),
        (5, 6, [Some(100), Some(200), Some(300), Some(400)], Some(500), false),
        (5, 6, [Some(100), Some(200), Some(300), None], Some(500), false),
        (5, 6, [Some(100), Some(200), None, None], Some(500), true),
    ] {
        let mut earlier = crowd(&[7], 0);
        let tap = earlier.taps.values_mut().next().unwrap();
        let template = tap.sessions.values().next().unwrap().clone();
        let named = |name: &str, snaplen| {
            let settings = Settings { snaplen, ..Settings::default() };
            (MirrorId(name.parse().unwrap()), Session { settings, ..template.clone() })
        };
        // The last four have the snap lengths, and the others that of the first of them.
        tap.sessions = (0..mirrors)
            .map(|number: usize| named(&format!("m{number}"), snaplens[(number + 4).saturating_sub(mirrors)]))
            .collect();
        let mut desired = earlier.clone();
        let tap = desired.taps.values_mut().next().unwrap();
        tap.sessions.pop_last();
        tap.sessions.extend([named("new", new)]);
        let capacity = Capacity { taps: 1, sessions, filters: 1, instructions: 1 };
        let Plan { ops, .. } = plan(&desired, &installed(&earlier, capacity));
        let at = |is: fn(&Op) -> bool| ops.iter().position(is).unwrap();
        let (added, removed) =
            (at(|op| matches!(op, Op::AddSession(..))), at(|op| matches!(op, Op::RemoveSession(..))));
        assert_eq!(
            added < removed,
            is_added_first,
            "{mirrors} of {sessions}, {snaplens:?} and {new:?}: {ops:?}"
        );
    }
}

/// Two namespaces share a filter, and there is room for one more. The second namespace already had its session, so it
/// gets the shared filter first; in the next round the first one does. Neither round takes a session slot from the
/// other.
#[test]
fn who_gets_a_shared_filter_first_does_not_matter() {
    let capacity = Capacity { taps: 100, sessions: 100, filters: 2, instructions: 100_000 };
    let mut desired = crowd(&[2, 2], 0);
    let mut earlier = desired.clone();
    earlier.taps.pop_first();
    earlier.taps.values_mut().for_each(|tap| drop(tap.sessions.pop_last()));
    let before = installed(&earlier, capacity);
    let sessions = desired.taps.values_mut().flat_map(|tap| tap.sessions.values_mut());
    for (session, filter) in sessions.zip(["tcp", "udp", "tcp", "icmp"]) {
        session.settings.filter = Some(parse_filter(filter).unwrap());
    }
    let mut actual = before.clone();
    carry_out_all(&desired, &mut actual).unwrap();
    assert_eq!(actual, settled(&desired, &before));
}

/// One session with a filter, on nodes where one table each is full, and on one with room.
#[test]
fn a_full_table_is_named() {
    let mut desired = crowd(&[1], 0);
    for session in desired.taps.values_mut().flat_map(|tap| tap.sessions.values_mut()) {
        session.settings.filter = Some(parse_filter("tcp").unwrap());
    }
    let instructions = "the limit of 3 instructions of all filters per node is exceeded by this filter";
    for ([taps, sessions, filters, instructions], expected) in [
        ([1, 1, 1, 99_999], vec![]),
        ([0, 1, 1, 99_999], vec!["the limit of 0 taps per node is reached"]),
        ([1, 0, 1, 99_999], vec!["the limit of 0 sessions (mirrors of NICs) per node is reached"]),
        ([1, 1, 0, 99_999], vec!["the limit of 0 different filters per node is reached"]),
        ([1, 1, 1, 3], vec![instructions]),
    ] {
        let actual = Actual::empty(Capacity { taps, sessions, filters, instructions });
        let (fitting, unfit) = fit::fit(&desired, &actual);
        assert_eq!(unfit.values().map(ToString::to_string).collect::<Vec<_>>(), expected);
        assert_eq!(fitting.len() + unfit.len(), 1);
    }
}

/// Two namespaces want the only filter. The first one already had the session that wants it, without a filter, so it
/// gets the filter. In the next round its other session comes first, and it keeps the filter.
#[test]
fn an_installed_filter_is_not_lost_in_the_next_round() {
    let capacity = Capacity { taps: 100, sessions: 100, filters: 1, instructions: 100_000 };
    let mut desired = crowd(&[2, 1], 0);
    let mut earlier = desired.clone();
    earlier.taps.pop_last();
    earlier.taps.values_mut().for_each(|tap| drop(tap.sessions.pop_first()));
    let sessions = desired.taps.values_mut().flat_map(|tap| tap.sessions.values_mut());
    for (session, filter) in sessions.zip([None, Some("udp"), Some("tcp")]) {
        session.settings.filter = filter.map(|filter| parse_filter(filter).unwrap());
    }
    carry_out_all(&desired, &mut installed(&earlier, capacity)).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// On a full node, each namespace has either as much as it wants, or no fewer sessions than any other. Installed
    /// sessions are kept up to that share. The next plan is empty.
    #[test]
    fn namespaces_share_the_sessions_of_a_full_node(
        wants in vec(0..40_usize, 1..6), installed_first in 0..6_usize, room in 1..60_usize, enforced in 0..6_usize,
    ) {
        let capacity = Capacity { taps: 999, sessions: room, filters: 9, instructions: 999 };
        let world = |wants: &[usize]| crowd(wants, enforced);
        // The namespaces arrive one after the other, on a node that can already be full.
        let mut actual = Actual::empty(capacity);
        carry_out_all(&world(&wants[..installed_first.min(wants.len())]), &mut actual)?;
        let all = world(&wants);
        carry_out_all(&all, &mut actual)?;
        prop_assert_eq!(plan(&all, &actual).ops, vec![]);

        let mut shares = vec![0_usize; wants.len()];
        let mut of_enforced = 0;
        for tap in actual.taps.values().filter_map(|installed| installed.tap.as_ref()) {
            let namespace: usize = tap.head.owner.pod.as_ref().unwrap().namespace.parse().unwrap();
            for session in tap.sessions.values() {
                match session.origin {
                    Origin::Enforced => of_enforced += 1,
                    _ => shares[namespace] += 1,
                }
            }
        }
        let all_enforced: usize = wants.iter().map(|wants| enforced.min(wants.div_ceil(7))).sum();
        prop_assert_eq!(of_enforced, all_enforced.min(room));
        prop_assert_eq!(shares.iter().sum::<usize>(), wants.iter().sum::<usize>().min(room - of_enforced));
        for (share, wants) in shares.iter().zip(&wants) {
            let most = *shares.iter().max().unwrap();
            prop_assert!(share == wants || share + 1 >= most, "{:?}", shares);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn a_plan_leads_to_what_is_wanted_and_then_there_is_no_more_to_do(desired in desired(), before in actual()) {
        let mut actual = before.clone();
        carry_out_all(&desired, &mut actual)?;
        prop_assert_eq!(&actual, &settled(&desired, &before));
    }

    /// A session that does not fit is reported, is not installed, and takes no slot from installed sessions.
    #[test]
    fn what_does_not_fit_is_told_and_not_in_place(desired in desired(), before in actual()) {
        let Plan { unfit, .. } = plan(&desired, &before);
        let mut actual = before.clone();
        carry_out_all(&desired, &mut actual)?;
        let in_place = |device: &Device, mirror: &MirrorId| {
            let tap = actual.taps.get(device).and_then(|installed| installed.tap.as_ref());
            tap.is_some_and(|tap| tap.sessions.contains_key(mirror))
        };
        for (device, tap) in &desired.taps {
            for mirror in tap.sessions.keys() {
                let is_unfit = unfit.contains_key(&(*device, mirror.clone()));
                prop_assert_ne!(in_place(device, mirror), is_unfit);
            }
        }
        let sessions: usize = actual.taps.values().flat_map(|installed| &installed.tap).map(|tap| tap.sessions.len()).sum();
        let entries = actual.taps.values().flat_map(|installed| &installed.tap);
        let entries: usize = entries.map(|tap| 1 + usize::from(tap.head.pod_side.is_some())).sum();
        prop_assert!(entries <= before.capacity.taps && sessions <= before.capacity.sessions);
        let installed = actual.taps.values().flat_map(|installed| &installed.tap).flat_map(|tap| tap.sessions.values());
        let filters: BTreeSet<_> = installed.filter_map(|session| session.settings.filter.as_ref()).collect();
        prop_assert!(filters.len() <= before.capacity.filters);
        let instructions: usize = filters.iter().map(|filter| filter.length()).sum();
        prop_assert!(instructions <= before.capacity.instructions);
        if unfit.values().any(|why| is_full(why, "sessions")) {
            prop_assert_eq!(sessions, before.capacity.sessions);
        }
    }

    /// Any ops can fail independently, and the loop continues with the others.
    #[test]
    fn whatever_fails_nothing_is_copied_that_nobody_asked_for(
        desired in desired(), before in actual(), failing in vec(prop::bool::weighted(0.3), 200),
    ) {
        let mut actual = before.clone();
        let mut failing = failing.into_iter();
        let mut all = Ok(());
        let fails = |_: &Op| failing.next().unwrap_or(false);
        let failures = carry_out(&plan(&desired, &before).ops, &mut actual, fails, |now, op| {
            if all.is_ok() {
                all = is_safe(now, op, &desired, &before);
            }
        });
        all?;
        let (fitting, _) = fit::fit(&desired, &before);
        for (device, now) in &actual.taps {
            let Some(tap) = &now.tap else { continue };
            for (mirror, session) in &tap.sessions {
                let was = same_owner(&before, device, &tap.head.owner).and_then(|tap| tap.sessions.get(mirror));
                let wanted = fitting.get(device).filter(|wanted| wanted.head.owner.is_same(&tap.head.owner));
                let wanted = wanted.and_then(|wanted| wanted.sessions.get(mirror));
                prop_assert!(Some(session) == was || Some(session) == wanted, "{:?}", session);
                prop_assert!(actual.targets.contains_key(&session.target), "its target is gone");
            }
        }
        // A target is marked as cutting only if the second stage is attached, or if it was marked before.
        for (name, target) in actual.targets.iter().filter(|(_, target)| cuts(target)) {
            prop_assert!(is_cut_at(target, &actual) || before.targets.get(name) == Some(target));
        }
        // The next round repairs everything.
        drop(failures);
        let between = actual.clone();
        carry_out_all(&desired, &mut actual)?;
        prop_assert_eq!(actual, settled(&desired, &between));
    }

    /// If a second stage cannot be attached, only the new sessions that need it for cutting are stopped.
    #[test]
    fn a_second_stage_that_fails_stops_no_session_that_is_not_cut(desired in desired(), before in actual()) {
        let mut actual = before.clone();
        let fails = |op: &Op| matches!(op, Op::Attach(_, Program::Deliver));
        carry_out(&plan(&desired, &before).ops, &mut actual, fails, |_, _| {});
        for (device, tap) in fit::fit(&desired, &before).0 {
            let installed = &actual.taps[&device];
            let runs = |(at, program): (Device, Program)| actual.taps[&at].state(program) == HookState::Current;
            prop_assert!(tap.head.hooks(device).all(runs));
            for (mirror, session) in tap.sessions {
                let is_installed = installed.tap.as_ref().unwrap().sessions.get(&mirror) == Some(&session);
                prop_assert!(is_installed || session.settings.snaplen.is_some(), "{:?}", session);
            }
        }
        prop_assert!(actual.targets.keys().eq(desired.targets.keys()));
    }

    /// Each tap has its own key from a range, and keeps it as long as it is installed. (Without a range all had one key,
    /// which only one of them can keep.)
    #[test]
    fn a_tap_has_its_own_tunnel_key_and_keeps_it(desired in desired(), before in actual()) {
        let mut actual = before.clone();
        let Plan { ops, unfit, .. } = plan(&desired, &before);
        carry_out(&ops, &mut actual, |_| false, |_, _| {});
        for (name, target) in &desired.targets {
            let keys = |target: &Target| Some(target.device()?.destination.tunnel()?.keys);
            let were_own = before.targets.get(name).and_then(keys).is_some_and(Keys::is_range);
            let keys = keys(target);
            let mut owners = BTreeMap::new();
            for (device, installed) in &actual.taps {
                let Some(tap) = &installed.tap else { continue };
                for (mirror, session) in tap.sessions.iter().filter(|(_, session)| session.target == *name) {
                    prop_assert_eq!(session.key.is_some(), keys.is_some());
                    let (Some(key), Some(keys)) = (session.key, keys) else { continue };
                    prop_assert!(keys.has(key));
                    let owner = *owners.entry(key).or_insert(*device);
                    prop_assert!(owner == *device || keys.first == keys.last, "one key for two taps");
                    let was = same_owner(&before, device, &tap.head.owner).and_then(|tap| tap.sessions.get(mirror));
                    let was = was.filter(|was| were_own && was.target == *name).and_then(|was| was.key);
                    prop_assert!(was.is_none_or(|was| was == key || !keys.has(was)), "{:?}: {} now", was, key);
                }
            }
            let lacking = unfit.iter().any(|((device, mirror), why)| is_full(why, "keys of the target's tunnel")
                && desired.taps[device].sessions[mirror].target == *name);
            prop_assert!(!lacking || keys.is_some_and(Keys::is_range));
        }
    }

    /// A mirror with another name is installed before the old one is removed, or at once after it if the tables are full;
    /// slow ops, such as detaching other taps' programs, come last.
    #[test]
    fn a_mirror_that_replaces_another_one_waits_for_nothing(desired in desired(), before in actual()) {
        let Plan { ops, .. } = plan(&desired, &before);
        let is_hook = |op: &Op| matches!(op, Op::Detach(_, program) if program.is_tap());
        let hooks = ops.iter().position(is_hook).unwrap_or(ops.len());
        prop_assert!(ops[hooks..].iter().all(|op| matches!(op, Op::Detach(..) | Op::SetTarget(..) | Op::RemoveTarget(_))));
        for (at, op) in ops.iter().enumerate() {
            let Op::AddSession(device, mirror, _) = op else { continue };
            let same = |op: &Op| op.device() == Some(*device);
            let removes = |op: &Op| matches!(op, Op::RemoveSession(of, _) if of == device);
            if let Some(removed) = ops[..at].iter().rposition(removes) && !ops[at..].iter().any(removes) {
                prop_assert!(ops[removed..at].iter().all(same), "{} waits", mirror.0);
            }
        }
        let sessions = |actual: &Actual| -> usize {
            actual.taps.values().flat_map(|installed| &installed.tap).map(|tap| tap.sessions.len()).sum()
        };
        let wanted = fit::fit(&desired, &before).0;
        let beside = fit::fits_beside(&wanted, &before);
        // The owners of taps with a mirror before and after.
        let goes_on = |(device, tap): (&Device, &Tap)| {
            let old = same_owner(&before, device, &tap.head.owner)?;
            let most = tap.sessions.len() + leaving(old, tap).1.len();
            let goes_on = !old.sessions.is_empty() && !tap.sessions.is_empty();
            (beside && goes_on && most <= MAX_SESSIONS_PER_TAP).then_some((*device, tap.head.owner.clone()))
        };
        let go_on: Vec<_> = wanted.iter().filter_map(goes_on).collect();
        let (mut actual, mut most, mut bare) = (before.clone(), 0, None);
        carry_out(&ops, &mut actual, |_| false, |now, op| {
            most = most.max(sessions(now));
            let is_bare = |(device, owner): &&(Device, Owner)| {
                same_owner(now, device, owner).is_none_or(|tap| tap.sessions.is_empty())
            };
            bare = bare.take().or_else(|| go_on.iter().find(is_bare).map(|of| (of.clone(), op.clone())));
        });
        prop_assert_eq!(bare, None);
        prop_assert!(most <= before.capacity.sessions.max(sessions(&before)).max(sessions(&actual)));
    }

    /// All targets can get new names at once, and the table holds both sets.
    #[test]
    fn no_more_targets_are_installed_than_there_are_before_or_after(desired in desired(), before in actual()) {
        let in_use = targets_in_use(&before);
        let mut actual = before.clone();
        let mut most = 0;
        carry_out(&plan(&desired, &before).ops, &mut actual, |_| false, |now, op| {
            if matches!(op, Op::SetTarget(..)) {
                most = most.max(now.targets.len());
            }
        });
        prop_assert!(most <= in_use.len() + desired.targets.len());
    }

    /// Captures, of root and of readers, take no slot from a mirror, not even captures that are already installed.
    #[test]
    fn captures_take_no_place_from_a_mirror(
        first in desired(), then in desired(), captured in any::<u64>(), capacity in worlds::capacity(),
    ) {
        let mut captures = 0;
        let mut with_captures = |desired: &Desired| {
            let mut desired = desired.clone();
            for (device, tap) in &mut desired.taps {
                if captured >> (device.ifindex.0 % 64) & 1 == 1 && let Some(session) = tap.sessions.values().next() {
                    captures += 1;
                    let origin = if captures % 2 == 0 { Origin::Capture } else { Origin::Reader };
                    let session = Session { origin, ..session.clone() };
                    tap.sessions.insert(MirrorId(Name::of_capture(captures)), session);
                }
            }
            desired
        };
        let mirrors = |mut taps: BTreeMap<Device, Tap>| {
            for tap in taps.values_mut() {
                tap.sessions.retain(|mirror, _| !mirror.0.is_capture());
            }
            taps.retain(|_, tap| !tap.sessions.is_empty());
            taps
        };
        let without = fit::fit(&then, &installed(&first, capacity)).0;
        let before = installed(&with_captures(&first), capacity);
        let with = fit::fit(&with_captures(&then), &before).0;
        prop_assert_eq!(mirrors(with), mirrors(without));
    }

    /// Readers of the API take no slot from a capture of root, not even readers that are already installed.
    #[test]
    fn readers_take_no_place_from_a_capture(
        first in desired(), then in desired(), read in any::<u64>(), capacity in worlds::capacity(),
    ) {
        let captured = |desired: &Desired, read: u64| {
            let mut desired = desired.clone();
            for (number, (device, tap)) in (1..).zip(&mut desired.taps) {
                tap.sessions.values_mut().for_each(|session| session.origin = Origin::Capture);
                if read >> (device.ifindex.0 % 64) & 1 == 1 && let Some(session) = tap.sessions.values().next() {
                    let session = Session { origin: Origin::Reader, ..session.clone() };
                    tap.sessions.insert(MirrorId(Name::of_capture(number)), session);
                }
            }
            desired
        };
        let of_root = |taps: BTreeMap<Device, Tap>| -> BTreeSet<(Device, MirrorId)> {
            let sessions = taps.into_iter().flat_map(|(device, tap)| {
                tap.sessions.into_iter().map(move |(mirror, session)| (device, mirror, session.origin))
            });
            let of_root = sessions.filter(|(.., origin)| *origin == Origin::Capture);
            of_root.map(|(device, mirror, _)| (device, mirror)).collect()
        };
        let without = fit::fit(&captured(&then, 0), &installed(&captured(&first, 0), capacity)).0;
        let before = installed(&captured(&first, read), capacity);
        let with = fit::fit(&captured(&then, read), &before).0;
        prop_assert_eq!(of_root(with), of_root(without));
    }

    /// The kernel stores a tap's limits in the sessions of its mirrors. So a tap that has only captures is read back
    /// without limits, and this must not cause a write in each round.
    #[test]
    fn a_tap_with_captures_only_is_written_once(mut desired in desired()) {
        for tap in desired.taps.values_mut() {
            let captures = (1..).map(|number| MirrorId(Name::of_capture(number)));
            let sessions = tap.sessions.values().map(|of| Session { origin: Origin::Capture, ..of.clone() });
            (tap.head.is_limited, tap.sessions) = (true, captures.zip(sessions).collect());
        }
        let mut actual = Actual::empty(Capacity { taps: 9, sessions: 99, filters: 99, instructions: 99_999 });
        carry_out_all(&desired, &mut actual)?;
        let read = actual.taps.values_mut().filter_map(|installed| installed.tap.as_mut());
        read.for_each(|tap| tap.head.is_limited = false);
        prop_assert_eq!(plan(&desired, &actual).ops, vec![]);
    }

    /// If the node has no more sessions, changed and new sessions of a namespace take no slot from its unchanged ones.
    /// (If several tables are full, a session that needs less of another table can take its place.)
    #[test]
    fn an_unchanged_session_keeps_its_place_in_the_namespace(
        first in desired(), changes in btree_map(device(), tap(), 1..5), sessions in 1..6_usize,
    ) {
        let capacity = Capacity { taps: 100, sessions, filters: 100, instructions: 100_000 };
        let before = installed(&first, capacity);
        let mut after = first.clone();
        for (device, change) in changes {
            // The same owner with other sessions, or another tap.
            let tap = after.taps.entry(device).or_insert(change.clone());
            tap.sessions.extend(change.sessions);
        }
        let is_kept = |device: &Device, tap: &Tap, mirror: &MirrorId| {
            let was = same_owner(&before, device, &tap.head.owner).and_then(|tap| tap.sessions.get(mirror));
            was == tap.sessions.get(mirror)
        };
        let namespace = |tap: &Tap| tap.head.owner.pod.as_ref().map(|pod| pod.namespace.clone());
        let mut kept = BTreeSet::new();
        let (fitting, unfit) = fit::fit(&after, &before);
        for ((device, mirror), why) in unfit {
            let wanted = &after.taps[&device];
            if is_kept(&device, wanted, &mirror) && is_full(&why, "sessions") {
                kept.insert(namespace(wanted));
            }
        }
        for (device, tap) in fitting.iter().filter(|(_, tap)| kept.contains(&namespace(tap))) {
            for mirror in tap.sessions.keys() {
                prop_assert!(is_kept(device, tap, mirror), "{device} {mirror:?}");
            }
        }
    }

    /// A change of one mirror does not affect the others. It is written over the session, without a gap, and the
    /// counters are kept.
    #[test]
    fn a_change_of_one_session_is_one_op(device in device(), tap in tap(), targets in (target(), target()), change in session()) {
        let capacity = Capacity { taps: 9, sessions: 99, filters: 99, instructions: 99_999 };
        let change = Session { settings: Settings { snaplen: None, ..change.settings }, ..change };
        let sessions = tap.sessions.into_iter().map(|(mirror, session)| {
            let settings = Settings { snaplen: None, ..session.settings };
            (mirror, Session { settings, ..session })
        });
        let tap = Tap { sessions: sessions.collect(), ..tap };
        let names = ["default", "ids"].map(|name| TargetName(name.parse().unwrap()));
        // A tunnel would need a second stage, too.
        let targets = [targets.0, targets.1].map(|target| match target {
            Target::Device(device) => Target::Device(DeviceTarget { destination: Destination::default(), ..device }),
            stream @ Target::Stream(_) => stream,
        });
        let targets = names.into_iter().zip(targets).collect();
        let taps = [(device, tap.clone())].into();
        let before = Desired { targets, limits: NodeLimits::default(), taps, hub: None };
        let mirror = tap.sessions.keys().next().unwrap().clone();
        let mut after = before.clone();
        after.taps.get_mut(&device).unwrap().sessions.insert(mirror.clone(), change.clone());
        let ops = plan(&after, &installed(&before, capacity)).ops;
        let expected = Op::ChangeSession(device, mirror.clone(), Box::new(change.clone()));
        prop_assert_eq!(ops, if tap.sessions[&mirror] == change { vec![] } else { vec![expected] });
    }

    /// A veth can move to another bridge. One write changes the entry of its tap, which keeps its sessions and hooks.
    #[test]
    fn a_change_of_the_bridge_is_one_op_for_each_tap(desired in desired()) {
        let capacity = Capacity { taps: 99, sessions: 99, filters: 99, instructions: 99_999 };
        let before = installed(&desired, capacity);
        let mut moved = desired.clone();
        moved.taps.values_mut().for_each(|tap| tap.head.bridge = Some(IfIndex(99)));
        let put = |(device, tap): (&Device, &Tap)| Op::PutTap(*device, Box::new(tap.head.clone()));
        let expected: Vec<_> = fit::fit(&moved, &before).0.iter().map(put).collect();
        prop_assert_eq!(plan(&moved, &before).ops, expected);
    }

    /// Before the pods are known only targets are written, and no op removes anything.
    #[test]
    fn targets_are_kept_right_before_the_pods_are_known(desired in desired(), before in actual()) {
        let mut actual = before.clone();
        carry_out(&retarget(&desired.targets, &before), &mut actual, |_| false, |_, _| {});
        prop_assert_eq!(&actual.taps, &before.taps);
        prop_assert_eq!(&actual.deliver, &before.deliver);
        for target in desired.targets.keys().map(|name| &actual.targets[name]).filter(|target| cuts(target)) {
            prop_assert!(is_cut_at(target, &actual));
        }
        for (name, target) in &desired.targets {
            prop_assert_eq!(&actual.targets[name].with_cuts(false), target);
        }
    }
}

fn cuts(target: &Target) -> bool {
    target.device().is_some_and(|device| device.cuts)
}

/// Whether a second stage that cuts every copy can run at a target.
fn is_cut_at(target: &Target, actual: &Actual) -> bool {
    target.ifindex().is_some_and(|ifindex| {
        let state = actual.deliver.get(&ifindex);
        matches!(state, Some(HookState::Current | HookState::Stale | HookState::Unknown))
            && !actual.passed_by.contains_key(&ifindex)
    })
}

/// Whether an op is safe in the current world.
fn is_safe(now: &Actual, op: &Op, desired: &Desired, before: &Actual) -> Result<(), TestCaseError> {
    let entry = |device: &Device| now.taps.get(device).and_then(|installed| installed.tap.as_ref());
    match op {
        // A program is attached only if the entry has the wanted owner and all its sessions.
        Op::Attach(at, program @ (Program::TapIngress | Program::TapEgress)) => {
            let (device, wanted) = of_hook(desired, before, (*at, *program)).unwrap();
            let tap = entry(&device).unwrap();
            prop_assert!(tap.head.owner == wanted.head.owner);
            prop_assert!(
                tap.sessions.iter().all(|(mirror, session)| wanted.sessions.get(mirror) == Some(session))
            );
        }
        // A new session finds its target, its limits, and the second stage if it needs it.
        Op::AddSession(device, _, session) => {
            let target = &now.targets[&session.target];
            let is_passed_by = target.ifindex().is_some_and(|ifindex| now.passed_by.contains_key(&ifindex));
            let is_cut = cuts(target) || session.settings.snaplen.is_none() || target.ifindex().is_none();
            prop_assert!(is_cut || is_passed_by);
            prop_assert_eq!(target.with_cuts(false), desired.targets[&session.target].with_cuts(false));
            prop_assert_eq!(now.ceilings, desired.limits.ceilings(desired.owners()));
            prop_assert!(entry(device).unwrap().head.owner == desired.taps[device].head.owner);
        }
        // Counters of one owner never become those of another.
        Op::PutTap(device, head) => {
            prop_assert!(entry(device).is_none_or(|tap| tap.head.owner.is_same(&head.owner)));
        }
        // Only if no tap is wanted, or no wanted session fits, or the tap has left this side.
        Op::Detach(at, program @ (Program::TapIngress | Program::TapEgress)) => {
            prop_assert_eq!(of_hook(desired, before, (*at, *program)), None);
        }
        // No session needs it any more.
        Op::Detach(device, Program::Deliver) => {
            prop_assert!(!desired.deliver().contains(&device.ifindex));
        }
        _ => {}
    }
    Ok(())
}
