//! Random expressions of the supported language, in the usual forms.

use std::net::Ipv4Addr;

use super::{
    arithmetic,
    frames::{IPV4, IPV6, LABELS, MACS, NETWORKS, PORTS, PROTOCOLS, SESSIONS, VLANS},
};
use crate::random::Random;

/// One expression.
pub fn expression(random: &mut Random) -> String {
    let depth = random.pick(&[0, 1, 1, 2, 2, 3]);
    let expression = combined(random, depth);
    if !random.one_in(12) {
        return expression;
    }
    // Everything after `geneve` is in one bracket: where a frame is not Geneve, libpcap's program reads uninitialised
    // memory.
    let geneve = numbered(random, "geneve", &NETWORKS);
    let outside = combined(random, 1);
    // Inside Geneve, libpcap still looks for the outer labels.
    if outside.contains("mpls") || random.one_in(2) {
        format!("{geneve} and ({expression})")
    } else {
        format!("{outside} and {geneve} and ({expression})")
    }
}

/// The name of a header, with or without a number.
fn numbered<T: Copy + std::fmt::Display>(random: &mut Random, name: &str, numbers: &[T]) -> String {
    match random.below(3) {
        0 => name.to_owned(),
        _ => format!("{name} {}", random.pick(numbers)),
    }
}

fn combined(random: &mut Random, depth: usize) -> String {
    if depth == 0 {
        return primitive(random);
    }
    match random.below(8) {
        0 => format!("{}({})", random.pick(&["not ", "!", "! "]), combined(random, depth - 1)),
        1 => format!("({})", combined(random, depth - 1)),
        2 => format!("not {}", combined(random, depth - 1)),
        _ => {
            let left = combined(random, depth - 1);
            let right = combined(random, depth - 1);
            format!("{left} {} {right}", operator(random))
        }
    }
}

fn operator(random: &mut Random) -> &'static str {
    random.pick(&["and", "or", "&&", "||", "and", "or"])
}

fn primitive(random: &mut Random) -> String {
    match random.below(24) {
        20 => arithmetic::relation(random),
        21 => arithmetic::relation(random),
        22 => old_protocol(random).to_owned(),
        23 => match random.below(3) {
            0 => numbered(random, "mpls", &LABELS),
            1 => numbered(random, "pppoes", &SESSIONS),
            _ => "pppoed".to_owned(),
        },
        0..=2 => protocol(random).to_owned(),
        3..=5 => {
            ids(random, &["", "tcp ", "udp ", "sctp "], &["port"], |random| random.pick(&PORTS).to_string())
        }
        6 => ids(random, &["", "tcp ", "udp ", "sctp "], &["portrange"], |random| {
            format!("{}-{}", random.pick(&PORTS), random.pick(&PORTS))
        }),
        7..=9 => ids(random, &["", "", "ip ", "arp ", "rarp "], &["host", "net", ""], ipv4),
        10 => ids(random, &["", "ip ", "arp "], &["net"], network),
        11 => ids(random, &["", "ip6 "], &["host", "net", ""], |random| random.pick(&IPV6).to_owned()),
        12 => ids(random, &["", "ip6 "], &["net"], |random| {
            random
                .pick(&["2001:db8::/32", "fe80::/10", "ff00::/8", "::/0", "::ffff:0:0/96", "2001:db8::/45"])
                .to_owned()
        }),
        13 => ids(random, &["ether "], &["host", ""], mac),
        14 => ids(random, &["", "ip ", "ip6 "], &["proto"], |random| match random.below(6) {
            0 => random.pick(&["\\tcp", "\\udp", "\\icmp"]).to_owned(),
            _ => random.pick(&PROTOCOLS).to_string(),
        }),
        15 => random
            .pick(&[
                "ether proto 0x0800",
                "ether proto \\arp",
                "ether proto 0x9000",
                "ether proto 0xfe",
                "ether proto 6",
                "ether proto 0x42",
                "ether proto 0xf0",
                "ether proto 0x86dd",
                "ether proto \\ip6",
            ])
            .to_owned(),
        16 => random
            .pick(&[
                "ether multicast",
                "ether broadcast",
                "broadcast",
                "multicast",
                "ip multicast",
                "ip6 multicast",
                "ip broadcast",
            ])
            .to_owned(),
        17 => numbered(random, "vlan", &VLANS),
        18 => {
            let number = random.pick(&[0, 14, 38, 58, 60, 64, 100, 1000]);
            match random.below(2) {
                0 => format!("{} {number}", random.pick(&["less", "greater"])),
                _ => format!("{} {} {number}", random.pick(&["len", "length"]), relation(random)),
            }
        }
        _ => field(random),
    }
}

fn protocol(random: &mut Random) -> &'static str {
    random.pick(&[
        "ip", "ip6", "arp", "rarp", "tcp", "udp", "sctp", "icmp", "icmp6", "igmp", "igrp", "pim", "vrrp",
        "carp", "ah", "esp",
    ])
}

