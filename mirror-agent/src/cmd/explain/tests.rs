//! The output of `explain` for captures that are written here, byte by byte. The captures of tcpdump and editcap are in
//! the target `filter` of the package `mirror-tests`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::*;

/// A pcap file with these packets, in either byte order.
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

    /// An interface whose times are in 10^-`digits` s.
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

fn criteria(filter: &str) -> Criteria {
    Criteria { filter: Some(compile(filter).unwrap()), ..Criteria::default() }
}

/// The output and the error.
fn explained(file: &[u8], criteria: &Criteria, output: OutputFormat) -> (String, Option<String>) {
    let mut text = Vec::new();
    let error = write_verdicts(file, criteria, output, &mut text).err();
    (String::from_utf8(text).unwrap(), error.map(|error| format!("{error:#}")))
}

#[track_caller]
fn table(file: &[u8], criteria: &Criteria) -> String {
    let (text, error) = explained(file, criteria, OutputFormat::Table);
    assert_eq!(error, None, "{text}");
    text
}

fn refused(file: &[u8]) -> String {
    explained(file, &Criteria::default(), OutputFormat::Table).1.unwrap()
}

const ARP: [u8; 14] = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 1, 8, 6];
const IP: [u8; 14] = [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];
const ARP_AND_IP: &str = "NUMBER  VERDICT      BYTES\n     1  copied          60\n     2  filtered      1514\n\n\
                          copied       1 packets, 60 bytes\nfiltered     1 packets, 1514 bytes\n";

/// An IPv4 frame of UDP between these ports.
fn udp(from: u16, to: u16) -> Vec<u8> {
    let ip = [0x45, 0, 0, 46, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    [&IP[..], &ip, &from.to_be_bytes(), &to.to_be_bytes(), &[0; 22]].concat()
}

#[test]
fn each_packet_has_a_verdict_whatever_wrote_the_file() {
    let arp = criteria("arp");
    for (big_endian, magic) in
        [(true, 0xa1b2_c3d4), (false, 0xa1b2_c3d4), (true, 0xa1b2_3c4d), (false, 0xa1b2_3c4d)]
    {
        assert_eq!(table(&pcap(&[(&ARP, 60), (&IP, 1514)], big_endian, magic, 1), &arp), ARP_AND_IP);
    }
    for (big_endian, digits) in [(true, 6), (false, 6), (true, 9), (false, 9)] {
        let mut file = Pcapng::new(big_endian);
        file.interface(1, 0, digits);
        file.packet(0, &ARP, 60);
        file.block(0x0bad, vec![1; 30]);
        file.packet(0, &IP, 1514);
        assert_eq!(table(&file.file, &arp), ARP_AND_IP, "{big_endian} {digits}");
    }
    let all = table(&pcap(&[(&ARP, 60)], true, 0xa1b2_c3d4, 1), &Criteria::default());
    assert!(all.contains("copied       1 packets"), "{all}");
}

#[test]
fn sections_have_their_own_interfaces_and_byte_order() {
    let mut file = Pcapng::new(true);
    file.interface(101, 0, 6);
    file.interface(1, 0, 9);
    file.packet(1, &ARP, 60);
    file.packet(0, &[0x45; 20], 20);
    file.big_endian = false;
    file.section();
    file.interface(1, 14, 6);
    file.packet(0, &IP, 1514);
    file.simple(&[&ARP[..], &[0xee; 2]].concat(), 60);
    let text = table(&file.file, &criteria("arp"));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[1..],
        [
            "     1  copied          60",
            "     3  filtered      1514",
            "     4  copied          60",
            "",
            "copied       2 packets, 120 bytes",
            "filtered     1 packets, 1514 bytes",
            "skipped      1 packets, 20 bytes: no Ethernet frames (link type 101)",
        ]
    );
    // The bytes that fill a simple packet up to a multiple of four were not captured.
    let text = table(&file.file, &criteria("ether[14] = 0xee"));
    assert!(text.contains("     4  filtered"), "{text}");
}

/// A bug that was seen: `len`, `less` and `greater` used the captured length of cut packets. tcpdump uses the length on
/// the wire.
#[test]
fn a_cut_packet_is_as_long_as_it_was_on_the_wire() {
    let question = udp(40000, 53);
    for captured in [14, 38, 42, question.len()] {
        let cut = pcap(&[(&question[..captured], 1514)], false, 0xa1b2_c3d4, 1);
        for (filter, verdict) in [
            ("greater 100", "copied"),
            ("len = 1514", "copied"),
            ("less 100", "filtered"),
            ("udp and greater 100", if captured >= 24 { "copied" } else { "filtered" }),
            // Bytes that were not captured decide nothing, even where the length is known.
            ("greater 100 and udp port 53", if captured >= 38 { "copied" } else { "filtered" }),
            ("greater 100 and not udp[4] = 1", if captured >= 39 { "copied" } else { "filtered" }),
            (
                "greater 100 and (ether[50] = 1 or ether[50] != 1)",
                if captured >= 51 { "copied" } else { "filtered" },
            ),
        ] {
            let text = table(&cut, &criteria(filter));
            assert!(text.contains(&format!("     1  {verdict}")), "{captured} bytes, {filter}: {text}");
        }
    }
}

