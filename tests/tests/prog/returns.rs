//! A packet that was changed after a tap is copied again at the next one. An unchanged packet is not.

use aya::{
    Ebpf,
    programs::{SchedClassifier, TcAttach, TcAttachType, tc::NlOptions},
};
use mirror_common::{
    abi::Session,
    verdict::{
        Direction::{Egress, Ingress},
        Hook, Verdict,
    },
};
use mirror_tests::{Frame, SOON, check, eventually};

use crate::bench::{BOTH, Bench, READY, at, counted, session, tap};

const LEN: usize = 100;

fn packet() -> Vec<u8> {
    Frame::new([2; 6], [4; 6]).filled(LEN, 0).bytes()
}

/// A pod's device with a session that copies both directions.
fn bench(story: &str) -> Bench {
    let mut bench = Bench::new(story);
    bench.put_device(0, "target0", READY);
    bench.put_tap(at(true), &[session(0, 0, BOTH)]);
    bench
}

/// A program after podmirror's sends the packet back to its device, as Cilium does with its ARP replies and its ICMP
/// errors.
#[test]
fn a_packet_that_is_answered_in_place_is_copied_both_ways() {
    let mut bench = bench("in-place");
    bench.attach("tap_ingress", "tap", Hook::Ingress);
    bench.attach("tap_egress", "tap", Hook::Egress);
    let ifindex = bench.lab.ifindex("tap");
    let mut probes = Ebpf::load(aya::include_bytes_aligned!(env!("PODMIRROR_PROBES"))).unwrap();
    let answer: &mut SchedClassifier = probes.program_mut("answer").unwrap().try_into().unwrap();
    answer.load().unwrap();
    let options = NlOptions { priority: 2, ..NlOptions::default() };
    let how = TcAttach::Netlink { parent: TcAttachType::Ingress.into(), options };
    bench.lab.node().enter(|| answer.attach(ifindex, how)).unwrap();
    let (target, pod) = (bench.listen("target0"), bench.listen("tapp"));
    bench.lab.node().send_frame("tapp", &packet());
    let expected = counted(LEN, &[(Egress, Verdict::Copied, 1), (Ingress, Verdict::Copied, 1)]);
    eventually(SOON, || {
        let counted = bench.counted(0);
        check(counted == expected, || format!("{counted:?}"))
    });
    let back = Frame::new([4; 6], [4; 6]).filled(LEN, 0).bytes();
    assert_eq!(target.arrived(), [packet(), back.clone()]);
    eventually(SOON, || {
        let seen = pod.arrived();
        check(seen.last() == Some(&back), || format!("{seen:02x?}"))
    });
}

/// A bridge sends the packet back to the pod that sent it.
#[test]
fn a_packet_that_a_bridge_sends_back_unchanged_is_copied_once() {
    let mut bench = bench("hairpin");
    bench.attach("tap_ingress", "tap", Hook::Ingress);
    bench.attach("tap_egress", "tap", Hook::Egress);
    bench.lab.bridge("br0");
    bench.lab.node().ip("link set tap master br0");
    bench.lab.node().run("bridge link set dev tap hairpin on");
    let target = bench.listen("target0");
    let broadcast = Frame::new(Frame::BROADCAST, [4; 6]).filled(LEN, 0).bytes();
    bench.lab.node().send_frame("tapp", &broadcast);
    let expected = counted(LEN, &[(Egress, Verdict::Copied, 1), (Ingress, Verdict::Duplicate, 1)]);
    eventually(SOON, || {
        let counted = bench.counted(0);
        check(counted == expected, || format!("{counted:?}"))
    });
    assert_eq!(target.arrived(), [broadcast]);
}

/// Frames of each kind of identity cross a bridge from one tap to another, and are copied once. Their headers are not
/// verified here, so most of each is zeros.
#[test]
fn an_unchanged_packet_of_any_kind_is_copied_once() {
    let mut bench = bench("kinds");
    let other = bench.bridged();
    bench.put_entry_of(other, &tap(at(true), &[session(1, 0, BOTH)]));
    let target = bench.listen("target0");
    let ipv4 = |fields: &[(usize, u8)]| (0x0800, [&[(14, 0x45)], fields].concat());
    let ipv6 = |fields: &[(usize, u8)]| (0x86dd, [&[(14, 0x60)], fields].concat());
    let kinds = [
        (0x0806, vec![]),
        ipv4(&[(23, 6), (35, 80)]),
        ipv4(&[(14, 0x4f), (23, 17), (75, 53)]),
        ipv4(&[(23, 17), (21, 9), (19, 7)]),
        ipv4(&[(23, 1), (34, 8), (39, 5)]),
        ipv4(&[(23, 47)]),
        ipv6(&[(20, 6), (55, 80)]),
        ipv6(&[(20, 58), (54, 128), (59, 5)]),
        ipv6(&[(20, 44), (54, 17), (63, 80)]),
        ipv6(&[(20, 44), (54, 17), (57, 0x80), (61, 1)]),
    ];
    for (ethertype, fields) in &kinds {
        let mut frame = Frame::new(Frame::BROADCAST, [4; 6]).filled(LEN, 0).bytes();
        frame[12..14].copy_from_slice(&u16::to_be_bytes(*ethertype));
        fields.iter().for_each(|&(at, byte)| frame[at] = byte);
        bench.reset(0);
        bench.reset(1);
        bench.lab.node().send_frame("tapp", &frame);
        let expected = [
            counted(LEN, &[(Egress, Verdict::Copied, 1)]),
            counted(LEN, &[(Ingress, Verdict::Duplicate, 1)]),
        ];
        eventually(SOON, || {
            let counted = [0, 1].map(|id| bench.counted(id));
            check(counted == expected, || format!("{ethertype:#06x} {fields:?}: {counted:?}"))
        });
        assert_eq!(target.arrived(), [frame]);
    }
}

#[test]
fn a_mark_holds_for_its_form_alone() {
    const LEN: usize = 600;
    let mut bench = bench("forms");
    bench.attach("deliver", "target0", Hook::Egress);
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
    bench.lab.node().send_frame("tapp", &Frame::new([2; 6], [4; 6]).filled(LEN, 0).bytes());
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
