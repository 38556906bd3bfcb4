//! Detects expressions that can give a different result for a super-frame than for its segments.
//! [`differs_on_segments`](super::differs_on_segments) calls this module.
//!
//! The segments of a super-frame have the same addresses, protocols and ports. A tap sees the super-frame, but a file
//! contains the segments.

use super::ast::{Arithmetic, Expr, ExprKind, Kind, Operator, Primitive, Protocol, Qualifiers, Relation};

/// Offset of the TCP flags.
const TCP_FLAGS: u32 = 13;
/// The flags that not all segments have: FIN and PSH are only on the last one, CWR only on the first one.
const OF_SOME: u32 = 0x01 | 0x08 | 0x80;

/// Whether the results can differ.
pub(super) fn differs(expr: &Expr) -> bool {
    !has_chain(expr) && answers_differ(expr, false)
}

fn has_chain(expr: &Expr) -> bool {
    match &expr.kind {
        ExprKind::And(left, right) | ExprKind::Or(left, right) => has_chain(left) || has_chain(right),
        ExprKind::Not(inner) => has_chain(inner),
        ExprKind::Primitive(Primitive::Id(Qualifiers { kind, .. }, _)) => *kind == Kind::ProtoChain,
        ExprKind::Primitive(_) => false,
    }
}

/// Whether a segment can match although the super-frame does not. `is_negated`: a `not` is around the expression. In
/// the reverse case, where only the super-frame matches, the reader drops the segment.
fn answers_differ(expr: &Expr, is_negated: bool) -> bool {
    match &expr.kind {
        ExprKind::And(left, right) | ExprKind::Or(left, right) => {
            answers_differ(left, is_negated) || answers_differ(right, is_negated)
        }
        ExprKind::Not(inner) => answers_differ(inner, !is_negated),
        ExprKind::Primitive(Primitive::Relation(left, relation, right)) => {
            let asks_for_flags = *relation == Relation::NotEqual
                && matches!(right, Arithmetic::Number(0))
                && masked_flags(left).is_some();
            // If a segment has a flag, the super-frame has it, too.
            (is_negated || !asks_for_flags) && (changes(left) || changes(right))
        }
        ExprKind::Primitive(_) => false,
    }
}

/// Whether a value can be different for a segment.
fn changes(value: &Arithmetic) -> bool {
    match value {
        Arithmetic::Number(_) => false,
        Arithmetic::Length => true,
        Arithmetic::Field { protocol, index, size } => match **index {
            Arithmetic::Number(at) => !is_shared(*protocol, at, at.saturating_add(u32::from(*size))),
            _ => true,
        },
        Arithmetic::Negated(inner) => changes(inner),
        Arithmetic::Binary(_, left, right) => {
            masked_flags(value).is_none_or(|mask| mask & OF_SOME != 0) && (changes(left) || changes(right))
        }
    }
}

/// The mask of an expression such as `tcp[tcpflags] & tcp-syn`.
fn masked_flags(value: &Arithmetic) -> Option<u32> {
    let Arithmetic::Binary(Operator::And, left, right) = value else { return None };
    let (field, mask) = match (&**left, &**right) {
        (field, Arithmetic::Number(mask)) | (Arithmetic::Number(mask), field) => (field, *mask),
        _ => return None,
    };
    let Arithmetic::Field { protocol: Protocol::Tcp, index, size: 1 } = field else { return None };
    matches!(**index, Arithmetic::Number(TCP_FLAGS)).then_some(mask)
}

/// Whether these bytes are the same in the super-frame and all segments.
fn is_shared(protocol: Protocol, from: u32, to: u32) -> bool {
    let parts: &[(u32, u32)] = match protocol {
        Protocol::Ether => &[(0, 14)],
        // All bytes except the length, the identification and the checksum.
        Protocol::Ip => &[(0, 2), (6, 10), (12, 20)],
        Protocol::Ip6 => &[(0, 4), (6, 40)],
        Protocol::Tcp => &[(0, 4), (8, 13), (14, 16), (18, 20)],
        Protocol::Udp => &[(0, 4)],
        // Packets of other protocols are not segmented.
        _ => return true,
    };
    parts.iter().any(|(start, end)| *start <= from && to <= *end)
}
