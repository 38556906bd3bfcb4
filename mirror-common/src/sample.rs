//! Sampling by flow: a share of the connections, each with all of its packets in both directions.
//!
//! Pure. With the same seed all nodes make the same choice, so a connection that crosses nodes is in or out on all of
//! them. Rates are in `limit`; filters are separate programs.

use crate::packet::{Header, be16, be32, byte, len, network};

/// The default seed of all nodes.
pub const DEFAULT_SEED: u32 = 0x706f_646d;

/// Ethertypes and IP protocols that are parsed.
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const TCP: u8 = 6;
const UDP: u8 = 17;
const SCTP: u8 = 132;

/// Whether a packet is in a sample. `share` is the share of flows in units of 2^-32; 0 means all of them.
#[inline(always)]
pub fn in_sample(header: &Header, seed: u32, share: u32) -> bool {
    share == 0 || flow_hash(header, seed) < share
}

/// A hash of the packet's flow, the same for both directions: of addresses, ports and protocol for TCP, UDP and SCTP;
/// of addresses and protocol for fragments (only the first has ports) and other IP; of MAC addresses and ethertype for
/// the rest.
#[inline(always)]
pub fn flow_hash(header: &Header, seed: u32) -> u32 {
    let len = len(header);
    let (ethertype, ip) = network(header);
    let (from, to, protocol) = match ethertype {
        IPV4 if len as usize >= ip + 20 => ipv4(header, ip, seed),
        IPV6 if len as usize >= ip + 40 => ipv6(header, ip, seed),
        _ => (mac(header, 6, seed), mac(header, 0, seed), u32::from(ethertype) << 8),
    };
    // A sum does not depend on the order of the two ends.
    finish(mix(from.wrapping_add(to), protocol))
}

#[inline(always)]
fn ipv4(header: &Header, ip: usize, seed: u32) -> (u32, u32, u32) {
    let protocol = byte(header, ip + 9);
    let is_fragment = be16(header, ip + 6) & 0x3fff != 0;
    let transport = ip + usize::from(byte(header, ip) & 0xf) * 4;
    let (from, to) = ports(header, transport, protocol, is_fragment);
    let end = |address: usize, port: u16| finish(mix(mix(seed, be32(header, address)), port.into()));
    (end(ip + 12, from), end(ip + 16, to), protocol.into())
}

#[inline(always)]
fn ipv6(header: &Header, ip: usize, seed: u32) -> (u32, u32, u32) {
    // Extension headers are not parsed: such packets are hashed by their addresses, as fragments must be.
    let protocol = byte(header, ip + 6);
    let (from, to) = ports(header, ip + 40, protocol, false);
    let end = |address: usize, port: u16| {
        let mut hash = mix(seed, port.into());
        hash = mix(hash, be32(header, address));
        hash = mix(hash, be32(header, address + 4));
        hash = mix(hash, be32(header, address + 8));
        finish(mix(hash, be32(header, address + 12)))
    };
    // The protocol of a fragment is after the fragment header, so fragments are hashed by their addresses only.
    let protocol = if matches!(protocol, TCP | UDP | SCTP) { protocol } else { 0 };
    (end(ip + 8, from), end(ip + 24, to), protocol.into())
}

#[inline(always)]
fn ports(header: &Header, transport: usize, protocol: u8, is_fragment: bool) -> (u16, u16) {
    if is_fragment || !matches!(protocol, TCP | UDP | SCTP) {
        return (0, 0);
    }
    (be16(header, transport), be16(header, transport + 2))
}

#[inline(always)]
fn mac(header: &Header, at: usize, seed: u32) -> u32 {
    finish(mix(mix(seed, be32(header, at)), be16(header, at + 4).into()))
}

/// A round of MurmurHash3 (32 bits, public domain).
#[inline(always)]
const fn mix(hash: u32, word: u32) -> u32 {
    let word = word.wrapping_mul(0xcc9e_2d51).rotate_left(15).wrapping_mul(0x1b87_3593);
    (hash ^ word).rotate_left(13).wrapping_mul(5).wrapping_add(0xe654_6b64)
}

