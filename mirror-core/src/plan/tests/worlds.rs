//! Small worlds: wanted states, and installed states that result from other wanted states.

use mirror_common::verdict::TapKind;
use proptest::{
    collection::{btree_map, vec},
    option,
    prelude::*,
    sample,
};

use super::{super::*, installed};
use crate::{
    model::{
        Capacity, DeviceTarget, Directions, Ended, Hidden, NetnsId, Origin, Owner, Place, PodId, PodSide,
        RingId,
    },
    settings::{CaptureFilter, Ceilings, NodeLimits, Rate, Settings, parse_filter},
};

fn owner() -> impl Strategy<Value = Owner> {
    // Few of each, so that the same device, pod and namespace occur again in other combinations.
    (option::weighted(0.8, 0..3u8), 7..9u64, 0..2u8).prop_map(|(pod, ino, name)| Owner {
        pod: pod.map(|uid| PodId {
            uid: format!("uid-{uid}"),
            namespace: "default".into(),
            name: format!("pod-{}", uid / 2),
        }),
        netns: if pod.is_some() { NetnsId { dev: 4, ino } } else { NetnsId::default() },
        nic: format!("eth{name}"),
        network: (name == 1).then(|| format!("shop/net{ino}")),
        device: format!("veth{name}"),
    })
}

fn target_name() -> impl Strategy<Value = TargetName> {
    sample::select(vec!["default", "ids"]).prop_map(|name| TargetName(name.parse().unwrap()))
}

fn filter() -> impl Strategy<Value = Option<CaptureFilter>> {
    option::of(sample::select(vec!["tcp", "udp", "icmp"]).prop_map(|text| parse_filter(text).unwrap()))
}

pub(super) fn session() -> impl Strategy<Value = Session> {
    let directions = sample::select(Directions::ALL.to_vec());
    let origin = sample::select(vec![Origin::Policy, Origin::Annotation(Place::Pod)]);
    (directions, option::of(Just(96)), filter(), target_name(), origin).prop_map(
        |(directions, snaplen, filter, target, origin)| Session {
            directions,
            settings: Settings { snaplen, filter, ..Settings::default() },
            target,
            origin,
            asked: 0,
            key: None,
        },
    )
}

fn bridge() -> impl Strategy<Value = Option<IfIndex>> {
    option::of((3..5u32).prop_map(IfIndex))
}

pub(super) fn tap() -> impl Strategy<Value = Tap> {
    let mirror = sample::select(vec!["a", "b", "c"]).prop_map(|name| MirrorId(name.parse().unwrap()));
    let exit = option::of((1..3u32).prop_map(IfIndex));
    let sides = (exit, bridge(), prop::bool::weighted(0.4));
    (owner(), any::<bool>(), sides, btree_map(mirror, session(), 1..4)).prop_map(
        |(owner, is_limited, (exit, bridge, is_split), sessions)| {
            let kind = if owner.pod.is_some() { TapKind::HostVeth } else { TapKind::Interface };
            let pod_side = (is_split && owner.pod.is_some()).then_some(PodSide::seeing(IfIndex(9)));
            Tap { head: TapHead { owner, kind, is_limited, exit, bridge, pod_side }, sessions }
        },
    )
}

pub(super) fn target() -> impl Strategy<Value = Target> {
    // One key for all, and ranges that are too short for all taps.
    let destination =
        sample::select(vec!["mirror0", "gre:10.9.0.5/key=7", "gre:10.9.0.5/key=5-7", "gre:10.9.0.5/key=6-9"]);
    let ceiling = option::weighted(0.3, Just(rate(10)));
    let device = (destination, option::of(100..103u32), any::<[bool; 3]>(), bridge(), ceiling).prop_map(
        |(destination, ifindex, [up, queueless, when_read], bridge, ceiling)| {
            let (destination, ifindex) = (destination.parse().unwrap(), ifindex.map(IfIndex));
            let device = "mirror0".to_owned();
            Target::Device(DeviceTarget {
                destination,
                device,
                ifindex,
                up,
                queueless,
                bridge,
                when_read,
                ceiling: ceiling.map(|rate| rate.limits()).unwrap_or_default(),
                ..DeviceTarget::default()
            })
        },
    );
    let stream = option::of(7..9u32).prop_map(|ring| Target::Stream(ring.map(RingId)));
    prop_oneof![4 => device, 1 => stream]
}

