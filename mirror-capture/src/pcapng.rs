//! Blocks of a pcapng file, as bytes.
//!
//! Source: draft-ietf-opsawg-pcapng, as Wireshark reads it. A file is one section: [`Writer::begin`] writes its header.
//! Interfaces can be added at any time, and packets refer to an interface that was added before them. All numbers are
//! little endian, and all times are in nanoseconds since the epoch.
//!
//! The writers of capture files call this module, with the frames of [`frame`](crate::frame). It appends to a `Vec` and
//! does no I/O, so it cannot fail. Reading, compression and other kinds of blocks (secrets, process information) are
//! not supported.
//!
//! Values that are too long for their field are cut: texts at [`MAX_TEXT`], names at [`MAX_NAME`], packets at
//! [`MAX_CAPTURED`].

use core::net::IpAddr;

/// Maximum length of an option's text in bytes: the length of an option has 16 bits, and a filter has one byte before
/// its text. A longer text is cut at a character boundary.
pub const MAX_TEXT: usize = 65_535 - 1;
/// Maximum number of bytes of a packet in a file: `WTAP_MAX_PACKET_SIZE_STANDARD` of Wireshark, which rejects a file
/// with more.
pub const MAX_CAPTURED: usize = 262_144;
/// Maximum length of a name in bytes: that of a DNS name. A longer name is cut at a character boundary.
pub const MAX_NAME: usize = 253;
/// Maximum number of names in a block. With the longest names and the longest comment it has less than 256 KiB: dumpcap
/// 4.0 ends a capture at a longer block of any kind.
pub const MAX_NAMES: usize = 512;
/// The type of the block of a [`note`]. Types with the highest bit are for local use.
pub const NOTE: u32 = 0x8050_4d01;

/// The beginning of the comment of a section that should begin with the packets of the past and does not; the reason
/// follows.
pub const NO_PAST: &str = "no past: ";

/// `LINKTYPE_ETHERNET`.
const ETHERNET: u16 = 1;
/// The resolution of times (`if_tsresol`): 10^-9 s.
const NANOSECONDS: u8 = 9;
/// The code of a comment, in every block.
const COMMENT: u16 = 1;

/// The origin of a file. An absent field is not written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Section<'a> {
    /// The program that writes the file (`shb_userappl`).
    pub application: Option<&'a str>,
    /// Free text.
    pub comment: Option<&'a str>,
}

/// An Ethernet interface where packets were captured. An absent text is not written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Interface {
    /// Its name (`if_name`), such as `shop/web eth0`.
    pub name: String,
    /// Its description (`if_description`).
    pub description: Option<String>,
    /// The filter, in the language of tcpdump (`if_filter`).
    pub filter: Option<String>,
    /// The device (`if_hardware`). In the stream of a server, it is the node.
    pub hardware: Option<String>,
    /// Free text.
    pub comment: Option<String>,
}

/// An interface of the file: the index of its description block.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InterfaceId(u32);

impl InterfaceId {
    /// The interface with this index.
    pub const fn at(place: u32) -> Self {
        Self(place)
    }

    /// The number of the interface in the blocks of the file.
    pub const fn number(self) -> u32 {
        self.0
    }
}

/// The direction of a packet, seen from its interface (bits 0 and 1 of `epb_flags`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// The interface received it.
    Inbound,
    /// The interface sent it.
    Outbound,
}

/// A packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet<'a> {
    /// The interface that captured it.
    pub interface: InterfaceId,
    /// Time of the capture.
    pub time_ns: u64,
    /// Its captured bytes.
    pub bytes: &'a [u8],
    /// Its length in bytes. A value below the number of `bytes` counts as that number.
    pub len: u32,
    /// Its direction, if known.
    pub direction: Option<Direction>,
    /// Free text.
    pub comment: Option<&'a str>,
}

