//! Numbers that a frame has: what a test looks at.
//!
//! The code generator builds values with the functions here, which compute what is constant and join sums. The
//! optimiser compares values, and the layout turns them into instructions.

use std::rc::Rc;

use super::ast::Operator;

/// A number of 32 bits without a sign. A frame that has no such number (it ends before a field, or there is a division
/// by zero) is rejected.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Value {
    Constant(u32),
    /// The length of the frame on the wire.
    Length,
    /// Bytes of the frame.
    Field(Field),
    /// The length of the IPv4 header that begins at this byte.
    Ipv4Header(u32),
    /// What a `Set` has left in this slot.
    Slot(Slot),
    Binary(Operator, Rc<(Value, Value)>),
    /// 1 if the first is greater than the second, else 0.
    Greater(Rc<(Value, Value)>),
}

/// `size` bytes (1, 2 or 4) at `start` + `offset`, in network order. The sum does not wrap around.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Field {
    /// `None`: the start of the frame.
    pub(super) start: Option<Rc<Value>>,
    pub(super) offset: u32,
    pub(super) size: u8,
}

/// A place of a program's memory. What the frame says about the places of headers is computed once and kept there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Slot {
    /// Where the Ethernet header inside of Geneve begins. Where there is none, the packet inside.
    Link,
    /// Where the type of the packet inside of Geneve is.
    LinkType,
    /// Where the packet inside of Geneve begins.
    Payload,
    /// Of the chain of headers: the number of the next header.
    NextHeader,
    /// Of the chain of headers: where the next header begins.
    NextHeaderAt,
}

/// The longest IPv4 header, in bytes.
pub(super) const MAX_IPV4_HEADER: u32 = 60;

impl Value {
    /// Bytes at a fixed place of the frame.
    pub(super) fn fixed(offset: u32, size: u8) -> Self {
        Self::Field(Field { start: None, offset, size })
    }

    /// Bytes at a place behind `start`, which wraps around as classic BPF's index register does; the sum with `offset`
    /// does not.
    pub(super) fn behind(start: Self, offset: u32, size: u8) -> Self {
        if let Self::Constant(start) = start {
            return Self::fixed(start.saturating_add(offset), size);
        }
        if let Self::Binary(Operator::Add, parts) = &start
            && let (left, Self::Constant(more)) = &**parts
            && left.greatest().checked_add(*more).is_some()
        {
            return Self::behind(left.clone(), offset.saturating_add(*more), size);
        }
        Self::Field(Field { start: Some(Rc::new(start)), offset, size })
    }

    /// The result of an operator. A constant stands on the right where the operator allows it.
    pub(super) fn binary(operator: Operator, left: Self, right: Self) -> Self {
        use Operator::{Add, And, Multiply, Or, Xor};
        match (operator, left, right) {
            (_, Self::Constant(left), Self::Constant(right)) if operator.apply(left, right).is_some() => {
                Self::Constant(operator.apply(left, right).unwrap_or(0))
            }
            (Add | And | Multiply | Or | Xor, Self::Constant(left), right) => {
                Self::binary(operator, right, Self::Constant(left))
            }
            (Add, left, Self::Constant(0)) => left,
            (Add | And, Self::Binary(inner, parts), Self::Constant(more)) if inner == operator => {
                match &*parts {
                    (left, Self::Constant(constant)) => {
                        let joined = operator.apply(*constant, more).unwrap_or(0);
                        Self::binary(operator, left.clone(), Self::Constant(joined))
                    }
                    _ => Self::Binary(operator, Rc::new((Self::Binary(inner, parts), Self::Constant(more)))),
                }
            }
            (_, left, right) => Self::Binary(operator, Rc::new((left, right))),
        }
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self::binary(Operator::Add, self, other)
    }

    /// The greatest number that it can be.
    pub(super) fn greatest(&self) -> u32 {
        match self {
            Self::Constant(constant) => *constant,
            Self::Field(Field { size: 1, .. }) => 0xff,
            Self::Field(Field { size: 2, .. }) => 0xffff,
            Self::Ipv4Header(_) => MAX_IPV4_HEADER,
            Self::Greater(_) => 1,
            Self::Length | Self::Field(_) | Self::Slot(_) => u32::MAX,
            Self::Binary(operator, parts) => {
                let (left, right) = (parts.0.greatest(), &parts.1);
                match (operator, right) {
                    (Operator::And, _) => left.min(right.greatest()),
                    (Operator::Add, _) => left.saturating_add(right.greatest()),
                    (Operator::ShiftRight, Self::Constant(bits)) => left.checked_shr(*bits).unwrap_or(0),
                    (Operator::ShiftLeft, Self::Constant(bits)) if *bits < left.leading_zeros() => {
                        left << bits
                    }
                    (Operator::Divide | Operator::ShiftRight, _) => left,
                    (Operator::Remainder, _) => left.min(right.greatest()),
                    _ => u32::MAX,
                }
            }
        }
    }

    /// The values that this one is computed from, and then itself: `visit` sees each before those that depend on it.
    pub(super) fn visit<'a>(&'a self, visit: &mut impl FnMut(&'a Self)) {
        match self {
            Self::Field(Field { start: Some(start), .. }) => start.visit(visit),
            Self::Binary(_, parts) | Self::Greater(parts) => {
                parts.0.visit(visit);
                parts.1.visit(visit);
            }
            _ => {}
        }
        visit(self);
    }

    /// The slots that it is computed from.
    pub(super) fn slots(&self) -> Slots {
        let mut slots = Slots::default();
        self.visit(&mut |value| {
            if let Self::Slot(slot) = value {
                slots.insert(*slot);
            }
        });
        slots
    }
}

/// A set of slots.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Slots(u8);

impl Slots {
    pub(super) fn insert(&mut self, slot: Slot) {
        self.0 |= 1 << slot as u8;
    }

    pub(super) fn contains(self, slot: Slot) -> bool {
        self.0 & 1 << slot as u8 != 0
    }

    pub(super) fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(super) fn without(self, slot: Slot) -> Self {
        Self(self.0 & !(1 << slot as u8))
    }
}
