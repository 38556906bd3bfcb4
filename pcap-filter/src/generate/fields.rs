//! Relations: header fields, and arithmetic with them.

use super::{
    super::{
        ast::{Arithmetic, Operator, Protocol, Relation},
        names,
        tree::Tree,
        value::Value,
    },
    Generator, Made, Refusal,
};
use std::rc::Rc;

/// A value, and the tests that a packet must pass to have it.
struct Number {
    value: Value,
    tests: Vec<Tree>,
}

impl Generator {
    pub(super) fn relation(&self, left: &Arithmetic, relation: Relation, right: &Arithmetic) -> Made {
        let (left, right) = (self.number(left)?, self.number(right)?);
        let mut tests = [left.tests, right.tests].concat();
        tests.push(match (left.value, right.value) {
            (value, Value::Constant(constant)) => compared(value, relation, constant),
            (Value::Constant(constant), value) => compared(value, relation.mirrored(), constant),
            (left, right) => match relation {
                Relation::Equal => difference(left, right),
                Relation::NotEqual => difference(left, right).negated(),
                Relation::Greater => greater(left, right),
                Relation::Less => greater(right, left),
                Relation::GreaterOrEqual => greater(right, left).negated(),
                Relation::LessOrEqual => greater(left, right).negated(),
            },
        });
        Ok(Tree::All(tests))
    }

    fn number(&self, arithmetic: &Arithmetic) -> Result<Number, Refusal> {
        Ok(match arithmetic {
            Arithmetic::Number(number) => Number { value: Value::Constant(*number), tests: Vec::new() },
            Arithmetic::Length => Number { value: Value::Length, tests: Vec::new() },
            Arithmetic::Negated(inner) => {
                let Number { value, tests } = self.number(inner)?;
                Number { value: Value::binary(Operator::Subtract, Value::Constant(0), value), tests }
            }
            Arithmetic::Binary(operator, left, right) => {
                let (left, right) = (self.number(left)?, self.number(right)?);
                // As in libpcap, where it is perhaps an oversight, there is no test that the packet has the header of
                // the right side.
                Number { value: Value::binary(*operator, left.value, right.value), tests: left.tests }
            }
            Arithmetic::Field { protocol, index, size } => self.field(*protocol, index, *size)?,
        })
    }

    fn field(&self, protocol: Protocol, index: &Arithmetic, size: u8) -> Result<Number, Refusal> {
        let Number { value: index, tests } = self.number(index)?;
        let layers = &self.layers;
        let network = layers.payload.plus(layers.network);
        let with = |mut tests: Vec<Tree>, more: Vec<Tree>| {
            tests.extend(more);
            tests
        };
        Ok(match protocol {
            Protocol::Ether => Number { value: layers.link.indexed(index, size), tests },
            Protocol::Ip
            | Protocol::Ip6
            | Protocol::Arp
            | Protocol::Rarp
            | Protocol::Atalk
            | Protocol::Decnet
            | Protocol::Lat
            | Protocol::Sca
            | Protocol::MopDl
            | Protocol::MopRc => Number {
                value: network.indexed(index, size),
                tests: with(tests, vec![self.protocol(protocol)?]),
            },
            Protocol::Icmp6 => Number {
                value: network.plus(40).indexed(index, size),
                tests: with(
                    tests,
                    vec![self.link_type(names::IP6)?, self.network(6, 1).equals(names::ICMP6)],
                ),
            },
            Protocol::Tcp
            | Protocol::Udp
            | Protocol::Sctp
            | Protocol::Icmp
            | Protocol::Igmp
            | Protocol::Igrp
            | Protocol::Pim
            | Protocol::Vrrp
            | Protocol::Carp => {
                let ip = vec![self.link_type(names::IP)?];
                let header = vec![self.protocol(protocol)?, self.first_fragment()];
                Number {
                    value: Value::behind(layers.behind_ipv4().plus(index), network.offset, size),
                    tests: with(with(ip, tests), header),
                }
            }
            _ => return Err("the fields of this protocol are not supported".to_owned()),
        })
    }
}

fn compared(value: Value, relation: Relation, constant: u32) -> Tree {
    match relation {
        Relation::Equal => value.equals(constant),
        Relation::NotEqual => value.equals(constant).negated(),
        Relation::GreaterOrEqual => value.within(constant, u32::MAX),
        Relation::Less => value.within(constant, u32::MAX).negated(),
        Relation::LessOrEqual => value.within(0, constant),
        Relation::Greater => value.within(0, constant).negated(),
    }
}

fn difference(left: Value, right: Value) -> Tree {
    Value::Binary(Operator::Subtract, Rc::new((left, right))).equals(0)
}

fn greater(left: Value, right: Value) -> Tree {
    Value::Greater(Rc::new((left, right))).equals(1)
}