/// The final step of MurmurHash3: every bit of the input changes every bit of the output half of the time.
#[inline(always)]
const fn finish(hash: u32) -> u32 {
    let hash = (hash ^ hash >> 16).wrapping_mul(0x85eb_ca6b);
    let hash = (hash ^ hash >> 13).wrapping_mul(0xc2b2_ae35);
    hash ^ hash >> 16
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::{vec, vec::Vec};

    use proptest::{collection::vec as any_vec, prelude::*};

    use super::*;
    use crate::packet::header;

    fn hash(bytes: &[u8]) -> u32 {
        flow_hash(&header(bytes, bytes.len() as u32), DEFAULT_SEED)
    }

    /// A frame with `tags` VLAN tags; `v6` or IPv4 with `options` words of options.
    fn frame(ends: [(&[u8], u16); 2], protocol: u8, tags: usize, options: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![2; 12];
        (0..tags).for_each(|tag| frame.extend([[0x88, 0xa8], [0x81, 0x00]][tag].iter().chain(&[0, 7])));
        let [(from, from_port), (to, to_port)] = ends;
        if from.len() == 4 {
            frame.extend([0x08, 0x00, 0x45 + options, 0, 0, 0, 0, 0, 0x40, 0, 64, protocol, 0, 0]);
            frame.extend(from.iter().chain(to));
            frame.extend(vec![1; usize::from(options) * 4]);
        } else {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, protocol, 64]);
            frame.extend(from.iter().chain(to));
        }
        frame.extend(from_port.to_be_bytes());
        frame.extend(to_port.to_be_bytes());
        frame.extend(payload);
        frame
    }

    fn address() -> impl Strategy<Value = Vec<u8>> {
        any_vec(any::<u8>(), 16)
    }

    proptest! {
        #[test]
        fn both_directions_of_a_flow_are_in_or_out_together(
            from in address(), to in address(), ports: [u16; 2], is_v6: bool, tags in 0..=2usize,
            options in 0..=10u8, payloads in [any_vec(any::<u8>(), 0..200), any_vec(any::<u8>(), 0..200)],
            protocol in prop_oneof![Just(TCP), Just(UDP), Just(SCTP)],
        ) {
            let n = if is_v6 { 16 } else { 4 };
            let ends = [(&from[..n], ports[0]), (&to[..n], ports[1])];
            let there = frame(ends, protocol, tags, options, &payloads[0]);
            let back = frame([ends[1], ends[0]], protocol, tags, 0, &payloads[1]);
            prop_assert_eq!(hash(&there), hash(&back));
        }

        #[test]
        fn fragments_of_one_packet_are_in_or_out_together(from: [u8; 4], to: [u8; 4], ports: [u16; 2], rest: [u16; 2]) {
            let mut first = frame([(&from, ports[0]), (&to, ports[1])], UDP, 0, 0, &[]);
            let mut later = frame([(&from, rest[0]), (&to, rest[1])], UDP, 0, 0, &[]);
            first[20] = 0x20;
            later[21] = 9;
            prop_assert_eq!(hash(&first), hash(&later));
        }

        #[test]
        fn no_bytes_are_too_few_or_too_strange(bytes in any_vec(any::<u8>(), 0..200), seed: u32) {
            flow_hash(&header(&bytes, bytes.len() as u32), seed);
        }
    }

    /// 100 000 flows that differ as little as real ones: neighbouring addresses and ports.
    #[test]
    fn the_share_is_what_was_asked_for() {
        for percent in [10, 25, 50, 90] {
            let share = (u64::from(u32::MAX) * percent / 100) as u32;
            let flows = 100_000_u32;
            let kept = (0..flows).filter(|flow| {
                let from = [10, 0, (flow >> 12) as u8, (flow >> 6) as u8 & 63];
                let port = 32768 + (flow & 63) as u16;
                let frame = frame([(&from, port), (&[10, 96, 0, 10], 443)], TCP, 0, 0, &[]);
                in_sample(&header(&frame, frame.len() as u32), DEFAULT_SEED, share)
            });
            let kept = kept.count() as f64 / f64::from(flows);
            let wanted = percent as f64 / 100.0;
            assert!((kept / wanted - 1.0).abs() < 0.02, "{percent} %: {kept}");
        }
    }
}
