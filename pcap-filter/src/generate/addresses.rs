//! Hosts, networks and Ethernet addresses.

use super::{
    super::{
        ast::{Direction, Id, Kind, Operator, Protocol},
        names,
        tree::{Tree, directed},
        value::{Slot, Value},
    },
    Generator, Made,
    layers::LinkKind,
};

impl Generator {
    pub(super) fn address(
        &self,
        protocol: Option<Protocol>,
        direction: Direction,
        kind: Kind,
        id: &Id,
    ) -> Made {
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
            _ if protocol == Some(Protocol::Decnet) => {
                return Err("the addresses of DECnet are not supported".to_owned());
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
            // The number of a class A, B or C network, from the time of classful networks.
            Id::Number(number @ 1..) if kind == Kind::Net => {
                let spare = number.leading_zeros() / 8 * 8;
                (number << spare, u32::MAX << spare)
            }
            Id::Number(number) => (number, u32::MAX),
            Id::Name(_) => return Err("names are not looked up; give an address".to_owned()),
        };
        let at = |ethertype, source, destination| -> Made {
            let one = |offset| -> Made {
                let test = self.network(offset, 4).masked(mask, address);
                Ok(Tree::All(vec![self.link_type(ethertype)?, test]))
            };
            Ok(directed(direction, one(source)?, one(destination)?))
        };
        match protocol {
            // MPLS carries no ARP.
            None if self.layers.labels > 0 => at(names::IP, 12, 16),
            None => {
                Ok(Tree::Any(vec![at(names::IP, 12, 16)?, at(names::ARP, 14, 24)?, at(names::RARP, 14, 24)?]))
            }
            Some(Protocol::Ip) => at(names::IP, 12, 16),
            Some(Protocol::Arp) => at(names::ARP, 14, 24),
            Some(Protocol::Rarp) => at(names::RARP, 14, 24),
            Some(_) => Err("an IPv4 address goes with ip, arp or rarp only".to_owned()),
        }
    }

    /// Tests an Ethernet address at this offset, its last four bytes first.
    pub(super) fn ether_address(&self, offset: u32, address: [u8; 6]) -> Made {
        let [a, b, c, d, e, f] = address;
        let rest = self.layers.link.at(offset + 2, 4).equals(u32::from_be_bytes([c, d, e, f]));
        let start = self.layers.link.at(offset, 2).equals(u16::from_be_bytes([a, b]).into());
        self.in_ethernet(Tree::All(vec![rest, start]))
    }

    /// Adds a test of the Ethernet header after the test that there is one.
    pub(super) fn in_ethernet(&self, test: Tree) -> Made {
        if self.layers.kind != LinkKind::Ethernet {
            return Err("inside of pppoes there is no Ethernet header".to_owned());
        }
        if !self.layers.in_geneve {
            return Ok(test);
        }
        let length = Value::binary(Operator::Subtract, Value::Slot(Slot::Payload), Value::Slot(Slot::Link));
        Ok(Tree::All(vec![length.equals(0).negated(), test]))
    }

    fn ip6_address(&self, offset: u32, address: u128, prefix: u32) -> Made {
        let mask = u128::MAX.checked_shl(128 - prefix).unwrap_or(0);
        let mut tests = vec![self.link_type(names::IP6)?];
        for word in 0..4 {
            let part = |bits: u128| (bits >> (96 - 32 * word)) as u32;
            tests.push(self.network(offset + 4 * word, 4).masked(part(mask), part(address)));
        }
        Ok(Tree::All(tests))
    }
}
