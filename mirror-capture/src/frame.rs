//! Converts frames as Linux's tc sees them to frames as a receiver on the wire would see them.
//!
//! A sender's kernel leaves work to the network card. A frame at a tc hook can have an unfinished checksum, a VLAN tag
//! that is not in its bytes, and it can be a super-frame that the card would cut into segments. [`Wire`] does this work
//! on a copy of the bytes:
//!
//! * It inserts the VLAN tag after the MAC addresses.
//! * It finishes the TCP or UDP checksum that Linux left unfinished.
//! * It cuts TCP and UDP super-frames into segments.
//!
//! A frame that needs none of this is returned unchanged. For readers that want frames as the kernel has them,
//! [`Wire::tagged`] only inserts the tag. The readers of the kernel's ring buffer call this module before they write
//! frames into a file. It does not read packets, write files ([`pcapng`](crate::pcapng) does), filter or count. It
//! never panics, whatever the bytes are, and the number of steps per frame is bounded.
//!
//! # Checksums
//!
//! Linux marks an unfinished checksum in the skb (`CHECKSUM_PARTIAL`,
//! `Documentation/networking/checksum-offloads.rst`), but not in the bytes. The field then contains the folded sum of
//! the pseudo header (RFC 9293 3.1, RFC 768, RFC 8200 8.1). So exactly this value counts as unfinished, and every other
//! value is kept: a wrong checksum stays wrong. By chance, 1 of 65536 finished checksums has this value too. If it is
//! correct, it is computed again, with the same result. If it is wrong, it becomes correct.
//!
//! * At most one checksum of a frame is unfinished. The search begins at the outermost transport header, and continues
//!   inside IPIP, IP6IP6, SIT, GRE (without a checksum), VXLAN (UDP ports 4789 and 8472) and GENEVE (UDP port 6081), up
//!   to 4 tunnels deep. If an outer UDP checksum is correct, it covers the inner bytes as they are, and they are kept.
//! * The checksum is finished only if all bytes that it covers were captured.
//! * Fragments are not changed. A datagram in a single IPv6 fragment (offset 0, no more fragments) is not treated as a
//!   fragment.
//! * The final destination of a routing header is used (types 0, 2 and 4).
//!
//! # Segments
//!
//! The segments are the same as from the kernel's `tcp_gso_segment`, `__udp_gso_segment` (for `SKB_GSO_UDP_L4`),
//! `inet_gso_segment` and `ipv6_gso_segment`: FIN and PSH on the last one only, CWR on the first one only,
//! increasing IPv4 identifications, correct lengths and checksums. The hop-by-hop header with a jumbo option, which
//! BIG TCP adds, is removed. The checksums of segments are always computed, because a super-frame's own is
//! unfinished. So a wrong checksum of a super-frame becomes correct. Only a UDP checksum of 0 is kept, because it
//! means that there is no checksum.
//!
//! A capture length can cut a super-frame. All its segments are returned nevertheless, so that a reader sees no gap in
//! the sequence numbers. A segment that was partly captured contains the captured part, and one that was not captured
//! contains only its headers. Their lengths and IPv4 header checksums are correct. Their TCP or UDP checksum cannot be
//! computed: the field contains the unfinished checksum of this segment.
//!
//! A super-frame is returned as one frame, with its bytes unchanged except for the VLAN tag, if
//!
//! * it is neither TCP nor UDP directly after the IP header and its extension headers: SCTP, ESP, tunnels (also VXLAN
//!   and GENEVE, which are UDP);
//! * its segments would be longer than IP allows;
//! * its segments would have too many headers. The sender of a super-frame chooses the length of the segments, and each
//!   repeats the headers. The limit for headers, including the blocks of a file, is 4 times the captured bytes plus 8
//!   KiB ([`Frames::too_many`]);
//! * its headers were not completely captured, it has a fragment header, or its lengths contradict each other.
//!
//! # Limitations
//!
//! * The type of the super-frame (`gso_type`) is unknown. UDP is treated as `SKB_GSO_UDP_L4`; the older UFO
//!   (`SKB_GSO_UDP`) makes fragments of one datagram instead. A fixed IPv4 identification (`SKB_GSO_TCP_FIXEDID`) is
//!   increased nevertheless. With AccECN (`SKB_GSO_TCP_ACCECN`) CWR is on every segment, here only on the first. A
//!   merged frame that keeps the headers of its segments elsewhere (`SKB_GSO_FRAGLIST`) is cut like any other.
//! * Other tunnels are not supported: other ports, GRE with a checksum, GUE, PPPoE, MPLS. A UDP tunnel on another port
//!   is cut like UDP, unless it has the form of VXLAN or GENEVE.
//! * Not finished are the CRC of SCTP, which Linux also leaves unfinished, and checksums of IPv4 packets with a source
//!   route. The Home Address option of Mobile IPv6 is ignored.
//! * Ethernet padding to 60 bytes is neither added nor removed, and there is no FCS.

use checksum::unfinished;
use cut::{Cut, Super};

mod bytes;
mod checksum;
mod cut;
mod headers;
mod tunnel;

/// A frame as tc sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The captured bytes, from the destination MAC address on.
    pub bytes: &'a [u8],
    /// Length in bytes before the capture length cut the frame, without [`vlan`](Self::vlan). A value below the number
    /// of captured bytes counts as that number.
    pub len: u32,
    /// `skb->gso_size`: payload bytes of each segment of a super-frame. 0: the frame is not a super-frame.
    pub gso_size: u16,
    /// The VLAN tag in the metadata of the packet. It is outside all tags in the bytes.
    pub vlan: Option<VlanTag>,
}

