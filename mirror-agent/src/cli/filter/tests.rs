//! Tests of the notes and errors about a filter, and of the packets of capture files that are generated here byte by
//! byte. The captures of tcpdump and editcap are in the target `filter` of the package `mirror-tests`.

#![expect(clippy::expect_used, clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io;

use super::*;

#[test]
fn a_field_that_only_ipv4_has_gets_a_note() {
    let note = notes("tcp[tcpflags] & tcp-syn != 0 or not (tcp[2:2] = ip[udp[0]] and len > 60)");
    assert_eq!(note.lines().count(), 3, "{note}");
    assert!(note.starts_with("note: tcp[...] is a field of packets over IPv4 alone"), "{note}");
    assert!(note.contains("ip6[6] = 6 and ip6[40+...]") && note.contains("ip6[6] = 17 "), "{note}");
    for text in ["tcp port 80", "ip[0] = 0x45", "ip6[53] & 2 != 0", "icmp[icmptype] = icmp-echo"] {
        assert!(!notes(text).contains("IPv4 alone"), "{text}");
    }
}

#[test]
fn what_the_segments_of_a_super_frame_do_not_share_gets_a_note() {
    for text in ["greater 1515", "tcp and len > 60", "ip[2:2] > 1500"] {
        assert_eq!(notes(text), SEGMENTS, "{text}");
    }
    let both = notes("tcp[4:4] = 0");
    assert!(both.starts_with("note: tcp[...] ") && both.ends_with(SEGMENTS), "{both}");
    assert_eq!(notes("tcp port 80 and host 10.0.0.1"), "");
}

#[test]
fn the_caret_stands_under_the_part() {
    let text = "tcp port 80 or\thost ä";
    let error = compile(text).expect_err("the language has no such character");
    let message = pointed(text, &error);
    let lines: Vec<&str> = message.lines().collect();
    assert_eq!(lines[1..], ["  tcp port 80 or host ä", "                      ^"]);
}

/// A pcap file with these packets, in this byte order.
fn pcap(packets: &[(&[u8], u32)], big_endian: bool, magic: u32, link_type: u32) -> Vec<u8> {
    let number = |number: u32| if big_endian { number.to_be_bytes() } else { number.to_le_bytes() };
    let version = if big_endian { 0x0002_0004 } else { 0x0004_0002 };
    let mut file: Vec<u8> = [magic, version, 0, 0, 65535, link_type].map(number).concat();
    for (bytes, length) in packets {
        file.extend([1, 2, bytes.len() as u32, *length].map(number).concat());
        file.extend_from_slice(bytes);
    }
    file
}

/// Writes pcapng blocks.
struct Pcapng {
    file: Vec<u8>,
    big_endian: bool,
}

impl Pcapng {
    fn new(big_endian: bool) -> Self {
        let mut new = Self { file: Vec::new(), big_endian };
        new.section();
        new
    }

    fn numbers<const N: usize>(&self, numbers: [u32; N]) -> Vec<u8> {
        numbers.map(|it| if self.big_endian { it.to_be_bytes() } else { it.to_le_bytes() }).concat()
    }

    fn short(&self, it: u16) -> [u8; 2] {
        if self.big_endian { it.to_be_bytes() } else { it.to_le_bytes() }
    }

    fn block(&mut self, kind: u32, mut content: Vec<u8>) {
        content.resize(content.len().next_multiple_of(4), 0);
        let length = content.len() as u32 + 12;
        let (head, tail) = (self.numbers([kind, length]), self.numbers([length]));
        self.file.extend([head, content, tail].concat());
    }

    fn section(&mut self) {
        let version = [self.short(1), self.short(0)].concat();
        let content = [self.numbers([0x1a2b_3c4d]), version, self.numbers([u32::MAX; 2])].concat();
        self.block(0x0a0d_0d0a, content);
    }

    /// Adds an interface with times in units of 10^-`digits` s.
    fn interface(&mut self, link_type: u16, snaplen: u32, digits: u8) {
        let option = [&self.short(9)[..], &self.short(1), &[digits, 0, 0, 0]].concat();
        let head = [self.short(link_type), [0, 0]].concat();
        self.block(1, [head, self.numbers([snaplen]), option, self.numbers([0])].concat());
    }

    fn packet(&mut self, interface: u32, bytes: &[u8], length: u32) {
        let head = self.numbers([interface, 7, 7, bytes.len() as u32, length]);
        self.block(6, [head, bytes.to_vec()].concat());
    }

    fn simple(&mut self, bytes: &[u8], length: u32) {
        self.block(3, [self.numbers([length]), bytes.to_vec()].concat());
    }
}

