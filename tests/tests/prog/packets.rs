//! Packets of every kind and size: the program copies each byte for byte, counts it with its bytes, and does not change
//! it.

use std::net::Ipv4Addr;

use mirror_common::verdict::{Direction, Hook, Verdict};
use mirror_tests::{Frame, kernel_is_at_least};

use crate::bench::{BOTH, Bench, Counted, READY, at, session};

const FROM: [u8; 6] = [2, 0, 0, 0, 0, 1];
const TO: [u8; 6] = [2, 0, 0, 0, 0, 2];
const ADDRESSES: (Ipv4Addr, Ipv4Addr) = (Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2));

#[track_caller]
fn is_copied(bench: &mut Bench, what: &str, packet: &[u8]) {
    let target = bench.listen("target0");
    for (hook, direction) in [(Hook::Ingress, Direction::Egress), (Hook::Egress, Direction::Ingress)] {
        bench.reset(0);
        bench.run(hook, packet, 1);
        let expected = Counted::from([((direction, Verdict::Copied), (1, packet.len() as u64))]);
        assert_eq!(bench.counted(0), expected, "{what}, {hook:?}");
        assert_eq!(target.arrived(), [packet], "{what}, {hook:?}");
    }
}

fn bench(story: &str) -> Bench {
    let mut bench = Bench::new(story);
    bench.put_device(0, "target0", READY);
    bench.put_tap(at(true), &[session(0, 0, BOTH)]);
    bench
}

#[test]
fn every_kind_of_packet_is_copied_as_it_is() {
    let mut bench = bench("kinds");
    let plain = || Frame::new(TO, FROM);
    let ipv4 = plain().filled(100, 1).ipv4(ADDRESSES.0, ADDRESSES.1).bytes();
    let mut fragment = ipv4.clone();
    fragment[20..22].copy_from_slice(&0x2001_u16.to_be_bytes());
    for (what, packet) in [
        ("IPv4", ipv4),
        ("IPv4 fragment", fragment),
        ("IPv6", plain().filled(80, 2).ethertype(0x86dd).bytes()),
        ("ARP", plain().arp_request(ADDRESSES.0, ADDRESSES.1).bytes()),
        ("broadcast", Frame::new(Frame::BROADCAST, FROM).filled(60, 3).bytes()),
        ("multicast", Frame::new([1, 0, 0x5e, 0, 0, 1], FROM).filled(60, 4).bytes()),
        ("VLAN", plain().vlan(7).filled(64, 5).bytes()),
        ("two VLANs", plain().tag(0x88a8, 9).vlan(7).filled(64, 6).bytes()),
        ("MPLS", plain().filled(64, 7).ethertype(0x8847).bytes()),
        ("LLC", plain().filled(64, 8).ethertype(0x0026).bytes()),
        ("experimental", plain().filled(60, 9).bytes()),
    ] {
        is_copied(&mut bench, what, &packet);
    }
}

#[test]
fn every_size_is_copied_as_it_is() {
    let mut bench = bench("sizes");
    // One byte after the header is the minimum that every kernel accepts here. Older kernels create a test packet in
    // one page; the stories send larger ones through real devices.
    for size in [15, 16, 59, 60, 64, 65, 128, 1499, 1500, 1514, 1518, 2048, 3000, 3400] {
        is_copied(&mut bench, &format!("{size} bytes"), &Frame::new(TO, FROM).filled(size, size).bytes());
    }
}

#[test]
fn a_frame_of_64_kilobytes_is_copied_as_it_is_where_the_kernel_makes_one() {
    let mut bench = bench("large");
    let packet = Frame::new(TO, FROM).filled(65535, 1).bytes();
    match bench.try_run(Hook::Ingress, &packet, 1) {
        Ok(()) => is_copied(&mut bench, "65535 bytes", &packet),
        Err(error) => {
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{error}");
            assert!(!kernel_is_at_least(6, 19), "this kernel makes test packets of more than a page");
            assert_eq!(bench.counted(0), Counted::new());
        }
    }
}

#[test]
fn a_frame_that_is_a_header_alone_is_copied_where_the_kernel_makes_one() {
    let mut bench = bench("runt");
    let packet = Frame::new(TO, FROM).bytes();
    match bench.try_run(Hook::Ingress, &packet, 1) {
        Ok(()) => is_copied(&mut bench, "14 bytes", &packet),
        Err(error) => {
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL), "{error}");
            assert_eq!(bench.counted(0), Counted::new());
        }
    }
}