/// A protocol that few networks have today.
fn old_protocol(random: &mut Random) -> &'static str {
    random.pick(&[
        "stp",
        "ipx",
        "netbeui",
        "atalk",
        "aarp",
        "decnet",
        "lat",
        "sca",
        "mopdl",
        "moprc",
        "iso",
        "clnp",
        "esis",
        "es-is",
        "isis",
        "is-is",
        "l1",
        "l2",
        "iih",
        "lsp",
        "snp",
        "csnp",
        "psnp",
        "iso proto 0x83",
        "iso proto \\clnp",
        "isis proto 18",
        "ether proto \\stp",
        "ether proto \\ipx",
        "ether proto \\iso",
        "ether proto \\atalk",
        "ether proto 0x8137",
        "ether proto 0xe0",
        "llc",
        "llc i",
        "llc s",
        "llc U",
        "llc rr",
        "llc rnr",
        "llc rej",
        "llc ui",
        "llc xid",
        "llc sabme",
        "byte 12 = 8",
        "byte 14 > 0x45",
        "byte 23 < 7",
        "atalk[2:2] > 5",
        "decnet[0] & 1 = 0",
    ])
}

pub(super) fn relation(random: &mut Random) -> &'static str {
    random.pick(&["=", "==", "!=", ">", ">=", "<", "<="])
}

/// Qualifiers and one id, or several ids with the same qualifiers in one of the short forms.
fn ids(
    random: &mut Random,
    protocols: &[&str],
    kinds: &[&str],
    id: impl Fn(&mut Random) -> String,
) -> String {
    let kind = random.pick(kinds);
    let directions = ["src ", "dst ", "src or dst ", "dst or src ", "src and dst ", "dst and src "];
    let direction = match kind {
        "proto" => "",
        "" => random.pick(&directions),
        _ if random.one_in(2) => random.pick(&directions),
        _ => "",
    };
    let head = format!("{}{direction}{kind}", random.pick(protocols));
    let head = head.trim_end();
    let (one, two, three) = (id(random), id(random), id(random));
    let (first, second) = (operator(random), operator(random));
    match random.below(10) {
        0 => format!("{head} {one} {first} {two}"),
        1 => format!("{head} {one} {first} {two} {second} {three}"),
        2 => format!("{head} ({one} {first} {two})"),
        3 => format!("{head} not {one}"),
        4 => format!("{head} {one} {first} not {two}"),
        5 => format!("{head} {one} {first} ({two} {second} {three})"),
        _ => format!("{head} {one}"),
    }
}

fn ipv4(random: &mut Random) -> String {
    match random.below(6) {
        0 => random.pick(&["10.0", "192.168.1", "10.1", "172.16.0"]).to_owned(),
        _ => Ipv4Addr::from(random.pick(&IPV4)).to_string(),
    }
}

fn network(random: &mut Random) -> String {
    random
        .pick(&[
            "10",
            "10.0.0.0/8",
            "192.168",
            "192.168.0.0/16",
            "10.0.0.0/30",
            "0.0.0.0/0",
            "224.0.0.0/4",
            "172.16.0.0/12",
            "10.0.0.0 mask 255.0.0.0",
            "10.1 mask 255.255.0.0",
            "0.0.0.1 mask 0.0.0.1",
        ])
        .to_owned()
}

fn mac(random: &mut Random) -> String {
    let address = random.pick(&MACS);
    let [a, b, c, d, e, f] = address;
    match random.below(4) {
        0 => format!("{a:02x}-{b:02x}-{c:02x}-{d:02x}-{e:02x}-{f:02x}"),
        1 => format!("{a:02x}{b:02x}.{c:02x}{d:02x}.{e:02x}{f:02x}"),
        _ => format!("{a:x}:{b:x}:{c:02x}:{d:02x}:{e:02x}:{f:x}"),
    }
}

/// A comparison of a field of a header.
fn field(random: &mut Random) -> String {
    let usual = [
        "tcp[tcpflags] & tcp-syn != 0",
        "tcp[tcpflags] = tcp-syn",
        "tcp[tcpflags] & (tcp-syn|tcp-ack) != 0",
        "(tcp[tcpflags] & (tcp-syn|tcp-ack)) == (tcp-syn|tcp-ack)",
        "tcp[13] & 2 != 0",
        "tcp[13] == 18",
        "icmp[icmptype] = icmp-echo",
        "icmp[icmptype] != icmp-echo and icmp[icmptype] != icmp-echoreply",
        "icmp6[icmp6type] = icmp6-neighborsolicit",
        "ip[6:2] & 0x1fff = 0",
        "ip[0] & 0xf != 5",
        "ip6[6] = 44",
        "ether[0] & 1 = 0",
        "ether[12:2] > 1500",
        "arp[6:2] = 1",
        "ip[8] < 5",
        "udp[4:2] >= 100",
        "0 != tcp[13] & 4",
        "5 - 3 <= ip[1]",
        "1 < 2",
        "len & 1 = 0",
        "ip[16] >= 224",
    ];
    if random.one_in(2) {
        return random.pick(&usual).to_owned();
    }
    let header = random
        .pick(&["ether", "ip", "ip6", "arp", "rarp", "tcp", "udp", "sctp", "icmp", "icmp6", "igmp", "pim"]);
    let offset = random.below(40);
    let size = random.pick(&["", ":1", ":2", ":4"]);
    let mask = random.pick(&["", "", " & 0xf", " & 0xff", " & 1", " & 0"]);
    let constant = random.pick(&[0, 1, 2, 5, 64, 80, 255, 256, 0x0800, 0xffff_ffff_u32]);
    format!("{header}[{offset}{size}]{mask} {} {constant:#x}", relation(random))
}