/// The counters of an interface since its capture began. An absent field is unknown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Statistics {
    /// The interface.
    pub interface: InterfaceId,
    /// Time at which the counters were read.
    pub time_ns: u64,
    /// Time at which the capture began (`isb_starttime`).
    pub start_ns: Option<u64>,
    /// Time at which the capture ended (`isb_endtime`).
    pub end_ns: Option<u64>,
    /// Packets that the capture matched, including those of the next two counters (`isb_ifrecv`).
    pub received: Option<u64>,
    /// Packets that were lost because there was no room (`isb_ifdrop`).
    pub dropped: Option<u64>,
    /// Packets that the kernel left out because of a rate or a budget (`isb_osdrop`).
    pub limited: Option<u64>,
    /// A text about what the packets lack.
    pub comment: Option<String>,
}

/// Names of addresses. Each address should have one name in a block: of two, versions of Wireshark show different ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Names {
    /// The addresses with their names, which are not empty and have no zero byte.
    pub addresses: Vec<(IpAddr, String)>,
    /// Free text.
    pub comment: Option<String>,
}

/// Writes the blocks of a file, and counts its interfaces.
#[derive(Debug)]
pub struct Writer {
    interfaces: u32,
}

impl Writer {
    /// Begins a file: appends the section header block.
    pub fn begin(out: &mut Vec<u8>, section: &Section<'_>) -> Self {
        block(out, 0x0a0d_0d0a, |out| {
            number(out, 0x1a2b_3c4d_u32.to_le_bytes());
            // Version 1.0, and a section of unknown length.
            number(out, [1, 0, 0, 0]);
            number(out, [0xff; 8]);
            options(out, |out| {
                text(out, COMMENT, section.comment);
                text(out, 4, section.application);
            });
        });
        Self { interfaces: 0 }
    }

    /// Adds an interface: appends its interface description block.
    pub fn interface(&mut self, out: &mut Vec<u8>, interface: &Interface) -> InterfaceId {
        block(out, 1, |out| {
            number(out, ETHERNET.to_le_bytes());
            number(out, [0, 0]);
            // No snap length, even of a session that has one: libpcap, and with it tcpdump and Suricata, refuses a file
            // whose interfaces have different ones.
            number(out, [0; 4]);
            options(out, |out| {
                text(out, COMMENT, interface.comment.as_deref());
                text(out, 2, Some(&interface.name));
                text(out, 3, interface.description.as_deref());
                option(out, 9, &[&[NANOSECONDS]]);
                if let Some(filter) = &interface.filter {
                    // 0: a filter in the language of libpcap.
                    option(out, 11, &[&[0], cut(filter, MAX_TEXT)]);
                }
                text(out, 15, interface.hardware.as_deref());
            });
        });
        self.count()
    }

    /// Counts an interface whose description another writer has made.
    pub fn count(&mut self) -> InterfaceId {
        let id = InterfaceId(self.interfaces);
        self.interfaces = self.interfaces.wrapping_add(1);
        id
    }
}

impl Packet<'_> {
    /// Appends the packet: an enhanced packet block.
    pub fn write(&self, out: &mut Vec<u8>) {
        let bytes = self.bytes.get(..MAX_CAPTURED).unwrap_or(self.bytes);
        let whole = u32::try_from(self.bytes.len()).unwrap_or(u32::MAX).max(self.len);
        block(out, 6, |out| {
            number(out, self.interface.0.to_le_bytes());
            number(out, time(self.time_ns));
            number(out, (bytes.len() as u32).to_le_bytes());
            number(out, whole.to_le_bytes());
            out.extend_from_slice(bytes);
            pad(out, bytes.len());
            options(out, |out| {
                text(out, COMMENT, self.comment);
                if let Some(direction) = self.direction {
                    let flags: u32 = match direction {
                        Direction::Inbound => 1,
                        Direction::Outbound => 2,
                    };
                    option(out, 2, &[&flags.to_le_bytes()]);
                }
            });
        });
    }
}

