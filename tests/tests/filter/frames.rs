//! Makes random frames: every protocol of the language, whole, truncated and broken, with the values that expressions
//! use.

use crate::random::Random;

pub(crate) const PORTS: [u16; 8] = [22, 53, 80, 443, 8080, 0, 1024, 65535];
pub(crate) const IPV4: [[u8; 4]; 8] = [
    [10, 0, 0, 1],
    [10, 1, 2, 3],
    [192, 168, 1, 1],
    [172, 16, 0, 5],
    [224, 0, 0, 1],
    [255, 255, 255, 255],
    [0, 0, 0, 0],
    [10, 0, 0, 2],
];
pub(crate) const IPV6: [&str; 6] =
    ["2001:db8::1", "2001:db8:1::2", "fe80::1", "ff02::1", "::1", "::ffff:10.0.0.1"];
pub(crate) const MACS: [[u8; 6]; 4] =
    [[0xff; 6], [2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2], [0x33, 0x33, 0, 0, 0, 1]];
pub(crate) const VLANS: [u16; 5] = [0, 1, 100, 200, 4095];
/// tcp, udp, sctp, icmp, icmp6, igmp, pim, vrrp, ah, esp, igrp, and the IPv6 extension headers.
pub(crate) const PROTOCOLS: [u8; 15] = [6, 6, 17, 17, 132, 1, 58, 2, 103, 112, 51, 50, 9, 44, 0];

/// One frame.
pub(crate) fn frame(random: &mut Random) -> Vec<u8> {
    if random.one_in(20) {
        let length = random.below(300);
        return random.bytes(length);
    }
    let mut frame = [random.pick(&MACS), random.pick(&MACS)].concat();
    for _ in 0..random.pick(&[0, 0, 0, 1, 1, 2, 3]) {
        frame.extend(random.pick(&[0x8100_u16, 0x8100, 0x88a8, 0x9100]).to_be_bytes());
        let priority = random.pick(&[0, 0x6000]);
        frame.extend((random.pick(&VLANS) | priority).to_be_bytes());
    }
    let (ethertype, payload) = match random.below(16) {
        0..=6 => (0x0800, ipv4(random)),
        7..=11 => (0x86dd, ipv6(random)),
        12 => (random.pick(&[0x0806, 0x8035]), arp(random)),
        13 => (random.pick(&[0_u16, 3, 46, 1500]), llc(random)),
        14 => (random.pick(&[0x9000, 0x88cc, 1501, 0x8100]), random.bytes(40)),
        // The type of one protocol and the bytes of another.
        _ => (random.pick(&[0x0800, 0x86dd, 0x0806, 0x8035]), [ipv6(random), ipv4(random)].concat()),
    };
    frame.extend(ethertype.to_be_bytes());
    frame.extend(payload);
    match random.below(10) {
        0..=2 => frame.truncate(random.below(frame.len() + 1)),
        3 => frame.resize(random.below(1500), 0),
        4 => {
            let at = random.below(frame.len());
            frame[at] = random.bytes(1)[0];
        }
        _ => {}
    }
    frame
}

fn ipv4(random: &mut Random) -> Vec<u8> {
    let words = random.pick(&[5, 5, 5, 5, 6, 8, 15, 0, 4]);
    let mut header = vec![0; 20];
    header[0] = 0x40 | words as u8;
    header[1] = random.pick(&[0, 0xb8]);
    header[6..8]
        .copy_from_slice(&random.pick(&[0_u16, 0, 0, 0x4000, 0x2000, 0x2001, 0x1fff, 0x00b9]).to_be_bytes());
    header[8] = random.pick(&[64, 1, 255]);
    header[9] = random.pick(&PROTOCOLS);
    header[12..16].copy_from_slice(&random.pick(&IPV4));
    header[16..20].copy_from_slice(&random.pick(&IPV4));
    let protocol = header[9];
    header.extend(random.bytes((4 * words).max(20) - 20));
    header.extend(transport(random, protocol));
    header
}

fn ipv6(random: &mut Random) -> Vec<u8> {
    let address = |random: &mut Random| random.pick(&IPV6).parse::<std::net::Ipv6Addr>().unwrap().octets();
    let protocol = random.pick(&PROTOCOLS);
    // Hop-by-hop, routing, fragment, or none of them.
    let extension = random.pick(&[None, None, None, Some(0), Some(43), Some(44), Some(44)]);
    let mut packet = vec![0x60, 0, 0, 0, 0, 0, extension.unwrap_or(protocol), 64];
    packet.extend(address(random));
    packet.extend(address(random));
    if extension.is_some() {
        packet.extend([protocol, 0, 0, 0, 0, 0, 0, 0]);
    }
    packet.extend(transport(random, protocol));
    packet
}

fn transport(random: &mut Random, protocol: u8) -> Vec<u8> {
    let length = random.pick(&[0, 4, 20, 60]);
    let mut bytes = random.bytes(24 + length);
    match protocol {
        1 => bytes[..2].copy_from_slice(&[random.pick(&[0, 3, 5, 8, 11]), random.pick(&[0, 1, 3])]),
        58 => bytes[..2].copy_from_slice(&[random.pick(&[1, 2, 128, 129, 135, 136]), 0]),
        _ => {
            bytes[..2].copy_from_slice(&random.pick(&PORTS).to_be_bytes());
            bytes[2..4].copy_from_slice(&random.pick(&PORTS).to_be_bytes());
            bytes[13] = random.pick(&[0x02, 0x12, 0x10, 0x18, 0x11, 0x04, 0xc2, 0]);
        }
    }
    bytes
}

fn arp(random: &mut Random) -> Vec<u8> {
    let mut packet = vec![0, 1, 8, 0, 6, 4, 0, random.pick(&[1, 2, 3])];
    for _ in 0..2 {
        packet.extend(random.pick(&MACS));
        packet.extend(random.pick(&IPV4));
    }
    packet
}

fn llc(random: &mut Random) -> Vec<u8> {
    let point = random.pick(&[0xfe, 0x06, 0xf0, 0x42, 0xaa]);
    let mut packet = vec![point, random.pick(&[point, 0])];
    packet.extend(random.bytes(44));
    packet
}
