//! Filters and samples in the kernel: on random frames they give the same result as the pure decision.
//!
//! Other tests check the parts: the compiler is compared with libpcap, and any program with its classic BPF
//! (`filters`); the sample has tests of its own.

use std::cell::RefCell;

use mirror_common::{
    abi::{SESSION_FILTERED, Session},
    packet::header,
    sample::in_sample,
    verdict::{Direction, Hook, Verdict},
};
use mirror_core::filter::{Program, compile};
use proptest::{
    collection::vec,
    prelude::*,
    sample::select,
    test_runner::{Config, TestRunner},
};

use crate::bench::{BOTH, Bench, Counted, READY, at, session};

const CASES: u32 = 200;
/// Frames per program.
const FRAMES: usize = 8;

const EXPRESSIONS: [&str; 12] = [
    "icmp",
    "tcp port 443 and not net 10.0.0.0/8",
    "udp portrange 50-60",
    "tcp[tcpflags] & tcp-syn != 0",
    "host 10.1.2.3 or host 2001:db8::1",
    "vlan 7 and ip",
    "ip6 and not udp",
    "arp or ether broadcast",
    "greater 200",
    "less 100 and ip",
    "src port 53 or dst port 53",
    "not ip and not ip6",
];

fn check(cases: impl Strategy<Value = (Program, u32, u32, Vec<Vec<u8>>)>, story: &str) {
    let bench = RefCell::new(Bench::new(story));
    bench.borrow_mut().put_device(0, "target0", READY);
    let seen = RefCell::new(Counted::new());
    let config = Config { cases: CASES, failure_persistence: None, ..Config::default() };
    let checked = TestRunner::new(config).run(&cases, |(program, share, seed, frames)| {
        let bench = &mut *bench.borrow_mut();
        bench.put_filter(0, &program);
        let chosen = Session { flags: SESSION_FILTERED, sample: share, seed, ..session(0, 0, BOTH) };
        bench.put_tap(at(false), &[chosen]);
        bench.reset(0);
        let mut expected = Counted::new();
        for frame in &frames {
            let len = frame.len() as u32;
            let verdict = if !program.matches(frame, len) {
                Verdict::Filtered
            } else if !in_sample(&header(frame, len), seed, share) {
                Verdict::SampledOut
            } else {
                Verdict::Copied
            };
            for counted in [&mut expected, &mut *seen.borrow_mut()] {
                let sum = counted.entry((Direction::Ingress, verdict)).or_default();
                *sum = (sum.0 + 1, sum.1 + frame.len() as u64);
            }
            bench.run(Hook::Ingress, frame, 1);
            prop_assert_eq!(&bench.counted(0), &expected, "{:02x?}", frame);
        }
        Ok(())
    });
    checked.unwrap_or_else(|error| panic!("{error}"));
    // Each verdict must occur, or the test proves little.
    let seen = seen.into_inner();
    for verdict in [Verdict::Copied, Verdict::Filtered, Verdict::SampledOut] {
        let frames = seen.get(&(Direction::Ingress, verdict)).map_or(0, |sum| sum.0);
        assert!(frames > u64::from(CASES) * FRAMES as u64 / 50, "{frames} frames are {verdict:?}: {seen:?}");
    }
}

/// All flows, or a share of them.
fn share() -> impl Strategy<Value = u32> {
    prop_oneof![Just(0), any::<u32>()]
}

/// A frame of IPv4, IPv6 or ARP with values from the expressions, or one of random bytes.
fn frame() -> impl Strategy<Value = Vec<u8>> {
    let address = select(vec![[10, 1, 2, 3], [10, 0, 0, 1], [192, 0, 2, 1]]);
    let port = select(vec![22_u16, 53, 80, 443, 50_000]);
    let ip = (
        any::<bool>(),
        select(vec![1_u8, 6, 6, 17, 17, 58]),
        [address.clone(), address],
        [port.clone(), port],
        select(vec![[0_u8, 0], [0x40, 0], [0x20, 0], [0, 9]]),
        5..=15_u8,
    );
    let packet = (ip, vec(any::<u8>(), 40..300)).prop_map(
        |((is_v6, protocol, [from, to], [from_port, to_port], fragment, words), rest)| {
            let mut packet = if is_v6 {
                let end = |last: [u8; 4]| [&[0x20, 1, 0xd, 0xb8][..], &[0; 11], &last[3..]].concat();
                [&[0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, protocol, 64], &end(from)[..], &end(to)].concat()
            } else {
                let [high, low] = fragment;
                let fixed = [8, 0, 0x40 | words, 0, 0, 0, 0, 0, high, low, 64, protocol, 0, 0];
                let options = &vec![1; usize::from(words) * 4 - 20];
                [&fixed[..], &from, &to, options].concat()
            };
            packet.extend([from_port.to_be_bytes(), to_port.to_be_bytes()].concat());
            packet.extend(rest);
            packet
        },
    );
    let arp = vec(any::<u8>(), 28).prop_map(|rest| [&[8, 6, 0, 1, 8, 0, 6, 4, 0][..], &rest].concat());
    let tags = select(vec![&[][..], &[], &[0x81, 0, 0, 7], &[0x88, 0xa8, 0, 7, 0x81, 0, 0, 9]]);
    let macs = select(vec![[0xff; 6], [2; 6]]);
    let made = (macs, tags, prop_oneof![8 => packet, 1 => arp], 15..400_usize).prop_map(
        |(to, tags, packet, most)| {
            let mut frame = [&to[..], &[4; 6], tags, &packet].concat();
            // The kernel creates no test packet with an incomplete IP header, unless the header follows a tag.
            frame.truncate(if tags.is_empty() { most.max(14 + 40) } else { most });
            frame
        },
    );
    prop_oneof![6 => made, 1 => vec(any::<u8>(), 15..400)]
}

#[test]
fn the_kernel_answers_as_the_filter_of_an_expression() {
    let programs = EXPRESSIONS.map(|text| compile(text).unwrap());
    check((select(programs.to_vec()), share(), any::<u32>(), vec(frame(), FRAMES)), "expressions");
}