pub(super) fn device() -> impl Strategy<Value = Device> {
    (1..6u32, 0..2u64)
        .prop_map(|(ifindex, ino)| Device { netns: NetnsId { dev: ino * 4, ino }, ifindex: IfIndex(ifindex) })
}

fn limits() -> impl Strategy<Value = NodeLimits> {
    let rate = || option::of(sample::select(vec![10, 1000]).prop_map(rate));
    (rate(), rate(), rate()).prop_map(|(max_rate, max_pod_rate, max_namespace_rate)| NodeLimits {
        max_rate,
        max_pod_rate,
        max_namespace_rate,
    })
}

fn rate(packets: u64) -> Rate {
    Rate { packets: Some(packets), bits: None, burst: std::time::Duration::from_millis(50) }
}

pub(super) fn desired() -> impl Strategy<Value = Desired> {
    let hub = option::of((200..202u32).prop_map(IfIndex));
    (target(), option::weighted(0.7, target()), limits(), btree_map(device(), tap(), 0..5), hub).prop_map(
        |(first, second, limits, mut taps, hub)| {
            let mut targets = BTreeMap::from([(TargetName::default(), first)]);
            targets.extend(second.map(|second| (TargetName("ids".parse().unwrap()), second)));
            // A NIC is the peer of one veth only.
            for (Device { netns, ifindex }, tap) in &mut taps {
                let nic = IfIndex(10 * ifindex.0 + netns.ino as u32);
                tap.head.pod_side = tap.head.pod_side.map(|_| PodSide::seeing(nic));
            }
            // A session names a target that exists: `select` refuses others.
            for session in taps.values_mut().flat_map(|tap| tap.sessions.values_mut()) {
                if !targets.contains_key(&session.target) {
                    session.target = TargetName::default();
                }
            }
            Desired { targets, limits, taps, hub }
        },
    )
}

pub(super) fn capacity() -> impl Strategy<Value = Capacity> {
    let some = || prop_oneof![Just(100usize), 1..6usize];
    let instructions = prop_oneof![Just(100_000usize), 1..1000usize];
    (some(), some(), some(), instructions).prop_map(|(taps, sessions, filters, instructions)| Capacity {
        taps,
        sessions,
        filters,
        instructions,
    })
}

/// The state that an agent has installed for another wanted state, with later changes by other software.
pub(super) fn actual() -> impl Strategy<Value = Actual> {
    let states =
        [HookState::Absent, HookState::Unknown, HookState::Dead, HookState::Stale, HookState::Current];
    let state = || sample::select(states.to_vec());
    let often = prop::bool::weighted;
    let change = (state(), state(), often(0.8), often(0.3), often(0.3));
    let deliver = btree_map((100..103u32).prop_map(IfIndex), state(), 0..3);
    let hubs = btree_map((200..202u32).prop_map(IfIndex), state(), 0..2);
    let passed_by = sample::subsequence(vec![100, 101, 102], 0..=3);
    (desired(), capacity(), vec(change, 10), deliver, hubs, passed_by, any::<bool>()).prop_map(
        |(desired, capacity, changes, deliver, hubs, passed_by, forgot_ceilings)| {
            let mut actual = installed(&desired, capacity);
            actual.hubs.extend(hubs);
            actual.hubs.retain(|_, state| *state != HookState::Absent);
            for (installed, (ingress, egress, has_entry, has_ended, both)) in
                actual.taps.values_mut().zip(changes)
            {
                (installed.ingress, installed.egress) = (ingress, egress);
                if has_ended {
                    let sessions = installed.tap.iter().flat_map(|tap| tap.sessions.keys());
                    installed.ended = sessions.map(|mirror| (mirror.clone(), Ended::Packets)).collect();
                }
                if let Some(side) = installed.tap.as_mut().and_then(|tap| tap.head.pod_side.as_mut()) {
                    side.sees = !both;
                }
                if !has_entry {
                    (installed.tap, installed.ended) = (None, BTreeMap::new());
                }
            }
            actual.taps.retain(|_, installed| *installed != ActualTap::default());
            actual.deliver.extend(deliver);
            actual.deliver.retain(|_, state| *state != HookState::Absent);
            let passed_by = passed_by.into_iter().map(IfIndex);
            let passed_by =
                passed_by.filter(|ifindex| actual.deliver.get(ifindex) == Some(&HookState::Current));
            actual.passed_by = passed_by.map(|ifindex| (ifindex, Hidden::NoHook)).collect();
            if forgot_ceilings {
                actual.ceilings = Ceilings::default();
            }
            actual
        },
    )
}
