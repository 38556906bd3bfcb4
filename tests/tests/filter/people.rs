//! Filters that people write, on random frames and on frames made for them.

use mirror_core::filter::{Program, compile};
use mirror_tests::{filters::frame, random::Random};

use crate::oracle::{Pair, Theirs, hex};

/// From manuals, cheat sheets, questions and answers.
const FILTERS: &[&str] = &[
    // HTTP requests, TLS hellos, SSH banners.
    "tcp[((tcp[12:1] & 0xf0) >> 2):4] = 0x47455420",
    "port 80 and tcp[((tcp[12:1] & 0xf0) >> 2):4] = 0x504f5354",
    "tcp port 80 and (((ip[2:2] - ((ip[0]&0xf)<<2)) - ((tcp[12]&0xf0)>>2)) != 0)",
    "tcp[(tcp[12]>>2):4] = 0x5353482D and (tcp[((tcp[12]>>2)+4):2] = 0x312E or tcp[((tcp[12]>>2)+4):2] = 0x322E)",
    "tcp[((tcp[12] & 0xf0) >> 2)] = 0x16",
    "(tcp[((tcp[12] & 0xf0) >> 2)] = 0x16) && (tcp[((tcp[12] & 0xf0) >>2)+5] = 0x01)",
    "tcp dst port 443 and tcp[((tcp[12:1] & 0xf0) >> 2):1] = 0x16 and tcp[((tcp[12:1] & 0xf0) >> 2)+1:1] = 3",
    "ip[(ip[0]&0xf)<<2:2] = 53 or ip[((ip[0]&0xf)<<2)+2:2] = 53",
    // DNS queries and responses.
    "udp port 53 and (udp[10] & 0x80) = 0",
    "udp port 53 and udp[10:2] & 0x8000 != 0 and udp[11] & 0x0f = 3",
    "udp[8:4] & 0xffff0000 = 0",
    // TCP flags and sizes.
    "tcp[13] = 2 or tcp[13] = 18",
    "tcp[tcpflags] & (tcp-syn|tcp-fin) != 0",
    "tcp[tcpflags] & (tcp-rst) != 0 and not port 22",
    "tcp[14:2] = 0",
    "tcp[13] & 0x3f = 0",
    "tcp[12] & 0xf0 > 0x50",
    "tcp[0:2] = tcp[2:2]",
    "tcp[2:2] >= 1024 and tcp[2:2] <= 65535 and tcp[0:2] < 1024",
    // IP fragments, options and unusual headers.
    "ip[6] & 0x20 != 0 or ip[6:2] & 0x1fff != 0",
    "ip[6:2] & 0x4000 = 0",
    "ip[0] & 0xf > 5",
    "ip[1] & 0xfc = 0xb8",
    "ip[8] < 5",
    "ip[12:4] = ip[16:4]",
    "ip[12:2] = ip[16:2] and ip[14:2] != ip[18:2]",
    "ip[16] = 255 or ip[19] = 255",
    "ip[2:2] > 576 and not ip multicast",
    "ip[2:2] != len - 14",
    "(ip[2:2] - ((ip[0] & 0x0f) << 2)) > 100",
    "len - 14 > 100",
    "len - ip[2:2] > 14",
    "ip6[6] = 58 and ip6[40] = 134",
    "ip6[4:2] > 1000",
    "ip6 and ip6[6] = 6 and ip6[53] & 2 != 0",
    "icmp[icmptype] = icmp-unreach and icmp[icmpcode] = 4",
    "icmp[0] = 3 and icmp[8+9] = 17",
    "icmp6 and ip6[40] = 135",
    "arp[6:2] = 1 and arp[14:4] = arp[24:4]",
    "ether[0:4] = 0xffffffff and ether[4:2] = 0xffff",
    "ether[6:4] = ether[0:4]",
    "ether[20:2] = 0x2000",
    "ether[14:2] & 0xff00 = 0x4200",
    "udp[4:2] % 4 = 0",
    "ip[4:2] ^ 0xffff = 0",
    // Tunnels and tags.
    "vlan and ip",
    "vlan 100 and vlan 200 and tcp port 80",
    "(vlan 100 or vlan 200) and not arp",
    "mpls",
    "mpls 100000 and mpls 1024",
    "mpls and ip host 10.0.0.1",
    "mpls 1024 and tcp port 443",
    "pppoed or pppoes",
    "pppoes and ip",
    "pppoes 0x27 and tcp port 80",
    "vlan 100 and pppoes and ip6",
    "pppoes and mpls",
    "udp port 4789 and udp[8] = 0x08 and udp[12:4] >> 8 = 42",
    "udp port 4789 and udp[39] = 6",
    "udp port 2152 and ip[ip[0] & 0x0f] != 0",
    "ip proto 47 and ip[22:2] = 0x6558",
    "geneve",
    "geneve 0xb",
    "geneve and host 10.0.0.1",
    "geneve and tcp port 443",
    "geneve 42 and vlan and ip6",
    "geneve and ether host 02:00:00:00:00:01",
    "geneve and mpls and ip",
    "geneve and geneve and udp",
    "ip and geneve and tcp[13] & 2 != 0",
    // Switches, routers and old networks.
    "stp",
    "not stp and not arp",
    "ether proto 0x88cc",
    "ether proto 0x8809 or ether proto 0x888e",
    "ether host 02:00:00:00:00:01 and not llc",
    "llc",
    "llc u",
    "llc ui and not stp",
    "ether[12:2] <= 1500",
    "iso",
    "isis",
    "isis and lsp",
    "l1 or l2",
    "iso proto \\isis",
    "ipx",
    "atalk or aarp",
    "decnet",
    "lat or mopdl or moprc",
    "netbeui",
    "vrrp or carp",
];

