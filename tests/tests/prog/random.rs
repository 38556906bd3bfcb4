//! Random taps, targets and packets: the kernel counts what the pure decision says.

use std::{cell::RefCell, collections::BTreeMap};

use mirror_common::{
    abi::{Session, TARGET_QUEUELESS, TARGET_UP, Tap, Target},
    decide::{Packet, mark, outcome, reachable, wanted},
    verdict::{Direction, Hook, Verdict},
};
use mirror_tests::Frame;
use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};

use crate::bench::{Bench, Counted, at, session};

const CASES: u32 = 300;
const NO_DEVICE: u32 = 0x7fff_fff0;

/// What a target points to, and with which flags.
#[derive(Debug, Clone, Copy)]
struct Aim {
    device: &'static str,
    flags: u32,
}

#[derive(Debug)]
struct Case {
    peer: bool,
    sessions: Vec<Session>,
    aims: Vec<Aim>,
    hook: Hook,
    size: usize,
    repeat: u32,
}

fn case() -> impl Strategy<Value = Case> {
    let devices = prop::sample::select(vec!["target0", "target1", "idle", "tap", "none", "missing"]);
    let flags = (any::<bool>(), prop::bool::weighted(0.8)).prop_map(
        |(queueless, up)| if queueless { TARGET_QUEUELESS } else { 0 } | if up { TARGET_UP } else { 0 },
    );
    let aims = prop::collection::vec((devices, flags).prop_map(|(device, flags)| Aim { device, flags }), 4);
    let sessions = prop::collection::vec((0..4_u32, 0..4_u32), 0..=4).prop_map(|sessions| {
        let with_id = |(id, (target, directions))| session(id, target, directions);
        (0..).zip(sessions).map(with_id).collect()
    });
    let hook = prop::sample::select(Hook::ALL.to_vec());
    (any::<bool>(), sessions, aims, hook, 15..2000_usize, 1..4_u32).prop_map(
        |(peer, sessions, aims, hook, size, repeat)| Case { peer, sessions, aims, hook, size, repeat },
    )
}

/// What the kernel answers to a copy to this device.
fn answer(device: &str) -> i64 {
    match device {
        "idle" => 2,
        "missing" => -i64::from(libc::EINVAL),
        _ => 0,
    }
}

/// What the sessions must count, by the pure decision.
fn expected(case: &Case, ifindex: u32, tap: &Tap, targets: &[Target]) -> BTreeMap<u32, Counted> {
    let mut counted: BTreeMap<u32, Counted> = BTreeMap::new();
    let mut tc_index = 0;
    for _ in 0..case.repeat {
        for session in &case.sessions {
            let target = &targets[session.target as usize];
            let packet = Packet { hook: case.hook, ifindex, tc_index };
            let verdict = wanted(packet, tap, session).and_then(|()| reachable(packet, target)).map_or_else(
                |verdict| verdict,
                |_| outcome(answer(case.aims[session.target as usize].device), target),
            );
            if verdict == Verdict::Copied {
                tc_index = mark(tc_index, session.target);
            }
            let direction = Direction::at(case.hook, case.peer);
            let sum = counted.entry(session.id).or_default().entry((direction, verdict)).or_default();
            *sum = (sum.0 + 1, sum.1 + case.size as u64);
        }
    }
    counted
}

#[test]
fn the_kernel_counts_what_the_decision_says() {
    let bench = RefCell::new(Bench::new("random"));
    let config = Config { cases: CASES, failure_persistence: None, ..Config::default() };
    let checked = TestRunner::new(config).run(&case(), |case| {
        let bench = &mut *bench.borrow_mut();
        let targets: Vec<Target> = (0..)
            .zip(&case.aims)
            .map(|(index, aim)| match aim.device {
                "none" => bench.put_target(index, 0, aim.flags),
                "missing" => bench.put_target(index, NO_DEVICE, aim.flags),
                device => bench.put_device(index, device, aim.flags),
            })
            .collect();
        let tap = bench.put_tap(at(case.peer), &case.sessions);
        (0..4).for_each(|id| bench.reset(id));
        bench.run(case.hook, &Frame::new([2; 6], [4; 6]).filled(case.size, 0).bytes(), case.repeat);
        let mut expected = expected(&case, bench.tap, &tap, &targets);
        for id in 0..4 {
            prop_assert_eq!(bench.counted(id), expected.remove(&id).unwrap_or_default(), "session {}", id);
        }
        Ok(())
    });
    checked.unwrap_or_else(|error| panic!("{error}"));
}
