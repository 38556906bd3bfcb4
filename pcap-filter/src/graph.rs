//! A program as an acyclic graph of tests, before it is laid out as instructions.
//!
//! The graph is built backwards, so that a node leads only to nodes that were added before it: a higher number is
//! nearer to the start. Equal nodes are merged.

use std::collections::HashMap;

use super::{
    tree::{Test, Tree},
    value::{Slot, Value},
};

/// The target of a branch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Next {
    Accept,
    Reject,
    Node(usize),
}

/// The action of a node.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Action {
    Test(Test),
    /// Stores a value in a slot. Both branches are the same.
    Set(Slot, Value),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Node {
    pub(super) action: Action,
    pub(super) on_true: Next,
    pub(super) on_false: Next,
}

#[derive(Debug, Clone)]
pub(super) struct Graph {
    pub(super) nodes: Vec<Node>,
    pub(super) entry: Next,
    known: HashMap<Node, usize>,
}

impl Graph {
    pub(super) fn empty() -> Self {
        Self { nodes: Vec::new(), entry: Next::Reject, known: HashMap::new() }
    }

    pub(super) fn of(tree: &Tree) -> Self {
        let mut graph = Self::empty();
        graph.entry = graph.add_tree(tree, Next::Accept, Next::Reject);
        graph
    }

    fn add_tree(&mut self, tree: &Tree, on_true: Next, on_false: Next) -> Next {
        match tree {
            Tree::Always(true) => on_true,
            Tree::Always(false) => on_false,
            Tree::Test(test) => self.add(Node { action: Action::Test(test.clone()), on_true, on_false }),
            Tree::Set(slot, value) => {
                let action = Action::Set(*slot, value.clone());
                self.add(Node { action, on_true, on_false: on_true })
            }
            Tree::Not(inner) => self.add_tree(inner, on_false, on_true),
            Tree::All(parts) => {
                parts.iter().rev().fold(on_true, |next, part| self.add_tree(part, next, on_false))
            }
            Tree::Any(parts) => {
                parts.iter().rev().fold(on_false, |next, part| self.add_tree(part, on_true, next))
            }
        }
    }

    /// Adds a node, unless it already exists or nothing depends on it.
    pub(super) fn add(&mut self, node: Node) -> Next {
        // A frame that does not have the value is rejected too.
        if (node.on_true, node.on_false) == (Next::Reject, Next::Reject) {
            return Next::Reject;
        }
        let next = self.nodes.len();
        let index = *self.known.entry(node.clone()).or_insert(next);
        if index == next {
            self.nodes.push(node);
        }
        Next::Node(index)
    }

    /// The node at a target, if the target is a node.
    pub(super) fn node(&self, target: Next) -> Option<&Node> {
        match target {
            Next::Node(index) => self.nodes.get(index),
            Next::Accept | Next::Reject => None,
        }
    }
}

impl Node {
    pub(super) fn target(&self, passed: bool) -> Next {
        if passed { self.on_true } else { self.on_false }
    }

    /// The value that the node computes from the frame.
    pub(super) fn value(&self) -> &Value {
        match &self.action {
            Action::Test(test) => &test.value,
            Action::Set(_, value) => value,
        }
    }
}
