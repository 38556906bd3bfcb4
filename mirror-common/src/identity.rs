//! The identity of a packet. It stays the same while the packet crosses a node, unless a translation (NAT, a
//! Service) makes it another packet.
//!
//! Pure. A mark in `skb->tc_index` says that a packet was copied (`marks`). It is valid only while the packet keeps its
//! identity, so the hook that copies a packet notes the identity in a table shared by all CPUs, and the next tap
//! compares. A packet whose entry is missing, expired or overwritten is copied again, and never left out.

/// Bits of an identity that select the entry of the table.
const SLOT_BITS: u32 = 14;
/// Entries of the table. If two flows share an entry, a packet of one flow is copied twice only if another CPU
/// notes a packet of the other flow while the first packet is between its two taps.
pub const SLOTS: u32 = 1 << SLOT_BITS;
/// Bits of [`Noted`] for the place and for the time. The remaining bits of the identity are above them.
const PLACE_BITS: u32 = 22;
const TIME_BITS: u32 = 24;
/// Jiffies in a unit of time, as a power of two: an entry is valid for one to two units, which is 32 to 64 ms with 1000
/// jiffies a second, and 320 to 640 ms with 100. That is longer than a packet waits in the queues of a node, and
/// shorter than the time after which connection tracking reuses an address and port.
const UNIT: u32 = 5;

const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const IPV6_FRAGMENT: u8 = 44;
const ICMPV6: u8 = 58;
const SCTP: u8 = 132;

/// The bytes of a packet, in words in memory order.
pub trait Bytes {
    /// `N` words at `offset` bytes after the beginning of the network header. `None`: the packet is too short.
    fn network<const N: usize>(&mut self, offset: u32) -> Option<[u32; N]>;
    /// The two MAC addresses. `None`: the frame is too short.
    fn macs(&mut self) -> Option<[u32; 3]>;
}

/// Returns the identity of a packet with this ethertype (after VLAN tags), as a hash: of addresses, protocol and ports;
/// of addresses, protocol and identification for later fragments; of addresses, type and id for ICMP; of the MAC
/// addresses and the ethertype for everything else. `None`: the packet cannot be read.
#[inline(always)]
pub fn identity<B: Bytes>(bytes: &mut B, ethertype: u16) -> Option<u32> {
    match ethertype {
        IPV4 => ipv4(bytes),
        IPV6 => ipv6(bytes),
        _ => {
            let [a, b, c] = bytes.macs()?;
            Some(hash([pair(a, b), pair(c, ethertype.into())]))
        }
    }
}

#[inline(always)]
fn ipv4<B: Bytes>(bytes: &mut B) -> Option<u32> {
    let [first, fragment, kind, from, to] = bytes.network(0)?;
    let ([version, ..], [_, protocol, ..]) = (first.to_ne_bytes(), kind.to_ne_bytes());
    let fragment = u32::from_be(fragment);
    let is_later = fragment & 0x1fff != 0;
    let rest =
        if is_later { later(fragment >> 16) } else { ports(bytes, u32::from(version & 0xf) * 4, protocol) };
    Some(hash([pair(from, to), rest << 8 | u64::from(protocol)]))
}

#[inline(always)]
fn ipv6<B: Bytes>(bytes: &mut B) -> Option<u32> {
    let [_, kind, a, b, c, d, e, f, g, h] = bytes.network(0)?;
    let [_, _, next, _] = kind.to_ne_bytes();
    // Other extension headers are not parsed: such a packet is identified by its addresses.
    let (protocol, rest) = if next == IPV6_FRAGMENT {
        let [fragment, id] = bytes.network(40)?;
        let [protocol, ..] = fragment.to_ne_bytes();
        let is_later = u32::from_be(fragment) & 0xfff8 != 0;
        (protocol, if is_later { later(id) } else { ports(bytes, 48, protocol) })
    } else {
        (next, ports(bytes, 40, next))
    };
    Some(hash([pair(a, b), pair(c, d), pair(e, f), pair(g, h), rest << 8 | u64::from(protocol)]))
}

/// The ports after the IP header, or the type and id of an ICMP message; 0 if the packet has none.
#[inline(always)]
fn ports<B: Bytes>(bytes: &mut B, offset: u32, protocol: u8) -> u64 {
    match protocol {
        TCP | UDP | SCTP => {
            let [ports] = bytes.network(offset).unwrap_or_default();
            ports.into()
        }
        ICMP | ICMPV6 => {
            let [kind, id] = bytes.network(offset).unwrap_or_default();
            let ([kind, ..], [high, low, ..]) = (kind.to_ne_bytes(), id.to_ne_bytes());
            u32::from_be_bytes([0, kind, high, low]).into()
        }
        _ => 0,
    }
}

/// A later fragment has no ports; it also differs from an unfragmented packet without ports.
#[inline(always)]
const fn later(id: u32) -> u64 {
    1 << 32 | id as u64
}

#[inline(always)]
const fn pair(high: u32, low: u32) -> u64 {
    (high as u64) << 32 | low as u64
}

/// A sum of products, which the CPU computes in parallel, and one more product to mix the bits.
#[inline(always)]
fn hash<const N: usize>(words: [u64; N]) -> u32 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let (mut sum, mut factor) = (0_u64, FACTOR);
    for word in words {
        sum = sum.wrapping_add(word.wrapping_mul(factor));
        factor = factor.wrapping_mul(FACTOR);
    }
    ((sum ^ sum >> 32).wrapping_mul(FACTOR) >> 32) as u32
}

/// The place of a hook: the network namespace and index of its device, and whether it is the egress hook.
#[inline(always)]
pub const fn place(netns: u32, ifindex: u32, is_egress: bool) -> u32 {
    // If two devices have the same number here, an unchanged packet between them is copied twice.
    (ifindex << 1 | is_egress as u32) ^ netns.wrapping_mul(0x9e37_79b9)
}

/// The unit of time for this number of jiffies.
#[inline(always)]
pub const fn unit(jiffies: u64) -> u32 {
    (jiffies >> UNIT) as u32
}

/// The index in the table for an identity.
#[inline(always)]
pub const fn slot(identity: u32) -> u32 {
    identity & (SLOTS - 1)
}

/// The note of a copy, in one word, so that a program on another CPU reads it atomically.
#[inline(always)]
pub const fn note(identity: u32, place: u32, unit: u32) -> u64 {
    let (place, unit) = (place & ((1 << PLACE_BITS) - 1), unit & ((1 << TIME_BITS) - 1));
    ((identity >> SLOT_BITS) as u64) << (PLACE_BITS + TIME_BITS) | (place as u64) << TIME_BITS | unit as u64
}

/// Whether the copy in `noted` counts as a copy of a packet with this identity, which is at this place now. A copy
/// from the same place does not: it was of an earlier packet, because no packet passes a hook twice unchanged.
#[inline(always)]
pub const fn stands_for(noted: u64, identity: u32, place: u32, unit: u32) -> bool {
    let here = note(identity, place, unit);
    let time = (1 << TIME_BITS) - 1;
    let age = (here & time).wrapping_sub(noted & time) & time;
    let is_same = noted >> (PLACE_BITS + TIME_BITS) == here >> (PLACE_BITS + TIME_BITS);
    is_same && noted >> TIME_BITS != here >> TIME_BITS && age <= 1
}

#[cfg(test)]
mod tests;
