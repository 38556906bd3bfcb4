//! Each verdict: the condition that leads to it. No other counter changes, and no other copy is made.

use mirror_common::{
    abi::{FILTER_PLACES, SESSION_FILTERED, Session, TARGET_UP},
    verdict::{
        Direction::{self, Egress, Ingress},
        Hook, Verdict,
    },
};
use mirror_core::filter::compile;
use mirror_tests::{Frame, kernel_is_at_least};

use crate::bench::{self, BOTH, Bench, Counted, READY, at, session};

fn packet() -> Vec<u8> {
    Frame::new([2; 6], [4; 6]).filled(60, 0).bytes()
}

fn counted(expected: &[(Direction, Verdict, u64)]) -> Counted {
    bench::counted(packet().len(), expected)
}

/// A bench with one session of both directions, and a target that accepts copies.
fn one_session(story: &str, peer: bool) -> Bench {
    let mut bench = Bench::new(story);
    bench.put_device(0, "target0", READY);
    bench.put_tap(at(peer), &[session(0, 0, BOTH)]);
    bench
}

#[test]
fn a_device_without_a_tap_is_left_alone() {
    let mut bench = Bench::new("no-tap");
    bench.put_device(0, "target0", READY);
    let target = bench.listen("target0");
    Hook::ALL.iter().for_each(|&hook| bench.run(hook, &packet(), 1));
    assert_eq!(bench.counted(0), Counted::new());
    assert_eq!(target.arrived(), Vec::<Vec<u8>>::new());
}

#[test]
fn a_packet_is_copied_once_and_counted_in_its_direction() {
    for (peer, hook, direction) in [
        (false, Hook::Ingress, Ingress),
        (false, Hook::Egress, Egress),
        (true, Hook::Ingress, Egress),
        (true, Hook::Egress, Ingress),
    ] {
        let bench = one_session("copied", peer);
        let target = bench.listen("target0");
        bench.run(hook, &packet(), 1);
        assert_eq!(bench.counted(0), counted(&[(direction, Verdict::Copied, 1)]), "{hook:?}, peer: {peer}");
        assert_eq!(target.arrived(), [packet()], "{hook:?}, peer: {peer}");
    }
}

#[test]
fn a_full_queue_is_congestion() {
    let mut bench = one_session("congested", false);
    // No packet fits into a queue of one byte.
    bench.lab.node().tc("qdisc add dev target0 root bfifo limit 1");
    bench.put_device(0, "target0", TARGET_UP);
    let peer = bench.listen("target0p");
    bench.run(Hook::Ingress, &packet(), 2);
    assert_eq!(bench.counted(0), counted(&[(Ingress, Verdict::Congested, 2)]));
    assert_eq!(peer.arrived(), Vec::<Vec<u8>>::new());
}

#[test]
fn a_copy_that_the_kernel_cannot_make_has_failed() {
    // A tun device takes packets without a link-layer header: nothing is left of a packet that has only this header.
    let mut bench = one_session("failed", false);
    bench.lab.node().ip("tuntap add name tun mode tun");
    bench.lab.node().ip("link set tun up");
    bench.put_device(0, "tun", TARGET_UP);
    let runt = Frame::new([2; 6], [4; 6]).bytes();
    assert_eq!(runt.len(), 14);
    if let Err(error) = bench.try_run(Hook::Ingress, &runt, 2) {
        // Kernels between two changes of 2022 do not create such a test packet.
        assert!(error.raw_os_error() == Some(libc::EINVAL) && !kernel_is_at_least(6, 2), "{error}");
        return;
    }
    assert_eq!(bench.counted(0), Counted::from([((Ingress, Verdict::Failed), (2, 28))]));
}

