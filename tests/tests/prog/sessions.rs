//! Several sessions at one tap: each counts every packet once, and none affects another.

use mirror_common::{
    abi::{MAX_SESSIONS_PER_TAP, SESSION_FILTERED, Session},
    verdict::{
        Direction::{Egress, Ingress},
        Hook, Verdict,
    },
};
use mirror_tests::{Frame, SOON, check, eventually};

use crate::bench::{BOTH, Bench, Counted, READY, at, counted, session, tap};

const LEN: usize = 600;

fn packet() -> Vec<u8> {
    Frame::new([2; 6], [4; 6]).filled(LEN, 0).bytes()
}

/// Two targets that accept copies, each with the second stage.
fn bench(story: &str) -> Bench {
    let mut bench = Bench::new(story);
    for (index, device) in (0..).zip(["target0", "target1"]) {
        bench.put_device(index, device, READY);
        bench.attach("deliver", device, Hook::Egress);
    }
    bench
}

#[test]
fn each_session_counts_every_packet_once() {
    let mut bench = bench("sessions");
    let targets = [bench.listen("target0"), bench.listen("target1")];
    for sessions in 0..=MAX_SESSIONS_PER_TAP as u32 {
        // Targets in turn: from the third session on, the packet has already been copied to them.
        let list: Vec<_> = (0..sessions).map(|id| session(id, id % 2, BOTH)).collect();
        bench.put_tap(at(false), &list);
        (0..9).for_each(|id| bench.reset(id));
        bench.run(Hook::Ingress, &packet(), 1);
        for id in 0..9 {
            let expected = match id {
                id if id >= sessions => Counted::new(),
                0 | 1 => counted(LEN, &[(Ingress, Verdict::Copied, 1)]),
                _ => counted(LEN, &[(Ingress, Verdict::Duplicate, 1)]),
            };
            assert_eq!(bench.counted(id), expected, "session {id} of {sessions}");
        }
        for (index, target) in targets.iter().enumerate() {
            assert_eq!(target.arrived().len(), usize::from(sessions as usize > index), "{sessions} sessions");
        }
    }
}

/// A packet that leaves a pod is new to each form, but only to the form's first session.
#[test]
fn a_form_is_copied_once_also_of_what_leaves_a_pod() {
    let mut bench = bench("alike");
    let target = bench.listen("target0");
    let cut = |id| Session { snaplen: 100, mark: 0, ..session(id, 0, BOTH) };
    bench.put_tap(at(true), &[session(0, 0, BOTH), cut(1), session(2, 0, BOTH), cut(3)]);
    bench.run(Hook::Ingress, &packet(), 2);
    for (id, verdict) in
        [(0, Verdict::Copied), (1, Verdict::Copied), (2, Verdict::Duplicate), (3, Verdict::Duplicate)]
    {
        assert_eq!(bench.counted(id), counted(LEN, &[(Egress, verdict, 2)]), "session {id}");
    }
    let lengths: Vec<usize> = target.arrived().iter().map(Vec::len).collect();
    assert_eq!(lengths, [LEN, 100, LEN, 100]);
}

#[test]
fn a_mark_holds_for_its_form_alone() {
    let mut bench = bench("forms");
    let target = bench.listen("target0");
    // Two taps on the packet's path, with the same forms.
    let forms = |first| {
        let cut = Session { snaplen: 100, mark: 0x400, ..session(first + 1, 0, BOTH) };
        let unmarked = Session { snaplen: 200, mark: 0, ..session(first + 2, 0, BOTH) };
        [session(first, 0, BOTH), cut, unmarked]
    };
    bench.put_tap(at(true), &forms(0));
    let other = bench.bridged();
    bench.put_entry_of(other, &tap(at(true), &forms(3)));
    bench.lab.node().send_frame("tapp", &packet());
    let expected = [
        (Egress, Verdict::Copied),
        (Egress, Verdict::Copied),
        (Egress, Verdict::Copied),
        (Ingress, Verdict::Duplicate),
        (Ingress, Verdict::Duplicate),
        (Ingress, Verdict::Copied), // The session's form has no bit.
    ]
    .map(|(direction, verdict)| counted(LEN, &[(direction, verdict, 1)]));
    eventually(SOON, || {
        let counted: Vec<_> = (0..6).map(|id| bench.counted(id)).collect();
        check(counted == expected, || format!("{counted:?}"))
    });
    let lengths: Vec<usize> = target.arrived().iter().map(Vec::len).collect();
    assert_eq!(lengths, [LEN, 100, 200, 200]);
}

#[test]
fn a_session_that_fails_leaves_the_others_alone() {
    let mut bench = bench("fails");
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
        assert_eq!(bench.counted(id), counted(LEN, &[(Egress, verdict, 1)]), "session {id}");
    }
    let arrived = targets.map(|target| target.arrived());
    assert_eq!(arrived, [vec![packet()], vec![packet()[..14].to_vec(), packet()]]);
}

/// The verifier processes at most a million instructions of a program, and each instruction once for every path to it.
#[test]
fn the_verifier_has_room_for_eight_sessions() {
    let mut bench = Bench::new("verifier");
    for name in ["tap_ingress", "tap_egress"] {
        if let Some(verified) = bench.verified(name) {
            assert!(verified < 500_000, "{name}: {verified}");
        }
    }
}
