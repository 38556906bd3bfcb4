//! Values of a frame, which tests compare.
//!
//! The code generator builds values with these functions, which evaluate constant parts and merge sums. The optimiser
//! compares values, and the layout turns them into instructions.

use std::rc::Rc;

use super::ast::Operator;

/// An unsigned 32-bit number. If a frame does not have the number (it ends before a field, or there is a division by
/// zero), the frame is rejected.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Value {
    Constant(u32),
    /// The length of the frame on the wire.
    Length,
    /// Bytes of the frame.
    Field(Field),
    /// The length of the IPv4 header that begins at this byte.
    Ipv4Header(u32),
    /// The value that a `Set` has stored in this slot.
    Slot(Slot),
    Binary(Operator, Rc<(Value, Value)>),
    /// 1 if the first is greater than the second, else 0.
    Greater(Rc<(Value, Value)>),
}

/// `size` bytes (1, 2 or 4) at `start` + `offset`, in network byte order. The sum does not wrap around.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Field {
    /// `None`: the start of the frame.
    pub(super) start: Option<Rc<Value>>,
    pub(super) offset: u32,
    pub(super) size: u8,
}

/// A place in a program's memory. Offsets of headers that depend on the frame are computed once and stored there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Slot {
    /// Offset of the Ethernet header inside Geneve, or of the inner packet if there is no such header.
    Link,
    /// Offset of the type of the packet inside Geneve.
    LinkType,
    /// Offset of the packet inside Geneve.
    Payload,
    /// In a chain of headers, the number of the next header.
    NextHeader,
    /// In a chain of headers, the offset of the next header.
    NextHeaderAt,
}

/// Maximum length of an IPv4 header, in bytes.
pub(super) const MAX_IPV4_HEADER: u32 = 60;

impl Value {
    /// Bytes at a fixed offset of the frame.
    pub(super) fn fixed(offset: u32, size: u8) -> Self {
        Self::Field(Field { start: None, offset, size })
    }

    /// Bytes at an offset from `start`. The value of `start` wraps around as classic BPF's index register does, but its
    /// sum with `offset` does not.
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

    /// The result of an operator. Constants are moved to the right side if the operator allows it.
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

    /// Upper bound of the value.
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

    /// Calls `visit` for the values that this one is computed from, and then for itself: each before those that depend
    /// on it.
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

    /// The slots that the value is computed from.
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
