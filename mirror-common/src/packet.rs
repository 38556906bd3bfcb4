//! The beginning of a packet.

/// The length of a [`Header`]: a power of two, so that a mask can prove an offset to be in bounds.
pub const HEADER_BYTES: usize = 128;

/// Number of frame bytes in a [`Header`]: enough for two VLAN tags, the longest IPv4 header and a TCP header. After
/// them, the last four bytes contain the length of the frame in network byte order.
pub const LEN_OFFSET: usize = HEADER_BYTES - 4;

/// The largest snap length, in bytes: the longest that `bpf_skb_change_tail` cuts a packet to on every kernel.
///
/// The helper refuses more than `SKB_MAX_ALLOC` (net/core/filter.c, `BPF_SKB_MAX_LEN`): four pages minus the
/// `skb_shared_info` at their end (include/linux/skbuff.h). With pages of 4 KiB, and the maximum number of fragments
/// (`CONFIG_MAX_SKB_FRAGS=45`), that is 16384 - 768. (Linux 5.10 before 5.10.27 used the MTU of the mirror interface
/// for this bound; there each packet with a longer snap length is refused, as `uncut`.)
pub const MAX_SNAPLEN: u32 = 15_616;

/// The first [`LEN_OFFSET`] bytes of a frame as on the wire (with a VLAN tag in them, not in metadata), padded with
/// zeros, and the frame's length in bytes.
pub type Header = [u8; HEADER_BYTES];

/// Returns the header of a frame of `len` bytes that begins with `bytes`.
pub fn header(bytes: &[u8], len: u32) -> Header {
    let mut header = [0; HEADER_BYTES];
    let (start, end) = header.split_at_mut(LEN_OFFSET);
    for (place, byte) in start.iter_mut().zip(bytes) {
        *place = *byte;
    }
    end.copy_from_slice(&len.to_be_bytes());
    header
}

/// Ethertypes of VLAN tags.
const VLANS: [u16; 3] = [0x8100, 0x88a8, 0x9100];

/// Returns the ethertype after the VLAN tags, and the offset of the bytes after it.
#[inline(always)]
pub(crate) fn network(header: &Header) -> (u16, usize) {
    let mut at = 12;
    let mut ethertype = be16(header, at);
    // At most two tags, as in 802.1ad.
    if VLANS.contains(&ethertype) {
        at += 4;
        ethertype = be16(header, at);
        if VLANS.contains(&ethertype) {
            at += 4;
            ethertype = be16(header, at);
        }
    }
    (ethertype, at + 2)
}

/// The byte at an offset. No offset that is used is beyond the header; the mask proves it to the verifier.
#[inline(always)]
pub(crate) fn byte(header: &Header, at: usize) -> u8 {
    header[at & (HEADER_BYTES - 1)]
}

#[inline(always)]
pub(crate) fn be16(header: &Header, at: usize) -> u16 {
    u16::from(byte(header, at)) << 8 | u16::from(byte(header, at + 1))
}

#[inline(always)]
pub(crate) fn be32(header: &Header, at: usize) -> u32 {
    u32::from(be16(header, at)) << 16 | u32::from(be16(header, at + 2))
}

/// Returns the length in bytes of the header's frame.
#[inline(always)]
pub const fn len(header: &Header) -> u32 {
    let [.., a, b, c, d] = *header;
    u32::from_be_bytes([a, b, c, d])
}
