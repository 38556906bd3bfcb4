//! The capture filter: an expression of pcap-filter(7), compiled to the program that the tap programs evaluate.
//!
//! ```text
//! text ─ lexer ─ parse ─► ast ─ generate ─► tree of tests ─► graph ─ optimise ─► graph ─┬─ steps ─► FilterProgram ─ explain ─► lines
//!                                                                                       └─ classic ─► Program ─ ebpf ─► eBPF
//! ```
//!
//! Pure, called by `cmd` and by the readers of the mirrors' filters. There are two compilers with one front end:
//!
//! * [`compile`] makes the steps that the tap programs evaluate (`mirror_common::filter`). A step knows no arithmetic
//!   and sees the first 124 bytes, so this compiler refuses a part of the language.
//! * [`classic::compile`] makes classic BPF of the whole language. [`ebpf`] translates it for the kernel.
//!
//! No crate does this for us: the crates that compile the language (`pktbaffle` is the best of them, and young) bind
//! filters less tightly.

mod ast;
pub mod classic;
pub mod ebpf;
mod explain;
mod facts;
mod generate;
mod graph;
mod lexer;
mod names;
mod optimise;
mod parse;
mod steps;
#[cfg(test)]
mod tests;
mod tree;
mod value;

use std::ops::Range;

use mirror_common::filter::{FilterProgram, MAX_FILTER_STEPS};
use thiserror::Error;

use self::{
    ast::{Expr, ExprKind},
    graph::{Graph, Next},
    tree::Tree,
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

/// What the two compilers do not share.
struct Backend<T> {
    /// The largest number of tests that the compiler optimises. Filters come from authors who may not be trusted, and
    /// must not keep the agent busy.
    most_nodes: usize,
    /// The longest program, for people.
    most: &'static str,
    /// Refuses tests that its programs cannot do.
    check: fn(&Tree) -> Result<(), String>,
    /// The program of a graph; `None`: it does not fit.
    lay_out: fn(&Graph) -> Option<T>,
}

/// Compiles an expression to steps.
pub fn compile(text: &str) -> Result<FilterProgram, FilterError> {
    const { assert!(MAX_FILTER_STEPS == 128) };
    Backend { most_nodes: 2000, most: "128 steps", check: steps::check, lay_out: steps::lay_out }
        .compile(text)
}

impl<T> Backend<T> {
    fn compile(&self, text: &str) -> Result<T, FilterError> {
        let expr = parse::parse(text)?;
        if let Some(program) = self.program(text, &expr)? {
            return Ok(program);
        }
        let reason = format!("the filter is too large: with this part it needs more than {}", self.most);
        Err(FilterError::at(text, self.too_much(text, &expr).span.clone(), reason))
    }

    /// The program of an expression; `None`: it does not fit.
    fn program(&self, text: &str, expr: &Expr) -> Result<Option<T>, FilterError> {
        let graph = Graph::of(&generate::generate(text, expr, self.check)?);
        if graph.nodes.len() > self.most_nodes {
            return Ok(None);
        }
        let graph = optimise::optimise(graph);
        if graph.entry == Next::Reject {
            return Err(FilterError::at(text, expr.span.clone(), "no packet can match this"));
        }
        Ok((self.lay_out)(&graph))
    }

    /// The first part of a sequence with which the program no longer fits.
    fn too_much<'a>(&self, text: &str, whole: &'a Expr) -> &'a Expr {
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
        let too_large = |(beginning, _): &(&Expr, _)| matches!(self.program(text, beginning), Ok(None));
        let first = beginnings.partition_point(|beginning| !too_large(beginning));
        beginnings.get(first).map_or(whole, |(_, last)| last)
    }
}
