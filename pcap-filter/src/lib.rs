//! The language of pcap-filter(7), compiled to classic BPF.
//!
//! ```text
//! text ─ lexer ─ parse ─► ast ─ generate ─► tree of tests ─► graph ─ optimise ─► graph ─ classic ─► Program
//! ```
//!
//! Pure: no libpcap, no I/O. The cost of compiling an expression is bounded, because its author may be a stranger.
//!
//! ```
//! let program = pcap_filter::compile("udp port 53")?;
//! assert!(!program.matches(&[0; 60], 60));
//! println!("{}", program.explain());
//! # Ok::<(), pcap_filter::FilterError>(())
//! ```

mod ast;
pub mod classic;
mod facts;
mod generate;
mod graph;
mod lexer;
mod names;
mod optimise;
mod parse;
mod segments;
#[cfg(test)]
mod tests;
mod tree;
mod value;

use std::{collections::BTreeSet, ops::Range};

use thiserror::Error;

use self::{
    ast::{Arithmetic, Expr, ExprKind, Primitive, Protocol},
    classic::MAX_INSTRUCTIONS,
    graph::{Graph, Next},
};

pub use self::classic::Program;

/// Why an expression cannot be compiled.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{reason}: {} at byte {position} of the filter", if part.is_empty() { "the end".to_owned() } else { format!("{part:?}") })]
pub struct FilterError {
    /// Offset of the invalid part, in bytes from the start of the expression.
    pub position: usize,
    /// The invalid part. Empty: the end of the expression.
    pub part: String,
    /// The problem.
    pub reason: String,
}

impl FilterError {
    fn at(text: &str, span: Range<usize>, reason: impl Into<String>) -> Self {
        let part = text.get(span.clone()).unwrap_or_default().to_owned();
        Self { position: span.start, part, reason: reason.into() }
    }

    /// The error for an expression whose program does not fit.
    pub fn too_large(text: &str) -> Self {
        let reason = format!(
            "the filter is too large: it needs more than {MAX_INSTRUCTIONS} instructions, or longer jumps than the \
             kernel has; use fewer parts"
        );
        Self::at(text, text.len() - text.trim_start().len()..text.trim_end().len(), reason)
    }

    /// Returns this error, or the other one if its part ends farther on in the expression.
    fn or_farther(self, other: Self) -> Self {
        let end = |error: &Self| error.position + error.part.len();
        if end(&other) > end(&self) { other } else { self }
    }
}

/// Maximum number of tests that the compiler optimises. It is more than fit, because a test is at least one
/// instruction.
const MAX_NODES: usize = 2 * MAX_INSTRUCTIONS;

/// Maximum work for one filter, counted in facts that the optimiser examines and tests that are laid out: some
/// milliseconds. The authors of filters are not trusted, and must not keep the agent busy. The bound is not a time, so
/// that every node decides alike.
const MAX_WORK: usize = 250_000;

/// The work for a test in each step, in addition to its facts.
const PER_TEST: usize = 8;

/// The remaining work for a filter.
struct Work(usize);

impl Work {
    /// Takes an amount of work. `None`: less than that is left, and from then on nothing is.
    fn take(&mut self, units: usize) -> Option<()> {
        let left = self.0.checked_sub(units);
        self.0 = left.unwrap_or(0);
        left.map(drop)
    }
}

/// Compiles an expression.
///
/// The program gives the same answers as libpcap's unoptimised program, also on truncated frames.
pub fn compile(text: &str) -> Result<Program, FilterError> {
    let expr = parse::parse(text)?;
    let mut work = Work(MAX_WORK);
    if let Some(program) = program(text, &expr, &mut work)? {
        return Ok(program);
    }
    if work.0 == 0 {
        let reason = "the filter is too much work to compile: use fewer parts";
        return Err(FilterError::at(text, expr.span, reason));
    }
    Err(FilterError::too_large(text))
}

/// The protocols over IPv4 and IPv6 whose fields an expression reads, as in `tcp[13]`, with their numbers. As in
/// libpcap, these are the fields over IPv4: packets over IPv6 never have them.
pub fn fields_over_ipv4(text: &str) -> BTreeSet<(&'static str, u8)> {
    fn of_arithmetic(arithmetic: &Arithmetic, found: &mut BTreeSet<(&'static str, u8)>) {
        match arithmetic {
            Arithmetic::Number(_) | Arithmetic::Length => {}
            Arithmetic::Negated(inner) => of_arithmetic(inner, found),
            Arithmetic::Binary(_, left, right) => {
                of_arithmetic(left, found);
                of_arithmetic(right, found);
            }
            Arithmetic::Field { protocol, index, .. } => {
                of_arithmetic(index, found);
                found.extend(match protocol {
                    Protocol::Tcp => Some(("tcp", 6)),
                    Protocol::Udp => Some(("udp", 17)),
                    Protocol::Sctp => Some(("sctp", 132)),
                    Protocol::Pim => Some(("pim", 103)),
                    _ => None,
                });
            }
        }
    }
    fn of(expr: &Expr, found: &mut BTreeSet<(&'static str, u8)>) {
        match &expr.kind {
            ExprKind::And(left, right) | ExprKind::Or(left, right) => {
                of(left, found);
                of(right, found);
            }
            ExprKind::Not(inner) => of(inner, found),
            ExprKind::Primitive(Primitive::Relation(left, _, right)) => {
                of_arithmetic(left, found);
                of_arithmetic(right, found);
            }
            ExprKind::Primitive(_) => {}
        }
    }
    let mut found = BTreeSet::new();
    if let Ok(expr) = parse::parse(text) {
        of(&expr, &mut found);
    }
    found
}

/// Whether an expression can give a different result for a TCP or UDP super-frame than for one of its segments: it
/// reads a length, a sequence number, a checksum, the payload, or TCP flags that not all segments have. Always false
/// for an expression with `protochain`, because compiling it takes a reader long.
pub fn differs_on_segments(text: &str) -> bool {
    parse::parse(text).is_ok_and(|expr| segments::differs(&expr))
}

/// Compiles a parsed expression. `None`: the program does not fit, or needs too much work.
fn program(text: &str, expr: &Expr, work: &mut Work) -> Result<Option<Program>, FilterError> {
    let graph = Graph::of(&generate::generate(text, expr)?);
    if work.take(PER_TEST * graph.nodes.len()).is_none() || graph.nodes.len() > MAX_NODES {
        return Ok(None);
    }
    let Some(graph) = optimise::optimise(graph, work) else { return Ok(None) };
    if graph.entry == Next::Reject {
        return Err(FilterError::at(text, expr.span.clone(), "no packet can match this"));
    }
    // Laying out and translating a test costs about as much as four rounds of the optimiser.
    if work.take(4 * PER_TEST * graph.nodes.len()).is_none() {
        return Ok(None);
    }
    Ok(classic::lay_out(&graph))
}
