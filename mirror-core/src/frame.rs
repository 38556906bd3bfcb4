//! Frames as a receiver on the wire would see them, made of frames as Linux's tc sees them.
//!
//! A sender's kernel leaves work to the network card. A frame at a tc hook can have a checksum that is unfinished, a
//! VLAN tag that is not in its bytes, and it can be a super-frame that the card is to cut into segments. [`Wire`] does
//! this work on a copy of the bytes:
//!
//! * It puts the VLAN tag behind the MAC addresses.
//! * It finishes the TCP or UDP checksum that Linux left unfinished.
//! * It cuts TCP and UDP super-frames into segments.
//!
//! A frame that needs none of this comes out unchanged. For readers that want frames as the kernel has them,
//! [`Wire::tagged`] does the first of these and nothing else. What reads the kernel's ring buffer calls it, before the
//! frames go into a file. It does not read packets, write files ([`pcapng`](crate::pcapng) does), filter or count. It
//! never panics, whatever the bytes are, and each frame ends after a bounded number of steps.
//!
//! # Checksums
//!
//! Linux marks an unfinished checksum in the skb (`CHECKSUM_PARTIAL`,
//! `Documentation/networking/checksum-offloads.rst`), and the bytes do not have this mark. The field then has the
//! folded sum of the pseudo header (RFC 9293 3.1, RFC 768, RFC 8200 8.1). So exactly this value counts as unfinished,
//! and every other value stays: a wrong checksum stays wrong. By chance, 1 of 65536 finished checksums has this value
//! too. A right one is computed again, to the same value. A wrong one becomes right.
//!
//! * At most one checksum of a frame is unfinished. The search begins at the outermost transport header, and goes on
//!   inside IPIP, IP6IP6, SIT, GRE (without a checksum), VXLAN (UDP ports 4789 and 8472) and GENEVE (UDP port 6081), up
//!   to 4 tunnels deep. An outer UDP checksum that is right as it stands covers the bytes inside as they are; then they
//!   stay.
//! * The checksum is finished only if all bytes that it covers were captured.
//! * Fragments stay as they are. A datagram in one IPv6 fragment (offset 0, no more fragments) is no fragment.
//! * The final destination of a routing header counts (types 0, 2 and 4).
//!
//! # Segments
//!
//! The segments are those of the kernel's `tcp_gso_segment`, `__udp_gso_segment` (for `SKB_GSO_UDP_L4`),
//! `inet_gso_segment` and `ipv6_gso_segment`: FIN and PSH on the last one only, CWR on the first one only, IPv4
//! identifications that count up, right lengths and checksums. The hop-by-hop header with a jumbo option, which BIG TCP
//! adds, is taken out. The checksums of segments are always computed, because a super-frame's own is unfinished. So a
//! wrong one does not stay wrong here. Only a UDP checksum of 0 stays: it means none.
//!
//! A capture length can cut a super-frame. All its segments come out all the same, so that a reader sees no hole in the
//! sequence numbers. A segment that is only in part in the capture has the captured part, and one beyond the capture
//! has its headers alone. Their lengths and IPv4 header checksums are right. Their TCP or UDP checksum cannot be
//! computed: it is the unfinished one of this segment.
//!
//! A super-frame comes out as one frame, with its bytes unchanged but for the VLAN tag, if
//!
//! * it is neither TCP nor UDP right behind the IP header and its extension headers: SCTP, ESP, tunnels (also VXLAN and
//!   GENEVE, which are UDP);
//! * its segments would be longer than IP allows;
//! * its segments would have too many headers. The sender of a super-frame chooses how long the segments are, and each
//!   repeats the headers. These, with the blocks of a file, are at most 4 times what was captured, and 8 KiB more
//!   ([`Frames::too_many`]);
//! * its headers are not all in the capture, it has a fragment header, or its lengths contradict each other.
//!
//! # What is not handled
//!
//! * The kind of the super-frame (`gso_type`) is not known. UDP is taken for `SKB_GSO_UDP_L4`; the older UFO
//!   (`SKB_GSO_UDP`) makes fragments of one datagram instead. A fixed IPv4 identification (`SKB_GSO_TCP_FIXEDID`)
//!   counts up all the same. With AccECN (`SKB_GSO_TCP_ACCECN`) CWR is on every segment, here on the first only. A
//!   merged frame that has the headers of its segments elsewhere (`SKB_GSO_FRAGLIST`) is cut like any other.
//! * Other tunnels: other ports, GRE with a checksum, GUE, PPPoE, MPLS. A UDP tunnel on another port is cut like UDP,
//!   unless it has the form of VXLAN or GENEVE.
//! * The CRC of SCTP, which Linux also leaves unfinished, and checksums of IPv4 packets with a source route. The Home
//!   Address option of Mobile IPv6 is not looked at.
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
    /// The bytes from the destination MAC address on, as far as they were captured.
    pub bytes: &'a [u8],
    /// How many bytes it had before the capture length cut it, without [`vlan`](Self::vlan). A value below the number
    /// of captured bytes counts as that number.
    pub len: u32,
    /// `skb->gso_size`: how many bytes of payload each segment of a super-frame gets. 0: it is no super-frame.
    pub gso_size: u16,
    /// The VLAN tag in the metadata of the packet, which is outside all tags in the bytes.
    pub vlan: Option<VlanTag>,
}