#[test]
fn each_filter_is_taken_and_gives_the_answers_of_libpcap() {
    let mut random = Random::from_clock("people");
    let frames: Vec<Vec<u8>> = (0..3000).map(|_| frame(&mut random)).collect();
    let [mut ours, mut theirs] = [0; 2];
    for text in FILTERS {
        let pair = Pair::compile(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        let mut matching = 0;
        for frame in &frames {
            matching += u32::from(pair.answer(frame));
            pair.answer_of_cut(frame, random.below(frame.len() + 1));
        }
        let (our_length, their_length) = pair.instructions();
        println!(
            "{matching:>5} of {} match, {our_length} instructions of {their_length}: {text}",
            frames.len()
        );
        ours += our_length;
        theirs += their_length;
    }
    assert!(ours <= theirs, "{ours} instructions where libpcap has {theirs}");
}

/// libpcap's own programs, optimised or not: podmirror's checker accepts them, and its evaluator gives libpcap's
/// results.
#[test]
fn programs_of_libpcap_mean_the_same_to_us() {
    let mut random = Random::from_clock("programs of libpcap");
    for text in FILTERS {
        for optimise in [false, true] {
            let theirs = Theirs::compile(text, optimise).unwrap();
            let program = Program::new(theirs.instructions()).unwrap_or_else(|| panic!("{text} is refused"));
            for _ in 0..200 {
                let frame = frame(&mut random);
                let captured = random.below(frame.len() + 1);
                assert_eq!(
                    program.matches(&frame[..captured], frame.len() as u32),
                    theirs.matches_cut(&frame, captured),
                    "{captured} bytes: ({text:?}, \"{}\")\n{}",
                    hex(&frame),
                    program.explain()
                );
            }
        }
    }
}

/// libpcap follows the chain with a loop. It computes a wrong offset after an authentication header, so these frames
/// have none.
#[test]
fn a_chain_of_headers_leads_where_that_of_libpcap_leads() {
    let mut random = Random::from_clock("chains");
    let mut matching = 0;
    for text in [
        "ip6 protochain \\tcp",
        "ip6 protochain 17",
        "ip protochain 6",
        "protochain 58",
        "protochain 59",
        "not ip6 protochain 43",
        "ip6 protochain 6 and ip6[6] = 0",
    ] {
        let theirs = Theirs::compile(text, false).unwrap();
        let ours = compile(text).unwrap();
        for _ in 0..3000 {
            let mut frame = [&[0; 12][..], &[0x86, 0xdd, 0x60, 0, 0, 0, 0, 0]].concat();
            frame.push(random.pick(&[0, 43, 44, 60, 6]));
            frame.extend([0; 33]);
            for _ in 0..random.below(7) {
                let words = random.below(3);
                frame.extend([random.pick(&[0, 43, 44, 60, 60, 6, 17, 58, 59]), words as u8]);
                frame.extend(random.bytes(6 + 8 * words));
            }
            if random.one_in(4) {
                frame.truncate(random.below(frame.len() + 1));
            }
            let expected = theirs.matches(&frame);
            matching += u32::from(expected);
            let answer = ours.matches(&frame, frame.len() as u32);
            assert_eq!(answer, expected, "({text:?}, \"{}\")\n{}", hex(&frame), ours.explain());
        }
    }
    assert!((1000..20_000).contains(&matching), "{matching}");
}

/// A chain of headers that is longer than the kernel program follows: the packet matches neither the filter nor its
/// negation. With libpcap the same holds for a packet that ends before its chain does. On a shorter chain the results
/// are libpcap's.
#[test]
fn a_chain_that_is_too_long_matches_nothing() {
    let mut random = Random::from_clock("long chains");
    let [mut long, mut short, mut matching] = [0; 3];
    for text in ["ip6 protochain 6", "protochain 17", "ip6 protochain 43", "tcp or ip6 protochain 58"] {
        let opposite = format!("not ({text})");
        let theirs = [text, &opposite].map(|text| Theirs::compile(text, false).unwrap());
        let ours = [text, &opposite].map(|text| compile(text).unwrap());
        for _ in 0..2000 {
            let headers: Vec<u8> = (0..random.below(16)).map(|_| random.pick(&[0, 44, 60, 60])).collect();
            let numbers = [&headers[..], &[random.pick(&[6, 17, 43, 58, 59])]].concat();
            let mut frame = [&[0; 12][..], &[0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, numbers[0], 64]].concat();
            frame.extend([0; 32]);
            for next in &numbers[1..] {
                let words = random.below(2);
                frame.extend([*next, words as u8]);
                frame.extend(random.bytes(6 + 8 * words));
            }
            frame.extend([0; 64]);
            let expected = [0, 1].map(|at| theirs[at].matches(&frame));
            let answer = [0, 1].map(|at| ours[at].matches(&frame, frame.len() as u32));
            // After 8 headers another one follows, and no earlier header decides.
            let is_long = headers.len() > 8;
            let expected = if is_long { [false; 2] } else { expected };
            assert_eq!(answer, expected, "({text:?}, \"{}\")\n{}", hex(&frame), ours[0].explain());
            (long, short) = (long + usize::from(is_long), short + usize::from(!is_long));
            matching += usize::from(expected != [false; 2]);
        }
    }
    assert!(long > 1000 && short > 1000 && matching > 1000, "{long} {short} {matching}");
}
