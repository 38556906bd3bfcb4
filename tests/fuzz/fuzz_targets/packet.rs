//! The beginning of a packet, as the eBPF programs read it: its identity, its flow, and whether it belongs to a tunnel.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mirror_common::{
    identity::{Bytes, identity},
    packet::header,
    sample::{flow_hash, in_sample},
    tunnel::{TunnelId, Tunnels, is_of},
};

struct Frame<'a>(&'a [u8]);

impl Frame<'_> {
    fn words<const N: usize>(&self, offset: usize) -> Option<[u32; N]> {
        let words = self.0.get(offset..)?.as_chunks().0.get(..N)?;
        Some(std::array::from_fn(|at| u32::from_ne_bytes(words[at])))
    }
}

impl Bytes for Frame<'_> {
    fn network<const N: usize>(&mut self, offset: u32) -> Option<[u32; N]> {
        self.words(14 + offset as usize)
    }

    fn macs(&mut self) -> Option<[u32; 3]> {
        self.words(0)
    }
}

fuzz_target!(|input: (&[u8], u32, u16, u32, u32)| {
    let (bytes, len, ethertype, key, seed) = input;
    assert_eq!(identity(&mut Frame(bytes), ethertype), identity(&mut Frame(bytes), ethertype));
    let header = header(bytes, len);
    let mut tunnels = Tunnels { count: 1, ..Tunnels::default() };
    tunnels.known[0] = TunnelId { way: 4789, first: key >> 8, last: key >> 8 };
    is_of(&header, &tunnels);
    flow_hash(&header, seed);
    assert!(in_sample(&header, seed, 0), "0: all flows");
});
