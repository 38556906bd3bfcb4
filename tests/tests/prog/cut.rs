//! Snap lengths: each copy is as short as the kernel can make it. A copy that it cannot cut at all is dropped and
//! counted.

use mirror_common::{
    abi::{DROPPED_DOWN, DROPPED_UNCUT, Delivery, Session, TARGET_CUTS, TARGET_TUNNEL, TARGET_UP},
    packet::MAX_SNAPLEN,
    verdict::{
        Direction::{Egress, Ingress},
        Hook, Misfit, Verdict,
    },
};
use mirror_tests::{Frame, SOON, check, eventually};

use crate::bench::{BOTH, Bench, READY, at, counted, session};

const ROUTER: [u8; 6] = [2; 6];
const POD: [u8; 6] = [4; 6];

/// A pod's device with a session that cuts to `snaplen` bytes, and the second stage at the target.
fn bench(story: &str, snaplen: u32) -> Bench {
    let mut bench = Bench::new(story);
    bench.put_device(0, "target0", READY);
    bench.attach("deliver", "target0", Hook::Egress);
    bench.attach("tap_ingress", "tap", Hook::Ingress);
    put_snaplen(&mut bench, snaplen);
    bench
}

fn put_snaplen(bench: &mut Bench, snaplen: u32) {
    bench.reset(0);
    bench.put_tap(at(true), &[Session { snaplen, ..session(0, 0, BOTH) }]);
}

/// Returns the packets that arrive at the target when `send` makes the pod send one packet of `len` bytes. The packet
/// must be counted as `verdict`, with its own length, and the copies with theirs.
#[track_caller]
fn delivered(bench: &mut Bench, len: usize, verdict: Verdict, send: impl FnOnce(&Bench)) -> Vec<Vec<u8>> {
    bench.reset(0);
    let target = bench.listen("target0");
    send(bench);
    let expected = counted(len, &[(Egress, verdict, 1)]);
    eventually(SOON, || {
        let counted = bench.counted(0);
        check(counted == expected, || format!("{counted:?}, not {expected:?}"))
    });
    let arrived = target.arrived();
    assert_eq!(bench.copied_bytes(0), arrived.iter().map(|copy| copy.len() as u64).sum::<u64>());
    arrived
}

/// As [`delivered`], for this frame.
#[track_caller]
fn delivered_of(bench: &mut Bench, frame: &[u8], verdict: Verdict) -> Vec<Vec<u8>> {
    delivered(bench, frame.len(), verdict, |bench| bench.lab.node().send_frame("tapp", frame))
}

#[test]
fn a_copy_is_cut_and_the_packet_is_whole() {
    let mut bench = bench("cut", 96);
    for size in [95, 96, 97, 1000] {
        let frame = Frame::new(ROUTER, POD).filled(size, size).bytes();
        let kept = &frame[..size.min(96)];
        let target = bench.listen("target0");
        bench.reset(0);
        // `run` also checks that the packet passes unchanged.
        bench.run(Hook::Ingress, &frame, 2);
        assert_eq!(bench.counted(0), counted(size, &[(Egress, Verdict::Copied, 2)]));
        assert_eq!(target.arrived(), [kept, kept]);
        assert_eq!(bench.copied_bytes(0), 2 * kept.len() as u64);
    }
}

#[test]
fn a_vlan_tag_is_a_part_of_what_is_kept() {
    let mut bench = bench("tag", 96);
    let frame = Frame::new(ROUTER, POD).vlan(7).filled(1000, 1).bytes();
    // The kernel moves the tag out of the frame when the device receives it, and a packet socket shows the rest.
    let copies =
        delivered(&mut bench, 996, Verdict::Copied, |bench| bench.lab.node().send_frame("tapp", &frame));
    let untagged = [&frame[..12], &frame[16..]].concat();
    assert_eq!(copies, [&untagged[..92]]);
}

#[test]
fn no_more_is_kept_than_every_kernel_can_cut_to() {
    let mut bench = bench("largest", MAX_SNAPLEN);
    let frame = Frame::new(ROUTER, POD).filled(65_000, 1).bytes();
    let largest = &frame[..MAX_SNAPLEN as usize];
    assert_eq!(delivered_of(&mut bench, &frame, Verdict::Copied), [largest]);
    assert_eq!(bench.misfit(0, Misfit::Cut), (0, 0));
    // The agent does not configure more, but a tunnel can have room for more.
    put_snaplen(&mut bench, 16_384);
    assert_eq!(delivered_of(&mut bench, &frame, Verdict::Copied), [largest]);
    assert_eq!(bench.misfit(0, Misfit::Cut), (1, u64::from(16_384 - MAX_SNAPLEN)));
    let short = Frame::new(ROUTER, POD).filled(16_384, 1).bytes();
    assert_eq!(delivered_of(&mut bench, &short, Verdict::Copied), [short], "it is no longer than asked for");
}

