//! Tests and their combinations: the output of the code generator.

use super::{
    ast::{Direction, Operator},
    value::{Slot, Value},
};

/// One test of a frame: whether `value & mask` is in `low..=high`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Test {
    pub(super) value: Value,
    pub(super) mask: u32,
    pub(super) low: u32,
    pub(super) high: u32,
}

/// Evaluated from left to right, until the result is known.
#[derive(Debug, Clone)]
pub(super) enum Tree {
    Always(bool),
    Test(Test),
    /// Stores a value in a slot. Always passes.
    Set(Slot, Value),
    Not(Box<Tree>),
    All(Vec<Tree>),
    Any(Vec<Tree>),
}

impl Value {
    pub(super) fn within(self, low: u32, high: u32) -> Tree {
        let (value, mask) = match self {
            Self::Constant(constant) => return Tree::Always((low..=high).contains(&constant)),
            Self::Binary(Operator::And, parts) => match &*parts {
                (left, Self::Constant(mask)) => (left.clone(), *mask),
                _ => (Self::Binary(Operator::And, parts), u32::MAX),
            },
            other => (other, u32::MAX),
        };
        // A mask that removes no bit is dropped.
        let bits = u32::MAX.checked_shr(value.greatest().leading_zeros()).unwrap_or(0);
        let mask = if mask & bits == bits { u32::MAX } else { mask };
        Tree::Test(Test { value, mask, low, high })
    }

    pub(super) fn equals(self, value: u32) -> Tree {
        self.within(value, value)
    }

    pub(super) fn masked(self, mask: u32, value: u32) -> Tree {
        Self::binary(Operator::And, self, Self::Constant(mask)).equals(value)
    }
}

impl Tree {
    pub(super) fn negated(self) -> Self {
        Self::Not(Box::new(self))
    }
}

/// The test of the source field, the destination field or both, by direction.
pub(super) fn directed(direction: Direction, source: Tree, destination: Tree) -> Tree {
    match direction {
        Direction::Src => source,
        Direction::Dst => destination,
        Direction::Either | Direction::SrcOrDst => Tree::Any(vec![source, destination]),
        Direction::SrcAndDst => Tree::All(vec![source, destination]),
    }
}
