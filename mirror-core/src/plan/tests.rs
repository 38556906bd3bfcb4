//! What a plan promises, over all small worlds.

use proptest::{collection::btree_map, option, prelude::*, sample};

use mirror_common::limit::Limits;

use super::*;
use crate::{
    model::{Directions, NetnsId, Owner, PodId, Target},
    settings::Settings,
};

fn owner() -> impl Strategy<Value = Owner> {
    // Few of each, so that the same device, pod and namespace meet again in other combinations.
    (option::weighted(0.8, 0..3u8), 0..2u64, 0..2u8).prop_map(|(pod, ino, name)| Owner {
        pod: pod.map(|uid| PodId {
            uid: format!("uid-{uid}"),
            namespace: "default".into(),
            name: format!("pod-{}", uid / 2),
        }),
        netns: if pod.is_some() { NetnsId { dev: 4, ino } } else { NetnsId::default() },
        nic: format!("eth{name}"),
        device: format!("veth{name}"),
    })
}

fn tap() -> impl Strategy<Value = Tap> {
    let directions = sample::select(vec![Directions::Ingress, Directions::Egress, Directions::Both]);
    let snaplen = option::of(Just(96));
    (owner(), directions, snaplen).prop_map(|(owner, directions, snaplen)| {
        let settings = Settings { snaplen, ..Settings::default() };
        Tap { owner, directions, settings }
    })
}

fn target() -> impl Strategy<Value = Target> {
    (option::of(100..102u32), any::<bool>(), any::<bool>()).prop_map(|(ifindex, up, queueless)| Target {
        name: "mirror0".into(),
        ifindex: ifindex.map(IfIndex),
        up,
        queueless,
        limits: Limits::default(),
    })
}

fn ifindex() -> impl Strategy<Value = IfIndex> {
    (1..6u32).prop_map(IfIndex)
}

fn desired() -> impl Strategy<Value = Desired> {
    (target(), btree_map(ifindex(), tap(), 0..5)).prop_map(|(target, taps)| Desired { target, taps })
}

fn actual() -> impl Strategy<Value = Actual> {
    let state = || sample::select(vec![HookState::Absent, HookState::Stale, HookState::Current]);
    let installed = (option::of(tap()), state(), state())
        .prop_map(|(tap, ingress, egress)| ActualTap {
            tap,
            ended: None,
            ingress,
            egress,
            hidden: Vec::new(),
        })
        .prop_filter("nothing of ours is not in the list", |tap| {
            tap.tap.is_some() || tap.ingress != HookState::Absent || tap.egress != HookState::Absent
        });
    let deliver = sample::select(vec![HookState::Stale, HookState::Current]);
    (
        target(),
        btree_map(ifindex(), installed, 0..5),
        btree_map((100..102u32).prop_map(IfIndex), deliver, 0..2),
    )
        .prop_map(|(target, taps, deliver)| Actual { target, taps, deliver, ..Actual::default() })
}

/// What is installed when exactly `desired` is.
fn installed(desired: &Desired) -> Actual {
    let taps = desired.taps.iter().map(|(ifindex, tap)| {
        let hooks = HookState::Current;
        (
            *ifindex,
            ActualTap {
                tap: Some(tap.clone()),
                ended: None,
                ingress: hooks,
                egress: hooks,
                hidden: Vec::new(),
            },
        )
    });
    let deliver = desired.deliver().map(|ifindex| (ifindex, HookState::Current));
    Actual {
        target: desired.target.clone(),
        taps: taps.collect(),
        deliver: deliver.into_iter().collect(),
        ..Actual::default()
    }
}

proptest! {
    #[test]
    fn a_plan_leads_to_what_is_wanted(desired in desired(), mut actual in actual()) {
        for op in plan(&desired, &actual.clone()) {
            apply(&mut actual, &op);
        }
        prop_assert_eq!(actual, installed(&desired));
    }

    #[test]
    fn what_is_wanted_needs_no_plan(desired in desired()) {
        prop_assert_eq!(plan(&desired, &installed(&desired)), vec![]);
    }

    /// Ops may fail one by one, or the agent may die after any of them.
    #[test]
    fn every_prefix_is_safe_and_can_be_resumed(desired in desired(), before in actual(), cut: sample::Index) {
        let ops = plan(&desired, &before);
        let cut = cut.index(ops.len() + 1);
        let mut actual = before.clone();
        for op in &ops[..cut] {
            let entry = |ifindex| actual.taps.get(ifindex).and_then(|installed| installed.tap.clone());
            match op {
                // Copies that are to be cut are cut from the first one on.
                Op::Attach(ifindex, Program::Deliver) => prop_assert_eq!(desired.deliver(), Some(*ifindex)),
                Op::Detach(ifindex, Program::Deliver) => prop_assert_ne!(desired.deliver(), Some(*ifindex)),
                // A program is attached only where the entry says what it is for.
                Op::Attach(ifindex, _) => {
                    prop_assert_eq!(entry(ifindex), desired.taps.get(ifindex).cloned());
                }
                Op::Detach(ifindex, _) => prop_assert_eq!(entry(ifindex), None),
                // Counters of one owner never become those of another.
                Op::PutTap(ifindex, tap) => {
                    let is_cut = desired.deliver().is_none_or(|at| actual.deliver.contains_key(&at));
                    prop_assert!(tap.settings.snaplen.is_none() || is_cut);
                    prop_assert!(entry(ifindex).is_none_or(|old| same_tap(&old, tap)));
                }
                Op::RemoveTap(_) | Op::SetTarget(_) => {}
            }
            apply(&mut actual, op);
        }
        for (ifindex, now) in &actual.taps {
            let old = before.taps.get(ifindex).and_then(|then| then.tap.as_ref());
            let tap = now.tap.as_ref();
            prop_assert!(tap.is_none() || tap == old || tap == desired.taps.get(ifindex));
        }
        for op in plan(&desired, &actual.clone()) {
            apply(&mut actual, &op);
        }
        prop_assert_eq!(actual, installed(&desired));
    }

    /// A changed direction is written over the entry, without a gap and with the counters kept.
    #[test]
    fn a_change_of_direction_is_one_op(ifindex in ifindex(), tap in tap(), target in target()) {
        let before = Desired { target, taps: [(ifindex, tap.clone())].into() };
        let mut after = before.clone();
        let directions =
            if tap.directions == Directions::Both { Directions::Egress } else { Directions::Both };
        let changed = Tap { directions, ..tap };
        after.taps.insert(ifindex, changed.clone());
        prop_assert_eq!(plan(&after, &installed(&before)), vec![Op::PutTap(ifindex, Box::new(changed))]);
    }
}
