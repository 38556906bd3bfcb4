//! The capture filter: an expression of pcap-filter(7), compiled to a program.
//!
//! ```text
//! text ─ lexer ─ parse ─► ast ─ generate ─► tree of tests ─► graph ─ optimise ─► graph ─ classic ─► Program ─ ebpf ─► eBPF
//! ```
//!
//! Pure, called by `cmd`, by the readers of the mirrors' filters, and by the dataplane. [`compile`] makes classic BPF,
//! which people read and the host evaluates. [`ebpf::translate`] makes the program of the kernel from it.
//!
//! No crate does this for us: the crates that compile the language (`pktbaffle` is the best of them, and young) bind
//! filters less tightly.

mod ast;
pub mod classic;
pub mod ebpf;
mod facts;
mod generate;
mod graph;
mod lexer;
mod names;
mod optimise;
mod parse;
mod segments;
mod tree;
mod value;

use std::ops::Range;

use thiserror::Error;

use self::{
    ast::{Expr, ExprKind},
    classic::MAX_INSTRUCTIONS,
    graph::{Graph, Next},
};

pub use self::classic::Program;

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

/// The largest number of tests that the compiler optimises: more than fit, because a test is at least one instruction.
/// Filters come from authors who may not be trusted, and must not keep the agent busy.
const MAX_NODES: usize = 2 * MAX_INSTRUCTIONS;

/// Compiles an expression.
///
/// The answers of the program are those of libpcap's program without its optimiser, also on truncated frames.
pub fn compile(text: &str) -> Result<Program, FilterError> {
    let expr = parse::parse(text)?;
    if let Some(program) = program(text, &expr)? {
        return Ok(program);
    }
    let reason = format!(
        "the filter is too large: with this part it needs more than {MAX_INSTRUCTIONS} instructions, or longer jumps \
         than the kernel has"
    );
    Err(FilterError::at(text, too_much(text, &expr).span.clone(), reason))
}

/// Whether an expression can say something else of a TCP or UDP super-frame than of one of its segments: it looks at a
/// length, a sequence number, a checksum, the payload, or the flags of TCP that not all segments have. An expression with
/// `protochain` counts as one that cannot, because it takes a reader long to compile.
pub fn differs_on_segments(text: &str) -> bool {
    parse::parse(text).is_ok_and(|expr| segments::differs(&expr))
}

/// The program of an expression; `None`: it does not fit.
fn program(text: &str, expr: &Expr) -> Result<Option<Program>, FilterError> {
    let graph = Graph::of(&generate::generate(text, expr)?);
    if graph.nodes.len() > MAX_NODES {
        return Ok(None);
    }
    let graph = optimise::optimise(graph);
    if graph.entry == Next::Reject {
        return Err(FilterError::at(text, expr.span.clone(), "no packet can match this"));
    }
    let fits = |program: &Program| ebpf::translate(program, ebpf::Access::Direct).is_some();
    Ok(classic::lay_out(&graph).filter(fits))
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
    let too_large = |(beginning, _): &(&Expr, _)| matches!(program(text, beginning), Ok(None));
    let first = beginnings.partition_point(|beginning| !too_large(beginning));
    beginnings.get(first).map_or(whole, |(_, last)| last)
}
