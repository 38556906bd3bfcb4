//! Tests of capture files: what `pcap-parser` reads back, by property, and one file byte for byte.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

use pcap_parser::{Block, Linktype, OptionCode, PcapNGOption, traits::PcapNGPacketBlock as _};
use proptest::{collection::vec, option, prelude::*};

use super::*;

/// A file that Wireshark 4 reads correctly.
const GOLDEN: &[u8] = include_bytes!("golden.pcapng");

/// All blocks of a file; there is nothing but blocks.
fn blocks(mut file: &[u8]) -> Vec<Block<'_>> {
    let mut blocks = Vec::new();
    while !file.is_empty() {
        let is_section = blocks.is_empty();
        let (rest, block) = if is_section {
            let (rest, section) = pcap_parser::parse_sectionheaderblock_le(file).unwrap();
            (rest, Block::SectionHeader(section))
        } else {
            pcap_parser::parse_block_le(file).unwrap()
        };
        assert_eq!((file.len() - rest.len()) % 4, 0);
        blocks.push(block);
        file = rest;
    }
    blocks
}

/// The options without the end of options, which must come last if there are any.
fn read(options: &[PcapNGOption<'_>]) -> Vec<(u16, Vec<u8>)> {
    let mut all: Vec<_> =
        options.iter().map(|option| (option.code.0, option.as_bytes().unwrap().to_vec())).collect();
    assert!(all.pop().is_none_or(|end| end == (0, Vec::new())));
    all
}

/// The expected options, in their order.
fn present<const N: usize>(options: [(u16, Option<Vec<u8>>); N]) -> Vec<(u16, Vec<u8>)> {
    options.into_iter().filter_map(|(code, value)| Some((code, value?))).collect()
}

fn text_of(text: &Option<String>) -> Option<Vec<u8>> {
    text.clone().map(String::into_bytes)
}

fn any_text() -> impl Strategy<Value = Option<String>> {
    option::of("\\PC{0,20}")
}

fn begin(out: &mut Vec<u8>) -> (Writer, InterfaceId) {
    let mut writer = Writer::begin(out, &Section::default());
    let interface = writer.interface(out, &Interface::default());
    (writer, interface)
}

proptest! {
    #[test]
    fn a_section_is_read_back(application in any_text(), comment in any_text()) {
        let section = Section { application: application.as_deref(), comment: comment.as_deref() };
        let mut file = Vec::new();
        Writer::begin(&mut file, &section);
        let blocks = blocks(&file);
        let [Block::SectionHeader(block)] = &blocks[..] else { panic!("{blocks:?}") };
        prop_assert_eq!((block.major_version, block.minor_version, block.section_len), (1, 0, -1));
        let texts = [(1, &comment), (4, &application)];
        prop_assert_eq!(read(&block.options), present(texts.map(|(code, text)| (code, text_of(text)))));
    }

    #[test]
    fn an_interface_is_read_back(
        name in "\\PC{0,20}", texts in (any_text(), any_text(), any_text(), any_text()), count in 1..5_u32,
    ) {
        let (description, filter, hardware, comment) = texts;
        let interface = Interface { name, description, filter, hardware, comment };
        let mut file = Vec::new();
        let mut writer = Writer::begin(&mut file, &Section::default());
        for id in 0..count {
            prop_assert_eq!(writer.interface(&mut file, &interface), InterfaceId(id));
        }
        let blocks = blocks(&file);
        prop_assert_eq!(blocks.len() as u32, 1 + count);
        for block in &blocks[1..] {
            let Block::InterfaceDescription(block) = block else { panic!("{block:?}") };
            prop_assert_eq!((block.linktype, block.snaplen), (Linktype::ETHERNET, 0));
            prop_assert_eq!(block.ts_resolution(), Some(1_000_000_000));
            let filter = interface.filter.as_ref().map(|filter| [&[0], filter.as_bytes()].concat());
            prop_assert_eq!(read(&block.options), present([
                (1, text_of(&interface.comment)),
                (2, Some(interface.name.clone().into_bytes())),
                (3, text_of(&interface.description)),
                (9, Some(vec![9])),
                (11, filter),
                (15, text_of(&interface.hardware)),
            ]));
        }
    }

    #[test]
    fn a_packet_is_read_back(
        time_ns: u64, bytes in vec(any::<u8>(), 0..100), len in prop_oneof![0..200_u32, any::<u32>()],
        outbound in option::of(any::<bool>()), comment in any_text(),
    ) {
        let mut file = Vec::new();
        let (_, interface) = begin(&mut file);
        let direction = outbound.map(|is_out| if is_out { Direction::Outbound } else { Direction::Inbound });
        let packet = Packet { interface, time_ns, bytes: &bytes, len, direction, comment: comment.as_deref() };
        packet.write(&mut file);
        let blocks = blocks(&file);
        let Some(Block::EnhancedPacket(block)) = blocks.last() else { panic!("{blocks:?}") };
        prop_assert_eq!(u64::from(block.ts_high) << 32 | u64::from(block.ts_low), time_ns);
        prop_assert_eq!((block.if_id, block.packet_data()), (0, &bytes[..]));
        prop_assert_eq!(block.origlen, len.max(bytes.len() as u32));
        let flags = outbound.map(|is_out| vec![1 + u8::from(is_out), 0, 0, 0]);
        prop_assert_eq!(read(&block.options), present([(1, text_of(&comment)), (2, flags)]));
    }

    #[test]
    fn statistics_are_read_back(
        time_ns: u64, times in (option::of(any::<u64>()), option::of(any::<u64>())),
        counters: [Option<u64>; 3],
    ) {
        let mut file = Vec::new();
        let (_, interface) = begin(&mut file);
        let (start_ns, end_ns) = times;
        let ([received, dropped, limited], comment) = (counters, Some("cut".to_owned()));
        Statistics { interface, time_ns, start_ns, end_ns, received, dropped, limited, comment }.write(&mut file);
        let blocks = blocks(&file);
        let Some(Block::InterfaceStatistics(block)) = blocks.last() else { panic!("{blocks:?}") };
        prop_assert_eq!((block.if_id, u64::from(block.ts_high) << 32 | u64::from(block.ts_low)), (0, time_ns));
        let halves = |time_ns: u64| ((time_ns >> 32) as u32, time_ns as u32);
        prop_assert_eq!(block.isb_starttime().transpose().unwrap(), start_ns.map(halves));
        prop_assert_eq!(block.isb_endtime().transpose().unwrap(), end_ns.map(halves));
        prop_assert_eq!(block.isb_ifrecv().transpose().unwrap(), received);
        prop_assert_eq!(block.isb_ifdrop().transpose().unwrap(), dropped);
        prop_assert_eq!(block.isb_osdrop().transpose().unwrap(), limited);
        let comment = block.options.iter().find(|option| option.code == OptionCode::Comment);
        prop_assert_eq!(comment.and_then(|option| option.as_str().ok()), Some("cut"));
    }

    #[test]
    fn names_are_read_back(
        addresses in vec((any::<IpAddr>(), "\\PC{1,20}"), 0..5), comment in any_text(),
    ) {
        let mut file = Vec::new();
        begin(&mut file);
        let names = Names { addresses, comment };
        names.write(&mut file);
        let blocks = blocks(&file);
        let Some(Block::NameResolution(block)) = blocks.last() else { panic!("{blocks:?}") };
        let mut expected: Vec<_> = names.addresses.iter().map(|(address, name)| {
            let (kind, octets) = match address {
                IpAddr::V4(address) => (1_u16, address.octets().to_vec()),
                IpAddr::V6(address) => (2, address.octets().to_vec()),
            };
            // `pcap-parser` leaves the padding at a record.
            let mut value = [&octets[..], name.as_bytes(), &[0]].concat();
            value.resize(value.len().next_multiple_of(4), 0);
            (kind, value)
        }).collect();
        expected.push((0, Vec::new()));
        let found = block.nr.iter().map(|record| (record.record_type.0, record.record_value.to_vec()));
        prop_assert_eq!(found.collect::<Vec<_>>(), expected);
        prop_assert_eq!(read(&block.options), present([(1, text_of(&names.comment))]));
    }
}

#[test]
fn many_names_make_blocks_that_dumpcap_accepts() {
    // Names of 300 bytes, and a comment of 90,000.
    let [name, comment] = [100, 30_000].map(|count| "\u{20ac}".repeat(count));
    let numbers = 0..2 * MAX_NAMES as u128 + 1;
    let addresses = numbers.map(|number| (IpAddr::from(number.to_be_bytes()), name.clone())).collect();
    let mut file = Vec::new();
    begin(&mut file);
    Names { addresses, comment: Some(comment) }.write(&mut file);
    let blocks = blocks(&file);
    let names = blocks[2..].iter().map(|block| {
        let Block::NameResolution(block) = block else { panic!("{block:?}") };
        assert!(block.block_len1 <= 256 << 10);
        let lengths: Vec<_> = block.nr.iter().map(|record| record.record_value.len()).collect();
        // An address, a whole number of characters of 3 bytes each, the zero byte, and 3 more of padding.
        assert!(lengths[..lengths.len() - 1].iter().all(|length| *length == 16 + 252 + 1 + 3));
        (lengths.len() - 1, read(&block.options).len())
    });
    assert!(names.eq([(MAX_NAMES, 1), (MAX_NAMES, 0), (1, 0)]));
}

#[test]
fn what_is_too_long_is_cut() {
    let text = "\u{20ac}".repeat(30_000);
    let mut file = Vec::new();
    let mut writer = Writer::begin(&mut file, &Section::default());
    let interface =
        Interface { filter: Some(text.clone()), comment: Some(text.clone()), ..Interface::default() };
    let interface = writer.interface(&mut file, &interface);
    let bytes = vec![7; MAX_CAPTURED + 10];
    let packet = Packet { interface, time_ns: 1, bytes: &bytes, len: 0, direction: None, comment: None };
    packet.write(&mut file);
    let blocks = blocks(&file);
    let [_, Block::InterfaceDescription(interface), Block::EnhancedPacket(packet)] = &blocks[..] else {
        panic!("{blocks:?}")
    };
    let options = read(&interface.options);
    // A whole number of characters of 3 bytes each, and the byte for the kind of the filter.
    let lengths: Vec<_> = options.iter().map(|(code, value)| (*code, value.len())).collect();
    assert_eq!(lengths, [(1, 65_532), (2, 0), (9, 1), (11, 65_533)]);
    assert!(options[0].1 == text.as_bytes()[..65_532]);
    assert_eq!((packet.caplen as usize, packet.origlen as usize), (MAX_CAPTURED, MAX_CAPTURED + 10));
}

#[test]
fn a_file_is_the_same_as_ever() {
    let mut file = Vec::new();
    let section = Section { application: Some("podmirror 0.1.0"), comment: Some("of the node a") };
    let mut writer = Writer::begin(&mut file, &section);
    let eth0 = writer.interface(
        &mut file,
        &Interface {
            name: "eth0".into(),
            description: Some("shop/web".into()),
            filter: Some("tcp port 443".into()),
            hardware: Some("veth1".into()),
            comment: Some("mirror ids".into()),
        },
    );
    let arp: Vec<u8> = [&[0xff; 6][..], &[2, 0, 0, 0, 0, 1, 8, 6, 0, 1, 8, 0, 6, 4, 0, 1]].concat();
    let time_ns = 1_767_225_600_123_456_789;
    let packet = Packet {
        interface: eth0,
        time_ns,
        bytes: &arp,
        len: 42,
        direction: Some(Direction::Outbound),
        comment: Some("first"),
    };
    packet.write(&mut file);
    let net1 = writer.interface(&mut file, &Interface { name: "net1".into(), ..Interface::default() });
    let direction = Some(Direction::Inbound);
    Packet { interface: net1, bytes: &arp[..21], direction, comment: None, ..packet }.write(&mut file);
    Statistics {
        interface: eth0,
        time_ns: time_ns + 5,
        start_ns: Some(time_ns - 5),
        end_ns: Some(time_ns + 4),
        received: Some(5),
        dropped: Some(3),
        limited: None,
        comment: None,
    }
    .write(&mut file);
    let named = |address: &str, name: &str| (address.parse().unwrap(), name.to_owned());
    let addresses = vec![named("10.0.0.1", "web.shop"), named("fd00::1", "checkout.shop.svc")];
    Names { addresses, comment: None }.write(&mut file);
    let comment = Some("podmirror: shop/db: OptedOut".to_owned());
    Names { addresses: Vec::new(), comment }.write(&mut file);
    note(&mut file, r#"{"message":"ready"}"#);
    assert!(file == GOLDEN, "{}", file.escape_ascii());
}
