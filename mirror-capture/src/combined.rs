//! Combines the streams of several agents into one pcapng: its interfaces and their counters. Pure.
//!
//! Each interface of each stream is an interface of the file. In the block of a packet, only the number of the
//! interface changes. The counters of an interface are written at the end of the file, as last received.

use std::collections::BTreeMap;

use crate::{
    blocks::Packet,
    merge::StreamId,
    pcapng::{Interface, InterfaceId, Section, Statistics, Writer},
};

/// The interfaces so far.
#[derive(Debug)]
pub struct Combined {
    writer: Writer,
    /// Those of each stream.
    streams: BTreeMap<StreamId, Vec<InterfaceId>>,
    /// In the order of the file.
    interfaces: Vec<Counted>,
}

#[derive(Debug)]
struct Counted {
    name: String,
    node: String,
    statistics: Option<Statistics>,
}

impl Combined {
    /// Begins a file. Also returns its first bytes.
    pub fn begin(section: &Section<'_>) -> (Self, Vec<u8>) {
        let mut out = Vec::new();
        let writer = Writer::begin(&mut out, section);
        (Self { writer, streams: BTreeMap::new(), interfaces: Vec::new() }, out)
    }

    /// Adds the next interface of a stream, and appends its description. Its hardware is the node.
    pub fn interface(&mut self, stream: StreamId, of: Interface, out: &mut Vec<u8>) {
        let id = self.writer.interface(out, &of);
        self.streams.entry(stream).or_default().push(id);
        let node = of.hardware.unwrap_or_default();
        self.interfaces.push(Counted { name: of.name, node, statistics: None });
    }

    /// The block of a packet, for the file. `None`: the stream has not described its interface.
    pub fn packet(&self, stream: StreamId, packet: Packet) -> Option<Vec<u8>> {
        let id = self.id(stream, packet.interface)?;
        Some(packet.with_interface(id.number()))
    }

    /// Notes the counters of an interface.
    pub fn statistics(&mut self, stream: StreamId, statistics: Statistics) {
        let Some(interface) = self.id(stream, statistics.interface.number()) else { return };
        if let Some(counted) = self.interfaces.get_mut(interface.number() as usize) {
            counted.statistics = Some(Statistics { interface, ..statistics });
        }
    }

    fn id(&self, stream: StreamId, interface: u32) -> Option<InterfaceId> {
        self.streams.get(&stream)?.get(interface as usize).copied()
    }

    /// Ends the file: appends all counters. Returns the summary for the user, for `packets` packets from `nodes` nodes,
    /// and whether it has the counters of all interfaces. `now_ns` is ns since the epoch.
    pub fn end(&mut self, now_ns: u64, packets: u64, nodes: usize, out: &mut Vec<u8>) -> (Vec<String>, bool) {
        let (mut missing, mut uncounted, mut sums) = (Vec::new(), Vec::new(), [0_u64, 0]);
        for Counted { name, node, statistics } in &mut self.interfaces {
            let about = |what: String| format!("{name} on node {node}: {what}");
            let Some(of) = statistics else {
                uncounted.push(about("the number of missing packets is unknown".to_owned()));
                continue;
            };
            if of.time_ns == 0 {
                of.time_ns = now_ns;
            }
            of.write(out);
            missing.extend(of.comment.clone().map(about));
            let received = of.received.unwrap_or_default();
            let why = ["were lost", "were not copied because of a rate limit or a budget"];
            for ((sum, of), why) in sums.iter_mut().zip([of.dropped, of.limited]).zip(why) {
                let count = of.unwrap_or_default();
                *sum = sum.saturating_add(count);
                if count > 0 {
                    missing.push(about(format!("{count} of {received} packets {why}")));
                }
            }
        }
        let (interfaces, [lost, limited]) = (self.interfaces.len(), sums);
        let sum = format!(
            "{packets} packets; {interfaces} interfaces; {nodes} nodes; {limited} packets limited; {lost} packets lost"
        );
        let is_whole = uncounted.is_empty();
        ([vec![sum], missing, uncounted].concat(), is_whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::{Block, Blocks};

    fn all(bytes: &[u8]) -> Vec<Block> {
        let mut blocks = Blocks::default();
        blocks.push(bytes);
        std::iter::from_fn(|| blocks.pop().ok().flatten()).collect()
    }

    /// A packet of the interface with this number, as an agent sends it.
    fn packet(interface: u32) -> Packet {
        let mut block = vec![0; 36];
        block[..4].copy_from_slice(&6_u32.to_le_bytes());
        block[4..8].copy_from_slice(&36_u32.to_le_bytes());
        block[8..12].copy_from_slice(&interface.to_le_bytes());
        block[32..].copy_from_slice(&36_u32.to_le_bytes());
        Packet { interface, time_ns: 0, block }
    }

    #[test]
    fn the_interfaces_of_all_streams_have_numbers_of_their_own() {
        let (mut combined, mut out) = Combined::begin(&Section::default());
        for (stream, node, name) in
            [(1, "a", "shop/web eth0"), (2, "b", "shop/db eth0"), (1, "a", "shop/web eth1")]
        {
            let (name, hardware) = (name.to_owned(), Some(node.to_owned()));
            combined.interface(stream, Interface { name, hardware, ..Interface::default() }, &mut out);
        }
        assert_eq!(combined.packet(2, packet(1)), None, "it has one interface");
        for (stream, place, number) in [(1, 0, 0), (2, 0, 1), (1, 1, 2)] {
            let block = combined.packet(stream, packet(place)).unwrap_or_default();
            let Some(Block::Packet(found)) = all(&block).pop() else { unreachable!("{block:?}") };
            assert_eq!(found.interface, number);
        }
        let counted = |interface, received, dropped, limited| Statistics {
            interface: InterfaceId::at(interface),
            received: Some(received),
            dropped: Some(dropped),
            limited,
            ..Statistics::default()
        };
        let comment = Some("5 of its super-frames were cut".to_owned());
        combined.statistics(1, Statistics { comment: comment.clone(), ..counted(0, 100, 0, None) });
        combined.statistics(2, counted(0, 7, 2, Some(0)));
        combined.statistics(2, counted(0, 9, 3, Some(4)));
        combined.statistics(2, counted(5, 9, 3, Some(9)));
        let (lines, is_whole) = combined.end(7, 106, 2, &mut out);
        assert!(!is_whole);
        assert_eq!(
            lines,
            [
                "106 packets; 3 interfaces; 2 nodes; 4 packets limited; 3 packets lost",
                "shop/web eth0 on node a: 5 of its super-frames were cut",
                "shop/db eth0 on node b: 3 of 9 packets were lost",
                "shop/db eth0 on node b: 4 of 9 packets were not copied because of a rate limit or a budget",
                "shop/web eth1 on node a: the number of missing packets is unknown",
            ]
        );
        let statistics = all(&out).into_iter().filter(|block| matches!(block, Block::Statistics(_)));
        let expected = [Statistics { comment, ..counted(0, 100, 0, None) }, counted(1, 9, 3, Some(4))];
        let expected = expected.map(|counted| Block::Statistics(Statistics { time_ns: 7, ..counted }));
        assert!(statistics.eq(expected));
    }
}