const ARP: [u8; 14] = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 1, 8, 6];
const IP: [u8; 14] = [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];

/// The numbers of the matching packets.
#[track_caller]
fn matching(file: &[u8], filter: &str) -> Vec<u64> {
    let mut numbers = Vec::new();
    matches(file, &compile(filter).unwrap(), |number| numbers.push(number)).unwrap();
    numbers
}

fn refused(file: &[u8]) -> String {
    format!("{:#}", matches(file, &compile("arp").unwrap(), drop).unwrap_err())
}

#[test]
fn each_packet_is_judged_whatever_wrote_the_file() {
    for (big_endian, magic) in
        [(true, 0xa1b2_c3d4), (false, 0xa1b2_c3d4), (true, 0xa1b2_3c4d), (false, 0xa1b2_3c4d)]
    {
        assert_eq!(matching(&pcap(&[(&ARP, 60), (&IP, 1514)], big_endian, magic, 1), "arp"), [1]);
    }
    for (big_endian, digits) in [(true, 6), (false, 9)] {
        let mut file = Pcapng::new(big_endian);
        file.interface(1, 0, digits);
        file.packet(0, &ARP, 60);
        file.block(0x0bad, vec![1; 30]);
        file.packet(0, &IP, 1514);
        // A section has its own interfaces and byte order.
        file.big_endian = !big_endian;
        file.section();
        file.interface(1, 14, 6);
        file.simple(&[&ARP[..], &[0xee; 2]].concat(), 60);
        assert_eq!(matching(&file.file, "arp"), [1, 3], "{big_endian} {digits}");
        assert!(
            matching(&file.file, "ether[14] = 0xee").is_empty(),
            "bytes that fill a block were not captured"
        );
        assert_eq!(matching(&file.file, "greater 1000"), [2], "the length is that on the wire");
    }
}

#[test]
fn other_files_are_refused_with_the_reason() {
    assert_eq!(refused(&[]), "it is empty");
    assert_eq!(refused(&[0xd4, 0xc3]), "it is shorter than its header");
    assert_eq!(refused(&[7; 30]), "it is neither a pcap nor a pcapng file");
    let other = pcap(&[(&ARP, 60)], true, 0xa1b2_c3d4, 113);
    assert_eq!(refused(&other), "packet 1 is not an Ethernet frame (link type 113)");
    let mut cut = pcap(&[(&ARP, 60)], true, 0xa1b2_c3d4, 1);
    cut.pop();
    assert_eq!(refused(&cut), "it ends in the middle of a block after packet 0");
    let mut unknown = Pcapng::new(false);
    unknown.packet(0, &ARP, 60);
    assert_eq!(refused(&unknown.file), "packet 1: interface 0 is not described");
    for big_endian in [true, false] {
        let mut old = Pcapng::new(big_endian);
        old.interface(1, 0, 6);
        old.block(2, vec![0; 40]);
        assert!(refused(&old.file).contains("obsolete"), "{}", refused(&old.file));
    }
    let mut broken = Pcapng::new(false);
    broken.interface(1, 0, 6);
    broken.packet(0, &ARP, 60);
    // A packet with a stated length greater than its block, followed by much data.
    let at = broken.file.len() - 12 - 16 - 8;
    broken.file[at..at + 4].copy_from_slice(&1_000_000_u32.to_le_bytes());
    broken.file.resize(40 << 20, 0);
    let why = refused(&broken.file);
    assert!(why.contains("broken") || why.contains("more than"), "{why}");
}

/// An endless file that arrives in small pieces: it is not held in memory.
#[test]
fn a_long_file_is_read_in_pieces() {
    struct Pieces(usize, Vec<u8>);
    impl Read for Pieces {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let rest = &self.1[self.0 % self.1.len()..];
            let count = rest.len().min(buffer.len());
            buffer[..count].copy_from_slice(&rest[..count]);
            self.0 += count;
            Ok(count)
        }
    }
    let header = pcap(&[], false, 0xa1b2_c3d4, 1);
    let packet = pcap(&[(&ARP, 60)], false, 0xa1b2_c3d4, 1).split_off(header.len());
    let length = packet.len() as u64;
    let count = 2 * BUFFER_OF_FILE / length;
    let file = header.chain(Pieces(0, packet).take(count * length));
    let mut matched = 0;
    let packets = matches(file, &compile("arp").unwrap(), |_| matched += 1).unwrap();
    assert_eq!((packets, matched), (count, count));
}

/// More bytes than are read at once.
const BUFFER_OF_FILE: u64 = 20 << 20;
