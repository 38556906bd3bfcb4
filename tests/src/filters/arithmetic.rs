//! Random comparisons with arithmetic and with offsets that depend on the packet.

use super::expressions::relation as relation_sign;
use crate::random::Random;

/// Usual comparisons, and variations of them.
const USUAL: [&str; 14] = [
    "tcp[((tcp[12:1] & 0xf0) >> 2):4] = 0x47455420",
    "ip[2:2] - ((ip[0]&0xf)<<2) - ((tcp[12]&0xf0)>>2) != 0",
    "ip[12:4] = ip[16:4]",
    "ip[12:4] >= ip[16:4]",
    "tcp[0:2] > tcp[2:2]",
    "udp[0:2] != udp[2:2]",
    "len - 14 > 100",
    "ip[2:2] + 14 < len",
    "ip[2:2] <= len - 14",
    "ether[6:4] = ether[0:4]",
    "ip[ip[0] & 0xf] > 7",
    "-ip[8] & 0xff > 100",
    "tcp[-1] != 0",
    "icmp[4:2] % 2 = 1",
];

pub(super) fn relation(random: &mut Random) -> String {
    if random.one_in(2) {
        return random.pick(&USUAL).to_owned();
    }
    let depth = random.pick(&[1, 1, 2]);
    let left = arithmetic(random, depth);
    let right = match random.below(3) {
        0 => arithmetic(random, 1),
        _ => random.pick(&["0", "1", "5", "0x45", "100", "0x0800", "0xffffffff"]).to_owned(),
    };
    format!("{left} {} {right}", relation_sign(random))
}

fn arithmetic(random: &mut Random, depth: usize) -> String {
    if depth == 0 {
        return value(random, 0);
    }
    let left = arithmetic(random, depth - 1);
    // libpcap checks the offset of a field as if it were the divisor or the shift, so here these offsets are 1 to 31.
    let (operator, right) = match random.below(12) {
        0..=1 => ("+", arithmetic(random, depth - 1)),
        2..=3 => ("-", arithmetic(random, depth - 1)),
        4 => ("*", arithmetic(random, depth - 1)),
        5 => ("&", arithmetic(random, depth - 1)),
        6 => ("|", arithmetic(random, depth - 1)),
        7 => ("^", arithmetic(random, depth - 1)),
        8 => ("/", divisor(random)),
        9 => ("%", divisor(random)),
        10 => ("<<", shift(random)),
        _ => (">>", shift(random)),
    };
    let text = format!("{left} {operator} {right}");
    match random.below(4) {
        0 => format!("({text})"),
        1 => format!("-({text})"),
        _ => text,
    }
}

fn value(random: &mut Random, depth: usize) -> String {
    let header = random.pick(&["ether", "ip", "ip6", "arp", "tcp", "udp", "icmp", "icmp6", "igmp", "carp"]);
    let size = random.pick(&["", ":1", ":2", ":4"]);
    match random.below(8) {
        0 => "len".to_owned(),
        1 => random.pick(&["1", "2", "3", "7", "0x10", "255", "0x80000000"]).to_owned(),
        2 if depth == 0 => format!("{header}[{} & 0x1f{size}]", value(random, 1)),
        3 if depth == 0 => format!("{header}[{} + 2{size}]", value(random, 1)),
        4 if depth == 0 => format!("{header}[{} - {}{size}]", value(random, 1), random.below(300)),
        _ => format!(
            "{header}[{}{size}]",
            random.pick(&[0, 1, 2, 6, 9, 12, 13, 16, 20, 33, 60, 100, 200, 600])
        ),
    }
}

fn divisor(random: &mut Random) -> String {
    random
        .pick(&["1", "2", "3", "10", "256", "0xffffffff", "ip[8]", "ip[1]", "tcp[13]", "(ip[6] & 1)"])
        .to_owned()
}

fn shift(random: &mut Random) -> String {
    random.pick(&["0", "1", "2", "8", "31", "ip[8]", "(ip[1] & 0x3f)", "tcp[13]"]).to_owned()
}
