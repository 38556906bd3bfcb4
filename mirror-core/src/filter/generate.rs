//! The tests of each primitive: the tests of libpcap's code generator, in its order.
//!
//! The order matters where a frame is truncated: the first load beyond its end rejects the frame. libpcap's own
//! optimiser does not keep the order (it leaves out and moves loads), but ours does. So on truncated frames we agree
//! with libpcap without its optimiser, and on whole frames with libpcap in any form.

use std::ops::Range;

use mirror_common::packet::LEN_OFFSET;

use super::{
    FilterError,
    ast::{Direction, Expr, ExprKind, Id, Kind, Primitive, Protocol, Qualifiers, Relation, Value},
    names,
    tree::{Load, Test, Tree, directed},
};

/// The longest IPv4 header; a load behind it can begin so many bytes later.
const MAX_IPV4_HEADER: u32 = 60;
/// The greatest value of the field after the addresses that is a length, not a type.
const MAX_ETHERNET_LENGTH: u32 = 1500;

type Generated = Result<Tree, FilterError>;
/// The problem, for the whole primitive.
type Refusal = String;

/// Generates the tests of an expression.
pub(super) fn generate(text: &str, expr: &Expr) -> Generated {
    Generator { text, link_type: 12, payload: 14 }.expression(expr)
}

/// Where the Ethernet type and the fields after it are for the next primitive: `vlan` moves them.
struct Generator<'a> {
    text: &'a str,
    link_type: u32,
    payload: u32,
}

