//! The capture filter: an expression of pcap-filter(7), compiled to the program that the tap programs evaluate.
//!
//! ```text
//! text ─ lexer ─ parse ─► ast ─ generate ─► tree of tests ─► graph ─ optimise ─► FilterProgram ─ explain ─► lines
//! ```
//!
//! Pure, called by `cmd` and by the readers of the mirrors' filters. The compiler knows only the places of fields in
//! packets; evaluation is `mirror_common::filter`. No crate does this for us: the crates that compile the language
//! (`pktbaffle` is the best of them, and young) make classic BPF with arithmetic and scratch memory, and bind filters
//! less tightly.

mod ast;
mod explain;
mod facts;
mod generate;
mod graph;
mod lexer;
mod names;
mod optimise;
mod parse;
#[cfg(test)]
mod tests;
mod tree;

use std::ops::Range;

use mirror_common::filter::{ACCEPT, FilterProgram, FilterStep, MAX_FILTER_STEPS, REJECT};
use thiserror::Error;

use self::{
    ast::{Expr, ExprKind},
    graph::{Graph, Next, Node},
    tree::{Load, Test},
};

pub use self::explain::explain;

/// Why an expression cannot be compiled.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{reason}: {} at byte {position} of the filter", if part.is_empty() { "the end".to_owned() } else { format!("{part:?}") })]
pub struct FilterError {
    /// Where the part begins, in bytes from the start of the expression.
    pub position: usize,
    /// The part that is wrong; empty: the end.
    pub part: String,
    /// The problem.
    pub reason: String,
}

impl FilterError {
    fn at(text: &str, span: Range<usize>, reason: impl Into<String>) -> Self {
        let part = text.get(span.clone()).unwrap_or_default().to_owned();
        Self { position: span.start, part, reason: reason.into() }
    }

    /// This one, unless the other is farther on in the expression.
    fn or_farther(self, other: Self) -> Self {
        if other.position > self.position { other } else { self }
    }
}

/// The largest number of tests that the compiler optimises: many more than a program has steps. Filters come from
/// authors who may not be trusted, and must not keep the agent busy.
const MAX_NODES: usize = 2000;

/// Compiles an expression.
pub fn compile(text: &str) -> Result<FilterProgram, FilterError> {
    let expr = parse::parse(text)?;
    if let Some(program) = program(text, &expr)? {
        return Ok(program);
    }
    let reason =
        format!("the filter is too large: with this part it needs more than {MAX_FILTER_STEPS} steps");
    Err(FilterError::at(text, too_much(text, &expr).span.clone(), reason))
}

/// The program of an expression; `None`: it does not fit.
fn program(text: &str, expr: &Expr) -> Result<Option<FilterProgram>, FilterError> {
    let graph = Graph::of(&generate::generate(text, expr)?);
    if graph.nodes.len() > MAX_NODES {
        return Ok(None);
    }
    let graph = optimise::optimise(graph);
    if graph.entry == Next::Reject {
        return Err(FilterError::at(text, expr.span.clone(), "no packet can match this"));
    }
    Ok(laid_out(&graph))
}

/// The first part of a sequence with which the program no longer fits.
fn too_much<'a>(text: &str, whole: &'a Expr) -> &'a Expr {
    let mut beginnings = vec![(whole, whole)];
    let mut expr = whole;
    while let ExprKind::And(left, right) | ExprKind::Or(left, right) = &expr.kind {
        if let Some((_, last)) = beginnings.last_mut() {
            *last = right;
        }
        beginnings.push((left, left));
        expr = left;
    }
    beginnings.reverse();
    let first = beginnings.partition_point(|(beginning, _)| !matches!(program(text, beginning), Ok(None)));
    beginnings.get(first).map_or(whole, |(_, last)| last)
}

/// The nodes that are reached, each before those that it leads to.
fn steps(graph: &Graph) -> Vec<(usize, Node)> {
    let mut reached = vec![false; graph.nodes.len()];
    let mark = |reached: &mut [bool], target| {
        if let Next::Node(index) = target
            && let Some(place) = reached.get_mut(index)
        {
            *place = true;
        }
    };
    mark(&mut reached, graph.entry);
    let mut order = Vec::new();
    for (index, node) in graph.nodes.iter().enumerate().rev() {
        if reached.get(index) == Some(&true) {
            mark(&mut reached, node.on_true);
            mark(&mut reached, node.on_false);
            order.push((index, *node));
        }
    }
    order
}

/// The program of a graph; `None`: it does not fit.
fn laid_out(graph: &Graph) -> Option<FilterProgram> {
    let order = steps(graph);
    let mut program = FilterProgram::default();
    if graph.entry == Next::Accept {
        // The result does not depend on the frame: a step that every frame passes.
        let test = Test { load: Load::LENGTH, mask: 0, low: 0, high: 0 };
        *program.steps.first_mut()? = step(&test, ACCEPT, ACCEPT);
        program.len = 1;
        return Some(program);
    }
    let jump = |target: Next| match target {
        Next::Accept => Some(ACCEPT),
        Next::Reject => Some(REJECT),
        Next::Node(index) => order.iter().position(|(node, _)| *node == index)?.try_into().ok(),
    };
    for (place, (_, node)) in order.iter().enumerate() {
        *program.steps.get_mut(place)? = step(&node.test, jump(node.on_true)?, jump(node.on_false)?);
        program.len += 1;
    }
    Some(program)
}

fn step(test: &Test, jump_true: u8, jump_false: u8) -> FilterStep {
    let Test { load: Load { offset, size, ip_header }, mask, low, high } = *test;
    let span = high.saturating_sub(low);
    FilterStep { mask, low, span, jump_true, jump_false, ..FilterStep::load(offset, size, ip_header) }
}
