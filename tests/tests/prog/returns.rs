//! A packet that comes back to the tap that copied it is copied again. A packet that another tap has copied is not.

use aya::{
    Ebpf,
    programs::{SchedClassifier, TcAttach, TcAttachType, tc::NlOptions},
};
use mirror_common::verdict::{
    Direction::{Egress, Ingress},
    Hook, Verdict,
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

/// A program behind ours sends the packet back to its device, as Cilium does with its answers to ARP and with its ICMP
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
fn a_packet_that_a_bridge_sends_back_is_copied_both_ways() {
    let mut bench = bench("hairpin");
    bench.attach("tap_ingress", "tap", Hook::Ingress);
    bench.attach("tap_egress", "tap", Hook::Egress);
    bench.lab.bridge("br0");
    bench.lab.node().ip("link set tap master br0");
    bench.lab.node().run("bridge link set dev tap hairpin on");
    let target = bench.listen("target0");
    let broadcast = Frame::new(Frame::BROADCAST, [4; 6]).filled(LEN, 0).bytes();
    bench.lab.node().send_frame("tapp", &broadcast);
    let expected = counted(LEN, &[(Egress, Verdict::Copied, 1), (Ingress, Verdict::Copied, 1)]);
    eventually(SOON, || {
        let counted = bench.counted(0);
        check(counted == expected, || format!("{counted:?}"))
    });
    assert_eq!(target.arrived(), [broadcast.clone(), broadcast]);
}

#[test]
fn where_a_marked_packet_was_received_last_tells_whose_copy_it_is() {
    let mut bench = bench("from");
    let (here, other, bridge) = (bench.tap, bench.lab.ifindex("idle"), bench.lab.ifindex("idlep"));
    bench.put_entry_of(other, &tap(at(true), &[]));
    let again = counted(LEN, &[(Ingress, Verdict::Copied, 2)]);
    let once = counted(LEN, &[(Ingress, Verdict::Copied, 1), (Ingress, Verdict::Duplicate, 1)]);
    for (what, from, expected) in [
        ("made by the node", 0, &once),
        ("received here", here, &again),
        ("received at another tap", other, &once),
        ("received without a tap, and copied here last", bridge, &again),
    ] {
        bench.reset(0);
        match bench.try_run_from(from, Hook::Egress, &packet(), 2) {
            Ok(()) => assert_eq!(bench.counted(0), *expected, "{what}"),
            // Kernels before 5.12 let nobody say where a test packet comes from.
            Err(error) => assert_eq!((from != 0, error.raw_os_error()), (true, Some(libc::EINVAL)), "{what}"),
        }
    }
}