impl Statistics {
    /// Appends the counters: an interface statistics block.
    pub fn write(&self, out: &mut Vec<u8>) {
        block(out, 5, |out| {
            number(out, self.interface.0.to_le_bytes());
            number(out, time(self.time_ns));
            options(out, |out| {
                text(out, COMMENT, self.comment.as_deref());
                for (code, time_ns) in [(2, self.start_ns), (3, self.end_ns)] {
                    if let Some(time_ns) = time_ns {
                        option(out, code, &[&time(time_ns)]);
                    }
                }
                counter(out, 4, self.received);
                counter(out, 5, self.dropped);
                counter(out, 7, self.limited);
            });
        });
    }
}

impl Names {
    /// Appends the names: a name resolution block with the comment, even without names, and blocks for the names beyond
    /// [`MAX_NAMES`].
    pub fn write(&self, out: &mut Vec<u8>) {
        let all = self.addresses.as_slice();
        let (first, rest) = all.split_at_checked(MAX_NAMES).unwrap_or((all, &[]));
        names(out, first, self.comment.as_deref());
        rest.chunks(MAX_NAMES).for_each(|addresses| names(out, addresses, None));
    }
}

fn names(out: &mut Vec<u8>, addresses: &[(IpAddr, String)], comment: Option<&str>) {
    block(out, 4, |out| {
        for (address, name) in addresses {
            let name = cut(name, MAX_NAME);
            // A record is encoded as an option is.
            match address {
                IpAddr::V4(address) => option(out, 1, &[&address.octets(), name, &[0]]),
                IpAddr::V6(address) => option(out, 2, &[&address.octets(), name, &[0]]),
            }
        }
        // The end of records. Without it Wireshark takes options for records.
        number(out, [0; 4]);
        options(out, |out| text(out, COMMENT, comment));
    });
}

/// Appends a message of an agent for the program that merges the streams: a block for local use, with the JSON as its
/// comment. Wireshark skips the block. A text beyond [`MAX_TEXT`] is cut, so it is no JSON any more.
pub fn note(out: &mut Vec<u8>, json: &str) {
    block(out, NOTE, |out| options(out, |out| text(out, COMMENT, Some(json))));
}

/// Appends a block: its type, its length, the output of `body`, and its length again.
fn block(out: &mut Vec<u8>, kind: u32, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    number(out, kind.to_le_bytes());
    number(out, [0; 4]);
    body(out);
    let length = ((out.len() - start + 4) as u32).to_le_bytes();
    if let Some(place) = out.get_mut(start + 4..start + 8) {
        place.copy_from_slice(&length);
    }
    number(out, length);
}

/// Appends options, followed by the end of options if there are any.
fn options(out: &mut Vec<u8>, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    body(out);
    if out.len() > start {
        number(out, [0; 4]);
    }
}

/// Appends an option: its code, its length, and its value in parts with at most 65535 bytes together.
fn option(out: &mut Vec<u8>, code: u16, parts: &[&[u8]]) {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    number(out, code.to_le_bytes());
    number(out, (length as u16).to_le_bytes());
    parts.iter().for_each(|part| out.extend_from_slice(part));
    pad(out, length);
}

fn text(out: &mut Vec<u8>, code: u16, text: Option<&str>) {
    if let Some(text) = text {
        option(out, code, &[cut(text, MAX_TEXT)]);
    }
}

fn counter(out: &mut Vec<u8>, code: u16, counter: Option<u64>) {
    if let Some(counter) = counter {
        option(out, code, &[&counter.to_le_bytes()]);
    }
}

/// Cuts a text so that it has at most this number of bytes.
fn cut(text: &str, most: usize) -> &[u8] {
    text.get(..text.floor_char_boundary(most)).unwrap_or_default().as_bytes()
}

/// The upper 32 bits of a time come first.
fn time(time_ns: u64) -> [u8; 8] {
    time_ns.rotate_left(32).to_le_bytes()
}

fn number<const N: usize>(out: &mut Vec<u8>, bytes: [u8; N]) {
    out.extend_from_slice(&bytes);
}

/// Appends zeros up to a multiple of 4 bytes.
fn pad(out: &mut Vec<u8>, length: usize) {
    out.resize(out.len() + length.next_multiple_of(4) - length, 0);
}

#[cfg(test)]
mod tests;
