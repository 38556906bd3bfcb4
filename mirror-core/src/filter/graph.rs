//! A program as a graph of tests without cycles, before it is laid out as steps.
//!
//! Built backwards, so that a node only leads to nodes made before it: a higher number is nearer to the start. Two
//! equal nodes are one.

use std::collections::HashMap;

use super::tree::{Test, Tree};

/// Where a test leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Next {
    Accept,
    Reject,
    Node(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Node {
    pub(super) test: Test,
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
            Tree::Test(test) => self.add(Node { test: *test, on_true, on_false }),
            Tree::Not(inner) => self.add_tree(inner, on_false, on_true),
            Tree::All(parts) => {
                parts.iter().rev().fold(on_true, |next, part| self.add_tree(part, next, on_false))
            }
            Tree::Any(parts) => {
                parts.iter().rev().fold(on_false, |next, part| self.add_tree(part, on_true, next))
            }
        }
    }

    /// Adds a node, unless it is there already or nothing depends on it.
    pub(super) fn add(&mut self, node: Node) -> Next {
        // A load beyond the frame rejects too.
        if (node.on_true, node.on_false) == (Next::Reject, Next::Reject) {
            return Next::Reject;
        }
        let next = self.nodes.len();
        let index = *self.known.entry(node).or_insert(next);
        if index == next {
            self.nodes.push(node);
        }
        Next::Node(index)
    }

    /// The node at a target, if that is one.
    pub(super) fn node(&self, target: Next) -> Option<Node> {
        match target {
            Next::Node(index) => self.nodes.get(index).copied(),
            Next::Accept | Next::Reject => None,
        }
    }
}