/// A VLAN tag (IEEE 802.1Q).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VlanTag {
    /// The type of the tag, such as 0x8100 or 0x88a8: `skb->vlan_proto` in host byte order.
    pub tpid: u16,
    /// Priority, drop eligibility and VLAN ID: `skb->vlan_tci`.
    pub tci: u16,
}

/// A frame as a receiver on the wire would see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WireFrame<'a> {
    /// The captured bytes, from the destination MAC address on.
    pub bytes: &'a [u8],
    /// Length in bytes on the wire, without FCS. Never below the number of `bytes`.
    pub len: u32,
}

/// Converts frames to wire frames. It reuses one buffer, so a single `Wire` for many frames allocates only for the
/// longest.
#[derive(Debug, Clone, Default)]
pub struct Wire {
    buffer: Vec<u8>,
}

impl Wire {
    /// Returns the wire frames of `frame` in order: one, or one for each segment of a super-frame.
    pub fn frames<'a>(&'a mut self, frame: &Frame<'a>) -> Frames<'a> {
        let len = whole(frame);
        let (step, too_many) = first_step(&Frame { len, ..*frame }, &mut self.buffer);
        Frames { bytes: frame.bytes, buffer: &mut self.buffer, step, too_many }
    }

    /// Returns the frame as the kernel has it, always as one frame, with the VLAN tag of its metadata in its bytes. A
    /// super-frame stays whole, and an unfinished checksum stays unfinished.
    pub fn tagged<'a>(&'a mut self, frame: &Frame<'a>) -> Frames<'a> {
        let len = whole(frame);
        let step = tag_and_finish(&Frame { len, ..*frame }, None, &mut self.buffer);
        Frames { bytes: frame.bytes, buffer: &mut self.buffer, step, too_many: None }
    }
}

/// The wire frames of one frame. They share one buffer, so this is not an [`Iterator`].
#[derive(Debug)]
pub struct Frames<'a> {
    bytes: &'a [u8],
    buffer: &'a mut Vec<u8>,
    step: Step,
    too_many: Option<usize>,
}

#[derive(Debug)]
enum Step {
    /// Returns the input bytes.
    Unchanged {
        len: u32,
    },
    /// Returns the frame in the buffer.
    Changed {
        len: u32,
    },
    /// Returns the segment with this index next. The buffer contains the headers that all segments share.
    Segment(Cut, usize),
    End,
}

impl Frames<'_> {
    /// The number of segments of a super-frame that is returned whole because they would be too many.
    pub fn too_many(&self) -> Option<usize> {
        self.too_many
    }

    /// Returns the next wire frame. `None`: there are no more.
    pub fn next_frame(&mut self) -> Option<WireFrame<'_>> {
        match std::mem::replace(&mut self.step, Step::End) {
            Step::Unchanged { len } => Some(WireFrame { bytes: self.bytes, len }),
            Step::Changed { len } => Some(WireFrame { bytes: self.buffer, len }),
            Step::Segment(cut, index) => {
                let len = cut.write(index, self.bytes, self.buffer);
                if index + 1 < cut.segments() {
                    self.step = Step::Segment(cut, index + 1);
                }
                Some(WireFrame { bytes: self.buffer, len })
            }
            Step::End => None,
        }
    }
}

/// Length of a frame before the capture length cut it.
fn whole(frame: &Frame<'_>) -> u32 {
    frame.len.max(u32::try_from(frame.bytes.len()).unwrap_or(u32::MAX))
}

/// Decides how to convert a frame, and prepares the first step.
fn first_step(frame: &Frame<'_>, buffer: &mut Vec<u8>) -> (Step, Option<usize>) {
    let (bytes, len) = (frame.bytes, frame.len as usize);
    let (may_finish, too_many) = match frame.gso_size {
        0 => (true, None),
        gso_size => match cut::plan(bytes, len, gso_size) {
            Some(Super::Cut(headers)) => return (Step::Segment(headers.begin(frame, buffer), 0), None),
            Some(Super::OneSegment) => (true, None),
            Some(Super::TooMany(segments)) => (false, Some(segments)),
            None => (false, None),
        },
    };
    let finished = if may_finish { unfinished(bytes, len, frame.gso_size > 0) } else { None };
    (tag_and_finish(frame, finished, buffer), too_many)
}

/// Writes the frame as one, with its tag and its finished checksum, given as the offset of the field in the bytes and
/// the value.
fn tag_and_finish(frame: &Frame<'_>, finished: Option<(usize, u16)>, buffer: &mut Vec<u8>) -> Step {
    if frame.vlan.is_none() && finished.is_none() {
        return Step::Unchanged { len: frame.len };
    }
    let shift = begin_with_tag(frame, frame.bytes.len(), buffer);
    if let Some((field, value)) = finished {
        bytes::put(buffer, field + shift, &value.to_be_bytes());
    }
    let tag = if frame.vlan.is_some() { 4 } else { 0 };
    Step::Changed { len: frame.len.saturating_add(tag) }
}

/// Replaces the buffer with the first `end` bytes of the frame, with the tag after the MAC addresses. Returns by how
/// many bytes the tag shifts the rest. If the capture ends inside the MAC addresses, no tag is inserted.
fn begin_with_tag(frame: &Frame<'_>, end: usize, buffer: &mut Vec<u8>) -> usize {
    let bytes = frame.bytes.get(..end).unwrap_or(frame.bytes);
    buffer.clear();
    let Some((tag, (addresses, rest))) = frame.vlan.zip(bytes.split_at_checked(headers::MAC_ADDRESSES))
    else {
        buffer.extend_from_slice(bytes);
        return 0;
    };
    buffer.extend_from_slice(addresses);
    buffer.extend_from_slice(&tag.tpid.to_be_bytes());
    buffer.extend_from_slice(&tag.tci.to_be_bytes());
    buffer.extend_from_slice(rest);
    4
}

#[cfg(test)]
mod tests;
