//! Tests and how they are combined: what the code generator hands to the optimiser.

use super::ast::Direction;

/// One test of a frame, as a step of a program does it: whether `load & mask` lies in `low..=high`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Test {
    pub(super) load: Load,
    pub(super) mask: u32,
    pub(super) low: u32,
    pub(super) high: u32,
}

/// The load of a test; the fields are those of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Load {
    pub(super) offset: u8,
    pub(super) size: u8,
    pub(super) ip_header: u8,
}

/// Evaluated from left to right, no farther than needed.
#[derive(Debug, Clone)]
pub(super) enum Tree {
    Always(bool),
    Test(Test),
    Not(Box<Tree>),
    All(Vec<Tree>),
    Any(Vec<Tree>),
}

impl Load {
    /// The length of the frame.
    pub(super) const LENGTH: Self = Self { offset: 0, size: 0, ip_header: 0 };

    /// The greatest value that can be loaded.
    pub(super) fn greatest(self) -> u32 {
        match self.size {
            1 => 0xff,
            2 => 0xffff,
            _ => u32::MAX,
        }
    }

    pub(super) fn within(self, low: u32, high: u32) -> Tree {
        Tree::Test(Test { load: self, mask: u32::MAX, low, high })
    }

    pub(super) fn equals(self, value: u32) -> Tree {
        self.within(value, value)
    }

    pub(super) fn masked(self, mask: u32, value: u32) -> Tree {
        Tree::Test(Test { load: self, mask, low: value, high: value })
    }
}

impl Tree {
    pub(super) fn negated(self) -> Self {
        Self::Not(Box::new(self))
    }
}

/// The source field or the destination field, by the direction.
pub(super) fn directed(direction: Direction, source: Tree, destination: Tree) -> Tree {
    match direction {
        Direction::Src => source,
        Direction::Dst => destination,
        Direction::Either | Direction::SrcOrDst => Tree::Any(vec![source, destination]),
        Direction::SrcAndDst => Tree::All(vec![source, destination]),
    }
}