#[test]
fn the_headers_are_kept_whatever_the_snap_length() {
    let mut bench = bench("headers", 13);
    let frame = Frame::new(ROUTER, POD).filled(100, 1).bytes();
    assert_eq!(delivered_of(&mut bench, &frame, Verdict::Copied), [&frame[..14]]);
    assert_eq!(bench.misfit(0, Misfit::Long), (1, 1));
    put_snaplen(&mut bench, 14);
    assert_eq!(delivered_of(&mut bench, &frame, Verdict::Copied), [&frame[..14]]);
    assert_eq!(bench.misfit(0, Misfit::Long), (0, 0));
    // Only the tag would fit into the snap length.
    put_snaplen(&mut bench, 4);
    let frame = Frame::new(ROUTER, POD).vlan(7).filled(104, 1).bytes();
    let untagged = [&frame[..12], &frame[16..]].concat();
    let copies =
        delivered(&mut bench, 100, Verdict::Copied, |bench| bench.lab.node().send_frame("tapp", &frame));
    assert_eq!(copies, [&untagged[..14]]);
    assert_eq!(bench.misfit(0, Misfit::Long), (1, 14));
}

/// A sender cannot hide packets by long headers: they are cut after the headers, at the exact byte where the kernel
/// allows it.
#[test]
fn long_headers_hide_no_packet() {
    let mut bench = bench("options", 96);
    for words in [0, 31, 131] {
        // Destination options of 8 bytes and more before TCP.
        let mut frame = tcp_over_ipv6(4000);
        let options = [&[6, words][..], &vec![0; 6 + usize::from(words) * 8]].concat();
        let headers = 54 + options.len() + 18;
        frame.splice(54..54, options);
        let length = (frame.len() as u16 - 54).to_be_bytes();
        frame.splice(18..21, [length[0], length[1], 60]);
        let copies = delivered(&mut bench, frame.len(), Verdict::Copied, |bench| {
            send_super_frame(bench, "tapp", &frame)
        });
        // Some kernels can cut only after the checksum field, others directly after the headers before it.
        let [copy] = &copies[..] else { panic!("{} copies", copies.len()) };
        let most = headers.max(96);
        assert!(
            copy.len() <= most && copy.len() + 18 >= most && *copy == frame[..copy.len()],
            "{}",
            copy.len()
        );
        let excess = (copy.len() - 96) as u64;
        assert_eq!(bench.misfit(0, Misfit::Long), (u64::from(excess > 0), excess));
        assert_eq!(bench.misfit(0, Misfit::Cut), (0, 0));
    }
}

/// The agent sets a tunnel down after the tap has read it as up. Then the tunnel's room and address are zero.
#[test]
fn a_copy_whose_tunnel_goes_down_on_its_way_is_told_as_such() {
    let mut bench = bench("goes-down", 0);
    let frame = Frame::new(ROUTER, POD).filled(100, 1).bytes();
    let tunnel = TARGET_CUTS | TARGET_TUNNEL;
    for (flags, expected) in [(tunnel, DROPPED_DOWN), (tunnel | TARGET_UP, DROPPED_UNCUT)] {
        bench.put_device(0, "target0", flags);
        bench.announce(Delivery { target: 1, key: 1, ..Delivery::default() });
        let target = bench.listen("target0");
        let sent = bench.lab.node().sender("target0").send(&frame);
        assert_eq!(sent.unwrap_err().raw_os_error(), Some(libc::ENOBUFS), "it is dropped");
        let noted = bench.noted();
        assert!(
            noted.contains(&expected) && noted.iter().all(|&note| note == 0 || note == expected),
            "{noted:?}"
        );
        assert_eq!(target.arrived(), Vec::<Vec<u8>>::new());
    }
}

