//! Ports of TCP, UDP and SCTP.

use super::{
    super::{
        ast::{Direction, Id, Protocol},
        names,
        tree::{Tree, directed},
        value::Value,
    },
    Generator, Made,
};

/// The first and the last port.
type Range = (u32, u32);

impl Generator {
    pub(super) fn port(&self, protocol: Option<Protocol>, direction: Direction, id: &Id) -> Made {
        let (port, only) = match id {
            Id::Number(port) => (*port, None),
            Id::Name(name) => {
                names::service(name).ok_or("this service is not known, give its port as a number")?
            }
            _ => return Err("a port is a number".to_owned()),
        };
        self.ports(protocol, direction, (port, port), only)
    }

    pub(super) fn port_range(&self, protocol: Option<Protocol>, direction: Direction, id: &Id) -> Made {
        let (first, last) = match id {
            Id::Number(port) => (*port, *port),
            Id::Name(range) => range
                .split_once('-')
                .and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)))
                .ok_or("a range of ports is two numbers, such as 6000-6008")?,
            _ => return Err("a range of ports is two numbers, such as 6000-6008".to_owned()),
        };
        self.ports(protocol, direction, (first.min(last), first.max(last)), None)
    }

    /// `only`: the protocol, if the ports belong to a service that uses one protocol.
    fn ports(
        &self,
        protocol: Option<Protocol>,
        direction: Direction,
        range: Range,
        only: Option<u32>,
    ) -> Made {
        let asked = match protocol {
            None => None,
            Some(Protocol::Tcp) => Some(names::TCP),
            Some(Protocol::Udp) => Some(names::UDP),
            Some(Protocol::Sctp) => Some(names::SCTP),
            Some(_) => return Err("only tcp, udp and sctp have ports".to_owned()),
        };
        if range.1 > 0xffff {
            return Err("a port is 65535 at most".to_owned());
        }
        let protocols = match (asked, only) {
            (None, None) => vec![names::TCP, names::UDP, names::SCTP],
            (Some(asked), Some(only)) if asked != only => {
                return Err("this service has another protocol".to_owned());
            }
            (Some(one), _) | (None, Some(one)) => vec![one],
        };
        let over4 = protocols.iter().map(|protocol| self.ports4(*protocol, direction, range)).collect();
        let over6 = protocols.iter().map(|protocol| self.ports6(*protocol, direction, range)).collect();
        // libpcap tests sctp first, and IPv6 first. The order of tests of the same field does not matter.
        Ok(Tree::Any(vec![
            Tree::All(vec![self.link_type(names::IP)?, Tree::Any(over4)]),
            Tree::All(vec![self.link_type(names::IP6)?, Tree::Any(over6)]),
        ]))
    }

    /// Ports of one protocol over IPv4.
    pub(super) fn ports4(&self, protocol: u32, direction: Direction, range: Range) -> Tree {
        let ports = either(direction, range, self.layers.transport(0, 2), self.layers.transport(2, 2));
        Tree::All(vec![self.network(9, 1).equals(protocol), self.first_fragment(), ports])
    }

    /// Ports of one protocol over IPv6.
    pub(super) fn ports6(&self, protocol: u32, direction: Direction, range: Range) -> Tree {
        let ports = either(direction, range, self.network(40, 2), self.network(42, 2));
        Tree::All(vec![self.network(6, 1).equals(protocol), ports])
    }

    pub(super) fn first_fragment(&self) -> Tree {
        self.network(6, 2).masked(0x1fff, 0)
    }
}

fn either(direction: Direction, (first, last): Range, source: Value, destination: Value) -> Tree {
    directed(direction, source.within(first, last), destination.within(first, last))
}
