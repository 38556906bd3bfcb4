//! Detects expressions that can give a different result for a super-frame than for its segments. [`filter`](super)
//! calls it.
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

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use proptest::prelude::*;

    use super::super::{compile, differs_on_segments};
    use crate::frame::{Frame, Wire};

    const SAME: [&str; 16] = [
        "tcp port 443",
        "host 10.0.0.1 and not udp",
        "ip6 or vlan",
        "tcp[tcpflags] & (tcp-syn|tcp-rst) != 0",
        "tcp[tcpflags] & (tcp-syn|tcp-fin) != 0",
        "tcp[tcpflags] & tcp-push != 0",
        "tcp[13] & 0x12 = 0x10",
        "not (tcp[13] & 4 != 0)",
        "ip[8] > 3 or ip6[7] > 3",
        "tcp[0:2] = 80",
        "tcp[8:4] = 7",
        "tcp[12] & 0xf0 = 0x50",
        "ether[12:2] = 0x86dd",
        "icmp[0] = 8",
        "ether broadcast",
        "ip6 protochain 6 and less 100",
    ];
    const OTHER: [&str; 10] = [
        "greater 1515",
        "less 1514 or port 7",
        "ip[2:2] > 1500",
        "ip6[4:2] > 1500",
        "ip[4:2] = 7",
        "tcp[4:4] = 7",
        "tcp[tcpflags] & tcp-push = 0",
        "not (tcp[tcpflags] & tcp-fin != 0)",
        "tcp[(tcp[12] >> 4) * 4] = 0x47",
        "ip[20] = 7",
    ];

    #[test]
    fn what_not_all_segments_have_makes_a_difference() {
        for text in SAME {
            assert!(!differs_on_segments(text), "{text}");
        }
        for text in OTHER {
            assert!(compile(text).is_ok() && differs_on_segments(text), "{text}");
        }
        assert!(!differs_on_segments("no filter at all"));
    }

    /// A TCP super-frame with these flags.
    fn super_frame(is_v6: bool, flags: u8, payload: u16) -> Vec<u8> {
        let (payload_len, len) = ((20 + payload).to_be_bytes(), (40 + payload).to_be_bytes());
        let network = match is_v6 {
            true => [&[0x86, 0xdd, 0x60, 0, 0, 0][..], &payload_len, &[6, 64], &[9; 32]].concat(),
            false => {
                [&[8, 0, 0x45, 0][..], &len, &[0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]].concat()
            }
        };
        let tcp =
            [&[0, 80, 1, 0xbb][..], &[0; 4], &[0, 0, 0, 7], &[0x50, flags, 0xff, 0xff, 0, 0, 0, 0]].concat();
        [vec![2; 12], network, tcp, vec![0x47; payload.into()]].concat()
    }

    proptest! {
        /// If the kernel's filter rejects a super-frame, none of its segments would have matched.
        #[test]
        fn no_segment_matches_where_the_super_frame_does_not(
            is_v6: bool, flags: u8, payload in 101..3000_u16, text in prop::sample::select(SAME.to_vec()),
        ) {
            prop_assume!(!text.contains("protochain"));
            let program = compile(text).unwrap();
            let bytes = super_frame(is_v6, flags, payload);
            let len = bytes.len() as u32;
            let mut wire = Wire::default();
            let mut frames = wire.frames(&Frame { bytes: &bytes, len, gso_size: 100, vlan: None });
            let mut count = 0;
            while let Some(segment) = frames.next_frame() {
                count += 1;
                let matches = program.matches(segment.bytes, segment.len);
                prop_assert!(!matches || program.matches(&bytes, len), "{text}");
            }
            prop_assert!(count > 1);
        }
    }
}