/// If a pod leaves the TCP checksum to the device, the kernel does not cut the packet before the end of that field.
/// With IPv6, the field ends at byte 72.
#[test]
fn a_super_frame_is_cut_behind_its_unfinished_checksum_only() {
    let mut bench = bench("super", 96);
    let frame = tcp_over_ipv6(32_000);
    let copies =
        delivered(&mut bench, frame.len(), Verdict::Copied, |bench| send_super_frame(bench, "tapp", &frame));
    assert_eq!(copies, [&frame[..96]]);
    put_snaplen(&mut bench, 72);
    let copies =
        delivered(&mut bench, frame.len(), Verdict::Copied, |bench| send_super_frame(bench, "tapp", &frame));
    assert_eq!(copies, [&frame[..72]]);
    // Linux 5.10 and 6.18 refuse one byte less; some kernels in between do not.
    put_snaplen(&mut bench, 71);
    let copies =
        delivered(&mut bench, frame.len(), Verdict::Copied, |bench| send_super_frame(bench, "tapp", &frame));
    let (long, _) = bench.misfit(0, Misfit::Long);
    assert_eq!(copies, [&frame[..71 + long as usize]]);
}

/// The kernel cuts no super-frame of a pod's tunnel, because it stores the offset of the inner packet.
#[test]
fn a_tunnels_super_frame_is_not_delivered() {
    let mut bench = bench("tunnel", 96);
    let node = bench.lab.node();
    node.ip("addr add 10.9.9.1/24 dev tapp");
    node.ip("neigh add 10.9.9.2 lladdr 02:02:02:02:02:02 dev tapp");
    node.ip("link add vx type vxlan id 7 remote 10.9.9.2 dstport 4789 dev tapp");
    node.sysctl("ipv6/conf/vx/disable_ipv6", "1");
    node.ip("link set vx up");
    let inner = tcp_over_ipv6(32_000);
    // Ethernet, IPv4, UDP and VXLAN headers around it.
    let outer = inner.len() + 14 + 20 + 8 + 8;
    let copies = delivered(&mut bench, outer, Verdict::Uncut, |bench| send_super_frame(bench, "vx", &inner));
    assert_eq!(copies, Vec::<Vec<u8>>::new());
    put_snaplen(&mut bench, 60_000);
    let copies = delivered(&mut bench, outer, Verdict::Copied, |bench| send_super_frame(bench, "vx", &inner));
    assert_eq!(copies.iter().map(Vec::len).collect::<Vec<_>>(), [outer], "it need not be cut");
}

#[test]
fn without_a_second_stage_nothing_is_cut_and_nothing_delivered() {
    let mut bench = Bench::new("no-stage");
    bench.put_device(0, "target0", READY & !TARGET_CUTS);
    let target = bench.listen("target0");
    bench.put_tap(at(true), &[Session { snaplen: 96, mark: 0, ..session(0, 0, BOTH) }, session(1, 0, BOTH)]);
    let frame = Frame::new(ROUTER, POD).filled(1000, 1).bytes();
    bench.run(Hook::Egress, &frame, 1);
    assert_eq!(bench.counted(0), counted(1000, &[(Ingress, Verdict::Uncut, 1)]));
    assert_eq!(bench.counted(1), counted(1000, &[(Ingress, Verdict::Copied, 1)]));
    assert_eq!(target.arrived(), [frame]);
}

/// The second stage does not change other senders' packets, even right after a copy that was cut.
#[test]
fn the_second_stage_leaves_other_packets_alone() {
    let mut bench = bench("others", 14);
    let frame = Frame::new(ROUTER, POD).filled(1000, 1).bytes();
    assert_eq!(delivered_of(&mut bench, &frame, Verdict::Copied), [&frame[..14]]);
    let target = bench.listen("target0");
    bench.lab.node().send_frame("target0", &frame);
    assert_eq!(target.arrived(), [frame]);
}

/// A TCP segment over IPv6 without a receiver, in a frame of `len` bytes.
pub(crate) fn tcp_over_ipv6(len: usize) -> Vec<u8> {
    let payload = u16::try_from(len - 54).unwrap().to_be_bytes();
    let address = |last| [&[0xfd][..], &[0; 14], &[last]].concat();
    let ports = [0x30, 0x39, 1, 0xbb];
    let ip = [&[0x60, 0, 0, 0, payload[0], payload[1], 6, 64][..], &address(1), &address(2)].concat();
    let tcp = [&ports[..], &[0, 0, 0, 1, 0, 0, 0, 0, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0]].concat();
    let headers = [ip, tcp].concat();
    let mut frame = Frame::new(ROUTER, POD).filled(len - headers.len(), 1).ethertype(0x86dd).bytes();
    frame.splice(14..14, headers);
    frame
}

/// Sends a super-frame from a device of the node.
#[track_caller]
pub(crate) fn send_super_frame(bench: &Bench, device: &str, frame: &[u8]) {
    bench.lab.node().send_super_frame(device, frame, 1440);
}