/// The programs for kernels that refuse calls of filters.
#[test]
fn programs_that_call_no_filters_copy_nothing_for_a_session_with_one() {
    let mut bench = Bench::with_filters("no-filters", false);
    bench.put_device(0, "target0", READY);
    bench.put_filter(0, &compile("1 < 2").unwrap());
    let filtered = Session { flags: SESSION_FILTERED, filter: 0, ..session(0, 0, BOTH) };
    bench.put_tap(at(false), &[filtered, session(1, 0, BOTH)]);
    let target = bench.listen("target0");
    bench.run(Hook::Ingress, &packet(), 1);
    assert_eq!(bench.counted(0), counted(&[(Ingress, Verdict::Failed, 1)]));
    assert_eq!(bench.counted(1), counted(&[(Ingress, Verdict::Copied, 1)]));
    assert_eq!(target.arrived(), [packet()]);
}

/// A filter that cannot be called lets nothing pass, and the failure does not become tc's verdict (`Bench::run` checks
/// that).
#[test]
fn a_filter_whose_place_is_empty_copies_nothing() {
    let mut bench = one_session("empty-place", false);
    let target = bench.listen("target0");
    let (matching, other) = (compile("ether proto 0").unwrap(), compile("ip").unwrap());
    let frame = Frame::new([2; 6], [4; 6]).ethertype(0).filled(60, 0).bytes();
    let mut expected = Vec::new();
    for filter in [5, FILTER_PLACES - 1, FILTER_PLACES, u32::MAX] {
        bench.put_tap(at(false), &[Session { flags: SESSION_FILTERED, filter, ..session(0, 0, BOTH) }]);
        let is_place = filter < FILTER_PLACES;
        for program in [None, Some(&matching), Some(&other), None] {
            match program {
                Some(program) if is_place => bench.put_filter(filter, program),
                None if is_place => bench.clear_filter(filter),
                _ => {}
            }
            bench.reset(0);
            bench.run(Hook::Ingress, &frame, 1);
            let verdict = match program {
                Some(program) if is_place && program == &matching => Verdict::Copied,
                Some(_) if is_place => Verdict::Filtered,
                _ => Verdict::Failed,
            };
            assert_eq!(bench.counted(0), bench::counted(frame.len(), &[(Ingress, verdict, 1)]), "{filter}");
            expected.extend((verdict == Verdict::Copied).then(|| frame.clone()));
        }
    }
    assert_eq!(target.arrived(), expected);
}

#[test]
fn a_session_that_fails_leaves_the_others_alone() {
    let mut bench = Bench::new("fails");
    for (index, device) in (0..).zip(["target0", "target1"]) {
        bench.put_device(index, device, READY);
        bench.attach("deliver", device, Hook::Egress);
    }
    bench.put_device(2, "idle", READY);
    bench.put_target(3, 0, READY);
    let targets = [bench.listen("target0"), bench.listen("target1")];
    bench.put_tap(
        at(true),
        &[
            session(0, 2, BOTH),
            session(1, 0, Ingress.bit()),
            // There is no filter at this index.
            Session { flags: SESSION_FILTERED, filter: 9, ..session(2, 0, BOTH) },
            session(3, 3, BOTH),
            // The snap length is below the length of the headers, so the headers are kept.
            Session { snaplen: 10, mark: 0, ..session(4, 1, BOTH) },
            session(5, 0, BOTH),
            session(6, 99, BOTH),
            session(7, 1, BOTH),
        ],
    );
    bench.run(Hook::Ingress, &packet(), 1);
    let expected = [
        Verdict::TargetDown,
        Verdict::OtherDirection,
        Verdict::Failed,
        Verdict::TargetDown,
        Verdict::Copied,
        Verdict::Copied,
        Verdict::Failed,
        Verdict::Copied,
    ];
    for (id, verdict) in (0..).zip(expected) {
        assert_eq!(bench.counted(id), counted(&[(Egress, verdict, 1)]), "session {id}");
    }
    let arrived = targets.map(|target| target.arrived());
    assert_eq!(arrived, [vec![packet()], vec![packet()[..14].to_vec(), packet()]]);
}
