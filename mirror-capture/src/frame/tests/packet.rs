//! A builder of packets that shares no code with the code under test.

use proptest::{array::uniform16, collection::vec, prelude::*};

/// The parts of a packet.
#[derive(Debug, Clone)]
pub(super) struct Spec {
    /// VLAN tags, the outermost first.
    pub(super) tags: Vec<(u16, u16)>,
    pub(super) ip: Ip,
    pub(super) transport: Transport,
    pub(super) payload: Vec<u8>,
    /// The length field of IP is 0. `Jumbo` says whether an IPv6 packet has a jumbo option.
    pub(super) big: Option<Jumbo>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Jumbo {
    With,
    Without,
}

#[derive(Debug, Clone)]
pub(super) enum Ip {
    V4 { source: [u8; 4], destination: [u8; 4], id: u16, options: Vec<u8> },
    V6 { source: [u8; 16], destination: [u8; 16], extensions: Vec<Extension> },
}

/// An extension header: its number, its bytes after the first, and the final destination if it has one.
#[derive(Debug, Clone)]
pub(super) struct Extension {
    pub(super) number: u8,
    pub(super) bytes: Vec<u8>,
    pub(super) destination: Option<[u8; 16]>,
}

#[derive(Debug, Clone)]
pub(super) enum Transport {
    Tcp {
        sequence: u32,
        flags: u8,
        options: Vec<u8>,
    },
    Udp {
        port: u16,
    },
    /// Another protocol, without a header of its own.
    Other(u8),
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Check {
    Unfinished,
    Right,
    Value(u16),
}

/// A packet, with offsets into it.
#[derive(Debug, Clone)]
pub(super) struct Packet {
    pub(super) bytes: Vec<u8>,
    pub(super) transport: usize,
    pub(super) payload: usize,
    /// Offset of the transport checksum. 0: there is none.
    pub(super) field: usize,
    /// The checksum as Linux leaves it unfinished, and the correct one.
    pub(super) unfinished: u16,
    pub(super) checksum: u16,
}

/// The checksum of RFC 1071, one word at a time.
pub(super) fn naive_sum(bytes: &[u8]) -> u16 {
    let mut sum = 0_u32;
    for pair in bytes.chunks(2) {
        sum += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
        if sum > 0xffff {
            sum = sum - 0x1_0000 + 1;
        }
    }
    sum as u16
}

impl Spec {
    pub(super) fn build(&self, check: Check) -> Packet {
        let (protocol, transport_header) = self.transport_header();
        let body = [&transport_header[..], &self.payload].concat();
        let mut bytes = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        for (tpid, tci) in &self.tags {
            bytes.extend(tpid.to_be_bytes());
            bytes.extend(tci.to_be_bytes());
        }
        let addresses = self.add_ip(protocol, body.len(), &mut bytes);
        let transport = bytes.len();
        bytes.extend(&body);
        let mut packet = Packet {
            transport,
            payload: transport + transport_header.len(),
            field: 0,
            unfinished: 0,
            checksum: 0,
            bytes,
        };
        let place = match self.transport {
            Transport::Tcp { .. } => 16,
            Transport::Udp { .. } => 6,
            Transport::Other(_) => return packet,
        };
        let length = (body.len() as u32).to_be_bytes();
        let pseudo = [&addresses[..], &length, &[0, 0, 0, protocol]].concat();
        packet.field = transport + place;
        packet.unfinished = naive_sum(&pseudo);
        packet.checksum = match !naive_sum(&[pseudo, body].concat()) {
            0 if protocol == 17 => 0xffff,
            checksum => checksum,
        };
        let value = match check {
            Check::Unfinished => packet.unfinished,
            Check::Right => packet.checksum,
            Check::Value(value) => value,
        };
        packet.set(value);
        packet
    }

    /// The protocol, and the header with a checksum of 0.
    fn transport_header(&self) -> (u8, Vec<u8>) {
        match &self.transport {
            Transport::Tcp { sequence, flags, options } => {
                let words = (20 + options.len()) as u8 / 4;
                let mut header = vec![0x9c, 0x40, 0x01, 0xbb];
                header.extend(sequence.to_be_bytes());
                header.extend([1, 2, 3, 4, words << 4 | 1, *flags, 0x20, 0, 0, 0, 0, 7]);
                header.extend(options);
                (6, header)
            }
            Transport::Udp { port } => {
                let mut header = vec![0x9c, 0x40];
                header.extend(port.to_be_bytes());
                header.extend((8 + self.payload.len() as u16).to_be_bytes());
                header.extend([0, 0]);
                (17, header)
            }
            Transport::Other(protocol) => (*protocol, Vec::new()),
        }
    }