impl Generator<'_> {
    fn expression(&mut self, expr: &Expr) -> Generated {
        Ok(match &expr.kind {
            ExprKind::And(left, right) => Tree::All(vec![self.expression(left)?, self.expression(right)?]),
            ExprKind::Or(left, right) => Tree::Any(vec![self.expression(left)?, self.expression(right)?]),
            ExprKind::Not(inner) => self.expression(inner)?.negated(),
            ExprKind::Primitive(primitive) => {
                let refused = |reason| FilterError::at(self.text, Range::clone(&expr.span), reason);
                self.primitive(primitive).map_err(refused)?
            }
        })
    }

    fn primitive(&mut self, primitive: &Primitive) -> Result<Tree, Refusal> {
        match primitive {
            Primitive::Protocol(protocol) => self.protocol(*protocol),
            Primitive::Id(qualifiers, id) => self.id(*qualifiers, id),
            Primitive::Broadcast(None | Some(Protocol::Ether)) => self.ether_address(0, [0xff; 6]),
            Primitive::Broadcast(Some(Protocol::Ip)) => {
                let destination = self.field(16, 4)?;
                let either = [destination.masked(u32::MAX, 0), destination.equals(u32::MAX)];
                Ok(Tree::All(vec![self.ethertype(names::IP)?, Tree::Any(either.into())]))
            }
            Primitive::Broadcast(_) => Err("only ether broadcast and ip broadcast are supported".to_owned()),
            Primitive::Multicast(None | Some(Protocol::Ether)) => Ok(load(0, 1)?.masked(1, 1)),
            Primitive::Multicast(Some(Protocol::Ip)) => {
                Ok(Tree::All(vec![self.ethertype(names::IP)?, self.field(16, 1)?.within(224, u32::MAX)]))
            }
            Primitive::Multicast(Some(Protocol::Ip6)) => {
                Ok(Tree::All(vec![self.ethertype(names::IP6)?, self.field(24, 1)?.equals(255)]))
            }
            Primitive::Multicast(_) => Err("only ether, ip and ip6 multicast are supported".to_owned()),
            Primitive::Vlan(id) => self.vlan(*id),
            Primitive::Relation(left, relation, right) => self.relation(*left, *relation, *right),
        }
    }

    /// A field at this offset behind the Ethernet header and the VLAN tags so far.
    fn field(&self, offset: u32, size: u8) -> Result<Load, Refusal> {
        load(self.payload.saturating_add(offset), size)
    }

    /// A field at this offset behind the IPv4 header.
    fn behind_ipv4(&self, offset: u32, size: u8) -> Result<Load, Refusal> {
        let farthest = self.payload.saturating_add(offset).saturating_add(MAX_IPV4_HEADER);
        load(farthest, size)?;
        let ip_header = self.payload as u8;
        Ok(Load { offset: (self.payload + offset) as u8, size, ip_header })
    }

    fn ethertype(&self, ethertype: u32) -> Result<Tree, Refusal> {
        Ok(load(self.link_type, 2)?.equals(ethertype))
    }

    fn ip_protocol(&self, number: u32) -> Result<Tree, Refusal> {
        Ok(Tree::All(vec![self.ethertype(names::IP)?, self.field(9, 1)?.equals(number)]))
    }

    /// The next header, also behind a fragment header.
    fn ip6_protocol(&self, number: u32) -> Result<Tree, Refusal> {
        let next = self.field(6, 1)?;
        let fragment = Tree::All(vec![next.equals(names::FRAGMENT), self.field(40, 1)?.equals(number)]);
        Ok(Tree::All(vec![self.ethertype(names::IP6)?, Tree::Any(vec![next.equals(number), fragment])]))
    }

    fn any_ip_protocol(&self, number: u32) -> Result<Tree, Refusal> {
        Ok(Tree::Any(vec![self.ip_protocol(number)?, self.ip6_protocol(number)?]))
    }

    fn first_fragment(&self) -> Result<Tree, Refusal> {
        Ok(self.field(6, 2)?.masked(0x1fff, 0))
    }

    fn protocol(&self, protocol: Protocol) -> Result<Tree, Refusal> {
        match protocol {
            Protocol::Ether => Err("ether alone says nothing; every packet here has it".to_owned()),
            Protocol::Ip => self.ethertype(names::IP),
            Protocol::Ip6 => self.ethertype(names::IP6),
            Protocol::Arp => self.ethertype(names::ARP),
            Protocol::Rarp => self.ethertype(names::RARP),
            Protocol::Tcp => self.any_ip_protocol(names::TCP),
            Protocol::Udp => self.any_ip_protocol(names::UDP),
            Protocol::Sctp => self.any_ip_protocol(names::SCTP),
            Protocol::Icmp => self.ip_protocol(names::ICMP),
            Protocol::Icmp6 => self.ip6_protocol(names::ICMP6),
            Protocol::Igmp => self.ip_protocol(names::IGMP),
            Protocol::Igrp => self.ip_protocol(names::IGRP),
            Protocol::Pim => self.any_ip_protocol(names::PIM),
            Protocol::Vrrp => self.ip_protocol(names::VRRP),
            Protocol::Ah => self.any_ip_protocol(names::AH),
            Protocol::Esp => self.any_ip_protocol(names::ESP),
        }
    }

    fn vlan(&mut self, id: Option<u32>) -> Result<Tree, Refusal> {
        let tags = names::VLAN.map(|ethertype| self.ethertype(ethertype));
        let tagged = Tree::Any(tags.into_iter().collect::<Result<_, _>>()?);
        let tree = match id {
            None => tagged,
            Some(id @ 0..=0xfff) => Tree::All(vec![tagged, self.field(0, 2)?.masked(0xfff, id)]),
            Some(_) => return Err("a VLAN id is 4095 at most".to_owned()),
        };
        self.link_type += 4;
        self.payload += 4;
        Ok(tree)
    }

    fn relation(&self, left: Value, relation: Relation, right: Value) -> Result<Tree, Refusal> {
        let (value, relation, constant) = match (left, right) {
            (Value::Constant(left), Value::Constant(right)) => {
                return Ok(Tree::Always(match relation {
                    Relation::Greater => left > right,
                    Relation::GreaterOrEqual => left >= right,
                    Relation::Equal => left == right,
                    Relation::NotEqual => left != right,
                    Relation::LessOrEqual => left <= right,
                    Relation::Less => left < right,
                }));
            }
            (value, Value::Constant(constant)) => (value, relation, constant),
            (Value::Constant(constant), value) => (value, relation.mirrored(), constant),
            _ => return Err("one side of a comparison must be a constant".to_owned()),
        };
        let (mut tests, load, mask) = match value {
            Value::Field { protocol, offset, size, mask } => {
                let (tests, load) = self.header_field(protocol, offset, size)?;
                (tests, load, mask)
            }
            Value::Length { mask } => (Vec::new(), Load::LENGTH, mask),
            Value::Constant(_) => (Vec::new(), Load::LENGTH, 0),
        };
        let test = |low, high| Tree::Test(Test { load, mask, low, high });
        tests.push(match relation {
            Relation::Equal => test(constant, constant),
            Relation::NotEqual => test(constant, constant).negated(),
            Relation::GreaterOrEqual => test(constant, u32::MAX),
            Relation::Less => test(constant, u32::MAX).negated(),
            Relation::LessOrEqual => test(0, constant),
            Relation::Greater => test(0, constant).negated(),
        });
        Ok(Tree::All(tests))
    }

    /// `protocol[offset:size]`, and the tests that the packet has such a header.
    fn header_field(&self, protocol: Protocol, offset: u32, size: u8) -> Result<(Vec<Tree>, Load), Refusal> {
        Ok(match protocol {
            Protocol::Ether => (Vec::new(), load(offset, size)?),
            Protocol::Ip | Protocol::Ip6 | Protocol::Arp | Protocol::Rarp => {
                (vec![self.protocol(protocol)?], self.field(offset, size)?)
            }
            Protocol::Icmp6 => {
                let tests = vec![self.ethertype(names::IP6)?, self.field(6, 1)?.equals(names::ICMP6)];
                (tests, self.field(offset.saturating_add(40), size)?)
            }
            Protocol::Ah | Protocol::Esp => {
                return Err("the fields of this protocol are not supported".to_owned());
            }
            _ => {
                let tests =
                    vec![self.ethertype(names::IP)?, self.protocol(protocol)?, self.first_fragment()?];
                (tests, self.behind_ipv4(offset, size)?)
            }
        })
    }

    fn id(&self, qualifiers: Qualifiers, id: &Id) -> Result<Tree, Refusal> {
        let Qualifiers { protocol, direction, kind } = qualifiers;
        match kind {
            Kind::Host | Kind::Net => self.address(protocol, direction, kind, id),
            Kind::Port => {
                let (port, only) = match id {
                    Id::Number(port) => (*port, None),
                    Id::Name(name) => {
                        names::service(name).ok_or("this service is not known, give its port as a number")?
                    }
                    _ => return Err("a port is a number".to_owned()),
                };
                self.ports(protocol, direction, port, port, only)
            }
            Kind::PortRange => {
                let (first, last) = match id {
                    Id::Number(port) => (*port, *port),
                    Id::Name(range) => range
                        .split_once('-')
                        .and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)))
                        .ok_or("a range of ports is two numbers, such as 6000-6008")?,
                    _ => return Err("a range of ports is two numbers, such as 6000-6008".to_owned()),
                };
                self.ports(protocol, direction, first.min(last), first.max(last), None)
            }
            Kind::Proto => self.numbered_protocol(protocol, id),
        }
    }

    fn address(
        &self,
        protocol: Option<Protocol>,
        direction: Direction,
        kind: Kind,
        id: &Id,
    ) -> Result<Tree, Refusal> {
        let (address, mask) = match *id {
            Id::Mac(address) if protocol == Some(Protocol::Ether) && kind == Kind::Host => {
                let source = self.ether_address(6, address)?;
                return Ok(directed(direction, source, self.ether_address(0, address)?));
            }
            Id::Mac(_) => {
                return Err("an Ethernet address needs 'ether host', 'ether src' or 'ether dst'".to_owned());
            }
            _ if protocol == Some(Protocol::Ether) => {
                return Err("ether needs an Ethernet address".to_owned());
            }
            Id::Ipv6 { prefix, .. } if prefix < 128 && kind == Kind::Host => {
                return Err("a host has no prefix length; use net".to_owned());
            }
            Id::Ipv6 { address, prefix } => {
                if !matches!(protocol, None | Some(Protocol::Ip6)) {
                    return Err("an IPv6 address goes with ip6 only".to_owned());
                }
                let source = self.ip6_address(8, address, prefix)?;
                return Ok(directed(direction, source, self.ip6_address(24, address, prefix)?));
            }
            Id::Ipv4Net { .. } if kind == Kind::Host => return Err("a host has no mask; use net".to_owned()),
            Id::Ipv4Net { address, mask } => (address, mask),
            Id::Ipv4 { address, bits } => (address, u32::MAX << (32 - bits)),
            // The number of a class A, B or C network, from the times when networks had classes.
            Id::Number(number @ 1..) if kind == Kind::Net => {
                let spare = number.leading_zeros() / 8 * 8;
                (number << spare, u32::MAX << spare)
            }
            Id::Number(number) => (number, u32::MAX),
            Id::Name(_) => return Err("names are not looked up; give an address".to_owned()),
        };
        let at = |ethertype, source, destination| -> Result<Tree, Refusal> {
            let one = |offset| -> Result<Tree, Refusal> {
                let test = self.field(offset, 4)?.masked(mask, address);
                Ok(Tree::All(vec![self.ethertype(ethertype)?, test]))
            };
            Ok(directed(direction, one(source)?, one(destination)?))
        };
        match protocol {
            None => {
                Ok(Tree::Any(vec![at(names::IP, 12, 16)?, at(names::ARP, 14, 24)?, at(names::RARP, 14, 24)?]))
            }
            Some(Protocol::Ip) => at(names::IP, 12, 16),
            Some(Protocol::Arp) => at(names::ARP, 14, 24),
            Some(Protocol::Rarp) => at(names::RARP, 14, 24),
            Some(_) => Err("an IPv4 address goes with ip, arp or rarp only".to_owned()),
        }
    }

    /// An Ethernet address at this offset; its last four bytes are looked at first.
    fn ether_address(&self, offset: u32, address: [u8; 6]) -> Result<Tree, Refusal> {
        let [a, b, c, d, e, f] = address;
        let rest = load(offset + 2, 4)?.equals(u32::from_be_bytes([c, d, e, f]));
        Ok(Tree::All(vec![rest, load(offset, 2)?.equals(u16::from_be_bytes([a, b]).into())]))
    }

    fn ip6_address(&self, offset: u32, address: u128, prefix: u32) -> Result<Tree, Refusal> {
        let mask = u128::MAX.checked_shl(128 - prefix).unwrap_or(0);
        let mut tests = vec![self.ethertype(names::IP6)?];
        for word in 0..4 {
            let part = |bits: u128| (bits >> (96 - 32 * word)) as u32;
            tests.push(self.field(offset + 4 * word, 4)?.masked(part(mask), part(address)));
        }
        Ok(Tree::All(tests))
    }

    /// Ports from `first` to `last`; `only`: a service of this protocol.
    fn ports(
        &self,
        protocol: Option<Protocol>,
        direction: Direction,
        first: u32,
        last: u32,
        only: Option<u32>,
    ) -> Result<Tree, Refusal> {
        let asked = match protocol {
            None => None,
            Some(Protocol::Tcp) => Some(names::TCP),
            Some(Protocol::Udp) => Some(names::UDP),
            Some(Protocol::Sctp) => Some(names::SCTP),
            Some(_) => return Err("only tcp, udp and sctp have ports".to_owned()),
        };
        if last > 0xffff {
            return Err("a port is 65535 at most".to_owned());
        }
        let protocols = match (asked, only) {
            (None, None) => vec![names::TCP, names::UDP, names::SCTP],
            (Some(asked), Some(only)) if asked != only => {
                return Err("this service has another protocol".to_owned());
            }
            (Some(one), _) | (None, Some(one)) => vec![one],
        };
        let ports = |source: Load, destination: Load| {
            directed(direction, source.within(first, last), destination.within(first, last))
        };
        let (mut v6, mut v4) = (Vec::new(), Vec::new());
        for protocol in protocols {
            let ports6 = ports(self.field(40, 2)?, self.field(42, 2)?);
            v6.push(Tree::All(vec![self.field(6, 1)?.equals(protocol), ports6]));
            let ports4 = ports(self.behind_ipv4(0, 2)?, self.behind_ipv4(2, 2)?);
            v4.push(Tree::All(vec![self.field(9, 1)?.equals(protocol), self.first_fragment()?, ports4]));
        }
        // libpcap tests sctp first, and IPv6 first; tests of one field can change places.
        Ok(Tree::Any(vec![
            Tree::All(vec![self.ethertype(names::IP)?, Tree::Any(v4)]),
            Tree::All(vec![self.ethertype(names::IP6)?, Tree::Any(v6)]),
        ]))
    }

    /// `ip proto 6`, `ether proto \arp` and the like.
    fn numbered_protocol(&self, protocol: Option<Protocol>, id: &Id) -> Result<Tree, Refusal> {
        let lookup = match protocol {
            None | Some(Protocol::Ip | Protocol::Ip6) => names::ip_protocol,
            Some(Protocol::Ether) => names::ethertype,
            Some(_) => return Err("only ether, ip and ip6 have a protocol number".to_owned()),
        };
        let number = match id {
            Id::Number(number) => *number,
            Id::Name(name) => lookup(name).ok_or("this protocol is not known, give its number")?,
            _ => return Err("a protocol is a number or a name".to_owned()),
        };
        match protocol {
            Some(Protocol::Ether) => self.ether_protocol(number),
            Some(Protocol::Ip) => self.ip_protocol(number),
            Some(Protocol::Ip6) => self.ip6_protocol(number),
            _ => self.any_ip_protocol(number),
        }
    }

    fn ether_protocol(&self, number: u32) -> Result<Tree, Refusal> {
        /// IPX and AppleTalk, which have several encapsulations.
        const SEVERAL: [u32; 3] = [0xe0, 0x809b, 0x80f3];
        if SEVERAL.contains(&number) {
            return Err("this protocol is not supported".to_owned());
        }
        if number > MAX_ETHERNET_LENGTH {
            return self.ethertype(number);
        }
        // A service access point: a frame with a length, and an LLC header behind it.
        let has_length = load(self.link_type, 2)?.within(0, MAX_ETHERNET_LENGTH);
        let test = match number {
            // For ISO, IP and NetBEUI both the source and the destination.
            0xfe | 0x06 | 0xf0 => self.field(0, 2)?.equals(number << 8 | number),
            _ => self.field(0, 1)?.equals(number),
        };
        Ok(Tree::All(vec![has_length, test]))
    }
}

/// A load from the start of the frame.
fn load(offset: u32, size: u8) -> Result<Load, Refusal> {
    if offset.saturating_add(u32::from(size)) > LEN_OFFSET as u32 {
        return Err(format!("this looks beyond the first {LEN_OFFSET} bytes of the frame"));
    }
    Ok(Load { offset: offset as u8, size, ip_header: 0 })
}
