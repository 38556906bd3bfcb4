//! Builds Ethernet frames that tests send, and describes a frame in one line.

use std::net::Ipv4Addr;

/// A MAC address.
pub type Mac = [u8; 6];

/// The bytes of a frame, which is built step by step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Destination, source and VLAN tags.
    head: Vec<u8>,
    ethertype: u16,
    payload: Vec<u8>,
}

impl Frame {
    /// The broadcast address.
    pub const BROADCAST: Mac = [0xff; 6];
    /// "Local experimental" (IEEE 802): the kernel has no protocol for this ethertype.
    pub const EXPERIMENTAL: u16 = 0x88b5;

    /// A frame of an experimental ethertype, without payload.
    pub fn new(to: Mac, from: Mac) -> Self {
        Self { head: [to, from].concat(), ethertype: Self::EXPERIMENTAL, payload: Vec::new() }
    }

    /// Adds an 802.1Q tag after the present tags.
    #[must_use]
    pub fn vlan(self, id: u16) -> Self {
        self.tag(0x8100, id)
    }

    /// Adds a tag with this ethertype after the present tags.
    #[must_use]
    pub fn tag(mut self, ethertype: u16, id: u16) -> Self {
        self.head.extend(ethertype.to_be_bytes());
        self.head.extend(id.to_be_bytes());
        self
    }

    /// Sets the payload so that the frame has `len` bytes. `seed` chooses the pattern of the payload.
    #[must_use]
    pub fn filled(mut self, len: usize, seed: usize) -> Self {
        let length = len.checked_sub(self.head.len() + 2).expect("a frame is not shorter than its header");
        self.payload = pattern(length, seed);
        self
    }

    /// Makes it an ARP request.
    #[must_use]
    pub fn arp_request(mut self, from: Ipv4Addr, to: Ipv4Addr) -> Self {
        self.ethertype = 0x0806;
        let sender = &self.head[6..12];
        self.payload = [&[0, 1, 8, 0, 6, 4, 0, 1], sender, &from.octets(), &[0; 6], &to.octets()].concat();
        self
    }

    /// Makes it an IPv4/UDP packet (without UDP checksum) around the payload.
    #[must_use]
    pub fn ipv4(mut self, from: Ipv4Addr, to: Ipv4Addr) -> Self {
        self.ethertype = 0x0800;
        let udp = u16::try_from(8 + self.payload.len()).expect("fits into a packet").to_be_bytes();
        let total = u16::try_from(28 + self.payload.len()).expect("fits into a packet").to_be_bytes();
        let mut ip =
            [&[0x45, 0], &total[..], &[0, 1, 0, 0, 64, 17, 0, 0], &from.octets(), &to.octets()].concat();
        let checksum = !ip.chunks(2).fold(0_u16, |sum, word| {
            let (sum, carry) = sum.overflowing_add(u16::from_be_bytes([word[0], word[1]]));
            sum + u16::from(carry)
        });
        ip[10..12].copy_from_slice(&checksum.to_be_bytes());
        self.payload = [&ip, &[0x30, 0x39, 0x30, 0x39][..], &udp, &[0, 0], &self.payload].concat();
        self
    }

    /// Sets only the ethertype.
    #[must_use]
    pub fn ethertype(mut self, ethertype: u16) -> Self {
        self.ethertype = ethertype;
        self
    }

    /// The bytes.
    pub fn bytes(&self) -> Vec<u8> {
        [&self.head[..], &self.ethertype.to_be_bytes(), &self.payload].concat()
    }

    /// Describes a frame in one line.
    pub fn describe(frame: &[u8]) -> String {
        let mac = |at: usize| frame.get(at..at + 6).map_or_else(String::new, |mac| format!("{mac:02x?}"));
        let ethertype = frame.get(12..14).unwrap_or_default();
        let beginning = frame.get(14..54.min(frame.len())).unwrap_or_default();
        format!("{} bytes, {} > {}, {ethertype:02x?}: {beginning:02x?}", frame.len(), mac(6), mac(0))
    }
}

/// `len` bytes that differ for each `seed`.
pub(crate) fn pattern(len: usize, seed: usize) -> Vec<u8> {
    let mut bytes = seed.to_be_bytes().to_vec();
    bytes.extend((8..len.max(8)).map(|index| (index.wrapping_mul(31) ^ seed.wrapping_mul(17)) as u8));
    bytes.truncate(len);
    bytes
}
