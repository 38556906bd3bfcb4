//! Limits in the kernel: sessions, pods, shares and the node, and charges that are returned. `mirror-common` tests the
//! rules; these tests check that the programs follow them.

use std::time::Duration;

use mirror_common::{
    abi::{MAX_SESSIONS, SESSION_METERED, SESSION_POD_METERED, Session, TARGET_METERED, Tap},
    limit::{Level, Limits},
    verdict::{Direction::Ingress, Hook, Verdict},
};
use mirror_tests::Frame;

use crate::bench::{BOTH, Bench, READY, at, counted, session, tap};

const LEN: usize = 60;
/// A rate at which the second packet passes only after 11 days.
const RARE: Limits = Limits {
    ticks_per_packet: 1_000_000_000_000_000 << 10,
    ..Limits::of_rate(1, 0, Duration::from_millis(50))
};

fn packet() -> Vec<u8> {
    Frame::new([2; 6], [4; 6]).filled(LEN, 0).bytes()
}

/// Writes a tap of the pod with these meters. Each session copies its packets, whatever their marks.
fn put_pod(bench: &mut Bench, pod_meter: u32, sessions: &[Session]) {
    let sessions: Vec<_> = sessions.iter().map(|session| Session { mark: 0, ..*session }).collect();
    bench.put_entry(&Tap { pod_meter, ..tap(at(true), &sessions) });
}

/// A session to which the limits of the pod and the node apply.
fn pod_metered(id: u32) -> Session {
    Session { flags: SESSION_POD_METERED, ..session(id, 0, BOTH) }
}

#[test]
fn a_budget_ends_at_its_packet_and_a_lost_copy_costs_nothing() {
    let mut bench = Bench::new("budget");
    bench.put_device(0, "target0", READY);
    bench.put_device(1, "idle", READY);
    for settings in [0, MAX_SESSIONS + 1] {
        bench.put_limits(Level::Session, settings, Limits { packets: 3, ..Limits::default() });
    }
    // The second session's settings are in another slot, as after a change.
    let metered = |id, target| Session {
        flags: SESSION_METERED,
        settings: [0, MAX_SESSIONS + 1][id as usize],
        ..session(id, target, BOTH)
    };
    put_pod(&mut bench, 0, &[metered(0, 0), metered(1, 1)]);
    bench.run(Hook::Egress, &packet(), 5);
    assert_eq!(
        bench.counted(0),
        counted(LEN, &[(Ingress, Verdict::Copied, 3), (Ingress, Verdict::Ended, 2)])
    );
    assert_eq!(bench.counted(1), counted(LEN, &[(Ingress, Verdict::TargetDown, 5)]));
    assert_eq!([0, 1].map(|id| bench.used(Level::Session, id)), [3, 0]);
}

#[test]
fn a_pods_ceiling_holds_for_all_of_its_taps_together() {
    let mut bench = Bench::new("ceiling");
    bench.put_device(0, "target0", READY);
    bench.put_limits(Level::Pod, 0, RARE);
    bench.put_limits(Level::Session, 0, Limits { packets: 9, ..Limits::default() });
    let metered = Session { flags: SESSION_METERED | SESSION_POD_METERED, ..session(0, 0, BOTH) };
    put_pod(&mut bench, 7, &[metered]);
    bench.run(Hook::Egress, &packet(), 3);
    assert_eq!(
        bench.counted(0),
        counted(LEN, &[(Ingress, Verdict::Copied, 1), (Ingress, Verdict::Limited, 2)])
    );
    assert_eq!(bench.used(Level::Session, 0), 1, "what the pod's ceiling refuses, the session gets back");

    put_pod(&mut bench, 7, &[pod_metered(1)]);
    bench.run(Hook::Egress, &packet(), 3);
    assert_eq!(bench.counted(1), counted(LEN, &[(Ingress, Verdict::Limited, 3)]), "another tap of the pod");
    put_pod(&mut bench, 8, &[pod_metered(2)]);
    bench.run(Hook::Egress, &packet(), 3);
    assert_eq!(
        bench.counted(2),
        counted(LEN, &[(Ingress, Verdict::Copied, 1), (Ingress, Verdict::Limited, 2)])
    );
    put_pod(&mut bench, 7, &[session(3, 0, BOTH)]);
    bench.run(Hook::Egress, &packet(), 3);
    assert_eq!(bench.counted(3), counted(LEN, &[(Ingress, Verdict::Copied, 3)]), "a capture is free");
    assert_eq!((bench.used_by_pod(7), bench.used_by_pod(8)), ([1, 0, 0], [1, 0, 0]));
}