/// A VLAN tag (IEEE 802.1Q).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VlanTag {
    /// The type of the tag, such as 0x8100 or 0x88a8: `skb->vlan_proto` in host byte order.
    pub tpid: u16,
    /// Priority, drop eligibility and VLAN id: `skb->vlan_tci`.
    pub tci: u16,
}

/// A frame as a receiver on the wire would see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WireFrame<'a> {
    /// The bytes from the destination MAC address on, as far as they were captured.
    pub bytes: &'a [u8],
    /// How many bytes it has on the wire, without FCS. Never below the number of `bytes`.
    pub len: u32,
}

/// Makes wire frames. It keeps the memory for one of them, so one `Wire` for many frames allocates only for the
/// longest.
#[derive(Debug, Clone, Default)]
pub struct Wire {
    buffer: Vec<u8>,
}

impl Wire {
    /// The wire frames of `frame`, in their order: one, or one for each segment of a super-frame.
    pub fn frames<'a>(&'a mut self, frame: &Frame<'a>) -> Frames<'a> {
        let len = whole(frame);
        let (step, too_many) = first_step(&Frame { len, ..*frame }, &mut self.buffer);
        Frames { bytes: frame.bytes, buffer: &mut self.buffer, step, too_many }
    }

    /// The frame as the kernel has it, with the VLAN tag of its metadata in its bytes: always one. A super-frame stays
    /// whole, and an unfinished checksum stays unfinished.
    pub fn tagged<'a>(&'a mut self, frame: &Frame<'a>) -> Frames<'a> {
        let len = whole(frame);
        let step = tag_and_finish(&Frame { len, ..*frame }, None, &mut self.buffer);
        Frames { bytes: frame.bytes, buffer: &mut self.buffer, step, too_many: None }
    }
}

/// The wire frames of one frame. The frames share one buffer, so this is no [`Iterator`].
#[derive(Debug)]
pub struct Frames<'a> {
    bytes: &'a [u8],
    buffer: &'a mut Vec<u8>,
    step: Step,
    too_many: Option<usize>,
}

#[derive(Debug)]
enum Step {
    /// The bytes come out as they came in.
    Unchanged {
        len: u32,
    },
    /// The frame is in the buffer.
    Changed {
        len: u32,
    },
    /// The headers of all segments are in the buffer, and the segment with this index is next.
    Segment(Cut, usize),
    End,
}

impl Frames<'_> {
    /// The segments of a super-frame that comes out whole because there would be too many of them.
    pub fn too_many(&self) -> Option<usize> {
        self.too_many
    }

    /// The next wire frame. `None`: there is no further one.
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

/// The length of a frame before the capture length cut it.
fn whole(frame: &Frame<'_>) -> u32 {
    frame.len.max(u32::try_from(frame.bytes.len()).unwrap_or(u32::MAX))
}

/// Decides what becomes of a frame, and begins with it.
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

/// The frame as one, with its tag and with its finished checksum: the offset of the field in the bytes, and the value.
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

/// Replaces the buffer by the first `end` bytes of the frame, with the tag behind the MAC addresses. Returns how far
/// the tag moves what is behind it, in bytes. A capture that ends inside the MAC addresses has no place for a tag.
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
