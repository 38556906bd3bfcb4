//! Generates the tests of each primitive: the same tests as libpcap's code generator, in the same order.
//!
//! The order matters if a frame is truncated: the first load beyond its end rejects the frame. libpcap's optimiser
//! does not preserve the order (it removes and moves loads), but podmirror's does. So podmirror answers like
//! unoptimised libpcap on truncated frames. On whole frames it answers like libpcap, optimised or not.

mod addresses;
mod encapsulations;
mod fields;
mod layers;
mod ports;
mod protocols;

use std::ops::Range;

use self::layers::Layers;
use super::{
    FilterError,
    ast::{Expr, ExprKind, Id, Kind, Primitive, Protocol, Qualifiers},
    names,
    tree::Tree,
    value::Value,
};

/// The problem with a primitive as a whole.
type Refusal = String;
type Made = Result<Tree, Refusal>;

/// Generates the tests of an expression.
pub(super) fn generate(text: &str, expr: &Expr) -> Result<Tree, FilterError> {
    let mut generator = Generator { layers: Layers::default(), prepared: Vec::new() };
    let tree = generator.expression(text, expr)?;
    generator.prepared.push(tree);
    Ok(Tree::All(generator.prepared))
}

struct Generator {
    /// The places of headers for the next primitive.
    layers: Layers,
    /// Steps that must be done before the first test.
    prepared: Vec<Tree>,
}

impl Generator {
    fn expression(&mut self, text: &str, expr: &Expr) -> Result<Tree, FilterError> {
        let mut part = |expr| self.expression(text, expr);
        Ok(match &expr.kind {
            ExprKind::And(left, right) => Tree::All(vec![part(left)?, part(right)?]),
            ExprKind::Or(left, right) => Tree::Any(vec![part(left)?, part(right)?]),
            ExprKind::Not(inner) => part(inner)?.negated(),
            ExprKind::Primitive(primitive) => {
                let made = self.primitive(primitive);
                made.map_err(|reason| FilterError::at(text, Range::clone(&expr.span), reason))?
            }
        })
    }

    fn primitive(&mut self, primitive: &Primitive) -> Made {
        match primitive {
            Primitive::Protocol(protocol) => self.protocol(*protocol),
            Primitive::Id(qualifiers, id) => self.id(*qualifiers, id),
            Primitive::Broadcast(None | Some(Protocol::Ether)) => self.ether_address(0, [0xff; 6]),
            Primitive::Broadcast(Some(Protocol::Ip)) => {
                let destination = self.network(16, 4);
                let either = vec![destination.clone().equals(0), destination.equals(u32::MAX)];
                Ok(Tree::All(vec![self.link_type(names::IP)?, Tree::Any(either)]))
            }
            Primitive::Broadcast(_) => Err("only ether broadcast and ip broadcast are supported".to_owned()),
            Primitive::Multicast(None | Some(Protocol::Ether)) => {
                let group = self.layers.link.at(0, 1).masked(1, 1);
                self.in_ethernet(group)
            }
            Primitive::Multicast(Some(Protocol::Ip)) => {
                let group = self.network(16, 1).within(224, u32::MAX);
                Ok(Tree::All(vec![self.link_type(names::IP)?, group]))
            }
            Primitive::Multicast(Some(Protocol::Ip6)) => {
                Ok(Tree::All(vec![self.link_type(names::IP6)?, self.network(24, 1).equals(255)]))
            }
            Primitive::Multicast(_) => Err("only ether, ip and ip6 multicast are supported".to_owned()),
            Primitive::Encapsulation(encapsulation, number) => self.encapsulation(*encapsulation, *number),
            Primitive::PppoeDiscovery => self.link_type(names::PPPOE_DISCOVERY),
            Primitive::Llc(llc) => self.llc(*llc),
            Primitive::Relation(left, relation, right) => self.relation(left, *relation, right),
        }
    }

    fn id(&mut self, qualifiers: Qualifiers, id: &Id) -> Made {
        let Qualifiers { protocol, direction, kind } = qualifiers;
        match kind {
            Kind::Host | Kind::Net => self.address(protocol, direction, kind, id),
            Kind::Port => self.port(protocol, direction, id),
            Kind::PortRange => self.port_range(protocol, direction, id),
            Kind::Proto => self.numbered_protocol(protocol, id),
            Kind::ProtoChain => self.protocol_chain(protocol, id),
        }
    }

    /// A field of the network header, such as that of IP.
    fn network(&self, offset: u32, size: u8) -> Value {
        self.layers.payload.at(self.layers.network.saturating_add(offset), size)
    }
}