#[test]
fn a_sample_of_packets_that_are_cut_too_short_is_told() {
    let sample = |share| Criteria { share, ..criteria("ip") };
    let frames = [udp(40000, 53), udp(40001, 53), ARP.to_vec()];
    let file = |captured: usize| {
        let packets: Vec<(&[u8], u32)> =
            frames.iter().map(|it| (&it[..captured.min(it.len())], 1514)).collect();
        pcap(&packets, false, 0xa1b2_c3d4, 1)
    };
    assert!(!table(&file(38), &sample(1 << 31)).contains("uncertain"), "38 bytes hold the ports");
    let text = table(&file(36), &sample(1 << 31));
    assert!(text.contains("uncertain    2 packets"), "{text}");
    assert!(!table(&file(36), &sample(0)).contains("uncertain"), "all flows are asked for");
}

#[test]
fn json_holds_the_same() {
    let mut file = Pcapng::new(false);
    file.interface(1, 0, 6);
    file.interface(113, 0, 6);
    file.packet(0, &ARP, 60);
    file.packet(1, &ARP, 60);
    file.packet(0, &IP, 1514);
    let json = |file: &[u8]| {
        let (text, error) = explained(file, &criteria("arp"), OutputFormat::Json);
        (serde_json::from_str::<serde_json::Value>(&text).unwrap(), error)
    };
    let mut expected = serde_json::json!({
        "packets": [
            {"number": 1, "verdict": "copied", "bytes": 60, "captured": 14},
            {"number": 3, "verdict": "filtered", "bytes": 1514, "captured": 14},
        ],
        "totals": [
            {"verdict": "copied", "packets": 1, "bytes": 60},
            {"verdict": "filtered", "packets": 1, "bytes": 1514},
        ],
        "skipped": [{"link_type": 113, "packets": 1, "bytes": 60}],
        "uncertain": 0,
        "error": null,
    });
    assert_eq!(json(&file.file), (expected.clone(), None));
    // The output names the error of a file that is cut off, in a document that is complete.
    file.packet(0, &IP, 60);
    file.file.pop();
    let why = "it ends in the middle, behind packet 3";
    expected["error"] = why.into();
    assert_eq!(json(&file.file), (expected, Some(why.into())));
    let nothing = pcap(&[], false, 0xa1b2_c3d4, 1);
    assert_eq!(json(&nothing).0["packets"], serde_json::json!([]));
}

#[test]
fn other_files_are_refused_with_the_reason() {
    assert_eq!(refused(&[]), "it is empty");
    assert_eq!(refused(&[0xd4, 0xc3]), "it is shorter than its header");
    assert_eq!(refused(&[7; 30]), "it is neither a pcap nor a pcapng file");
    let other = pcap(&[(&ARP, 60)], true, 0xa1b2_c3d4, 113);
    assert_eq!(refused(&other), "its packets are not Ethernet frames (link type 113)");
    let mut cut = pcap(&[(&ARP, 60)], true, 0xa1b2_c3d4, 1);
    cut.pop();
    assert_eq!(refused(&cut), "it ends in the middle, behind packet 0");
    let mut unknown = Pcapng::new(false);
    unknown.packet(0, &ARP, 60);
    assert_eq!(refused(&unknown.file), "packet 1: the file does not say what interface 0 is");
    for big_endian in [true, false] {
        let mut old = Pcapng::new(big_endian);
        old.interface(1, 0, 6);
        old.block(2, vec![0; 40]);
        assert!(refused(&old.file).contains("given up"), "{}", refused(&old.file));
    }
    let mut broken = Pcapng::new(false);
    broken.interface(1, 0, 6);
    broken.packet(0, &ARP, 60);
    // A packet with a stated length greater than its block, and with much data behind it.
    let at = broken.file.len() - 12 - 16 - 8;
    broken.file[at..at + 4].copy_from_slice(&1_000_000_u32.to_le_bytes());
    broken.file.resize(40 << 20, 0);
    let why = refused(&broken.file);
    assert!(why.contains("broken") || why.contains("longer than"), "{why}");
}

/// A file without an end, as a pipe may be: it is not held in memory, and a reader that closes the output ends the
/// command.
#[test]
fn a_long_file_is_read_in_pieces_and_left_when_nobody_reads() {
    struct Endless(usize, Vec<u8>);
    impl Read for Endless {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let rest = &self.1[self.0 % self.1.len()..];
            // As a pipe does: little at a time.
            let count = rest.len().min(buffer.len()).min(7);
            buffer[..count].copy_from_slice(&rest[..count]);
            self.0 += count;
            Ok(count)
        }
    }
    struct Enough(usize);
    impl Write for Enough {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 = self.0.checked_sub(bytes.len()).ok_or(io::ErrorKind::BrokenPipe)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut header = pcap(&[], false, 0xa1b2_c3d4, 1);
    let packet = pcap(&[(&ARP, 60)], false, 0xa1b2_c3d4, 1).split_off(header.len());
    header.extend(packet.repeat(2));
    let file = header[..24].chain(Endless(0, packet));
    let error =
        write_verdicts(file, &Criteria::default(), OutputFormat::Table, &mut Enough(3 << 20)).unwrap_err();
    assert!(is_broken_pipe(&error), "{error:#}");
}
