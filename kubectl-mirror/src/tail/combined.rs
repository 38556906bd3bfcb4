//! Combines the streams of several agents into one pcapng: its interfaces and their counters. Pure.
//!
//! Each interface of each stream is an interface of the file, with the node as its hardware. The block of a packet
//! changes only in the number of its interface. The counters of an interface are written at the end of the file, as
//! last received.

use std::collections::BTreeMap;

use mirror_core::pcapng::{self, Interface, InterfaceId, Section, Writer};

use super::{
    blocks::{Description, Packet, Statistics},
    merge::StreamId,
};

/// The interfaces so far.
#[derive(Debug)]
pub(super) struct Combined {
    writer: Writer,
    /// By the stream and the index in it.
    places: BTreeMap<(StreamId, u32), InterfaceId>,
    /// The number of interfaces described by each stream.
    described: BTreeMap<StreamId, u32>,
    /// In the order of the file.
    interfaces: Vec<Counted>,
}

#[derive(Debug)]
struct Counted {
    id: InterfaceId,
    name: String,
    node: String,
    statistics: Option<Statistics>,
}

impl Combined {
    /// Begins a file. Also returns its first bytes.
    pub(super) fn begin(application: &str) -> (Self, Vec<u8>) {
        let mut out = Vec::new();
        let writer =
            Writer::begin(&mut out, &Section { application: Some(application), ..Section::default() });
        let empty =
            Self { writer, places: BTreeMap::new(), described: BTreeMap::new(), interfaces: Vec::new() };
        (empty, out)
    }

    /// Adds the next interface of a node's stream, and appends its description.
    pub(super) fn interface(&mut self, stream: StreamId, node: &str, of: &Description, out: &mut Vec<u8>) {
        let interface = Interface {
            snaplen: 0,
            name: Some(&of.name),
            description: of.description.as_deref(),
            filter: of.filter.as_deref(),
            hardware: Some(node),
            comment: of.comment.as_deref(),
        };
        let id = self.writer.interface(out, &interface);
        let place = self.described.entry(stream).or_default();
        self.places.insert((stream, *place), id);
        *place += 1;
        let (name, node) = (of.name.clone(), node.to_owned());
        self.interfaces.push(Counted { id, name, node, statistics: None });
    }

    /// The block of a packet, for the file. `None`: the stream has not described its interface.
    pub(super) fn packet(&self, stream: StreamId, packet: Packet) -> Option<Vec<u8>> {
        let id = self.places.get(&(stream, packet.interface))?;
        Some(packet.with_interface(id.number()))
    }

    /// Notes the counters of an interface.
    pub(super) fn statistics(&mut self, stream: StreamId, statistics: Statistics) {
        let id = self.places.get(&(stream, statistics.interface));
        let counted = id.and_then(|id| self.interfaces.get_mut(id.number() as usize));
        if let Some(counted) = counted {
            counted.statistics = Some(statistics);
        }
    }

    /// Ends the file: appends all counters, and returns their sums. `now_ns` is ns since the epoch.
    pub(super) fn end(&self, now_ns: u64, out: &mut Vec<u8>) -> Summary {
        let mut summary = Summary { interfaces: self.interfaces.len(), ..Summary::default() };
        for Counted { id, name, node, statistics } in &self.interfaces {
            let Some(of) = statistics else {
                summary.uncounted.push(format!("{name} on node {node}"));
                continue;
            };
            let block = pcapng::Statistics {
                interface: *id,
                time_ns: if of.time_ns == 0 { now_ns } else { of.time_ns },
                start_ns: of.start_ns,
                end_ns: of.end_ns,
                received: of.received,
                dropped: of.lost,
                accepted: None,
                limited: of.limited,
                comment: of.comment.as_deref(),
            };
            block.write(out);
            summary
                .missing
                .extend(of.comment.iter().map(|comment| format!("{name} on node {node}: {comment}")));
            let [received, lost, limited] = [of.received, of.lost, of.limited].map(Option::unwrap_or_default);
            summary.lost += lost;
            summary.limited += limited;
            if lost > 0 {
                summary
                    .missing
                    .push(format!("{name} on node {node}: {lost} of {received} packets were lost"));
            }
            if limited > 0 {
                summary.missing.push(format!(
                    "{name} on node {node}: a rate or a budget has kept {limited} of {received} packets out"
                ));
            }
        }
        summary
    }
}