    /// Appends the EtherType and the headers of IP. Returns the addresses of the pseudo header.
    fn add_ip(&self, protocol: u8, body: usize, bytes: &mut Vec<u8>) -> Vec<u8> {
        match &self.ip {
            Ip::V4 { source, destination, id, options } => {
                let header_len = 20 + options.len();
                let length = if self.big.is_some() { 0 } else { (header_len + body) as u16 };
                let mut header = vec![0x40 | (header_len / 4) as u8, 0x12];
                header.extend(length.to_be_bytes());
                header.extend(id.to_be_bytes());
                header.extend([0x40, 0, 63, protocol, 0, 0]);
                header.extend(source);
                header.extend(destination);
                header.extend(options);
                let checksum = !naive_sum(&header);
                header[10..12].copy_from_slice(&checksum.to_be_bytes());
                bytes.extend([0x08, 0x00]);
                bytes.extend(header);
                [*source, *destination].concat()
            }
            Ip::V6 { source, destination, extensions } => {
                let jumbo = Extension { number: 0, bytes: vec![0, 0xc2, 4, 0, 1, 0, 0], destination: None };
                let mut all = extensions.clone();
                if self.big == Some(Jumbo::With) {
                    all.insert(0, jumbo);
                }
                let length: usize = all.iter().map(|extension| extension.bytes.len() + 1).sum();
                let length = if self.big.is_some() { 0 } else { (length + body) as u16 };
                let numbers: Vec<u8> =
                    all.iter().map(|extension| extension.number).chain([protocol]).collect();
                bytes.extend([0x86, 0xdd, 0x61, 0x23, 0x45, 0x67]);
                bytes.extend(length.to_be_bytes());
                bytes.extend([numbers[0], 63]);
                bytes.extend(source);
                bytes.extend(destination);
                for (extension, next) in all.iter().zip(&numbers[1..]) {
                    bytes.push(*next);
                    bytes.extend(&extension.bytes);
                }
                let last =
                    all.iter().rev().find_map(|extension| extension.destination).unwrap_or(*destination);
                [*source, last].concat()
            }
        }
    }
}

impl Packet {
    /// Overwrites the transport checksum.
    pub(super) fn set(&mut self, value: u16) {
        self.bytes[self.field..self.field + 2].copy_from_slice(&value.to_be_bytes());
    }
}

/// An extension header with arbitrary option bytes (PadN is not parsed).
fn extension() -> impl Strategy<Value = Extension> {
    let options =
        (prop_oneof![Just(0), Just(60)], 0..3_u8, any::<u8>()).prop_map(|(number, length, fill)| {
            // A jumbo option would have another meaning.
            let fill = if fill == 0xc2 { 0 } else { fill };
            let bytes = [&[length][..], &vec![fill; 6 + usize::from(length) * 8]].concat();
            Extension { number, bytes, destination: None }
        });
    let whole = any::<u32>().prop_map(|id| {
        let bytes = [&[0, 0, 0][..], &id.to_be_bytes()].concat();
        Extension { number: 44, bytes, destination: None }
    });
    prop_oneof![4 => options, 2 => routing(), 1 => whole]
}

/// A routing header: type 2 has one address, the others have two here.
fn routing() -> impl Strategy<Value = Extension> {
    let kind = prop_oneof![Just(0_u8), Just(2), Just(4)];
    (kind, 0..2_u8, uniform16(any::<u8>()), uniform16(any::<u8>())).prop_map(|(kind, left, first, second)| {
        let (last, addresses) = match kind {
            0 => (second, [first, second].concat()),
            2 => (first, first.to_vec()),
            _ => (first, [first, second].concat()),
        };
        let words = addresses.len() as u8 / 8;
        // Type 4 has the index of its last segment here.
        let bytes = [&[words, kind, left, u8::from(kind == 4), 0, 0, 0][..], &addresses].concat();
        Extension { number: 43, bytes, destination: (left > 0).then_some(last) }
    })
}

pub(super) fn ip() -> impl Strategy<Value = Ip> {
    let v4 = (any::<[u8; 4]>(), any::<[u8; 4]>(), any::<u16>(), 0..=10_usize).prop_map(
        |(source, destination, id, words)| Ip::V4 { source, destination, id, options: vec![1; words * 4] },
    );
    let v6 = (uniform16(any::<u8>()), uniform16(any::<u8>()), vec(extension(), 0..4))
        .prop_map(|(source, destination, extensions)| Ip::V6 { source, destination, extensions });
    prop_oneof![v4, v6]
}

/// Any TCP or UDP packet with up to this many bytes of payload.
pub(super) fn spec(payload: usize) -> impl Strategy<Value = Spec> {
    let tcp = (any::<u32>(), any::<u8>(), 0..=10_usize).prop_map(|(sequence, flags, words)| Transport::Tcp {
        sequence,
        flags,
        options: vec![1; words * 4],
    });
    let transport = prop_oneof![tcp, Just(Transport::Udp { port: 443 })];
    let tag = (prop_oneof![Just(0x8100), Just(0x88a8)], any::<u16>());
    (vec(tag, 0..3), ip(), transport, vec(any::<u8>(), 0..=payload))
        .prop_map(|(tags, ip, transport, payload)| Spec { tags, ip, transport, payload, big: None })
}
