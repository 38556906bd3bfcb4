//! Fixed examples: those of the manual page, and typical filters.

use crate::oracle::{Pair, from_hex};

/// A frame of an IPv4 packet with ports.
fn ipv4(protocol: u8, from: ([u8; 4], u16), to: ([u8; 4], u16), flags: u8) -> Vec<u8> {
    let mut frame = [
        &[2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0, 0x45, 0, 0, 40, 0, 1, 0, 0, 64, protocol, 0, 0][..],
        &from.0,
        &to.0,
        &from.1.to_be_bytes(),
        &to.1.to_be_bytes(),
    ]
    .concat();
    frame.extend([0, 0, 0, 1, 0, 0, 0, 1, 0x50, flags, 0, 0, 0, 0, 0, 0]);
    frame
}

const POD: [u8; 4] = [10, 1, 2, 3];
const OUTSIDE: [u8; 4] = [203, 0, 113, 7];

/// The section EXAMPLES of pcap-filter(7), with addresses instead of names, and without unsupported parts. Then filters
/// that people use, with packets truncated anywhere, later fragments and tags.
#[test]
fn the_examples_of_the_manual_compile_to_the_same() {
    let mut tagged = ipv4(6, (POD, 1), (OUTSIDE, 443), 0);
    tagged.splice(12..12, [0x81, 0, 0, 100]);
    let mut fragment = ipv4(17, (POD, 53), (OUTSIDE, 53), 0);
    fragment[21] = 1;
    let frames = [
        ipv4(6, (POD, 40000), (OUTSIDE, 80), 0x02),
        ipv4(17, (OUTSIDE, 53), (POD, 40000), 0),
        ipv4(1, (POD, 0x0800), (OUTSIDE, 0), 0),
        ipv4(1, (POD, 0x0301), (OUTSIDE, 0), 0),
        ipv4(2, (POD, 0), ([224, 0, 0, 1], 0), 0),
        tagged,
        fragment,
    ];
    for text in [
        "host 10.1.2.3",
        "host 10.1.2.3 and (203.0.113.7 or 10.0.0.1)",
        "ip host 10.1.2.3 and not 203.0.113.7",
        "net 10.1",
        "ip and not net 10.0.0.0/8",
        "tcp[tcpflags] & (tcp-syn|tcp-fin) != 0 and not src and dst net 10.0.0.0/8",
        "tcp[tcpflags]&(tcp-rst|tcp-ack) == (tcp-rst|tcp-ack)",
        "ip[2:2] > 576",
        "ether[0] & 1 = 0 and ip[16] >= 224",
        "icmp[icmptype] != icmp-echo and icmp[icmptype] != icmp-echoreply",
        "ip[6:2] & 0x1fff = 0",
        "ether proto \\ip and host 10.1.2.3",
        "tcp port 80 or http or 443",
        "tcp src port 1 or (udp and 2 < 1) or 40000",
        "tcp port 80 or (udp) or 40000",
        "udp port 53",
        "port domain",
        "udp src port 53",
        "not port 53",
        "tcp port 443 and not net 10.0.0.0/8",
        "tcp port 443 and not (src net 10 and dst net 10)",
        "not tcp port 80 or ip",
        "ip or not tcp port 80",
        "vlan 100 and tcp port 443",
        "vlan 101 and tcp port 443",
        "tcp port 443 or vlan",
        "not vlan and ip",
    ] {
        let pair = Pair::compile(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        for frame in &frames {
            for length in 0..=frame.len() {
                pair.answer(&frame[..length]);
            }
        }
    }
}

/// A filter of sixteen ports fits, and ends early for a packet without ports.
#[test]
fn sixteen_ports_fit() {
    let ports: Vec<String> = (1..=16).map(|port| (port * 1111).to_string()).collect();
    for qualifiers in ["port", "tcp port", "not udp port", "src port"] {
        let pair = Pair::compile(&format!("{qualifiers} {}", ports.join(" or "))).unwrap();
        let (ours, _) = pair.instructions();
        assert!(ours < 160, "{qualifiers}: {ours} instructions");
        for port in [1111, 16 * 1111, 80] {
            pair.answer(&ipv4(6, (POD, port), (OUTSIDE, 5), 0));
            pair.answer(&ipv4(17, (POD, 5), (OUTSIDE, port), 0));
        }
    }
}

/// A random run has found this case: libpcap's optimiser claims that no packet can match.
#[test]
fn the_same_network_twice() {
    let frame = from_hex(
        "02000000000202000000000286dd600000000000063f20010db800000000000000000000000120010db80000000000000000000000\
         01005001bb0000000000000000",
    );
    for text in ["ip6 net 2001:db8::/45 and 2001:db8::/45", "net 2001:db8::/45 and dst net 2001:db8::/45"] {
        assert!(Pair::compile(text).unwrap().answer(&frame), "{text}");
    }
}