#[test]
fn a_pod_gets_its_share_though_another_has_taken_the_nodes_rate() {
    for has_share in [true, false] {
        let mut bench = Bench::new("share");
        bench.put_device(0, "target0", READY);
        bench.put_limits(Level::Node, 0, RARE);
        if has_share {
            bench.put_limits(Level::Share, 0, RARE.share(2));
        }
        for pod in [0, 1] {
            put_pod(&mut bench, pod, &[pod_metered(pod)]);
            bench.run(Hook::Egress, &packet(), 3);
        }
        let first = counted(LEN, &[(Ingress, Verdict::Copied, 1), (Ingress, Verdict::Limited, 2)]);
        let second = if has_share { first.clone() } else { counted(LEN, &[(Ingress, Verdict::Limited, 3)]) };
        assert_eq!([bench.counted(0), bench.counted(1)], [first, second], "share: {has_share}");
        let copied = if has_share { 2 } else { 1 };
        let charged = u64::from(has_share);
        assert_eq!(bench.used_by_pod(0), [charged, charged, copied], "a pod without limits has no meter");
    }
}

#[test]
fn a_lost_copy_costs_no_limit_of_any_level() {
    let mut bench = Bench::new("refund");
    bench.put_device(0, "idle", READY | TARGET_METERED);
    for level in Level::ALL {
        bench.put_limits(level, 0, RARE);
    }
    let metered = Session { flags: SESSION_METERED | SESSION_POD_METERED, ..session(0, 0, BOTH) };
    bench.put_entry(&Tap { namespace_meter: 1, ..tap(at(true), &[metered]) });
    bench.run(Hook::Egress, &packet(), 4);
    assert_eq!(bench.counted(0), counted(LEN, &[(Ingress, Verdict::TargetDown, 4)]));
    assert_eq!(Level::ALL.map(|level| bench.used(level, 0)), [0; 6]);
}

/// The ceiling belongs to the target: its sessions at all taps share it, and other targets are not affected.
#[test]
fn a_targets_ceiling_holds_for_all_sessions_together() {
    let mut bench = Bench::new("target-ceiling");
    bench.put_device(0, "target0", READY | TARGET_METERED);
    bench.put_device(1, "target1", READY);
    for place in [0, 1] {
        bench.put_limits(Level::Target, place, RARE);
    }
    let once = counted(LEN, &[(Ingress, Verdict::Copied, 1), (Ingress, Verdict::Limited, 2)]);
    put_pod(&mut bench, 0, &[session(0, 0, BOTH), session(1, 1, BOTH)]);
    bench.run(Hook::Egress, &packet(), 3);
    let free = counted(LEN, &[(Ingress, Verdict::Copied, 3)]);
    assert_eq!([bench.counted(0), bench.counted(1)], [once, free], "the second target has no ceiling");
    put_pod(&mut bench, 9, &[session(2, 0, BOTH)]);
    bench.run(Hook::Egress, &packet(), 3);
    assert_eq!(bench.counted(2), counted(LEN, &[(Ingress, Verdict::Limited, 3)]), "another pod's session");
    assert_eq!([0, 1].map(|place| bench.used(Level::Target, place)), [1, 0]);
}

/// The pods of a namespace share its ceiling. A copy that it refuses is not charged to the pod and the session.
#[test]
fn a_namespaces_ceiling_holds_for_all_of_its_pods_together() {
    let mut bench = Bench::new("ns-ceiling");
    bench.put_device(0, "target0", READY);
    bench.put_limits(Level::Namespace, 0, RARE);
    bench.put_limits(Level::Pod, 0, Limits::of_rate(1_000_000, 0, Duration::from_secs(1)));
    let mut run = |id, pod_meter, namespace_meter| {
        bench.put_entry(&Tap {
            pod_meter,
            namespace_meter,
            ..tap(at(true), &[Session { mark: 0, ..pod_metered(id) }])
        });
        bench.run(Hook::Egress, &packet(), 3);
        (bench.counted(id), bench.used_by_pod(pod_meter)[0])
    };
    let once = || counted(LEN, &[(Ingress, Verdict::Copied, 1), (Ingress, Verdict::Limited, 2)]);
    assert_eq!(run(0, 7, 1), (once(), 1));
    let never = counted(LEN, &[(Ingress, Verdict::Limited, 3)]);
    assert_eq!(run(1, 8, 1), (never, 0), "another pod of the namespace");
    assert_eq!(run(2, 9, 4096), (once(), 1), "the last place");
    let free = counted(LEN, &[(Ingress, Verdict::Copied, 3)]);
    assert_eq!(run(3, 10, 0), (free, 3), "an interface has no namespace");
    assert_eq!([0, 4095].map(|place| bench.used(Level::Namespace, place)), [1, 1]);
}