/// The sums of all counters.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Summary {
    interfaces: usize,
    limited: u64,
    lost: u64,
    /// The interfaces with missing packets, as text.
    missing: Vec<String>,
    /// The interfaces whose counters were not received.
    uncounted: Vec<String>,
}

impl Summary {
    /// Whether the counters of all interfaces were received.
    pub(super) fn is_whole(&self) -> bool {
        self.uncounted.is_empty()
    }

    /// The summary for the user, for `packets` packets from `nodes` nodes.
    pub(super) fn lines(&self, packets: u64, nodes: usize) -> Vec<String> {
        let Self { interfaces, limited, lost, missing, uncounted } = self;
        let mut lines = vec![format!(
            "{packets} packets; {interfaces} interfaces; {nodes} nodes; {limited} packets limited; {lost} packets lost"
        )];
        lines.extend(missing.iter().cloned());
        lines.extend(uncounted.iter().map(|of| format!("{of}: how many packets are missing is not known")));
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tail::blocks::{Block, Blocks};

    fn all(bytes: &[u8]) -> Vec<Block> {
        let mut blocks = Blocks::default();
        blocks.push(bytes);
        std::iter::from_fn(|| blocks.next().ok().flatten()).collect()
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
        let (mut combined, mut out) = Combined::begin("podmirror");
        let described = |name: &str| Description { name: name.into(), ..Description::default() };
        combined.interface(1, "a", &described("shop/web eth0"), &mut out);
        combined.interface(2, "b", &described("shop/db eth0"), &mut out);
        combined.interface(1, "a", &described("shop/web eth1"), &mut out);
        assert_eq!(combined.packet(2, packet(1)), None, "it has one interface");
        for (stream, place, number) in [(1, 0, 0), (2, 0, 1), (1, 1, 2)] {
            let block = combined.packet(stream, packet(place)).unwrap_or_default();
            let Some(Block::Packet(found)) = all(&block).pop() else { unreachable!("{block:?}") };
            assert_eq!(found.interface, number);
        }
        let counted = |interface, received, lost, limited| Statistics {
            interface,
            received: Some(received),
            lost: Some(lost),
            limited,
            ..Statistics::default()
        };
        let comment = Some("5 of its super-frames were cut".to_owned());
        combined.statistics(1, Statistics { comment: comment.clone(), ..counted(0, 100, 0, None) });
        combined.statistics(2, counted(0, 7, 2, Some(0)));
        combined.statistics(2, counted(0, 9, 3, Some(4)));
        combined.statistics(2, counted(5, 9, 3, Some(9)));
        let summary = combined.end(7, &mut out);
        assert_eq!(
            summary.lines(106, 2),
            [
                "106 packets; 3 interfaces; 2 nodes; 4 packets limited; 3 packets lost",
                "shop/web eth0 on node a: 5 of its super-frames were cut",
                "shop/db eth0 on node b: 3 of 9 packets were lost",
                "shop/db eth0 on node b: a rate or a budget has kept 4 of 9 packets out",
                "shop/web eth1 on node a: how many packets are missing is not known",
            ]
        );
        let statistics = all(&out).into_iter().filter(|block| matches!(block, Block::Statistics(_)));
        let expected = [Statistics { comment, ..counted(0, 100, 0, None) }, counted(1, 9, 3, Some(4))];
        let expected = expected.map(|counted| Block::Statistics(Statistics { time_ns: 7, ..counted }));
        assert!(statistics.eq(expected));
    }
}
