//! Random frames: every protocol of the language, whole, truncated and broken, with the values that expressions use.

use crate::random::Random;

pub(super) const PORTS: [u16; 8] = [22, 53, 80, 443, 8080, 0, 1024, 65535];
pub(super) const IPV4: [[u8; 4]; 8] = [
    [10, 0, 0, 1],
    [10, 1, 2, 3],
    [192, 168, 1, 1],
    [172, 16, 0, 5],
    [224, 0, 0, 1],
    [255, 255, 255, 255],
    [0, 0, 0, 0],
    [10, 0, 0, 2],
];
pub(super) const IPV6: [&str; 6] =
    ["2001:db8::1", "2001:db8:1::2", "fe80::1", "ff02::1", "::1", "::ffff:10.0.0.1"];
pub(super) const MACS: [[u8; 6]; 4] =
    [[0xff; 6], [2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2], [0x33, 0x33, 0, 0, 0, 1]];
pub(super) const VLANS: [u16; 5] = [0, 1, 100, 200, 4095];
pub(super) const LABELS: [u32; 4] = [0, 16, 1024, 0xf_ffff];
pub(super) const SESSIONS: [u16; 3] = [1, 17, 0xffff];
pub(super) const NETWORKS: [u32; 3] = [0, 42, 0xff_ffff];
/// tcp, udp, sctp, icmp, icmp6, igmp, pim, vrrp, ah, esp, igrp, and the IPv6 extension headers.
pub(super) const PROTOCOLS: [u8; 15] = [6, 6, 17, 17, 132, 1, 58, 2, 103, 112, 51, 50, 9, 44, 0];

/// One frame.
pub fn frame(random: &mut Random) -> Vec<u8> {
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
    let (ethertype, payload) = payload(random, 0);
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

/// An Ethernet type and a payload of this type. `depth`: number of enclosing packets.
fn payload(random: &mut Random, depth: usize) -> (u16, Vec<u8>) {
    match random.below(20) {
        0..=5 => (0x0800, ipv4(random)),
        6..=10 => (0x86dd, ipv6(random)),
        11 => (random.pick(&[0x0806, 0x8035]), arp(random)),
        12 => (random.pick(&[0_u16, 3, 46, 1500]), llc(random)),
        13 => {
            (random.pick(&[0x9000, 0x88cc, 1501, 0x8100, 0x8863, 0x6003, 0x809b, 0x8137]), random.bytes(40))
        }
        14 => (0x8847, mpls(random)),
        15 => (0x8864, pppoe(random)),
        16..=17 if depth < 2 => geneve(random, depth),
        // The type of one protocol with the bytes of another.
        _ => (random.pick(&[0x0800, 0x86dd, 0x0806, 0x8035]), [ipv6(random), ipv4(random)].concat()),
    }
}

fn mpls(random: &mut Random) -> Vec<u8> {
    let labels = random.pick(&[1, 1, 2, 3]);
    let mut packet = Vec::new();
    for label in 1..=labels {
        let is_last = label == labels || random.one_in(10);
        let fields = random.pick(&LABELS) << 12 | u32::from(is_last) << 8 | 64;
        packet.extend(fields.to_be_bytes());
    }
    packet.extend(if random.one_in(2) { ipv4(random) } else { ipv6(random) });
    packet
}

fn pppoe(random: &mut Random) -> Vec<u8> {
    let [high, low] = random.pick(&SESSIONS).to_be_bytes();
    let mut packet = vec![0x11, 0, high, low, 0, 60];
    let (kind, payload) = match random.below(5) {
        0..=1 => (0x0021_u16, ipv4(random)),
        2..=3 => (0x0057, ipv6(random)),
        _ => (random.pick(&[0xc021, 0x0281, 0x0031, 0x0023, 0x002b]), random.bytes(30)),
    };
    packet.extend(kind.to_be_bytes());
    packet.extend(payload);
    packet
}

/// A Geneve packet over UDP, with an Ethernet frame or a bare packet inside.
fn geneve(random: &mut Random, depth: usize) -> (u16, Vec<u8>) {
    let (kind, mut packet) = match random.below(2) {
        0 => (0x0800, ipv4(random)),
        _ => (0x86dd, ipv6(random)),
    };
    let header = if kind == 0x0800 {
        packet[0] = random.pick(&[0x45, 0x45, 0x46]);
        packet[6..8].fill(0);
        packet[9] = 17;
        4 * usize::from(packet[0] & 0x0f)
    } else {
        packet[6] = 17;
        40
    };
    packet.truncate(header);
    packet.extend([0x30, 0x39, 0x17, 0xc1, 0, 0, 0, 0]);
    let options = random.pick(&[0, 0, 1, 3]);
    let (inner, payload) = payload(random, depth + 1);
    let is_ethernet = random.one_in(2);
    let version = random.pick(&[0, 0, 0, 0, 0x40]);
    packet.extend([version | options, 0]);
    packet.extend(if is_ethernet { 0x6558_u16 } else { inner }.to_be_bytes());
    packet.extend((random.pick(&NETWORKS) << 8).to_be_bytes());
    packet.extend(random.bytes(4 * usize::from(options)));
    if is_ethernet {
        packet.extend([random.pick(&MACS), random.pick(&MACS)].concat());
        if random.one_in(4) {
            packet.extend([0x81, 0]);
            packet.extend(random.pick(&VLANS).to_be_bytes());
        }
        packet.extend(inner.to_be_bytes());
    }
    packet.extend(payload);
    (kind, packet)
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
    // Hop-by-hop, routing, fragment, or no extension header.
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
    let point = random.pick(&[0xfe, 0xfe, 0x06, 0xf0, 0x42, 0xaa, 0xe0, 0xff]);
    let mut packet = vec![point, random.pick(&[point, 0])];
    match random.below(3) {
        // SNAP.
        0 => {
            packet.extend([[0x03, 0, 0, 0], [0x03, 0x08, 0, 0x07]][random.below(2)]);
            packet.extend(random.pick(&[0x809b_u16, 0x80f3, 0x8137, 0x0800]).to_be_bytes());
        }
        // A protocol of ISO.
        1 => packet.extend([
            0x03,
            random.pick(&[0x81, 0x82, 0x83, 0x83]),
            20,
            1,
            0,
            random.pick(&[15, 16, 17, 18, 20, 24, 25, 26, 27, 1]),
        ]),
        _ => packet.push(random.pick(&[0, 1, 5, 9, 3, 0x63, 0xaf, 0x6f, 0x13])),
    }
    packet.extend(random.bytes(40));
    packet
}
